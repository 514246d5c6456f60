"""From a name to a pipeline: what is found, what is refused, and that no weight is ever made up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file

from samebits import loading, tiny
from samebits.errors import CheckpointError, DeviceError, ModelError, SizeError
from samebits.loading import find, hub, load
from samebits.loading.device import find_device

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in tiny.NAMES:
        folders[name] = tmp_path_factory.mktemp("models") / name
        tiny.build(name, torch.bfloat16).save_pretrained(folders[name])
    return folders


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved["tiny-z-image"], tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_folder_loads_to_the_bits_that_were_saved(saved: dict[str, Path], name: str) -> None:
    source = find(str(saved[name]))
    embedded = find(name)
    assert (source.pipeline, source.multiple, source.fewest_steps) == (
        embedded.pipeline,
        embedded.multiple,
        embedded.fewest_steps,
    )
    ours, built = load(source, torch.bfloat16, CPU), tiny.build(name, torch.bfloat16)
    assert type(ours) is type(built)
    for part in ("transformer", "text_encoder", "vae"):
        left, right = getattr(ours, part).state_dict(), getattr(built, part).state_dict()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert ours.tokenizer("a fox").input_ids == built.tokenizer("a fox").input_ids
    left, right = (
        {key: value for key, value in pipe.scheduler.config.items() if not key.startswith("_")}
        for pipe in (ours, built)
    )
    assert left == right


@pytest.mark.parametrize(
    ("part", "file", "key"),
    [
        ("transformer", "diffusion_pytorch_model.safetensors", "layers.0.attention.to_q.weight"),
        ("vae", "diffusion_pytorch_model.safetensors", "decoder.conv_in.bias"),
        ("text_encoder", "model.safetensors", "layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_missing_weight_is_refused_not_made_up(folder: Path, part: str, file: str, key: str) -> None:
    tensors = load_file(folder / part / file)
    found = [name for name in tensors if name.endswith(key)]
    del tensors[found[0]]
    save_file(tensors, folder / part / file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"the weights hold no .*{key}.*random numbers") as caught:
        load(find(str(folder)), torch.bfloat16, CPU)
    assert caught.value.path.endswith(part)


def test_a_weight_of_another_shape_is_refused(folder: Path) -> None:
    edit(folder / "transformer/config.json", cap_feat_dim=64)
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        load(find(str(folder)), torch.bfloat16, CPU)
    assert "\n" not in str(caught.value)


def test_a_folder_that_breaks_after_it_was_found_is_one_line(folder: Path) -> None:
    source = find(str(folder))
    (folder / "vae/config.json").write_text('{"block_out_channels": "many"}')
    with pytest.raises(CheckpointError) as caught:
        load(source, torch.bfloat16, CPU)
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() is torch.float32, "a failed load changed what torch.zeros() means"


@pytest.mark.parametrize(
    ("file", "changes", "error", "complaint"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, ModelError, "is a FluxPipeline; samebits paints with"),
        ("model_index.json", {"vae": None}, CheckpointError, "names no vae"),
        ("vae/config.json", {"block_out_channels": 3}, CheckpointError, "must be a list of integers"),
        ("transformer/config.json", {"axes_lens": ["a", "b", "c"]}, CheckpointError, "must be a list of 3 integers"),
    ],
)
def test_a_pipeline_that_is_not_ours_is_refused(
    folder: Path, file: str, changes: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    edit(folder / file, **changes)
    with pytest.raises(error, match=complaint):
        find(str(folder))


@pytest.mark.parametrize("template", [None, "", "{% for", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"])
def test_a_chat_template_that_cannot_be_used_is_found_before_a_weight_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    path = folder / "tokenizer/chat_template.jinja"
    path.unlink() if template is None else path.write_text(template)
    monkeypatch.setattr(loading, "_load_component", lambda *_: pytest.fail("a weight was read"))
    if template == "":  # An empty one can be used, and the pipeline does.
        with pytest.raises(pytest.fail.Exception, match="a weight was read"):
            load(find(str(folder)), torch.bfloat16, CPU)
        return
    with pytest.raises(CheckpointError, match="tokenizer: cannot be loaded") as caught:
        load(find(str(folder)), torch.bfloat16, CPU)
    assert "\n" not in str(caught.value)


def test_foreign_code_is_refused(folder: Path) -> None:
    edit(folder / "model_index.json", transformer=["my_code", "MyTransformer"])
    with pytest.raises(ModelError, match=r"my_code\.MyTransformer"):
        load(find(str(folder)), torch.bfloat16, CPU)
    edit(folder / "model_index.json", transformer=["diffusers", "NoSuchModel"])
    with pytest.raises(ModelError, match="diffusers has no NoSuchModel"):
        load(find(str(folder)), torch.bfloat16, CPU)


@pytest.mark.parametrize("name", ["nope", "/no/such/folder", "./nope", "a/b/c", "../x"])
def test_a_name_that_is_nothing_is_refused_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "reach", lambda model: pytest.fail("the hub was asked"))
    with pytest.raises(ModelError, match="no such model"):
        find(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        find(str(tmp_path / "x"))


def test_sizes_follow_the_vae(saved: dict[str, Path], folder: Path) -> None:
    source = find(str(saved["tiny-qwen-image"]))
    for width, height in ((16, 16), (1024, 768), (source.largest, 16)):
        source.check_size(width, height)
    with pytest.raises(SizeError, match=r"multiples of 16.* nearest is 96x64 or 112x64") as caught:
        source.check_size(100, 64)
    assert (caught.value.width, caught.value.height) == (100, 64)
    with pytest.raises(SizeError, match="nearest is 64x16"):
        source.check_size(64, 0)
    shallow = find(str(folder))
    assert (shallow.multiple, shallow.largest) == (16, 8192)
    edit(folder / "vae/config.json", block_out_channels=[8, 8])
    edit(folder / "transformer/config.json", axes_lens=[1024, 64, 32])
    shallow = find(str(folder))
    assert (shallow.multiple, shallow.largest) == (4, 128)
    with pytest.raises(SizeError, match="nearest is 128x64"):
        shallow.check_size(132, 64)


def test_a_stretched_schedule_needs_two_steps(saved: dict[str, Path]) -> None:
    source = find(str(saved["tiny-qwen-image"]))
    source.check_steps(2)
    with pytest.raises(ModelError, match="at least 2 steps, not 1"):
        source.check_steps(1)
    find(str(saved["tiny-z-image"])).check_steps(1)


def test_guidance_is_what_the_pipeline_calls_it() -> None:
    qwen, z_image = find("tiny-qwen-image"), find("tiny-z-image")
    assert qwen.guidance(None, None) == {"true_cfg_scale": 1.0, "negative_prompt": None}
    assert qwen.guidance(None, "blur") == {"true_cfg_scale": 4.0, "negative_prompt": "blur"}
    assert qwen.guidance(3.0, None) == {"true_cfg_scale": 3.0, "negative_prompt": " "}
    assert qwen.guidance(3.0, "") == {"true_cfg_scale": 3.0, "negative_prompt": ""}
    assert z_image.guidance(None, None) == {"guidance_scale": 5.0, "negative_prompt": None}
    assert z_image.guidance(0.0, None) == {"guidance_scale": 0.0, "negative_prompt": None}
    assert z_image.guidance(2.0, "blur") == {"guidance_scale": 2.0, "negative_prompt": "blur"}
    for source, off in ((qwen, 1.0), (z_image, 0.0)):
        with pytest.raises(ModelError, match="no effect"):
            source.guidance(off, "blur")


def test_a_turbo_wants_few_steps_and_no_guidance(folder: Path) -> None:
    turbo = folder.rename(folder.parent / "My-Z-Image-Turbo")
    source = find(str(turbo))
    assert source.steps == 9
    assert source.guidance(None, None)["guidance_scale"] == 0.0
    assert source.guidance(None, "blur")["guidance_scale"] == 5.0
    assert find(str(turbo.rename(folder))).steps == 50
    assert find("tiny-z-image").steps == 4


def test_offload_is_refused_on_the_cpu_and_asked_of_diffusers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    source = find("tiny-qwen-image")
    for kind in ("model", "group"):
        with pytest.raises(DeviceError, match="offload"):
            load(source, torch.bfloat16, CPU, kind)
    with pytest.raises(ValueError, match="none, model, group"):
        load(source, torch.bfloat16, CPU, "disk")
    asked: list[Any] = []
    pipeline = diffusers.QwenImagePipeline
    monkeypatch.setattr(pipeline, "enable_model_cpu_offload", lambda self, **kw: asked.append(("model", kw)))
    monkeypatch.setattr(pipeline, "enable_group_offload", lambda self, **kw: asked.append(("group", kw)))
    gpu = torch.device("cuda", 1)
    load(source, torch.bfloat16, gpu, "model")
    load(source, torch.bfloat16, gpu, "group")
    assert asked[0] == ("model", {"device": gpu})
    assert asked[1][0] == "group"
    assert asked[1][1]["onload_device"] == gpu


def test_devices_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(None) == find_device("cpu") == CPU
    for name in ("tpu", "cuda:", "cuda:x", "mps", "", "cpu:0"):
        with pytest.raises(DeviceError, match="expected cpu, cuda or cuda:N"):
            find_device(name)
    with pytest.raises(DeviceError, match="no CUDA here"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device(None) == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="index below 2"):
        find_device("cuda:2")


# The hub. Nothing here leaves the machine: its client is replaced by one that answers what a test wants.


class Hub:
    """A hub that answers ``model_info`` with ``answer`` and holds the files of ``folder``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Exception | None, folder: Path | None) -> None:
        self.asked: list[tuple[str, bool]] = []

        def model_info(_: Any, model: str, timeout: float) -> SimpleNamespace:
            assert timeout <= 10.0
            if answer is not None:
                raise answer
            return SimpleNamespace(id=model)

        def fetch(model: str, name: str, local_files_only: bool) -> str:
            self.asked.append((name, local_files_only))
            if folder is None:
                raise LocalEntryNotFoundError("not in the cache")
            if not (folder / name).exists():
                raise EntryNotFoundError(name)
            return str(folder / name)

        def download(model: str, use_safetensors: bool, local_files_only: bool) -> str:
            assert use_safetensors
            if folder is None:
                raise LocalEntryNotFoundError("not in the cache")
            return str(folder)

        monkeypatch.setattr(hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(hub, "hf_hub_download", fetch)
        monkeypatch.setattr(diffusers.DiffusionPipeline, "download", download)


def refusal(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    # The client's HTTP library has changed its name once; what an error needs of an answer has not.
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None, url="https://huggingface.co/a/b")
    return kind(f"{status} Client Error", response=response)


def test_a_hub_model_is_described_by_small_files_and_then_loaded(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Path]
) -> None:
    fake = Hub(monkeypatch, None, saved["tiny-z-image"])
    source = find("someone/some-model")
    assert (source.hub, source.online, source.pipeline) == (True, True, "ZImagePipeline")
    assert all(name.endswith(".json") for name, _ in fake.asked)
    assert not any(local for _, local in fake.asked)
    assert type(load(source, torch.bfloat16, CPU)) is diffusers.ZImagePipeline


