"""What rows of ``quant.json`` say about each other: ratios of times, the targets, the tables. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from samebits.bench import evidence
from samebits.bench.ratios import HEADLINE_SIZE, at_most, groups, ratio
from samebits.bench.targets import Target, table

RATIOS = (
    ("fp8 fused + graph / bf16 exact + graph", "fp8_fused_graph", "bf16_exact_graph", 0.75),
    ("fp8 fused / fp8 unfused", "fp8_fused", "fp8_unfused", 0.85),
    ("fp8 absorbed + graph / fp8 fused + graph", "fp8_absorbed_graph", "fp8_fused_graph", None),
)
"""Title, over, under, and at most what at 1024 x 1024 and batch 1, for the models in ``BIASES``."""
BIASES = {"qwen-image": 240}
"""By model: how many biases a forward can absorb. Four in each block: both attention outputs, both MLP outputs. Other
models have one target, their bits."""

_COUNTS = ("launches", "GEMMs", "attentions", "others")
_SPENT = ("GEMM ms", "attention ms", "other ms")
HEADS = ("model", "size", "batch", "variant", "ms", "of unfused", "bits", *_COUNTS, *_SPENT)
MOVED = (
    ("biases absorbed", "biases_absorbed", "{:.0f}"),
    ("output, relative error", "output_relative_error", "{:.2e}"),
    ("output, PSNR", "output_psnr_db", "{:.1f} dB"),
    ("latents, PSNR", "latents_psnr_db", "{:.1f} dB"),
    ("latents, SSIM", "latents_ssim", "{:.4f}"),
)
MOVED_HEADS = ("model", "size", "batch", *(title for title, _, _ in MOVED))


def targets(rows: Iterable[evidence.Row]) -> list[Target]:
    """What was to be reached at 1024 x 1024, batch 1, and whether it was."""
    found = []
    for (model, size, batch), group in groups(rows).items():
        if (size, batch) != (HEADLINE_SIZE, 1):
            continue
        ours = [group[name] for name in ("fp8_fused", "fp8_fused_graph") if name in group]
        told = "not measured" if not ours else "equal" if all(row["bits_equal"] for row in ours) else "DIFFERENT"
        found.append(Target(f"{model}, fp8 fused, every block and the output", "equal", told, told == "equal"))
        if model not in BIASES:
            continue
        for title, over, under, limit in RATIOS:
            if limit is not None:
                found.append(at_most(f"{model}, {title}", ratio(group, over, under), limit, "{:.3f}"))
        absorbed = group.get("fp8_absorbed_graph", {}).get("biases_absorbed")
        told = "not measured" if absorbed is None else f"{absorbed:.0f}"
        wanted = BIASES[model]
        found.append(Target(f"{model}, biases absorbed a forward", str(wanted), told, absorbed == wanted))
    return found


def _bits(row: evidence.Row) -> str:
    if row["bits_equal"]:
        return "equal"
    return "moved" if row["variant"] == "fp8_absorbed_graph" else "DIFFERENT"


def lines(rows: Iterable[evidence.Row]) -> list[tuple[str, ...]]:
    """The cells of the table, a line per row, under ``HEADS``."""
    told = []
    for (model, size, batch), group in groups(rows).items():
        for variant, row in group.items():
            head = (model, str(size), str(batch), variant)
            times = (_form(row["ms"], "{:.2f}"), _form(ratio(group, variant, "fp8_unfused"), "{:.3f}"))
            counts = (f"{row[f'launches{kind}']:,}" for kind in ("", "_gemm", "_attention", "_other"))
            spent = (_form(row[f"ms_{kind}"], "{:.2f}") for kind in ("gemm", "attention", "other"))
            told.append((*head, *times, _bits(row), *counts, *spent))
    return told


def moved(rows: Iterable[evidence.Row]) -> list[tuple[str, ...]]:
    """How far absorbing biases moves the result, against the unfused FP8 model; a line per row that says so."""
    return [
        (row["model"], str(row["size"]), str(row["batch"]), *(_form(row.get(name), form) for _, name, form in MOVED))
        for row in rows
        if any(row.get(name) is not None for _, name, _ in MOVED)
    ]


def quant_table(rows: Sequence[evidence.Row], notes: Sequence[str]) -> str:
    """The rows, their ratios, what moved, and what there is to say about them."""
    told = [
        (f"{model} {size} batch {batch}", *(_form(ratio(group, over, under), "{:.3f}") for _, over, under, _ in RATIOS))
        for (model, size, batch), group in groups(rows).items()
    ]
    known = [line for line in told if set(line[1:]) != {"-"}]
    parts = [table(HEADS, lines(rows))]
    parts += [table(("", *(title for title, *_ in RATIOS)), known)] if known else []
    parts += [table(MOVED_HEADS, moved(rows))] if moved(rows) else []
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
