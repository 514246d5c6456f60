"""Tables of what was measured where, written into the README and the op pages from ``evidence/``.

``python -m samebits.bench.tables`` rewrites every block of Markdown between ``<!-- measured: NAME -->`` and
``<!-- /measured -->``; with ``--check`` it only says which are out of date. Nobody types a figure into them. A
figure that was measured with another source than the present one is not shown: a changed kernel voids its claim.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samebits.bench import evidence, pipelines, proofs, quant_ratios, ratios
from samebits.bench.evidence import Record, Row
from samebits.bench.targets import Target
from samebits.ops import OPS, Op

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- measured: (?P<name>\w+) -->\n).*?(<!-- /measured -->)", re.DOTALL)

README_HEADS = ("what", "where", "bits", "eager", "samebits", "faster", "of copy bandwidth")
OP_HEADS = ("case", "dtype", "bits", "rows compared", "eager us", "fused us", "faster", "of copy bandwidth")
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Machine:
    """What one folder below ``evidence/`` says."""

    folder: str
    records: Mapping[str, Record]
    proof: Mapping[str, Any] | None = None
    """What ``samebits prove`` found there."""

    @property
    def name(self) -> str:
        """The GPU and the torch release, for the column ``where``."""
        records = (record.environment for record in self.records.values())
        environment = next(records, self.proof["environment"] if self.proof else {})
        gpu = (environment.get("gpu") or {}).get("name", self.folder)
        torch = environment.get("torch")
        version = torch.get("version") if isinstance(torch, Mapping) else torch
        return f"{gpu}, torch {version}"


def machines(folder: Path) -> list[Machine]:
    """Every machine that left evidence, by the name of its folder.

    Raises
    ------
    EvidenceError
        A file there is not what the tool writes.
    """
    found = []
    for path in sorted(folder.glob("*/")):
        files = {file.stem: file for file in sorted(path.glob("*.json"))}
        proof = files.pop(proofs.KIND, None)
        records = {name: evidence.read(file) for name, file in files.items()}
        if records or proof is not None:
            found.append(Machine(path.name, records, None if proof is None else proofs.read(proof)))
    return found


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)


def _time(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.1f}{unit}"


def _ratio(eager: float | None, ours: float | None) -> str:
    return f"{eager / ours:.2f}x" if eager and ours else ""


def _share(row: Row) -> str:
    return "" if row["copy_share"] is None else f"{row['copy_share']:.0%}"


def _summary(op: Op, rows: Sequence[Row], where: str) -> list[str]:
    equal = [row for row in rows if row["bits_equal"]]
    compared = sum(row["rows_compared"] for row in equal)
    told = f"equal in {len(equal)} of {len(rows)} cases, {compared:,} rows"
    return [f"`{op.name}`, all cases", where, told, "", "", "", ""]


def _denoiser(row: Row, where: str) -> list[str]:
    told = f"output {'equal' if row['output_equal'] else 'DIFFERENT'}"
    told += f", blocks {row['blocks_equal']}, sampler steps {row['steps_equal']}"
    eager, ours = (
        ", ".join(filter(None, (_time(row[f"ms_{who}"], " ms"), f"{row[f'launches_{who}']:,} launches")))
        for who in ("eager", "ours")
    )
    return [f"{row['model']}, one forward", where, told, eager, ours, _ratio(row["ms_eager"], row["ms_ours"]), ""]


def readme_table(found: Sequence[Machine], ops: Sequence[Op]) -> str:
    """The one table of the README: each denoiser, each op in bf16 at its largest timed case, each op in all cases."""
    lines = [
        _denoiser(row, machine.name)
        for machine in found
        if "denoisers" in machine.records and not evidence.stale(machine.records["denoisers"], ops)
        for row in machine.records["denoisers"].rows
    ]
    if not lines:
        lines.append(["whole denoisers, one forward", "", "not yet measured with this source", "", "", "", ""])
    for op in ops:
        before = len(lines)
        for machine in found:
            rows = _rows_of(machine, op)
            # The reference of a multiply-add that rounds once is no eager chain, but its emulation in many of them.
            timed = [row for row in rows if _is_timed(row) and not row["case"].endswith(" fma")]
            if timed:
                row = max(timed, key=lambda row: row["us_fused"])
                eager, fused = row["us_eager"], row["us_fused"]
                told = f"equal, {row['rows_compared']:,} rows"
                times = [_time(eager, " us"), _time(fused, " us"), _ratio(eager, fused), _share(row)]
                lines.append([f"`{op.name}` {row['case']} bf16", machine.name, told, *times])
            if rows:
                lines.append(_summary(op, rows, machine.name))
        if len(lines) == before:
            lines.append([f"`{op.name}`", "", "not yet measured with this source", "", "", "", ""])
    return markdown(README_HEADS, lines)


def _is_timed(row: Row) -> bool:
    return row["us_fused"] is not None and row["dtype"] == "bfloat16"


def _rows_of(machine: Machine, op: Op) -> list[Row]:
    record = machine.records.get("ops")
    if record is None or evidence.stale(record, [op]):
        return []
    return [row for row in record.rows if row["op"] == op.name]


def op_cells(row: Row) -> list[str]:
    """One row of ``ops.json`` under ``OP_HEADS``."""
    return [
        row["case"],
        _short(row["dtype"]),
        "equal" if row["bits_equal"] else f"DIFFERENT ({row.get('error', 'no word why')})",
        f"{row['rows_compared']:,}",
        _time(row["us_eager"], ""),
        _time(row["us_fused"], ""),
        _ratio(row["us_eager"], row["us_fused"]),
        _share(row),
    ]


def models_table(found: Sequence[Machine], ops: Sequence[Op]) -> str:
    """Every variant of one forward on every machine, with what was to be reached, and the command that measured it."""
    return _with_targets(found, ops, "models", ratios.HEADS, ratios.lines, ratios.targets)


def pipeline_table(found: Sequence[Machine], ops: Sequence[Op]) -> str:
    """Whole pictures on every machine, and what the first one after ``apply`` may take more than eager's."""
    return _with_targets(found, ops, "pipeline", pipelines.HEADS, pipelines.lines, pipelines.targets)


