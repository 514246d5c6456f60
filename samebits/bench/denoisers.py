"""Whole denoisers against eager: every block, the output and a short sampler, bit by bit; launches and time."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits import bits
from samebits.apply import Handle, apply
from samebits.bench import evidence, launches
from samebits.bench.comparing import Bench, said
from samebits.bench.models import BUILDERS, STEPS, Denoiser, sample
from samebits.bench.timing import interleaved_ms
from samebits.ops._op import Op

ROUNDS = 4


@dataclass
class Observation:
    """What one forward and one sampler run gave."""

    output: torch.Tensor
    blocks: list[tuple[torch.Tensor, ...]]
    latents: list[torch.Tensor]


def observe(denoiser: Denoiser, steps: int = STEPS) -> Observation:
    """One forward with every block's outputs kept, then one sampler run."""
    kept: list[tuple[torch.Tensor, ...]] = []

    def keep(module: nn.Module, args: Any, outputs: Any) -> None:
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        kept.append(tuple(part.clone() for part in parts))

    keep.only_looks = True  # type: ignore[attr-defined]  # so that nothing runs otherwise because of it
    hooks = [block.register_forward_hook(keep) for block in denoiser.blocks]
    try:
        output = denoiser.velocity(denoiser.latents, 0.7).clone()
    finally:
        for hook in hooks:
            hook.remove()
    return Observation(output, kept, sample(denoiser, steps))


def equal(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> bool:
    """Whether two runs of tensors are equal bit for bit."""
    return len(ours) == len(eager) and all(bits.compare(a, b) is None for a, b in zip(ours, eager, strict=True))


def share(ours: Sequence[Sequence[torch.Tensor]], eager: Sequence[Sequence[torch.Tensor]]) -> str:
    """``"n/m"``: n of m members equal."""
    same = sum(equal(a, b) for a, b in zip(ours, eager, strict=False))
    return f"{same}/{max(len(eager), 1)}"


def sees_one_bit(tensor: torch.Tensor) -> bool:
    """The negative control of a comparison: one flipped bit in the last element must be seen."""
    broken = tensor.clone(memory_format=torch.contiguous_format)
    bits.integer_view(broken).view(-1)[-1:].bitwise_xor_(1)
    return not equal([broken], [tensor.contiguous()])


@dataclass(frozen=True)
class Calls:
    """Calls of all sites together, as a report tells them."""

    fused: int
    eager: int
    reasons: Counter[str]

    @classmethod
    def of(cls, handle: Handle) -> Calls:
        reasons: Counter[str] = Counter()
        rows = handle.report().rows
        for row in rows:
            reasons.update(row.reasons)
        return cls(sum(row.fused for row in rows), sum(row.eager for row in rows), reasons)

    def since(self, before: Calls) -> Calls:
        """What happened after ``before``; a reason that holds without a counted call stays, with zero."""
        reasons = Counter({text: count - before.reasons[text] for text, count in self.reasons.items()})
        kept = Counter({text: count for text, count in reasons.items() if count or not self.reasons[text]})
        return Calls(self.fused - before.fused, self.eager - before.eager, kept)


def measure(
    denoiser: Denoiser, bench: Bench, ops: Sequence[Op], steps: int = STEPS, rounds: int = ROUNDS
) -> evidence.Row:
    """One row of ``denoisers.json``."""
    row = empty_row(denoiser.name, len(denoiser.blocks), steps)
    eager, again = observe(denoiser, steps), observe(denoiser, steps)
    void = not (
        equal([again.output], [eager.output])
        and equal(again.latents, eager.latents)
        and all(equal(a, b) for a, b in zip(again.blocks, eager.blocks, strict=True))
    )
    del again
    row["void"] = void
    row["finite"] = bool(torch.isfinite(eager.output).all())

    def body() -> torch.Tensor:
        return denoiser.velocity(denoiser.latents, 0.7)

    ours_names = launches.kernels_of(ops)
    holder = [apply(denoiser.model)]

    def on() -> None:
        holder.append(apply(denoiser.model))

    def off() -> None:
        while holder:
            holder.pop().remove()

    try:
        body()  # first sight: every signature runs both ways and is compared
        first = Calls.of(holder[0])
        ours = observe(denoiser, steps)
        calls = Calls.of(holder[0]).since(first)
        forwards = 1 + steps
        row["fused_calls"], row["eager_calls"] = calls.fused // forwards, calls.eager // forwards
        row["reasons"] = dict(calls.reasons)
        row["blocks_equal"] = share(ours.blocks, eager.blocks)
        row["steps_equal"] = share([[step] for step in ours.latents], [[step] for step in eager.latents])
        row["output_equal"] = not void and equal([ours.output], [eager.output])
        if not sees_one_bit(eager.output):
            row |= {"output_equal": False, "error": "the comparison did not see one bit that was changed on purpose"}
        del ours, eager
        off()
        if evidence.DENOISERS.bits_equal(row):
            before = {"eager": off, "ours": on}
            taken = interleaved_ms({"eager": body, "ours": body}, bench.stopwatch, rounds, before)
            row["ms_eager"], row["ms_ours"] = round(taken["eager"], 3), round(taken["ours"], 3)
            off()
        # The profiler comes after the clock: launches can stay slower in a process in which it ran.
        row["launches_eager"], row["by_class_eager"] = _account(body, ours_names, bench)
        on()
        row["launches_ours"], row["by_class_ours"] = _account(body, ours_names, bench)
    finally:
        off()
    return row


def empty_row(name: str, blocks: int, steps: int) -> evidence.Row:
    """The row of a model of which nothing is known to be equal yet."""
    return {
        "model": name,
        "blocks_equal": f"0/{max(blocks, 1)}",
        "output_equal": False,
        "steps_equal": f"0/{steps}",
        "launches_eager": 0,
        "launches_ours": 0,
        "ms_eager": None,
        "ms_ours": None,
    }


def _account(body: Callable[[], object], names: Mapping[str, str], bench: Bench) -> tuple[int, dict[str, int]]:
    if bench.device.type != "cuda":  # nothing to account for: only the tests come here
        return 0, {}
    counted = launches.record(body, names)
    return counted.total, counted.counts


def record(
    folder: Path,
    bench: Bench,
    ops: Sequence[Op],
    names: Sequence[str],
    *,
    command: str,
    environment: dict[str, Any],
    commit: str | None = None,
) -> list[evidence.Row]:
    """Measure the named denoisers one after the other and write ``denoisers.json``; returns its rows."""
    rows: list[evidence.Row] = []
    source = evidence.source_of(ops, commit)
    for name in names:
        with torch.no_grad():
            try:
                denoiser = BUILDERS[name](bench.device)
                rows.append(measure(denoiser, bench, ops))
                del denoiser
            except Exception as error:  # a row that says so, then the next model
                rows.append({**empty_row(name, 1, STEPS), "error": said(error)})
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        row = rows[-1]
        bench.say(f"{name}: blocks {row['blocks_equal']}, output equal {row['output_equal']}, {row.get('error', '')}")
        evidence.Record("denoisers", command, environment, source, rows).write(folder)
    return rows
