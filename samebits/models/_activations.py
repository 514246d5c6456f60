"""diffusers' GELU in its tanh form: the activation of a feed-forward, patched on the activation itself.

The module is a linear and the function after it. Where a product of ours takes the call, both are the site
``product``; else the linear is called as a module and the function is the other site. The feed-forward's own forward
stays: it calls the activation, its dropout and the last linear as the modules they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.activations import GELU
from torch import nn

from samebits.models._family import Function, Line, Replacement, source, unwrapped
from samebits.models._products import Product


def _write_gelu(
    known: dict[nn.Module, Line] | None, gelu: GELU, original: Function, lines: Mapping[str, Line]
) -> Function:
    line, product = lines[""], Product(lines["product"], gelu, ("proj",), biased=True)
    if known is not None:
        known[gelu] = line

    def why_not() -> str | None:
        if "gelu" in gelu.__dict__:
            return "the module's gelu was replaced on the instance, which wins over ours"
        return None if gelu.approximate == "tanh" else f"GELU is of the form {gelu.approximate!r}, not 'tanh'"

    def forward(hidden_states: torch.Tensor) -> Any:
        reason = why_not()
        if reason is not None:
            line.declined[reason] += 1
            product.pass_on(reason)
            return original(hidden_states)
        activated = product(hidden_states)
        return line.site(gelu.proj(hidden_states)) if activated is None else activated

    line.watch = lambda: why_not() or product.why_not_alone()
    lines["product"].watch = lambda: why_not() or product.why_not()
    return forward


GELU_TANH = Replacement(
    of=GELU,
    sources=(
        source(GELU, "forward", "538b05d6963a325cc513a44edc4b3885cd2b8aa28c81bd57d258bd17c656db42"),
        source(GELU, "gelu", "d203f2720ee05f3537bcbfccd4ac5ee5b2362a01445bd34f95543c9d94d98115"),
    ),
    sites=(("product", "linear_gelu_tanh"), ("", "gelu_tanh")),
    write=partial(_write_gelu, None),
)


def activation_of(
    path: str, feed_forward: nn.Module, known: dict[nn.Module, Line] | None = None
) -> tuple[str, nn.Module, Replacement]:
    """The place of diffusers' feed-forward at ``path`` where its activation stands; ``known`` is told its site.

    Somebody's own feed-forward is given back itself: it is no GELU, and the report says so.
    """
    replacement = replace(GELU_TANH, write=partial(_write_gelu, known))
    net = getattr(unwrapped(feed_forward), "net", None)
    if isinstance(net, nn.ModuleList) and len(net):
        return f"{path}.net.0", net[0], replacement
    return path, feed_forward, replacement
