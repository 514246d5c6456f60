"""What lies beside an evidence file for people: the same rows as a Markdown table and as a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from samebits.bench import charts, pipelines, quant_ratios, ratios
from samebits.bench.evidence import Record, Row
from samebits.bench.tables import OP_HEADS, markdown, op_cells
from samebits.bench.targets import Target

TARGET_HEADS = ("target", "wanted", "got", "reached")


def _ops(rows: Sequence[Row]) -> str:
    return markdown(("op", *OP_HEADS), [[f"`{row['op']}`", *op_cells(row)] for row in rows])


def _models(rows: Sequence[Row]) -> str:
    return markdown(ratios.HEADS, ratios.lines(rows))


def _pipeline(rows: Sequence[Row]) -> str:
    return markdown(pipelines.HEADS, pipelines.lines(rows))


def _quant(rows: Sequence[Row]) -> str:
    parts = [markdown(quant_ratios.HEADS, quant_ratios.lines(rows))]
    moved = quant_ratios.moved(rows)
    parts += [markdown(quant_ratios.MOVED_HEADS, moved)] if moved else []
    return "\n".join(parts)


Chart = Callable[[Iterable[Row], Path], Path | None]

_PAGES: dict[str, tuple[str, Callable[[Sequence[Row]], str], Chart | None]] = {
    "ops": ("Every op against eager", _ops, charts.ops_chart),
    "models": ("One forward, every way", _models, charts.models_chart),
    "pipeline": ("Whole pictures", _pipeline, None),
    "quant": ("One forward in FP8", _quant, charts.quant_chart),
}


def page(record: Record, targets: Iterable[Target] = (), notes: Sequence[str] = ()) -> str:
    """A record as a page of Markdown: where it was measured, the rows, what was to be reached, notes."""
    title, rows, _ = _PAGES[record.kind]
    gpu = (record.environment.get("gpu") or {}).get("name", "an unknown GPU")
    parts = [f"# {title}", f"{gpu}, by `{record.command}`. Written by the tool from `{record.kind}.json`."]
    parts.append(rows(record.rows).strip())
    reached = [(target.name, target.wanted, target.got, "yes" if target.reached else "NO") for target in targets]
    if reached:
        parts.append(markdown(TARGET_HEADS, reached).strip())
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def write(
    record: Record, folder: Path, targets: Iterable[Target] = (), notes: Sequence[str] = ()
) -> tuple[list[Path], str | None]:
    """Write ``<kind>.md`` and, for a kind that has a chart and where there is matplotlib, ``<kind>.png`` beside it.

    Returns
    -------
    list of Path, str or None
        What was written, and why a chart is missing, if one is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"{record.kind}.md"
    text.write_text(page(record, targets, notes), encoding="utf-8")
    draw = _PAGES[record.kind][2]
    if draw is None:
        return [text], None
    if not charts.available():
        return [text], charts.MISSING
    drawn = draw(record.rows, folder / f"{record.kind}.png")
    return ([text], "no row has a time, so no chart") if drawn is None else ([text, drawn], None)
