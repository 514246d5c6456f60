"""``samebits bench models``: every variant of one forward, over models, sizes and batches, written as they come."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from samebits.bench import evidence, models, variants
from samebits.bench.comparing import Bench, said
from samebits.bench.models import Denoiser
from samebits.ops._op import Op

SIZES = (512, 1024, 1328, 2048)
BATCHES = (1, 2)
FAILED = "nothing was measured"
MODELS_CLAIMS = ("eager", "eager_graph", *(evidence.MODELS.claims or ()))
"""The variants of ``models.json`` whose bits must be equal: eager's own, to which it is compared, and ours."""
MEANINGLESS = "There is no GPU here: these are tiny models on a CPU, and the figures mean nothing."

Run = Callable[[str, int, int], variants.Outcome]
"""``run(model, size, batch)`` measures one forward every way."""


def record(
    folder: Path | None,
    run: Run,
    ops: Sequence[Op],
    names: Sequence[str],
    sizes: Sequence[int],
    batches: Sequence[int],
    *,
    command: str,
    environment: dict[str, Any],
    commit: str | None = None,
    kind: str = "models",
    add: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> variants.Outcome:
    """Measure the named models at every size and batch; with a ``folder``, write the record after each.

    One that fails as a whole is a note, and the next one runs.

    Parameters
    ----------
    run : callable
        :func:`here`, or :func:`apart` on a GPU.
    kind : str
        Of the record: its file is ``<kind>.json``.
    add : bool
        Keep the rows of a record that is there already, but for those that this run measures again. Several such runs
        may write to one record at the same time, each on a GPU of its own.

    Raises
    ------
    EvidenceError
        ``add``, and the file that is there was measured with another source or on another machine.
    """
    whole = variants.Outcome()
    source = evidence.source_of(ops, commit)

    def write(folder: Path) -> None:
        if not add:
            evidence.Record(kind, command, environment, source, whole.rows).write(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{kind}.lock"):
            commands, rows = [command], whole.rows
            if (folder / f"{kind}.json").exists():
                there = evidence.earlier(folder / f"{kind}.json", source, environment)
                commands = list(dict.fromkeys((*there.command.split("; "), command)))
                rows = _together(there.rows, whole.rows)
            evidence.Record(kind, "; ".join(commands), environment, source, rows).write(folder)

    if add and folder is not None and (folder / f"{kind}.json").exists():
        evidence.earlier(folder / f"{kind}.json", source, environment)  # what speaks against it is said before all else
    for name, size, batch in product(names, sizes, batches):
        where = f"{name} {size}x{size} batch {batch}"
        say(f"{where}: running")
        try:
            found = run(name, size, batch)
            whole.rows.extend(found.rows)
            whole.notes.extend(f"{where}: {note}" for note in found.notes)
        except Exception as error:
            whole.notes.append(f"{where}: {FAILED}: {said(error)}")
        if folder is not None:
            write(folder)
    return whole


def here(
    bench: Bench,
    ops: Sequence[Op],
    choice: variants.Choice,
    builders: Mapping[str, Callable[[torch.device], Denoiser]],
) -> Run:
    """Measure in this process."""

    def run(name: str, size: int, batch: int) -> variants.Outcome:
        with torch.no_grad():
            denoiser = models.at_size(builders[name](bench.device), size, batch)
            try:
                return variants.measure(denoiser, bench, ops, size, batch, choice)
            finally:
                if choice.compiled:
                    variants.forget_compiled()

    return run


def apart(device: torch.device, choice: variants.Choice) -> Run:
    """Measure on a GPU, each model and size in a fresh process.

    So every size has the GPU's memory to itself, is compiled for itself, and no launch of it is slowed by a
    profiler that ran before; and one that takes its process down takes no other with it.
    """

    def run(name: str, size: int, batch: int) -> variants.Outcome:
        # spawn: a forked process cannot use CUDA once its parent did
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_in_child, str(device), choice, name, size, batch).result()

    return run


def _in_child(device: str, choice: variants.Choice, name: str, size: int, batch: int) -> variants.Outcome:
    from samebits.ops import OPS

    # What a child has to say must not get between the parent's JSON.
    bench = Bench.on(torch.device(device), lambda text: print(text, file=sys.stderr))
    return here(bench, OPS, choice, models.BUILDERS)(name, size, batch)


def _together(earlier: Sequence[evidence.Row], rows: Sequence[evidence.Row]) -> list[evidence.Row]:
    again = {(row["model"], row["size"], row["batch"]) for row in rows}
    return [*(row for row in earlier if (row["model"], row["size"], row["batch"]) not in again), *rows]


def good(outcome: variants.Outcome, claims: Sequence[str] = MODELS_CLAIMS) -> bool:
    """Whether something was measured, nothing failed, and every row of the variants in ``claims`` has equal bits."""
    rows = outcome.rows
    return (
        bool(rows)
        and all(row["ms"] is not None for row in rows)
        and all(row["bits_equal"] for row in rows if row["variant"] in claims)
        and not any(f": {FAILED}: " in note or " was not profiled: " in note for note in outcome.notes)
    )
