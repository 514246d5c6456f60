"""``samebits bench quant``: one forward in FP8 against the same model in bf16, fused and unfused, biases absorbed.

Both models are in memory at once and all variants run in turns, so that their times can be compared. The FP8 model is
made from the bf16 one: it shares every weight that is not quantised. Bits of ``fp8_fused`` are compared with those of
the same FP8 model in plain diffusers, ``fp8_unfused``; those of ``bf16_exact_graph`` with the bf16 model in plain
diffusers. The variant that absorbs biases moves bits by design: it says how far. A model whose family absorbs none
has no such variant.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from samebits.apply import Handle
from samebits.bench import evidence, forwards, latents, models
from samebits.bench.comparing import Bench
from samebits.bench.denoisers import Observation, equal, observe
from samebits.bench.models import STEPS, Denoiser
from samebits.bench.variants import EAGER, PROFILED_RUNS, Choice, Contest, Lane, Outcome, figures
from samebits.models import family_of
from samebits.ops._op import Op
from samebits.quant import Fp8Linear, dynamic_scale

ROUNDS = 8
PLAIN, UNFUSED, FUSED, FUSED_GRAPH, ABSORBED_GRAPH = evidence.QUANT_VARIANTS
ABSORBED = "fp8_absorbed"
CLAIMS = (UNFUSED, *(evidence.QUANT.claims or ()))
"""The variants whose bits must be equal: the unfused FP8 model's own, to which it is compared, and ours."""

QUANTIZED = re.compile(
    r"transformer_blocks\.\d+\.(attn|img_mlp|txt_mlp)\..+"
    r"|(noise_refiner|context_refiner|layers)\.\d+\.(attention|feed_forward)\..+"
)
"""The linears of Qwen-Image and of Z-Image that run in FP8: all of the blocks but those of the modulation."""


def is_quantized(name: str) -> bool:
    """Whether the linear with this path in the model runs in FP8."""
    return QUANTIZED.fullmatch(name) is not None


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and is_quantized(name)}


def input_scales(denoiser: Denoiser) -> dict[str, float]:
    """The static scale of every linear's input: its largest magnitude in a forward and a short sampler run, over 448.

    The calibration of ModelOpt's FP8 recipe (``max``), on the benchmark's own input.
    """
    found: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, Any], None]:
        def look(module: nn.Module, args: Any) -> None:
            scale = dynamic_scale(args[0], per_token=False)
            found[name] = torch.maximum(found[name], scale) if name in found else scale

        return look

    hooks = [linear.register_forward_pre_hook(watch(name)) for name, linear in _linears(denoiser.model).items()]
    try:
        denoiser.forward()
        models.sample(denoiser)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: float(scale) for name, scale in found.items()}


def in_fp8(model: nn.Module, scales: Mapping[str, float]) -> nn.Module:
    """The same model with the linears that ``scales`` names in FP8; ``model`` stays as it is.

    Every other parameter and buffer is shared by the two, and no weight is copied in its wide form.
    """
    linears = dict(model.named_modules())
    made: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for name, scale in scales.items():
        linear = linears[name]
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"expected a linear at {name}, got a {type(linear).__name__}")
        made[id(linear)] = Fp8Linear.of(linear, scale)
    return copy.deepcopy(model, made)


def prepare(denoiser: Denoiser, size: int, batch: int) -> Denoiser:
    """The FP8 denoiser of a bf16 one, with inputs of the same values."""
    model = in_fp8(denoiser.model, input_scales(denoiser))
    return models.at_size(replace(denoiser, model=model), size, batch)


class QuantContest(Contest):
    """The variants of the FP8 model."""

    schema = evidence.QUANT
    applied: Mapping[str, Mapping[str, Any]] = {FUSED: {}, ABSORBED: {"contract": "measured", "on_trial": True}}

    def __init__(self, denoiser: Denoiser, bench: Bench, ops: Sequence[Op], outcome: Outcome) -> None:
        super().__init__(denoiser, bench, ops, outcome)
        self.moved: dict[str, float | None] = {}
        """What the row of the absorbed variant says besides: its distance from the unfused model."""
        family = family_of(denoiser.model)
        self.absorbs = family is not None and family.defers

    def run_all(self, graphs: bool, wide_output: torch.Tensor) -> None:
        """Make every variant ready; ``wide_output`` is what the bf16 model gives."""
        reference, steady = self.reference(STEPS)
        if not bool(reference.output.isfinite().all()):
            raise RuntimeError("the output of the FP8 model is not finite, so equal bits would say nothing")
        apart = _told(_distance(reference.output, wide_output))
        self.outcome.notes.append(f"{UNFUSED}: its output against the bf16 model's, which is quantisation: {apart}")
        forward, output = self.denoiser.forward, reference.output

        def matches(result: torch.Tensor) -> bool:
            return steady and equal([result], [output])

        self._try(UNFUSED, lambda: Lane(forward, EAGER, steady, lambda: matches(forward())))
        self._try(FUSED, lambda: self._ours(reference, steady, matches, FUSED))
        if self.absorbs:
            self._try(ABSORBED, lambda: self._absorbed(reference, steady, matches))
        else:
            kind = type(self.denoiser.model).__name__
            self.outcome.notes.append(f"{ABSORBED}: not run, samebits adds no bias of a {kind} late")
        # Only now: applying may move weights, and a graph captured before would read where they were.
        for state, name in ((FUSED, FUSED_GRAPH), (ABSORBED, ABSORBED_GRAPH)):
            if graphs and state in self.lanes:
                self._try(name, partial(self._graph, state, matches))
        self.lanes.pop(ABSORBED, None)  # made ready for its graph; it has no turns
        self.switch.to(EAGER)

    def _absorbed(self, reference: Observation, steady: bool, matches: Callable[[torch.Tensor], bool]) -> Lane:
        lane = self._ours(reference, steady, matches, ABSORBED)
        handle = self.switch.handles[ABSORBED]
        before = _biases(handle)
        self.denoiser.forward()
        absorbed = _biases(handle) - before
        seen = observe(self.denoiser, STEPS)
        self.moved = {
            "biases_absorbed": absorbed,
            **{f"output_{name}": value for name, value in _distance(seen.output, reference.output).items()},
            **_latents(seen.latents[-1], reference.latents[-1]),
        }
        told = _told(self.moved)
        self.outcome.notes.append(f"{ABSORBED}: {absorbed} biases absorbed a forward; against {UNFUSED}: {told}")
        if lane.bits_equal:
            self.outcome.notes.append(f"{ABSORBED}: its bits are those of {UNFUSED}; nothing moved")
        return lane


