"""silu(temb) is computed once a forward where that is proven to be the same value, and anew wherever it is not."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from denoisers import DTYPES, KernelGate, check_same_bits, flat, qwen, qwen_inputs, run, same_bits
from test_family_blocks import answer, qwen_arguments
from torch import nn

from samebits import capture
from samebits.apply import apply
from samebits.models import _shared_silu
from samebits.models._shared_silu import SharedSilu, is_silu_and_one_more

BLOCKS = 4
OUTSIDE = 2
"""The timestep embedding's and that of norm_out."""


@pytest.fixture
def silus(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs of every silu that is computed."""
    seen: list[torch.Tensor] = []
    silu = torch.nn.functional.silu

    def count(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        seen.append(input)
        return silu(input, inplace)

    monkeypatch.setattr(torch.nn.functional, "silu", count)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edit", [False, True])
def test_one_silu_a_forward(edit: bool, dtype: torch.dtype, silus: list[torch.Tensor]) -> None:
    model, inputs = qwen(dtype, num_layers=BLOCKS, zero_cond_t=edit), qwen_inputs(dtype, edit=edit)
    expected = run(model, inputs)
    assert len(silus) == 2 * BLOCKS + OUTSIDE
    with apply(model, gate=KernelGate()):
        for _ in range(3):
            silus.clear()
            check_same_bits(run(model, inputs), expected)
            assert len(silus) == (2 if edit else 1) + OUTSIDE
            inputs["timestep"] = inputs["timestep"] * 0.5
            expected, before = run(qwen(dtype, num_layers=BLOCKS, zero_cond_t=edit), inputs), expected
            assert not same_bits(expected, before)


def test_gradients_are_not_added_up_in_another_order(silus: list[torch.Tensor]) -> None:
    model, inputs = qwen(num_layers=BLOCKS), qwen_inputs()
    with apply(model, gate=KernelGate()):
        model(**inputs)
    assert len(silus) == 2 * BLOCKS + OUTSIDE


def test_inference_mode_counts_no_writes_so_nothing_is_shared(silus: list[torch.Tensor]) -> None:
    model, inputs = qwen(num_layers=BLOCKS), qwen_inputs()
    expected = run(model, inputs)
    silus.clear()
    with apply(model, gate=KernelGate()):
        with torch.inference_mode():
            answer = tuple(part.clone() for part in flat(model(**inputs)))
            assert len(silus) == 2 * BLOCKS + OUTSIDE
            temb = torch.randn(2, 64)
        check_same_bits(answer, expected)
        with torch.no_grad():
            assert SharedSilu().of(temb, 0, False) is None


# What somebody does between two blocks, and what eager makes of it.


def change(tensor: torch.Tensor) -> None:
    """Write to a tensor in place, as a hook that gives nothing back."""
    tensor.mul_(1.5)


def write_temb(model: Any) -> None:
    """A hook of the first block that writes to the time embedding, in place."""
    model.transformer_blocks[0].register_forward_hook(
        lambda module, args, kwargs, output: change(kwargs["temb"]), with_kwargs=True
    )


def write_temb_within_a_block(model: Any) -> None:
    kept: list[torch.Tensor] = []
    model.time_text_embed.register_forward_hook(lambda module, args, output: kept.append(output))
    model.transformer_blocks[1].img_mod[1].register_forward_hook(lambda module, args, output: change(kept[-1]))


def write_input_of_img(model: Any) -> None:
    """Written in place before the linear reads it: in eager its block's image alone sees that."""
    model.transformer_blocks[1].img_mod[1].register_forward_pre_hook(lambda module, args: change(args[0]))


def write_input_of_txt(model: Any) -> None:
    model.transformer_blocks[1].txt_mod[1].register_forward_pre_hook(lambda module, args: change(args[0]))


def another_temb(model: Any) -> None:
    """A new tensor for the second block."""
    model.transformer_blocks[1].register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"temb": kwargs["temb"] * 2}), with_kwargs=True
    )


def hook_on_silu(model: Any) -> None:
    model.transformer_blocks[2].txt_mod[0].register_forward_hook(lambda module, args, output: output * 2)


