"""The eager chains on the CPU with a GPU's bits: every ATen kernel of a chain is a step of ``aten_emulator``.

Arguments and results are torch tensors on the CPU, in the order of the ops' references. Between two eager kernels a
value is rounded to the element type that the eager tensor has; that is what ``rounded`` stands for below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from aten_emulator import (
    aten_layer_norm,
    aten_mean_16bit,
    aten_mean_fp32,
    aten_rms_norm_fused,
)
from binary32 import F32, Unary, decode, encode, fma, rounded
from binary32 import exp as c_exp
from binary32 import rsqrt as correctly_rounded
from binary32 import tanh as c_tanh

from samebits.ops._fma import fused_multiply_add
from samebits.ops._quantize import quantized

Tensor = torch.Tensor


def _modulation_row(batch: int, tokens: int, index: Tensor | None) -> npt.NDArray[np.int64]:
    """Every token's modulation row, ``(batch, tokens)``: where ``index`` is 0 or missing row ``b``, else ``b + B``."""
    own = np.arange(batch)[:, None].repeat(tokens, 1)
    return own if index is None else own + batch * (index.numpy() != 0)


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
    row = _modulation_row(batch, tokens, index)
    normed = aten_layer_norm(decode(x).reshape(-1, width), eps, dtype, rsqrt).reshape(batch, tokens, width)
    with np.errstate(all="ignore"):
        one_plus = rounded(np.float32(1) + decode(scale), dtype)[row]
        scaled = rounded(normed * one_plus, dtype)
        return encode(scaled + decode(shift)[row], dtype)


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
    gate_msa: Tensor | None = None,
    gate_mlp: Tensor | None = None,
    *,
    rsqrt: Unary = correctly_rounded,
    tanh: Unary = c_tanh,
    rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`scaled_norm`, with two gates also their tanh, a kernel each."""
    normed = scaled_norm(x, weight, scale, eps, rsqrt=rsqrt, rows=rows)
    return normed if gate_msa is None or gate_mlp is None else (normed, *_opened((gate_msa, gate_mlp), tanh))


def _opened(gates: tuple[Tensor, Tensor], tanh: Unary) -> list[Tensor]:
    """The ``tanh`` of each gate, a kernel of its own."""
    with np.errstate(all="ignore"):
        return [encode(tanh(decode(gate)), gate.dtype) for gate in gates]


def scaled_norm(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    *,
    rsqrt: Unary = correctly_rounded,
    rows: int | None = None,
) -> Tensor:
    """diffusers' ``RMSNorm`` over the full width of ``x (..., D)``, ``1 + scale (B, 1, D)``, and their product."""
    normed = _diffusers_rms_norm(x, weight, eps, rsqrt, rows)
    if scale is None:
        return normed
    with np.errstate(all="ignore"):
        one_plus = rounded(np.float32(1) + decode(scale), scale.dtype)
        return encode(decode(normed) * one_plus, torch.promote_types(normed.dtype, scale.dtype))


def gated_residual(h: Tensor, gate: Tensor, y: Tensor, clip: bool = False, index: Tensor | None = None) -> Tensor:
    """``h + gate * y``, ``h`` and ``y`` ``(B, S, D)``: two kernels; with ``clip`` a third.

    ``gate`` is ``(B, D)``, or ``(2B, D)`` with ``index (B, S)``, as in :func:`layer_norm_modulate`.
    """
    row = _modulation_row(*h.shape[:2], index)
    with np.errstate(all="ignore"):
        gated = rounded(decode(gate)[row] * decode(y), h.dtype)
        total = rounded(decode(h) + gated, h.dtype)
        if clip:
            # clamp: bounds in fp32, NaN is handed on, and the result is rounded as every other.
            total = np.where(
                np.isnan(total), total, np.minimum(np.maximum(total, np.float32(-65504)), np.float32(65504))
            )
        return encode(total, h.dtype)


def gated_residual_norm_modulate(
    h: Tensor,
    gate: Tensor,
    y: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    clip: bool = False,
    index: Tensor | None = None,
    *,
    rsqrt: Unary = correctly_rounded,
) -> tuple[Tensor, Tensor]:
    """The gated residual, then :func:`layer_norm_modulate` of it; both results."""
    h = gated_residual(h, gate, y, clip, index)
    return h, layer_norm_modulate(h, scale, shift, eps, index, rsqrt=rsqrt)


