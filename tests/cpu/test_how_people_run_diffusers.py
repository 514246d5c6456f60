"""LoRA, offloading, caches, casting, compilation and samplers on the same modules: eager's bits in all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from denoisers import (
    PRODUCTS,
    KernelGate,
    check_same_bits,
    eager_calls,
    fused_calls,
    one_ulp_up,
    qwen,
    qwen_inputs,
    run,
    same_bits,
    z_image,
    z_image_inputs,
)
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    LayerSkipConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import apply_first_block_cache, apply_group_offloading, apply_layer_skip, apply_layerwise_casting
from diffusers.hooks.hooks import CacheContext, HookRegistry, _set_cache_context
from peft import LoraConfig
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from torch import nn

from samebits.apply import COMPILED, apply

BUILDS = [(qwen, qwen_inputs), (z_image, z_image_inputs)]
IDS = ["qwen", "z-image"]


def sample(model: Any, steps: int, seed: int = 0) -> list[torch.Tensor]:
    """The latents after every step of a small flow-matching sampler."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    inputs = qwen_inputs(model.dtype, batch=1, mask=False, seed=seed)
    latents = inputs.pop("hidden_states")
    seen = []
    for time in scheduler.timesteps:
        with torch.no_grad(), model.cache_context("cond"):
            noise = model(hidden_states=latents, **inputs | {"timestep": (time / 1000)[None]})[0]
        latents = scheduler.step(noise / 50, time, latents, return_dict=False)[0]
        seen.append(latents)
    return seen


def test_every_latent_of_a_sampler_is_equal() -> None:
    model = qwen(torch.bfloat16)
    expected = sample(model, 28)
    assert not same_bits(expected[-1:], expected[-2:-1])
    gate = KernelGate()
    with apply(model, gate=gate) as handle:
        check_same_bits(sample(model, 28), expected)
        assert fused_calls(handle) > 27 * 17  # of 27 sites, ten run with others
        assert {row.reasons.get("compared with eager at this call", 0) for row in handle.report().rows} <= {0, 1}
        gate.spoil = lambda name, outputs: one_ulp_up(outputs[0], 0)
        assert not same_bits(sample(model, 28), expected)


# torch.compile and torch.export.


def graphs_of(model: Any, inputs: dict[str, Any]) -> tuple[list[str], tuple[torch.Tensor, ...]]:
    """The text of every graph that a full-graph compilation of the model makes, and its answer."""
    torch._dynamo.reset()
    texts = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        texts.append(graph.print_readable(print_output=False, include_stride=True, include_device=True))
        return graph.forward

    return texts, run(torch.compile(model, backend=backend, fullgraph=True), inputs)


