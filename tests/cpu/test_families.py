"""The forwards that a family writes anew give diffusers' bits, with kernels and without, in every form a call takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from denoisers import (
    DTYPES,
    PRODUCTS,
    KernelGate,
    check_same_bits,
    eager_calls,
    flat,
    fused_calls,
    one_ulp_up,
    qwen,
    qwen_inputs,
    run,
    same_bits,
    z_image,
    z_image_inputs,
)
from diffusers.models.activations import GELU
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
from diffusers.models.transformers import transformer_qwenimage, transformer_z_image
from torch import nn

from samebits.apply import apply
from samebits.gate import Gate
from samebits.models import FAMILIES, family_of
from samebits.models._family import Source

# Chains that sites stand for. An activation has two sites, with the product before it and alone; each call is one's.
QWEN_SITES = 2 * 10 + 2
Z_IMAGE_SITES = 2 + 5 * 7
# What one forward calls where nothing stands between the blocks: of two blocks in a row, a residual and the next norm
# of each stream are one call.
QWEN_CALLS = QWEN_SITES - 2
# Two blocks have three pairs of calls that are one where both streams are served together: the norms behind the
# attention, and what reaches over the one boundary.
QWEN_PAIRS = 3
Z_IMAGE_CALLS = Z_IMAGE_SITES - 1
SIGLIP_SITES = 1 + 7

Form = tuple[Callable[[torch.dtype], Any], Callable[[torch.dtype], dict[str, Any]], int, int]
"""A model, its inputs, how many sites a forward calls one by one, and how many two forwards call with kernels."""


def qwen_form(config: dict[str, Any], **form: Any) -> Form:
    """A Qwen-Image model, its inputs, and how many sites are called."""

    def inputs(dtype: torch.dtype) -> dict[str, Any]:
        made = qwen_inputs(dtype, **form)
        if config.get("use_additional_t_cond"):
            made["additional_t_cond"] = torch.tensor([0, 1])
        return made

    return lambda dtype: qwen(dtype, **config), inputs, QWEN_CALLS, 2 * (QWEN_CALLS - QWEN_PAIRS)


def qwen_controlnet(dtype: torch.dtype) -> dict[str, Any]:
    """Two residuals, one for each block."""
    residuals = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(9)).to(dtype)
    return qwen_inputs(dtype) | {"controlnet_block_samples": list(residuals)}


def z_one_sample(dtype: torch.dtype) -> dict[str, Any]:
    """No mask: there is nothing to pad to."""
    inputs = z_image_inputs(dtype)
    return inputs | {"x": inputs["x"][:1], "cap_feats": inputs["cap_feats"][:1], "t": inputs["t"][:1]}


def z_alike(dtype: torch.dtype) -> dict[str, Any]:
    """Two samples of one size: a batch without a mask."""
    inputs = z_image_inputs(dtype)
    return inputs | {name: [part.clone().neg_() for part in inputs[name][:1]] * 2 for name in ("x", "cap_feats")}


def z_controlnet(dtype: torch.dtype) -> dict[str, Any]:
    """A residual for the first of the two layers only: 64 tokens of the larger picture and 64 of its caption."""
    residual = torch.randn(2, 96, 64, generator=torch.Generator().manual_seed(9)).to(dtype)
    return z_image_inputs(dtype) | {"controlnet_block_samples": {0: residual}}


def z_calls(calls: int) -> tuple[int, int]:
    """One stream: nothing is served together."""
    return calls, 2 * calls


FORMS: dict[str, Form] = {
    "qwen": qwen_form({}, mask=False),
    "qwen, batch 1": qwen_form({}, batch=1, mask=False),
    "qwen, masked batch": qwen_form({}),
    "qwen, edit": qwen_form({"zero_cond_t": True}, edit=True),
    "qwen, edit, batch 1": qwen_form({"zero_cond_t": True}, edit=True, batch=1, mask=False),
    "qwen, layered": qwen_form({"use_layer3d_rope": True, "use_additional_t_cond": True}, edit=True),
    # The second forward knows better than to reach over the boundary.
    "qwen, controlnet": (qwen, qwen_controlnet, QWEN_SITES, 2 * (QWEN_SITES - QWEN_PAIRS) + 1),
    # Without a picture the SigLIP parts stand idle.
    "z-image, unlike lengths": (z_image, z_image_inputs, *z_calls(Z_IMAGE_CALLS - SIGLIP_SITES)),
    "z-image, one sample": (z_image, z_one_sample, *z_calls(Z_IMAGE_CALLS - SIGLIP_SITES)),
    "z-image, batch of one length": (z_image, z_alike, *z_calls(Z_IMAGE_CALLS - SIGLIP_SITES)),
    "z-image, controlnet": (z_image, z_controlnet, *z_calls(Z_IMAGE_SITES - SIGLIP_SITES)),
    "z-image, omni": (z_image, lambda dtype: z_image_inputs(dtype, omni=True), *z_calls(Z_IMAGE_CALLS)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_picture_is_that_of_diffusers(form: str, dtype: torch.dtype) -> None:
    build, arguments, sites, with_kernels = FORMS[form]
    model, inputs = build(dtype), arguments(dtype)
    expected = run(model, inputs)
    with apply(model, gate=Gate()) as handle:
        check_same_bits(run(model, inputs), expected)
        assert eager_calls(handle) == sites
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(run(model, inputs), expected)
        check_same_bits(run(model, inputs), expected)
        assert fused_calls(handle) > with_kernels / 2
        assert fused_calls(handle) + eager_calls(handle) == with_kernels
        assert not any(line.declined for line in handle.sites)
    check_same_bits(run(model, inputs), expected)


def test_the_forms_are_different_inputs() -> None:
    """The control of the forms: each gives another picture, so none stands for another one by mistake."""
    answers = []
    for build, arguments, *_ in FORMS.values():
        answers.append(run(build(torch.float32), arguments(torch.float32)))
    for number, answer in enumerate(answers):
        assert not any(same_bits(answer, other) for other in answers[:number])


OPS_OF = {
    "qwen": {
        "layer_norm_modulate",
        "gated_residual_norm_modulate",
        "gated_residual",
        "qk_norm_rope",
        "linear_gelu_tanh",
        "gelu_tanh",
        "rms_norm_scale",
        "joint_projection",
    },
    "z-image": {
        "rms_norm_scale",
        "gated_residual_rms_norm",
        "qk_norm_rope",
        "linear_swiglu",
        "swiglu",
        "joint_projection",
        "attention",
    },
}


@pytest.mark.parametrize(("form", "op"), [(form, op) for form, ops in OPS_OF.items() for op in sorted(ops)])
def test_every_op_is_on_the_way_to_the_picture(form: str, op: str) -> None:
    """The negative control: a kernel that turns an ulp wrong after its verdict changes the output."""
    model, inputs = (qwen(), qwen_inputs()) if form == "qwen" else (z_image(), z_image_inputs())
    expected = run(model, inputs)

    def spoil(name: str, outputs: Any) -> None:
        if name == op:
            for output, index in itertools.product(outputs, range(32)):  # one alone may be rounded away again
                one_ulp_up(output, index)  # of the first token: the last may be masked

    # An activation alone is only on the way where the product before it does not take the call.
    gate = KernelGate(lacks=PRODUCTS if op in ("gelu_tanh", "swiglu") else ())
    with apply(model, gate=gate) as handle:
        assert {line.op for line in handle.sites} == OPS_OF[form]
        check_same_bits(run(model, inputs), expected)
        gate.spoil = spoil
        assert not same_bits(run(model, inputs), expected)


@pytest.mark.parametrize("build", [(qwen, qwen_inputs), (z_image, z_image_inputs)], ids=["qwen", "z-image"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_the_reference(build: tuple[Any, Any], dtype: torch.dtype) -> None:
    model, inputs = build[0](), build[1]()
    with torch.autocast("cpu", dtype=dtype):
        expected = run(model, inputs)
    outside = run(model, inputs)
    assert not same_bits(outside, expected)
    with apply(model, gate=KernelGate()) as handle:
        with torch.autocast("cpu", dtype=dtype):
            check_same_bits(run(model, inputs), expected)
            check_same_bits(run(model, inputs), expected)
        assert fused_calls(handle) == 0
        run(model, inputs)
        check_same_bits(run(model, inputs), outside)
        assert fused_calls(handle) > 0


def test_inference_mode_fuses() -> None:
    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle, torch.inference_mode():
        for _ in range(2):
            check_same_bits(tuple(t.clone() for t in flat(model(**inputs))), expected)
        assert fused_calls(handle) >= QWEN_CALLS


def test_models_without_memory_are_answered_by_the_reference() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for device in ("meta", "fake"):
        model, inputs = qwen(), qwen_inputs(mask=False)
        with apply(model, gate=KernelGate()) as handle:
            if device == "meta":
                nn.Module.to(model, "meta")
                (answer,) = run(
                    model, {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
                )
            else:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    (answer,) = run(model, inputs)
            assert tuple(answer.shape) == (2, 16, 16)
            assert fused_calls(handle) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("build", [(qwen, qwen_inputs), (z_image, z_image_inputs)], ids=["qwen", "z-image"])
def test_training_gives_eager_gradients(build: tuple[Any, Any], checkpointing: bool) -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        sum(output.square().sum() for output in flat(model(**inputs))).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model, inputs = build[0]().requires_grad_(True), build[1]()
    if checkpointing:
        model.train()
        model.enable_gradient_checkpointing()
    expected = gradients(model)
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(gradients(model), expected)
        assert fused_calls(handle) == 0
        assert eager_calls(handle) > 0


# What keeps diffusers' own lines, and why.


def reasons(handle: Any, site: str) -> dict[str, int]:
    (row,) = [row for row in handle.report().rows if row.site == site]
    return dict(row.reasons)


def change_img_norm(model: Any) -> None:
    model.transformer_blocks[0].img_norm1 = nn.LayerNorm(64)


def change_img_norm_type(model: Any) -> None:
    class Mine(nn.LayerNorm):
        pass

    model.transformer_blocks[0].img_norm1 = Mine(64, elementwise_affine=False)


def hook_img_norm(model: Any) -> None:
    model.transformer_blocks[0].img_norm1.register_forward_hook(lambda module, args, output: output * 2)


def replace_img_norm_forward(model: Any) -> None:
    model.transformer_blocks[0].img_norm1.forward = lambda x: x * 3


def replace_modulate(model: Any) -> None:
    model.transformer_blocks[0]._modulate = lambda x, mod, index=None: (x, mod[:, None, :64])


def hook_img_norm2(model: Any) -> None:
    model.transformer_blocks[0].img_norm2.register_forward_hook(lambda module, args, output: output * 2)


def change_txt_norm2(model: Any) -> None:
    model.transformer_blocks[0].txt_norm2 = RMSNorm(64, 1e-6)


def replace_gelu(model: Any) -> None:
    model.transformer_blocks[0].img_mlp.net[0].gelu = torch.relu


def another_gelu(model: Any) -> None:
    model.transformer_blocks[0].txt_mlp.net[0].approximate = "none"


def drop_norm_q(model: Any) -> None:
    model.transformer_blocks[0].attn.norm_q = None


def change_eps_of_norm_k(model: Any) -> None:
    model.transformer_blocks[0].attn.norm_k.eps = 1e-3


def change_eps_of_norm_added_q(model: Any) -> None:
    model.transformer_blocks[0].attn.norm_added_q.eps = 1e-3


def layer_norm_on_q(model: Any) -> None:
    model.transformer_blocks[0].attn.norm_q = nn.LayerNorm(32)


def bias_on_norm_q(model: Any) -> None:
    norm = model.transformer_blocks[0].attn.norm_q = RMSNorm(32, 1e-6, bias=True)
    nn.init.normal_(norm.bias)


def no_weight_on_txt_norm(model: Any) -> None:
    model.txt_norm.weight = None


def rms_norm_in_norm_out(model: Any) -> None:
    model.norm_out.norm = RMSNorm(64, 1e-6, elementwise_affine=False)


def subclass_as_weight(model: Any) -> None:
    """What quantisers do: a parameter whose tensor is a subclass."""

    class Wrapped(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # computing with it gives plain tensors

    norm = model.transformer_blocks[0].attn.norm_k
    norm._parameters["weight"] = (norm.weight * 2).as_subclass(Wrapped)


class MyProcessor(transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0):
    """A user's own attention: text and picture swap places."""

    def __call__(self, attn: Any, hidden_states: Any, **kwargs: Any) -> Any:
        """Answer with something that is not diffusers' attention."""
        picture, text = super().__call__(attn, hidden_states, **kwargs)
        return picture * 2, text * 3


