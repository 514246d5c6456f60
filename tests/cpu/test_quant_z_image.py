"""Z-Image with FP8 linears: norms and SwiGLU quantise for them, and every byte is what the linears' own chain gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from denoisers import (
    KernelGate,
    check_same_bits,
    flat,
    run,
    same_bits,
    z_image,
    z_image_inputs,
)
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from peft import LoraConfig
from test_quant_models import quantised, rows, told
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.apply import Handle, apply
from samebits.gate import Gate
from samebits.quant import Fp8Linear

BF16 = torch.bfloat16
READ_A_NORM = ("attention.to_q", "attention.to_k", "attention.to_v", "feed_forward.w1", "feed_forward.w3")
QUANTISED_BEFORE = (*READ_A_NORM, "feed_forward.w2")
"""The linears of a block whose inputs a kernel before them quantises."""
CALLED = ("noise_refiner.0", "context_refiner.0", "layers.0", "layers.1", "layers.2")


def fp8(dtype: torch.dtype = BF16, **kind: Any) -> Any:
    return quantised(z_image(dtype, n_layers=3), **kind)


def own_quantisations(handle: Handle, block: str) -> dict[str, int]:
    """How often each linear of a block quantised its input itself."""
    found = rows(handle)
    names = (*QUANTISED_BEFORE, "attention.to_out.0")
    return {name: found[f"{block}.{name}.input"].fused + found[f"{block}.{name}.input"].eager for name in names}


@contextmanager
def products(model: Any) -> Iterator[list[tuple[str, bytes, float, torch.dtype]]]:
    """What every FP8 linear multiplies: its name, the bytes, the scale, the dtype of the result; in order."""
    names = {module: name for name, module in model.named_modules()}
    seen: list[tuple[str, bytes, float, torch.dtype]] = []
    original = Fp8Linear.multiply

    def multiply(self: Fp8Linear, x: Any, bias: Any) -> Any:
        seen.append((names[self], x.values.view(torch.uint8).numpy().tobytes(), float(x.scale), x.dtype))
        return original(self, x, bias)

    Fp8Linear.multiply = multiply  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Fp8Linear.multiply = original  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("omni", [False, True])
def test_fused_is_unfused_to_every_byte(omni: bool, dtype: torch.dtype) -> None:
    """With a noise mask (omni) every token has a modulation of its own; the refiners of the caption have none."""
    model, inputs = fp8(dtype), z_image_inputs(dtype, omni=omni)
    with products(model) as theirs:
        expected = run(model, inputs)
    for gate in (Gate(), KernelGate()):
        with apply(model, gate=gate) as handle:
            for _ in range(3):
                with products(model) as ours:
                    check_same_bits(run(model, inputs), expected)
                assert ours == theirs
            for block in (*CALLED, *(["siglip_refiner.0"] if omni else [])):
                assert own_quantisations(handle, block) == {
                    **dict.fromkeys(QUANTISED_BEFORE, 0),
                    "attention.to_out.0": 3,
                }
            # Across the block boundary too: only the first block of a stack computes its first norm.
            assert [rows(handle)[f"layers.{n}.attention_norm1"].eager for n in (1, 2)] == [0, 0]
            assert [rows(handle)[f"layers.{n}.attention_norm1"].fused for n in (1, 2)] == [0, 0]
            assert not told(handle)
    check_same_bits(run(model, inputs), expected)
    moved = [(name, data[:-1] + bytes([data[-1] ^ 1]), *rest) for name, data, *rest in theirs]
    assert moved[-1] != theirs[-1]


@pytest.mark.parametrize("op", ["rms_norm_scale", "gated_residual_rms_norm", "swiglu"])
def test_the_bytes_of_each_kernel_reach_the_picture(op: str) -> None:
    """The control: one bit of the bytes that a kernel gives would have been noticed."""
    model, inputs = fp8(), z_image_inputs(BF16)
    expected = run(model, inputs)
    gate = KernelGate()
    spoilt: list[str] = []

    def spoil(name: str, outputs: Any) -> None:
        for output in outputs:
            if name == op and output.dtype == torch.float8_e4m3fn:
                output.view(torch.uint8).bitwise_xor_(0x80)
                spoilt.append(name)

    with apply(model, gate=gate):
        run(model, inputs)
        gate.spoil = spoil
        assert not same_bits(run(model, inputs), expected)
        assert spoilt


@pytest.mark.parametrize("op", ["rms_norm_scale", "gated_residual_rms_norm", "swiglu"])
def test_a_kernel_that_is_refused_gives_eagers_bytes(op: str) -> None:
    class Wrong(KernelGate):
        def _kernel(self, which: Any) -> Any:
            launch = super()._kernel(which)

            def wrong(*args: Any, out: Any = None) -> Any:
                result = launch(*args, out=out)
                for output in result if isinstance(result, tuple) else (result,):
                    output.view(torch.uint8).bitwise_xor_(0x80)
                return result

            return wrong if which.name == op else launch

    model, inputs = fp8(), z_image_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=Wrong()) as handle:
        for _ in range(3):
            check_same_bits(run(model, inputs), expected)
        assert all(count == 0 for name, count in own_quantisations(handle, "layers.1").items() if "to_out" not in name)
        found = [row for row in handle.report().rows if row.op == op and row.eager]
        assert found
        assert not any(row.fused for row in found)


def test_the_quantised_model_is_another_one() -> None:
    inputs, model = z_image_inputs(BF16), fp8()
    plain = run(model, inputs)
    assert not same_bits(plain, run(z_image(BF16, n_layers=3), inputs))
    model.layers[1].feed_forward.w2.input_scale.mul_(1.5)
    assert not same_bits(plain, run(model, inputs))


# Changed after the apply, and seen at the next call; each with what the report says and which linears then quantise
# their own input in ``layers.1``.

Q_K_V = READ_A_NORM[:3]
HALVES = READ_A_NORM[3:]
W2 = ("feed_forward.w2",)


def other_scale_for_k(block: Any) -> None:
    block.attention.to_k.input_scale.mul_(1.5)


def other_scale_for_w3(block: Any) -> None:
    block.feed_forward.w3.input_scale.mul_(1.5)


def other_scales_that_are_equal(block: Any) -> None:
    for name in ("to_q", "to_k", "to_v"):
        block.attention._modules[name].input_scale = torch.tensor(0.017)


def hook_on_attention(block: Any) -> None:
    block.attention.register_forward_hook(lambda module, args, output: output + 0.5)


def hook_on_to_q(block: Any) -> None:
    block.attention.to_q.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))


def hook_on_feed_forward(block: Any) -> None:
    block.feed_forward.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))


def hook_on_w1(block: Any) -> None:
    block.feed_forward.w1.register_forward_hook(lambda module, args, output: output + 0.5)


def hook_on_w2(block: Any) -> None:
    block.feed_forward.w2.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))


def own_silu_gating(block: Any) -> None:
    block.feed_forward._forward_silu_gating = lambda x1, x3: x1 * x3


def own_forward_of_feed_forward(block: Any) -> None:
    part = block.feed_forward
    part.forward = lambda x: type(part).forward(part, x + 0.5)


def own_forward_of_attention(block: Any) -> None:
    part = block.attention
    part.forward = lambda x, **arguments: type(part).forward(part, x + 0.5, **arguments)


class Moving(ZSingleStreamAttnProcessor):
    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(attn, hidden_states + 0.5, *args, **kwargs)


def another_processor(block: Any) -> None:
    block.attention.processor = Moving()


def a_plain_linear(part: str, name: str, sides: tuple[int, int]) -> Callable[[Any], None]:
    def change(block: Any) -> None:
        torch.manual_seed(5)
        getattr(block, part)._modules[name] = nn.Linear(*sides, bias=False, dtype=BF16).requires_grad_(False)

    change.__name__ = f"a_plain_{name}"
    return change


def a_dynamic_to_v(block: Any) -> None:
    block.attention.to_v.input_scale = None


def a_dynamic_w2(block: Any) -> None:
    block.feed_forward.w2.input_scale = None


def hook_on_the_first_norm(block: Any) -> None:
    block.attention_norm1.register_forward_hook(lambda module, args, output: output + 0.5)


def hook_on_ffn_norm1(block: Any) -> None:
    block.ffn_norm1.register_forward_hook(lambda module, args, output: output + 0.5)


def other_eps_for_ffn_norm1(block: Any) -> None:
    block.ffn_norm1.eps = 0.5


CHANGES: list[tuple[Callable[[Any], None], str, tuple[str, ...]]] = [
    (other_scale_for_k, "the input scales of to_q, to_k and to_v are not known to be one number", Q_K_V),
    (other_scale_for_w3, "the input scales of w1 and w3 are not known to be one number", HALVES),
    (other_scales_that_are_equal, "", ()),
    (hook_on_attention, "attention carries a hook", Q_K_V),
    (hook_on_to_q, "to_q carries a hook", Q_K_V),
    (hook_on_feed_forward, "feed_forward carries a hook", HALVES),
    (hook_on_w1, "w1 carries a hook", HALVES),
    (hook_on_w2, "w2 carries a hook", W2),
    (own_silu_gating, "_forward_silu_gating was replaced on the instance", (*HALVES, *W2)),
    (own_forward_of_feed_forward, "feed_forward carries a hook or a forward of its own", (*HALVES, *W2)),
    (own_forward_of_attention, "attention carries a hook or a forward of its own", Q_K_V),
    (another_processor, "the attention processor is a Moving", Q_K_V),
    (
        a_plain_linear("attention", "to_k", (64, 64)),
        "to_k is a torch.nn.modules.linear.Linear",
        ("attention.to_q", "attention.to_v"),
    ),
    (
        a_plain_linear("feed_forward", "w3", (64, 170)),
        "w3 is a torch.nn.modules.linear.Linear",
        ("feed_forward.w1",),
    ),
    (a_plain_linear("feed_forward", "w2", (170, 64)), "", ()),
    (a_dynamic_to_v, "to_v finds its scale from each input", Q_K_V),
    (a_dynamic_w2, "w2 finds its scale from each input", W2),
    (hook_on_the_first_norm, "attention_norm1 carries a hook", Q_K_V),
    (hook_on_ffn_norm1, "ffn_norm1 carries a hook", HALVES),
    (other_eps_for_ffn_norm1, "attention_norm2 and ffn_norm1 have different eps", HALVES),
]


@pytest.mark.parametrize(("change", "words", "alone"), CHANGES, ids=[change.__name__ for change, *_ in CHANGES])
def test_what_stands_between_a_kernel_and_a_linear_is_seen(
    change: Callable[[Any], None], words: str, alone: tuple[str, ...]
) -> None:
    inputs = z_image_inputs(BF16)
    theirs, ours = fp8(), fp8()
    untouched = run(theirs, inputs)
    with apply(ours, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(run(ours, inputs), untouched)
        for model in (theirs, ours):
            change(model.layers[1])
        expected = run(theirs, inputs)
        assert not same_bits(expected, untouched)
        for _ in range(3):
            check_same_bits(run(ours, inputs), expected)
        counted = own_quantisations(handle, "layers.1")
        assert {name for name in QUANTISED_BEFORE if counted[name]} == set(alone)
        for block in ("layers.0", "layers.2"):
            assert not any(own_quantisations(handle, block)[name] for name in QUANTISED_BEFORE)
        notes = told(handle)
        assert bool(notes) == bool(words)
        assert all(note.startswith("1 x ") and words in note for note in notes)
    check_same_bits(run(ours, inputs), expected)
    assert not told(handle), "taken off, there is nothing to say"


def test_a_lora_on_one_linear_takes_its_neighbours_along() -> None:
    config = LoraConfig(r=4, target_modules=r"layers\.1\.(attention\.to_k|feed_forward\.w2)", init_lora_weights=False)
    inputs, answers = z_image_inputs(BF16), []
    theirs, ours = fp8(), fp8()
    untouched = run(theirs, inputs)
    with apply(ours, gate=KernelGate()) as handle:
        run(ours, inputs)
        for model in (theirs, ours):
            torch.manual_seed(3)
            model.add_adapter(config, adapter_name="style")
            model.requires_grad_(False)
        for scale in (1.0, 0.25):
            for model in (theirs, ours):
                model.set_adapters("style", scale)
            expected = run(theirs, inputs)
            assert not same_bits(expected, untouched)
            answers.append(expected)
            for _ in range(2):
                check_same_bits(run(ours, inputs), expected)
        counted = {
            row.site.removeprefix("layers.1."): row.fused + row.eager
            for row in handle.report().rows
            if row.site.startswith("layers.1.") and row.op == "quantize_fp8"
        }
        assert counted["attention.to_q.input"] == counted["attention.to_v.input"] == 4
        assert counted["feed_forward.w1.input"] == counted["feed_forward.w3.input"] == 0
        report = str(handle.report())
        assert "1 x attention_norm1: FP8 linears quantise its result themselves, because to_k is a peft." in report
        assert "1 x feed_forward: FP8 linears quantise its result themselves, because w2 is a peft." in report
    assert not same_bits(*answers)


def test_scales_per_channel_of_the_weight_are_no_obstacle() -> None:
    model, inputs = fp8(per_channel=True), z_image_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)
        assert not any(own_quantisations(handle, "layers.1")[name] for name in QUANTISED_BEFORE)


@pytest.mark.parametrize("per_channel", [False, True])
def test_dynamic_scales_stay_with_the_linear(per_channel: bool) -> None:
    model, inputs = fp8(static=False, per_channel=per_channel), z_image_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)
        report = str(handle.report())
    assert "6 x attention_norm1" in report  # the SigLIP refiner was not called
    assert "because to_q finds its scale from each input" in report


def test_without_fp8_there_is_nothing_to_say() -> None:
    model, inputs = z_image(BF16), z_image_inputs(BF16)
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        assert not told(handle)


def test_a_block_called_by_hand_without_a_table() -> None:
    """Such an attention runs diffusers' own lines, which want a tensor; the feed-forward does not mind."""
    model = fp8()
    block, generator = model.layers[1], torch.Generator().manual_seed(4)
    x, adaln = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((2, 6, 64), (2, 64)))

    def by_hand() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (block(x, None, None, adaln),)

    expected = by_hand()
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(by_hand(), expected)
        counted = own_quantisations(handle, "layers.1")
        assert {name for name in QUANTISED_BEFORE if counted[name]} == set(Q_K_V)


