"""What a block costs beyond torch's own calls: how many of our Python functions a forward calls, never how long.

Small pictures without CUDA graphs are bound by the host. A time would be another one on every machine; the number of
calls is the same everywhere, and grows with whatever a block asks for in vain.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from denoisers import KernelGate, fused_calls, qwen, qwen_inputs, run, z_image, z_image_inputs

import samebits
from samebits.models import _quantized, qwen_image

PACKAGE = Path(samebits.__file__).parent
OPS = PACKAGE / "ops"
FEW, MANY = 2, 4
# As counted when this was written, and a tenth more: Python counts comprehensions in one version and not in the next.
LIMITS = {"qwen-image": 290, "z-image": 195}


def calls(model: Any, inputs: dict[str, Any]) -> Counter[str]:
    """Our functions that one forward calls, by name, but those of the ops: here they are the references."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents and OPS not in path.parents:
                found[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run(model, inputs)
    finally:
        sys.setprofile(before)
    return found


def calls_of_a_block(make: Callable[[int], Any], inputs: dict[str, Any]) -> Counter[str]:
    """The difference that two more blocks make, for one of them, once every signature is known."""
    counted = []
    for blocks in (FEW, MANY):
        model = make(blocks)
        handle = samebits.apply(model, gate=KernelGate(recheck_every=0))
        for _ in range(6):
            run(model, inputs)
        assert fused_calls(handle) > 0
        counted.append(calls(model, inputs))
        handle.remove()
    few, many = counted
    difference = {name: (many[name] - few[name]) / (MANY - FEW) for name in many}
    return Counter({name: round(count) for name, count in difference.items() if count})


MODELS: dict[str, tuple[Callable[[int], Any], Callable[[], dict[str, Any]]]] = {
    "qwen-image": (lambda blocks: qwen(num_layers=blocks), qwen_inputs),
    "z-image": (lambda blocks: z_image(n_layers=blocks), z_image_inputs),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_block_calls_no_more_of_our_functions_than_it_did(name: str) -> None:
    make, inputs = MODELS[name]
    found = calls_of_a_block(make, inputs())
    assert 0 < found.total() <= LIMITS[name], found.most_common(20)


def test_a_block_without_fp8_asks_nothing_about_it() -> None:
    found = calls_of_a_block(MODELS["qwen-image"][0], qwen_inputs())
    assert not found["ready"]
    assert not found["_are_quantised"]
    assert not found["input_scale_of"]


def test_what_is_asked_in_vain_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_image, "_may_share", lambda attn: True)
    monkeypatch.setattr(_quantized.QuantizedFeedForward, "_ends_in_fp8", lambda self: True)
    found = calls_of_a_block(MODELS["qwen-image"][0], qwen_inputs())
    assert found["ready"]
    assert found["_are_quantised"]
    assert found.total() > LIMITS["qwen-image"]