def set_processor(model: Any) -> None:
    model.transformer_blocks[0].attn.set_processor(MyProcessor())


CHANGES: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "LayerNorm with weight": (change_img_norm, "transformer_blocks.0.img_norm1", "has a weight or a bias"),
    "LayerNorm subclass": (change_img_norm_type, "transformer_blocks.0.img_norm1", "is a Mine"),
    "hook on a norm": (hook_img_norm, "transformer_blocks.0.img_norm1", "carries a hook"),
    "forward of a norm": (replace_img_norm_forward, "transformer_blocks.0.img_norm1", "a forward of its own"),
    "_modulate": (replace_modulate, "transformer_blocks.0.txt_residual", "_modulate was replaced"),
    "hook on a norm behind a residual": (hook_img_norm2, "transformer_blocks.0.img_norm2", "carries a hook"),
    "RMSNorm behind a residual": (change_txt_norm2, "transformer_blocks.0.txt_norm2", "is a RMSNorm"),
    "gelu": (replace_gelu, "transformer_blocks.0.img_mlp.net.0", "gelu was replaced"),
    "erf form": (another_gelu, "transformer_blocks.0.txt_mlp.net.0", "of the form 'none'"),
    "no query norm": (drop_norm_q, "transformer_blocks.0.attn.qk", "there is no norm_q"),
    "unlike eps": (change_eps_of_norm_k, "transformer_blocks.0.attn.qk", "different eps"),
    "unlike eps of the text": (change_eps_of_norm_added_q, "transformer_blocks.0.attn.qk", "different eps"),
    "LayerNorm on q": (layer_norm_on_q, "transformer_blocks.0.attn.qk", "norm_q is a LayerNorm"),
    "bias on q": (bias_on_norm_q, "transformer_blocks.0.attn.qk", "norm_q has a bias"),
    "tensor subclass": (subclass_as_weight, "transformer_blocks.0.attn.qk", "a tensor subclass"),
    "no weight": (no_weight_on_txt_norm, "txt_norm", "has no weight"),
    "RMSNorm in norm_out": (rms_norm_in_norm_out, "norm_out", "norm is a RMSNorm"),
    "processor": (set_processor, "transformer_blocks.0.attn.qk", "MyProcessor, which wins over ours"),
}


