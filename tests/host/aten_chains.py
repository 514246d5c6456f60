"""The three eager chains on the CPU with a GPU's bits: every ATen kernel of a chain is a step of ``aten_emulator``.

Arguments and results are torch tensors on the CPU, in the order of the ops' references. Between two eager kernels a
value is rounded to the element type that the eager tensor has; that is what ``rounded`` stands for below.
"""

from __future__ import annotations

import numpy as np
import torch
from aten_emulator import (
    aten_layer_norm,
    aten_mean_16bit,
    aten_mean_fp32,
    aten_rms_norm_fused,
)
from binary32 import F32, Unary, decode, encode, rounded
from binary32 import rsqrt as correctly_rounded

Tensor = torch.Tensor


def layer_norm_modulate(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    index: Tensor | None = None,
    *,
    rsqrt: Unary = correctly_rounded,
) -> Tensor:
    """LayerNorm of ``x (B, S, D)``, times ``1 + scale``, plus ``shift``; all of one element type.

    ``scale`` and ``shift`` are ``(B, D)``, or ``(2B, D)`` with ``index (B, S)``: 0 takes row ``b``, else row ``b + B``.
    """
    dtype, (batch, tokens, width) = x.dtype, x.shape
    row = torch.arange(batch)[:, None] + (torch.zeros(1, tokens).long() if index is None else batch * (index != 0))
    normed = aten_layer_norm(decode(x).reshape(-1, width), eps, dtype, rsqrt).reshape(batch, tokens, width)
    with np.errstate(all="ignore"):
        one_plus = rounded(np.float32(1) + decode(scale), dtype)[row.numpy()]
        scaled = rounded(normed * one_plus, dtype)
        return encode(scaled + decode(shift)[row.numpy()], dtype)


def _diffusers_rms_norm(x: Tensor, weight: Tensor | None, eps: float, rsqrt: Unary, rows: int | None) -> Tensor:
    """diffusers' ``RMSNorm``: everything in fp32 up to the cast that its weight's element type asks for."""
    values = decode(x).reshape(-1, x.shape[-1])
    half = (torch.float16, torch.bfloat16)
    with np.errstate(all="ignore"):
        variance = aten_mean_fp32(values * values, rows)
        normed = values * rsqrt(variance + np.float32(eps))[:, None]
        if weight is None:
            return encode(normed, x.dtype).reshape(x.shape)
        if weight.dtype in half:
            return encode(rounded(normed, weight.dtype) * decode(weight), weight.dtype).reshape(x.shape)
        return encode(normed * decode(weight), torch.float32).reshape(x.shape)


def _native_rms_norm(x: Tensor, weight: Tensor, eps: float, rsqrt: Unary, rows: int | None) -> Tensor:
    """``x * rsqrt(x.pow(2).mean(-1) + eps) * weight`` with every step in the element type of ``x``."""
    dtype, values = x.dtype, decode(x).reshape(-1, x.shape[-1])
    with np.errstate(all="ignore"):
        squares = rounded(values * values, dtype)
        variance = aten_mean_fp32(squares, rows) if dtype == torch.float32 else aten_mean_16bit(squares, dtype, rows)
        root = rounded(rsqrt(rounded(variance + np.float32(eps), dtype)), dtype)
        normed = rounded(values * root[:, None], dtype)
        return encode(normed * decode(weight), torch.promote_types(dtype, weight.dtype)).reshape(x.shape)


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float, rsqrt: Unary, rows: int | None) -> Tensor:
    """``F.rms_norm`` with a weight of the input's element type: one kernel, so one rounding."""
    if weight.dtype != x.dtype:
        raise TypeError(f"F.rms_norm takes its fused kernel for equal types only, not {x.dtype} with {weight.dtype}")
    values: F32 = decode(x).reshape(-1, x.shape[-1])
    return encode(aten_rms_norm_fused(values, decode(weight), eps, x.dtype, rsqrt), x.dtype).reshape(x.shape)


KINDS = {"diffusers": _diffusers_rms_norm, "native": _native_rms_norm, "torch": _torch_rms_norm}


def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    kind: str,
    *,
    rsqrt: Unary = correctly_rounded,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-head RMSNorm of ``q (B, S, H, hd)`` and ``k (B, S, Hk, hd)``, two calls of one of three references.

    ``rows`` overrules the row counts from which the plans of both means are made, for negative controls.
    """
    return KINDS[kind](q, q_weight, eps, rsqrt, rows), KINDS[kind](k, k_weight, eps, rsqrt, rows)


def rms_norm_scale(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    *,
    rsqrt: Unary = correctly_rounded,
    rows: int | None = None,
) -> Tensor:
    """diffusers' ``RMSNorm`` over the full width of ``x (..., D)``, then ``* scale (B, 1, D)`` as a second kernel."""
    normed = _diffusers_rms_norm(x, weight, eps, rsqrt, rows)
    if scale is None:
        return normed
    with np.errstate(all="ignore"):
        return encode(decode(normed) * decode(scale), torch.promote_types(normed.dtype, scale.dtype))
