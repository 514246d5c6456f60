"""A pipeline folder is read as far as its JSON goes, and the first thing wrong with it is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samebits import tiny
from samebits.checkpoint import check_folder, components, read_header, read_json
from samebits.errors import CheckpointError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.build("tiny-qwen-image", torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def write_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: tuple[Any, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder)
    found = components(read_json(folder / "model_index.json"))
    assert found["vae"] == ("diffusers", "AutoencoderKLQwenImage")
    assert set(found) == {"vae", "transformer", "text_encoder", "tokenizer", "scheduler"}


def shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def rename_tokens(folder: Path) -> None:
    (folder / "tokenizer/tokenizer.json").rename(folder / "tokenizer/other.json")


def only_pickle(folder: Path) -> None:
    (folder / "vae/diffusion_pytorch_model.safetensors").rename(folder / "vae/diffusion_pytorch_model.bin")


@pytest.mark.parametrize(
    ("harm", "place", "complaint"),
    [
        (lambda f: (f / "model_index.json").unlink(), "model_index.json", "missing"),
        (lambda f: (f / "model_index.json").write_text("{"), "model_index.json", "is not JSON"),
        (lambda f: (f / "model_index.json").write_text("[]"), "model_index.json", "expected an object"),
        (lambda f: (f / "model_index.json").write_bytes(b"\xff\xfe"), "model_index.json", "is not JSON"),
        (lambda f: (f / "model_index.json").write_text("[" * 100_000), "model_index.json", "nested too deeply"),
        (lambda f: (f / "model_index.json").write_text('{"a": 1, "a": 2}'), "model_index.json", "'a' is in it twice"),
        (lambda f: shutil.rmtree(f / "vae"), "vae", "folder of component vae"),
        (lambda f: (f / "transformer/config.json").unlink(), "transformer/config.json", "missing"),
        (lambda f: (f / "scheduler/scheduler_config.json").unlink(), "scheduler_config.json", "missing"),
        (lambda f: (f / "text_encoder/model.safetensors").unlink(), "model.safetensors", "missing"),
        (lambda f: shorten(f / "transformer/diffusion_pytorch_model.safetensors"), "transformer", "cut off"),
        (lambda f: (f / "vae/diffusion_pytorch_model.safetensors").write_bytes(b""), "vae", "cut off"),
        (rename_tokens, "tokenizer", "vocabulary is missing"),
        (only_pickle, "vae", "pickle"),
    ],
)
def test_what_is_broken_is_named(folder: Path, harm: Callable[[Path], Any], place: str, complaint: str) -> None:
    harm(folder)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        check_folder(folder)
    assert place in caught.value.path
    assert "\n" not in str(caught.value)


def test_shards_are_checked_one_by_one(folder: Path) -> None:
    home = folder / "transformer"
    (home / "diffusion_pytorch_model.safetensors").unlink()
    save_file({"a": torch.zeros(2)}, home / "one.safetensors")
    save_file({"b": torch.zeros(2)}, home / "two.safetensors")
    index = home / "diffusion_pytorch_model.safetensors.index.json"

    def say(places: Any) -> None:
        index.write_text(json.dumps({"weight_map": places}))

    say({"a": "one.safetensors", "b": "two.safetensors"})
    check_folder(folder)
    for places, complaint in (
        ({"a": "one.safetensors", "c": "two.safetensors"}, "tensor c is missing"),
        ({"a": "three.safetensors"}, "missing"),
        ({"a": "../vae/diffusion_pytorch_model.safetensors"}, "out of its folder"),
        ({}, "no weight_map"),
    ):
        say(places)
        with pytest.raises(CheckpointError, match=complaint):
            check_folder(folder)


def test_a_sound_header_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: value["shape"] for name, value in header.items()} == {"a": [2, 3], "b": [5]}
    assert read_header(write_safetensors(path, {})) == {}
    assert read_header(write_safetensors(path, {"s": entry(0, 4, ())}, b"1234"))["s"]["shape"] == []


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "tensor b starts at byte 4 instead of 8"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, b"x" * 20, "leave a hole"),
        ({"a": entry(0, 8)}, b"x" * 9, "1 bytes after the last tensor"),
        ({"a": entry(0, 8)}, b"x" * 7, "tensor a ends at byte 8, but only 7"),
        ({"a": entry(0, 4)}, b"x" * 4, r"tensor a: F32 \[2\] needs 8 bytes, not 4"),
        ({"a": entry(-8, 0)}, b"", "malformed"),
        ({"a": entry(0, 8, (-2,))}, b"x" * 8, "malformed"),
        ({"a": entry(0, 8, (2.0,))}, b"x" * 8, "malformed"),
        ({"a": entry(0, 8, (True, 2))}, b"x" * 8, "malformed"),
        ({"a": entry(0, 8, dtype="F31")}, b"x" * 8, "malformed"),
        ({"a": 3}, b"", "malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, b"", "malformed"),
        (b'{"a": {}, "a": {}}', b"", "'a' is in it twice"),
        (b"[]", b"", "expected an object"),
        (b"nonsense", b"", "is not JSON"),
        (b"\xff", b"", "is not JSON"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: Any, data: bytes, complaint: str) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read_header(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("length", [3, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match=f"a header of {length} bytes in a file of 10"):
        read_header(path)


def test_a_json_of_a_hundred_megabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model_index.json"
    with path.open("wb") as file:
        file.truncate((100 << 20) + 1)
    with pytest.raises(CheckpointError, match="longer than 100 MiB"):
        read_json(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path)