def test_norm_weights_of_another_dtype() -> None:
    """The norm then gives fp32, and so must the linears: bytes would not tell."""
    model, inputs = fp8(), z_image_inputs(BF16)
    untouched = run(model, inputs)
    for block in (*model.layers, *model.context_refiner):
        block.ffn_norm1.float()
    with products(model) as theirs:
        expected = run(model, inputs)
    assert {dtype for *_, dtype in theirs} == {BF16, torch.float32}
    assert not same_bits(expected, untouched)
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(3):
            with products(model) as ours:
                check_same_bits(run(model, inputs), expected)
            assert ours == theirs
        assert own_quantisations(handle, "layers.1")["feed_forward.w1"] == 3
        assert own_quantisations(handle, "layers.1")["feed_forward.w2"] == 0


def test_gradients_and_autocast_run_diffusers_own_lines() -> None:
    model, inputs = fp8(), z_image_inputs(BF16)
    plain = run(model, inputs)
    with torch.autocast("cpu", BF16):
        expected = run(model, inputs)
        with apply(model, gate=KernelGate()) as handle:
            check_same_bits(run(model, inputs), expected)
            assert own_quantisations(handle, "layers.1")["attention.to_q"] == 1
    with apply(model, gate=KernelGate()) as handle, torch.enable_grad():
        check_same_bits([part.detach() for part in flat(model(**inputs))], plain)
        assert own_quantisations(handle, "layers.1")["attention.to_q"] == 1


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_whoever_traces_sees_diffusers_own_lines() -> None:
    model, inputs = fp8(), z_image_inputs(BF16)
    expected = run(model, inputs)
    seen: list[type] = []
    with apply(model, gate=KernelGate()) as handle:
        with Looks():
            check_same_bits(run(model, inputs), expected)
        hook = register_module_forward_hook(lambda module, args, output: seen.append(type(args[0] if args else output)))
        try:
            check_same_bits(run(model, inputs), expected)
        finally:
            hook.remove()
        # The linears are modules without inner ones: who looks at modules sees them quantise.
        assert not any(row.fused for row in handle.report().rows if row.op != "quantize_fp8")
        check_same_bits(run(model, inputs), expected)
    assert seen
    assert not [kind for kind in seen if "Quantized" in kind.__name__]


