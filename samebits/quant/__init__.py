"""FP8 and NVFP4 checkpoints of NVIDIA ModelOpt: linears with quantised weights, and the loader of the export.

The names are resolved lazily: reading what an export holds needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.quant._fp8 import QuantizedInput, dynamic_scale, quantize_fp8
    from samebits.quant.deferred import Deferrals, DeferredBias, why_not_defer
    from samebits.quant.export import Export, check_scales, read_export
    from samebits.quant.linear import Fp8Linear, NvFp4Linear, QuantizedLinear, how_linears_run
    from samebits.quant.loader import build, load

_HOME = {
    **dict.fromkeys(("QuantizedInput", "dynamic_scale", "quantize_fp8"), "samebits.quant._fp8"),
    **dict.fromkeys(("Deferrals", "DeferredBias", "why_not_defer"), "samebits.quant.deferred"),
    **dict.fromkeys(("Export", "check_scales", "read_export"), "samebits.quant.export"),
    **dict.fromkeys(("Fp8Linear", "NvFp4Linear", "QuantizedLinear", "how_linears_run"), "samebits.quant.linear"),
    **dict.fromkeys(("build", "load"), "samebits.quant.loader"),
}

__all__ = [
    "Deferrals",
    "DeferredBias",
    "Export",
    "Fp8Linear",
    "NvFp4Linear",
    "QuantizedInput",
    "QuantizedLinear",
    "build",
    "check_scales",
    "dynamic_scale",
    "how_linears_run",
    "load",
    "quantize_fp8",
    "read_export",
    "why_not_defer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'samebits.quant' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
