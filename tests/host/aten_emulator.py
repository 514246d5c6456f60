"""What ATen's CUDA kernels compute, step by step, in numpy: which thread adds what, in which order, rounded where.

Written from ATen's own sources and from nothing of ours, so that our kernels can be held against it:

- ``mean``: ``Reduce.cuh`` (``setReduceConfig``, ``input_vectorized_thread_reduce_impl``, ``thread_reduce_impl``,
  ``block_x_reduce``, ``block_y_reduce``) and ``MeanOps`` of ``SharedReduceOps.h``, as torch 2.10 and later have them;
- LayerNorm and the fused RMSNorm: ``vectorized_layer_norm_kernel`` of ``layer_norm_kernel.cu``. Where the source leaves
  it to the compiler, machine code was read: mean and M2 are updated by fused multiply-adds, in a combine the product
  with the other mean is rounded first, and ``1 / count`` is correctly rounded.

Arrays are ``(rows, width)`` of ``float32`` (``binary32.py``), in every function; ``rsqrt`` is handed in because the
GPU's is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from binary32 import F32, Unary, fma, rounded, rsqrt

WARP = 32
BLOCK = 512  # mnt_wrapper<T>::MAX_NUM_THREADS
LN_THREADS = 128  # 32 x 4 threads a row
LN_VECTOR = 4  # the same for every element type


@dataclass(frozen=True)
class ReducePlan:
    """The launch that ``setReduceConfig`` chooses for one reduction over the last, contiguous dimension."""

    width: int
    """``blockDim.x``: the threads that share one output."""
    height: int
    """``blockDim.y``: outputs in a block, or with ``split`` more threads for one output."""
    split: bool
    """Whether ``threadIdx.y`` too goes over the input of one output."""
    vector: int
    """Elements in one load; 0 where the input is read element by element."""

    @property
    def threads(self) -> int:
        """How many threads read one row, which is also the stride between a thread's loads."""
        return self.width * (self.height if self.split else 1)


