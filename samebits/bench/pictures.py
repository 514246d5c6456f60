"""``samebits bench pipeline``: a whole picture, and which part of it takes what share of the time.

Eager paints twice and then samebits paints twice, each time from the same noise. The first picture of each holds what
happens once: allocations, library handles, and for samebits the compilation of kernels and every comparison with
eager. The second one is the picture that counts.

A part is timed from outside: the device is made idle before it and after it. That takes overlap away between parts,
which is little, because they wait for each other anyway.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from samebits import bits
from samebits.apply import apply
from samebits.bench.targets import table

PARTS = ("text encoder", "denoiser", "VAE", "rest")
RUNS = ("eager, first", "eager", "samebits, first", "samebits")
WARM, COLD, UNKNOWN = "warm kernel cache", "cold kernel cache", "kernel cache as it was"
MOST_MORE_S = {WARM: 3.0, COLD: 10.0, UNKNOWN: 10.0}
"""Seconds that the first picture after ``apply`` may take more than eager's, comparisons with eager included."""


@dataclass
class Painted:
    """One picture and where its time went.

    Attributes
    ----------
    seconds : float
        From the call to the picture.
    parts : dict
        Seconds by part; together they are ``seconds``.
    steps_ms : list of float
        Each call of the denoiser, in order; guidance makes two of them a step.
    pixels : torch.Tensor
        ``(height, width, 3)``, uint8.
    """

    seconds: float
    parts: dict[str, float]
    steps_ms: list[float]
    pixels: torch.Tensor


@dataclass
class Timed:
    """What four runs gave.

    Attributes
    ----------
    bits_equal : bool
        Every picture has the pixels of the first.
    void : bool
        Eager's two pictures differ.
    one_colour : bool
        Eager's picture shows nothing, so that equal pixels say little.
    fused, eager, replayed : int
        Calls of sites that a kernel and that the reference answered, and calls of the denoiser that a graph answered.
    """

    runs: dict[str, Painted] = field(default_factory=dict)
    bits_equal: bool = False
    void: bool = False
    one_colour: bool = False
    fused: int = 0
    eager: int = 0
    replayed: int = 0
    warnings: list[str] = field(default_factory=list)
    """What was done to the input, in sentences."""

    @property
    def more_s(self) -> float | None:
        """What the first picture after ``apply`` took more than eager's, in seconds; none where pixels differ."""
        first, usual = self.runs.get("samebits, first"), self.runs.get("eager")
        return first.seconds - usual.seconds if self.bits_equal and first and usual else None

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON-able dictionary; none of samebits' where its picture has other bits."""
        shown = [name for name in self.runs if self.bits_equal or not name.startswith("samebits")]
        return {
            "bits_equal": self.bits_equal,
            "void": self.void,
            "warnings": self.warnings,
            "calls": {"fused": self.fused, "eager": self.eager, "replayed": self.replayed},
            "runs": [
                {
                    "run": name,
                    "seconds": round(run.seconds, 4),
                    "parts": {part: round(run.parts[part], 4) for part in PARTS},
                    "steps_ms": [round(ms, 3) for ms in run.steps_ms],
                }
                for name, run in self.runs.items()
                if name in shown
            ],
        }


@contextmanager
def _clock(pipeline: Any, synchronize: Callable[[], object]) -> Iterator[tuple[dict[str, float], list[float]]]:
    """Time the pipeline's parts while the block runs: seconds by part, and ms of each call of the denoiser."""
    parts: dict[str, float] = defaultdict(float)
    steps: list[float] = []
    began: list[float] = []

    def start() -> None:
        synchronize()
        began.append(time.perf_counter())

    def stop(part: str) -> None:
        synchronize()
        spent = time.perf_counter() - began.pop()
        parts[part] += spent
        if part == "denoiser":
            steps.append(spent * 1e3)

    hooks = []
    for name, part in (("text_encoder", "text encoder"), ("transformer", "denoiser")):
        module = getattr(pipeline, name)
        hooks.append(module.register_forward_pre_hook(lambda *_: start()))
        hooks.append(module.register_forward_hook(lambda *_, part=part: stop(part)))
    vae, decode = pipeline.vae, pipeline.vae.decode
    own = vae.__dict__.get("decode")

    def timed(*args: Any, **kwargs: Any) -> Any:
        start()
        try:
            return decode(*args, **kwargs)
        finally:
            stop("VAE")

    vae.decode = timed
    try:
        yield parts, steps
    finally:
        for hook in hooks:
            hook.remove()
        vae.__dict__.pop("decode", None)
        if own is not None:
            vae.__dict__["decode"] = own


