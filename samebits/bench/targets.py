"""What the measured figures must reach, and the short tables that a run prints last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from samebits.bench.evidence import Row

MODULATE_TOKENS = (128, 512, 2048, 4096, 4608)
MODULATE_WIDTH = 3072
QK_ROWS = 9_000_000
QK_REFERENCES = ("diffusers", "native", "torch")
QK_STRIDED_SHAPE = [1, 4224, 30, 128]
COPY_SHARE = 0.75
COPY_SHARE_OF_EVERY_OP = 0.80
SPEEDUP = 5.0
HOST_LAUNCH_US = 8.0


@dataclass(frozen=True)
class Target:
    """One figure, what it must be and what it is."""

    name: str
    wanted: str
    got: str
    reached: bool


def _bits(rows: Sequence[Row]) -> str:
    if not rows:
        return "not measured"
    return "equal" if all(row["bits_equal"] for row in rows) else "DIFFERENT"


def modulate_targets(rows: Iterable[Row]) -> list[Target]:
    """LayerNorm + modulate in bf16 at the token counts of Qwen-Image: bits everywhere, time at 4096 tokens."""
    wanted = {f"1x{tokens}x{MODULATE_WIDTH}": tokens for tokens in MODULATE_TOKENS}
    taken = {
        wanted[row["case"]]: row
        for row in rows
        if row["op"] == "layer_norm_modulate" and row["dtype"] == "bfloat16" and row["case"] in wanted
    }
    found = [taken[tokens] for tokens in MODULATE_TOKENS if tokens in taken]
    complete = len(found) == len(MODULATE_TOKENS)
    told = _bits(found) if complete else f"{len(found)} of {len(MODULATE_TOKENS)} sizes measured"
    targets = [Target("layer_norm_modulate, 128 to 4608 x 3072, bits", "equal", told, told == "equal")]
    row = taken.get(4096)
    timed = row is not None and row["us_fused"] is not None and row["us_eager"] is not None
    speedup = row["us_eager"] / row["us_fused"] if row is not None and timed else None
    share = row["copy_share"] if row is not None and timed else None
    targets.append(_at_least("layer_norm_modulate 4096 x 3072, eager over fused", speedup, SPEEDUP, "{:.2f}x"))
    targets.append(_at_least("layer_norm_modulate 4096 x 3072, share of copy", share, COPY_SHARE, "{:.1%}"))
    return targets


def qk_targets(rows: Iterable[Row]) -> list[Target]:
    """QK norm in bf16: rows compared for each reference, and the strided slices of a fused projection."""
    bf16 = [row for row in rows if row["op"] == "qk_norm" and row["dtype"] == "bfloat16"]
    targets = []
    for reference in QK_REFERENCES:
        swept = [row for row in bf16 if row.get("variant") == reference and "amplitudes" in row["case"]]
        compared = sum(row["rows_compared"] for row in swept)
        told = _bits(swept)
        targets.append(
            Target(
                f"qk_norm, {reference} reference, scales 0.005 to 200",
                f">= {QK_ROWS / 1e6:.0f} M rows, equal",
                f"{compared / 1e6:.2f} M rows, {told}",
                compared >= QK_ROWS and told == "equal",
            )
        )
    shares = [
        row["copy_share"]
        for row in bf16
        if row.get("shape") == QK_STRIDED_SHAPE and row.get("strided") and row["copy_share"] is not None
    ]
    worst = min(shares) if shares else None
    targets.append(_at_least("qk_norm, strided QKV 4224 x 30 x 128, share of copy", worst, COPY_SHARE, "{:.1%}"))
    return targets


def share_targets(rows: Iterable[Row]) -> list[Target]:
    """Every op in bf16 at the largest shape that was timed, a model's real one: its share of the copy bandwidth.

    Of several layouts of that shape the slowest counts.
    """
    timed: dict[str, list[Row]] = {}
    for row in rows:
        if row["dtype"] == "bfloat16" and row["copy_share"] is not None and row.get("shape"):
            timed.setdefault(row["op"], []).append(row)
    targets = []
    for op, found in timed.items():
        largest = max(prod(row["shape"]) for row in found)
        worst = min((row for row in found if prod(row["shape"]) == largest), key=lambda row: row["copy_share"])
        name = f"{op} {worst['case']}, share of copy"
        targets.append(_at_least(name, worst["copy_share"], COPY_SHARE_OF_EVERY_OP, "{:.1%}"))
    return targets


def host_targets(rows: Iterable[Row]) -> list[Target]:
    """Host microseconds of a bound launch. The gate's own budget is for a stub launch: ``samebits.bench.gate_cost``."""
    return [_at_most(f"{row['op']}, host time of a launch", row["us_host_launch"], HOST_LAUNCH_US) for row in rows]


