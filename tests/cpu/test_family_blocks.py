"""One block alone: every chain of it, its other lines where a chain does not apply, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from denoisers import DTYPES, KernelGate, check_same_bits, one_ulp_up, qwen, same_bits, z_image
from diffusers.models.transformers import transformer_qwenimage, transformer_z_image
from torch import nn

from samebits.apply import apply


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(*shape: int, seed: int = 8) -> torch.Tensor:
    """A RoPE table."""
    angles = randn(*shape, seed=seed, dtype=torch.float32)
    return torch.polar(torch.ones_like(angles), angles)


def qwen_arguments(dtype: torch.dtype, *, edit: bool = False, rope: bool = True) -> dict[str, Any]:
    """Arguments of a block of Qwen-Image of width 64: two samples, nine tokens of a picture and five of a text."""
    return {
        "hidden_states": randn(2, 9, 64, seed=1, dtype=dtype),
        "encoder_hidden_states": randn(2, 5, 64, seed=2, dtype=dtype),
        "encoder_hidden_states_mask": None,
        "temb": randn(4 if edit else 2, 64, seed=3, dtype=dtype),
        "image_rotary_emb": (table(9, 16), table(5, 16, seed=9)) if rope else None,
        "joint_attention_kwargs": None,
        "modulate_index": torch.arange(18).reshape(2, 9) % 2 if edit else None,
    }


Z_FORMS = ("modulation", "per token", "no modulation")


def z_block(model: Any, form: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A block of Z-Image of width 64 and its arguments: two samples of nine tokens."""
    arguments: dict[str, Any] = {
        "x": randn(2, 9, 64, seed=1, dtype=dtype),
        "attn_mask": torch.arange(9)[None] < torch.tensor([[9], [6]]),
        "freqs_cis": table(2, 9, 16),
    }
    if form == "no modulation":
        return model.context_refiner[0], arguments
    names = ("adaln_input",) if form == "modulation" else ("adaln_noisy", "adaln_clean")
    arguments |= {name: randn(2, 64, seed=seed, dtype=dtype) for seed, name in enumerate(names, 3)}
    if form == "per token":
        arguments["noise_mask"] = torch.arange(18).reshape(2, 9) % 2
    return model.layers[0], arguments