def quant_table(found: Sequence[Machine], ops: Sequence[Op]) -> str:
    """One forward in FP8 on every machine, how far absorbed biases move it, and what was to be reached."""
    heads = (quant_ratios.MOVED_HEADS, quant_ratios.moved)
    return _with_targets(found, ops, "quant", quant_ratios.HEADS, quant_ratios.lines, quant_ratios.targets, heads)


def _with_targets(
    found: Sequence[Machine],
    ops: Sequence[Op],
    kind: str,
    heads: Sequence[str],
    lines: Callable[[Iterable[Row]], Iterable[Sequence[str]]],
    targets: Callable[[Iterable[Row]], Iterable[Target]],
    more: tuple[Sequence[str], Callable[[Iterable[Row]], Sequence[Sequence[str]]]] | None = None,
) -> str:
    parts = []
    for machine in found:
        record = machine.records.get(kind)
        if record is None or evidence.stale(record, ops):
            continue
        reached = [
            (target.name, target.wanted, target.got, "yes" if target.reached else "no")
            for target in targets(record.rows)
        ]
        parts.append(f"{machine.name}, by `{record.command}`:\n\n{markdown(heads, lines(record.rows))}")
        if more is not None and (further := more[1](record.rows)):
            parts.append(markdown(more[0], further))
        if reached:
            parts.append(markdown(("figure", "wanted", "got", "reached"), reached))
    return "\n".join(parts) or "Not yet measured with this source.\n"


def proof_table(found: Sequence[Machine], ops: Sequence[Op]) -> str:
    """What was proved on every machine, op by op, the controls, and every step that was only sampled."""
    parts = []
    for machine in found:
        proof = machine.proof
        lines = [] if proof is None else proofs.table_lines(proof, ops)
        if proof is None or not lines:
            continue
        controls = proof["controls"]
        parts.append(
            f"{machine.name}, by `{proof['command']}` in {proof['seconds']:.0f} s; wrong kernels caught: "
            f"{controls['caught']} of {controls['planted']}.\n\n{markdown(proofs.HEADS, lines)}"
        )
        sampled = proofs.sampled_lines(proof, ops)
        if sampled:
            heads = ("step that is only sampled", "dtype", "domain", "results compared")
            parts.append(f"Too many inputs for all of them:\n\n{markdown(heads, sampled)}")
    return "\n".join(parts) or "Not yet proved with this source.\n"


def op_table(found: Sequence[Machine], op: Op) -> str:
    """The measured section of one op's page: what was timed, what was compared only, and the command, by machine."""
    parts = []
    for machine in found:
        rows = _rows_of(machine, op)
        if not rows:
            continue
        shown = [row for row in rows if row["us_fused"] is not None or not row["bits_equal"]]
        lines = [op_cells(row) for row in shown]
        record = machine.records["ops"]
        parts.append(f"{machine.name}, by `{record.command}`:\n\n{markdown(OP_HEADS, lines)}")
        parts.append(_compared_only([row for row in rows if row not in shown]))
    return "\n".join(filter(None, parts)) or "Not yet measured with this source.\n"


def _compared_only(rows: Sequence[Row]) -> str:
    """One paragraph for the rows whose bits were equal and whose time nobody took."""
    dtypes: dict[str, list[str]] = {}
    for row in rows:
        dtypes.setdefault(row["case"], []).append(_short(row["dtype"]))
    if not dtypes:
        return ""
    names = "; ".join(f"{case} ({', '.join(kinds)})" for case, kinds in dtypes.items())
    total = sum(row["rows_compared"] for row in rows)
    return f"Compared and not timed, {len(rows)} cases and {total:,} rows, every bit equal: {names}.\n"


def render(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with every measured block written anew.

    Raises
    ------
    KeyError
        A block has a name that no table has.
    """
    return BLOCK.sub(lambda m: f"{m[1]}\n{tables[m['name']]()}\n{m[3]}", text)


def _with_blocks(docs: Path) -> list[Path]:
    return [page for name in ("performance.md", "prove.md", "quant.md") if (page := docs / name).exists()]


def pages(root: Path = ROOT) -> list[Path]:
    """The files that hold measured blocks."""
    return [root / "README.md", *sorted((root / "docs" / "ops").glob("*.md")), *_with_blocks(root / "docs")]


def update(root: Path = ROOT, ops: Sequence[Op] = OPS, *, write: bool = True) -> list[Path]:
    """Bring every measured block below ``root`` up to date; returns the files that were not."""
    found = machines(root / "evidence")
    tables: dict[str, Callable[[], str]] = {
        "readme": partial(readme_table, found, ops),
        "models": partial(models_table, found, ops),
        "pipeline": partial(pipeline_table, found, ops),
        "prove": partial(proof_table, found, ops),
        "quant": partial(quant_table, found, ops),
    }
    for op in ops:
        tables[op.name] = partial(op_table, found, op)
    outdated = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        fresh = render(text, tables)
        if fresh != text:
            outdated.append(page)
            if write:
                page.write_text(fresh, encoding="utf-8")
    return outdated


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m samebits.bench.tables``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m samebits.bench.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is out of date")
    options = parser.parse_args(arguments)
    outdated = update(ROOT, write=not options.check)
    for page in outdated:
        print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
    return 1 if options.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
