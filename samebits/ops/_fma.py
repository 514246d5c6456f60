"""A fused multiply-add with one rounding, in torch operations: the reference for a kernel's native one.

No eager operation rounds ``a * b + c`` once in a half-precision type: ``torch.addcmul`` computes in fp32 and rounds
again, and a value just beside a tie of the narrow type can be rounded to the tie on the way. Here every step is exact
until the last: the product in fp64, the sum in fp64 rounded to odd (Boldo and Melquiond, "Emulation of FMA and
correctly rounded sums", IEEE Transactions on Computers 57, 2008), so that what was cut off still decides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` with one rounding, to nearest, ties to even.

    Parameters
    ----------
    a, b, c : Tensor
        bf16, fp16 or fp32, of one dtype; shapes that broadcast.

    Returns
    -------
    Tensor
        Of their dtype, contiguous.
    """
    dtype = c.dtype
    product = a.double() * b.double()  # exact: twice 24 bits are fewer than 53
    addend = c.double()
    odd = _odd(product + addend, _error(product, addend))
    if dtype != torch.float32:
        # torch casts fp64 to a half by way of fp32, which would be a second rounding to nearest.
        odd = _odd_float32(odd)
    # The subtraction changes no number; of a NaN it makes the one that arithmetic makes on the machine at hand.
    return (odd.float() - 0.0).to(dtype).contiguous()


def _error(a: Tensor, b: Tensor) -> Tensor:
    """What ``a + b`` in fp64 lost, exactly (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return (a - (total - part)) + (b - part)


def _odd(total: Tensor, error: Tensor) -> Tensor:
    """Where something was lost and the last bit is even: the neighbour on that side, whose last bit is odd."""
    bits = total.contiguous().view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    lost = torch.isfinite(total) & (error != 0) & (bits % 2 == 0)
    return torch.where(lost, bits + step, bits).view(torch.float64)


def _odd_float32(value: Tensor) -> Tensor:
    """``value`` rounded to odd to a number that fp32 holds, subnormals too. Larger ones overflow in the cast."""
    _, exponent = torch.frexp(value)
    unit = torch.ldexp(torch.ones_like(value), (exponent - 24).clamp(min=-149))
    count = torch.trunc(value / unit)  # exact: units are powers of two
    lost = count * unit != value
    even = torch.fmod(count, 2) == 0
    sign = torch.where(value < 0, -1.0, 1.0).to(value.dtype)
    odd = torch.where(lost & even, count + sign, count) * unit
    return torch.where(torch.isfinite(value), odd, value)
