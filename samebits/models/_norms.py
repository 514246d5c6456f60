"""When a site may take over the call of a norm, and the lines of a norm that several families share.

A site may stand for a norm only while that norm is plain: the exact class, weight and bias as the op expects them,
and nothing hooked onto it. That is asked on every call, because hooks come and go; the answer is a handful of
dictionary look-ups. The sentence that a report prints is only made when the answer is no.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn

from samebits.models._family import Function, Line, Replacement, source


class _LayerNormSource:
    """torch's LayerNorm.forward: one call of F.layer_norm. Known by the names it uses, over all torch versions."""

    def obstacle(self) -> str | None:
        """A sentence where the function on the class is another one, or ``None``."""
        function = inspect.getattr_static(nn.LayerNorm, "forward", None)
        names = ("F", "layer_norm", "normalized_shape", "weight", "bias", "eps")
        if isinstance(function, types.FunctionType) and function.__code__.co_names == names:
            return None
        return "torch.nn.LayerNorm.forward was replaced by another function"


def _calls_only_forward(attributes: dict[str, Any]) -> bool:
    """Whether calling a module with these attributes runs its class's forward and nothing else."""
    return not (
        "forward" in attributes
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes.get("_compiled_call_impl") is not None
    )


def _why_not_plain(name: str, module: Any, cls: type) -> str | None:
    if module is None:
        return f"there is no {name}"
    if type(module) is not cls:
        return f"{name} is a {type(module).__name__}, the op stands for exactly {cls.__name__}"
    if not _calls_only_forward(module.__dict__):
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
        and _calls_only_forward(attributes)
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
        and _calls_only_forward(attributes)
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


def norm_q_and_k(
    line: Line, attn: Any, names: tuple[str, str], query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query's and the key's RMSNorm in one launch, or diffusers' own two lines.

    Parameters
    ----------
    line : Line
        The site, of op ``qk_norm``.
    attn : Attention
        Holds the two norms under ``names``; one that is ``None`` passes its input through.
    query, key : torch.Tensor
        ``(B, S, H, head_dim)`` and ``(B, S, Hk, head_dim)``, any strides.
    """
    norm_q, norm_k = getattr(attn, names[0]), getattr(attn, names[1])
    if is_plain_rms_norm(norm_q) and is_plain_rms_norm(norm_k) and norm_q.eps == norm_k.eps:
        weights = norm_q._parameters["weight"], norm_k._parameters["weight"]
        query, key = line.site(query, key, *weights, norm_q.eps, "diffusers")
        return query, key
    line.declined[why_not_qk(names, norm_q, norm_k) or "the norms changed during the call"] += 1
    if norm_q is not None:
        query = norm_q(query)
    if norm_k is not None:
        key = norm_k(key)
    return query, key


def why_not_qk(names: tuple[str, str], norm_q: Any, norm_k: Any) -> str | None:
    """Why query and key cannot be normed in one launch: a sentence, or ``None``."""
    reason = why_not_rms_norm(names[0], norm_q) or why_not_rms_norm(names[1], norm_k)
    if reason is None and norm_q.eps != norm_k.eps:
        reason = f"{names[0]} and {names[1]} have different eps"
    return reason


OTHER_ARGUMENTS = "the attention was called with arguments that its processor does not take"


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


LAYER_NORM_SOURCE = _LayerNormSource()

ATTENTION_SOURCE = source(Attention, "forward", "e6822ac3500626c7318b56f135752693a1222976154cbcc8c2e6b5f840d82b6b")

RMS_NORM_SOURCE = source(RMSNorm, "forward", "ab9075d036873ac988795adb9a228b6d64cb0420123253ccb93d1d66bb323fd4")

RMS_NORM = Replacement(RMSNorm, (RMS_NORM_SOURCE,), (("", "rms_norm_scale"),), _write_rms_norm)
"""An RMSNorm whose result nothing scales: patched on the norm itself, under any hook it carries."""
