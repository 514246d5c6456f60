"""The FP8 quantisation of an activation: the one place that says which bits it gives.

The chain, each step an eager operation of its own, so that a fused kernel has something exact to be compared with:

====================  ==========================================================================================
``s = 1 / scale``     fp32, one rounding (IEEE division)
``v = float(x) * s``  ``x`` widened to fp32, which is exact for bf16 and fp16; the product rounded once, in fp32
``clamp(v)``          to [-448, 448]; NaN stays NaN, -0.0 stays -0.0
``float8_e4m3fn(v)``  round to nearest, ties to even; subnormals down to 2^-9 are kept
====================  ==========================================================================================

Multiplying by the reciprocal is what ModelOpt's simulated quantisation does with its inputs, and what the serving
engines' kernels do with a static scale (vLLM, SGLang, TensorRT-LLM): one division a call instead of one an element.
ModelOpt's own FP8 GEMM divides instead; the two differ where a quotient lies within a rounding of a tie.

A scale is an fp32 tensor: of shape ``()`` for the whole tensor, or ``(..., 1)``, one for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of ``float8_e4m3fn``, which has no infinity."""
SMALLEST_SCALE = 1.0 / (LARGEST * 512.0)
"""No dynamic scale is smaller: a row of zeros would divide by zero. The same floor as in vLLM's kernels."""


@dataclass(frozen=True, eq=False)
class QuantizedInput:
    """An activation that is quantised already, for one or more linears to multiply with. Not a tensor.

    Attributes
    ----------
    values : Tensor
        ``(..., K)`` float8_e4m3fn, contiguous: what :func:`quantize_fp8` returns for ``x`` and ``scale``.
    scale : Tensor
        fp32, ``()`` or ``(..., 1)``: what ``values`` are multiplied with to give the activation again.
    dtype : torch.dtype
        The dtype of the activation, in which a linear gives its result.

    Raises
    ------
    TypeError, ValueError
        The three do not belong together.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        values, scale = self.values, self.scale
        half_or_more = self.dtype.is_floating_point and self.dtype.itemsize > 1
        if values.dtype != FP8 or scale.dtype != torch.float32 or not half_or_more:
            got = f"{values.dtype}, {scale.dtype} and {self.dtype}"
            raise TypeError(f"expected float8_e4m3fn values, an fp32 scale and the activation's dtype, got {got}.")
        if scale.ndim and scale.shape != (*values.shape[:-1], 1):
            wanted = f"() or {(*values.shape[:-1], 1)}"
            raise ValueError(
                f"expected a scale of shape {wanted} for values {tuple(values.shape)}, got {tuple(scale.shape)}."
            )


def quantize_fp8(x: Tensor, input_scale: Tensor) -> Tensor:
    """Quantise an activation: the chain at the head of this file.

    Parameters
    ----------
    x : Tensor
        ``(..., K)`` bf16, fp16 or fp32, any strides.
    input_scale : Tensor
        fp32, ``()`` or ``(..., 1)``, greater than zero.

    Returns
    -------
    Tensor
        ``(..., K)`` float8_e4m3fn, contiguous.
    """
    scaled = x.float() * input_scale.reciprocal()
    return scaled.clamp(-LARGEST, LARGEST).to(FP8).contiguous()


def dynamic_scale(x: Tensor, per_token: bool) -> Tensor:
    """The scale that takes the largest magnitude of ``x`` to 448: ``max(amax / 448, SMALLEST_SCALE)`` in fp32.

    Parameters
    ----------
    x : Tensor
        ``(..., K)``.
    per_token : bool
        One scale for each row of ``x``, ``(..., 1)``, instead of one for all of it, ``()``. With one for all, what a
        batch holds beside a picture moves that picture's bits.
    """
    if not x.numel():
        return x.new_full((*x.shape[:-1], 1) if per_token else (), SMALLEST_SCALE, dtype=torch.float32)
    largest = x.abs().amax(dim=-1, keepdim=True) if per_token else x.abs().amax()
    return (largest.float() / LARGEST).clamp(min=SMALLEST_SCALE)
