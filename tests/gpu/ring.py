"""What the tests of the GPU ring share: one strict check of an op, and inputs that are hard to get right.

``check`` hands the kernel output memory that is poisoned and stands between canaries, compares bits with eager,
looks at the inputs afterwards, and proves on a copy that the comparison would have seen one changed bit.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import bits
from samebits.bench.comparing import as_tuple
from samebits.bench.inputs import clone_args, poison, unchanged
from samebits.ops import Args, Op

MARGIN = 4096  # elements before and after an output: a multiple of every alignment a kernel asks for
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Canaries:
    """Output tensors inside larger buffers whose margins must not change."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        self.buffers = [
            torch.empty(output.numel() + 2 * MARGIN, dtype=output.dtype, device=output.device) for output in outputs
        ]
        poison(self.buffers)
        self.before = [buffer.clone() for buffer in self.buffers]
        self.outputs = tuple(
            buffer[MARGIN:-MARGIN].view(output.shape) for buffer, output in zip(self.buffers, outputs, strict=True)
        )

    def alive(self) -> bool:
        """Whether the margins still hold what they held."""
        return all(
            torch.equal(bits.integer_view(now)[part], bits.integer_view(then)[part])
            for now, then in zip(self.buffers, self.before, strict=True)
            for part in (slice(None, MARGIN), slice(-MARGIN, None))
        )


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal bits, dtype, shape and strides; and one bit changed in either end of any output is seen."""
    ours, eager = as_tuple(actual), as_tuple(expected)
    found = bits.compare(ours, eager)
    assert found is None, str(found)
    for number, tensor in enumerate(ours):
        for place in (0, -1):
            # clone keeps a dense layout; it has the same strides as the original, or the comparison says so
            broken = tensor.clone()
            flat = bits.integer_view(broken).as_strided((broken.numel(),), (1,))
            flat[place] ^= 1
            control = (*ours[:number], broken, *ours[number + 1 :])
            assert bits.compare(control, eager) is not None, "the comparison does not see one changed bit"


def check(op: Op, args: Args) -> None:
    """The kernel's bits are eager's; it writes all of its outputs and nothing else."""
    reason = op.unsupported(*args)
    assert reason is None, f"declined: {reason}"
    expected = as_tuple(op.reference(*args))
    pristine = clone_args(args)
    canaries = Canaries(op.allocate(*args))
    actual = op.prepare(*args)(*args, out=canaries.outputs)
    torch.cuda.synchronize()
    assert canaries.alive(), "the kernel wrote beside its outputs"
    assert unchanged(args, pristine), "the kernel wrote to its inputs"
    assert_same_bits(actual, expected)


def check_or_declined(op: Op, args: Args) -> str | None:
    """Check the op where it takes these arguments; else return its reason, which must be a sentence."""
    reason = op.unsupported(*args)
    if reason is None:
        check(op, args)
        return None
    assert len(reason.split()) >= 4, f"no sentence: {reason!r}"
    return reason


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, amplitude: float = 1.0) -> torch.Tensor:
    """Normal numbers from a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * amplitude).to(dtype)


def modulate_args(x: torch.Tensor, seed: int = 1) -> Args:
    """``x (B, S, D)`` with scale and shift as slices of one projection, as a model has them."""
    batch, _, width = x.shape
    scale, shift = randn(batch, 2 * width, dtype=x.dtype, device=x.device, seed=seed).chunk(2, dim=-1)
    return x, scale, shift, 1e-6


def qk_args(q: torch.Tensor, k: torch.Tensor, kind: str, weight_dtype: torch.dtype | None = None) -> Args:
    """``q, k (B, S, H, hd)`` with weights near one."""
    weights = 1 + randn(2, q.shape[-1], dtype=torch.float32, device=q.device, seed=3, amplitude=0.1)
    weights = weights.to(weight_dtype or q.dtype)
    return q, k, weights[0].clone(), weights[1].clone(), 1e-6, kind


def rms_args(x: torch.Tensor, scaled: bool = True) -> Args:
    """``x (B, S, D)`` with a weight near one and, if ``scaled``, one scale row and two gates per sample."""
    width = x.shape[-1]
    weight = (1 + randn(width, dtype=torch.float32, device=x.device, seed=4, amplitude=0.1)).to(x.dtype)
    if not scaled:
        return x, weight, None, 1e-5
    rows = randn(x.shape[0], 1, 4 * width, dtype=x.dtype, device=x.device, seed=5, amplitude=2.0)
    scale, gate_msa, _, gate_mlp = rows.chunk(4, dim=-1)
    return x, weight, scale, 1e-5, gate_msa, gate_mlp