@pytest.mark.parametrize("first", ["change", "apply"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_the_op_expects_stays_eager(name: str, first: str) -> None:
    """Whether the user changed it before or after: the picture is theirs, only that site is eager, and it says why."""
    change, site, sentence = CHANGES[name]
    torch.manual_seed(0)
    model, inputs = qwen(), qwen_inputs()
    untouched = run(model, inputs)
    if first == "change":
        change(model)
        handle = apply(model, gate=KernelGate())
        if "tensor" not in name:  # what an argument is like is known when there is one
            assert any(sentence in reason for reason in reasons(handle, site))
    else:
        handle = apply(model, gate=KernelGate())
        run(model, inputs)
        change(model)
    for _ in range(2):
        answer = run(model, inputs)
    told = [calls for reason, calls in reasons(handle, site).items() if sentence in reason]
    assert told == [2]
    others = [row for row in handle.report().rows if row.site.startswith("transformer_blocks.1")]
    assert all(row.fused or [why for why in row.reasons if why.startswith("its lines run")] for row in others)
    handle.remove()
    expected = run(model, inputs)
    check_same_bits(answer, expected)
    assert not same_bits(untouched, expected)


def test_processor_set_later_wins_and_remove_leaves_it() -> None:
    model, inputs = qwen(), qwen_inputs()
    handle = apply(model, gate=KernelGate())
    mine = MyProcessor()
    model.set_attn_processor(mine)
    theirs = run(model, inputs)
    handle.remove()
    assert model.transformer_blocks[0].attn.processor is mine
    check_same_bits(run(model, inputs), theirs)


def test_arguments_that_the_attention_does_not_take_get_diffusers_answer() -> None:
    model, inputs = qwen(), qwen_inputs()
    inputs["attention_kwargs"] = {"attention_mask": torch.ones(1)}
    with pytest.raises(ValueError, match="does not accept an external attention_mask"):
        run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        with pytest.raises(ValueError, match="does not accept an external attention_mask"):
            run(model, inputs)
        assert any("arguments" in why for why in reasons(handle, "transformer_blocks.0.attn.qk"))
    unknown = {"attention_kwargs": {"something": 1}}
    inputs = qwen_inputs()
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()):
        check_same_bits(run(model, inputs | unknown), expected)


@pytest.mark.parametrize("build", [(qwen, qwen_inputs), (z_image, z_image_inputs)], ids=["qwen", "z-image"])
def test_attention_backend_and_parallel_config_reach_the_attention(
    build: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    module = transformer_qwenimage if build[0] is qwen else transformer_z_image
    dispatch = module.dispatch_attention_fn

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["backend"], kwargs.pop("parallel_config")))
        return dispatch(*args, **kwargs)

    monkeypatch.setattr(module, "dispatch_attention_fn", watch)
    # Choosing a backend also makes it the process's default, and nothing of diffusers undoes that.
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    model, inputs = build[0](), build[1]()
    expected = run(model, inputs)
    without_us = seen.copy()
    assert {backend for backend, _ in seen} == {None}
    with apply(model, gate=KernelGate()):
        model.set_attention_backend("_native_math")
        for attention in (m for m in model.modules() if isinstance(m, Attention)):
            attention.processor._parallel_config = "the configuration"
        seen.clear()
        run(model, inputs)
        assert len(seen) == len(without_us)
        assert {(str(backend.value), config) for backend, config in seen} == {("_native_math", "the configuration")}
        for attention in (m for m in model.modules() if isinstance(m, Attention)):
            attention.processor._parallel_config = None
        answer = run(model, inputs)
    check_same_bits(run(model, inputs), answer)
    monkeypatch.undo()
    model.reset_attention_backend()
    check_same_bits(run(model, inputs), expected)


