"""When a site may take over the call of a norm, and what the families' attentions share.

A site may stand for a norm only while that norm is plain: the exact class, weight and bias as the op expects them,
and nothing hooked onto it. That is asked on every call, because hooks come and go; the answer is a handful of
dictionary look-ups. The sentence that a report prints is only made when the answer is no.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn

from samebits.models._family import Function, Line, Replacement, TorchForward, source
from samebits.modules import calls_only_forward


def _why_not_plain(name: str, module: Any, cls: type) -> str | None:
    if module is None:
        return f"there is no {name}"
    if type(module) is not cls:
        return f"{name} is a {type(module).__name__}, the op stands for exactly {cls.__name__}"
    if not calls_only_forward(module.__dict__):
        return f"{name} carries a hook or a forward of its own, so it is called itself"
    return None


def is_plain_layer_norm(norm: Any, width: int) -> bool:
    """Whether ``norm`` is a LayerNorm over the last ``width`` elements, without weight, bias or hooks."""
    if type(norm) is not nn.LayerNorm:
        return False
    attributes = norm.__dict__
    parameters = attributes["_parameters"]
    return (
        parameters.get("weight") is None
        and parameters.get("bias") is None
        and attributes["normalized_shape"] == (width,)
        and calls_only_forward(attributes)
    )


def why_not_layer_norm(name: str, norm: Any, width: int | None = None) -> str | None:
    """The sentence for ``is_plain_layer_norm``, or ``None`` where it holds."""
    reason = _why_not_plain(name, norm, nn.LayerNorm)
    if reason is not None:
        return reason
    if norm.weight is not None or norm.bias is not None:
        return f"{name} has a weight or a bias, the op stands for a LayerNorm without them"
    if len(norm.normalized_shape) != 1 or (width is not None and norm.normalized_shape != (width,)):
        return f"{name} normalises over {tuple(norm.normalized_shape)}, not over the last dimension alone"
    return None


def is_plain_rms_norm(norm: Any) -> bool:
    """Whether ``norm`` is diffusers' RMSNorm with a weight, without bias or hooks."""
    if type(norm) is not RMSNorm:
        return False
    attributes = norm.__dict__
    # RMSNorm keeps a missing weight or bias as a plain attribute that is None, a given one as a parameter.
    return (
        attributes["_parameters"].get("weight") is not None
        and attributes["_parameters"].get("bias") is None
        and attributes.get("bias") is None
        and calls_only_forward(attributes)
    )


def why_not_rms_norm(name: str, norm: Any) -> str | None:
    """The sentence for ``is_plain_rms_norm``, or ``None`` where it holds."""
    reason = _why_not_plain(name, norm, RMSNorm)
    if reason is not None:
        return reason
    if norm.weight is None:
        return f"{name} has no weight, the op stands for an RMSNorm with one"
    if norm.bias is not None:
        return f"{name} has a bias, the op stands for an RMSNorm without one"
    return None


Weights = tuple[list[nn.Parameter], float]


def plain_weights(attn: Any, names: tuple[str, ...]) -> Weights | None:
    """The weights of an attention's head norms and the eps that they share; ``None`` unless all are plain and do."""
    modules = attn._modules
    weights: list[nn.Parameter] = []
    eps: float | None = None
    for name in names:
        norm = modules.get(name)
        if not is_plain_rms_norm(norm) or (weights and norm.eps != eps):
            return None
        eps = norm.eps
        weights.append(norm._parameters["weight"])
    return None if eps is None else (weights, eps)


def why_not_weights(attn: Any, names: tuple[str, ...]) -> str | None:
    """The sentence for ``plain_weights``, or ``None`` where there are some."""
    norms = [getattr(attn, name) for name in names]
    for name, norm in zip(names, norms, strict=True):
        reason = why_not_rms_norm(name, norm)
        if reason is not None:
            return reason
        if norm.eps != norms[0].eps:
            return f"{names[0]} and {name} have different eps"
    return None


OTHER_ARGUMENTS = "the attention was called with arguments that its processor does not take"
NO_TABLE = "the attention was called without a RoPE table of the shape that the model makes"
CHANGED = "a module changed during the call"


def why_not_processor(attn: Any, known: type) -> str | None:
    """Why the attention's processor is not the one whose lines the family writes: a sentence, or ``None``."""
    if type(attn.processor) is known:
        return None
    return f"the attention processor is a {type(attn.processor).__name__}, which wins over ours"


def _write_rms_norm(norm: RMSNorm, original: Function, lines: Mapping[str, Line]) -> Function:
    (line,) = lines.values()
    site = line.site

    def forward(hidden_states: torch.Tensor) -> Any:
        weight = norm._parameters.get("weight")
        if weight is None or norm.bias is not None:
            line.declined[_bare(norm) or "the norm changed"] += 1
            return original(hidden_states)
        return site(hidden_states, weight, None, norm.eps)

    line.watch = lambda: _bare(norm)
    return forward


def _bare(norm: RMSNorm) -> str | None:
    if norm.weight is None:
        return "the norm has no weight, the op stands for an RMSNorm with one"
    return "the norm has a bias, the op stands for an RMSNorm without one" if norm.bias is not None else None


LAYER_NORM_SOURCE = TorchForward(
    nn.LayerNorm, ("F", "layer_norm", "normalized_shape", "weight", "bias", "eps", "self", "input")
)

ATTENTION_SOURCE = source(Attention, "forward", "e6822ac3500626c7318b56f135752693a1222976154cbcc8c2e6b5f840d82b6b")

RMS_NORM_SOURCE = source(RMSNorm, "forward", "ab9075d036873ac988795adb9a228b6d64cb0420123253ccb93d1d66bb323fd4")

RMS_NORM = Replacement(RMSNorm, (RMS_NORM_SOURCE,), (("", "rms_norm_scale"),), _write_rms_norm)
"""An RMSNorm whose result nothing scales: patched on the norm itself, under any hook it carries."""
