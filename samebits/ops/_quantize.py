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

The kernels do the same in ``_quantize.cuh``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops._op import Args, Case

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of ``float8_e4m3fn``, which has no infinity."""


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


def quantized(x: Tensor, input_scale: Tensor | None) -> Tensor:
    """``x`` itself, or quantised where a scale is given: how the references of the ops end."""
    return x if input_scale is None else quantize_fp8(x, input_scale)


def why_not_scale(input_scale: Tensor | None, device: torch.device) -> str | None:
    """Say why a kernel does not quantise with this scale, or return ``None``. It takes one fp32 number."""
    if input_scale is None:
        return None
    if input_scale.dtype != torch.float32 or input_scale.dim() != 0:
        return f"input_scale must be one float32 number; it is {tuple(input_scale.shape)} of {input_scale.dtype}"
    if input_scale.device != device:
        return f"input_scale must be on {device}; it is on {input_scale.device}"
    return None


def quantized_case(case: Case, place: int) -> Case:
    """The same case with a scale as argument number ``place``, counted from 0: its result is quantised."""

    def build(device: torch.device, seed: int) -> Args:
        args = case.build(device, seed)
        scale = torch.tensor(0.01 if seed % 2 else 0.0113, device=device)
        return (*args, *(None,) * (place - len(args)), scale)

    return Case(f"{case.name} fp8", case.dtype, case.rows, build)