def hook_on_mod(model: Any) -> None:
    model.transformer_blocks[2].img_mod.register_forward_hook(lambda module, args, output: output * 2)


def another_activation(model: Any) -> None:
    model.transformer_blocks[2].img_mod[0] = nn.ReLU()


def silu_in_place(model: Any) -> None:
    """Which changes the time embedding for everybody after it."""
    model.transformer_blocks[2].img_mod[0].inplace = True


def three_parts(model: Any) -> None:
    mod = model.transformer_blocks[2].img_mod
    mod.append(nn.Tanh())


def another_mod(model: Any) -> None:
    mod = model.transformer_blocks[2].txt_mod

    class Mine(nn.Module):
        def forward(self, temb: torch.Tensor) -> torch.Tensor:
            return mod(temb) * 2

    model.transformer_blocks[2].txt_mod = Mine()


MEDDLING: dict[str, tuple[Callable[[Any], None], int]] = {
    # How many of the silus of BLOCKS blocks are left
    "temb written between blocks": (write_temb, 2),
    "temb written within a block": (write_temb_within_a_block, 1 + 1 + 1),
    "input of the image's linear written": (write_input_of_img, 1 + 1 + 1),
    "input of the text's linear written": (write_input_of_txt, 1 + 1),
    "another temb for one block": (another_temb, 3),
    "hook on the SiLU": (hook_on_silu, 1 + 2),
    "hook on the modulation": (hook_on_mod, 1 + 2),
    "ReLU": (another_activation, 1 + 1),
    "SiLU in place": (silu_in_place, 1 + 2 + 1),
    "three parts": (three_parts, 1 + 2),
    "a module of their own": (another_mod, 1 + 2),
}


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("name", MEDDLING)
def test_meddling_has_the_effect_that_it_has_in_eager(name: str, edit: bool, silus: list[torch.Tensor]) -> None:
    meddle, count = MEDDLING[name]

    def build() -> Any:
        return qwen(num_layers=BLOCKS, zero_cond_t=edit)

    inputs = qwen_inputs(edit=edit)
    untouched = run(build(), inputs)
    plain, model = build(), build()
    meddle(plain)
    meddle(model)
    expected = run(plain, inputs)
    assert not same_bits(expected, untouched)
    with apply(model, gate=KernelGate()):
        for _ in range(3):
            silus.clear()
            check_same_bits(run(model, inputs), expected)
            if not edit:
                assert len(silus) == count + OUTSIDE


def test_a_forward_starts_from_nothing_whatever_was_written_unseen() -> None:
    """The same tensor again, with other values and the same count: as a replayed CUDA graph leaves it."""
    model, plain = qwen(), qwen()
    arguments = qwen_arguments(torch.float32)
    temb = arguments["temb"]
    blocks = model.transformer_blocks
    with apply(model, gate=KernelGate()):
        for turn in range(3):
            count = temb._version
            temb.data.mul_(1.5)
            assert temb._version == count
            for block, theirs in zip(blocks, plain.transformer_blocks, strict=True):
                check_same_bits(answer(block, arguments), answer(theirs, arguments))
            if turn:
                temb.data.mul_(0.5)
                check_same_bits(answer(blocks[0], arguments), answer(plain.transformer_blocks[0], arguments))
                temb.data.mul_(0.5)
                check_same_bits(answer(blocks[0], arguments), answer(plain.transformer_blocks[0], arguments))


def test_a_block_alone_and_a_block_that_stands_twice() -> None:
    model, plain, inputs = qwen(num_layers=BLOCKS), qwen(num_layers=BLOCKS), qwen_inputs()
    for made in (model, plain):
        made.transformer_blocks[3] = made.transformer_blocks[1]
    expected = run(plain, inputs)
    with apply(model, gate=KernelGate()):
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)


# The proof itself.


