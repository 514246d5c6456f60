"""Both families' attention at its real width: joint products, values written and read where they lie."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ring import assert_same_bits, check, randn

from samebits.apply import Handle, apply
from samebits.bench import models
from samebits.bench.models import Denoiser
from samebits.gate import Gate
from samebits.models import _packed
from samebits.ops import by_name

pytestmark = pytest.mark.gpu

BUILD: dict[str, Callable[..., Denoiser]] = {
    "qwen-image": partial(models.qwen_image, side=16, num_layers=1),
    "z-image": partial(models.z_image, side=32, n_layers=1, n_refiner_layers=1),
}
families = pytest.mark.parametrize("name", BUILD)


def calls(handle: Handle, op: str) -> tuple[int, int, set[str]]:
    """Fused, eager and why, over all sites of an op."""
    rows = [row for row in handle.report().rows if row.op == op]
    reasons = {reason for row in rows for reason in row.reasons}
    return sum(row.fused for row in rows), sum(row.eager for row in rows), reasons


@families
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("text_tokens", [17, 128])
def test_the_picture_is_that_of_diffusers(
    name: str, batch: int, text_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "TEXT_TOKENS", text_tokens)
    denoiser = BUILD[name](device, batch=batch)
    expected = denoiser.forward().clone()
    with apply(denoiser.model, gate=Gate()) as handle:
        for _ in range(3):
            assert_same_bits(denoiser.forward(), expected)
        blocks = len(denoiser.blocks)
        fused, _, reasons = calls(handle, "joint_projection")
        # Where a product of one sample's rows alone has other bits than that of all, it is refused, which is right too.
        assert fused >= 2 * blocks or (batch > 1 and any("refused" in reason for reason in reasons)), reasons
        if name == "z-image":
            fused, _, reasons = calls(handle, "attention")
            assert fused >= 2 * blocks, reasons
    assert_same_bits(denoiser.forward(), expected)


@families
def test_there_is_no_second_copy_of_the_weights(name: str, device: torch.device) -> None:
    denoiser = BUILD[name](device)
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    handle = apply(denoiser.model, gate=Gate())
    assert torch.cuda.memory_allocated(device) == before
    assert torch.cuda.memory_reserved(device) <= reserved + (64 << 20)
    places = [p.data_ptr() for p in denoiser.model.parameters()]
    handle.remove()
    assert [p.data_ptr() for p in denoiser.model.parameters()] == places


@families
def test_a_model_that_went_to_the_cpu_and_back(name: str, device: torch.device) -> None:
    denoiser = BUILD[name](device)
    expected = denoiser.forward().clone()
    gate = Gate()
    with apply(denoiser.model, gate=gate) as handle:
        assert_same_bits(denoiser.forward(), expected)
        torch.nn.Module.to(denoiser.model, "cpu")
        torch.nn.Module.to(denoiser.model, device)
        assert_same_bits(denoiser.forward(), expected)
        apart = any("do not lie side by side" in reason for reason in calls(handle, "joint_projection")[2])
        assert apart == (name == "z-image")  # the other one joins no weights
        assert apply(denoiser.model, gate=gate) is handle
        before = calls(handle, "joint_projection")[0]
        for _ in range(2):
            assert_same_bits(denoiser.forward(), expected)
        assert calls(handle, "joint_projection")[0] >= before + len(denoiser.blocks)


@families
def test_no_weight_moves_while_a_graph_is_captured(name: str, device: torch.device) -> None:
    denoiser = BUILD[name](device)
    expected = denoiser.forward().clone()
    places = [p.data_ptr() for p in denoiser.model.parameters()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        handle = apply(denoiser.model, gate=Gate())
        output = denoiser.forward()
    assert [p.data_ptr() for p in denoiser.model.parameters()] == places
    told = any(_packed.CAPTURED.partition("{")[0] in reason for reason in calls(handle, "joint_projection")[2])
    assert told == (name == "z-image")
    output.fill_(float("nan"))
    graph.replay()
    assert_same_bits(output, expected)
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [17, 128, 4113])
def test_other_widths_and_rows(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Where the library's bits differ the gate refuses; here the widths of the families and a narrow one."""
    op: Any = by_name("joint_projection")
    for width, parts, bias in ((3072, 1, True), (3840, 3, False)):
        x = randn(1, tokens, width, dtype=dtype, device=device)
        weight = randn(parts * width, width, dtype=dtype, device=device, seed=1, amplitude=width**-0.5)
        vector = randn(parts * width, dtype=dtype, device=device, seed=2) if bias else None
        check(op, (x, weight, vector, None, None, None, parts, ""))