def of_both_streams(image: tuple[Any, ...], text: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """:func:`gated_residual_norm_modulate` of an image's arguments, and of a text's ``(h, gate, y, scale, shift)``."""
    eps, clip = image[5], len(image) > 6 and image[6]
    return *gated_residual_norm_modulate(*image[:8]), *gated_residual_norm_modulate(*text, eps, clip)


def quantize_fp8(x: Tensor, input_scale: Tensor) -> Tensor:
    """Eager's own chain, whose steps have a GPU's bits on the CPU but for NaN: a GPU's product has but one."""
    result = quantized(x, input_scale)
    return result.view(torch.uint8).masked_fill(x.isnan(), 0x7F).view(result.dtype)


def bias_gated_residual(
    h: Tensor,
    gate: Tensor,
    y: Tensor,
    bias: Tensor,
    native_fma: bool = False,
    clip: bool = False,
    index: Tensor | None = None,
) -> Tensor:
    """``h + gate * (y + bias)``: three kernels, or two of which the second rounds once."""
    with np.errstate(all="ignore"):
        y = encode(rounded(decode(y) + decode(bias), y.dtype), y.dtype)
    if not native_fma:
        return gated_residual(h, gate, y, clip, index)
    total = fused_multiply_add(gate[torch.from_numpy(_modulation_row(*h.shape[:2], index))], y, h)
    total = total.clip(-65504, 65504) if clip else total
    # The GPU's conversions and multiply-adds write one NaN; this CPU's keep a sign.
    integers, one_nan = (torch.int32, 0x7FFFFFFF) if total.dtype == torch.float32 else (torch.int16, 0x7FFF)
    return total.view(integers).masked_fill(total.isnan(), one_nan).view(total.dtype)


def bias_gated_residual_norm_modulate(
    h: Tensor,
    gate: Tensor,
    y: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    native_fma: bool = False,
    clip: bool = False,
    index: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    rsqrt: Unary = correctly_rounded,
) -> tuple[Tensor, Tensor]:
    """That residual, then :func:`layer_norm_modulate` of it, quantised where a scale is given; both results."""
    h = bias_gated_residual(h, gate, y, bias, native_fma, clip, index)
    z = layer_norm_modulate(h, scale, shift, eps, index, rsqrt=rsqrt)
    return h, z if input_scale is None else quantize_fp8(z, input_scale)


def gated_residual_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    y: Tensor,
    y_weight: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    gate_msa: Tensor | None = None,
    gate_mlp: Tensor | None = None,
    *,
    rsqrt: Unary = correctly_rounded,
    tanh: Unary = c_tanh,
    rows: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``x + gate * RMSNorm(y)`` of ``(B, S, D)``; with ``weight`` also :func:`scaled_norm` of it; gates opened."""
    branch = decode(_diffusers_rms_norm(y, y_weight, eps, rsqrt, rows))
    with np.errstate(all="ignore"):
        if gate is not None:
            branch = rounded(decode(gate) * branch, x.dtype)
        stream = encode(decode(x) + branch, x.dtype)
    if weight is None:
        return stream
    normed = scaled_norm(stream, weight, scale, eps, rsqrt=rsqrt, rows=rows)
    return stream, normed, *(() if gate_msa is None or gate_mlp is None else _opened((gate_msa, gate_mlp), tanh))


def gelu_tanh(x: Tensor, *, tanh: Unary = c_tanh) -> Tensor:
    """``GeluCUDAKernelImpl`` with ``GeluType::Tanh``: one kernel in fp32, of which the compiler contracts one sum."""
    values = decode(x)
    beta = np.float32(np.sqrt(2.0) * (2.0 / np.sqrt(np.pi)) * 0.5)
    with np.errstate(all="ignore"):
        cube = values * values * values
        inner = beta * fma(np.float32(0.044715), cube, values)
        return encode(np.float32(0.5) * values * (np.float32(1) + tanh(inner)), x.dtype)


def swiglu(a: Tensor, b: Tensor, *, exp: Unary = c_exp) -> Tensor:
    """``silu_kernel``, ``x / (1 + exp(-x))`` in fp32, rounded; then a product in a kernel of its own."""
    values = decode(a)
    with np.errstate(all="ignore"):
        return encode(rounded(values / (np.float32(1) + exp(-values)), a.dtype) * decode(b), a.dtype)


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """``x (B, S, H, D)`` as complex neighbours times ``table``, complex64 ``(S, D / 2)`` or ``(B, S, D / 2)``."""
    values = decode(x).reshape(*x.shape[:-1], -1, 2)
    parts = torch.view_as_real(table).numpy()
    a, b = values[..., 0], values[..., 1]
    cos, sin = (parts[..., part][..., None, :] for part in (0, 1))
    with np.errstate(all="ignore"):
        # `a * cos - b * sin` and `a * sin + b * cos` as the compiler contracts them: the first product, not the second.
        turned = np.stack([fma(a, cos, -(b * sin)), fma(a, sin, b * cos)], -1)
    return encode(turned.reshape(x.shape), x.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    text_q_weight: Tensor | None,
    text_k_weight: Tensor | None,
    text_table: Tensor | None,
    eps: float,
    kind: str,
    *,
    rsqrt: Unary = correctly_rounded,
    rows: int | None = None,
) -> tuple[Tensor, ...]:
    """The norms of :func:`qk_norm`, rotated, and the values; those of the text, if there are any, before the others."""
    joint: list[list[Tensor]] = [[], [], []]
    for stream in (
        (text_q, text_k, text_v, text_q_weight, text_k_weight, text_table),
        (q, k, v, q_weight, k_weight, table),
    ):
        if stream[0] is None:
            continue
        normed = qk_norm(stream[0], stream[1], stream[3], stream[4], eps, kind, rsqrt=rsqrt, rows=rows)
        for parts, x in zip(joint, (*(_rotated(x, stream[5]) for x in normed), stream[2]), strict=True):
            parts += [] if x is None else [x]
    return tuple(torch.cat(parts, 1) for parts in joint if parts)
