"""``samebits bench models``: every variant of one forward, over models, sizes and batches, written as they come."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from samebits.bench import evidence, models, variants
from samebits.bench.comparing import Bench, said
from samebits.bench.models import Denoiser
from samebits.errors import EvidenceError
from samebits.ops._op import Op

SIZES = (512, 1024, 1328, 2048)
BATCHES = (1, 2)
MEANINGLESS = "There is no GPU here: these are tiny models on a CPU, and the figures mean nothing."


def record(
    folder: Path | None,
    bench: Bench,
    ops: Sequence[Op],
    names: Sequence[str],
    sizes: Sequence[int],
    batches: Sequence[int],
    choice: variants.Choice,
    *,
    command: str,
    environment: dict[str, Any],
    commit: str | None = None,
    add: bool = False,
    builders: Mapping[str, Callable[[torch.device], Denoiser]] = models.BUILDERS,
) -> variants.Outcome:
    """Measure the named models one after the other; with a ``folder``, write ``models.json`` after each size.

    A model that does not even build, or a size that fails as a whole, is a note and the next one runs.

    Parameters
    ----------
    add : bool
        Keep the rows of a ``models.json`` that is there already, but for those that this run measures again.

    Raises
    ------
    EvidenceError
        ``add``, and the file that is there was measured with another source or on another machine.
    """
    whole = variants.Outcome()
    source = evidence.source_of(ops, commit)
    earlier: list[evidence.Row] = []
    if add and folder is not None and (folder / "models.json").exists():
        earlier, command = _earlier(folder / "models.json", source, environment, command)
    for name in names:
        with torch.no_grad():
            try:
                bench.say(f"{name}: building")
                denoiser = builders[name](bench.device)
            except Exception as error:
                whole.notes.append(f"{name}: cannot be built: {said(error)}")
                continue
            for size in sizes:
                for batch in batches:
                    where = f"{name} {size}x{size} batch {batch}"
                    bench.say(f"{where}: running")
                    try:
                        found = variants.measure(models.at_size(denoiser, size, batch), bench, ops, size, batch, choice)
                        whole.rows.extend(found.rows)
                        whole.notes.extend(f"{where}: {note}" for note in found.notes)
                    except Exception as error:
                        whole.notes.append(f"{where}: failed: {said(error)}")
                    if choice.compiled:
                        variants.forget_compiled()
                    _free(bench)
                    if folder is not None:
                        rows = _together(earlier, whole.rows)
                        evidence.Record("models", command, environment, source, rows).write(folder)
        del denoiser
        _free(bench)
    return whole


def _earlier(
    path: Path, source: Mapping[str, Any], environment: Mapping[str, Any], command: str
) -> tuple[list[evidence.Row], str]:
    """The rows that are there already, and the commands of both runs."""
    there = evidence.read(path)
    for what, then, now in (
        ("source", there.source.get("package"), source["package"]),
        ("GPU", _gpu(there.environment), _gpu(environment)),
        ("torch", there.environment.get("torch"), environment.get("torch")),
    ):
        if then != now:
            problem = f"its rows were measured with another {what}, so no row can be added; run everything anew"
            raise EvidenceError(kind="models", where=str(path), problem=problem)
    return list(there.rows), f"{there.command}; {command}"


def _gpu(environment: Mapping[str, Any]) -> Any:
    return (environment.get("gpu") or {}).get("name")


def _together(earlier: Sequence[evidence.Row], rows: Sequence[evidence.Row]) -> list[evidence.Row]:
    again = {(row["model"], row["size"], row["batch"]) for row in rows}
    return [*(row for row in earlier if (row["model"], row["size"], row["batch"]) not in again), *rows]


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def good(outcome: variants.Outcome) -> bool:
    """Whether something was measured, nothing failed, and every row that claims eager's bits has them."""
    claims = ("eager", "eager_graph", *(evidence.MODELS.claims or ()))
    rows = outcome.rows
    return (
        bool(rows)
        and all(row["ms"] is not None for row in rows)
        and all(row["bits_equal"] for row in rows if row["variant"] in claims)
        and not any(": failed: " in note or "cannot be built" in note for note in outcome.notes)
    )
