"""A whole picture and the share of its parts: what is timed, what is compared, what is shown when pixels differ."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import denoisers as small
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from torch import nn

from samebits import tiny
from samebits.apply import apply
from samebits.bench import pictures, real
from samebits.bench.pictures import WARM, Painted, Timed
from samebits.cli import main


class Part(nn.Module):
    """A part of a pipeline that takes its time on a clock of the test."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, *_: Any) -> int:
        self.clock[0] += self.seconds
        return 1

    def decode(self, latents: Any) -> int:
        return self.forward() + latents


class Pipeline:
    """Encodes for 1 s, denoises twice for 2 s, decodes for 3 s, and takes 0.5 s for the rest."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.text_encoder, self.transformer, self.vae = (Part(clock, seconds) for seconds in (1.0, 2.0, 3.0))
        self.latents: list[Any] = []

    def __call__(self, generator: torch.Generator, **arguments: Any) -> Any:
        self.clock[0] += 0.5
        self.text_encoder()
        for _ in range(2):
            self.transformer()
        self.latents.append(self.vae.decode(41))
        return SimpleNamespace(
            images=[Image.new("RGB", (4, 2), (1, 2, int(torch.randint(99, (1,), generator=generator))))]
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pictures.time, "perf_counter", lambda: now[0])
    return now


def test_every_part_has_its_time_and_the_pipeline_is_left_as_it_was(clock: list[float]) -> None:
    pipeline = Pipeline(clock)
    waited: list[int] = []
    painted = pictures.paint(pipeline, {}, 7, lambda: waited.append(1))
    assert painted.seconds == 8.5
    assert painted.parts == {"text encoder": 1.0, "denoiser": 4.0, "VAE": 3.0, "rest": 0.5}
    assert painted.steps_ms == [2000.0, 2000.0]
    assert painted.pixels.shape == (2, 4, 3)
    assert pipeline.latents == [42]
    assert len(waited) == 2 * 4 + 2
    assert "decode" not in pipeline.vae.__dict__
    for part in (pipeline.text_encoder, pipeline.transformer):
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


def test_a_decode_of_the_user_s_own_is_timed_and_put_back(clock: list[float]) -> None:
    pipeline = Pipeline(clock)

    def own(latents: Any) -> int:
        clock[0] += 10.0
        return 7

    pipeline.vae.decode = own
    assert pictures.paint(pipeline, {}, 7, lambda: None).parts["VAE"] == 10.0
    assert pipeline.vae.decode is own


def test_a_pipeline_that_fails_is_left_as_it_was(clock: list[float]) -> None:
    pipeline = Pipeline(clock)
    pipeline.vae.decode = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        pictures.paint(pipeline, {}, 7, lambda: None)
    assert not pipeline.transformer._forward_hooks


def run_of(seconds: float, pixel: int = 0) -> Painted:
    parts = {"text encoder": 1.0, "denoiser": seconds - 2.0, "VAE": 0.5, "rest": 0.5}
    return Painted(seconds, parts, [100.0, 120.0, 110.0], torch.full((1, 1, 3), pixel, dtype=torch.uint8))


def timed(first: float = 12.0, second: float = 6.0, **changes: Any) -> Timed:
    runs = dict(zip(pictures.RUNS, (run_of(11.0), run_of(10.0), run_of(first), run_of(second)), strict=True))
    return Timed(runs, **{"bits_equal": True, "fused": 30, "eager": 2, **changes})


def test_the_table_tells_shares_and_what_the_first_picture_cost() -> None:
    told = pictures.pictures_table(timed(), timed(first=19.25), WARM)
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert "samebits 6.000 1.000 s 17% 4.000 s 67% 0.500 s 8% 0.500 s 8% 3 110.0" in lines
    assert "Every picture has eager's pixels; 30 calls fused, 2 eager." in lines
    assert "samebits / eager: 0.600 of the time for a whole picture." in lines
    assert "First picture after apply, warm kernel cache: +2.00 s against eager's picture, within 3 s." in lines
    assert "First picture after apply, cold kernel cache: +9.25 s against eager's picture, within 10 s." in lines
    late = pictures.pictures_table(timed(first=13.5), timed(first=20.5), WARM)
    assert "warm kernel cache: +3.50 s against eager's picture, NOT within 3 s." in late
    assert "cold kernel cache: +10.50 s against eager's picture, NOT within 10 s." in late
    assert "kernel cache as it was: +2.00 s" in pictures.pictures_table(timed())
    assert "2 eager; 7 calls of the denoiser replayed." in pictures.pictures_table(timed(replayed=7))


def test_a_picture_of_one_colour_says_little() -> None:
    assert "of one colour" in pictures.pictures_table(timed(one_colour=True))
    assert "of one colour" not in pictures.pictures_table(timed())


SMALL_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_PARTS: dict[str, dict[str, Any]] = {
    "z-image": {
        "text": SMALL_TEXT | {"num_key_value_heads": 1, "head_dim": 16},
        "transformer": {
            "dim": 96,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 3,
            "n_kv_heads": 3,
            "cap_feat_dim": 32,
            "axes_dims": [8, 12, 12],
            "axes_lens": [1024, 512, 512],
        },
        "vae": {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 4},
    },
    "qwen-image": {
        "text": SMALL_TEXT
        | {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        "transformer": {
            "num_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
        "vae": {"base_dim": 8, "num_res_blocks": 1},
    },
}


@pytest.mark.parametrize("name", real.NAMES)
def test_pipelines_with_random_weights_paint(name: str) -> None:
    """The builders that a GPU runs at real size, with every part made small."""
    made = real.build(name, torch.device("cpu"), torch.bfloat16, **SMALL_PARTS[name])
    made.set_progress_bar_config(disable=True)
    guidance = {"z-image": {"guidance_scale": 0.0}, "qwen-image": {"true_cfg_scale": 1.0}}[name]
    painted = pictures.paint(
        made, {"prompt": "x", "width": 32, "height": 32, "num_inference_steps": 2, **guidance}, 0, lambda: None
    )
    assert painted.pixels.shape == (32, 32, 3)
    assert len(painted.pixels.unique()) > 1
    assert len(painted.steps_ms) == 2
    assert min(painted.parts[part] for part in pictures.PARTS[:3]) > 0
    for part in (made.text_encoder, made.transformer, made.vae):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.bfloat16}
        assert not part.training


def test_an_unknown_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="qwen-image"):
        real.build("flux", torch.device("cpu"))


def test_no_time_of_ours_where_pixels_differ() -> None:
    wrong = timed(bits_equal=False)
    told = pictures.pictures_table(wrong)
    assert "DIFFERENT" in told
    assert not any(line.startswith("samebits") for line in told.splitlines())
    assert [run["run"] for run in wrong.to_json()["runs"]] == list(pictures.RUNS[:2])
    assert "Void" in pictures.pictures_table(timed(bits_equal=False, void=True))
    for cold in (timed(bits_equal=False), timed(bits_equal=False, void=True)):
        told = pictures.pictures_table(timed(), cold, WARM)
        assert "First picture" not in told
        assert "DIFFERENT" in told or "Void" in told
    assert pictures.first_picture_json(wrong, WARM)["s_more_than_eager"] is None
    assert "no time" in pictures.first_picture(wrong, WARM)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny.build("tiny-z-image", torch.bfloat16)
    made.set_progress_bar_config(disable=True)
    return made


ARGUMENTS = {"prompt": "x", "width": 32, "height": 32, "num_inference_steps": 1, "guidance_scale": 0.0}


def test_four_pictures_of_a_real_pipeline(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "apply", partial(apply, gate=small.KernelGate()))
    told: list[str] = []
    found = pictures.measure(pipeline, ARGUMENTS, say=told.append)
    assert told == list(found.runs) == list(pictures.RUNS)
    assert found.bits_equal
    assert not found.one_colour
    assert found.fused > 0
    assert found.replayed == 0
    assert found.more_s == found.runs["samebits, first"].seconds - found.runs["eager"].seconds
    for run in found.runs.values():
        assert sum(run.parts.values()) == pytest.approx(run.seconds)
        assert min(run.parts[part] for part in pictures.PARTS[:3]) > 0
        assert len(run.steps_ms) == 1
    assert not any("forward" in part.__dict__ for part in pipeline.transformer.modules())


def test_a_picture_with_other_pixels_is_noticed(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = small.KernelGate()
    gate.spoil = lambda name, outputs: outputs[-1].mul_(-3.0)
    monkeypatch.setattr(pictures, "apply", partial(apply, gate=gate))
    found = pictures.measure(pipeline, ARGUMENTS)
    assert not found.bits_equal
    assert not found.void
    assert found.more_s is None


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "pipeline", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "no such model"),
        (("--size", "40"), "multiples of"),
        (("--steps", "1"), "at least 2 steps"),
        (("--steps", "0"), "--steps"),
        (("--device", "tpu"), "tpu"),
        (("z-image", "--device", "cpu"), "needs a GPU"),
        (("--json", "--fast"), "--fast"),
        (("--device", "cpu", "--out", "there"), "--out, --add and --cold"),
        (("--device", "cpu", "--add"), "--out, --add and --cold"),
        (("--device", "cpu", "--cold"), "--out, --add and --cold"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_on_a_cpu_it_says_that_the_figures_mean_nothing() -> None:
    shown = invoke("--device", "cpu", "--size", "32", "--steps", "2")
    assert shown.exit_code == 0, shown.output
    assert "the figures mean nothing" in shown.stdout
    assert "text encoder" in shown.stdout
    document = json.loads(invoke("--device", "cpu", "--size", "32", "--steps", "2", "--json").stdout)
    assert document["meaningful"] is False
    (first,) = document["first_picture"]
    assert (first["cache"], first["s_most"]) == ("kernel cache as it was", 10.0)
    assert first["within"] == (first["s_more_than_eager"] <= 10.0)
    assert [run["run"] for run in document["runs"]] == list(pictures.RUNS)
    assert len(document["runs"][0]["steps_ms"]) == 2
