"""Reads a pipeline folder as far as its JSON goes and says what is wrong with it, before a weight is loaded. A leaf.

diffusers and transformers accept more than they should: a tokenizer without its vocabulary becomes an empty one, and
a cut-off file is found after minutes of loading. Here every file that loading needs is looked at: that it is there,
that its JSON can be read, and that every safetensors header fits the file's length. No tensor is read, no torch needed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from samebits.errors import CheckpointError

INDEX = "model_index.json"

_WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_WIDTH_BITS = {
    "BOOL": 8,
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LONGEST_JSON_BYTES = 100 << 20
"""A limit of the safetensors format for headers; nothing else in a pipeline folder comes near it."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises
    ------
    CheckpointError
        The file is missing, too long, not UTF-8, not JSON, nested too deeply, has a key twice or is no object.
    """
    try:
        if path.stat().st_size > _LONGEST_JSON_BYTES:
            raise CheckpointError(path=str(path), problem="longer than 100 MiB, which is no JSON of a model")
        return _parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise CheckpointError(path=str(path), problem="the file is missing") from None
    except OSError as error:
        raise CheckpointError(path=str(path), problem=f"cannot be read ({error.strerror or error})") from None


def components(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of every component that a ``model_index.json`` names, in the file's order."""
    found = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            continue
        if len(value) == 2 and all(isinstance(part, str) for part in value):
            found[name] = (value[0], value[1])
    return found


def check_folder(folder: Path) -> None:
    """Check everything that loading this pipeline folder will need.

    Raises
    ------
    CheckpointError
        Names the first file that is missing or broken, the tensor where there is one, and what is wrong with it.
    """
    index = read_json(folder / INDEX)
    for name, (library, class_name) in components(index).items():
        path = folder / name
        if not path.is_dir():
            raise CheckpointError(path=str(path), problem=f"the folder of component {name} ({class_name}) is missing")
        if name.startswith("scheduler"):
            read_json(path / "scheduler_config.json")
        elif name.startswith("tokenizer"):
            _check_tokenizer(path)
        elif library in _WEIGHTS:
            read_json(path / "config.json")
            _check_weights(path, _WEIGHTS[library])


def read_header(path: Path) -> dict[str, Any]:
    """Read and check the header of a safetensors file.

    Returns
    -------
    dict
        ``dtype``, ``shape`` and ``data_offsets`` of every tensor by name, without ``__metadata__``.

    Raises
    ------
    CheckpointError
        The header is longer than the file, is no JSON, has a key twice, or describes tensors that overlap, leave holes,
        reach past the end of the file, or do not have the size that dtype and shape say.
    """
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            length_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length_bytes > min(size_bytes - 8, _LONGEST_JSON_BYTES):
                problem = f"cut off or no safetensors: a header of {length_bytes} bytes in a file of {size_bytes}"
                raise CheckpointError(path=str(path), problem=problem)
            header = _parse(file.read(length_bytes), path)
    except FileNotFoundError:
        raise CheckpointError(path=str(path), problem="the file is missing") from None
    except OSError as error:
        raise CheckpointError(path=str(path), problem=f"cannot be read ({error.strerror or error})") from None
    header.pop("__metadata__", None)
    _check_tensors(header, size_bytes - 8 - length_bytes, path)
    return header


def _check_tensors(header: dict[str, Any], data_bytes: int, path: Path) -> None:
    spans = []
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            bits = math.prod(entry["shape"]) * _WIDTH_BITS[entry["dtype"]]
            numbers = [begin, end, *entry["shape"]]
            sound = all(type(number) is int and number >= 0 for number in numbers)
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError(
                path=str(path), problem=f"tensor {name}: its description is malformed: {str(entry)[:200]}"
            )
        if end > data_bytes:
            problem = f"tensor {name} ends at byte {end}, but only {data_bytes} are there: the file is cut off"
            raise CheckpointError(path=str(path), problem=problem)
        if (end - begin) * 8 != bits:
            problem = f"tensor {name}: {entry['dtype']} {entry['shape']} needs {bits / 8:g} bytes, not {end - begin}"
            raise CheckpointError(path=str(path), problem=problem)
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            problem = f"tensor {name} starts at byte {begin} instead of {reached}: tensors overlap or leave a hole"
            raise CheckpointError(path=str(path), problem=problem)
        reached = end
    if reached != data_bytes:
        problem = f"{data_bytes - reached} bytes after the last tensor belong to none"
        raise CheckpointError(path=str(path), problem=problem)


def _check_weights(folder: Path, stem: str) -> None:
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if not index.exists():
        if not single.exists() and any(folder.glob("*.bin")):
            problem = "only pickle files (.bin) are here. They can run code when read and are refused: use safetensors"
            raise CheckpointError(path=str(folder), problem=problem)
        read_header(single)
        return
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(path=str(index), problem="has no weight_map that says which file holds which tensor")
    for shard in sorted({str(place) for place in places.values()}):
        if Path(shard).name != shard:
            raise CheckpointError(path=str(index), problem=f"points out of its folder, to {shard!r}")
        there = read_header(folder / shard)
        lost = [name for name, place in places.items() if place == shard and name not in there]
        if lost:
            raise CheckpointError(path=str(folder / shard), problem=f"tensor {lost[0]} is missing")


def _check_tokenizer(folder: Path) -> None:
    whole = folder / "tokenizer.json"
    if whole.exists():
        read_json(whole)
        return
    pieces = [folder / "vocab.json", folder / "merges.txt"]
    missing = [piece.name for piece in pieces if not piece.exists()]
    if missing:
        problem = f"the tokenizer's vocabulary is missing: neither tokenizer.json nor {' and '.join(missing)}"
        raise CheckpointError(path=str(folder), problem=problem)
    read_json(pieces[0])


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(path=str(path), problem=f"{twice!r} is in it twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(path=str(path), problem="its JSON is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(path=str(path), problem=f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(path=str(path), problem=f"holds a JSON {type(value).__name__}, expected an object")
    return value
