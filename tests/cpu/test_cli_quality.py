"""``samebits quality`` from end to end on an export of the real ModelOpt, and what is wrong with its input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from samebits import tiny
from samebits.cli import main

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
    assert "Not allowed here: PSNR" in result.output
    assert (out / "record.json").is_file()
    assert str(out / "quality.html") in result.output


def wrong(exports: Path, tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    fp8, empty, binary = exports / tiny.NAMES[0] / "FP8", tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("# nothing\n")
    binary.write_bytes(b"\xff\xfe\x00")
    file = tmp_path / "a-file"
    file.write_text("")
    return {
        "no prompts": ([str(fp8)], "expected what to paint"),
        "empty prompts": ([str(fp8), "--prompts", str(empty)], "holds no prompt"),
        "binary prompts": ([str(fp8), "--prompts", str(binary)], "is not UTF-8"),
        "missing prompts": ([str(fp8), "--prompts", str(tmp_path / "none")], "cannot be read"),
        "no such model": ([str(tmp_path / "none"), "--prompts", str(empty)], ""),
        "not quantised": ([tiny.NAMES[0], *SMALL, "-o", str(tmp_path / "o")], "none of its linears is quantised"),
        "a size": ([tiny.NAMES[0], "--size", "64"], "expected WIDTHxHEIGHT"),
        "host on a GPU": ([tiny.NAMES[0], "--host", "--device", "cuda"], "Leave one out"),
        "output is a file": ([tiny.NAMES[0], *SMALL, "-o", str(file)], "a-file"),
    }


@pytest.mark.parametrize("number", range(9))
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