def denoiser_targets(rows: Iterable[Row]) -> list[Target]:
    """Every block, the output and every latent of a sampler equal; fewer launches than eager."""
    targets = []
    for row in rows:
        told = f"blocks {row['blocks_equal']}, output {row['output_equal']}, steps {row['steps_equal']}"
        equal = row["output_equal"] and all(
            text.split("/")[0] == text.split("/")[1] for text in (row["blocks_equal"], row["steps_equal"])
        )
        targets.append(Target(f"{row['model']}, bits", "all equal", told, equal))
        before, after = row["launches_eager"], row["launches_ours"]
        targets.append(
            Target(f"{row['model']}, launches a forward", "fewer", f"{before} -> {after}", 0 < after < before)
        )
    return targets


def _at_least(name: str, value: float | None, wanted: float, form: str) -> Target:
    got = "not measured" if value is None else form.format(value)
    return Target(name, f">= {form.format(wanted)}", got, value is not None and value >= wanted)


def _at_most(name: str, value: float | None, wanted: float) -> Target:
    got = "not measured" if value is None else f"{value:.2f} us"
    return Target(name, f"<= {wanted:g} us", got, value is not None and value <= wanted)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is aligned to the left, the others to the right."""
    cells = [list(heads), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    padded = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in padded)


def targets_table(targets: Iterable[Target]) -> str:
    lines = [(target.name, target.wanted, target.got, "yes" if target.reached else "NO") for target in targets]
    return table(("target", "wanted", "got", "reached"), lines)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def ops_table(rows: Iterable[Row]) -> str:
    """One line per row of ``ops.json``; what differs or failed is told below the table."""
    lines: list[tuple[str, ...]] = []
    told: list[str] = []
    for row in rows:
        eager, fused = row["us_eager"], row["us_fused"]
        lines.append(
            (
                f"{row['op']} {row['case']}",
                row["dtype"],
                _figure(eager, "{:.1f}"),
                _figure(fused, "{:.1f}"),
                _figure(eager / fused if eager and fused else None, "{:.2f}x"),
                _figure(row["copy_share"], "{:.0%}"),
                "equal" if row["bits_equal"] else "DIFFERENT",
                str(row["rows_compared"]),
            )
        )
        if row.get("error"):
            told.append(f"{row['op']} {row['case']}: {row['error']}")
    heads = ("op and case", "dtype", "eager us", "fused us", "faster", "of copy", "bits", "rows compared")
    return "\n".join([table(heads, lines), *told])


def denoisers_table(rows: Iterable[Row]) -> str:
    """One line per row of ``denoisers.json``; what failed is told below the table."""
    lines: list[tuple[str, ...]] = []
    told: list[str] = []
    for row in rows:
        before, after = row["ms_eager"], row["ms_ours"]
        lines.append(
            (
                row["model"],
                row["blocks_equal"],
                "equal" if row["output_equal"] else "VOID" if row.get("void") else "DIFFERENT",
                row["steps_equal"],
                f"{row['launches_eager']} -> {row['launches_ours']}",
                f"{row.get('fused_calls', 0)} / {row.get('eager_calls', 0)}",
                _figure(before, "{:.1f}"),
                _figure(after, "{:.1f}"),
            )
        )
        told.extend(f"{row['model']}: {reason} ({count} calls)" for reason, count in row.get("reasons", {}).items())
        if row.get("error"):
            told.append(f"{row['model']}: {row['error']}")
    heads = ("model", "blocks", "output", "steps", "launches", "calls fused / eager", "eager ms", "ours ms")
    return "\n".join([table(heads, lines), *told])
