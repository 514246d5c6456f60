"""Single precision as a GPU does it, in numpy: fused multiply-add, the 16-bit roundings, NaN as the GPU writes it.

Values travel as ``float32`` arrays, whatever the element type of the tensor they stand for: every bf16 and fp16 number
is a ``float32`` number. numpy's own ``+ - * /`` on ``float32`` are IEEE operations with one rounding each and keep
subnormals, as CUDA's are without ``--use_fast_math``; what numpy does not have is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
Unary = Callable[[F32], F32]

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""The integer type through which a tensor's bits are looked at."""


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """``a * b + c`` with one rounding.

    The product of two ``float32`` is exact in ``float64``; the sum is not, and rounding it twice would be wrong near
    ties. So the sum is rounded to odd first (the last bit remembers that something was cut off), which makes the
    second rounding the right one because ``float64`` has more than 24 + 2 bits.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        # Knuth's two-sum: `lost` is exactly what the addition rounded away (NaN where something is not finite).
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        even = (bits & 1) == 0
        step = np.where((lost > 0) == (total > 0), 1, -1)  # towards the cut-off part, in units in the last place
        inexact = (lost > 0) | (lost < 0)
        odd = np.where(inexact & even, bits + step, bits).view(np.float64)
        return odd.astype(np.float32)


def rsqrt(x: npt.ArrayLike) -> F32:
    """``1 / sqrt(x)`` correctly rounded. A GPU's is an approximation; its values can be handed in instead.

    Through ``float64``: no reciprocal root lies so close to the middle between two ``float32`` that the two
    ``float64`` roundings push it over (``test_binary32.py`` tries all mantissas).
    """
    with np.errstate(all="ignore"):
        return (1.0 / np.sqrt(np.asarray(x, np.float64))).astype(np.float32)


_exp, _tanh = np.frompyfunc(math.exp, 1, 1), np.frompyfunc(math.tanh, 1, 1)


def exp(x: F32) -> F32:
    """``exp`` of the C library in ``float64``, rounded to ``float32``: what the host shim computes too.

    A GPU's is an approximation, and so is its ``tanh``; their values can be handed in instead.
    """
    with np.errstate(all="ignore"):
        # Python raises from 710 on, where ``float32`` has long been infinite.
        return _exp(np.minimum(x, np.float32(200)).astype(np.float64)).astype(np.float32)


def tanh(x: F32) -> F32:
    """``tanh`` of the C library in ``float64``, rounded to ``float32``; see :func:`exp`."""
    return _tanh(x.astype(np.float64)).astype(np.float32)


def to_bf16_bits(x: F32) -> npt.NDArray[np.uint16]:
    """The bf16 patterns of ``x``, rounded to nearest, ties to even; every NaN is 0x7FFF, as on the GPU."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Adding just under half a bf16 ulp, plus one if the kept part is odd, carries into it exactly when it must.
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def to_fp16_bits(x: F32) -> npt.NDArray[np.uint16]:
    """The fp16 patterns of ``x``, rounded to nearest, ties to even; every NaN is 0x7FFF."""
    with np.errstate(all="ignore"):
        rounded = np.ascontiguousarray(x, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bits(bits: npt.NDArray[np.uint16], dtype: torch.dtype) -> F32:
    """The values of bf16 or fp16 patterns, exactly."""
    if dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def rounded(x: F32, dtype: torch.dtype) -> F32:
    """``x`` after one rounding to ``dtype`` (none for fp32), still as ``float32`` values."""
    if dtype == torch.float32:
        return np.asarray(x, np.float32)
    return from_bits(to_bf16_bits(x) if dtype == torch.bfloat16 else to_fp16_bits(x), dtype)


def decode(tensor: torch.Tensor) -> F32:
    """The values of a fp32, bf16 or fp16 tensor of any strides, as a contiguous ``float32`` array of its shape."""
    if tensor.dtype not in BITS:
        raise TypeError(f"the emulator reads fp32, bf16 and fp16 tensors, not {tensor.dtype}")
    bits = tensor.detach().cpu().contiguous().view(BITS[tensor.dtype]).numpy()
    return bits.view(np.float32) if tensor.dtype == torch.float32 else from_bits(bits.view(np.uint16), tensor.dtype)


def encode(x: F32, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, as a contiguous CPU tensor; NaN is the GPU's 0x7FFF or 0x7FFFFFFF."""
    if dtype == torch.float32:
        bits = np.where(np.isnan(x), np.uint32(0x7FFFFFFF), np.ascontiguousarray(x, np.float32).view(np.uint32))
        return torch.from_numpy(bits.view(np.int32)).view(dtype)
    short = to_bf16_bits(x) if dtype == torch.bfloat16 else to_fp16_bits(x)
    return torch.from_numpy(short.view(np.int16)).view(dtype)
