"""``samebits prove``: rounding steps on every input, trees of sums, rows by the million, wrong kernels caught."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click


def _parse_shapes(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[tuple[int, int]]:
    """Read ``ROWSxWIDTH``; a callback of click."""
    shapes = []
    for text in value:
        found = re.fullmatch(r"([1-9][0-9]{0,8})[xX]([1-9][0-9]{0,5})", text.strip())
        if found is None:
            raise click.BadParameter(f"expected ROWSxWIDTH, such as 1985x3072, got {text!r}.")
        shapes.append((int(found[1]), int(found[2])))
    return shapes


@click.command()
@click.argument("names", metavar="[OP ...]", nargs=-1)
@click.option(
    "--quick", is_flag=True, help="Fewer rows and row counts; the steps run on their whole domains all the same."
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=_parse_shapes,
    metavar="ROWSxWIDTH",
    help="Also compare whole calls at this shape; can be given several times.",
)
@click.option("--device", help="cpu, cuda or cuda:N [default: cuda where there is one].")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON and nothing else.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for prove.json and prove.html. [default: evidence/<name of the GPU> of this checkout for a full proof "
    "of all ops on a GPU; else they are not written]",
)
@click.option("--commit", help="The commit this source was copied from, where there is no git history.")
def prove(
    names: tuple[str, ...],
    quick: bool,
    shapes: list[tuple[int, int]],
    device: str | None,
    as_json: bool,
    out: Path | None,
    commit: str | None,
) -> None:
    """Prove OPs (default: all) on the GPU at hand against its own eager.

    Every rounding step runs on every input, sums are compared by their trees, whole calls on adversarial and
    random rows, and kernels made wrong on purpose must be caught. Without a GPU the machinery runs on a part and says
    what that shows.

    Exit code 0: all equal and every control caught. 1: not. 2: usage.
    """
    import torch

    from samebits.loading.device import find_device
    from samebits.ops import OPS, by_name

    try:
        ops = list(dict.fromkeys(by_name(name) for name in names)) or list(OPS)
    except KeyError as error:
        raise click.UsageError(str(error.args[0])) from error
    where = find_device(device)
    _check_kernels(where)
    _check_out(out)
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        torch.cuda.set_device(where)
    from samebits.proof.prove import prove as run
    from samebits.proof.rows import Shape

    wanted = [Shape(*shape) for shape in shapes]
    _check_shapes(ops, wanted, where)
    with _bar() as progress:
        proof = run(ops, where, quick=quick, shapes=wanted, progress=progress)
    options = [*(["--quick"] if quick else []), *(f"--shape {shape}" for shape in wanted), *names]
    document = _document(proof, ops, " ".join(["samebits prove", *options]), commit)
    folder = out or (_evidence(where) if where.type == "cuda" and not (quick or names) else None)
    written = _write(document, proof, folder) if folder else "not written; --out DIR writes prove.json and prove.html"
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        _show(proof)
        click.echo(f"\n{written}")
    click.get_current_context().exit(0 if proof.good else 1)


def _check_kernels(device: Any) -> None:
    from samebits import jit

    reason = jit.unavailable(device, host=True)
    if reason is not None:
        raise click.UsageError(f"prove cannot compile for {device}: {reason}.")


def _check_out(out: Path | None) -> None:
    """Refuse a folder that could not be written to at the end."""
    if out is None:
        return
    import tempfile

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out, prefix=".samebits-"):
            pass
    except OSError as error:
        raise click.UsageError(f"--out {out}: cannot be written to ({error.strerror or error}).") from None


def _check_shapes(ops: list[Any], shapes: list[Any], device: Any) -> None:
    """Refuse a shape that none of the ops takes."""
    from samebits.proof.forms import FORMS
    from samebits.proof.prove import dtypes_of
    from samebits.proof.rows import fits

    for shape in shapes:
        reasons: list[str | None] = []
        for op in ops:
            if not op.moves_bytes:
                reasons.append("its shapes are those of its own cases")
                continue
            form = FORMS[op.name]
            first = dtypes_of(op)[0]
            reasons.append(fits(op, form, first, shape, form.variants_of(first)[0], device))
        if all(reasons):
            raise click.UsageError(f"--shape {shape}: no op takes it; {ops[0].name} says: {reasons[0]}.")


def _document(proof: Any, ops: list[Any], command: str, commit: str | None) -> dict[str, Any]:
    from samebits.bench import evidence
    from samebits.environment import fingerprint

    document: dict[str, Any] = proof.document(command, fingerprint(), evidence.source_of(ops, commit))
    return document


def _evidence(device: Any) -> Path:
    import torch

    from samebits.bench import evidence

    return evidence.PACKAGE.parent / "evidence" / evidence.folder_name(torch.cuda.get_device_name(device))


def _write(document: dict[str, Any], proof: Any, folder: Path) -> str:
    from samebits.proof import page, record

    # The record first: whatever becomes of the page, what was found is kept.
    path = record.write(document, folder)
    if not page.available():
        return f"written: {path}; {page.MISSING}"
    shown = record.put(path.with_suffix(".html"), page.render(document, proof.pictures))
    return f"written: {path.name} and {shown.name} in {folder}"


@contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield progress


def _show(proof: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for head in ("op", "dtype", "on every input", "sampled", "rows", "wrong"):
        table.add_column(head, justify="left" if head in ("op", "dtype") else "right")
    for (op, dtype), rows in _groups(proof.rows).items():
        every = sum(row["method"] == "exhaustive" for row in rows)
        random = sum(row["checked"] for row in rows if row["method"] == "random")
        wrong = sum(bool(row["differ"]) or "error" in row or not row["checked"] for row in rows)
        table.add_row(op, dtype, f"{every} steps", f"{len(rows) - every}", f"{random:,}", str(wrong))
    console.print(table)
    if not proof.rows:
        console.print("Nothing was compared: calls into torch's libraries are only shown on a GPU.")
    for row in proof.rows:
        if row["differ"] or "error" in row or not row["checked"]:
            told = row.get("error") or row.get("first") or "nothing was compared"
            console.print(
                f"WRONG {row['op']} {row['dtype']} {row['step']}, {row['domain']}: {row['differ']:,} differ; {told}"
            )
    for verdict in proof.controls:
        if verdict.caught is False:
            console.print(f"NOT CAUGHT {verdict.name}: {verdict.seen}")
    console.print(
        f"\n{proof.distinct:,} results and rows compared in {proof.seconds:.0f} s; "
        f"controls caught: {proof.caught} of {proof.planted}"
    )
    console.print(proof.shows)


def _groups(rows: Any) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["dtype"]), []).append(row)
    return groups
