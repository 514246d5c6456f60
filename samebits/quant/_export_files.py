"""The files of an export: which tensor lies where, and whether the numbers of its scales can be scales. No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samebits.checkpoint import read_header, read_json
from samebits.errors import CheckpointError

_STEM = "diffusion_pytorch_model"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file, dtype as safetensors spells it, shape, and its bytes in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the component in ``folder`` by name, from the headers of its files.

    Raises
    ------
    CheckpointError
        A file is missing, broken or a pickle, or a tensor is missing or there twice.
    """
    index, single = folder / f"{_STEM}.safetensors.index.json", folder / f"{_STEM}.safetensors"
    if not index.exists():
        pickles = [] if single.exists() else [path.name for kind in _PICKLES for path in folder.glob(kind)]
        if pickles:
            problem = f"only pickle files ({pickles[0]}) are here. They can run code when read and are refused"
            raise CheckpointError(path=str(folder), problem=problem)
        return dict(_stored(single))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(path=str(index), problem="has no weight_map that says which file holds which tensor")
    found: dict[str, Stored] = {}
    for shard in sorted({str(place) for place in places.values()}):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            problem = f"points to {shard!r}; expected a .safetensors file in its own folder"
            raise CheckpointError(path=str(index), problem=problem)
        for name, stored in _stored(folder / shard):
            if name in found:
                problem = f"tensor {name} is also in {found[name].path.name}"
                raise CheckpointError(path=str(stored.path), problem=problem)
            found[name] = stored
    for name, place in places.items():
        if name not in found or found[name].path.name != place:
            raise CheckpointError(path=str(folder / str(place)), problem=f"tensor {name} is missing")
    return found


def _stored(path: Path) -> Iterator[tuple[str, Stored]]:
    header = read_header(path)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, Stored(path, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)


def first_bad(stored: Stored) -> tuple[int, float] | None:
    """Position and value of the first element of a scale that is no positive finite number, or ``None``."""
    try:
        with stored.path.open("rb") as file:
            file.seek(stored.begin)
            for begin in range(stored.begin, stored.end, _CHUNK_BYTES):
                text = file.read(min(_CHUNK_BYTES, stored.end - begin))
                done = begin - stored.begin
                if stored.dtype == "F32":
                    numbers = struct.unpack(f"<{len(text) // 4}f", text)
                    for place, value in enumerate(numbers):
                        if not (math.isfinite(value) and value > 0):
                            return done // 4 + place, value
                elif text.translate(None, _GOOD_E4M3):
                    place = next(place for place, byte in enumerate(text) if byte not in _GOOD_E4M3)
                    return done + place, _e4m3(text[place])
    except OSError as error:
        raise CheckpointError(path=str(stored.path), problem=f"cannot be read ({error.strerror or error})") from None
    return None


_GOOD_E4M3 = bytes(range(0x01, 0x7F))
"""The positive numbers of float8_e4m3fn; 0x7F is NaN, and from 0x80 on the sign is set."""


def _e4m3(byte: int) -> float:
    """The value of a byte that is not among the good ones: zero, a negative number or NaN."""
    size, sign = byte & 0x7F, -1.0 if byte & 0x80 else 1.0
    if size == 0x7F:
        return math.nan
    exponent, mantissa = size >> 3, size & 7
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))
