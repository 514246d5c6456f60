"""FP8 and NVFP4 checkpoints of NVIDIA ModelOpt: linears with quantised weights, and the loader of the export."""

from __future__ import annotations

from samebits.quant._fp8 import QuantizedInput, dynamic_scale, quantize_fp8
from samebits.quant.linear import Fp8Linear, QuantizedLinear

__all__ = ["Fp8Linear", "QuantizedInput", "QuantizedLinear", "dynamic_scale", "quantize_fp8"]