@torch.no_grad()
def test_what_is_shared_is_that_object_and_only_down_the_blocks() -> None:
    shared, temb = SharedSilu(), torch.randn(2, 64)
    first = shared.of(temb, 0, False)
    assert first is not None
    assert first.text is first.all
    assert torch.equal(first.all, torch.nn.functional.silu(temb))
    assert shared.of(temb, 1, False) is first
    assert shared.of(temb, 5, False) is first
    assert shared.of(temb, 5, False) is not first  # this block had it: another forward
    for other in (temb.clone(), temb.view(2, 64), temb[:]):
        known = shared.of(temb, 0, False)
        assert shared.of(other, 1, False) is not known
    known = shared.of(temb, 0, False)
    halved = shared.of(temb, 1, True)
    assert halved is not None
    assert halved is not known
    assert torch.equal(halved.text, torch.nn.functional.silu(temb[:1]))
    assert shared.of(temb, 2, True) is halved


@torch.no_grad()
@pytest.mark.parametrize("written", ["temb", "a view of temb", "silu", "a view of silu", "silu of the half"])
def test_a_write_ends_it(written: str) -> None:
    shared, temb = SharedSilu(), torch.randn(2, 64)
    known = shared.of(temb, 0, True)
    assert known is not None
    assert known.holds(temb)
    {
        "temb": temb,
        "a view of temb": temb[1],
        "silu": known.all,
        "a view of silu": known.all[0],
        "silu of the half": known.text,
    }[written].add_(1)
    assert not known.holds(temb)
    fresh = shared.of(temb, 1, True)
    assert fresh is not known
    assert fresh is not None
    assert torch.equal(fresh.all, torch.nn.functional.silu(temb))


@torch.no_grad()
def test_another_lane_computes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream, a capture that began meanwhile, the next capture, and after it."""
    shared, temb = SharedSilu(), torch.randn(2, 64)
    lanes: list[Any] = [(0, 7), (0, 7), (0, 9), (0, 9, 1), (0, 9, 1), (0, 9, 2), (0, 9)]
    found = []
    for block, lane in enumerate(lanes):
        monkeypatch.setattr(capture, "lane", lambda device, lane=lane: lane)
        found.append(shared.of(temb, block, False))
    assert None not in found
    assert [a is b for a, b in itertools.pairwise(found)] == [True, False, False, True, False, False]
    monkeypatch.setattr(capture, "lane", lambda device: None)
    assert shared.of(temb, 9, False) is None


@torch.no_grad()
def test_it_goes_with_its_temb() -> None:
    shared, temb, other = SharedSilu(), torch.randn(2, 64), torch.randn(2, 64)
    known = shared.of(temb, 0, False)
    assert known is not None
    shared.of(other, 0, False)
    del temb
    assert shared._known is not None, "what is known of another one stays"
    silu = weakref.ref(shared._known.all)
    del other, known
    gc.collect()
    assert shared._known is None
    assert silu() is None


@torch.no_grad()
def test_tensors_that_are_more_than_tensors_are_not_shared() -> None:
    class Mine(torch.Tensor):
        pass

    shared = SharedSilu()
    assert shared.of(torch.randn(2, 64).as_subclass(Mine), 0, False) is None
    assert shared.of(torch.randn(2, 64, device="meta"), 0, False) is None
    assert shared.of(torch.randn(2, 64), 0, False) is not None


@pytest.mark.parametrize("owner", [nn.SiLU, nn.Sequential])
def test_with_another_silu_or_sequential_nothing_is_shared(
    owner: type[nn.Module], monkeypatch: pytest.MonkeyPatch, silus: list[torch.Tensor]
) -> None:
    original = owner.forward

    def changed(self: Any, input: torch.Tensor) -> torch.Tensor:
        return original(self, input) * 1

    monkeypatch.setattr(owner, "forward", changed)
    model, inputs = qwen(num_layers=BLOCKS), qwen_inputs()
    with apply(model, gate=KernelGate()):
        run(model, inputs)
    assert len(silus) == 2 * BLOCKS + OUTSIDE


def test_the_installed_torch_is_known() -> None:
    assert _shared_silu.SILU_SOURCE.obstacle() is None
    assert _shared_silu.SEQUENTIAL_SOURCE.obstacle() is None
    assert is_silu_and_one_more(nn.Sequential(nn.SiLU(), nn.Linear(2, 2)))
    assert not is_silu_and_one_more(nn.Sequential(nn.Linear(2, 2), nn.SiLU()))
    assert not is_silu_and_one_more(nn.Sequential(nn.SiLU()))
    assert not is_silu_and_one_more(None)
