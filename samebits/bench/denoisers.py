"""Whole denoisers at their real size with random weights: every block, the output and a short sampler, bit by bit.

No download: the real classes of diffusers with their default configurations, filled from a seed. One forward
of Qwen-Image (20 B parameters, bf16) needs about 45 GB of GPU memory.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits import bits
from samebits.apply import Handle, apply
from samebits.bench import evidence, launches
from samebits.bench.ops import Bench, said
from samebits.bench.timing import interleaved_ms
from samebits.ops._op import Op

STEPS = 4
ROUNDS = 4
TEXT_TOKENS = 128


@dataclass(frozen=True)
class Denoiser:
    """A transformer with one input and a way to call it."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """The blocks whose outputs are compared, in the order in which they run."""
    latents: torch.Tensor
    """Where the sampler starts. Never written to."""
    velocity: Callable[[torch.Tensor, float], torch.Tensor]
    """``velocity(latents, sigma)`` runs one forward; same shape and dtype as the latents."""


@dataclass
class Observation:
    """What one forward and one sampler run gave."""

    output: torch.Tensor
    blocks: list[tuple[torch.Tensor, ...]]
    latents: list[torch.Tensor]


def _fill(model: nn.Module, widths: Iterable[int], seed: int) -> None:
    """Give the norms weights that are not all one: 1 + 0.1 * normal, for one-dimensional weights of these widths."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    wanted = set(widths)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.numel() in wanted and name.endswith("weight"):
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
            parameter.copy_(1 + 0.1 * noise)


def _construct(build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a model directly on the device and in its dtype, with random weights from a fixed seed."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = build()
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def qwen_image(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 64, **config: Any) -> Denoiser:
    """Qwen-Image: 60 blocks of 24 x 128. ``side`` is the picture's side in tokens (64 for 1024 pixels)."""
    from diffusers import QwenImageTransformer2DModel

    model: Any = _construct(
        lambda: QwenImageTransformer2DModel(**{"in_channels": 64, "out_channels": 16, **config}), device, dtype
    )
    # The rotary tables are plain attributes computed while the model is built: here they would be on the device and
    # in the default dtype of that moment. A loaded pipeline computes them on the CPU in fp32.
    model.pos_embed = type(model.pos_embed)(theta=10_000, axes_dim=list(model.config.axes_dims_rope), scale_rope=True)
    _fill(model, [model.config.attention_head_dim], seed=1)
    generator = torch.Generator(device=device).manual_seed(2)
    latents = torch.randn(1, side * side, model.config.in_channels, generator=generator, device=device, dtype=dtype)
    text = torch.randn(
        1, TEXT_TOKENS, model.config.joint_attention_dim, generator=generator, device=device, dtype=dtype
    )

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        output: torch.Tensor = model(
            hidden_states=latents,
            encoder_hidden_states=text,
            timestep=torch.full((1,), sigma, device=device, dtype=dtype),
            img_shapes=[[(1, side, side)]],
            return_dict=False,
        )[0]
        return output

    return Denoiser("qwen-image", model, list(model.transformer_blocks), latents, velocity)


def z_image(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 128, **config: Any) -> Denoiser:
    """Z-Image: 2 + 2 refiner blocks and 30 layers of 30 x 128. ``side`` is the latents' side (128 for 1024 pixels)."""
    from diffusers import ZImageTransformer2DModel

    model: Any = _construct(lambda: ZImageTransformer2DModel(**config), device, dtype)
    generator = torch.Generator(device=device).manual_seed(2)
    for token in (model.x_pad_token, model.cap_pad_token):
        token.normal_(0.0, 0.02, generator=generator)
    _fill(model, [model.config.dim // model.config.n_heads, model.config.dim], seed=1)
    latents = torch.randn(model.config.in_channels, 1, side, side, generator=generator, device=device, dtype=dtype)
    caption = torch.randn(TEXT_TOKENS, model.config.cap_feat_dim, generator=generator, device=device, dtype=dtype)

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        # Z-Image's time runs the other way, and so does its output.
        time = torch.full((1,), 1.0 - sigma, device=device, dtype=dtype)
        output: torch.Tensor = model([latents], time, [caption], return_dict=False)[0][0]
        return -output

    blocks = [*model.noise_refiner, *model.context_refiner, *model.layers]
    return Denoiser("z-image", model, blocks, latents, velocity)


BUILDERS: Mapping[str, Callable[[torch.device], Denoiser]] = {"z-image": z_image, "qwen-image": qwen_image}


def sample(denoiser: Denoiser, steps: int = STEPS) -> list[torch.Tensor]:
    """Flow-match Euler from pure noise; returns the latents after every step."""
    latents, taken = denoiser.latents, []
    for step in range(steps):
        sigma, following = 1.0 - step / steps, 1.0 - (step + 1) / steps
        moved = latents.float() + (following - sigma) * denoiser.velocity(latents, sigma).float()
        latents = moved.to(latents.dtype)
        taken.append(latents)
    return taken


def observe(denoiser: Denoiser, steps: int = STEPS) -> Observation:
    """One forward with every block's outputs kept, then one sampler run."""
    kept: list[tuple[torch.Tensor, ...]] = []

    def keep(module: nn.Module, args: Any, outputs: Any) -> None:
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        kept.append(tuple(part.clone() for part in parts))

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

    ours_names = launches.kernels_in(path for op in ops for path in op.sources)
    row["launches_eager"], row["by_class_eager"] = _account(body, ours_names, bench)

    holder = [apply(denoiser.model)]
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
        row["launches_ours"], row["by_class_ours"] = _account(body, ours_names, bench)
        if evidence.DENOISERS.bits_equal(row):

            def on() -> None:
                holder.append(apply(denoiser.model))

            def off() -> None:
                while holder:
                    holder.pop().remove()

            off()
            before = {"eager": off, "ours": on}
            taken = interleaved_ms({"eager": body, "ours": body}, bench.stopwatch, rounds, before)
            row["ms_eager"], row["ms_ours"] = round(taken["eager"], 3), round(taken["ours"], 3)
    finally:
        while holder:
            holder.pop().remove()
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


def _account(body: Callable[[], object], names: Sequence[str], bench: Bench) -> tuple[int, dict[str, int]]:
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
