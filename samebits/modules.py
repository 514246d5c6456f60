"""What calling a module of torch runs: its class's forward alone, or something around it. A leaf; it knows no torch.

It reads ``module.__dict__``, where torch keeps hooks: looking them up on the module goes through ``nn.Module``'s own
``__getattr__``, and this is asked on every call of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def calls_only_forward(attributes: Mapping[str, Any]) -> bool:
    """Whether calling a module with these attributes runs its class's forward and nothing else."""
    return not (
        "forward" in attributes
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes.get("_compiled_call_impl") is not None
    )


def calls_nothing_else(attributes: Mapping[str, Any]) -> bool:
    """The same of a module that may have a forward of its own: whether calling it runs that one and nothing else.

    Written out once more, because a call between the two is a tenth of what the first one costs.
    """
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes.get("_compiled_call_impl") is not None
    )