def awkward_rows(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``(24, width)``: rows that break careless arithmetic, with ordinary ones between them."""
    finite = torch.finfo(dtype)
    rows = randn(24, width, dtype=dtype, device=device, seed=11)
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2] = 1.5  # no variance
    rows[3] = -0.7
    rows[4, width // 2] = min(3.0e4, finite.max)  # one huge outlier
    rows[5] = finite.smallest_normal * rows[5] / 8  # subnormals
    rows[6] = finite.max
    rows[7] = torch.where(rows[7] > 0, finite.max, -finite.max)
    rows[8] = finite.smallest_normal
    rows[9, ::2] = 0.0
    rows[9, 1::2] = -0.0
    for row, amplitude in ((10, 1e-3), (11, 40.0), (12, 200.0), (13, 3e4)):
        rows[row] = (rows[row].float() * amplitude).clamp(-finite.max, finite.max).to(dtype)
    return rows


def unusual_rows(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``(8, width)``: rows with NaN and infinities in different places, ordinary rows between them."""
    rows = randn(8, width, dtype=dtype, device=device, seed=12)
    rows[1, 3] = float("nan")
    rows[3, -1] = float("inf")
    rows[5, 0], rows[5, 1] = float("inf"), float("-inf")
    rows[6] = float("nan")
    return rows


def residual_args(h: torch.Tensor, y: torch.Tensor, seed: int = 6, *, clip: bool = False) -> Args:
    """``h, y (B, S, D)`` with the gate as a slice of one projection: what ``gated_residual`` takes."""
    return h, _chunks(h, 3, seed)[2], y, clip


def residual_modulate_args(h: torch.Tensor, y: torch.Tensor, seed: int = 6, *, clip: bool = False) -> Args:
    """The same for ``gated_residual_norm_modulate``: shift, scale and gate are slices of one projection."""
    shift, scale, gate = _chunks(h, 3, seed)
    return h, gate, y, scale, shift, 1e-6, clip


def residual_rms_args(x: torch.Tensor, y: torch.Tensor, form: str = "modulated", seed: int = 7) -> Args:
    """``x, y (B, S, D)`` for ``gated_residual_rms_norm``; ``form``: modulated, next-block, per-token, plain or last."""
    batch, tokens, width = x.shape
    rows = tokens if form == "per-token" else 1
    weights = 1 + randn(2, width, dtype=torch.float32, device=x.device, seed=4, amplitude=0.1)
    y_weight, weight = (w.clone() for w in weights.to(x.dtype))
    gate, scale = randn(batch, rows, 2 * width, dtype=x.dtype, device=x.device, seed=seed).chunk(2, dim=-1)
    if form == "plain":
        return x, None, y, y_weight, weight, None, 1e-5
    if form == "last":
        return x, gate.tanh(), y, y_weight, None, None, 1e-5
    if form == "next-block":
        rows = randn(batch, 1, 4 * width, dtype=x.dtype, device=x.device, seed=seed + 1, amplitude=2.0)
        scale, gate_msa, _, gate_mlp = rows.chunk(4, dim=-1)
        return x, gate.tanh(), y, y_weight, weight, scale, 1e-5, gate_msa, gate_mlp
    return x, gate.tanh(), y, y_weight, weight, scale, 1e-5


def _chunks(x: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, ...]:
    batch, _, width = x.shape
    return randn(batch, count * width, dtype=x.dtype, device=x.device, seed=seed).chunk(count, dim=-1)


def rope_stream(
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 8,
    *,
    values: bool = True,
    per_sample: bool = False,
    weight_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """One stream of ``qk_norm_rope``: query, key and value as slices of one projection, weights, a unit table."""
    projection = randn(batch, tokens, 3 * heads * head_dim, dtype=dtype, device=device, seed=seed)
    q, k, v = (part.unflatten(-1, (heads, head_dim)) for part in projection.chunk(3, dim=-1))
    weights = 1 + randn(2, head_dim, dtype=torch.float32, device=device, seed=3, amplitude=0.1)
    weights = weights.to(weight_dtype or dtype)
    shape = (batch, tokens, head_dim // 2) if per_sample else (tokens, head_dim // 2)
    angles = randn(*shape, dtype=torch.float32, device=device, seed=seed + 1, amplitude=3.0)
    table = torch.polar(torch.ones_like(angles), angles)
    return q, k, v if values else None, weights[0].clone(), weights[1].clone(), table


NO_TEXT = (None,) * 6
"""The text stream of ``qk_norm_rope`` where there is none."""


def every_half(dtype: torch.dtype, device: torch.device, times: int = 1, more: int = 0) -> torch.Tensor:
    """All 65,536 bf16 or fp16 values so many times, and a few more."""
    integers = torch.arange(times * 65536 + more, device=device, dtype=torch.int32)
    return integers.to(torch.int16).view(dtype)


def special_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``(16,)``: zeros, ones, subnormals, the ends of the range, infinities and two NaNs with a payload."""
    limits = torch.finfo(dtype)
    least, most, inf = limits.smallest_normal, limits.max, torch.inf
    values = [0.0, -0.0, 1.0, -1.0, 1.0078125, -3.0, least / 4, -least / 4, least, most, -most, 6e4, inf, -inf]
    wide = dtype is torch.float32
    nans = [0x7FC00001, 0xFFC00001 - (1 << 32)] if wide else [0x7FC1, 0xFFC1 - (1 << 16)]
    integers = torch.tensor(nans, dtype=torch.int32 if wide else torch.int16)
    return torch.cat([torch.tensor(values).to(dtype), integers.view(dtype)]).to(device)


def special_triples(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """``(4096,)`` thrice: every special value with every other two."""
    return tuple(part.flatten() for part in torch.meshgrid(*[special_values(dtype, device)] * 3, indexing="ij"))
