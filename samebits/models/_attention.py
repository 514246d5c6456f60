"""The call of an attention back-end, where the values may still lie in the rows of a joint projection."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.nn.functional as F
from diffusers.models import attention_dispatch as theirs
from torch import Tensor

from samebits.models._family import Line, source
from samebits.ops._library import attention_state

_DISPATCH, _SDPA = theirs.dispatch_attention_fn, F.scaled_dot_product_attention
_REGISTRY, _NATIVE = theirs._AttentionBackendRegistry, theirs.AttentionBackendName.NATIVE
SOURCES = (
    source(theirs, "dispatch_attention_fn", "cd20137f05eb6b2bb8ee83668fed404ccff976364c43e6dfaa9b14a986669dbf"),
    source(theirs, "_native_attention", "95e749097c2b477f4b6a6ea9d09cbab112ef89dcc7cd4d8681e001dc00da8f4d"),
)

OTHER_BACKEND = "the attention runs on another back-end than diffusers' native one"
PARALLEL = "the attention is distributed over several devices"
REPLACED = "diffusers' dispatch_attention_fn or torch's scaled_dot_product_attention was replaced"
CHECKED = "diffusers was asked to check every attention call"
OTHER_MASK = "the attention mask does not have four dimensions"


class Attention:
    """diffusers' ``dispatch_attention_fn`` as one site.

    Parameters
    ----------
    line : Line
        The site, of the op ``attention``.
    attn : torch.nn.Module
        Whose processor names the back-end.
    module : module
        The one that the processor's class finds ``dispatch_attention_fn`` in.
    """

    def __init__(self, line: Line, attn: Any, module: ModuleType) -> None:
        self._line = line
        self._attn = attn
        self._module: Any = module
        self._unknown = next((why for known in SOURCES if (why := known.obstacle()) is not None), None)

    def why_not(self, mask: Tensor | None = None) -> str | None:
        """Why a call keeps diffusers' own dispatch, or ``None``."""
        processor = self._attn.processor
        backend = processor._attention_backend
        if self._unknown is not None:
            return self._unknown
        if self._module.dispatch_attention_fn is not _DISPATCH or F.scaled_dot_product_attention is not _SDPA:
            return REPLACED
        if (_REGISTRY._active_backend if backend is None else backend) != _NATIVE:
            return OTHER_BACKEND
        if processor._parallel_config is not None:
            return PARALLEL
        if _REGISTRY._checks_enabled:
            return CHECKED
        if _REGISTRY._backends.get(_NATIVE) is not theirs._native_attention:
            return REPLACED
        return OTHER_MASK if mask is not None and mask.ndim != 4 else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        """Attention over ``(B, S, H, head_dim)`` without dropout; the values are contiguous or strided."""
        reason = self.why_not(mask)
        if reason is None:
            return self._line.site(query, key, value, mask, attention_state())
        self._line.declined[reason] += 1
        processor = self._attn.processor
        return self._module.dispatch_attention_fn(
            query,
            key,
            value.contiguous(),
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
