"""A quantised activation and its scale. Which bits the quantisation gives is said in ``samebits/ops/_quantize.py``.

A scale is an fp32 tensor: of shape ``()`` for the whole tensor, or ``(..., 1)``, one for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.ops._quantize import FP8, LARGEST, quantize_fp8

__all__ = ["FP8", "LARGEST", "SMALLEST_SCALE", "QuantizedInput", "dynamic_scale", "quantize_fp8"]

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


def dynamic_scale(x: Tensor, per_token: bool) -> Tensor:
    """The scale that takes the largest magnitude of ``x`` to 448: ``max(amax * fp32(1 / 448), SMALLEST_SCALE)``.

    A product and no division: dividing by a Python number is a product on a GPU and a division on a CPU.

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
    return (largest.float() * (1.0 / LARGEST)).clamp(min=SMALLEST_SCALE)