def paint(pipeline: Any, arguments: Mapping[str, Any], seed: int, synchronize: Callable[[], object]) -> Painted:
    """Paint one picture with every part timed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with _clock(pipeline, synchronize) as (parts, steps):
        synchronize()
        start = time.perf_counter()
        image = pipeline(**arguments, generator=generator).images[0]
        synchronize()
        seconds = time.perf_counter() - start
    parts["rest"] = max(0.0, seconds - sum(parts.values()))
    width, height = image.size
    flat = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return Painted(seconds, parts, steps, flat.view(height, width, 3))


def measure(
    pipeline: Any,
    arguments: Mapping[str, Any],
    seed: int = 0,
    synchronize: Callable[[], object] = lambda: None,
    say: Callable[[str], object] = lambda _: None,
    cuda_graphs: bool = False,
) -> Timed:
    """Paint four pictures, the first two in eager, and compare all with the first.

    Parameters
    ----------
    pipeline : DiffusionPipeline
        With ``text_encoder``, ``transformer`` and ``vae``. Left as it was.
    arguments : mapping
        Of the pipeline's call.
    seed : int
        Of the initial noise, the same for all four.
    synchronize : callable
        Makes the device idle.
    say : callable
        Told which picture is being painted.
    cuda_graphs : bool
        Whether samebits' pictures are replayed from CUDA graphs.
    """
    timed = Timed()
    for name in RUNS[:2]:
        say(name)
        timed.runs[name] = paint(pipeline, arguments, seed, synchronize)
    with apply(pipeline, cuda_graphs=cuda_graphs) as handle:
        for name in RUNS[2:]:
            say(name)
            timed.runs[name] = paint(pipeline, arguments, seed, synchronize)
        report = handle.report()
    timed.fused, timed.eager = sum(row.fused for row in report.rows), sum(row.eager for row in report.rows)
    timed.replayed = sum(row.replayed for row in report.graphs)
    first, *others = (run.pixels for run in timed.runs.values())
    timed.void = bits.compare(others[0], first) is not None
    timed.bits_equal = not timed.void and all(bits.compare(pixels, first) is None for pixels in others[1:])
    timed.one_colour = bool((first == first[0, 0]).all())
    return timed


def pictures_table(timed: Timed, cold: Timed | None = None, cache: str = UNKNOWN) -> str:
    """Each run's seconds and the share of its parts, then what the comparison and the first picture say.

    Parameters
    ----------
    timed, cold : Timed
        What is shown, and the same where nothing had been compiled, if that was run.
    cache : str
        Of ``timed``: one of ``WARM``, ``COLD``, ``UNKNOWN``.
    """
    rows = []
    for run in timed.to_json()["runs"]:
        whole = run["seconds"] or 1.0
        shares = [f"{run['parts'][part]:.3f} s {run['parts'][part] / whole:4.0%}" for part in PARTS]
        steps = run["steps_ms"]
        typical = f"{sorted(steps)[len(steps) // 2]:.1f}" if steps else "-"
        rows.append((run["run"], f"{run['seconds']:.3f}", *shares, str(len(steps)), typical))
    heads = ("picture", "seconds", *PARTS, "denoiser calls", "median ms")
    return "\n".join([table(heads, rows), "", *_conclusions(timed, cold, cache)])


def _conclusions(timed: Timed, cold: Timed | None, cache: str) -> list[str]:
    if timed.void or (cold is not None and cold.void):
        return ["Void: eager's two pictures differ, so nothing can be compared with them."]
    if not timed.bits_equal or (cold is not None and not cold.bits_equal):
        return ["DIFFERENT: samebits' picture has other pixels than eager's, so no time of it is shown."]
    replays = f"; {timed.replayed:,} calls of the denoiser replayed" if timed.replayed else ""
    told = [f"Every picture has eager's pixels; {timed.fused:,} calls fused, {timed.eager:,} eager{replays}."]
    if timed.one_colour:
        told.append("Note: the picture is of one colour, so that its pixels are equal says little.")
    seconds = {name: run.seconds for name, run in timed.runs.items()}
    told.append(f"samebits / eager: {seconds['samebits'] / seconds['eager']:.3f} of the time for a whole picture.")
    told.append(first_picture(timed, cache))
    return told if cold is None else [*told, first_picture(cold, COLD)]


def first_picture(timed: Timed, cache: str) -> str:
    """What the first picture after ``apply`` took more than eager's, against what it may take."""
    more, most = timed.more_s, MOST_MORE_S[cache]
    if more is None:
        return f"First picture after apply, {cache}: no time, its pixels are not eager's."
    kept = "within" if more <= most else "NOT within"
    return f"First picture after apply, {cache}: {more:+.2f} s against eager's picture, {kept} {most:g} s."


def first_picture_json(timed: Timed, cache: str) -> dict[str, Any]:
    """The same as a JSON-able dictionary."""
    more, most = timed.more_s, MOST_MORE_S[cache]
    return {
        "cache": cache,
        "s_more_than_eager": None if more is None else round(more, 3),
        "s_most": most,
        "within": None if more is None else more <= most,
    }