class Holder(nn.Module):
    """Calls the one module it holds."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, **arguments: Any) -> Any:
        """Pass everything on."""
        return self.held(**arguments)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("edit", [False, True])
def test_graph_of_qwen_is_the_same_with_and_without_us(edit: bool) -> None:
    model = qwen(torch.bfloat16, num_layers=1, zero_cond_t=edit)
    inputs = qwen_inputs(torch.bfloat16, edit=edit)
    before, expected = graphs_of(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        during, answer = graphs_of(model, inputs)
        assert eager_calls(handle) + fused_calls(handle) == 0
    after, _ = graphs_of(model, inputs)
    assert len(before) == 1
    assert before == during == after
    check_same_bits(answer, expected)
    model.norm_out.forward = lambda x, emb: x  # the control: another forward is another graph
    assert graphs_of(model, inputs)[0] != before


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("modulation", [True, False])
def test_graph_of_a_z_image_block_is_the_same_with_and_without_us(modulation: bool) -> None:
    model = z_image()
    block = model.layers[0] if modulation else model.context_refiner[0]
    generator = torch.Generator().manual_seed(2)
    table = torch.polar(torch.ones(1, 9, 16), torch.randn(1, 9, 16, generator=generator))
    arguments = {
        "x": torch.randn(1, 9, 64, generator=generator),
        "attn_mask": None,
        "freqs_cis": table,
        "adaln_input": torch.randn(1, 64, generator=generator),
    }
    # Held by a module, as a block is: Dynamo names the inputs of a graph after the outermost forward's parameters.
    holder = Holder(block)
    before, expected = graphs_of(holder, arguments)
    with apply(model, gate=KernelGate()):
        during, answer = graphs_of(holder, arguments)
    assert len(before) == 1
    assert before == during
    check_same_bits(answer, expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("order", ["compile, apply", "apply, compile"])
def test_regional_compilation_compiles_a_repeated_block_once(order: str) -> None:
    """As it does without us: a patched instance must not look new to Dynamo."""
    compiled = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def compile_blocks() -> None:
        model.compile_repeated_blocks(backend=backend, fullgraph=True)

    model, inputs = qwen(num_layers=4), qwen_inputs()
    expected = run(model, inputs)
    if order == "compile, apply":
        compile_blocks()
        handle = apply(model, gate=KernelGate())
    else:
        handle = apply(model, gate=KernelGate())
        compile_blocks()
    for _ in range(2):
        check_same_bits(run(model, inputs), expected)
    assert len(compiled) == 1
    rows = {row.site: row for row in handle.report().rows}
    assert set(rows["transformer_blocks.3.img_norm1"].reasons) == {COMPILED}
    assert rows["norm_out"].fused == 1
    handle.remove()
    check_same_bits(run(model, inputs), expected)
    assert len(compiled) <= 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_pipeline_component_is_found_and_keeps_its_graph() -> None:
    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with apply(compiled, gate=KernelGate()) as handle:
        assert handle.models == (model,)
        check_same_bits(run(compiled, inputs), expected)
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)  # the same modules, called without the compiler
        assert fused_calls(handle) > 0
    check_same_bits(run(compiled, inputs), expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_exported_program_is_the_same_with_and_without_us() -> None:
    model = qwen()
    inputs = qwen_inputs(batch=1, mask=False)

    def exported() -> str:
        return str(torch.export.export(model, (), inputs, strict=False).graph)

    before = exported()
    with apply(model, gate=KernelGate()):
        assert exported() == before
    assert "layer_norm" in before


# LoRA. Scales, fusing, unloading and swapping happen on linears that the written forwards call as modules.

ON_QWEN = ["to_q", "add_v_proj", "to_out.0", "img_mod.1", "txt_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2"]
ON_Z_IMAGE = ["to_k", "to_out.0", "layers.0.adaLN_modulation.0", "feed_forward.w1", "feed_forward.w2"]
LORA = LoraConfig(r=8, lora_alpha=8, target_modules=ON_QWEN, init_lora_weights=False)
LORA_Z = LoraConfig(r=8, lora_alpha=8, target_modules=ON_Z_IMAGE, init_lora_weights=False)


def add_lora(model: Any, name: str = "default", seed: int = 7) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LORA if hasattr(model, "transformer_blocks") else LORA_Z, adapter_name=name)
    model.requires_grad_(False)


def swap_lora(model: Any) -> None:
    state = {name: -3 * value for name, value in model.state_dict().items() if "lora_" in name}
    hotswap_adapter_from_state_dict(model, state, "default", model.peft_config["default"])


LORA_STEPS: list[tuple[str, Callable[[Any], None]]] = [
    ("scale 0.7", lambda model: model.set_adapters(["default"], [0.7])),
    ("scale 0", lambda model: model.set_adapters(["default"], [0.0])),
    ("scale 1.3", lambda model: model.set_adapters(["default"], [1.3])),
    ("hot-swap", swap_lora),
    ("disable", lambda model: model.disable_adapters()),
    ("enable", lambda model: model.enable_adapters()),
    ("fuse", lambda model: model.fuse_lora()),
    ("unfuse", lambda model: model.unfuse_lora()),
    ("unload", lambda model: model.unload_lora()),
]


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_lora_comes_changes_and_goes(build: tuple[Any, Any]) -> None:
    model, plain, inputs = build[0](), build[0](), build[1]()
    untouched = run(plain, inputs)  # for good: fusing and unfusing round the weights
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        for name, step in [("load", add_lora), *LORA_STEPS]:
            step(model)
            step(plain)
            expected = run(plain, inputs)
            check_same_bits(run(model, inputs), expected)
            assert same_bits(expected, untouched) == (name in {"scale 0", "disable"}), name
        before = fused_calls(handle)
        run(model, inputs)
        # The first lines of a block run with the last of the one before, and the text's with the image's.
        assert fused_calls(handle) - before >= 17
    check_same_bits(run(model, inputs), run(plain, inputs))


@pytest.mark.parametrize("order", list(itertools.permutations(["apply", "fuse projections", "lora"])), ids=", ".join)
def test_apply_fused_projections_and_lora_in_every_order(order: tuple[str, ...]) -> None:
    def fuse_projections(model: Any) -> None:
        for block in model.transformer_blocks:
            block.attn.fuse_projections()

    steps: dict[str, Callable[[Any], Any]] = {
        "apply": lambda model: apply(model, gate=KernelGate()),
        "fuse projections": fuse_projections,
        "lora": add_lora,
    }
    model, plain, inputs = qwen(), qwen(), qwen_inputs()
    for step in order:
        steps[step](model)
        if step != "apply":
            steps[step](plain)
        check_same_bits(run(model, inputs), run(plain, inputs))
    check_same_bits(run(model, inputs), run(plain, inputs))


# Offloading and casting: weights come, go and change their address between calls.


def model_offload(model: Any) -> Callable[[], None]:
    _, hook = cpu_offload_with_hook(model, execution_device="cpu")
    return hook.remove


def sequential_offload(model: Any) -> Callable[[], None]:
    cpu_offload(model, execution_device=torch.device("cpu"))
    return lambda: remove_hook_from_module(model, recurse=True)


def group_offload(kind: str) -> Callable[[Any], Callable[[], None]]:
    def put(model: Any) -> Callable[[], None]:
        cpu = torch.device("cpu")
        apply_group_offloading(
            model, onload_device=cpu, offload_device=cpu, offload_type=kind, num_blocks_per_group=1, use_stream=False
        )
        names = {"group_offloading", "lazy_prefetch_group_offloading", "layer_execution_tracker"}

        def take() -> None:
            for name in names:
                HookRegistry.check_if_exists_or_initialize(model).remove_hook(name, recurse=True)

        return take

    return put


OFFLOADS = {
    "model": model_offload,
    "sequential": sequential_offload,
    "group, block": group_offload("block_level"),
    "group, leaf": group_offload("leaf_level"),
}


@pytest.mark.parametrize("order", ["offload, apply", "apply, offload", "apply, offload, remove last"])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloading_in_every_order(offload: str, build: tuple[Any, Any], order: str) -> None:
    model, inputs = build[0](torch.bfloat16), build[1](torch.bfloat16)
    expected = run(model, inputs)
    if order == "offload, apply":
        take = OFFLOADS[offload](model)
        handle = apply(model, gate=KernelGate())
    else:
        handle = apply(model, gate=KernelGate())
        take = OFFLOADS[offload](model)
    for _ in range(3):
        check_same_bits(run(model, inputs), expected)
    assert fused_calls(handle) > 0
    first, second = (take, handle.remove) if order.endswith("last") else (handle.remove, take)
    first()
    check_same_bits(run(model, inputs), expected)
    second()
    fused = fused_calls(handle)
    check_same_bits(run(model, inputs), expected)
    assert fused_calls(handle) == fused
    assert handle.report().notes == ()
    assert not any("_samebits" in module.__dict__ for module in model.modules())
    ours = [m for m in model.modules() if "samebits" in repr(getattr(m.__dict__.get("forward"), "__func__", ""))]
    assert ours == []


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_which_sites_group_offloading_makes_eager_and_that_they_say_why(build: tuple[Any, Any], kind: str) -> None:
    """By leaves, only sites that read the weight of a norm, which is there while the norm itself is called."""
    model, inputs = build[0](torch.bfloat16), build[1](torch.bfloat16)
    expected = run(model, inputs)
    group_offload(kind)(model)
    reading = {"rms_norm_scale", "qk_norm_rope", "gated_residual_rms_norm"} if kind == "leaf_level" else set()
    reading |= {"attention"} if reading else set()  # what follows head norms that are called themselves
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)
        # Nobody calls the siglip part; and where a block does the next one's first lines, theirs have no calls.
        rows = {row.site: row for row in handle.report().rows if row.fused or row.eager}
        uncalled = {row.site: row for row in handle.report().rows if row.site not in rows}
    # No weights are joined under such a hook, and none are read past a hook of their own.
    single = build[0] is qwen and kind == "block_level"
    for row in [rows.pop(name) for name, row in list(rows.items()) if row.op == "joint_projection"]:
        assert (row.fused > 0) == single, row
        assert single or all("carries a hook" in reason for reason in row.reasons), row
    for name, row in uncalled.items():
        (reason,) = row.reasons
        if row.op in PRODUCTS and kind == "leaf_level":
            assert "carries a hook" in reason, row
            continue
        alone = kind == "leaf_level" and reason.startswith("the two streams are served one by one: img_mlp is not")
        assert alone or reason.startswith("its lines run ") or "siglip" in name or name.endswith("next_norm1"), row
    # A site that is one norm alone lies under the hook of that norm.
    eager = {name for name, row in rows.items() if row.op in reading and name not in {"txt_norm", "cap_embedder.0"}}
    assert eager or kind == "block_level"
    for name, row in rows.items():
        told = [reason for reason in row.reasons if "carries a hook" in reason]
        if name in eager:
            assert (row.fused, list(row.reasons)) == (0, told), row
        else:
            assert row.fused > 0, row
            assert not told, row


def test_a_norm_whose_weight_is_away_is_called_itself() -> None:
    """Under sequential offloading a norm's weight exists only inside its own call, so the site must not read it."""
    model, inputs = z_image(), z_image_inputs()
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.layers[0].attention_norm1.weight.is_meta
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)
        rows = {row.site: row for row in handle.report().rows}
        for name in ("attention_norm1", "attention_norm2", "ffn_norm2", "attention.qk"):
            assert rows[f"layers.0.{name}"].fused == 0
            assert any("carries a hook" in reason for reason in rows[f"layers.0.{name}"].reasons)
        assert rows["layers.0.feed_forward"].fused >= 1  # it reads no weight
        assert rows["cap_embedder.0"].fused >= 1  # ours lies under its hook
        remove_hook_from_module(model, recurse=True)


