"""The configuration of an export: ``quantization_config`` in config.json, or ``hf_quant_config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.checkpoint import read_json
from samebits.errors import CheckpointError

FP8, NVFP4 = "FP8", "NVFP4"
GROUP = 16
"""How many columns share a scale in NVFP4."""
MIXED = "MIXED_PRECISION"
"""The ``quant_algo`` of an export whose layers each have one of their own."""
PER_LAYER = {"FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": FP8, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4}


def read_quantization(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], Path] | None:
    """The quantisation's configuration and the file that it was read from; ``None`` where there is none of ModelOpt.

    Raises
    ------
    CheckpointError
        It is of an algorithm that is not supported, malformed, or the two files contradict each other.
    """
    found = _quantization(config, folder)
    if found is not None:
        _check_algorithm(*found)
        _check_groups(*found)
    return found


def _quantization(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], Path] | None:
    path, beside = folder / "config.json", folder / "hf_quant_config.json"
    inside = config.get("quantization_config")
    if inside is not None and not isinstance(inside, dict):
        problem = f"quantization_config is a {type(inside).__name__}, expected an object"
        raise CheckpointError(path=str(path), problem=problem)
    if inside is not None and inside.get("quant_method") != "modelopt":
        if not beside.exists():
            return None  # somebody else's: bitsandbytes, torchao, GGUF; diffusers knows what to do with it
        problem = f"quant_method is {inside.get('quant_method')!r}, but a hf_quant_config.json of ModelOpt is beside it"
        raise CheckpointError(path=str(path), problem=problem)
    other = _beside(beside) if beside.exists() else None
    if inside is None:
        return None if other is None else (other, beside)
    if other is not None and inside.get("quant_algo", other["quant_algo"]) != other["quant_algo"]:
        problem = f"quant_algo is {other['quant_algo']!r}, and {inside['quant_algo']!r} in config.json"
        raise CheckpointError(path=str(beside), problem=problem)
    return {**(other or {}), **inside}, path


def _beside(path: Path) -> dict[str, Any]:
    """Read ``hf_quant_config.json``, which says the same in other words."""
    details = read_json(path).get("quantization")
    if not isinstance(details, dict):
        raise CheckpointError(path=str(path), problem="has no quantization that says how it was quantised")
    known = {key: details[key] for key in ("quant_algo", "quantized_layers", "group_size") if key in details}
    return {"quant_algo": None, "ignore": details.get("exclude_modules") or [], "quant_method": "modelopt", **known}


def _check_algorithm(quantization: Mapping[str, Any], origin: Path) -> None:
    algorithm = quantization.get("quant_algo")
    if algorithm == MIXED:
        layers = quantization.get("quantized_layers")
        for name, details in layers.items() if isinstance(layers, dict) else ():
            each = details.get("quant_algo") if isinstance(details, dict) else details
            if not isinstance(each, str) or each not in PER_LAYER:
                raise CheckpointError(path=str(origin), problem=f"layer {name}: {_unknown(each)}")
    elif not isinstance(algorithm, str) or algorithm not in PER_LAYER:
        raise CheckpointError(path=str(origin), problem=_unknown(algorithm))


def _unknown(algorithm: Any) -> str:
    return f"quant_algo {str(algorithm)[:60]!r} is not supported; expected one of {', '.join(PER_LAYER)} or {MIXED}"


def _check_groups(quantization: Mapping[str, Any], origin: Path) -> None:
    """Look for what would change the meaning of the tensors: another block size, integers, other widths."""
    groups = quantization.get("config_groups") or {}
    ignore = quantization.get("ignore")
    sound = isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())
    if not sound or not (ignore is None or (isinstance(ignore, list) and all(type(name) is str for name in ignore))):
        what = "config_groups" if not sound else "ignore"
        raise CheckpointError(path=str(origin), problem=f"{what} is malformed: {str(quantization[what])[:200]}")
    for name, group in groups.items():
        for part in ("weights", "input_activations"):
            details = group.get(part)
            if details is None:
                continue
            where = f"config_groups.{name}.{part}"
            if not isinstance(details, dict):
                raise CheckpointError(path=str(origin), problem=f"{where} is malformed: {str(details)[:200]}")
            bits, kind = details.get("num_bits", 8), details.get("type", "float")
            size = details.get("group_size", GROUP)
            if kind != "float" or bits not in (4, 8) or (bits == 4 and size != GROUP):
                problem = f"{where}: expected floats of 8 bits, or of 4 bits in groups of {GROUP}, got {details}"
                raise CheckpointError(path=str(origin), problem=problem)
