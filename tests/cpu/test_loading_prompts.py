"""A prompt of which a pipeline reads the beginning only: how much that is, and that it is said before the work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from samebits import loading, tiny
from samebits.cli import main
from samebits.loading import find, load
from samebits.loading.prompts import cut_off, hollow

CPU = torch.device("cpu")
LONG = "a red fox in deep snow " * 60
QUICK = ["--size", "32x32", "--steps", "2", "--device", "cpu", "--eager", "-o", "fox.png"]


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return {name: tiny.build(name, torch.float32) for name in tiny.NAMES}


def encoded(pipeline: Any, prompt: str, **arguments: Any) -> torch.Tensor:
    """What the denoiser is given for a prompt, ``(tokens, width)``."""
    with torch.no_grad():
        if type(pipeline).__name__ == "ZImagePipeline":
            (found, *_), _ = pipeline.encode_prompt([prompt], CPU, False, max_sequence_length=512, **arguments)
            return found
        # The pipeline's own call says 512 where encode_prompt says 1024.
        return pipeline.encode_prompt(prompt, CPU, max_sequence_length=512, **arguments)[0][0]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_exactly_what_is_longer_than_the_limit_is_told(built: dict[str, Any], name: str) -> None:
    pipeline = built[name]
    template = len(encoded(pipeline, "x")) - 1  # the embedded tokenizer makes a token of every letter of these
    most = 512 - template
    for letters in (1, 20, most - 1, most):
        assert cut_off(pipeline, {"prompt": "x" * letters}) == []
        assert len(encoded(pipeline, "x" * letters)) == letters + template
    for letters in (most + 1, most + 300):
        assert len(encoded(pipeline, "x" * letters)) == 512
        (told,) = cut_off(pipeline, {"prompt": "x" * letters})
        assert f"it has {letters + template:,} tokens and {type(pipeline).__name__} reads 512;" in told
    # What is said to be lost is lost, and what stands before it is not.
    ends = ["y", "z"]
    lost = [encoded(pipeline, "x" * 600 + end) for end in ends]
    assert torch.equal(*lost)
    kept = [encoded(pipeline, "x" * (most - 1) + end) for end in ends]
    assert not torch.equal(*kept)


def test_the_first_lost_words_are_shown_on_one_line(built: dict[str, Any]) -> None:
    for name in tiny.NAMES:
        (told,) = cut_off(built[name], {"prompt": "x" * 300 + "a\nb\tc " * 200})
        assert re.fullmatch(r"the prompt is cut: .* what follows is lost, from '[abc ]+' on", told)


def test_negative_prompts_and_other_limits(built: dict[str, Any]) -> None:
    for name in tiny.NAMES:
        both = cut_off(built[name], {"prompt": "x" * 600, "negative_prompt": "y" * 600})
        assert [text.split(" is cut")[0] for text in both] == ["the prompt", "the negative prompt"]
        assert cut_off(built[name], {"prompt": "x", "negative_prompt": None}) == []
        assert cut_off(built[name], {"prompt": "x" * 600, "max_sequence_length": 1024}) == []
        (told,) = cut_off(built[name], {"prompt": "x" * 600, "max_sequence_length": 100})
        assert "reads 100;" in told


def test_qwen_s_tokenizer_has_a_limit_of_its_own(built: dict[str, Any]) -> None:
    (told,) = cut_off(built["tiny-qwen-image"], {"prompt": "x" * 3000, "max_sequence_length": 5000})
    assert "reads 1,024;" in told


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_tokenizer_alone_is_enough(built: dict[str, Any], name: str) -> None:
    empty = hollow(type(built[name]), built[name].tokenizer)
    assert empty.transformer is None
    assert cut_off(empty, {"prompt": LONG}) == cut_off(built[name], {"prompt": LONG}) != []


def test_it_is_said_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tiny.NAMES:
        folder = tmp_path / name
        tiny.build(name, torch.bfloat16).save_pretrained(folder)
        seen: list[Any] = []

        def read(cls: Any, folder: Path, dtype: Any, seen: list[Any] = seen) -> Any:
            assert seen, "a weight was read first"
            raise KeyboardInterrupt

        monkeypatch.setattr(loading, "_load_component", read)
        with pytest.raises(KeyboardInterrupt):
            load(find(str(folder)), torch.bfloat16, CPU, look=seen.append)
        assert cut_off(seen[0], {"prompt": LONG})


def test_generate_warns_in_one_line_and_in_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["generate", "tiny-z-image", "-p", LONG, *QUICK])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("samebits: warning: the prompt is cut: ")
    assert done.stderr.count("\n") == 1
    done = CliRunner().invoke(main, ["generate", "tiny-z-image", "-p", LONG, *QUICK, "--force", "--json"])
    assert done.stderr == ""
    (told,) = json.loads(done.stdout)["warnings"]
    assert "ZImagePipeline reads 512" in told
    done = CliRunner().invoke(main, ["generate", "tiny-z-image", "-p", "a fox", *QUICK, "--force", "--json"])
    assert json.loads(done.stdout)["warnings"] == []


def test_bench_pipeline_warns_too() -> None:
    arguments = ["bench", "pipeline", "tiny-z-image", "--size", "32", "--steps", "1", "--device", "cpu", "--json"]
    done = CliRunner().invoke(main, [*arguments, "-p", LONG])
    assert done.exit_code == 0, done.output
    assert "samebits: warning: the prompt is cut: " in done.stderr
    (told,) = json.loads(done.stdout)["warnings"]
    assert "ZImagePipeline reads 512" in told