@pytest.mark.parametrize("order", ["cast, apply", "apply, cast"])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_layerwise_casting_adds_no_signatures(build: tuple[Any, Any], order: str) -> None:
    """Storage in fp8, computing in bf16: every weight has a new address at every call."""

    def cast(model: Any) -> None:
        apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=["norm", "embed"])

    model, plain, inputs = build[0](torch.bfloat16), build[0](torch.bfloat16), build[1](torch.bfloat16)
    uncast = run(plain, inputs)
    cast(plain)
    expected = run(plain, inputs)
    assert not same_bits(uncast, expected)
    gate = KernelGate()
    if order == "cast, apply":
        cast(model)
    with apply(model, gate=gate) as handle:
        if order == "apply, cast":
            cast(model)
        counts = []
        for _ in range(6):
            check_same_bits(run(model, inputs), expected)
            counts.append(len(gate.verdicts()))
        assert counts[1:] == counts[:1] * 5
        assert fused_calls(handle) > 5 * 20
    check_same_bits(run(model, inputs), expected)


# Caches and other hooks of diffusers on the same blocks.


@pytest.mark.parametrize("threshold", [1e-6, 10.0])
@pytest.mark.parametrize("order", ["cache, apply", "apply, cache", "apply, cache, remove last"])
def test_first_block_cache(order: str, threshold: float) -> None:
    config = FirstBlockCacheConfig(threshold=threshold)
    model, plain = qwen(num_layers=3), qwen(num_layers=3)
    plain.enable_cache(config)
    expected = sample(plain, 6)
    uncached = sample(qwen(num_layers=3), 6)
    assert same_bits(expected, uncached) == (threshold < 0.1)
    if order == "cache, apply":
        model.enable_cache(config)
        handle = apply(model, gate=KernelGate())
    else:
        handle = apply(model, gate=KernelGate())
        model.enable_cache(config)
    check_same_bits(sample(model, 6), expected)
    assert fused_calls(handle) > 0
    rows = {row.site: row.fused + row.eager for row in handle.report().rows}
    assert rows["transformer_blocks.0.img_norm1"] == 6
    assert (rows["transformer_blocks.2.img_norm1"] < 6) == (threshold > 0.1)
    if order.endswith("last"):
        model.disable_cache()
        check_same_bits(sample(model, 6), uncached)
        handle.remove()
    else:
        handle.remove()
        model._reset_stateful_cache()
        check_same_bits(sample(model, 6), expected)
        model.disable_cache()
    check_same_bits(sample(model, 6), uncached)
    assert not any("_samebits" in module.__dict__ for module in model.modules())


