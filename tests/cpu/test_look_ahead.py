"""The first norm of a block is computed at the end of the block before, but only where that is proven the same."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from denoisers import (
    DTYPES,
    KernelGate,
    check_same_bits,
    flat,
    qwen,
    qwen_inputs,
    run,
    same_bits,
    z_image,
    z_image_inputs,
)
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from samebits.apply import Handle, apply
from samebits.models import _ahead
from samebits.models._ahead import LookAhead, may_run_early
from samebits.quant import Fp8Linear

BLOCKS = 3
ACROSS = {"qwen": BLOCKS - 1, "z-image": BLOCKS - 1}
"""Calls that reach over a boundary in one forward: one for both streams of Qwen-Image."""


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    if name == "qwen":
        return qwen(dtype, num_layers=BLOCKS), qwen_inputs(dtype)
    return z_image(dtype, n_layers=BLOCKS), z_image_inputs(dtype)


def blocks_of(model: Any) -> Any:
    return model.transformer_blocks if hasattr(model, "transformer_blocks") else model.layers


def first_norms(handle: Handle) -> list[int]:
    """How often each block computed its first norm (of the image) itself."""
    return [
        row.fused + row.eager
        for row in handle.report().rows
        if row.site.startswith(("transformer_blocks", "layers"))
        and row.site.endswith(("img_norm1", ".attention_norm1"))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACROSS)
def test_only_the_first_block_computes_its_first_norm(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, dtype)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for calls in (1, 2, 3):
            check_same_bits(run(model, inputs), expected)
            assert first_norms(handle) == [calls] + [0] * (BLOCKS - 1)
        never = [why for row in handle.report().rows for why, count in row.reasons.items() if not count]
    assert sum("its lines run" in why for why in never) >= ACROSS[name]


def across(handle: Handle, block: str = "") -> int:
    """Calls that reached over a boundary, of one block or of all."""
    rows = (row for row in handle.report().rows if row.site.startswith(block) and row.site.endswith("next_norm1"))
    return sum(row.fused + row.eager for row in rows)


def hook_before(model: Any) -> None:
    blocks_of(model)[1].register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(a * 2 if n == 0 else a for n, a in enumerate(args)), doubled(kwargs)),
        with_kwargs=True,
    )


def doubled(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value * 2 if key == "hidden_states" else value for key, value in kwargs.items()}


def hook_that_writes_before(model: Any) -> None:
    def write(module: nn.Module, args: Any, kwargs: Any) -> None:
        (args[0] if args else kwargs["hidden_states"]).mul_(1.5)

    blocks_of(model)[1].register_forward_pre_hook(write, with_kwargs=True)


def hook_that_writes_after(model: Any) -> None:
    def write(module: nn.Module, args: Any, output: Any) -> None:
        (output[1] if isinstance(output, tuple) else output).mul_(1.5)

    blocks_of(model)[0].register_forward_hook(write)


def hook_that_only_says_it_looks(model: Any) -> None:
    """It writes, and the count of writes tells."""

    def write(module: nn.Module, args: Any, output: Any) -> None:
        (output[1] if isinstance(output, tuple) else output).mul_(1.5)

    write.only_looks = True  # type: ignore[attr-defined]
    blocks_of(model)[0].register_forward_hook(write)


def weights_before_the_next_block(model: Any) -> None:
    """A hook inside a block that writes to the next block's modulation."""
    first, second = blocks_of(model)[:2]
    part, weight = (
        (first.txt_mlp, second.img_mod[1].weight)
        if hasattr(first, "txt_mlp")
        else (first.ffn_norm2, second.adaLN_modulation[0].weight)
    )

    def write(*_: Any) -> None:
        weight.mul_(1.25)

    part.register_forward_hook(write)


def weights_elsewhere_for_the_next_block(model: Any) -> None:
    """A hook inside a block that streams the next block's modulation in, which torch counts as no write."""
    first, second = blocks_of(model)[:2]
    part, modulation = (
        (first.txt_mlp, second.img_mod) if hasattr(first, "txt_mlp") else (first.ffn_norm2, second.adaLN_modulation)
    )

    def stream(*_: Any) -> None:
        for weight in modulation.parameters():
            weight.data = weight.data * 1.25

    part.register_forward_hook(stream)


