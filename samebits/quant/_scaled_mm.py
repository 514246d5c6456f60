"""Matrix products of FP8 operands: ``torch._scaled_mm`` where the GPU has it, else a reference of the same values.

``torch._scaled_mm`` sums in fp32 on the tensor cores, scales the sum, adds the bias and rounds once. The reference
multiplies the same FP8 values in fp32, which is exact, scales, adds and rounds the same way; only the order in which
the products are summed differs, so its bits are close to the GPU's and not equal to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAST_ACCUMULATION = True
"""ModelOpt's own GEMM, vLLM's and SGLang's let Hopper's tensor cores keep partial sums in fewer bits; so do we."""

_ALIGNED = 16
"""cuBLAS wants K and N to be multiples of this for FP8 operands."""

_capabilities: dict[int | None, tuple[int, int]] = {}
"""By device index. torch takes microseconds to answer, on every call of every linear."""


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) for any other, also for AMD's GPUs, which torch calls cuda."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    known = _capabilities.get(device.index)
    if known is None:
        known = _capabilities[device.index] = torch.cuda.get_device_capability(device)
    return known


def why_no_fp8(device: torch.device, out_features: int, in_features: int) -> str | None:
    """Why ``torch._scaled_mm`` cannot multiply FP8 matrices of this size there: a sentence, or ``None`` if it can."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 tensor cores"
    have = capability(device)
    if have < (8, 9):
        return f"compute capability {have[0]}.{have[1]} has no FP8 tensor cores, 8.9 is the first"
    if out_features % _ALIGNED or in_features % _ALIGNED:
        return f"cuBLAS takes FP8 matrices with sides that are multiples of {_ALIGNED} only"
    return None


def fp8_native(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``values * scale`` times ``weight * weight_scale`` transposed, plus the bias, through ``torch._scaled_mm``.

    Parameters
    ----------
    values, scale : Tensor
        ``(M, K)`` float8_e4m3fn, contiguous, M at least 1; fp32 of shape ``()`` or ``(M, 1)``.
    weight, weight_scale : Tensor
        ``(N, K)`` float8_e4m3fn, contiguous; fp32 of shape ``()`` or ``(N,)``.
    bias : Tensor or None
        ``(N,)``.
    dtype : torch.dtype
        Of the result, ``(M, N)``.

    Notes
    -----
    The scales must be both of the whole tensor or both of a row. Not every GPU and release writes another dtype than
    bf16 under scales of a row: for another one the plain sums come out in fp32 and are scaled, added to and rounded
    here. So is a bias under an fp32 result, which ``torch._scaled_mm`` refuses. The memory of ``values`` and ``weight``
    must start at a multiple of 16 bytes.
    """
    by_row = scale.ndim > 0 or weight_scale.ndim > 0
    if by_row and dtype != torch.bfloat16:
        one = scale.new_ones(())
        sums = _scaled_mm(values, weight, one, one, None, torch.float32)
        return finish(sums, scale, weight_scale, bias, dtype)
    if by_row:
        rows, columns = values.shape[0], weight.shape[0]
        scale = (scale if scale.ndim else scale.expand(rows, 1)).contiguous()
        weight_scale = weight_scale.expand(columns).reshape(1, columns).contiguous()
    inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
    product = _scaled_mm(values, weight, scale, weight_scale, inside, dtype)
    return product if inside is not None or bias is None else product + bias


def _scaled_mm(
    values: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )


def fp8_reference(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same as :func:`fp8_native` on any device: every product exact, sums in fp32, one rounding at the end."""
    with torch.autocast(values.device.type, enabled=False):
        if values.device.type == "cuda" and values.shape[0]:
            # Both operands are exact in bf16, and the sums leave the tensor cores in fp32.
            sums = torch.mm(values.to(torch.bfloat16), weight.to(torch.bfloat16).t(), out_dtype=torch.float32)
        else:
            sums = torch.mm(values.float(), weight.float().t())
        return finish(sums, scale, weight_scale, bias, dtype)


def finish(sums: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``sums * (scale * weight_scale) + bias`` in fp32, rounded once to ``dtype``."""
    result = sums * (scale * weight_scale)
    return (result if bias is None else result + bias.float()).to(dtype)
