"""Graphs of the real denoiser classes through ``apply``: samplers, LoRA, hooks, copies, the report."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from denoisers import KernelGate, check_same_bits, flat, qwen, qwen_inputs, run, same_bits, z_image, z_image_inputs
from diffusers import FirstBlockCacheConfig, QwenImageTransformer2DModel
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from graph_fakes import NOT_PERMITTED, Stale, TapeBackend
from peft import LoraConfig
from peft.utils.hotswap import hotswap_adapter_from_state_dict, prepare_model_for_compiled_hotswap

from samebits.apply import Handle, apply
from samebits.errors import AlreadyAppliedError
from samebits.graphs import denoiser
from samebits.graphs.model_state import ModelState
from samebits.graphs.recorder import HostConstants
from samebits.graphs.row import CAPTURED, CHECKED, CLOSED, FIRST


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TapeBackend:
    """What captures in this test."""
    fake = TapeBackend()
    monkeypatch.setattr(denoiser, "CudaBackend", lambda: fake)
    return fake


def applied(model: Any, **options: Any) -> Handle:
    return apply(model, cuda_graphs=True, gate=KernelGate(), **options)


def answer(handle: Handle, model: Any, plain: Any, inputs: dict[str, Any]) -> str:
    """Call both, compare, and return how the call was answered."""
    before = handle.report().graphs[0]
    check_same_bits(run(model, inputs), run(plain, inputs))
    after = handle.report().graphs[0]
    if after.replayed > before.replayed:
        return "replayed"
    (reason,) = [r for r, calls in after.reasons.items() if calls > before.reasons.get(r, 0)]
    return reason


def answers(handle: Handle, model: Any, plain: Any, make: Callable[[int], dict[str, Any]], *seeds: int) -> list[str]:
    return [answer(handle, model, plain, make(seed)) for seed in seeds]


VARIANTS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "qwen": (qwen, lambda seed: qwen_inputs(batch=1, mask=False, seed=seed)),
    "qwen bf16": (lambda: qwen(torch.bfloat16), lambda seed: qwen_inputs(torch.bfloat16, mask=False, seed=seed)),
    "qwen masks": (qwen, lambda seed: qwen_inputs(seed=seed)),
    "qwen edit": (lambda: qwen(zero_cond_t=True), lambda seed: qwen_inputs(edit=True, mask=False, seed=seed)),
    "qwen layered": (lambda: qwen(use_layer3d_rope=True), lambda seed: qwen_inputs(edit=True, mask=False, seed=seed)),
    "z-image": (z_image, lambda seed: z_image_inputs(seed=seed)),
    "z-image bf16": (lambda: z_image(torch.bfloat16), lambda seed: z_image_inputs(torch.bfloat16, seed=seed)),
    "z-image omni": (z_image, lambda seed: z_image_inputs(omni=True, seed=seed)),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_replayed_with_new_inputs(name: str) -> None:
    build, make = VARIANTS[name]
    model, plain = build(), build()
    with applied(model) as handle:
        first, *rest = answers(handle, model, plain, make, *range(6))
        assert first == FIRST
        assert rest[:2] == [CAPTURED, CHECKED]
        assert set(rest[2:]) == {"replayed"}
    check_same_bits(run(model, make(9)), run(plain, make(9)))


@pytest.mark.usefixtures("backend")
def test_numbers_on_the_host_fail_a_capture_that_is_not_given_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the variants that make tensors from lists: masks, edit, omni."""
    monkeypatch.setattr(HostConstants, "played", lambda self: self)
    build, make = VARIANTS["qwen edit"]
    model, plain = build(), build()
    with applied(model) as handle:
        heard = answers(handle, model, plain, make, *range(3))
    assert heard[1].startswith(f"capturing it raised RuntimeError: {NOT_PERMITTED}")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("build", [(qwen, qwen_inputs), (z_image, z_image_inputs)])
