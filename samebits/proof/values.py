"""Rows that break careless arithmetic, and random ones: what the inputs of an op are filled with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AMPLITUDES = (0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0, 80.0, 200.0)
"""Standard deviations of random rows."""

_Pattern = Callable[[Tensor, torch.dtype], Tensor]


def _ties(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Few digits: products and sums of two of them often lie in the middle between two numbers."""
    return (noise * 8).round() / 16 + torch.where(noise > 0, 1.0, -1.0) * 2.0**-6


def _cancelling(noise: Tensor, dtype: torch.dtype) -> Tensor:
    large = noise * 0 + 1000.0
    large[..., 1::2] *= -1
    return large + noise


def _huge_squares(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Squares beyond the range: of fp16 already at 3e4, of fp32 and bf16 at 3e19."""
    return noise.sign() * (3.0e4 if dtype == torch.float16 else 3.0e19)


def _constant(noise: Tensor, dtype: torch.dtype) -> Tensor:
    return noise[..., :1].expand_as(noise)


def _outlier(noise: Tensor, dtype: torch.dtype) -> Tensor:
    noise = noise.clone()
    noise[..., noise.shape[-1] // 3] = 3.0e4
    return noise


def _subnormal(noise: Tensor, dtype: torch.dtype) -> Tensor:
    return (noise.double() * torch.finfo(dtype).smallest_normal / 4).to(torch.float64)


def _largest(noise: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(noise > 0, 1.0, -1.0).double() * torch.finfo(dtype).max


def _zeros(noise: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(noise > 0, 0.0, -0.0)


def _far(noise: Tensor, dtype: torch.dtype) -> Tensor:
    return noise + 100.0


def _telling(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """A few squares are 2^24 times the others: one of those is lost when it meets them, a group is not."""
    row = torch.where(noise > 0, 1.0, -1.0) * (noise.abs().clamp(max=1.0) + 1) / 32
    large = noise.abs() > noise.abs().topk(min(3, noise.shape[-1]), dim=-1).values[..., -1:] * 0.999999
    return torch.where(large, 128 + noise.abs(), row)


def _lanes(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """All of the variance lies between threads: every four neighbours are equal."""
    own = noise[..., ::4].repeat_interleave(4, -1)[..., : noise.shape[-1]]
    return torch.nn.functional.pad(own, (0, noise.shape[-1] - own.shape[-1])) + 1


def _warps(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """All of it lies between warps."""
    own = noise[..., ::128].repeat_interleave(128, -1)[..., : noise.shape[-1]]
    return torch.nn.functional.pad(own, (0, noise.shape[-1] - own.shape[-1])) + 1


def _nan(noise: Tensor, dtype: torch.dtype) -> Tensor:
    noise = noise.clone()
    noise[..., noise.shape[-1] // 2] = torch.nan
    return noise


def _infinite(noise: Tensor, dtype: torch.dtype) -> Tensor:
    noise = noise.clone()
    noise[..., -1] = torch.inf
    noise[::2, ..., 0] = -torch.inf
    return noise


def _scales(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Every magnitude of the type in one row."""
    limits = torch.finfo(dtype)
    low, high = torch.tensor([limits.smallest_normal, limits.max], dtype=torch.float64).log2().tolist()
    exponents = torch.linspace(low + 1, high - 3, noise.shape[-1], dtype=torch.float64, device=noise.device)
    return noise.double() * torch.exp2(exponents)


PATTERNS: dict[str, _Pattern] = {
    "ordinary": lambda noise, dtype: noise,
    "rounding ties": _ties,
    "cancellation": _cancelling,
    "overflow inside squares": _huge_squares,
    "zero variance": _constant,
    "one huge outlier": _outlier,
    "subnormals": _subnormal,
    "max finite": _largest,
    "signed zeros": _zeros,
    "far from zero": _far,
    "sums that show their order": _telling,
    "lanes differ": _lanes,
    "warps differ": _warps,
    "NaN": _nan,
    "infinities": _infinite,
    "every magnitude": _scales,
}


def adversarial(like: Tensor, generator: torch.Generator) -> Tensor:
    """Rows for a ``(..., D)`` tensor, row i of pattern i, counted round: as many as it has, at least one of each.

    Returns
    -------
    Tensor
        ``(rows, D)`` of the tensor's type; the number of rows is a multiple of the number of patterns.
    """
    patterns = list(PATTERNS.values())
    width = like.shape[-1]
    each = -(-like.numel() // width // len(patterns)) or 1
    rows = torch.empty(each, len(patterns), width, dtype=like.dtype, device=like.device)
    limit = torch.finfo(like.dtype).max
    for number, pattern in enumerate(patterns):
        noise = torch.randn(each, width, generator=generator, device=like.device)
        made = pattern(noise, like.dtype)
        # Out of range is what the chain makes of its values, not what it is given.
        rows[:, number] = torch.where(made.isfinite(), made.clamp(-limit, limit), made).to(like.dtype)
    return rows.view(-1, width)


def random(tensor: Tensor, number: int, generator: torch.Generator) -> None:
    """Fill a tensor in place with normal numbers, the amplitude turning with ``number``."""
    amplitude = AMPLITUDES[number % len(AMPLITUDES)]
    mean = 10 * amplitude if number // len(AMPLITUDES) % 4 == 3 else 0.0
    tensor.normal_(mean, amplitude, generator=generator)
