"""``samebits bench pipeline`` on a GPU: the first picture after ``apply`` with and without compiled kernels, on record.

What a first picture costs depends on what this process and this machine did before, so it is painted in fresh
processes: one whose kernel cache is an empty folder, then one that finds there what the first has compiled.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits.bench import evidence, pictures
from samebits.bench.pictures import COLD, MOST_MORE_S, WARM, Painted, Timed
from samebits.bench.targets import Target
from samebits.certificate import folder_in
from samebits.loading.prompts import cut_off
from samebits.settings import CACHE_DIR

PLAIN, GRAPHS = "launch by launch", "cuda graphs"
"""How samebits' denoiser runs."""


@dataclass(frozen=True)
class Request:
    """What a process is to paint. It can be pickled where its functions can.

    Attributes
    ----------
    name : str
        What messages call the pipeline.
    build : callable
        ``build(device)`` returns the pipeline.
    device : str
        Where it runs.
    arguments : mapping
        Of the pipeline's call.
    around : callable
        Returns a context in which everything is done, to keep libraries quiet.
    """

    name: str
    build: Callable[[torch.device], Any]
    device: str
    arguments: Mapping[str, Any]
    seed: int = 0
    cuda_graphs: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def here(request: Request, say: Callable[[str], object] = lambda _: None) -> Timed:
    """Paint in this process, with the kernel cache as it is."""
    device = torch.device(request.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    with request.around():
        pipeline = request.build(device)
        pipeline.set_progress_bar_config(disable=True)
        warnings = cut_off(pipeline, request.arguments)
        for warning in warnings:
            say(f"samebits: warning: {warning}")
        timed = pictures.measure(
            pipeline,
            request.arguments,
            request.seed,
            wait,
            lambda text: say(f"{request.name}: painting, {text}"),
            request.cuda_graphs,
        )
    timed.warnings = warnings
    return timed


def apart(request: Request, cache: Path) -> Timed:
    """Paint in a fresh process whose kernel cache is the folder ``cache``; the pixels stay behind."""
    # spawn: a forked process cannot use CUDA once its parent did
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_in_child, request, str(cache)).result()


def cold_and_warm(
    request: Request,
    say: Callable[[str], object] = lambda _: None,
    run: Callable[[Request, Path], Timed] = apart,
) -> tuple[Timed, Timed]:
    """Paint with an empty kernel cache and then, in another process, with what that one compiled."""
    with tempfile.TemporaryDirectory(prefix="samebits-") as cache:
        say(f"{request.name}: with a {COLD}")
        cold = run(request, Path(cache))
        # Compiled kernels may stay; every comparison with eager is part of what is measured.
        shutil.rmtree(folder_in(Path(cache)), ignore_errors=True)
        say(f"{request.name}: with a {WARM}")
        return cold, run(request, Path(cache))


def _in_child(request: Request, cache: str) -> Timed:
    os.environ[CACHE_DIR] = cache
    timed = here(request, lambda text: print(text, file=sys.stderr))
    for painted in timed.runs.values():
        painted.pixels = torch.empty(0)  # a tensor would travel in memory that goes with this process
    return timed


def _nothing() -> None:
    """What waiting for a CPU takes."""


# The record.


def rows_of(model: str, size: int, steps: int, mode: str, cold: Timed, warm: Timed) -> list[evidence.Row]:
    """The rows of ``pipeline.json``: the pictures with compiled kernels, and the first one without."""
    made = []
    for variant, timed, run in (
        ("eager_first", warm, "eager, first"),
        ("eager", warm, "eager"),
        ("ours_first_cold", cold, "samebits, first"),
        ("ours_first", warm, "samebits, first"),
        ("ours", warm, "samebits"),
    ):
        ours = variant.startswith("ours")
        row = {"model": model, "mode": mode, "variant": variant, "size": size, "steps": steps}
        row |= _figures(timed.runs[run])
        row |= {"fused": timed.fused, "eager": timed.eager, "replayed": timed.replayed} if ours else _NO_SITES
        more = timed.more_s if variant.startswith("ours_first") else None
        row["s_more"] = None if more is None else round(more, 3)
        row["bits_equal"] = timed.bits_equal if ours else not timed.void
        made.append(evidence.without_speeds(row) if ours and not timed.bits_equal else row)
    return made


_NO_SITES = {"fused": 0, "eager": 0, "replayed": 0}


def _figures(painted: Painted) -> evidence.Row:
    parts = {f"s_{part.lower().replace(' ', '_')}": round(painted.parts[part], 4) for part in pictures.PARTS}
    return {"calls": len(painted.steps_ms), "s": round(painted.seconds, 4), **parts}


def record(
    rows: Sequence[evidence.Row],
    command: str,
    environment: Mapping[str, Any],
    source: Mapping[str, Any],
    earlier: evidence.Record | None = None,
) -> evidence.Record:
    """The record of these rows, together with the pictures of ``earlier`` that were not painted again."""
    again = {_which(row) for row in rows}
    kept = [] if earlier is None else [row for row in earlier.rows if _which(row) not in again]
    told = command if earlier is None else f"{earlier.command}; {command}"
    return evidence.Record("pipeline", told, environment, source, [*kept, *rows])


def _which(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["size"], row["steps"], row["mode"]


def groups(rows: Iterable[evidence.Row]) -> dict[tuple[Any, ...], dict[str, evidence.Row]]:
    """Rows by model, size, steps and mode, then by variant."""
    found: dict[tuple[Any, ...], dict[str, evidence.Row]] = {}
    for row in rows:
        found.setdefault(_which(row), {})[row["variant"]] = row
    return found


def targets(rows: Iterable[evidence.Row]) -> list[Target]:
    """What the first picture may take more than eager's, and what it took."""
    found = []
    for (model, size, _, mode), group in groups(rows).items():
        for variant, cache in (("ours_first", WARM), ("ours_first_cold", COLD)):
            more, most = group[variant]["s_more"] if variant in group else None, MOST_MORE_S[cache]
            got = "not measured" if more is None else f"{more:+.2f} s"
            name = f"{model} {size}, {mode}, first picture after apply, {cache}, more than eager's"
            found.append(Target(name, f"<= {most:g} s", got, more is not None and more <= most))
    return found


HEADS = (
    *("model", "size", "steps", "samebits", "picture", "seconds", "of eager", "more than eager"),
    *("text encoder", "denoiser", "VAE", "rest", "bits"),
)
SHOWN = {
    "eager_first": "eager, first",
    "eager": "eager",
    "ours_first_cold": f"ours, first, {COLD}",
    "ours_first": f"ours, first, {WARM}",
    "ours": "ours",
}


def lines(rows: Iterable[evidence.Row]) -> list[tuple[str, ...]]:
    """The cells of the table, a line per row, under ``HEADS``."""
    told = []
    for (model, size, steps, mode), group in groups(rows).items():
        usual = group["eager"]["s"] if "eager" in group else None
        for variant, row in group.items():
            share = row["s"] / usual if row["s"] is not None and usual else None
            more = row["s_more"]
            told.append(
                (
                    *(model, str(size), str(steps), mode, SHOWN[variant], _form(row["s"], "{:.3f}")),
                    *(_form(share, "{:.3f}"), _form(more, "{:+.2f} s")),
                    *(_form(row[f"s_{part}"], "{:.3f}") for part in ("text_encoder", "denoiser", "vae", "rest")),
                    "equal" if row["bits_equal"] else "DIFFERENT",
                )
            )
    return told


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
