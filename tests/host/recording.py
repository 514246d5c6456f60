"""Eager results recorded on a GPU, in one safetensors file: written by ``tests/gpu/record.py``, read by the host ring.

A case is an op's arguments and its eager outputs. A tensor may be stored as a *tile* with the repeats that give the
whole of it: how a mean is summed depends on the number of rows and not on what they hold, so seventeen equal rows
prove as much as seventeen others and need one row of space.

``rsqrt``, ``exp`` and ``tanh`` of the GPU are approximations. The file holds ``(x, torch.rsqrt(x))`` for every value
that the emulated chains of the recorded cases take the root of, as computed on that GPU, and the same of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from binary32 import BITS, F32, Unary
from safetensors import safe_open
from safetensors.torch import save_file

FORMAT = "1"
FILE = Path(__file__).parent / "recorded" / "h200_ops.safetensors"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in element type, shape and every bit. NaN equals the same NaN, -0 is not 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    view = BITS.get(a.dtype, torch.uint8)
    return torch.equal(a.contiguous().view(view), b.contiguous().view(view))


FUNCTIONS = ("rsqrt", "exp", "tanh")
"""torch's names of the functions whose values are recorded; CUDA's have an ``f`` at the end."""


class FunctionTable:
    """A GPU's function at the recorded values; callable like its namesake in ``binary32``.

    Raises
    ------
    KeyError
        For a value that was not recorded: somebody computed another argument than the recorded chain has.
    """

    def __init__(self, name: str, inputs: F32, outputs: F32) -> None:
        order = np.argsort(inputs.view(np.uint32))
        self.name, self.inputs, self.outputs = name, inputs[order], outputs[order]
        self._keys = self.inputs.view(np.uint32)

    def __call__(self, x: F32) -> F32:
        # NaN has many patterns and one result.
        wanted = np.where(np.isnan(x), np.uint32(0x7FFFFFFF), np.ascontiguousarray(x, np.float32).view(np.uint32))
        at = np.searchsorted(self._keys, wanted).clip(max=max(len(self._keys) - 1, 0))
        missing = wanted[self._keys[at] != wanted] if len(self._keys) else wanted
        if missing.size:
            value = missing.view(np.float32).flat[0]
            raise KeyError(f"{self.name}({value!r}) was not recorded: record the cases again")
        return self.outputs[at]

    def bits(self) -> tuple[list[int], list[int]]:
        """Arguments and results as ``samebits.host.recorded`` takes them."""
        inputs, outputs = (part.view(np.uint32).tolist() for part in (self.inputs, self.outputs))
        return inputs, outputs


def functions_of(chain: Callable[..., Any], functions: Mapping[str, Unary]) -> dict[str, Unary]:
    """Those of ``functions`` that an emulated chain lets itself be handed."""
    return {name: function for name, function in functions.items() if name in signature(chain).parameters}


@dataclass(frozen=True)
class RecordedCase:
    """One call: the op's name, its arguments and what eager gave for them."""

    name: str
    op: str
    args: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Recording:
    """Everything in the file."""

    cases: tuple[RecordedCase, ...]
    functions: Mapping[str, FunctionTable]
    environment: Mapping[str, Any]


def _tile_of(tensor: torch.Tensor, repeats: list[int] | None) -> torch.Tensor:
    """The part of ``tensor`` that, repeated, gives it back; raises ValueError if it does not."""
    if repeats is None:
        return tensor.contiguous()
    tile = tensor[tuple(slice(0, size // n) for size, n in zip(tensor.shape, repeats, strict=True))].contiguous()
    if not same_bits(tile.repeat(*repeats), tensor):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not its first part repeated {repeats} times")
    return tile


def save(
    path: Path,
    cases: Iterable[tuple[RecordedCase, Mapping[int, list[int]], Mapping[int, list[int]]]],
    tables: Mapping[str, FunctionTable],
    environment: Mapping[str, Any],
) -> None:
    """Write the file. With every case come the repeats of its arguments and of its outputs, by position."""
    tensors: dict[str, torch.Tensor] = {}
    for name, table in tables.items():
        tensors[f"{name}/inputs"], tensors[f"{name}/outputs"] = map(torch.from_numpy, (table.inputs, table.outputs))
    known: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}  # equal tensors are stored once
    listing = []
    for case, arg_repeats, output_repeats in cases:
        entry: dict[str, Any] = {"name": case.name, "op": case.op}
        for part, values, repeats in (("args", case.args, arg_repeats), ("outputs", case.outputs, output_repeats)):
            entry[part] = []
            for position, value in enumerate(values):
                if not isinstance(value, torch.Tensor):
                    entry[part].append({"value": value})
                    continue
                tile = _tile_of(value.cpu(), repeats.get(position))
                content = tile.reshape(-1).view(torch.uint8).numpy().tobytes()
                key = known.setdefault((tile.dtype, tile.shape, content), str(len(known)))
                tensors[key] = tile.clone()
                entry[part].append({"tensor": key, "repeats": repeats.get(position)})
        listing.append(entry)
    metadata = {
        "format": FORMAT,
        "cases": json.dumps(listing, separators=(",", ":")),
        "environment": json.dumps(environment),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata)


def load(path: Path = FILE) -> Recording:
    """Read the file.

    Raises
    ------
    ValueError
        If it was written in another format than this one.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path.name} has format {metadata.get('format')!r}, expected {FORMAT!r}: record it again")

        def value(entry: dict[str, Any]) -> Any:
            if "tensor" not in entry:
                return entry["value"]
            # Cloned: in the file a tensor begins anywhere, and what ATen computes depends on alignment.
            tensor = file.get_tensor(entry["tensor"]).clone()
            return tensor if entry["repeats"] is None else tensor.repeat(*entry["repeats"])

        cases = tuple(
            RecordedCase(
                entry["name"],
                entry["op"],
                tuple(value(part) for part in entry["args"]),
                tuple(value(part) for part in entry["outputs"]),
            )
            for entry in json.loads(metadata["cases"])
        )
        parts = {name: [f"{name}/inputs", f"{name}/outputs"] for name in FUNCTIONS}
        tables = {
            name: FunctionTable(name, *(file.get_tensor(key).numpy() for key in keys))
            for name, keys in parts.items()
            if keys[0] in file.keys()  # noqa: SIM118 - the file is no mapping
        }
    return Recording(cases, tables, json.loads(metadata["environment"]))
