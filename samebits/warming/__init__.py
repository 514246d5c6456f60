"""Verify every signature of a deployment ahead of time, by making the calls that it will make.

A signature holds shapes, strides and alignments, so the sure way to meet all of them is to run the pipeline itself:
every size, batch and text length, with a few steps each. A combination is run until a run meets no signature that is
new. After that a call of it compares nothing, and a CUDA graph of it can be captured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from samebits.apply import Handle
from samebits.gate import State, Verdict
from samebits.verdict import SIGNATURE_LIMIT
from samebits.warming.texts import DEFAULT_TOKENS, Texts

__all__ = ["DEFAULT_TOKENS", "Call", "Texts", "Warmth", "warm"]

MOST_RUNS = 4
"""How often a combination is run at most. The first run meets its signatures, and what a forward does differently when
it is called again appears in the second; more is for signatures that had to wait for memory."""


@dataclass(frozen=True)
class Call:
    """One combination: a picture size in pixels, and the length in tokens of each prompt of the batch."""

    width: int
    height: int
    texts: tuple[int, ...]

    def __str__(self) -> str:
        lengths = ", ".join(map(str, sorted(set(self.texts), reverse=True)))
        batch = f"batch {len(self.texts)}, " if len(self.texts) > 1 else ""
        return f"{self.width}x{self.height}, {batch}{lengths} tokens"


@dataclass
class Warmth:
    """What is known after it. ``str()`` of its parts is up to whoever shows it.

    Attributes
    ----------
    calls : list of Call
        The combinations that were run to the end.
    runs : int
        How many pictures that took.
    seconds : float
        How long.
    unsettled : list of Call
        Combinations of which the last run still met something new.
    verdicts : list of Verdict
        Everything that the gate knows about the ops of these sites.
    """

    calls: list[Call] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0
    unsettled: list[Call] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def count(self, state: State) -> int:
        """How many signatures stand at ``state``."""
        return sum(verdict.state is state for verdict in self.verdicts)

    @property
    def by_op(self) -> dict[str, Counter[State]]:
        """How many signatures of each op stand where. An op on kernels built for the CPU counts apart."""
        found: dict[str, Counter[State]] = {}
        for verdict in self.verdicts:
            name = f"{verdict.op} (CPU)" if verdict.host else verdict.op
            found.setdefault(name, Counter())[verdict.state] += 1
        return found

    @property
    def full(self) -> list[str]:
        """Ops of which the gate remembers no more signatures, so that some of these may be forgotten already."""
        return [name for name, states in self.by_op.items() if states.total() >= SIGNATURE_LIMIT]

    @property
    def good(self) -> bool:
        """Whether something was verified and nothing was refused, failed or left open."""
        bad = (State.REFUSED, State.FAILED, State.UNKNOWN)
        return (
            bool(self.count(State.VERIFIED)) and not any(map(self.count, bad)) and not self.unsettled and not self.full
        )


def warm(
    pipeline: Any,
    handle: Handle,
    *,
    sizes: Iterable[tuple[int, int]],
    batches: Iterable[int] = (1,),
    tokens: Iterable[int] | None = None,
    steps: int = 1,
    arguments: Mapping[str, Any] | None = None,
    watch: Callable[[Call, int, int], None] | None = None,
    outcome: Warmth | None = None,
) -> Warmth:
    """Run a pipeline once or twice for every combination of size, batch and text length.

    Parameters
    ----------
    pipeline : DiffusionPipeline
        ``QwenImagePipeline`` or ``ZImagePipeline``, as it will serve: on its device, with its offload, with its LoRA.
    handle : Handle
        What ``samebits.apply`` returned for it. With CUDA graphs on, they are captured on the way.
    sizes : iterable of (int, int)
        Width and height in pixels.
    batches : iterable of int
        Prompts at once.
    tokens : iterable of int, optional
        Text lengths; by default those of :meth:`Texts.lengths`.
    steps : int
        Denoising steps of a run. Where the schedule needs two to be defined, two are made.
    arguments : mapping, optional
        More for the pipeline's call: guidance and the negative prompt decide about shapes too.
    watch : callable, optional
        Told each combination before it is run, with its number (from 1) and how many there are.
    outcome : Warmth, optional
        Filled as it goes, for whoever wants to know what was done before an interruption.

    Raises
    ------
    ModelError
        The pipeline is of another class, or a text is longer than it takes.
    ValueError
        There is nothing to run.
    """
    texts = Texts(pipeline)
    wanted = sorted(set(texts.lengths() if tokens is None else tokens))
    numbers = sorted(set(batches))
    pixels = sorted(set(sizes))
    if not (pixels and numbers and wanted) or min(*numbers, *wanted, *map(min, pixels), steps) < 1:
        raise ValueError("expected at least one size, batch and text length, and steps, each from 1 up")
    calls = [Call(*size, (length,) * number) for size in pixels for number in numbers for length in wanted]
    # What depends on a mixture of lengths is done to the texts alone, so one size of the picture is enough.
    calls += [Call(*pixels[0], mixture) for number in numbers for mixture in texts.mixtures(wanted, number)]
    outcome = Warmth() if outcome is None else outcome
    started = time.perf_counter()
    more = dict(arguments or {})
    text, negative = texts.long(wanted[-1]), texts.negative(more)
    more.pop("negative_prompt", None)
    common = {**more, "num_inference_steps": max(steps, _fewest_steps(pipeline)), "output_type": "latent"}
    try:
        for number, call in enumerate(calls, 1):
            if watch is not None:
                watch(call, number, len(calls))
            prompts = texts.arguments([text[:length] for length in call.texts], negative)
            known = _known(handle)
            for _ in range(MOST_RUNS):
                generator = torch.Generator("cpu").manual_seed(0)
                pipeline(width=call.width, height=call.height, generator=generator, **prompts, **common)
                outcome.runs += 1
                before, known = known, _known(handle)
                if known == before:
                    break
            else:
                outcome.unsettled.append(call)
            outcome.calls.append(call)
    finally:
        outcome.seconds += time.perf_counter() - started
        outcome.verdicts = _verdicts(handle)
    return outcome


def _verdicts(handle: Handle) -> list[Verdict]:
    ops = {(line.op, line.site.host) for line in handle.sites if line.site is not None}
    return [verdict for verdict in handle.gate.verdicts() if (verdict.op, verdict.host) in ops]


def _known(handle: Handle) -> Counter[tuple[str, State]]:
    """What a run changes when it meets something new or settles something that was open."""
    return Counter((verdict.op, verdict.state) for verdict in _verdicts(handle))


def _fewest_steps(pipeline: Any) -> int:
    """Stretched so that its last step ends at a given noise level, a schedule of one step is 0/0."""
    return 2 if pipeline.scheduler.config.get("shift_terminal") else 1
