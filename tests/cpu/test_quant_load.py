"""Exports that the real ModelOpt wrote: every number arrives, models compute with them, and samebits fuses around."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from click.testing import CliRunner
from denoisers import PRODUCTS, KernelGate, check_same_bits, same_bits
from safetensors.torch import load_file, save_file
from test_quant_fp8 import e4m3
from torch import Tensor, nn

import samebits
from samebits import tiny
from samebits.cli import main
from samebits.errors import CheckpointError, LoraFusingError, ModelError
from samebits.gate import COMPARED
from samebits.quant import Fp8Linear, NvFp4Linear, QuantizedLinear, how_linears_run, load, loader, read_export

BF16 = torch.bfloat16
QWEN, Z_IMAGE = tiny.NAMES
RECIPES = ("FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED")
CASES = [(model, recipe) for model in tiny.NAMES for recipe in RECIPES]
WHOLE = ("FP8", "NVFP4")
E4M3 = torch.tensor([e4m3(byte) for byte in range(256)])
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def transformer_folder(exports: Path, model: str, recipe: str) -> Path:
    folder = exports / model / recipe
    return folder / "transformer" if recipe in WHOLE else folder


def decoded(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The weight that an export stores, element by element from its bytes."""
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if weight.dtype == torch.float8_e4m3fn:
        return E4M3[weight.view(torch.uint8).long()] * scale.reshape(-1, 1)
    rows, half = weight.shape
    numbers = torch.empty(rows, 2 * half)
    numbers[:, 0::2] = E2M1[(weight % 16).long()]
    numbers[:, 1::2] = E2M1[(weight // 16).long()]
    scales = E4M3[scale.view(torch.uint8).long()] * tensors[f"{module}.weight_scale_2"]
    return numbers * scales.repeat_interleave(16, dim=1)


def pipeline_of(exports: Path, model: str, recipe: str) -> Any:
    """The embedded pipeline with the transformer of an export."""
    pipeline = tiny.build(model, BF16)
    pipeline.transformer = load(transformer_folder(exports, model, recipe))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: Any, prompt: str | list[str] = "a fox") -> tuple[Tensor, ...]:
    qwen = type(pipeline) is diffusers.QwenImagePipeline
    guidance = {"true_cfg_scale": 1.0} if qwen else {"guidance_scale": 0.0}
    steps: list[Tensor] = []

    def keep(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
        steps.append(values["latents"].clone())
        return {}

    pipeline(
        prompt if isinstance(prompt, str) else [*prompt],  # Z-Image's pipeline writes into the list
        width=64,
        height=48,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=keep,
        **guidance,
    )
    return tuple(steps)


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_every_number_of_an_export_arrives(exports: Path, model: str, recipe: str) -> None:
    folder = transformer_folder(exports, model, recipe)
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    built = load(folder)
    found = {name: module for name, module in built.named_modules() if isinstance(module, QuantizedLinear)}
    quantised = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    assert found.keys() == quantised
    assert len(found) > 30
    unquantised = tiny.build(model, BF16).transformer
    state = built.state_dict()
    assert state.keys() == stored.keys()
    for name, value in stored.items():
        module, _, leaf = name.rpartition(".")
        if module not in quantised or leaf == "bias":
            assert torch.equal(state[name], value), name
            assert state[name].dtype == BF16
    for name, linear in found.items():
        weight = decoded(stored, name)
        original = unquantised.get_submodule(name).weight.float()
        if isinstance(linear, Fp8Linear):
            scales = linear.weight_scale.reshape(-1, 1)
            assert torch.equal(E4M3[linear.weight.long()] * scales, weight)
            # Half a unit in the last of three bits, or of the smallest number.
            limit = (original.abs() / 16).maximum(scales * 2.0**-10) * 1.01
        else:
            assert isinstance(linear, NvFp4Linear)
            assert torch.equal(linear.dequantized(), weight)
            # Half the gap between 4 and 6, in sixths of the largest of 16; the scale itself is off by a sixteenth.
            largest = original.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True)
            limit = (largest * (1 / 6 + 1 / 16)).expand(-1, -1, 16).flatten(1)
        assert bool(((weight - original).abs() <= limit).all()), name
        assert not linear.training
        assert linear.bias is None or linear.bias.dtype == BF16
    kinds = {type(linear) for linear in found.values()}
    assert kinds == {"NVFP4": {NvFp4Linear}, "MIXED": {Fp8Linear, NvFp4Linear}}.get(recipe, {Fp8Linear})


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_a_linear_computes_with_what_is_stored(exports: Path, model: str, recipe: str) -> None:
    folder = transformer_folder(exports, model, recipe)
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    for name, linear in load(folder).named_modules():
        if isinstance(linear, QuantizedLinear):
            x = torch.randn(2, 3, linear.in_features, dtype=BF16)
            exact = x.double() @ decoded(stored, name).double().T
            if linear.bias is not None:
                exact = exact + linear.bias.double()
            # The input was calibrated on other values; what it is clipped to is a matter of its scale, taken in here.
            if isinstance(linear, Fp8Linear):
                quantised = linear.quantize(x)
                numbers = E4M3[quantised.values.view(torch.uint8).long()] * quantised.scale
                exact = exact + (numbers.double() - x.double()) @ decoded(stored, name).double().T
            assert torch.allclose(linear(x).double(), exact, rtol=2**-7, atol=2**-6 * float(exact.abs().mean())), name


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_the_picture_is_near_the_unquantised_one(exports: Path, model: str, recipe: str) -> None:
    ours, theirs = latents(pipeline_of(exports, model, recipe)), latents(_quiet(tiny.build(model, BF16)))
    off = float((ours[-1].float() - theirs[-1].float()).norm() / theirs[-1].float().norm())
    assert 0.001 < off < 0.25


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def chains(handle: Any) -> list[Any]:
    """The rows of chains that are there with any linears: not the products, nor what quantises for them."""
    others = {"joint_projection", "attention", "quantize_fp8", *PRODUCTS}
    return [row for row in handle.report().rows if row.op not in others]


def calls_of(rows: list[Any]) -> Counter[tuple[str, str]]:
    """How often each chain ran; a site that serves both streams of a block has one of each."""
    calls: Counter[tuple[str, str]] = Counter()
    for row in rows:
        block, _, name = row.site.rpartition(".")
        streams = ("img_", "txt_") if name in ("norm2", "next_norm1") else ("",)
        for stream in streams:
            calls[f"{block}.{stream}{name}", row.op] += row.fused + row.eager
    return calls


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_every_chain_is_fused_around_quantised_linears(exports: Path, model: str, recipe: str) -> None:
    pipeline = pipeline_of(exports, model, recipe)
    # Two prompts of unlike length: batch 2, padding and masks.
    prompts = ["a fox", "a red fox that sleeps in deep snow"]
    wanted = [latents(pipeline), latents(pipeline, prompts)]
    # A signature knows the alignment of its tensors, which differs from run to run on a CPU: some calls are compared.
    with samebits.apply(pipeline, gate=KernelGate(), strict=True) as handle:
        got = [latents(pipeline, prompt) for prompt in ("a fox", prompts, "a fox", prompts)][2:]
    plain = _quiet(tiny.build(model, BF16))
    with samebits.apply(plain, gate=KernelGate(lacks=PRODUCTS)) as unquantised:
        for prompt in ("a fox", prompts, "a fox", prompts):
            latents(plain, prompt)
    ours, theirs = chains(handle), chains(unquantised)
    assert calls_of(ours) == calls_of(theirs)
    assert [(row.site, row.op) for row in ours] == [(row.site, row.op) for row in theirs]
    assert sum(row.fused for row in ours) > sum(row.eager for row in ours) > 0
    assert all(reason == COMPARED for row in ours if row.eager for reason in row.reasons)
    for actual, expected in zip(got, wanted, strict=True):
        check_same_bits(actual, expected)
    notes = " ".join(handle.report().notes)
    assert ("FP8 weights" in notes) == (recipe != "NVFP4")
    assert ("NVFP4 weights" in notes) == (recipe in ("NVFP4", "MIXED"))


def test_a_kernel_that_is_off_changes_the_quantised_picture(exports: Path) -> None:
    pipeline = pipeline_of(exports, QWEN, "FP8")
    wanted = latents(pipeline)
    gate = KernelGate()
    with samebits.apply(pipeline, gate=gate):
        latents(pipeline)
        gate.spoil = lambda name, outputs: outputs[0].mul_(1.5)  # type: ignore[assignment, return-value]
        assert not same_bits(latents(pipeline), wanted)


@pytest.mark.parametrize("model", tiny.NAMES)
def test_what_diffusers_itself_does_with_an_export(exports: Path, model: str) -> None:
    """As docs/quant.md says: it asks for a quant_type that the export does not have, and gives up."""
    cls = type(tiny.build(model, BF16).transformer)
    with pytest.raises(TypeError, match="quant_type"):
        cls.from_pretrained(transformer_folder(exports, model, "FP8"))


# What is asked for


@pytest.mark.parametrize("recipe", WHOLE)
def test_a_pipeline_or_its_transformer_by_class_or_by_name(exports: Path, recipe: str) -> None:
    folder = exports / QWEN / recipe
    for asked in (None, diffusers.QwenImagePipeline, "QwenImagePipeline"):
        pipeline = load(folder, asked)
        assert type(pipeline) is diffusers.QwenImagePipeline
        assert how_linears_run(pipeline.transformer)
        assert pipeline.vae.dtype == pipeline.transformer.dtype == BF16
    for asked in (diffusers.QwenImageTransformer2DModel, "QwenImageTransformer2DModel"):
        assert type(load(str(folder), asked)) is diffusers.QwenImageTransformer2DModel
    half = load(folder / "transformer", dtype=torch.float16)
    assert half.dtype == torch.float16
    assert {module.compute_dtype for module in half.modules() if isinstance(module, QuantizedLinear)} == {torch.float16}


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (diffusers.ZImageTransformer2DModel, "has no ZImageTransformer2DModel"),
        ("NoSuchModel", "is a NoSuchModel, which diffusers"),
        (nn.Linear, "expected a pipeline or a model of diffusers, got Linear"),
    ],
)
def test_another_class_is_refused(exports: Path, asked: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        load(exports / QWEN / "FP8", asked)


def test_a_transformer_of_another_class_is_refused(exports: Path) -> None:
    with pytest.raises(ModelError, match="is a QwenImageTransformer2DModel, not a ZImageTransformer2DModel"):
        load(exports / QWEN / "MIXED", diffusers.ZImageTransformer2DModel)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    pipeline = tiny.build(QWEN, BF16)
    pipeline.save_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "transformer"):
        with pytest.raises(CheckpointError, match="no ModelOpt export; use from_pretrained"):
            load(folder)
    with pytest.raises(ModelError, match="expected a folder that exists, or a hub id"):
        load(tmp_path / "nothing" / "there")