def part_that_runs_last(model: Any) -> tuple[Any, Any]:
    """A module of the first block whose call comes after the next one's modulation, where there is one; that block."""
    first, second = blocks_of(model)[:2]
    return (first.txt_mlp.net[2] if hasattr(first, "txt_mlp") else first.feed_forward), second


def write_in_place(block: Any) -> None:
    """Write to the memory of a block's modulation as torch counts no write: neither object, address nor count moves."""
    for weight in (block.img_mod if hasattr(block, "img_mod") else block.adaLN_modulation).parameters():
        before = weight._version, weight.data_ptr()
        weight.data.mul_(1.25)
        assert (weight._version, weight.data_ptr()) == before


def uncounted_write_from_a_hook(model: Any) -> None:
    part, block = part_that_runs_last(model)
    part.register_forward_hook(lambda *_: write_in_place(block))


def uncounted_write_from_a_pre_hook(model: Any) -> None:
    part, block = part_that_runs_last(model)
    part.register_forward_pre_hook(lambda *_: write_in_place(block))


def uncounted_write_from_a_hook_of_diffusers(model: Any) -> None:
    part, block = part_that_runs_last(model)

    class Writes(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            write_in_place(block)
            return output

    HookRegistry.check_if_exists_or_initialize(part).register_hook(Writes(), "writes")


def uncounted_write_from_a_function(model: Any) -> None:
    part, block = part_that_runs_last(model)
    own = part.forward

    def forward(x: torch.Tensor) -> Any:
        write_in_place(block)
        return own(x)

    part.forward = forward


def uncounted_write_from_a_method(model: Any) -> None:
    """As a bound method, which is what our own forwards are."""
    part, block = part_that_runs_last(model)
    own = part.forward

    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        write_in_place(block)
        return own(x)

    part.forward = forward.__get__(part)


def uncounted_write_before_the_block(model: Any) -> None:
    """The method is on the next block itself, calls what was there, and is given what it would be given."""
    block = blocks_of(model)[1]
    own = block.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        write_in_place(block)
        return own(*args, **kwargs)

    block.forward = forward.__get__(block)


def another_eps_from_inside_a_block(model: Any) -> None:
    """A hook that runs after the next block's norm was computed, and changes that norm."""
    first, second = blocks_of(model)[:2]
    part = first.txt_mlp if hasattr(first, "txt_mlp") else first.ffn_norm2

    def change(*_: Any) -> None:
        (second.img_norm1 if hasattr(second, "img_norm1") else second.attention_norm1).eps = 1e-2

    part.register_forward_hook(change)


def a_hook_on_the_norm_from_inside_a_block(model: Any) -> None:
    first, second = blocks_of(model)[:2]
    part = first.txt_mlp if hasattr(first, "txt_mlp") else first.feed_forward
    norm = second.img_norm1 if hasattr(second, "img_norm1") else second.attention_norm1

    def change(*_: Any) -> None:
        if not norm._forward_hooks:
            norm.register_forward_hook(lambda module, args, output: output * 2)

    part.register_forward_hook(change)


def hook_on_the_modulation(model: Any) -> None:
    block = blocks_of(model)[1]
    part = block.img_mod if hasattr(block, "img_mod") else block.adaLN_modulation
    part.register_forward_hook(lambda module, args, output: output * 2)


def hook_on_the_linear(model: Any) -> None:
    block = blocks_of(model)[1]
    part = block.txt_mod[1] if hasattr(block, "txt_mod") else block.adaLN_modulation[0]
    part.register_forward_hook(lambda module, args, output: output * 2)


class Doubles(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tuple(a * 2 if n == 0 else a for n, a in enumerate(args)), doubled(kwargs)


def hook_of_diffusers(model: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(blocks_of(model)[1]).register_hook(Doubles(), "doubles")


def another_norm(model: Any) -> None:
    block = blocks_of(model)[1]
    if hasattr(block, "img_norm1"):
        block.img_norm1 = nn.LayerNorm(64, elementwise_affine=False, eps=1e-3)
        block.txt_norm1 = nn.RMSNorm(64, elementwise_affine=False)
    else:
        block.attention_norm1.eps = 1e-2


def forward_of_the_users_own(model: Any) -> None:
    block = blocks_of(model)[1]
    own = type(block).forward.__get__(block)
    block.forward = lambda *args, **kwargs: own(*args, **doubled(kwargs)) if not args else own(args[0] * 2, *args[1:])


STAND_BETWEEN = [
    hook_before,
    hook_that_writes_before,
    hook_that_writes_after,
    hook_that_only_says_it_looks,
    weights_before_the_next_block,
    uncounted_write_from_a_hook,
    uncounted_write_from_a_pre_hook,
    uncounted_write_from_a_hook_of_diffusers,
    uncounted_write_from_a_function,
    uncounted_write_from_a_method,
    uncounted_write_before_the_block,
    another_eps_from_inside_a_block,
    a_hook_on_the_norm_from_inside_a_block,
    weights_elsewhere_for_the_next_block,
    hook_on_the_modulation,
    hook_on_the_linear,
    hook_of_diffusers,
    another_norm,
    forward_of_the_users_own,
]


@pytest.mark.parametrize("change", STAND_BETWEEN, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ACROSS)
def test_whatever_stands_between_two_blocks_is_seen(name: str, change: Callable[[Any], None]) -> None:
    untouched, inputs = build(name)
    plain = run(untouched, inputs)
    theirs, ours = build(name)[0], build(name)[0]
    with apply(ours, gate=KernelGate()):
        check_same_bits(run(ours, inputs), plain)
        change(theirs)
        change(ours)
        for _ in range(3):
            expected = run(theirs, inputs)
            assert not same_bits(expected, plain)
            check_same_bits(run(ours, inputs), expected)


FROM_INSIDE = [
    weights_before_the_next_block,
    weights_elsewhere_for_the_next_block,
    another_eps_from_inside_a_block,
    a_hook_on_the_norm_from_inside_a_block,
]


@pytest.mark.parametrize("overlooked", [False, True], ids=["seen", "overlooked"])
@pytest.mark.parametrize("change", FROM_INSIDE, ids=lambda change: change.__name__)
def test_what_was_done_ahead_is_not_taken_after_a_change(
    change: Callable[[Any], None], overlooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around those hooks it is not even done. Where they are overlooked, as code that is no hook would be, it is."""
    if overlooked:
        monkeypatch.setattr(_ahead, "_nobody_else_in", lambda block: True)
    untouched, inputs = build("qwen")
    plain = run(untouched, inputs)
    theirs, ours = build("qwen")[0], build("qwen")[0]
    change(theirs)
    change(ours)
    with apply(ours, gate=KernelGate()) as handle:
        for calls in (1, 2, 3):
            expected = run(theirs, inputs)
            assert not same_bits(expected, plain)
            check_same_bits(run(ours, inputs), expected)
            if calls == 1 or not overlooked:  # a norm that has another eps by now is done ahead with that one
                assert first_norms(handle)[:2] == [calls, calls]
        assert (across(handle, "transformer_blocks.0") > 0) is overlooked


def test_the_uncounted_write_is_seen_by_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where the hook is overlooked, the picture is another."""
    theirs, ours = build("qwen")[0], build("qwen")[0]
    inputs = build("qwen")[1]
    uncounted_write_from_a_hook(theirs)
    uncounted_write_from_a_hook(ours)
    with apply(ours, gate=KernelGate()):
        check_same_bits(run(ours, inputs), run(theirs, inputs))
        monkeypatch.setattr(_ahead, "_nobody_else_in", lambda block: True)
        assert not same_bits(run(ours, inputs), run(theirs, inputs))


@pytest.mark.parametrize("name", ACROSS)
def test_a_hook_that_only_looks_leaves_it_on(name: str) -> None:
    model, inputs = build(name)
    expected = run(model, inputs)
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output)

    look.only_looks = True  # type: ignore[attr-defined]
    for block in blocks_of(model):
        block.register_forward_hook(look)
        (block.txt_mlp.net[2] if name == "qwen" else block.feed_forward).register_forward_hook(look)
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(run(model, inputs), expected)
        assert first_norms(handle) == [1] + [0] * (BLOCKS - 1)
        seen_then = len(seen)
        # A hook that says nothing of itself, in the last but one block: only the step from there is left out.
        hook = blocks_of(model)[-2].attn if name == "qwen" else blocks_of(model)[-2].attention
        removable = hook.register_forward_hook(lambda *_: None)
        check_same_bits(run(model, inputs), expected)
        assert first_norms(handle) == [2] + [0] * (BLOCKS - 2) + [1]
        removable.remove()
        check_same_bits(run(model, inputs), expected)
        assert first_norms(handle) == [3] + [0] * (BLOCKS - 2) + [1]
    assert seen_then == 2 * BLOCKS


def test_values_that_nobody_takes_are_soon_not_computed() -> None:
    """A ControlNet adds to the stream after every block: the first forward finds out, most later ones do not try."""
    model, inputs = build("qwen")
    generator = torch.Generator().manual_seed(5)
    residuals = [torch.randn(2, 16, 64, generator=generator) for _ in range(BLOCKS)]
    with_residuals = inputs | {"controlnet_block_samples": residuals}
    expected, plain = run(model, with_residuals), run(model, inputs)
    assert not same_bits(expected, plain)

    def in_one_more(inputs: dict[str, Any], expected: tuple[torch.Tensor, ...]) -> int:
        before = across(handle)
        check_same_bits(run(model, inputs), expected)
        return across(handle) - before

    with apply(model, gate=KernelGate()) as handle:
        tried = [in_one_more(with_residuals, expected) for _ in range(12)]
        assert [number for number, calls in enumerate(tried) if calls] == [0, 2, 5, 10]
        assert set(tried) == {0, ACROSS["qwen"]}
        # The ControlNet is gone: within as many forwards as it waits, it is tried again, and then always.
        back = [in_one_more(inputs, plain) for _ in range(12)]
        assert back == [0] * 7 + [ACROSS["qwen"]] * 5


@pytest.mark.parametrize("name", ACROSS)
def test_a_forward_that_broke_off_leaves_nothing(name: str) -> None:
    model, inputs = build(name)
    expected = run(model, inputs)
    streams: list[weakref.ref[torch.Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        streams.append(weakref.ref(output[1] if isinstance(output, tuple) else output))

    def stop(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    keep.only_looks = True  # type: ignore[attr-defined]
    with apply(model, gate=KernelGate()):
        blocks_of(model)[0].register_forward_hook(keep)
        attention = blocks_of(model)[1].attn if name == "qwen" else blocks_of(model)[1].attention
        hook = attention.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            run(model, inputs)
        hook.remove()
        gc.collect()
        assert streams[0]() is None
        check_same_bits(run(model, inputs), expected)


@pytest.mark.parametrize("name", ACROSS)
def test_blocks_called_by_hand_in_another_way(name: str) -> None:
    """A block left out, and another conditioning for the second block than for the first."""
    model, inputs = build(name)
    other, _ = build(name)
    blocks = blocks_of(model)
    with apply(model, gate=KernelGate()):
        run(model, inputs)
        for each in (model, other):
            blocks = blocks_of(each)
            kept = nn.ModuleList([blocks[0], blocks[2]])
            setattr(each, "transformer_blocks" if name == "qwen" else "layers", kept)
        for _ in range(2):
            check_same_bits(run(model, inputs), run(other, inputs))


def test_another_conditioning_for_the_next_block() -> None:
    def by_hand(model: Any) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        x, text, temb = (torch.randn(1, n, 64, generator=generator) for n in (16, 5, 1))
        tables = model.pos_embed([[(1, 4, 4)]], max_txt_seq_len=5, device=x.device)
        with torch.no_grad():
            for number, block in enumerate(model.transformer_blocks):
                of_this = temb[:, 0] * (1 + number // 2)
                text, x = block(x, text, None, of_this, tables)
        return text, x

    model, other = build("qwen")[0], build("qwen")[0]
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(3):
            check_same_bits(by_hand(model), by_hand(other))
        assert first_norms(handle) == [3] * BLOCKS  # each block was given a temb of its own


@pytest.mark.parametrize("name", ACROSS)
def test_inference_mode_and_gradients_do_without(name: str) -> None:
    model, inputs = build(name)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        with torch.inference_mode():
            check_same_bits(flat(model(**inputs)), expected)
        assert first_norms(handle) == [1] * BLOCKS
        with torch.enable_grad():
            model.requires_grad_(True)
            check_same_bits([part.detach() for part in flat(model(**inputs))], expected)
        assert first_norms(handle) == [2] * BLOCKS


@pytest.mark.parametrize("name", ACROSS)
def test_weights_of_the_inference_mode_count_no_writes(name: str) -> None:
    """They came from a model that was made in it and runs outside: nothing is done early, and nothing raises."""
    with torch.inference_mode():
        model, inputs = build(name)
    inputs = build(name)[1]
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for calls in (1, 2):
            check_same_bits(run(model, inputs), expected)
            assert first_norms(handle) == [calls] * BLOCKS
    with torch.inference_mode():
        counted = nn.Linear(4, 4)
    assert not may_run_early(counted, torch.zeros(1, 4))
    assert LookAhead().begin(1, (counted.weight,), None, torch.device("cpu")) is None


@pytest.mark.parametrize("buffer", ["weight", "weight_scale", "input_scale"])
@pytest.mark.parametrize("name", ACROSS)
def test_a_quantised_modulation_that_is_written_to_between_two_blocks_is_seen(name: str, buffer: str) -> None:
    """Its weight and scales are buffers. The hook says that it only looks, and lies."""

    def changed() -> Any:
        model = build(name, torch.bfloat16)[0]
        first, second = blocks_of(model)[:2]
        modulation, key = (second.img_mod, "1") if hasattr(second, "img_mod") else (second.adaLN_modulation, "0")
        made = modulation._modules[key] = Fp8Linear.of(modulation._modules[key], 0.02)

        def write(module: nn.Module, args: Any, output: Any) -> None:
            part = getattr(made, buffer)
            part.copy_(part.flip(0) if part.ndim else part * 2.5)

        write.only_looks = True  # type: ignore[attr-defined]
        first.register_forward_hook(write)
        return model

    inputs = build(name, torch.bfloat16)[1]
    theirs, ours = changed(), changed()
    with apply(ours, gate=KernelGate()):
        answers = [run(theirs, inputs) for _ in range(2)]
        assert not same_bits(*answers)
        for expected in answers:
            check_same_bits(run(ours, inputs), expected)


@pytest.mark.parametrize("name", ACROSS)
def test_two_threads_in_one_model(name: str) -> None:
    model, inputs = build(name)
    others = inputs | ({"timestep": inputs["timestep"] * 0.5} if name == "qwen" else {"t": inputs["t"] * 0.5})
    expected = [run(model, inputs), run(model, others)]
    wrong: list[BaseException] = []
    with apply(model, gate=KernelGate()):

        def work(which: int) -> None:
            try:
                for _ in range(6):
                    check_same_bits(run(model, [inputs, others][which]), expected[which])
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_weights_that_are_not_at_hand() -> None:
    x = torch.zeros(1, 4)
    assert may_run_early(nn.Linear(4, 4), x)
    assert not may_run_early(nn.Linear(4, 4, device="meta"), x)
    assert not may_run_early(nn.Linear(4, 4, dtype=torch.bfloat16), x)


def test_a_lane_that_cannot_be_told() -> None:
    look, block = LookAhead(), nn.Linear(2, 2)
    look.add(0, block)
    look.add(1, nn.Linear(2, 2))
    assert look.begin(1, (), None, torch.device("meta")) is None
    assert look.take(1, (), torch.device("meta")) is None
    assert look.following(0, block, torch.zeros(1)) is None  # the next block's forward is no function that we put there