def test_fused_projections_change_nothing_that_these_processors_read() -> None:
    """diffusers' processors of both families go on reading to_q, to_k and to_v; so do the forwards written anew."""
    for build, arguments in ((qwen, qwen_inputs), (z_image, z_image_inputs)):
        model, inputs = build(), arguments()
        expected = run(model, inputs)
        with apply(model, gate=KernelGate()):
            run(model, inputs)
            for attention in (m for m in model.modules() if isinstance(m, Attention)):
                attention.fuse_projections()
            check_same_bits(run(model, inputs), expected)
        check_same_bits(run(model, inputs), expected)
    model = qwen()
    with apply(model, gate=KernelGate()):
        model.fuse_qkv_projections()
        model.unfuse_qkv_projections()


# Known source only.


def test_sources_of_the_installed_diffusers_are_known() -> None:
    for family in FAMILIES:
        model = {"qwen-image": qwen, "z-image": z_image}[family.name]()
        assert family_of(model) is family
        obstacles = {path: replacement.obstacle(module) for path, module, replacement in family.places(model)}
        assert len(obstacles) > 4
        assert set(obstacles.values()) == {None}


SOURCES = [
    (transformer_qwenimage.QwenImageTransformerBlock, "forward", qwen, 17),
    (transformer_qwenimage.QwenImageTransformerBlock, "_modulate", qwen, 17),
    (transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0, "__call__", qwen, 4),
    (transformer_qwenimage, "apply_rotary_emb_qwen", qwen, 4),
    (AdaLayerNormContinuous, "forward", qwen, 1),
    (nn.LayerNorm, "forward", qwen, 18),
    (RMSNorm, "forward", qwen, 5),
    (Attention, "forward", qwen, 4),
    (GELU, "forward", qwen, 8),
    (GELU, "gelu", qwen, 8),
    (transformer_z_image.ZImageTransformerBlock, "forward", z_image, 15),
    (transformer_z_image.ZSingleStreamAttnProcessor, "__call__", z_image, 15),
    (transformer_z_image.FeedForward, "forward", z_image, 10),
    (transformer_z_image.FeedForward, "_forward_silu_gating", z_image, 10),
    (RMSNorm, "forward", z_image, Z_IMAGE_SITES - 5),
    (Attention, "forward", z_image, 15),
]