def test_first_block_cache_of_z_image_fails_as_it_does_without_us() -> None:
    """diffusers 0.42 registers the cache on this model and then looks for an argument that its block does not have."""
    plain, applied = z_image(), z_image()
    with apply(applied, gate=KernelGate()):
        for model in (plain, applied):
            apply_first_block_cache(model, FirstBlockCacheConfig(threshold=1e-6))
            _set_cache_context(model, CacheContext("cond"))
            with pytest.raises((ValueError, KeyError), match="hidden_states"):
                run(model, z_image_inputs())


CACHES: dict[str, Callable[[], Any]] = {
    "pyramid attention broadcast": lambda: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        spatial_attention_block_identifiers=("transformer_blocks",),
        current_timestep_callback=lambda: 500,
    ),
    "mag": lambda: MagCacheConfig(
        threshold=0.5, max_skip_steps=2, retention_ratio=0.1, num_inference_steps=6, mag_ratios=[0.99] * 6
    ),
    "taylor seer": lambda: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2),
}


@pytest.mark.parametrize("order", ["cache, apply", "apply, cache"])
@pytest.mark.parametrize("cache", CACHES)
def test_other_caches(cache: str, order: str) -> None:
    plain, model = qwen(num_layers=3), qwen(num_layers=3)
    uncached = sample(plain, 6)
    plain.enable_cache(CACHES[cache]())
    expected = sample(plain, 6)
    assert not same_bits(expected, uncached)
    if order == "cache, apply":
        model.enable_cache(CACHES[cache]())
    with apply(model, gate=KernelGate()) as handle:
        if order == "apply, cache":
            model.enable_cache(CACHES[cache]())
        check_same_bits(sample(model, 6), expected)
        assert fused_calls(handle) > 0
        model.disable_cache()
        check_same_bits(sample(model, 6), uncached)


