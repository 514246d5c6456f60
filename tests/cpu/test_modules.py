"""A module whose call runs anything but its class's forward is told from one whose call does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samebits.models import _family
from samebits.modules import calls_only_forward


def own_forward(module: Any) -> None:
    module.forward = lambda x: x


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda module: module.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "forward on the instance": own_forward,
    "torch.compile": lambda module: module.compile(backend="eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_stands_around_a_forward_is_seen(change: str) -> None:
    module = nn.Linear(2, 2)
    assert calls_only_forward(module.__dict__)
    CHANGES[change](module)
    assert not calls_only_forward(module.__dict__)


def test_a_hook_that_was_removed_leaves_no_trace() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None).remove()
    assert calls_only_forward(module.__dict__)
    assert torch.equal(module(torch.zeros(1, 2))[0], module.bias)


def test_families_use_this_one() -> None:
    assert _family.calls_only_forward is calls_only_forward
