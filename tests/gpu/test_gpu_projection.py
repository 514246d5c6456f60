"""Both families' attention at its real width: joint products, values written and read where they lie."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ring import assert_same_bits, check, randn

from samebits import bits
from samebits.apply import Handle, apply
from samebits.bench import models
from samebits.bench.models import Denoiser
from samebits.gate import Gate, State
from samebits.models import _packed
from samebits.ops import Args, Op, by_name
from samebits.ops._library import blas_state

pytestmark = pytest.mark.gpu

BUILD: dict[str, Callable[..., Denoiser]] = {
    "qwen-image": partial(models.qwen_image, side=16, num_layers=1),
    "z-image": partial(models.z_image, side=32, n_layers=1, n_refiner_layers=1),
}
families = pytest.mark.parametrize("name", BUILD)

CALLS = 3
"""At the first one a signature is compared; where its bits are eager's, the kernel answers the others."""
FEW_ROWS = 128
"""With fewer rows cuBLAS may divide a product's sums among several blocks by how many columns there are (split K): then
the joint product of three linears has other bits than three products."""


def same_by_hand(op: Op, args: Args) -> bool:
    """Whether the op's kernel has eager's bits for these arguments, and for other inputs of their shapes."""
    for seed in (None, 91, 92, 93):
        values = args
        if seed is not None:  # inputs have three dimensions, weights two, biases one
            values = tuple(
                randn(*arg.shape, dtype=arg.dtype, device=arg.device, seed=seed)
                if isinstance(arg, torch.Tensor) and arg.dim() == 3
                else arg
                for arg in args
            )
        if bits.compare(op.prepare(*values)(*values), op.reference(*values)) is not None:
            return False
    return True


def gate_agrees(op: Op, args: Args) -> bool:
    """Compare by hand, then ask the gate: it refuses exactly where bits differ, and gives eager's. Say which."""
    same = same_by_hand(op, args)
    gate = Gate()
    site = gate.site("by hand", op)
    for _ in range(CALLS):
        assert_same_bits(site(*args), op.reference(*args))
    (verdict,) = gate.verdicts()
    assert verdict.state is (State.VERIFIED if same else State.REFUSED), verdict
    assert site.counters.fused == (CALLS - 1 if same else 0), site
    return same


def one_bit_off(op: Op) -> Op:
    """The op with a kernel whose last element has another last bit."""

    def prepare(*args: Any) -> Any:
        right = op.prepare(*args)

        def launch(*args: Any, out: Any = None) -> Any:
            result: Any = right(*args, out=out)
            bits.integer_view(result).view(-1)[-1:].bitwise_xor_(1)
            return result

        return launch

    return dataclasses.replace(op, prepare=prepare)


class Recorder:
    """A site that keeps the arguments of its first call."""

    def __init__(self, site: Any) -> None:
        self.site = site
        self.first: Args | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.site, name)

    def __call__(self, *args: Any) -> Any:
        self.first = self.first or args
        return self.site(*args)


def recorded(handle: Handle, op: str) -> dict[str, Recorder]:
    """A recorder in the place of every site of an op, by the attention that it belongs to."""
    found = {}
    for line in handle.sites:
        if line.op == op:
            found[line.name.rpartition(".")[0]] = line.site = Recorder(line.site)
    return found


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
        projections, attentions = recorded(handle, "joint_projection"), recorded(handle, "attention")
        for _ in range(CALLS):
            assert_same_bits(denoiser.forward(), expected)
    assert len(projections) == len(denoiser.blocks)
    assert len(attentions) == (len(denoiser.blocks) if name == "z-image" else 0)
    for where, projection in projections.items():
        assert projection.first is not None
        x, parts = projection.first[0], projection.first[6]
        joint = same_by_hand(by_name("joint_projection"), projection.first)
        # A product of few rows, or of one sample's rows alone, may have other bits than the one that eager makes.
        assert joint or batch > 1 or (parts > 1 and x.shape[1] < FEW_ROWS), (where, x.shape)
        reasons = dict(projection.counters.reasons)
        assert projection.counters.fused == (CALLS - 1 if joint else 0), (where, reasons)
        assert any(reason.startswith("refused") for reason in reasons) is not joint, (where, reasons)
        if where in attentions:  # where the linears run apart its values are contiguous, and it is eager's own call
            attention = attentions[where]
            assert attention.counters.fused == (CALLS - 1 if joint else 0), (where, dict(attention.counters.reasons))
    assert_same_bits(denoiser.forward(), expected)