def test_a_hub_id_is_fetched_without_pickles(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(exports / Z_IMAGE / "FP8")

    monkeypatch.setattr(loader, "snapshot_download", fetch)
    assert type(load("someone/some-model")) is diffusers.ZImagePipeline
    ((model, patterns),) = asked
    assert model == "someone/some-model"
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in patterns)

    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("no network\nhere")

    monkeypatch.setattr(loader, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"someone/some-model: could not be fetched \(no network\)"):
        load("someone/some-model")


def test_the_configuration_beside_the_model_is_enough(exports: Path, tmp_path: Path) -> None:
    """Older exports say how they were quantised in ``hf_quant_config.json`` alone."""
    folder = Path(shutil.copytree(exports / QWEN / "FP8/transformer", tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    beside = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": quantization["ignore"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": beside}))
    left, right = load(folder).state_dict(), load(exports / QWEN / "FP8/transformer").state_dict()
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_shards_are_put_together(exports: Path, tmp_path: Path) -> None:
    source = exports / Z_IMAGE / "NVFP4/transformer"
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    names = sorted(tensors)
    places = {}
    for number in range(3):
        part = {name: tensors[name] for name in names[number::3]}
        places |= dict.fromkeys(part, f"part-{number}.safetensors")
        save_file(part, tmp_path / f"part-{number}.safetensors")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    left, right = load(tmp_path).state_dict(), load(source).state_dict()
    assert all(torch.equal(left[name], right[name]) for name in right)
    save_file({"proj.weight": torch.zeros(1), **part}, tmp_path / "part-0.safetensors")
    with pytest.raises(CheckpointError, match="is also in part-0"):
        load(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_that_is_saved_loads_again(exports: Path, tmp_path: Path, recipe: str) -> None:
    first = load(transformer_folder(exports, QWEN, recipe))
    first.save_pretrained(tmp_path)
    second = load(tmp_path)
    assert [*map(type, first.modules())] == [*map(type, second.modules())]
    left, right = first.state_dict(), second.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


# How people run it


def test_generate_takes_the_folder(exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["-p", "a fox", "--size", "64x64", "--steps", "2", "--device", "cpu", "--json"]
    for model in tiny.NAMES:
        for recipe in WHOLE:
            folder = exports / model / recipe
            done = CliRunner().invoke(main, ["generate", str(folder), "--prove", "-o", f"{model}{recipe}.png", *quick])
            assert done.exit_code == 0, done.output
            found = json.loads(done.stdout)
            assert found["proof"]["equal"]
            assert any(f"{recipe} weights" in note for note in found["notes"])
    done = CliRunner().invoke(main, ["generate", str(exports / QWEN / "FP8"), "-o", "x.png", *quick[:-1]])
    assert done.exit_code == 0, done.output
    assert (
        "33 linears: FP8 weights per tensor, inputs static, reference path of the same values: cpu has" in done.stdout
    )


def test_generate_refuses_a_broken_folder_in_one_line(exports: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exports / QWEN / "NVFP4", tmp_path / "copy"))
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    whole = load_file(path)
    for harm, complaint in (
        ({"img_in.weight_scale_2": None}, "img_in.weight_scale_2 is missing"),
        ({"img_in.input_scale": torch.tensor(0.0)}, "tensor img_in.input_scale is 0"),
    ):
        save_file({name: value for name, value in (whole | harm).items() if value is not None}, path)
        done = CliRunner().invoke(main, ["generate", str(folder), "-p", "a fox", "--device", "cpu", "--json"])
        assert done.exit_code == 2, done.output
        assert complaint in json.loads(done.stdout)["error"]
        assert str(path) in json.loads(done.stdout)["error"]


def test_lora_works_beside_quantised_weights_and_is_not_fused_into_them(exports: Path) -> None:
    from peft import LoraConfig

    pipeline = pipeline_of(exports, QWEN, "FP8")
    transformer = pipeline.transformer
    before = {name: value.clone() for name, value in transformer.state_dict().items()}
    wanted = latents(pipeline)
    transformer.add_adapter(LoraConfig(r=4, target_modules=["to_out.0", "net.2"], init_lora_weights="gaussian"))
    check_same_bits(latents(pipeline), wanted)  # its second factor starts at zero
    for name, parameter in transformer.named_parameters():
        if "lora" in name:
            assert parameter.dtype.is_floating_point
            parameter.data.normal_(std=0.1)
    assert not same_bits(latents(pipeline), wanted)
    beside = latents(pipeline)
    for fuse in (transformer.fuse_lora, pipeline.fuse_lora):
        for more in ({}, {"safe_fusing": True}, {"lora_scale": 0.5}, {"adapter_names": ["default"]}):
            with pytest.raises(
                LoraFusingError, match=r"6 quantised linears \(the first is transformer_blocks\.0\.attn\."
            ):
                fuse(**more)
    check_same_bits(latents(pipeline), beside)  # not even its scale moved
    transformer.unload_lora()
    assert all(torch.equal(value, before[name]) for name, value in transformer.state_dict().items())
    check_same_bits(latents(pipeline), wanted)


@pytest.mark.filterwarnings("ignore:Already:UserWarning")  # peft says so of adapters and of what is not fused
def test_lora_on_what_is_not_quantised_is_fused(exports: Path) -> None:
    from peft import LoraConfig

    transformer = pipeline_of(exports, QWEN, "FP8").transformer
    plain = next(name for name, module in transformer.named_modules() if type(module) is nn.Linear)
    transformer.add_adapter(LoraConfig(r=4, target_modules=[plain], init_lora_weights=False))
    weight = transformer.get_submodule(plain).base_layer.weight
    before = weight.clone()
    transformer.fuse_lora()
    assert not torch.equal(weight, before)
    transformer.unfuse_lora()
    # Another adapter, on both kinds: the first can still be chosen, the second cannot.
    config = LoraConfig(r=4, target_modules=[plain, "to_out.0"], init_lora_weights=False)
    transformer.add_adapter(config, adapter_name="both")
    transformer.fuse_lora(adapter_names=["default"])
    transformer.unfuse_lora()
    with pytest.raises(LoraFusingError, match="unload_lora"):
        transformer.fuse_lora(adapter_names=["both"])


def test_a_function_that_is_applied_reaches_quantised_linears(exports: Path) -> None:
    """The control of the refusal: anything but fusing passes, also under the same name."""
    transformer = pipeline_of(exports, QWEN, "FP8").transformer
    seen: list[nn.Module] = []

    def _fuse_lora_apply(module: nn.Module) -> None:
        seen.append(module)

    transformer.apply(_fuse_lora_apply)
    assert sum(isinstance(module, QuantizedLinear) for module in seen) > 8
    transformer.fuse_lora()  # nothing is around any linear


def test_projections_that_diffusers_fuses_are_left_alone(exports: Path) -> None:
    """``fuse_qkv_projections`` makes linears out of the bytes, which the processors of these families never call."""
    pipeline = pipeline_of(exports, QWEN, "FP8")
    wanted = latents(pipeline)
    with torch.no_grad():
        pipeline.transformer.fuse_qkv_projections()
    check_same_bits(latents(pipeline), wanted)


def test_read_export_is_none_for_a_plain_folder(tmp_path: Path) -> None:
    tiny.build(QWEN, BF16).transformer.save_pretrained(tmp_path)
    assert read_export(tmp_path) is None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}})
    )
    assert read_export(tmp_path) is None, "diffusers knows what to do with it"