def test_output_classes_come_out_as_they_are(build: tuple[Callable[[], Any], Callable[..., Any]]) -> None:
    model, plain = build[0](), build[0]()
    with applied(model) as handle, torch.no_grad():
        for seed in range(5):
            inputs = build[1](seed=seed) | {"return_dict": True}
            ours, theirs = model(**inputs), plain(**inputs)
            assert type(ours) is type(theirs)
            assert list(ours) == ["sample"]
            assert type(ours.sample) is type(theirs.sample)
            check_same_bits(list(ours.sample), list(theirs.sample))
        assert handle.report().graphs[0].replayed == 2


@pytest.mark.usefixtures("backend")
def test_sizes_and_prompts_change_between_and_results_are_kept() -> None:
    model, plain = qwen(), qwen()

    def inputs(tokens: int, words: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "hidden_states": torch.randn(1, 4 * tokens, 16, generator=generator),
            "encoder_hidden_states": torch.randn(1, words, 48, generator=generator),
            "timestep": torch.rand(1, generator=generator),
            "img_shapes": [[(1, 4, tokens)]],
            "return_dict": False,
        }

    with applied(model) as handle:
        kept, expected = [], []
        for seed, (tokens, words) in enumerate(itertools.product((4, 6), (5, 7)), 10):
            for step in range(5):
                call = inputs(tokens, words, 100 * seed + step)
                kept.append(run(model, call))
                expected.append(run(plain, call))
        (row,) = handle.report().graphs
        assert (row.replayed, row.captured, row.graphs) == (8, 4, 4)
    for ours, theirs in zip(kept, expected, strict=True):
        check_same_bits(ours, theirs)


# LoRA.

LORA = LoraConfig(r=8, lora_alpha=8, target_modules=["to_out.0", "img_mlp.net.2"], init_lora_weights=False)


def add_lora(model: Any, name: str = "default", seed: int = 7) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LORA, adapter_name=name)
    model.requires_grad_(False)


LORA_STEPS: list[tuple[str, Callable[[Any], None]]] = [
    ("load", add_lora),
    ("scale 0.7", lambda model: model.set_adapters(["default"], [0.7])),
    ("scale 0", lambda model: model.set_adapters(["default"], [0.0])),
    ("another", lambda model: add_lora(model, "other", 8)),
    ("both", lambda model: model.set_adapters(["default", "other"], [1.0, 0.5])),
    ("one", lambda model: model.set_adapters(["default"], [0.5])),
    ("disable", lambda model: model.disable_adapters()),
    ("enable", lambda model: model.enable_adapters()),
    ("fuse", lambda model: model.fuse_lora()),
    ("unfuse", lambda model: model.unfuse_lora()),
    ("delete", lambda model: model.delete_adapters("other")),
    ("unload", lambda model: model.unload_lora()),
]


def simple(seed: int) -> dict[str, Any]:
    return qwen_inputs(batch=1, mask=False, seed=seed)


@pytest.mark.usefixtures("backend")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_lora_comes_changes_and_goes() -> None:
    model, plain = qwen(), qwen()
    seeds = itertools.count(1)
    with applied(model) as handle:
        assert "replayed" in answers(handle, model, plain, simple, *range(100, 105))
        for name, step in LORA_STEPS:
            step(model)
            step(plain)
            heard = answers(handle, model, plain, simple, *(next(seeds) for _ in range(8)))
            assert heard[0].startswith("the model changed since the last call: "), (name, heard)
            assert heard[-1] == "replayed", (name, heard)


def swap_lora(model: Any, factor: float, alpha: int) -> None:
    """Put other weights with another scale in the place of those of the adapter, as a server does."""
    state = {name: factor * value for name, value in model.state_dict().items() if "lora_" in name}
    config = copy.deepcopy(LORA)
    config.lora_alpha = alpha
    hotswap_adapter_from_state_dict(model, state, "default", config)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("prepared", [False, True], ids=["numbers", "scales are tensors"])
