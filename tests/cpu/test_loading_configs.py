"""A value of the wrong kind in a folder's configuration: one line that names file and key, before a weight is read."""

from __future__ import annotations

import inspect
import json
import shutil
import typing
from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest
import torch
from click.testing import CliRunner

from samebits import loading, tiny
from samebits.cli import main
from samebits.errors import CheckpointError
from samebits.loading import configs, find, load
from samebits.loading.configs import arguments_of, check_values, kind_of

CPU = torch.device("cpu")
EMPTY = inspect.Parameter.empty


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in tiny.NAMES:
        folders[name] = tmp_path_factory.mktemp("models") / name
        tiny.build(name, torch.bfloat16).save_pretrained(folders[name])
    return folders


@pytest.fixture
def folders(saved: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {name: Path(shutil.copytree(path, tmp_path / name)) for name, path in saved.items()}


def put(path: Path, key: str, value: Any) -> None:
    """Set one value, however deep, of a JSON file."""
    whole = json.loads(path.read_text())
    place = whole
    *along, last = key.split(".")
    for name in along:
        place = place[name]
    place[last] = value
    path.write_text(json.dumps(whole))


QWEN, Z_IMAGE = "tiny-qwen-image", "tiny-z-image"
INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TEXT, DENOISER, VAE = "text_encoder/config.json", "transformer/config.json", "vae/config.json"
TOKENIZER = "tokenizer/tokenizer_config.json"

WRONG: list[tuple[str, str, str, Any, str]] = [
    (QWEN, INDEX, "_class_name", ["QwenImagePipeline"], "'_class_name' must be a text, got [\"QwenImagePipeline\"]"),
    (QWEN, INDEX, "_class_name", None, "'_class_name' must be a text, got null"),
    (QWEN, INDEX, "vae", "AutoencoderKL", "'vae' must be a list of a library and a class, got \"AutoencoderKL\""),
    (Z_IMAGE, INDEX, "transformer", ["diffusers", 5], "'transformer' must be a list of a library and a class"),
    (Z_IMAGE, INDEX, "scheduler", {}, "'scheduler' must be a list of a library and a class, got {}"),
    (QWEN, SCHEDULER, "base_shift", "0.5", "'base_shift' must be a finite number, got \"0.5\""),
    (QWEN, SCHEDULER, "base_shift", None, "'base_shift' must be a finite number, got null"),
    (QWEN, SCHEDULER, "max_image_seq_len", 8192.5, "'max_image_seq_len' must be an integer, got 8192.5"),
    (QWEN, SCHEDULER, "shift_terminal", "late", "'shift_terminal' must be a finite number or null, got \"late\""),
    (Z_IMAGE, SCHEDULER, "shift", float("nan"), "'shift' must be a finite number, got NaN"),
    (Z_IMAGE, SCHEDULER, "use_dynamic_shifting", "no", "'use_dynamic_shifting' must be true or false, got \"no\""),
    (Z_IMAGE, SCHEDULER, "time_shift_type", 3, "'time_shift_type' must be one of 'exponential', 'linear', got 3"),
    (Z_IMAGE, SCHEDULER, "num_train_timesteps", True, "'num_train_timesteps' must be an integer, got true"),
    (QWEN, DENOISER, "num_layers", "2", "'num_layers' must be an integer, got \"2\""),
    (QWEN, DENOISER, "axes_dims_rope", [8, 56], "'axes_dims_rope' must be a list of 3 integers, got [8, 56]"),
    (QWEN, DENOISER, "guidance_embeds", "abc", "'guidance_embeds' must be true or false, got \"abc\""),
    (Z_IMAGE, DENOISER, "norm_eps", "1e-5", "'norm_eps' must be a finite number, got \"1e-5\""),
    (Z_IMAGE, DENOISER, "rope_theta", [256.0], "'rope_theta' must be a finite number, got [256.0]"),
    (Z_IMAGE, DENOISER, "t_scale", "abc", "'t_scale' must be a finite number, got \"abc\""),
    (Z_IMAGE, DENOISER, "axes_lens", 512, "'axes_lens' must be a list of 3 integers, got 512"),
    (Z_IMAGE, DENOISER, "axes_lens", [1024, "512", 512], "'axes_lens' must be a list of 3 integers"),
    (QWEN, VAE, "latents_mean", "abc", "'latents_mean' must be a list of finite numbers, got \"abc\""),
    (QWEN, VAE, "temperal_downsample", 3, "'temperal_downsample' must be a list of true/false values, got 3"),
    (Z_IMAGE, VAE, "scaling_factor", "0.36", "'scaling_factor' must be a finite number, got \"0.36\""),
    (Z_IMAGE, VAE, "shift_factor", None, "'shift_factor' must be a finite number, got null"),
    (Z_IMAGE, VAE, "latents_mean", {}, "'latents_mean' must be a list of finite numbers or null, got {}"),
    (Z_IMAGE, DENOISER, "siglip_feat_dim", "abc", "'siglip_feat_dim' must be an integer or null, got \"abc\""),
    (Z_IMAGE, TEXT, "model_type", [1], "'model_type' must be a text, got [1]"),
    (QWEN, TOKENIZER, "pad_token", None, "'pad_token' is null or missing"),
    (Z_IMAGE, TOKENIZER, "eos_token", {}, "'eos_token' must be a text or null or an object with a 'content', got {}"),
    (Z_IMAGE, VAE, "block_out_channels", "8", "'block_out_channels' must be a list of integers, got \"8\""),
    (QWEN, TEXT, "text_config.hidden_size", "128", "field 'hidden_size'"),
    (QWEN, TEXT, "text_config", "abc", "field 'text_config'"),
    (
        *(QWEN, TEXT, "text_config.rope_parameters.mrope_section", "abc"),
        "'text_config.rope_parameters.mrope_section' must be a list of integers",
    ),
    (Z_IMAGE, TEXT, "num_attention_heads", [4], "field 'num_attention_heads'"),
    (Z_IMAGE, TEXT, "rope_parameters.rope_theta", "1e6", "'rope_parameters.rope_theta' must be a finite number"),
    (QWEN, TOKENIZER, "add_prefix_space", "abc", "'add_prefix_space' must be true or false or null, got \"abc\""),
    (QWEN, TOKENIZER, "model_max_length", "long", "'model_max_length' must be a finite number or null, got \"long\""),
    (Z_IMAGE, TOKENIZER, "extra_special_tokens", 5, "'extra_special_tokens' must be a list of texts or objects"),
]


@pytest.mark.parametrize(("model", "file", "key", "value", "told"), WRONG)
def test_file_and_key_are_named_before_a_weight_is_read(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    file: str,
    key: str,
    value: Any,
    told: str,
) -> None:
    monkeypatch.setattr(loading, "_load_component", lambda *_: pytest.fail("a weight was read"))
    put(folders[model] / file, key, value)
    with pytest.raises(CheckpointError) as caught:
        load(find(str(folders[model])), torch.bfloat16, CPU)
    assert caught.value.path == str(folders[model] / file)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("verb", [["generate", "-o", "x.png"], ["bench", "pipeline"]], ids=["generate", "pipeline"])
@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (INDEX, '{"_class_name": 5}', "model_index.json: '_class_name' must be a text, got 5"),
        (SCHEDULER, "[1, 2]", "scheduler_config.json: holds a JSON list, expected an object"),
        (DENOISER, '{"num_layers": "two"}', "transformer/config.json: 'num_layers' must be an integer, got \"two\""),
    ],
)
def test_every_verb_ends_with_2_and_one_line(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    verb: list[str],
    file: str,
    text: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (folders[QWEN] / file).write_text(text)
    arguments = [*verb, str(folders[QWEN]), "-p", "a fox", "--size", "32" if "bench" in verb else "32x32"]
    done = CliRunner().invoke(main, [*arguments, "--steps", "2", "--device", "cpu"])
    assert done.exit_code == 2, done.output
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert told in done.stderr
    done = CliRunner().invoke(main, [*arguments, "--steps", "2", "--device", "cpu", "--json"])
    assert done.exit_code == 2
    assert told in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("model", tiny.NAMES)
def test_what_is_right_passes(folders: dict[str, Path], model: str) -> None:
    folder = folders[model]
    put(folder / DENOISER, "some_new_key", [{}])
    put(folder / SCHEDULER, "shift", 3)  # an integer is a number
    put(folder / INDEX, "image_encoder", [None, None])  # how diffusers spells an optional part that is not there
    assert load(find(str(folder)), torch.bfloat16, CPU) is not None


REAL: list[tuple[str, dict[str, Any]]] = [
    (
        "QwenImageTransformer2DModel",
        {"axes_dims_rope": [16, 56, 56], "guidance_embeds": False, "pooled_projection_dim": 768, "patch_size": 2},
    ),
    (
        "ZImageTransformer2DModel",
        {"all_f_patch_size": [1], "all_patch_size": [2], "norm_eps": 1e-5, "t_scale": 1000.0, "siglip_feat_dim": None},
    ),
    ("AutoencoderKLQwenImage", {"attn_scales": [], "dim_mult": [1, 2, 4, 4], "dropout": 0.0, "latents_std": [2.8, 1]}),
    (
        "AutoencoderKL",
        {
            "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "latents_mean": None,
            "shift_factor": 0.1159,
            "sample_size": 1024,
            "force_upcast": True,
        },
    ),
    ("FlowMatchEulerDiscreteScheduler", {"shift_terminal": None, "time_shift_type": "exponential", "base_shift": 0.5}),
]


@pytest.mark.parametrize(("name", "values"), REAL)
def test_values_as_real_models_have_them_pass(name: str, values: dict[str, Any]) -> None:
    check_values(Path("x"), values, arguments_of(getattr(diffusers, name)))


@pytest.mark.parametrize(
    ("annotation", "default", "right", "wrong"),
    [
        (int, 1, [0, -3], [True, 1.0, "1", None, [1]]),
        (int, None, [0, None], [True, "1"]),
        (float, 1.0, [1, 0.5], [float("inf"), True, "1", None]),
        (bool, False, [True, 0, 1], [2, "true", None, 0.0]),
        (str, "a", ["", "b"], [1, None, ["a"]]),
        (int | None, 1, [2, None], ["2", 2.0]),
        (list[float], [], [[], [1, 2.5]], [1.0, ["1"], None, {}]),
        (tuple[int], (1,), [[1, 2, 3], []], [[1.5], 1]),
        (tuple[int, int], (1, 2), [[1, 2]], [[1], [1, 2, 3], [1, "2"]]),
        (tuple[float] | None, None, [None, [0.5]], [0.5, ["a"]]),
        (Literal["a", "b"], "a", ["a", "b"], ["c", 1, None]),
        (dict, {}, [{}, {"a": 1}], [[], "a"]),
        (EMPTY, 5, [7], [7.0, "7", True]),
        (EMPTY, 5.0, [7, 7.5], ["7", True]),
        (EMPTY, (2,), [[2], [1, 2]], [2, ["2"]]),
    ],
)
def test_kinds(annotation: Any, default: Any, right: list[Any], wrong: list[Any]) -> None:
    kind = kind_of(annotation, default)
    assert kind is not None
    assert [kind.fits(value) for value in right] == [True] * len(right)
    assert [kind.fits(value) for value in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("annotation", "default"),
    [(EMPTY, None), (EMPTY, ()), (typing.Any, 1), (torch.dtype, None), (int | torch.dtype, 1), (list, [1])],
)
def test_what_says_nothing_is_not_checked(annotation: Any, default: Any) -> None:
    assert kind_of(annotation, default) is None


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_values(Path("f.json"), {"a": "x" * 1000}, {"a": configs.INTEGER})
    assert len(str(caught.value)) < 150
    assert str(caught.value).startswith("f.json: 'a' must be an integer, got \"xxx")
