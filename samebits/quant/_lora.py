"""Adapters are not fused into quantised weights: there is nothing to add to, and what is added anyway is nonsense.

peft's plain way fails on the bytes with a sentence of torch's; its safe way casts the adapter's product to bytes and
adds those, without an error. diffusers' ``fuse_lora`` applies a function of its own to every module of a model,
children first. So a quantised linear is asked before the adapter around it is, and says no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from samebits.errors import LoraFusingError

_FUSES = "_fuse_lora_apply"
"""What diffusers' ``fuse_lora`` applies: a ``functools.partial`` of the model's method of this name."""


def refuse_fusing(function: Callable[..., Any], linear: nn.Module, quantized: type[nn.Module]) -> None:
    """Raise where ``function`` is about to fuse adapters of a model into ``quantized`` linears, ``linear`` the first.

    Raises
    ------
    LoraFusingError
        An adapter that is to be fused is around at least one of them. Adapters elsewhere are no matter.
    """
    method = getattr(function, "func", None)
    model = getattr(method, "__self__", None)
    if getattr(method, "__name__", "") != _FUSES or not isinstance(model, nn.Module):
        return
    if next((module for module in model.modules() if isinstance(module, quantized)), None) is not linear:
        return  # The first one answered for all.
    chosen = getattr(function, "keywords", {}).get("adapter_names")
    around = [
        name
        for name, module in model.named_modules()
        if isinstance(module._modules.get("base_layer"), quantized) and _would_fuse(module, chosen)
    ]
    if around:
        raise LoraFusingError(count=len(around), first=around[0])


def _would_fuse(wrapper: Any, chosen: list[str] | None) -> bool:
    """Whether an adapter of this wrapper is among those that are to be fused."""
    names = getattr(wrapper, "active_adapters", ()) if chosen is None else chosen
    held = getattr(wrapper, "lora_A", None)
    return held is None or any(name in held for name in names)
