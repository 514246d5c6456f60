"""Reads the unified Hugging Face export of NVIDIA ModelOpt as far as its headers and scales go. Needs no torch.

An export is a folder that diffusers' ``save_pretrained`` would write, with three differences: ``config.json`` has a
``quantization_config`` (or ``hf_quant_config.json`` lies beside it), the weights of quantised linears are
``float8_e4m3fn`` or packed E2M1, and their scales are tensors of their own. What belongs to what says the name:

==================== ================================ ===============================================================
tensor               FP8                              NVFP4
==================== ================================ ===============================================================
``X.weight``         ``(N, K)`` F8_E4M3               ``(N, K / 2)`` U8, two columns a byte, the even one low
``X.weight_scale``   F32, one or one a row            ``(N, K / 16)`` F8_E4M3, one for 16 columns
``X.weight_scale_2`` none                             F32, one
``X.input_scale``    F32, one; none: found per input  F32, one; none: activations stay as they are
==================== ================================ ===============================================================

Every other module is stored as diffusers stores it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.checkpoint import read_json
from samebits.errors import CheckpointError
from samebits.quant._export_config import FP8, GROUP, MIXED, NVFP4, PER_LAYER, read_quantization
from samebits.quant._export_files import Stored, first_bad, read_tensors

_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale")
_FOREIGN = {
    "pre_quant_scale": "smoothing (AWQ, SVDQuant) is not supported",
    "svdquant_lora_a": "SVDQuant is not supported",
    "svdquant_lora_b": "SVDQuant is not supported",
    "_amax": "this is ModelOpt's own checkpoint, not its unified export: write one with export_hf_checkpoint",
}
_FLOATS = ("BF16", "F16", "F32", "F64")
_NARROW = ("U8", "F8", "F6", "F4")


@dataclass(frozen=True)
class Layer:
    """One quantised linear of an export.

    Attributes
    ----------
    algorithm : str
        ``FP8`` or ``NVFP4``.
    out_features, in_features : int
        N and K.
    per_channel : bool
        FP8 alone: whether the weight has a scale a row.
    static : bool
        Whether the input's scale is stored.
    """

    algorithm: str
    out_features: int
    in_features: int
    per_channel: bool
    static: bool


@dataclass(frozen=True)
class Export:
    """What an export holds, checked as far as no weight has to be read.

    Attributes
    ----------
    folder : Path
        The folder of the component.
    algorithm : str
        ``quant_algo`` of its configuration.
    quantization : mapping
        The whole ``quantization_config``.
    config : mapping
        The rest of ``config.json``: what diffusers builds the model from.
    tensors : mapping of str to Stored
        Every tensor by name.
    layers : mapping of str to Layer
        The quantised linears by the name of their module.
    """

    folder: Path
    algorithm: str
    quantization: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    layers: Mapping[str, Layer]


def read_export(folder: Path) -> Export | None:
    """Read the export in ``folder``; ``None`` where the folder holds a model of another kind.

    Raises
    ------
    CheckpointError
        Names the file and the tensor, and what is wrong with it: the quantisation is of another method or algorithm, a
        file is broken, a scale is missing or of a shape that fits no weight, or the configuration contradicts a file.
    """
    config = read_json(folder / "config.json")
    found = read_quantization(config, folder)
    if found is None:
        if config.get("quantization_config") is None:
            _check_plain(folder)
        return None
    quantization, origin = found
    algorithm = quantization["quant_algo"]
    tensors = read_tensors(folder)
    layers = dict(_layers(tensors))
    _check_against(quantization, origin, tensors, layers)
    if not layers:
        raise CheckpointError(path=str(origin), problem=f"says {algorithm}, but no weight beside it is quantised")
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    return Export(folder, algorithm, quantization, rest, tensors, layers)


def _check_plain(folder: Path) -> None:
    """Refuse quantised weights of which nothing says so: diffusers casts them and leaves their scales out."""
    if not any(folder.glob("diffusion_pytorch_model.safetensors*")):
        return
    for name, stored in read_tensors(folder).items():
        if name.endswith(".weight_scale"):
            problem = f"tensor {name} is there, but neither config.json nor hf_quant_config.json names a quantisation"
            raise CheckpointError(path=str(stored.path), problem=problem)


def _layers(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, Layer]]:
    """Every quantised linear: what its weight and its scales say, checked against each other."""
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in _FOREIGN:
            raise CheckpointError(path=str(stored.path), problem=f"tensor {name}: {_FOREIGN[leaf]}")
        if leaf in _SUFFIXES and f"{module}.weight" not in tensors:
            raise CheckpointError(path=str(stored.path), problem=f"tensor {name} is there, but {module}.weight is not")
        if leaf == "weight" and stored.dtype not in _FLOATS:
            yield module, _layer(module, stored, tensors)
        elif leaf == "weight":
            for suffix in _SUFFIXES:
                if f"{module}.{suffix}" in tensors:
                    problem = f"tensor {name} is {stored.dtype}, yet there is a {module}.{suffix}"
                    raise CheckpointError(path=str(stored.path), problem=problem)
        elif leaf not in _SUFFIXES and stored.dtype.startswith(_NARROW):
            problem = f"tensor {name} is {stored.dtype}, and is no weight of a linear"
            raise CheckpointError(path=str(stored.path), problem=problem)


def _layer(module: str, weight: Stored, tensors: Mapping[str, Stored]) -> Layer:
    def fail(name: str, problem: str, stored: Stored = weight) -> CheckpointError:
        return CheckpointError(path=str(stored.path), problem=f"tensor {module}.{name} {problem}")

    if len(weight.shape) != 2 or weight.dtype not in ("F8_E4M3", "U8") or 0 in weight.shape:
        raise fail("weight", f"is {weight.dtype} {weight.shape}; expected (N, K) F8_E4M3 or (N, K / 2) U8")
    parts = {suffix: tensors.get(f"{module}.{suffix}") for suffix in _SUFFIXES}
    scale, second, inputs = parts.values()
    rows, columns = weight.shape
    # A model that was loaded from an export and saved again holds the bytes of its FP8 weights.
    fp8 = weight.dtype == "F8_E4M3" or (second is None and scale is not None and scale.dtype == "F32")
    if scale is None:
        raise fail("weight_scale", f"is missing, but {module}.weight is {weight.dtype}")
    for suffix, stored in (("weight_scale_2", second), ("input_scale", inputs)):
        if stored is not None and (stored.dtype != "F32" or stored.shape not in ((), (1,))):
            raise fail(suffix, f"is {stored.dtype} {stored.shape}; expected one number, F32", stored)
    if fp8:
        if second is not None:
            raise fail("weight_scale_2", "is there, but an FP8 weight has one kind of scale only", second)
        one, each = ((), (1,)), ((rows,), (rows, 1))
        if scale.dtype != "F32" or scale.shape not in (*one, *each):
            wanted = f"F32, one number or one for each of {rows} rows"
            raise fail("weight_scale", f"is {scale.dtype} {scale.shape}; expected {wanted}", scale)
        return Layer(FP8, rows, columns, scale.shape not in one, inputs is not None)
    if second is None:
        raise fail("weight_scale_2", f"is missing, but {module}.weight is packed E2M1")
    if columns * 2 % GROUP:
        raise fail("weight", f"is U8 {weight.shape}: {columns * 2} columns are no multiple of {GROUP}")
    if scale.dtype != "F8_E4M3" or scale.shape != (rows, columns * 2 // GROUP):
        wanted = f"F8_E4M3 {(rows, columns * 2 // GROUP)}, a scale for {GROUP} columns each"
        raise fail("weight_scale", f"is {scale.dtype} {scale.shape}; expected {wanted}", scale)
    return Layer(NVFP4, rows, columns * 2, False, inputs is not None)


def _check_against(
    quantization: Mapping[str, Any], origin: Path, tensors: Mapping[str, Stored], layers: Mapping[str, Layer]
) -> None:
    """Hold the configuration against the files: which modules it leaves out, and what it says of the others."""
    algorithm, each = quantization["quant_algo"], quantization.get("quantized_layers")
    ignore = quantization.get("ignore") or []
    for module, layer in layers.items():
        weight = tensors[f"{module}.weight"]
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in ignore):
            problem = f"tensor {module}.weight is {weight.dtype}, but {origin.name} leaves {module} out of quantisation"
            raise CheckpointError(path=str(weight.path), problem=problem)
        said = algorithm
        if algorithm == MIXED:
            details = each.get(module) if isinstance(each, dict) else None
            said = details.get("quant_algo") if isinstance(details, dict) else details
            if said is None:
                continue
        if PER_LAYER[said] != layer.algorithm:
            problem = f"tensor {module}.weight is {weight.dtype}, which is not what {origin.name} calls {said}"
            raise CheckpointError(path=str(weight.path), problem=problem)


def check_scales(export: Export) -> None:
    """Read every scale and refuse one by which nothing can be multiplied or divided.

    Raises
    ------
    CheckpointError
        Names the first scale that is NaN, infinite, zero or negative, and the place of the number in it.
    """
    for module in export.layers:
        for suffix in _SUFFIXES:
            stored = export.tensors.get(f"{module}.{suffix}")
            if stored is not None:
                bad = first_bad(stored)
                if bad is not None:
                    place, value = bad
                    at = f" at {_index(place, stored.shape)}" if stored.shape else ""
                    problem = f"tensor {module}.{suffix} is {value:g}{at}; expected a number above zero"
                    raise CheckpointError(path=str(stored.path), problem=problem)


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for side in reversed(shape):
        place, along = divmod(place, side)
        index.append(along)
    return tuple(reversed(index))