def _biases(handle: Handle) -> int:
    """Calls so far that took a linear's bias in."""
    return sum(row.fused for row in handle.report().rows if row.op.startswith("bias_"))


def _distance(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float | None]:
    return {
        "relative_error": _finite(latents.relative_error(found, expected), 6),
        "psnr_db": _finite(latents.psnr_db(found, expected), 2),
    }


def _latents(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float | None]:
    """PSNR and SSIM of the latents that a short sampler ends with."""
    told = {"latents_psnr_db": _finite(latents.psnr_db(found, expected), 2)}
    a, b = (latents.qwen_image_pictures(tensor) for tensor in (found, expected))
    return told | {"latents_ssim": _finite(latents.ssim(a, b), 5)}


def _finite(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _told(distance: Mapping[str, float | None]) -> str:
    named = {name: value for name, value in distance.items() if name != "biases_absorbed"}
    return ", ".join(
        f"{name.replace('_', ' ').replace(' db', '')} {'none' if value is None else f'{value:g}'}"
        + (" dB" if name.endswith("_db") and value is not None else "")
        for name, value in named.items()
    )


def measure(
    denoiser: Denoiser, bench: Bench, ops: Sequence[Op], size: int, batch: int, graphs: bool, rounds: int
) -> Outcome:
    """Run every variant: bits, then time in turns, then launches and classes.

    Parameters
    ----------
    denoiser : Denoiser
        The bf16 model; left as it was.
    graphs : bool
        Whether graphs are captured; false where there is no GPU, and then no variant that is one has a row.
    """
    outcome, plain_outcome = Outcome(), Outcome()
    bench.say("calibrating, and making the FP8 model from the bf16 one")
    quantized = prepare(denoiser, size, batch)
    plain = Contest(denoiser, bench, ops, plain_outcome)
    contest = QuantContest(quantized, bench, ops, outcome)
    try:
        wide_output = denoiser.forward().clone()
        if graphs:
            bench.say("bits: bf16")
            plain.enter(Choice((), only=("ours_graph",)))
            outcome.notes.extend(f"bf16 {note}" for note in plain_outcome.notes)
        bench.say(f"bits: FP8, fused{' and absorbed' if contest.absorbs else ''} against unfused")
        contest.run_all(graphs, wide_output)
        if "ours_graph" in plain.lanes:
            # In front, as in the record; a graph needs nothing of the switch that it was captured under.
            contest.lanes = {PLAIN: plain.lanes["ours_graph"], **contest.lanes}
        bench.say(f"time: {', '.join(contest.lanes)} in {rounds} turns")
        taken = contest.time(rounds)
        bench.say("launches and classes")
        contest.profile(min(rounds, PROFILED_RUNS))
    finally:
        contest.switch.close()
        plain.switch.close()
    wanted = evidence.QUANT_VARIANTS if graphs else (UNFUSED, FUSED)
    for name in wanted:
        if name == ABSORBED_GRAPH and not contest.absorbs:
            continue
        head = {"model": denoiser.name, "size": size, "batch": batch, "variant": name}
        lane = contest.lanes.get(name)
        row = {**head, **figures(lane, taken.get(name), name, evidence.QUANT), **_launches(lane)}
        outcome.rows.append(row | (contest.moved if name == ABSORBED_GRAPH else {}))
    return outcome


def _launches(lane: Lane | None) -> evidence.Row:
    counts = {} if lane is None or lane.account is None else lane.account.counts
    gemm, attention = counts.get("gemm", 0), counts.get("attention", 0)
    return {
        "launches_gemm": gemm,
        "launches_attention": attention,
        "launches_other": sum(counts.values()) - gemm - attention,
    }


def here(
    bench: Bench, ops: Sequence[Op], builder: Callable[[torch.device], Denoiser], graphs: bool, rounds: int
) -> forwards.Run:
    """Measure in this process."""

    def run(name: str, size: int, batch: int) -> Outcome:
        with torch.no_grad():
            return measure(models.at_size(builder(bench.device), size, batch), bench, ops, size, batch, graphs, rounds)

    return run


def good(outcome: Outcome) -> bool:
    """Whether every variant was measured and every row that claims bits has them."""
    failed = any(re.match(r"\S+ \S+ batch \d+: (bf16 )?\S+ failed: ", note) for note in outcome.notes)
    return not failed and forwards.good(outcome, CLAIMS)