@pytest.mark.parametrize("order", ["skip, apply", "apply, skip"])
@pytest.mark.parametrize(
    ("build", "blocks", "part"),
    [
        (BUILDS[0], "transformer_blocks", "attention_scores"),  # all of an attention of two streams is not in diffusers
        (BUILDS[0], "transformer_blocks", "ff"),
        (BUILDS[1], "layers", "attention_scores"),
        (BUILDS[1], "layers", "attention"),
    ],
    ids=["qwen scores", "qwen feed-forward", "z-image scores", "z-image attention"],
)
def test_layer_skip(build: tuple[Any, Any], blocks: str, part: str, order: str) -> None:
    """Its hooks look up the processor's class, and for the scores intercept torch functions below the attention."""

    def skip(model: Any) -> None:
        parts = ("attention", "attention_scores", "ff")
        what = {f"skip_{name}": name == part for name in parts}
        apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn=blocks, **what))

    plain, model, inputs = build[0](), build[0](), build[1]()
    unskipped = run(plain, inputs)
    skip(plain)
    expected = run(plain, inputs)
    assert not same_bits(expected, unskipped)
    if order == "skip, apply":
        skip(model)
    handle = apply(model, gate=KernelGate())
    if order == "apply, skip":
        skip(model)
    for _ in range(2):
        check_same_bits(run(model, inputs), expected)
    assert fused_calls(handle) > 0


def test_torch_forward_hooks_on_blocks_and_attention_still_fire() -> None:
    def watch(model: Any) -> list[str]:
        seen: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) or name.endswith(("attn", ".0", ".1", "norm_out", "txt_norm")):
                module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
        return seen

    plain, model, inputs = qwen(), qwen(), qwen_inputs()
    expected_order, order = watch(plain), watch(model)
    expected = run(plain, inputs)
    with apply(model, gate=KernelGate()):
        check_same_bits(run(model, inputs), expected)
        assert order == expected_order
        order.clear()
        check_same_bits(run(model, inputs), expected)
        assert order == expected_order