def test_inference_mode() -> None:
    model, inputs = fp8(), z_image_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle, torch.inference_mode():
        for _ in range(2):
            check_same_bits(flat(model(**inputs)), expected)
        assert not any(own_quantisations(handle, "layers.1")[name] for name in QUANTISED_BEFORE)


@pytest.mark.parametrize("how", ["accelerate", "leaf_level", "block_level"])
def test_offloaded_it_has_the_same_bits(how: str) -> None:
    model, inputs = fp8(), z_image_inputs(BF16)
    expected = run(model, inputs)
    cpu = torch.device("cpu")
    if how == "accelerate":
        pytest.importorskip("accelerate").cpu_offload(model, execution_device=cpu)
    else:
        more = {"num_blocks_per_group": 1} if how == "block_level" else {}
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=how, **more)
    with apply(model, gate=KernelGate()):
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)


def test_a_copy_of_an_applied_model_is_eager() -> None:
    model, inputs = fp8(), z_image_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()):
        run(model, inputs)
        twin = copy.deepcopy(model)
    check_same_bits(run(twin, inputs), expected)
    assert not any(type(module) is Attention and "forward" in module.__dict__ for module in model.modules())


def test_a_scale_that_is_written_to_between_two_blocks_is_seen() -> None:
    """All three alike, so that they still could be shared; the hook says that it only looks, and lies."""

    def changed() -> Any:
        model = fp8()
        attention = model.layers[1].attention

        def write(*_: Any) -> None:
            for name in ("to_q", "to_k", "to_v"):
                attention._modules[name].input_scale.mul_(1.25)

        write.only_looks = True  # type: ignore[attr-defined]
        model.layers[0].register_forward_hook(write)
        return model

    theirs, ours, inputs = changed(), changed(), z_image_inputs(BF16)
    with apply(ours, gate=KernelGate()):
        answers = [run(theirs, inputs) for _ in range(3)]
        assert not same_bits(*answers[:2])
        for expected in answers:
            check_same_bits(run(ours, inputs), expected)
