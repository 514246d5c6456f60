"""What rows of ``models.json`` say about each other: ratios of times, the targets, the table. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from samebits.bench import evidence
from samebits.bench.targets import Target, table

HEADLINE_SIZE = 1024
WANTED: Mapping[str, Mapping[str, float]] = {
    "z-image": {"eager": 0.63, "compile_graph": 0.95, "floor_graph": 1.07, "compile": 0.98, "ms_other": 6.0},
    "qwen-image": {"eager": 0.69, "compile_graph": 0.90, "floor_graph": 1.07, "compile": 0.94, "ms_other": 8.5},
}
"""By model, at 1024 x 1024 and batch 1: what ours + graph may take at most of eager, of torch.compile + graph and of
the floor, what ours may take of torch.compile, both without a graph, and its ms outside GEMM and attention."""

Groups = dict[tuple[str, int, int], dict[str, evidence.Row]]


def groups(rows: Iterable[evidence.Row]) -> Groups:
    """Rows by (model, size, batch), then by variant; the models as they come, each from small to large."""
    found: Groups = {}
    models: dict[str, int] = {}
    for row in rows:
        models.setdefault(row["model"], len(models))
        found.setdefault((row["model"], row["size"], row["batch"]), {})[row["variant"]] = row
    return dict(sorted(found.items(), key=lambda item: (models[item[0][0]], item[0][2], item[0][1])))


def ratio(group: Mapping[str, evidence.Row], over: str, under: str) -> float | None:
    """Time of one variant over another's, or ``None`` where one of them has no time."""
    times = [group[name]["ms"] if name in group else None for name in (over, under)]
    return None if times[0] is None or times[1] is None else float(times[0] / times[1])


RATIOS = (
    ("ours + graph / eager", "ours_graph", "eager"),
    ("ours + graph / compile + graph", "ours_graph", "compile_graph"),
    ("ours + graph / floor", "ours_graph", "floor_graph"),
    ("ours / compile", "ours", "compile"),
)


def targets(rows: Iterable[evidence.Row]) -> list[Target]:
    """What was to be reached at 1024 x 1024, batch 1, and whether it was; only models that were run."""
    found = []
    for (model, size, batch), group in groups(rows).items():
        limits = WANTED.get(model)
        if limits is None or (size, batch) != (HEADLINE_SIZE, 1):
            continue
        ours = [group[name] for name in ("ours", "ours_graph") if name in group]
        told = "not measured" if not ours else "equal" if all(row["bits_equal"] for row in ours) else "DIFFERENT"
        found.append(Target(f"{model}, every block and the output", "equal", told, told == "equal"))
        for title, over, under in RATIOS:
            found.append(at_most(f"{model}, {title}", ratio(group, over, under), limits[under], "{:.3f}"))
        other = group["ours"]["ms_other"] if "ours" in group else None
        found.append(at_most(f"{model}, ours, ms outside GEMM and attention", other, limits["ms_other"], "{:.2f}"))
    return found


def at_most(name: str, value: float | None, limit: float, form: str) -> Target:
    got = "not measured" if value is None else form.format(value)
    return Target(name, f"<= {limit:g}", got, value is not None and value <= limit)


HEADS = ("model", "size", "batch", "variant", "ms", "of eager", "bits", "launches", "GEMM", "attention", "other ms")


def lines(rows: Iterable[evidence.Row]) -> list[tuple[str, ...]]:
    """The cells of the table, a line per row, under ``HEADS``."""
    told = []
    for (model, size, batch), group in groups(rows).items():
        for variant, row in group.items():
            share = ratio(group, variant, "eager")
            told.append(
                (
                    model,
                    str(size),
                    str(batch),
                    variant,
                    "-" if row["ms"] is None else f"{row['ms']:.2f}",
                    "-" if share is None else f"{share:.3f}",
                    "none" if variant == "floor_graph" else "equal" if row["bits_equal"] else "DIFFERENT",
                    f"{row['launches']:,}",
                    *(
                        "-" if row[name] is None else f"{row[name]:.2f}"
                        for name in ("ms_gemm", "ms_attention", "ms_other")
                    ),
                )
            )
    return told


def models_table(rows: Sequence[evidence.Row], notes: Sequence[str]) -> str:
    """The rows, their ratios, and what there is to say about them."""
    ratios = [
        (f"{model} {size} batch {batch}", *(_form(ratio(group, over, under)) for _, over, under in RATIOS))
        for (model, size, batch), group in groups(rows).items()
    ]
    known = [line for line in ratios if set(line[1:]) != {"-"}]
    parts = [table(HEADS, lines(rows))]
    parts += [table(("", *(title for title, _, _ in RATIOS)), known)] if known else []
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _form(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