def test_without_network_what_was_fetched_before_is_used(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Path]
) -> None:
    fake = Hub(monkeypatch, OSError("Name or service not known"), saved["tiny-qwen-image"])
    source = find("someone/some-model")
    assert source.online is False
    assert all(local for _, local in fake.asked)
    assert type(load(source, torch.bfloat16, CPU)) is diffusers.QwenImagePipeline


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (OSError("Name or service not known"), "the hub cannot be reached, and it was not fetched before"),
        (refusal(RepositoryNotFoundError, 401), "neither a folder here nor a model on the hub"),
        (refusal(GatedRepoError, 403), "asks for consent first"),
        (refusal(HfHubHTTPError, 403), "the hub refuses: 403"),
        (refusal(HfHubHTTPError, 503), "cannot be reached"),
        (refusal(HfHubHTTPError, 429), "cannot be reached"),
    ],
)
def test_each_no_of_the_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch, answer: Exception, complaint: str) -> None:
    Hub(monkeypatch, answer, None)
    with pytest.raises(ModelError, match=complaint) as caught:
        find("someone/some-model")
    assert "\n" not in str(caught.value)


def test_a_hub_model_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Hub(monkeypatch, None, tmp_path)
    with pytest.raises(ModelError, match="not a diffusers pipeline"):
        find("someone/a-language-model")


def test_a_malformed_hub_id_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="well-formed hub id"):
        find("someone/-bad-")


def test_finding_an_embedded_model_needs_no_torch() -> None:
    script = "import sys; from samebits.loading import find; find('tiny-z-image'); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
    assert loading.OFFLOADS == ("none", "model", "group")
