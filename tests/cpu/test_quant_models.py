"""A denoiser with FP8 linears: fused it has the bits that it has unfused, and its biases move only when told to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from denoisers import KernelGate, check_same_bits, qwen, qwen_inputs, run, same_bits, z_image, z_image_inputs
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from samebits.apply import Handle, apply, place_of
from samebits.gate import Gate
from samebits.models import _quantized
from samebits.quality import Figures, Pair, QualityRecord, keep_record
from samebits.quant import Fp8Linear

BF16 = torch.bfloat16
STACKS = ("transformer_blocks", "layers", "noise_refiner", "context_refiner", "siglip_refiner")


def quantised(
    model: Any, *, static: bool = True, per_channel: bool = False, only: Callable[[str], bool] = lambda name: True
) -> Any:
    """Put FP8 linears into the blocks; those that read one input get one scale, as ModelOpt's export has it."""
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.split(".")[0] not in STACKS or not only(name):
            continue
        if "_mod" in name or "adaLN" in name:
            continue
        made = Fp8Linear.of(module, 0.02 if static else None, per_channel=per_channel)
        parent = model.get_submodule(name.rpartition(".")[0])
        parent._modules[name.rpartition(".")[2]] = made
    return model


def fp8_qwen(**kind: Any) -> Any:
    return quantised(qwen(BF16, num_layers=3), **kind)


def told(handle: Handle) -> list[str]:
    """What the report says of norms that hand on tensors although FP8 linears read them."""
    return [note for note in handle.report().notes if "FP8 linears quantise its result themselves" in note]


def rows(handle: Handle) -> dict[str, Any]:
    return {row.site: row for row in handle.report().rows}


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_fused_is_unfused(mask: bool, edit: bool) -> None:
    model = quantised(qwen(BF16, num_layers=3, zero_cond_t=edit))
    inputs = qwen_inputs(BF16, mask=mask, edit=edit)
    expected = run(model, inputs)
    for gate in (Gate(), KernelGate()):
        with apply(model, gate=gate) as handle:
            for _ in range(3):
                check_same_bits(run(model, inputs), expected)
            found = rows(handle)
        declined = {line.name: line.declined for line in handle.sites if line.declined and ".values" not in line.name}
        assert not declined
        # What the kernel before quantises is not quantised again; the attention's outputs are.
        block = "transformer_blocks.1"
        for name in ("attn.to_q", "attn.add_v_proj", "img_mlp.net.0.proj", "txt_mlp.net.2"):
            assert found[f"{block}.{name}.input"].fused + found[f"{block}.{name}.input"].eager == 0
        for name in ("attn.to_out.0", "attn.to_add_out"):
            assert found[f"{block}.{name}.input"].fused + found[f"{block}.{name}.input"].eager == 3
        assert not told(handle)
    check_same_bits(run(model, inputs), expected)
    assert not any("_quantizer" in module.__dict__ for module in model.modules())


def test_the_quantised_model_is_another_one() -> None:
    """The control: the scale reaches the picture."""
    inputs = qwen_inputs(BF16)
    model = fp8_qwen()
    plain = run(model, inputs)
    assert not same_bits(plain, run(qwen(BF16, num_layers=3), inputs))
    model.transformer_blocks[1].img_mlp.net[2].input_scale.mul_(1.5)
    assert not same_bits(plain, run(model, inputs))


def other_scale_for_k(model: Any) -> None:
    model.transformer_blocks[1].attn.to_k.input_scale.mul_(1.5)


def hook_on_attn(model: Any) -> None:
    model.transformer_blocks[1].attn.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))


def hook_on_to_q(model: Any) -> None:
    model.transformer_blocks[1].attn.to_q.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_on_mlp(model: Any) -> None:
    model.transformer_blocks[1].img_mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_on_gelu(model: Any) -> None:
    model.transformer_blocks[1].txt_mlp.net[0].register_forward_hook(lambda module, args, output: output * 2)


def hook_on_last(model: Any) -> None:
    model.transformer_blocks[1].img_mlp.net[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_on_dropout(model: Any) -> None:
    model.transformer_blocks[1].img_mlp.net[1].register_forward_hook(lambda module, args, output: output * 2)


def own_gelu(model: Any) -> None:
    model.transformer_blocks[1].img_mlp.net[0].gelu = lambda gate: gate * 2


def own_forward_of_mlp(model: Any) -> None:
    mlp = model.transformer_blocks[1].img_mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x * 2)


def a_plain_linear(model: Any) -> None:
    torch.manual_seed(5)
    model.transformer_blocks[1].attn.to_k = nn.Linear(64, 64, dtype=BF16).requires_grad_(False)


def a_weighted_norm(model: Any) -> None:
    torch.manual_seed(5)
    norm = nn.LayerNorm(64, eps=1e-6, dtype=BF16)
    nn.init.normal_(norm.weight)
    model.transformer_blocks[1].img_norm1 = norm.requires_grad_(False)


def own_feed_forward(model: Any) -> None:
    class Own(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x) * 2

    model.transformer_blocks[1].img_mlp = Own(model.transformer_blocks[1].img_mlp)