def parts_that_move(model: Any) -> list[torch.nn.Parameter]:
    """The weights that are joined: query, key and value of every attention of Z-Image."""
    attentions = [m for m in model.modules() if isinstance(getattr(m, "to_q", None), torch.nn.Linear)]
    return [getattr(m, part).weight for m in attentions for part in ("to_q", "to_k", "to_v")]


def bytes_held(device: torch.device) -> int:
    """What tensors asked for and have not given back. What torch has reserved says less: memory of a weight that lay
    in one segment with something else stays reserved, free for whatever comes, and what lies where depends on all that
    ran in this process before."""
    held: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    return held


@pytest.mark.parametrize(("name", "kept"), [("qwen-image", False), ("z-image", False), ("z-image", True)])
def test_there_is_no_second_copy_of_the_weights(
    name: str, kept: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kept`` is the control: somebody holds on to the weights as they were."""
    denoiser = BUILD[name](device)
    joined = parts_that_move(denoiser.model) if name == "z-image" else []  # the other one joins no weights
    weights_bytes = sum(p.numel() * p.element_size() for p in joined)
    assert bool(weights_bytes) == (name == "z-image")
    old: list[torch.Tensor] = []
    if kept:
        move = _packed._move

        def move_and_keep(parameters: list[list[Any]]) -> None:
            old.extend(parameter.data for alike in parameters for parameter in alike)
            move(parameters)

        monkeypatch.setattr(_packed, "_move", move_and_keep)
    gc.collect()
    torch.cuda.empty_cache()
    before = bytes_held(device)
    handle = apply(denoiser.model, gate=Gate())
    reserved = torch.cuda.memory_reserved(device)
    assert bytes_held(device) == before + (weights_bytes if kept else 0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) == reserved, "apply kept segments that the old weights left empty"
    places = [p.data_ptr() for p in denoiser.model.parameters()]
    handle.remove()
    assert [p.data_ptr() for p in denoiser.model.parameters()] == places


def test_memory_that_is_not_given_back_would_be_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the step that gives it back, the old weights' segments stay reserved."""
    gc.collect()
    torch.cuda.empty_cache()  # so that every weight lies in a segment of its own, as those of a loaded pipeline do
    denoiser = BUILD["z-image"](device)
    torch.cuda.empty_cache()
    monkeypatch.setattr(sys.modules[apply.__module__], "free_cached_memory", lambda: None)
    handle = apply(denoiser.model, gate=Gate())
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) < reserved
    handle.remove()


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
def test_the_gate_refuses_exactly_where_bits_differ(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """At the widths of both families, with biases and without."""
    op = by_name("joint_projection")
    for width, parts, bias in ((3072, 1, True), (3840, 3, False)):
        x = randn(1, tokens, width, dtype=dtype, device=device)
        weight = randn(parts * width, width, dtype=dtype, device=device, seed=1, amplitude=width**-0.5)
        vector = randn(parts * width, dtype=dtype, device=device, seed=2) if bias else None
        args = (x, weight, vector, None, None, None, parts, blas_state())
        joint = gate_agrees(op, args)
        assert joint or (parts > 1 and tokens < FEW_ROWS), (width, parts)
        if joint:
            check(op, args)
        assert not gate_agrees(one_bit_off(op), args), "the control: such a kernel is refused"
