"""What decides which kernel one of torch's libraries runs, beyond the tensors: flags of the process, as one text.

An op whose kernel is a call into such a library has that text among its arguments. So it is a part of the signature,
and a flag that moves after a verdict makes another signature, which is compared anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

ALIGNMENT_BYTES = 256
"""cuBLASLt is told the alignment of every matrix up to so many bytes, and may choose by it."""


def _settled(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def reader(*names: str) -> Callable[[], str]:
    """Return a function that reads these functions of ``torch._C`` without arguments. One that torch lacks is left out.

    The text is made once per combination of values: reading costs a microsecond.
    """
    functions = [(name, function) for name in names if (function := getattr(torch._C, name, None)) is not None]
    texts: dict[Hashable, str] = {}

    def state() -> str:
        values = tuple([_settled(function()) for _, function in functions])
        text = texts.get(values)
        if text is None:
            pairs = zip(functions, values, strict=True)
            told = (f"{name.strip('_').removeprefix('get_')}={value}" for (name, _), value in pairs)
            text = texts[values] = " ".join(told)
        return text

    return state


TUNABLE = "cuda_tunableop_is_enabled"
blas_state = reader(
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_blas_preferred_backend",
    "_get_sm_carveout_experimental",
    f"_{TUNABLE}",
)
"""What matrix products of halves depend on."""

attention_state = reader(
    "_get_sdp_priority_order",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
)
"""What ``scaled_dot_product_attention`` chooses its back-end by."""