BETWEEN = "_mlp has a hook or another module between its two linears"
CHANGES: dict[Callable[[Any], None], str] = {
    other_scale_for_k: "img_norm1: {}the input scales of to_q, to_k and to_v are not known to be one number",
    hook_on_attn: "txt_norm1: {}attn carries a hook",
    hook_on_to_q: "img_norm1: {}to_q carries a hook",
    hook_on_mlp: "img_norm2: {}img_mlp carries a hook",
    hook_on_gelu: "txt_norm2: {}txt" + BETWEEN,
    hook_on_last: "img_norm2: {}img_mlp.net.2 carries a hook",
    hook_on_dropout: "img_norm2: {}img" + BETWEEN,
    own_gelu: "img_norm2: {}img" + BETWEEN,
    own_forward_of_mlp: "img_norm2: {}img_mlp carries a hook or a forward of its own",
    a_plain_linear: "img_norm1: {}to_k is a torch.nn.modules.linear.Linear",
    a_weighted_norm: "img_norm1: {}img_norm1 has a weight or a bias",
}
"""Each with what the report says then."""


@pytest.mark.parametrize("rounding", [None, "eager"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_stands_between_a_kernel_and_a_linear_is_seen(change: Any, rounding: str | None) -> None:
    """Changed after the apply, and seen at the next call. With biases moved, kernels and references still agree."""
    inputs = qwen_inputs(BF16)
    options: dict[str, Any] = (
        {} if rounding is None else {"contract": "measured", "rounding": rounding, "on_trial": True}
    )
    theirs, ours = fp8_qwen(), fp8_qwen()
    untouched = run(theirs, inputs)
    with apply(ours, gate=KernelGate(), **options) as handle:
        run(ours, inputs)
        change(theirs)
        change(ours)
        if rounding is None:
            expected = run(theirs, inputs)
        else:
            with apply(theirs, gate=Gate(), **options):
                expected = run(theirs, inputs)
        assert not same_bits(expected, untouched)
        for _ in range(2):
            check_same_bits(run(ours, inputs), expected)
        words = CHANGES[change].format("FP8 linears quantise its result themselves, because ")
        assert [note for note in told(handle) if note.startswith(f"1 x {words}")]
        assert len(told(handle)) == (2 if change is hook_on_attn else 1)


def test_somebodys_own_feed_forward_is_told() -> None:
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    own_feed_forward(model)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(run(model, inputs), expected)
        (note,) = told(handle)
    assert "because img_mlp is not the FeedForward that samebits was written against" in note
    assert not told(handle), "taken off, there is nothing to say"


def test_without_fp8_there_is_nothing_to_say() -> None:
    model, inputs = qwen(BF16), qwen_inputs(BF16)
    model.transformer_blocks[1].attn.register_forward_hook(lambda module, args, output: output)
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        assert not told(handle)


def test_gradients_and_autocast_run_diffusers_own_lines() -> None:
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    with torch.autocast("cpu", BF16):
        expected = run(model, inputs)
        with apply(model, gate=KernelGate()):
            check_same_bits(run(model, inputs), expected)


def test_dynamic_scales_stay_with_the_linear() -> None:
    model, inputs = fp8_qwen(static=False), qwen_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(run(model, inputs), expected)
        check_same_bits(run(model, inputs), expected)
        row = rows(handle)["transformer_blocks.0.attn.to_q.input"]
    assert "found from each input" in next(iter(row.reasons))


def test_a_copy_of_an_applied_model_is_eager() -> None:
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()):
        run(model, inputs)
        twin = copy.deepcopy(model)
    assert not any(module.__dict__.get("_quantizer") for module in twin.modules())
    check_same_bits(run(twin, inputs), expected)


# Biases that move.


def measured(model: Any, rounding: str = "eager", gate: Gate | None = None) -> Handle:
    return apply(model, gate=gate or KernelGate(), contract="measured", rounding=rounding, on_trial=True)


@pytest.mark.parametrize("rounding", ["eager", "fma"])
def test_four_biases_a_block_are_taken_in(rounding: str) -> None:
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    exact = run(model, inputs)
    with measured(model, rounding, Gate()) as handle:
        expected = run(model, inputs)
        found = rows(handle)
    assert not same_bits(expected, exact)
    late = {name: row.eager for name, row in found.items() if name.endswith("_bias") and row.eager}
    blocks = len(model.transformer_blocks)
    assert sum(late.values()) == 4 * blocks
    assert {name.rpartition(".")[2] for name in late} == {
        *("img_norm2_bias", "txt_norm2_bias", "img_residual_bias", "txt_residual_bias"),
        *("img_next_norm1_bias", "txt_next_norm1_bias"),
    }
    with measured(model, rounding):
        for _ in range(3):
            check_same_bits(run(model, inputs), expected)
    check_same_bits(run(model, inputs), exact)


def test_the_two_roundings_differ() -> None:
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    answers = []
    for rounding in ("eager", "fma"):
        with measured(model, rounding):
            answers.append(run(model, inputs))
    assert not same_bits(*answers)


def test_without_quantised_linears_nothing_moves() -> None:
    model, inputs = qwen(BF16), qwen_inputs(BF16)
    expected = run(model, inputs)
    with measured(model) as handle:
        check_same_bits(run(model, inputs), expected)
        assert "no linear of this model is quantised" in str(handle.report())


def a_record(model: Any, ssim: float, rounding: str = "eager") -> QualityRecord:
    place = place_of(model, rounding)
    figures = Figures(ssim=ssim, psnr=40.0, flip=0.01)
    pair = Pair(prompt="p", seed=0, exact_sha256="1", measured_sha256="2", figures=figures)
    return QualityRecord(
        model="tiny",
        model_hash=place.model_hash,
        quantization=place.quantization or "",
        rounding=rounding,  # type: ignore[arg-type]
        dtype=place.dtype,
        capability=None if place.capability is None else list(place.capability),
        environment=dict(place.environment),
        sources=dict(place.sources),
        steps=1,
        size=[64, 64],
        pairs=[pair],
    )


def test_a_record_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    exact = run(model, inputs)
    with measured(model):
        moved = run(model, inputs)

    def answer() -> tuple[Any, str]:
        with apply(model, gate=KernelGate(), contract="measured") as handle:
            return run(model, inputs), str(handle.report())

    for record, expected, words in (
        (None, exact, "there is no quality record"),
        (a_record(model, 0.5), exact, "SSIM 0.5000 is below 0.95"),
        (a_record(model, 0.99, "fma"), exact, "SSIM 0.5000"),  # beside the other one, for the other rounding
        (a_record(model, 0.99), moved, "measured on 1 pictures"),
    ):
        if record is not None:
            keep_record(tmp_path, record)
        output, report = answer()
        check_same_bits(output, expected)
        assert words in report
    with torch.no_grad():
        model.proj_out.bias.add_(1)  # another model
    with apply(model, contract="measured", gate=KernelGate()) as handle:
        assert "there is no quality record" in str(handle.report())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_model_that_moved_after_the_decision_is_exact(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is about one dtype on one device: elsewhere it would be another measurement."""
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    model, inputs = fp8_qwen(), qwen_inputs(dtype)
    keep_record(tmp_path, a_record(model, 0.99))
    plain = nn.Module.to(copy.deepcopy(model), dtype)
    with apply(model, gate=KernelGate(), contract="measured") as handle:
        nn.Module.to(model, dtype)
        output = run(model, inputs)
        assert same_bits(output, run(plain, inputs)) == (dtype != BF16)
        assert bool(handle.moved) == (dtype == BF16)
        report = str(handle.report())
    assert ("for torch.bfloat16 on cpu, and the last call had torch.float16 on cpu" in report) == (dtype != BF16)


def test_weights_that_are_not_in_memory_stay_exact() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    expected = run(model, inputs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with apply(model, gate=KernelGate(), contract="measured") as handle:
        check_same_bits(run(model, inputs), expected)
        assert "not in memory (offloaded)" in str(handle.report())


def test_a_family_without_late_biases_says_so() -> None:
    model, inputs = quantised(z_image(BF16)), z_image_inputs(BF16)
    expected = run(model, inputs)
    with measured(model) as handle:
        check_same_bits(run(model, inputs), expected)
        assert "adds no bias of a ZImageTransformer2DModel late" in str(handle.report())
        assert not handle.moved


def test_a_hook_on_every_module_sees_every_module() -> None:
    """torch's global hooks see tensors, and as many modules as without samebits."""

    def seen() -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []

        def see(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            calls.append((type(module).__name__, type(inputs[0] if inputs else output).__name__))

        hook = register_module_forward_hook(see)
        try:
            run(model, inputs)
        finally:
            hook.remove()
        return calls

    model, inputs = fp8_qwen(), qwen_inputs(BF16)
    expected = sorted(seen())
    for place in (lambda: apply(model, gate=KernelGate()), lambda: measured(model)):
        with place():
            assert sorted(seen()) == expected


def test_scales_whose_comparison_was_cut_short_are_not_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    linears: Any = [Fp8Linear(16, 16, static=True) for _ in range(2)]
    shared = _quantized.SharedScale()
    assert shared.of(linears) is linears[0].input_scale
    linears[1].input_scale.fill_(2.0)

    def interrupted(value: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_quantized, "float", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            shared.of(linears)
    assert shared.of(linears) is None


def test_scales_that_lie_nowhere_are_no_number() -> None:
    linears: Any = [Fp8Linear(16, 16, static=True).to("meta") for _ in range(2)]
    assert _quantized.SharedScale().of(linears) is None
    with apply(fp8_qwen(), gate=KernelGate()) as handle:
        for model in handle.models:
            model.to("meta")
        assert any("are not known to be one number" in note for note in told(handle))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contract": "fast"}, "exact, measured"),
        ({"contract": "measured", "rounding": "up"}, "eager, fma"),
        ({"on_trial": True}, "contract"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        apply(qwen(), **options)
