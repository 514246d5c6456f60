"""ATen's LayerNorm statistics, one rounding at a time, in plain torch: what no probe of an order can show.

Welford's recurrence is no sum, so it has no summation tree to recover. Instead ``vectorized_layer_norm_kernel`` is
computed step by step, every operation a torch call with one rounding to fp32, and eager and the kernel are both
compared with that on rows chosen so that each step shows. Written from ATen's sources and from nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

THREADS, VECTOR, WARP = 128, 4, 32
Fma = Callable[[Tensor, Tensor, Tensor], Tensor]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors with one rounding.

    The product of two fp32 numbers is exact in fp64; the sum is not, and rounding it twice would be wrong near ties.
    So the sum is rounded to odd first: its last bit remembers that something was cut off. Then the second rounding is
    the right one, since fp64 has more than 24 + 2 bits.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)  # exactly what the addition rounded away
    bits = total.view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = (lost > 0) | (lost < 0)  # not where something is not finite
    return torch.where(inexact & (bits & 1 == 0), bits + step, bits).view(torch.float64).float()


def two_roundings(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """What a compiler without contraction makes of it: the control."""
    return a * b + c


def moments(x: Tensor, fma: Fma = fma, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and variance of every row as ATen computes them.

    Parameters
    ----------
    x : torch.Tensor
        ``(rows, width)`` fp32, ``width`` a multiple of four.
    fma : callable
        How ``a * b + c`` is rounded where ATen's machine code fuses it.
    swapped : bool
        A control: two partial results join with their sides exchanged. The formula is not symmetric in them.

    Returns
    -------
    tuple of torch.Tensor
        Two ``(rows,)`` fp32.
    """
    rows, width = x.shape
    if width % VECTOR:
        raise ValueError(f"expected a width that is a multiple of {VECTOR}, got {width}")
    vectors = x.view(rows, -1, VECTOR)
    mean, m2 = torch.zeros((2, rows, THREADS), device=x.device).unbind(0)
    count = torch.zeros(THREADS)
    for start in range(0, vectors.shape[1], THREADS):
        part = vectors[:, start : start + THREADS]
        active = slice(0, part.shape[1])
        for element in range(VECTOR):
            count[active] += 1
            reciprocal = (1 / count[active]).to(x.device).expand(rows, -1)
            value = part[..., element]
            delta = value - mean[:, active]
            new_mean = fma(delta, reciprocal, mean[:, active])
            m2[:, active] = fma(delta, value - new_mean, m2[:, active])
            mean[:, active] = new_mean
    state = tuple(part.reshape(*part.shape[:-1], THREADS // WARP, WARP) for part in (mean, m2, count))
    for _ in range(2):  # the lanes of each warp by offsets 16, 8, 4, 2, 1; then warps (0, 2) and (1, 3), then these two
        while state[0].shape[-1] > 1:
            half = state[0].shape[-1] // 2
            lower, upper = [part[..., :half] for part in state], [part[..., half:] for part in state]
            state = _join(upper, lower, fma) if swapped else _join(lower, upper, fma)
        state = tuple(part.squeeze(-1) for part in state)
    mean, m2, _ = state
    return mean, m2 / torch.tensor(float(width), device=x.device)


def _join(lower: Sequence[Tensor], upper: Sequence[Tensor], fma: Fma) -> tuple[Tensor, ...]:
    """``cuWelfordCombine`` of means, sums of squared distances and counts; ``lower`` keeps the result.

    Means and sums are ``(rows, ..., threads)``, counts ``(..., threads)``, on the CPU.
    """
    (mean_b, m2_b, count_b), (mean_a, m2_a, count_a) = lower, upper
    count = count_a + count_b
    coefficient = 1 / count
    device = mean_a.device
    share_a, share_b = (torch.where(count == 0, 0, n * coefficient).to(device) for n in (count_a, count_b))
    count_a, empty = count_a.to(device), (count == 0).to(device)
    delta = mean_b - mean_a
    mean = fma(share_a.expand_as(mean_a), mean_a, share_b * mean_b)
    m2 = fma(share_b.expand_as(m2_a), delta * delta * count_a, m2_a + m2_b)
    return torch.where(empty, 0, mean), torch.where(empty, 0, m2), count


def rsqrt(x: Tensor) -> Tensor:
    """``rsqrt`` as the device of ``x`` has it: ATen's on a GPU; on the CPU correctly rounded, as the shim's."""
    return x.rsqrt() if x.device.type == "cuda" else (1 / x.double().sqrt()).float()


def rows_that_tell(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield named batches of about ``count`` rows ``(count, width)`` in which each step of the recurrence shows.

    In ordinary rows the last bit of a mean is lost in the result. It is not where the mean is large, or where all of
    the variance lies between threads or between warps.
    """
    generator = torch.Generator(device).manual_seed(width)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def repeated(group: int) -> Tensor:
        own = randn(count, THREADS // group, 1).expand(-1, -1, VECTOR * group).flatten(1)
        return own.repeat(1, -(-width // own.shape[1]))[:, :width] + 1

    limits = torch.finfo(dtype)
    plain, outlier = randn(count, width), randn(count, width)
    outlier[:, width // 3] = 30000
    yield "random", plain.to(dtype)
    yield "random, large and small", (plain * torch.exp2(randn(count, 1) * 4)).to(dtype)
    yield "far from zero", (plain + 100).to(dtype)
    yield "threads differ", repeated(1).to(dtype)
    yield "warps differ", repeated(WARP).to(dtype)
    yield "one outlier", outlier.to(dtype)
    yield "no variance", randn(count, 1).expand(-1, width).to(dtype)
    yield "cancelling", (plain.abs() * (1 - 2 * (torch.arange(width, device=device) % 2))).to(dtype)
    yield "subnormal", (plain.double() * (limits.smallest_normal / 4)).to(dtype)
    yield "near the end of the range", (plain.sign() * (limits.max / 4)).to(dtype)