def test_a_lora_that_is_swapped_while_graphs_stand_is_followed(prepared: bool) -> None:
    model, plain = qwen(), qwen()
    for one in (model, plain):
        add_lora(one)
        if prepared:
            prepare_model_for_compiled_hotswap(one, target_rank=8)
    with applied(model) as handle:
        assert answers(handle, model, plain, simple, *range(5))[-1] == "replayed"
        for round_, (factor, alpha) in enumerate([(-3.0, 8), (0.5, 16), (0.5, 4)], start=1):
            before = run(plain, simple(1))
            for one in (model, plain):
                swap_lora(one, factor, alpha)
            assert not same_bits(run(plain, simple(1)), before), "nothing was swapped"
            heard = answers(handle, model, plain, simple, *range(100 * round_, 100 * round_ + 8))
            assert heard[-1] == "replayed", heard


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "build", [(qwen, simple), (z_image, lambda seed: z_image_inputs(seed=seed))], ids=["qwen", "z"]
)
def test_projections_that_are_fused_and_split_again(build: tuple[Callable[[], Any], Callable[..., Any]]) -> None:
    model, plain = build[0](), build[0]()
    with applied(model) as handle:
        assert answers(handle, model, plain, build[1], *range(5))[-1] == "replayed"
        for number, change in enumerate(("fuse_projections", "unfuse_projections"), start=1):
            for one in (model, plain):
                for module in one.modules():
                    if hasattr(module, "to_q") and hasattr(module, change):
                        getattr(module, change)()
            heard = answers(handle, model, plain, build[1], *range(100 * number, 100 * number + 8))
            assert heard[-1] == "replayed", heard


@pytest.mark.usefixtures("backend")
def test_the_scale_of_a_call_is_part_of_its_key() -> None:
    model, plain = qwen(), qwen()
    for one in (model, plain):
        add_lora(one)

    def make(scale: float) -> Callable[[int], dict[str, Any]]:
        return lambda seed: simple(seed) | {"attention_kwargs": {"scale": scale}}

    with applied(model) as handle:
        for scale in (1.0, 0.5, 0.3):
            heard = answers(handle, model, plain, make(scale), *range(8))
            assert heard[0] == FIRST
            assert heard[-1] == "replayed"
        assert answers(handle, model, plain, make(0.5), 9) == ["replayed"]


def test_a_lora_scale_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch, backend: TapeBackend) -> None:
    """The negative control of the two tests above."""
    model, plain = qwen(), qwen()
    for one in (model, plain):
        add_lora(one)
    with applied(model) as handle:
        answers(handle, model, plain, simple, *range(5))
        monkeypatch.setattr(ModelState, "change", lambda self: None)
        for one in (model, plain):
            one.set_adapters(["default"], [0.7])
        before = handle.report().graphs[0].replayed
        assert not same_bits(run(model, simple(6)), run(plain, simple(6)))
        assert handle.report().graphs[0].replayed == before + 1


def test_a_wrong_graph_is_found(backend: TapeBackend) -> None:
    backend.kind = Stale
    model, plain = qwen(), qwen()
    with applied(model) as handle:
        *_, last = answers(handle, model, plain, simple, *range(5))
    assert last.startswith("a replay did not follow a change")


# Hooks.


def group_offload(model: Any) -> None:
    cpu = torch.device("cpu")
    apply_group_offloading(
        model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level", num_blocks_per_group=1
    )


HOOKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cache": (lambda model: model.enable_cache(FirstBlockCacheConfig(threshold=1e-6)), "carries a hook of diffusers"),
    "group offload": (group_offload, "carries a hook of diffusers"),
    "sequential offload": (lambda model: cpu_offload(model, torch.device("cpu")), "carries a hook of accelerate"),
    "layerwise casting": (
        lambda model: apply_layerwise_casting(model, torch.float16, torch.float32, skip_modules_pattern=["norm"]),
        "carries a hook of diffusers",
    ),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("order", ["hook, apply", "apply, hook"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_keep_calls_plain(name: str, order: str) -> None:
    model, plain = qwen(), qwen()
    hook, reason = HOOKS[name]
    hook(plain)
    if order == "hook, apply":
        hook(model)
    with applied(model) as handle:
        if order == "apply, hook":
            plain_before = qwen()
            assert answers(handle, model, plain_before, simple, *range(5))[-1] == "replayed"
            hook(model)
        with model.cache_context("cond"), plain.cache_context("cond"):
            heard = answers(handle, model, plain, simple, *range(10, 16))
        assert "replayed" not in heard
        assert reason in heard[-1]


@pytest.mark.usefixtures("backend")
def test_a_cache_that_comes_and_goes() -> None:
    model, plain = qwen(), qwen()
    with applied(model) as handle, model.cache_context("cond"), plain.cache_context("cond"):
        assert answers(handle, model, plain, simple, *range(5))[-1] == "replayed"
        for one in (model, plain):
            one.enable_cache(FirstBlockCacheConfig(threshold=1e-6))
    with handle, model.cache_context("cond"), plain.cache_context("cond"):
        pass
    assert not handle.applied
    with applied(model) as handle:
        with model.cache_context("cond"), plain.cache_context("cond"):
            assert "replayed" not in answers(handle, model, plain, simple, *range(5))
        for one in (model, plain):
            one.disable_cache()
        assert answers(handle, model, plain, simple, *range(10))[-1] == "replayed"


@pytest.mark.usefixtures("backend")
def test_the_pipelines_cache_context_does_not_keep_calls_plain() -> None:
    model, plain = qwen(), qwen()
    with applied(model) as handle:
        heard = []
        for seed in range(12):
            with model.cache_context("cond" if seed % 2 else "uncond"):
                heard += answers(handle, model, plain, simple, seed)
    assert heard[-6:] == ["replayed"] * 6


@pytest.mark.usefixtures("backend")
def test_another_attention_back_end_on_the_processors() -> None:
    model, plain = qwen(), qwen()
    with applied(model) as handle:
        assert answers(handle, model, plain, simple, *range(5))[-1] == "replayed"
        for one in (model, plain):
            for block in one.transformer_blocks:
                block.attn.processor._attention_backend = "_native_math"
        heard = answers(handle, model, plain, simple, *range(10, 15))
        assert heard[0] == (
            "the model changed since the last call: a hook, a weight or an attribute was added to a submodule"
        )
        assert heard[-1] == "replayed"


# Copies, removal, the report.


def test_copies_hold_no_graphs_and_go_their_own_way(tmp_path: Path, backend: TapeBackend) -> None:
    model, plain = qwen(), qwen()
    with applied(model) as handle:
        assert answers(handle, model, plain, simple, *range(5))[-1] == "replayed"
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model.save_pretrained(tmp_path)
        copies.append(QwenImageTransformer2DModel.from_pretrained(tmp_path).eval())
        # Saving writes to the configuration, which a forward may read.
        assert answers(handle, model, plain, simple, *range(5, 10))[-1] == "replayed"
        row = handle.report().graphs[0]
        for other in copies:
            check_same_bits(run(other, simple(9)), run(plain, simple(9)))
            with torch.no_grad():
                other.proj_out.weight.mul_(2)
            assert not same_bits(run(other, simple(9)), run(plain, simple(9)))
        assert handle.report().graphs[0] == row
        assert answers(handle, model, plain, simple, 10) == ["replayed"]
        assert len(backend.live) == 1


def test_removal_frees_the_graphs_and_leaves_no_trace(backend: TapeBackend) -> None:
    model, plain = qwen(), qwen()
    handle = applied(model)
    assert answers(handle, model, plain, simple, *range(5))[-1] == "replayed"
    handle.remove()
    assert not backend.live
    assert all(pool.closed for pool in backend.pools)
    assert not any({"_samebits", "forward"} & module.__dict__.keys() for module in model.modules())
    check_same_bits(run(model, simple(9)), run(plain, simple(9)))
    (row,) = handle.report().graphs
    assert (row.graphs, row.bytes, row.replayed) == (0, 0, 2)
    assert CLOSED not in row.reasons
    again = applied(model)
    assert answers(again, model, plain, simple, *range(4))[-1] == "replayed"
    again.remove()


@pytest.mark.usefixtures("backend")
def test_a_verdict_that_is_withdrawn_makes_the_graph_go() -> None:
    model, plain = qwen(), qwen()
    gate = KernelGate()
    with apply(model, cuda_graphs=True, gate=gate) as handle:
        assert answers(handle, model, plain, simple, *range(5))[-1] == "replayed"
        withdrawn = gate.withdrawn
        due = gate.recheck()
        assert due > 0
        assert gate.withdrawn == withdrawn + due
        heard = answers(handle, model, plain, simple, *range(5, 10))
        assert heard[0].endswith("a verdict on one of its ops was withdrawn")
        assert heard[-1] == "replayed"
        gate.disable("stopped for a test")
        assert answers(handle, model, plain, simple, 11) == ["stopped for a test"]
        gate.enable()
        assert answers(handle, model, plain, simple, 12) == ["replayed"]


@pytest.mark.usefixtures("backend")
def test_the_report_tells_of_graphs() -> None:
    model, plain = qwen(), qwen()
    with applied(model) as handle:
        answers(handle, model, plain, simple, *range(5))
        report = handle.report()
    assert "cuda graph of QwenImageTransformer2DModel: replayed 2, plain 3; 1 graph in" in str(report)
    assert f"  {FIRST}: 1" in str(report)
    (row,) = json.loads(json.dumps([row.to_json() for row in report.graphs]))
    assert row["reasons"] == {FIRST: 1, CAPTURED: 1, CHECKED: 1}
    with apply(plain, gate=KernelGate()) as without:
        run(plain, simple(0))
        assert without.report().graphs == ()
        assert "cuda graph" not in str(without.report())


def test_options_are_checked(backend: TapeBackend) -> None:
    model = qwen()
    for options in ({"max_graphs": 0}, {"max_graph_bytes": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            apply(model, cuda_graphs=True, **options)
    handle = applied(model, max_graphs=3)
    assert apply(model, cuda_graphs=True, max_graphs=3, gate=handle.gate) is handle
    with pytest.raises(AlreadyAppliedError, match="cuda_graphs=True, contract=exact, max_graphs=3"):
        applied(model, max_graphs=4)
    with pytest.raises(AlreadyAppliedError):
        apply(model)
    handle.remove()


def test_a_forward_that_somebody_put_on_the_denoiser_wins(backend: TapeBackend) -> None:
    model, plain = qwen(), qwen()
    model.forward = lambda **inputs: type(model).forward(model, **inputs)
    with applied(model) as handle:
        check_same_bits(run(model, simple(0)), run(plain, simple(0)))
        report = handle.report()
    assert report.graphs == ()
    assert any("no CUDA graphs for QwenImageTransformer2DModel: its forward was replaced" in n for n in report.notes)


def test_without_a_gpu_calls_are_plain_and_say_so() -> None:
    model, plain = z_image(), z_image()
    with applied(model) as handle:
        for seed in range(3):
            check_same_bits(run(model, z_image_inputs(seed=seed)), run(plain, z_image_inputs(seed=seed)))
        (row,) = handle.report().graphs
    assert row.plain == 3
    assert row.reasons == {"argument t is a tensor on cpu, not on cuda": 3}


def test_compiled_blocks_are_not_captured(backend: TapeBackend) -> None:
    model, plain = qwen(), qwen()
    for block in model.transformer_blocks:
        block.compile(backend="eager", disable=True)
    with applied(model) as handle:
        heard = answers(handle, model, plain, simple, *range(4))
    assert heard[1:] == ["torch.compile runs transformer_blocks.0"] * 3
    assert backend.attempts == 0


def test_flat_takes_every_result() -> None:
    assert len(flat(([torch.zeros(1), torch.zeros(1)],))) == 2
