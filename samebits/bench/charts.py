"""Pictures of what was measured, as PNG files. Only here is matplotlib known, the extra ``bench``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samebits.bench.evidence import Row
from samebits.bench.launches import CLASSES
from samebits.bench.ratios import groups

MISSING = 'there is no matplotlib here, so no chart; pip install "samebits[bench]" brings it'
COLOURS = {
    "gemm": "#4c6a92",
    "attention": "#8fa8c8",
    "ours": "#c2703d",
    "copies": "#b8b8b8",
    "other": "#7a7a7a",
}


def available() -> bool:
    """Whether charts can be drawn here."""
    return find_spec("matplotlib") is not None


_MOST_COLUMNS = 4


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    # A figure of its own, without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def ops_chart(rows: Iterable[Row], path: Path) -> Path | None:
    """Draw every timed case: time beside eager's, and the share of the copy bandwidth.

    Returns
    -------
    Path or None
        ``None`` where no row has a time: rows whose bits differ have none, and nothing is drawn for them.
    """
    timed = [row for row in rows if row["us_fused"] is not None]
    if not timed:
        return None
    labels = [f"{row['op']} {row['case']} {row['dtype']}" for row in timed]
    figure, (left, right) = _figure(13, 1.5 + 0.32 * len(timed), 2)
    places = range(len(timed))
    left.barh([p - 0.2 for p in places], [row["us_eager"] for row in timed], 0.4, color=COLOURS["other"], label="eager")
    bars = left.barh(
        [p + 0.2 for p in places], [row["us_fused"] for row in timed], 0.4, color=COLOURS["ours"], label="samebits"
    )
    marks = [f"{row['us_fused']:.1f} us, {row['us_eager'] / row['us_fused']:.1f}x" for row in timed]
    left.bar_label(bars, marks, padding=3, fontsize=8)
    left.set_xscale("log")
    left.set_xlim(left=1)
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter("")
    left.set_xlabel("microseconds a call (bits equal in every row)")
    left.set_yticks(list(places), labels, fontsize=8)
    left.invert_yaxis()
    left.legend(loc="lower right", fontsize=8)
    # An op that calls a product of a library is not bound by bandwidth and has no share.
    shares = [row["copy_share"] for row in timed]
    bars = right.barh(list(places), [100 * (share or 0) for share in shares], color=COLOURS["ours"])
    marks = ["" if share is None else f"{100 * share:.0f} %" for share in shares]
    right.bar_label(bars, marks, padding=3, fontsize=8)
    right.axvline(100, color="black", linewidth=0.8)
    right.set_xlabel("share of the copy bandwidth of the same run, percent")
    right.set_yticks([])
    right.invert_yaxis()
    return _save(figure, path)


def models_chart(rows: Iterable[Row], path: Path) -> Path | None:
    """Draw the milliseconds of every variant, a panel for each model, size and batch; ``None`` without a time."""
    found = {key: [row for row in group.values() if row["ms"] is not None] for key, group in groups(rows).items()}
    found = {key: timed for key, timed in found.items() if timed}
    if not found:
        return None
    columns = min(_MOST_COLUMNS, len(found))
    lines = -(-len(found) // columns)
    figure, panels = _figure(5.5 * columns, 3.6 * lines, columns, lines)
    for panel in panels[len(found) :]:
        panel.axis("off")
    for panel, ((model, size, batch), timed) in zip(panels, found.items(), strict=False):
        colours = [
            COLOURS["ours"]
            if row["variant"].startswith("ours")
            else COLOURS["attention"]
            if row["bits_equal"]
            else "#d8d8d8"
            for row in timed
        ]
        bars = panel.barh([row["variant"] for row in timed], [row["ms"] for row in timed], color=colours)
        marks = [f"{row['ms']:.1f}{' =' if row['bits_equal'] else ''}" for row in timed]
        panel.bar_label(bars, marks, padding=3, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(f"{model} {size} x {size}, batch {batch}", fontsize=10)
        panel.set_xlabel('ms a forward; "=": eager\'s bits')
        panel.tick_params(labelsize=8)
    return _save(figure, path)


def quant_chart(rows: Iterable[Row], path: Path) -> Path | None:
    """Draw the GPU time of every variant in FP8 by class, one below the other; ``None`` without a time."""
    timed = groups(row for row in rows if row["ms_gemm"] is not None)
    bars = {
        (f"{model} {size}, batch {batch}: " if len(timed) > 1 else "")
        + f"{row['variant']}{' =' if row['bits_equal'] else ''}": {
            kind: row[f"ms_{kind}"] for kind in ("gemm", "attention", "other")
        }
        for (model, size, batch), group in timed.items()
        for row in group.values()
    }
    title = 'one forward in FP8 and bf16; "=": the bits of its unfused model'
    return stacked_chart(bars, path, title, classes=("gemm", "attention", "other")) if bars else None


def stacked_chart(
    bars: Mapping[str, Mapping[str, float]],
    path: Path,
    title: str,
    floor_ms: Sequence[tuple[str, float]] = (),
    classes: Sequence[str] = CLASSES,
) -> Path:
    """Draw one stacked bar for each of ``bars``, by class of kernel, in ms; ``floor_ms`` are lines with a name."""
    figure, (panel,) = _figure(9, 1.6 + 0.7 * len(bars))
    names = list(bars)
    before = [0.0] * len(names)
    for kind in classes:
        values = [bars[name].get(kind, 0.0) for name in names]
        drawn = panel.barh(names, values, left=before, color=COLOURS[kind], label=kind)
        largest = max((sum(bar.values()) for bar in bars.values()), default=0.0)
        texts = [f"{value:.1f}" if value > 0.04 * largest else "" for value in values]
        panel.bar_label(drawn, texts, label_type="center", fontsize=8, color="white")
        before = [a + b for a, b in zip(before, values, strict=True)]
    for number, (name, ms) in enumerate(floor_ms):
        panel.axvline(ms, color="black", linewidth=1, linestyle=("--", ":", "-.")[number % 3], label=name)
    panel.invert_yaxis()
    panel.set_xlabel("ms on the GPU, one forward")
    panel.set_title(title, fontsize=10)
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=4, fontsize=8, frameon=False)
    return _save(figure, path)
