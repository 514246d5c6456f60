"""NVFP4: packing, scales and their layout. A number is E2M1 times the scale of its 16 columns times one for the tensor.

E2M1 has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two columns share a byte, the
even one in the low half. The scale of 16 columns is a positive ``float8_e4m3fn``; the one of the tensor is fp32.

How an activation is quantised on the way in, all in fp32:

=========================================== ==========================================================================
``t = amax(|x|) * fp32(1 / 6)``             of 16 columns; one rounding
``s = float8_e4m3fn(clamp(t * (1 / g)))``   ``g`` is the tensor's scale; clamped to [2^-9, 448], ties to even
``v = x * (1 / (s * g))``                   each step rounded once
``E2M1(v)``                                 nearest, ties to the even code; beyond 6 is 6; NaN is 6 with x's sign
=========================================== ==========================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.quant._export_config import GROUP
from samebits.quant._fp8 import FP8, LARGEST
from samebits.quant._scaled_mm import capability

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_VALUES, *(-value for value in _VALUES))
_LARGEST_E2M1 = 6.0
_SMALLEST_SCALE = 2.0**-9
_TIE_DOWN, _TIE_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""The middles between neighbours: at the first kind the lower one is even, at the second the upper one."""


def dequantize(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """The numbers that a packed weight stands for.

    Parameters
    ----------
    weight : Tensor
        ``(N, K / 2)`` uint8.
    weight_scale : Tensor
        ``(N, K / 16)`` float8_e4m3fn.
    weight_scale_2 : Tensor
        fp32, ``()``.

    Returns
    -------
    Tensor
        ``(N, K)`` fp32: code times (scale times scale), two roundings.
    """
    table = torch.tensor(_E2M1, dtype=torch.float32, device=weight.device)
    codes = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)
    scales = weight_scale.float() * weight_scale_2
    rows, groups = scales.shape
    return (table[codes.int()].view(rows, groups, GROUP) * scales.unsqueeze(-1)).flatten(-2)


def quantize(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise an activation: the chain at the head of this file.

    Parameters
    ----------
    x : Tensor
        ``(M, K)``, K a multiple of 16.
    input_scale : Tensor
        fp32, ``()``.

    Returns
    -------
    tuple of Tensor
        ``(M, K / 2)`` uint8 and ``(M, K / 16)`` float8_e4m3fn, both contiguous.
    """
    groups = x.float().reshape(x.shape[0], -1, GROUP)
    wanted = groups.abs().amax(dim=-1) * (1.0 / _LARGEST_E2M1)
    scales = (wanted * input_scale.reciprocal()).clamp(_SMALLEST_SCALE, LARGEST).to(FP8)
    values = (groups * (scales.float() * input_scale).reciprocal().unsqueeze(-1)).flatten(-2)
    size = values.abs()
    codes = values.signbit().to(torch.uint8) << 3
    for tie in _TIE_DOWN:
        codes += ~(size <= tie)  # so that NaN, which is not below anything, is above everything
    for tie in _TIE_UP:
        codes += ~(size < tie)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def blocked(scales: Tensor) -> Tensor:
    """Scales in the order in which cuBLAS reads them: tiles of 128 rows and 4 columns, a tile's rows 32 apart together.

    Parameters
    ----------
    scales : Tensor
        ``(rows, columns)`` float8_e4m3fn.

    Returns
    -------
    Tensor
        Flat, of ``ceil(rows / 128) * 128 * ceil(columns / 4) * 4`` elements, zero where there was none. Element
        ``(r, c)`` is in tile ``r // 128 * tiles_a_row + c // 4`` at ``r % 32 * 16 + r % 128 // 32 * 4 + c % 4``.
    """
    rows, columns = scales.shape
    # As integers: not every operation takes float8.
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # (tile row, quarter, row, tile column, column)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(FP8)


def why_no_fp4(device: torch.device, out_features: int, in_features: int) -> str | None:
    """Why ``torch._scaled_mm`` cannot multiply FP4 matrices of this size there: a sentence, or ``None`` if it can."""
    have = capability(device)
    if have[0] not in (10, 12):
        what = f"compute capability {have[0]}.{have[1]}" if device.type == "cuda" else device.type
        return f"{what} has no FP4 tensor cores, 10.x and 12.x have"
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no FP4 type"
    if in_features % 32 or out_features % 16:
        return "cuBLAS takes FP4 matrices with K a multiple of 32 and N of 16 only"
    return None


def fp4_native(x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Quantise ``(M, K)`` and multiply: ``(M, N)`` fp32 sums, still without both tensors' own scales.

    Not run by us: we have no GPU that can. The packing and the layout of the scales are tested against a decoder.
    """
    packed, scales = quantize(x, input_scale)
    sums: Tensor = torch._scaled_mm(
        packed.view(torch.float4_e2m1fn_x2),
        weight.view(torch.float4_e2m1fn_x2).t(),
        scale_a=blocked(scales),
        scale_b=blocked(weight_scale),
        out_dtype=torch.float32,
    )
    return sums
