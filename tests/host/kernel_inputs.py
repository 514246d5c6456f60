"""Inputs for kernels: ordinary ones, odd ones, and those in which every rounding and every order of summation shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from aten_emulator import aten_sum, mean_factor, reduce_plan
from binary32 import decode, encode, rounded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
EPS = 1e-6
Arguments = tuple[Any, ...]


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, amplitude: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * amplitude).to(dtype)


def odd_rows(width: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    """``(11, width)``: rows in which something is special, between ordinary ones."""
    rows = randn((11, width), FP32, seed)
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    rows[1] = 0
    rows[2] = -0.0
    rows[3] = 0.7  # no variance
    rows[4, width // 3] = 30000  # one huge outlier
    rows[5, 5] = torch.nan
    rows[6, width - 1] = torch.inf
    rows[7, 0], rows[7, 1] = torch.inf, -torch.inf
    rows[8] = rows[8].double().mul(tiny / 4).float()  # subnormals
    rows[9] = largest
    rows[9, ::2] = -largest
    return rows.to(dtype)


def rows_that_show_moments(rows: int, width: int, kind: str) -> torch.Tensor:
    """``(rows, width)`` fp32 numbers whose LayerNorm shows every rounding of mean and variance.

    In ordinary rows the last bit of a mean, and of what two threads' means differ by, is lost in the result. It is not
    where the mean is large, nor where all of the variance lies between threads or warps.
    """
    if kind == "far from zero":
        return randn((rows, width), FP32, 1) + 100
    threads = {"threads differ": 1, "warps differ": 32}[kind]
    own = randn((rows, 128 // threads, 1), FP32, 2).expand(-1, -1, 4 * threads).flatten(1)
    return own.repeat(1, -(-width // 512))[:, :width].contiguous() + 1


def telling_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """``(rows, width)`` numbers whose mean square depends on the order of summation in many ulps, not in the last one.

    A few squares are 2^24 times the others, so that one of the others is lost when it meets them alone, and a group
    of them is not.
    """
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand((rows, width), generator=generator) + 1) / 32
    large = 128 + torch.rand((rows, 3), generator=generator)
    x.scatter_(1, torch.randint(0, width, (rows, 3), generator=generator), large)
    return (x * (1 - 2 * torch.randint(0, 2, (rows, width), generator=generator))).to(dtype)


def rows_with_means_near_ties(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """``(rows, width)`` numbers in half precision; the mean of their squares is next to the middle of two others.

    Only there does a mean that is rounded to half precision show in which order it was summed. Three elements of a
    telling row are chosen to take it there, each from what the ones before have left; then the row is shuffled, and of
    many such rows those are taken whose sums came nearest.
    """
    candidates = 4096
    chosen, step = 3, 2.0**-8 if dtype == BF16 else 2.0**-11
    x = decode(telling_rows(candidates, width, dtype, seed))
    squares = rounded(x[:, chosen:] ** 2, dtype).astype(np.float64)
    goal = squares.sum(1) / width * 1.1
    ulp = np.exp2(np.floor(np.log2(goal))) * 2 * step
    goal = (np.ceil(goal / ulp) + 0.5) * ulp
    # Past the middle by less than what the small squares add up to, all or some of which are lost on the way.
    small = np.where(squares < 1, squares, 0).sum(1)
    left = goal * width - squares.sum(1) + small * np.random.default_rng(seed).random(candidates)
    for place in range(chosen):
        root = np.sqrt(left)
        nearest, below = (decode(torch.from_numpy(root * factor).to(dtype)) for factor in (1, 1 - step))
        x[:, place] = np.where(rounded(nearest**2, dtype) <= left, nearest, below)
        left = np.maximum(left - rounded(x[:, place] ** 2, dtype), 0)
    order = np.random.default_rng(seed).random((candidates, width)).argsort(1)
    x = np.take_along_axis(x, order, 1)
    means = aten_sum(rounded(x**2, dtype), reduce_plan(rows, width, 16)) * mean_factor(rows, width)
    cut_off = 1 << (16 if dtype == BF16 else 13)
    distance = np.abs((means.view(np.uint32) & np.uint32(cut_off - 1)).astype(np.int64) - cut_off // 2)
    return encode(x[distance.argsort()[:rows]], dtype)


def weights(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two norm weights around one."""
    return (1 + randn((width,), FP32, 11, 0.3)).to(dtype), (1 + randn((width,), FP32, 12, 0.3)).to(dtype)


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """``(16,)``: zeros, ones, subnormals, the ends of the range, infinities and two NaNs with a payload."""
    limits = torch.finfo(dtype)
    least, small, largest = limits.smallest_normal, limits.smallest_normal / 4, limits.max
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.0078125,
        -3.0,
        small,
        -small,
        least,
        largest,
        -largest,
        6e4,
        torch.inf,
        -torch.inf,
    ]
    nans = [0x7FC1, -0x3F] if dtype != FP32 else [0x7FC00001, -0x3FFFFF]  # the second is 0xFFC1, or 0xFFC00001
    integers = torch.tensor(nans, dtype=torch.int32 if dtype == FP32 else torch.int16)
    return torch.cat([torch.tensor(values).to(dtype), integers.view(dtype)])


def all_triples(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(4096,)`` thrice: every special value with every other two."""
    first, second, third = torch.meshgrid(*[special_values(dtype)] * 3, indexing="ij")
    return first.flatten(), second.flatten(), third.flatten()