@pytest.mark.parametrize(
    ("owner", "name", "build", "sites"), SOURCES, ids=[f"{o.__name__}.{n}-{b.__name__}" for o, n, b, _ in SOURCES]
)
def test_a_function_with_another_source_is_left_alone(
    owner: Any, name: str, build: Any, sites: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that poses as the original through functools.wraps."""
    import functools

    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, changed)
    model = build()
    with apply(model, gate=KernelGate()) as handle:
        left = [line for line in handle.sites if line.site is None]
        assert len(left) == sites
        assert all(f"{owner.__name__.split('.')[-1]}.{name}" in (line.why_eager or "") for line in left)
        inputs = qwen_inputs() if build is qwen else z_image_inputs()
        answer = run(model, inputs)
    check_same_bits(answer, run(model, inputs))


def test_source_that_cannot_be_read_is_unknown() -> None:
    namespace: dict[str, Any] = {}
    exec("class Typed:\n    def forward(self):\n        return 1\n", namespace)
    known = Source(namespace["Typed"], "forward", frozenset({"0" * 64}))
    assert "Typed.forward is not the one" in (known.obstacle() or "")
    assert Source(namespace["Typed"], "nothing", frozenset()).obstacle() is not None


def test_a_subclass_of_a_block_stays_eager() -> None:
    class MyBlock(transformer_qwenimage.QwenImageTransformerBlock):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            text, picture = super().forward(*args, **kwargs)
            return text * 2, picture * 2

    model, inputs = qwen(), qwen_inputs()
    model.transformer_blocks[1].__class__ = MyBlock
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)
        assert "its class is MyBlock" in "".join(reasons(handle, "transformer_blocks.1.img_norm1"))
        (row,) = [row for row in handle.report().rows if row.site == "transformer_blocks.1.attn.qk"]
        assert row.fused  # its attention is still the exact class


def test_torch_npu_has_another_rms_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.models import _family

    monkeypatch.setattr(_family, "is_torch_npu_available", lambda: True)
    with apply(qwen(), gate=KernelGate()) as handle:
        assert all("torch_npu" in (line.why_eager or "") for line in handle.sites)
