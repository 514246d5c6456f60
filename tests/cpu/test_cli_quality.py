"""``samebits quality`` from end to end on an export of the real ModelOpt, and what is wrong with its input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from samebits import tiny
from samebits.cli import main
from samebits.cli.quality import Run
from samebits.quality import metrics, read_record
from samebits.quality.page import MOST_PICTURES, Shown

pytest.importorskip("torchmetrics")
pytest.importorskip("flip_evaluator")
pytest.importorskip("jinja2")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["quality", *arguments])


@pytest.fixture
def model(exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    return exports / tiny.NAMES[0] / "FP8"


def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("# what to paint\na fox\n\n  a boat  \n", encoding="utf-8")
    return str(path)


SMALL = ("--steps", "2", "--size", "64x48", "--seeds", "1", "--device", "cpu")


def test_the_record_that_apply_asks_for(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    loose = ("--min-ssim", "0", "--min-psnr", "0")
    result = invoke(str(model), "--prompts", prompts(tmp_path), *SMALL, *loose, "-o", str(out), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert [pair["prompt"] for pair in document["pairs"]] == ["a fox", "a boat"]
    assert document["within"] is True
    assert document["quantization"] == "modelopt FP8"
    assert any(pair["exact_sha256"] != pair["measured_sha256"] for pair in document["pairs"])
    assert {path.name for path in out.iterdir()} == {"record.json", "sheet.png", "quality.html"}
    assert Path(document["record"]).is_file()
    assert (out / "quality.html").read_text(encoding="utf-8").count("<figure>") == 8

    # A stricter user than the record's pictures allow, and one who is content.
    from samebits.apply import apply
    from samebits.loading import find, load

    pipeline = load(find(str(model)), torch.bfloat16, torch.device("cpu"))
    with apply(pipeline, contract="measured") as handle:
        report = str(handle.report())
    worst = document["worst"]
    allowed = worst["ssim"] >= 0.95 and (worst["psnr"] is None or worst["psnr"] >= 29)
    assert ("measured on 2 pictures" in report) == allowed
    assert ("does not allow it" in report) != allowed


def test_pictures_that_are_too_far_apart(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke(str(model), "--prompts", prompts(tmp_path), *SMALL, "--min-psnr", "200", "-o", str(out))
    assert result.exit_code == 1, result.output
    assert "Not within: PSNR" in result.output
    assert (out / "record.json").is_file()
    assert str(out / "quality.html") in result.output


def wrong(exports: Path, tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    fp8, empty, binary = exports / tiny.NAMES[0] / "FP8", tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("# nothing\n")
    binary.write_bytes(b"\xff\xfe\x00")
    good, long = tmp_path / "good.txt", tmp_path / "long.txt"
    good.write_text(f"a fox\n{'a' * 900}\n")
    long.write_text("x" * 32_769)
    file = tmp_path / "a-file"
    file.write_text("")
    return {
        "no prompts": ([str(fp8)], "expected what to paint"),
        "empty prompts": ([str(fp8), "--prompts", str(empty)], "holds no prompt"),
        "binary prompts": ([str(fp8), "--prompts", str(binary)], "is not UTF-8"),
        "missing prompts": ([str(fp8), "--prompts", str(tmp_path / "none")], "cannot be read"),
        "no such model": ([str(tmp_path / "none"), "--prompts", str(empty)], ""),
        "a model without late biases": (
            [str(exports / tiny.NAMES[1] / "FP8"), "--prompts", str(good), *SMALL, "-o", str(tmp_path / "o")],
            "adds no bias of a ZImageTransformer2DModel late",
        ),
        "a long prompt": ([str(fp8), "--prompts", str(long)], "32,769 characters"),
        "too many pairs": ([str(fp8), "--prompts", str(good), "--seeds", "10000"], "are 20,000 pairs"),
        "output cannot be written": ([tiny.NAMES[0], *SMALL, "-o", "/proc/self"], "/proc/self: cannot be written"),
        "no guidance": (
            [str(fp8), "--prompts", str(good), "--guidance", "nan"],
            "expected a number from 0 up, got nan",
        ),
        "not quantised": ([tiny.NAMES[0], *SMALL, "-o", str(tmp_path / "o")], "no linear of this model is quantised"),
        "a size": ([tiny.NAMES[0], "--size", "64"], "expected WIDTHxHEIGHT"),
        "host on a GPU": ([tiny.NAMES[0], "--host", "--device", "cuda"], "Leave one out"),
        "output is a file": ([tiny.NAMES[0], *SMALL, "-o", str(file)], "a-file"),
    }


@pytest.mark.parametrize("number", range(14))
def test_bad_input_is_one_line_and_two(
    number: int, exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = list(wrong(exports, tmp_path).values())[number]
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    as_json = invoke(*arguments, "--json")
    assert as_json.exit_code == 2
    assert list(json.loads(as_json.stdout)) == ["error"]


# What was measured for hours is not lost.


def test_cut_short_keeps_the_figures_and_allows_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = metrics.figures, []

    def figures(*pictures: Any) -> Any:
        calls.append(pictures)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*pictures)

    monkeypatch.setattr(metrics, "figures", figures)
    out = tmp_path / "out"
    result = invoke(str(model), "--prompts", prompts(tmp_path), *SMALL, "-o", str(out), "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout) == {"error": "interrupted"}
    assert [pair.prompt for pair in read_record(out / "unfinished.json").pairs] == ["a fox"]
    assert "cut short after 1 pairs" in result.stderr
    assert not (tmp_path / "cache" / "quality").exists()


def test_an_output_that_cannot_be_replaced_loses_no_record(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("record.json", "sheet.png", "quality.html"):
        (out / name).mkdir(parents=True)
    loose = ("--min-ssim", "0", "--min-psnr", "0")
    result = invoke(str(model), "--prompts", prompts(tmp_path), *SMALL, *loose, "-o", str(out), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert Path(document["record"]).parent == tmp_path / "cache" / "quality"
    assert document["written"] == []
    assert len(result.stderr.splitlines()) == 3


def test_looser_thresholds_do_not_promise_what_apply_refuses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What apply allows has its own thresholds, whatever was asked for here. Prompts may be in any script."""
    real = metrics.figures

    def figures(*pictures: Any) -> Any:
        found, maps = real(*pictures)
        return msgspec.structs.replace(found, ssim=0.5), maps

    monkeypatch.setattr(metrics, "figures", figures)
    words = tmp_path / "words.txt"
    words.write_text("ein roter Fuchs \u72d0 \U0001f98a\n", encoding="utf-8")
    loose = ("--min-ssim", "0", "--min-psnr", "0", "-o", str(tmp_path / "out"))
    result = invoke(str(model), "--prompts", str(words), *SMALL, *loose)
    assert result.exit_code == 0, result.output
    assert "Within SSIM 0 and PSNR 0 dB." in result.output
    assert "Not allowed here: SSIM 0.5000 is below 0.95" in result.output
    as_json = json.loads(invoke(str(model), "--prompts", str(words), *SMALL, *loose, "--json").stdout)
    assert (as_json["within"], as_json["allowed"]) == (True, False)


def test_only_the_worst_pictures_are_kept() -> None:
    run = Run()
    for number in range(200):
        ssim = ((number * 77) % 200 - 100) / 100
        run.show(Shown(f"SSIM {ssim:.4f}", None, None, None, (ssim, 30.0)))  # type: ignore[arg-type]
    assert [shown.badness[0] for shown in run.shown] == [(number - 100) / 100 for number in range(MOST_PICTURES)]


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_pipeline_that_does_not_repeat_itself_is_said(
    repeatable: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = metrics.pixels_sha256, []

    def pixels(image: Any) -> str:
        calls.append(image)
        return real(image) + ("" if repeatable else str(len(calls)))

    monkeypatch.setattr(metrics, "pixels_sha256", pixels)
    loose = ("--min-ssim", "0", "--min-psnr", "0", "-o", str(tmp_path / "out"))
    result = invoke(str(model), "--prompts", prompts(tmp_path), *SMALL, *loose, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("gave two pictures for one seed") == (not repeatable)
    assert len(json.loads(result.stdout)["pairs"]) == 2