def answer(block: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The block's result as a tuple."""
    with torch.no_grad():
        result = block(**arguments)
    return result if isinstance(result, tuple) else (result,)


def check_block(model: Any, block: Any, arguments: dict[str, Any]) -> Any:
    """Compare with diffusers at the call that compares and at one that kernels answer; give the handle back."""
    expected = answer(block, arguments)
    gate = KernelGate()
    with apply(model, gate=gate) as handle:
        for _ in range(2):
            check_same_bits(answer(block, arguments), expected)
        gate.spoil = lambda name, outputs: [one_ulp_up(output) for output in outputs]
        assert not same_bits(answer(block, arguments), expected)
    return handle


def declined(handle: Any) -> dict[str, str]:
    """Why, by the site's name within the model, for every site that kept diffusers' own lines."""
    return {line.name: " ".join(line.declined) for line in handle.sites if line.declined}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edit", [False, True])
def test_block_of_qwen(edit: bool, dtype: torch.dtype) -> None:
    """An error in one of the six modulation vectors cannot hide in what follows."""
    model = qwen(dtype, zero_cond_t=edit)
    block, arguments = model.transformer_blocks[0], qwen_arguments(dtype, edit=edit)
    handle = check_block(model, block, arguments)
    assert not declined(handle)
    with apply(model, gate=KernelGate()), torch.no_grad():
        check_same_bits(block(*arguments.values()), answer(block, arguments))


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("name", ["img_norm1", "txt_norm1", "img_norm2", "txt_norm2"])
def test_block_of_qwen_line_by_line(name: str, edit: bool) -> None:
    """A hook on one norm: it sees its call, that chain is diffusers' lines, all others are fused."""
    model = qwen(torch.bfloat16, zero_cond_t=edit)
    block, seen = model.transformer_blocks[0], []
    getattr(block, name).register_forward_hook(lambda module, args, output: seen.append(output))
    handle = check_block(model, block, qwen_arguments(torch.bfloat16, edit=edit))
    assert len(seen) == 4
    assert list(declined(handle)) == [f"transformer_blocks.0.{name}"]


def test_block_of_qwen_without_rope() -> None:
    model = qwen(torch.bfloat16)
    handle = check_block(model, model.transformer_blocks[0], qwen_arguments(torch.bfloat16, rope=False))
    assert [site.rpartition(".")[2] for site in declined(handle)] == ["values", "qk"]
    assert "without a RoPE table" in declined(handle)["transformer_blocks.0.attn.qk"]


def test_tables_that_are_not_complex64_go_through_the_reference() -> None:
    """Real numbers in bf16, as a cast of the whole model makes them; and twice the precision."""
    model = qwen(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.complex128):
        arguments = qwen_arguments(torch.bfloat16)
        arguments["image_rotary_emb"] = tuple(
            part.to(dtype) if dtype.is_complex else part.real.to(dtype) for part in arguments["image_rotary_emb"]
        )
        assert not declined(check_block(model, model.transformer_blocks[0], arguments))


@pytest.mark.parametrize("shape", [(2, 9, 16), (1, 9, 16)])
def test_a_table_of_another_shape_means_something_else_to_diffusers(shape: tuple[int, ...]) -> None:
    model, arguments = qwen(), qwen_arguments(torch.float32)
    arguments["image_rotary_emb"] = (table(*shape), table(5, 16))
    block = model.transformer_blocks[0]
    with pytest.raises(RuntimeError) as theirs:
        answer(block, arguments)
    with apply(model, gate=KernelGate()), pytest.raises(RuntimeError) as ours:
        answer(block, arguments)
    assert str(ours.value) == str(theirs.value)


def test_a_rope_function_that_is_replaced_later_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments = qwen(), qwen_arguments(torch.float32)
    block = model.transformer_blocks[0]
    before = answer(block, arguments)
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(answer(block, arguments), before)
        monkeypatch.setattr(transformer_qwenimage, "apply_rotary_emb_qwen", lambda x, table, use_real: x * 2)
        during = answer(block, arguments)
        assert "apply_rotary_emb_qwen was replaced" in declined(handle)["transformer_blocks.0.attn.qk"]
    check_same_bits(answer(block, arguments), during)
    assert not same_bits(during, before)


@pytest.mark.parametrize("edit", [False, True])
def test_fp16_overflow_is_clipped_as_diffusers_clips_it(edit: bool) -> None:
    model = qwen(torch.float16, zero_cond_t=edit)
    block = model.transformer_blocks[1]
    for stream in ("img", "txt"):
        mod, mlp = getattr(block, f"{stream}_mod"), getattr(block, f"{stream}_mlp")
        mod[1].weight.zero_()
        mod[1].bias[5 * 64 :] = 2.0  # the second gate
        mlp.net[2].bias.fill_(3.0e4)
    arguments = qwen_arguments(torch.float16, edit=edit)
    for name in ("hidden_states", "encoder_hidden_states"):
        arguments[name] = arguments[name].clamp(-1, 1) * 2.5e4
    assert all((part == 65504).any() for part in answer(block, arguments))
    check_block(model, block, arguments)


def test_a_sum_in_fp32_is_not_clipped() -> None:
    """An fp16 stream whose modulation is in fp32 becomes an fp32 stream, and diffusers asks the sum's dtype."""
    model = qwen(torch.float16)
    block = model.transformer_blocks[0]
    for name in ("img_mod", "txt_mod"):
        getattr(block, name).float()
    for name in ("attn", "img_mlp", "txt_mlp"):
        getattr(block, name).float()
    arguments = qwen_arguments(torch.float16)
    arguments["temb"] = arguments["temb"].float()
    block.img_mod[1].bias[5 * 64 :] = 2.0
    block.img_mlp.net[2].bias.fill_(1.0e5)
    _, picture = answer(block, arguments)
    assert picture.dtype == torch.float32
    assert picture.max() > 65504
    check_block(model, block, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", Z_FORMS)
def test_block_of_z_image(form: str, dtype: torch.dtype) -> None:
    model = z_image(dtype)
    assert not declined(check_block(model, *z_block(model, form, dtype)))


@pytest.mark.parametrize("form", Z_FORMS)
@pytest.mark.parametrize("change", ["hook", "eps"])
@pytest.mark.parametrize("name", ["attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"])
def test_block_of_z_image_line_by_line(name: str, change: str, form: str) -> None:
    model = z_image(torch.bfloat16)
    block, arguments = z_block(model, form, torch.bfloat16)
    seen: list[torch.Tensor] = []
    norm = getattr(block, name)
    if change == "hook":
        norm.register_forward_hook(lambda module, args, output: seen.append(output))
    else:
        norm.eps = 1e-2
    handle = check_block(model, block, arguments)
    assert len(seen) == (4 if change == "hook" else 0)
    # One eps for the two norms of a chain; a norm alone may have any.
    chain = "attention_norm2" if name == "ffn_norm1" else name
    expected = [chain] if change == "hook" or chain == "attention_norm2" else []
    assert [site.rpartition(".")[2] for site in declined(handle)] == expected


@pytest.mark.parametrize("shape", [None, (9, 16)])
def test_attention_of_z_image_without_its_table(shape: tuple[int, ...] | None) -> None:
    model = z_image()
    block, arguments = z_block(model, "modulation", torch.float32)
    arguments["freqs_cis"] = None if shape is None else table(*shape)
    if shape is None:
        handle = check_block(model, block, arguments)
        assert "without a RoPE table" in declined(handle)["layers.0.attention.qk"]
        return
    with pytest.raises(RuntimeError) as theirs:
        answer(block, arguments)
    with apply(model, gate=KernelGate()), pytest.raises(RuntimeError) as ours:
        answer(block, arguments)
    assert str(ours.value) == str(theirs.value)


def test_a_gating_that_the_user_set_wins() -> None:
    model = z_image()
    block, arguments = z_block(model, "modulation", torch.float32)
    before = answer(block, arguments)
    block.feed_forward._forward_silu_gating = lambda x1, x3: torch.relu(x1) * x3
    handle = check_block(model, block, arguments)
    assert "_forward_silu_gating was replaced" in declined(handle)["layers.0.feed_forward"]
    assert not same_bits(answer(block, arguments), before)


def test_a_feed_forward_of_somebody_else_stays_and_the_report_says_so() -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    class MyFeedForward(transformer_z_image.FeedForward):
        def forward(self, x: Any) -> torch.Tensor:
            return torch.cos(x)

    model = qwen()
    model.transformer_blocks[0].img_mlp = Mine()
    handle = check_block(model, model.transformer_blocks[0], qwen_arguments(torch.float32))
    (row,) = [row for row in handle.report().rows if row.site == "transformer_blocks.0.img_mlp"]
    assert "its class is Mine" in "".join(row.reasons)
    model = z_image()
    block, arguments = z_block(model, "modulation", torch.float32)
    block.feed_forward.__class__ = MyFeedForward
    handle = check_block(model, block, arguments)
    (row,) = [row for row in handle.report().rows if row.site == "layers.0.feed_forward"]
    assert "its class is MyFeedForward" in "".join(row.reasons)


def test_fp32_norm_weights_on_a_bf16_attention() -> None:
    """The heads are fp32 after the norm and after RoPE; diffusers joins them with values in bf16."""
    model = z_image(torch.bfloat16)
    block, arguments = z_block(model, "modulation", torch.bfloat16)
    for name in ("norm_q", "norm_k"):
        getattr(block.attention, name).float()
    kinds = []
    block.attention.to_out[0].register_forward_pre_hook(lambda module, args: kinds.append(args[0].dtype))
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        answer(block, arguments)
    with apply(model, gate=KernelGate()), pytest.raises(type(theirs.value)) as ours:
        answer(block, arguments)
    assert str(ours.value) == str(theirs.value)
    block.attention.to_v.float()  # now it works
    block.attention.to_v.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    block.attention.to_out[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    check_block(model, block, arguments)
    assert kinds[0] == torch.float32