def _floor_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def reduce_plan(rows: int, width: int, bits: int = 32) -> ReducePlan:
    """``setReduceConfig`` for ``rows`` outputs of ``width`` inputs each, of ``bits`` (32 or 16) per element.

    Raises
    ------
    ValueError
        If the plan would also split a row across blocks: that depends on the number of multiprocessors.
    """
    vector = {32: 4, 16: 8}[bits] if width >= 128 else 0
    across = width // vector if vector else width
    x_most, y_most = min(_floor_pow2(across), BLOCK), min(_floor_pow2(rows), BLOCK)
    block_x = min(x_most, WARP)
    block_y = min(y_most, BLOCK // block_x)
    block_x = min(x_most, BLOCK // block_y)
    # Counted in elements, not in vectors, and rounded up.
    split = -(-width // block_x) >= min(block_y * 16, 256)
    if split and -(-width // (block_x * block_y)) >= 256:
        raise ValueError(f"{rows} rows of {width} elements may be split across blocks, which is not emulated")
    return ReducePlan(block_x, block_y, split, vector)


def _halve(values: F32, stop: int) -> F32:
    """Fold the last axis: the lower half takes the upper half in, down to ``stop`` entries."""
    while values.shape[-1] > stop:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values


def _thread_sums(x: F32, plan: ReducePlan, shift: int) -> F32:
    """One partial sum per thread, ``(rows, threads)``. ``shift``: elements between an aligned address and each row."""
    rows, width = x.shape
    lanes = max(plan.vector, 4)
    sums = np.zeros((rows, plan.threads, lanes), np.float32)
    if plan.vector == 0:
        for step, start in enumerate(range(0, width, plan.threads)):
            part = x[:, start : start + plan.threads]
            sums[:, : part.shape[1], step % 4] += part
    else:
        if shift:  # the unaligned head: thread `shift + i` takes element i
            head = plan.vector - shift
            sums[:, shift : plan.vector, 0] += x[:, :head]
            x, width = x[:, head:], width - head
        vectors = width // plan.vector
        packed = x[:, : vectors * plan.vector].reshape(rows, vectors, plan.vector)
        for start in range(0, vectors, plan.threads):
            part = packed[:, start : start + plan.threads]
            sums[:, : part.shape[1]] += part
        tail = x[:, vectors * plan.vector :]  # one element for each of the first threads of the first warp row
        sums[:, : tail.shape[1], 0] += tail
    total = sums[..., 0]
    for lane in range(1, lanes):
        total = total + sums[..., lane]
    return total


def aten_sum(x: F32, plan: ReducePlan, offset: int = 0) -> F32:
    """The sum of every row, ``(rows,)``, in the order of ``plan``.

    ``offset`` is the distance in elements of the first row from a 16-byte boundary; the rows lie one after the other.
    """
    rows, width = x.shape
    unit = plan.vector or 1
    shifts = (offset + np.arange(rows, dtype=np.int64) * width) % unit
    out = np.empty(rows, np.float32)
    with np.errstate(all="ignore"):
        for shift in np.unique(shifts):
            chosen = shifts == shift
            sums = _thread_sums(x[chosen], plan, int(shift))
            # threadIdx.x first: through shared memory down to a warp, then by shuffles; then threadIdx.y.
            folded = _halve(sums.reshape(sums.shape[0], -1, plan.width), 1)[..., 0]
            out[chosen] = _halve(folded, 1)[..., 0]
    return out


def mean_factor(rows: int, width: int) -> np.float32:
    """``float(outputs) / float(inputs)``: not always ``1 / width``, since both are rounded to ``float32`` first."""
    return np.float32(rows) / np.float32(rows * width)


def aten_mean_fp32(x: F32, rows: int | None = None, offset: int = 0) -> F32:
    """``mean(-1)`` of an fp32 tensor. ``rows``: outputs of the whole call, if ``x`` holds only some of its rows."""
    rows = x.shape[0] if rows is None else rows
    with np.errstate(all="ignore"):
        return aten_sum(x, reduce_plan(rows, x.shape[1], 32), offset) * mean_factor(rows, x.shape[1])


def aten_mean_16bit(x: F32, dtype: torch.dtype, rows: int | None = None, offset: int = 0) -> F32:
    """``mean(-1)`` of a bf16 or fp16 tensor: summed in fp32, rounded once at the end."""
    rows = x.shape[0] if rows is None else rows
    with np.errstate(all="ignore"):
        total = aten_sum(x, reduce_plan(rows, x.shape[1], 16), offset)
        return rounded(total * mean_factor(rows, x.shape[1]), dtype)


def _combine(mean: list[F32], m2: list[F32], count: list[F32]) -> tuple[F32, F32, F32]:
    """``cuWelfordCombine(dataB, dataA)``, each argument as ``[B, A]``: B is the thread's own, A came from the other."""
    (mean_b, mean_a), (m2_b, m2_a), (count_b, count_a) = mean, m2, count
    total = count_a + count_b
    coef = np.float32(1) / total
    share_a, share_b = count_a * coef, count_b * coef
    delta = mean_b - mean_a
    new_mean = fma(share_a, mean_a, share_b * mean_b)
    new_m2 = fma(share_b, (delta * delta) * count_a, m2_a + m2_b)
    empty = total == 0
    zero = np.float32(0)
    return np.where(empty, zero, new_mean), np.where(empty, zero, new_m2), total


def aten_moments(x: F32) -> tuple[F32, F32]:
    """Mean and variance of every row, ``(rows,)`` each, as ``compute_stats`` gives them. ``width % 4 == 0``."""
    rows, width = x.shape
    if width % LN_VECTOR:
        raise ValueError(f"the vectorised LayerNorm kernel is taken for widths divisible by 4, not {width}")
    packed = x.reshape(rows, -1, LN_VECTOR)
    mean, m2 = np.zeros((2, rows, LN_THREADS), np.float32)
    count = np.zeros(LN_THREADS, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, packed.shape[1], LN_THREADS):
            part = packed[:, start : start + LN_THREADS]
            active = slice(0, part.shape[1])
            for element in range(LN_VECTOR):
                value = part[..., element]
                count[active] += 1
                delta = value - mean[:, active]
                new_mean = fma(delta, np.float32(1) / count[active], mean[:, active])
                m2[:, active] = fma(delta, value - new_mean, m2[:, active])
                mean[:, active] = new_mean
        moments = [a.reshape(*a.shape[:-1], -1, WARP) for a in (mean, m2, count)]
        for axis in (-1, -2):  # lanes 16, 8, 4, 2, 1 apart, then warps 2 and 1 apart
            while moments[0].shape[axis] > 1:
                moments = list(_combine(*(np.split(a, 2, axis) for a in moments)))
        mean, m2, _ = moments
        return mean[:, 0, 0], m2[:, 0, 0] / np.float32(width)


def aten_layer_norm(x: F32, eps: float, dtype: torch.dtype, rsqrt: Unary = rsqrt) -> F32:
    """``F.layer_norm(x, (width,), None, None, eps)``, rounded to ``dtype``."""
    mean, variance = aten_moments(x)
    with np.errstate(all="ignore"):
        rstd = rsqrt(variance + np.float32(eps))
        return rounded(rstd[:, None] * (x - mean[:, None]), dtype)


def aten_mean_square(x: F32) -> F32:
    """The mean of squares, ``(rows,)``, as the fused RMSNorm takes it: the LayerNorm kernel without the mean."""
    rows, width = x.shape
    if width % LN_VECTOR:
        raise ValueError(f"the vectorised RMSNorm kernel is taken for widths divisible by 4, not {width}")
    packed = x.reshape(rows, -1, LN_VECTOR)
    m2 = np.zeros((rows, LN_THREADS), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, packed.shape[1], LN_THREADS):
            part = packed[:, start : start + LN_THREADS]
            for element in range(LN_VECTOR):
                value = part[..., element]
                m2[:, : part.shape[1]] = fma(value, value, m2[:, : part.shape[1]])
        warps = _halve(m2.reshape(rows, -1, WARP), 1)[..., 0]
        return _halve(warps, 1)[..., 0] / np.float32(width)


def aten_rms_norm_fused(x: F32, weight: F32 | None, eps: float, dtype: torch.dtype, rsqrt: Unary = rsqrt) -> F32:
    """``F.rms_norm(x, (width,), weight, eps)`` where the weight has the input's element type, rounded to ``dtype``."""
    variance = aten_mean_square(x)
    with np.errstate(all="ignore"):
        normed = rsqrt(variance + np.float32(eps))[:, None] * x
        return rounded(normed if weight is None else weight * normed, dtype)
