"""Builds a diffusers model from an export: the model's own class, its quantised linears in the place of ``nn.Linear``.

Everything that can be wrong is looked at before a weight is read: the headers and the scales in
``samebits/quant/export.py``, then names and shapes against a model without memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

from samebits.checkpoint import INDEX, check_folder, components, read_json
from samebits.errors import CheckpointError, ModelError
from samebits.quant._export_config import NVFP4
from samebits.quant.export import Export, Layer, check_scales, read_export
from samebits.quant.linear import Fp8Linear, NvFp4Linear

_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")


def load(
    model: str | Path,
    cls: Any = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Any:
    """Load a ModelOpt export: a whole pipeline, or one quantised model such as its transformer.

    Parameters
    ----------
    model
        A folder, or a hub id ``owner/name``. An existing folder wins over a hub id of the same spelling.
    cls
        A pipeline class or a model class of diffusers, or the name of one. By default what the folder says that it is:
        the pipeline of its ``model_index.json``, else the model of its ``config.json``. A model class together with
        the folder of a pipeline takes that model out of it.
    dtype
        Of everything that is not quantised.
    device
        Where it goes.

    Returns
    -------
    diffusers.DiffusionPipeline or torch.nn.Module
        In eval mode, without gradients.

    Raises
    ------
    CheckpointError
        A file is missing or broken, a tensor does not fit, or nothing is quantised; names the file and the tensor.
    ModelError
        There is no such model, or it is of another class.
    """
    folder = _folder(str(model))
    known = _class(cls, str(model))
    if (folder / INDEX).exists():
        check_folder(folder)
        index = read_json(folder / INDEX)
        if known is None:
            known = _class(index.get("_class_name"), str(model))
        if known is None:
            raise CheckpointError(path=str(folder / INDEX), problem="has no _class_name")
        if issubclass(known, diffusers.DiffusionPipeline):
            return _load_pipeline(folder, index, known, dtype).to(device)
        folder = _component_of(folder, index, known)
    export = read_export(folder)
    if export is None:
        raise CheckpointError(path=str(folder / "config.json"), problem="is no ModelOpt export; use from_pretrained")
    return build(export, known, dtype).to(device)


def build(export: Export, cls: Any = None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Build the model of an export on the CPU. ``cls`` is its class; by default what its ``config.json`` names.

    Raises
    ------
    CheckpointError, ModelError
        As :func:`load`.
    """
    path = export.folder / "config.json"
    said = export.config.get("_class_name")
    cls = _class(said, str(path)) if cls is None else cls
    if cls is None or not issubclass(cls, diffusers.ModelMixin):
        raise ModelError(model=str(path), problem=f"is of class {said}, expected a model of diffusers")
    if said not in (None, cls.__name__):
        raise ModelError(model=str(path), problem=f"is a {said}, not a {cls.__name__}")
    check_scales(export)
    with _explained(path):
        with init_empty_weights():
            model = cls.from_config(dict(export.config))
        for name, layer in export.layers.items():
            _replace(model, name, layer, export, dtype)
    _check_names(model, export)
    keep = set(getattr(cls, "_keep_in_fp32_modules", None) or ())
    with _explained(export.folder):
        for name, value in _read(export):
            quantised = name.rpartition(".")[0] in export.layers and not name.endswith(".bias")
            if value.is_floating_point() and not quantised:
                value = value.to(torch.float32 if keep & set(name.split(".")) else dtype)
            _put(model, name, value)
    model.register_to_config(quantization_config=dict(export.quantization), _name_or_path=str(export.folder))
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _folder(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    owner, _, name = model.partition("/")
    if path.exists() or not (owner and name) or "/" in name or owner in {".", "..", "~"}:
        raise ModelError(model=model, problem="expected a folder that exists, or a hub id owner/name")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(model=model, problem=f"could not be fetched ({first[:300]})") from error


def _class(cls: Any, model: str) -> Any:
    """The class itself, or the one of diffusers that has this name; ``None`` for ``None``."""
    if isinstance(cls, str):
        found = getattr(diffusers, cls, None)
        if not isinstance(found, type):
            raise ModelError(model=model, problem=f"is a {cls[:100]}, which diffusers {diffusers.__version__} has not")
        cls = found
    if cls is not None and not issubclass(cls, (diffusers.DiffusionPipeline, diffusers.ModelMixin)):
        raise ModelError(model=model, problem=f"expected a pipeline or a model of diffusers, got {cls.__name__}")
    return cls


def _component_of(folder: Path, index: dict[str, Any], cls: Any) -> Path:
    for name, (_, class_name) in components(index).items():
        if class_name == cls.__name__:
            return folder / name
    raise ModelError(model=str(folder), problem=f"has no {cls.__name__}")


def _load_pipeline(folder: Path, index: dict[str, Any], cls: Any, dtype: torch.dtype) -> Any:
    exports = {}
    for name, (library, _) in components(index).items():
        if library == "diffusers" and (folder / name / "config.json").exists():
            export = read_export(folder / name)
            if export is not None:
                exports[name] = export
    if not exports:
        raise CheckpointError(path=str(folder), problem="holds no ModelOpt export; use from_pretrained")
    built = {name: build(export, dtype=dtype) for name, export in exports.items()}
    with _explained(folder):
        return cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True, **built)


def _replace(model: nn.Module, name: str, layer: Layer, export: Export, dtype: torch.dtype) -> None:
    """Put the quantised linear in the place of the plain one, still without memory."""
    weight = export.tensors[f"{name}.weight"]
    parent_name, _, leaf = name.rpartition(".")
    try:
        plain = model.get_submodule(name)
    except AttributeError:
        problem = f"tensor {name}.weight belongs to no module of a {type(model).__name__}"
        raise CheckpointError(path=str(weight.path), problem=problem) from None
    if type(plain) is not nn.Linear:
        problem = f"tensor {name}.weight is {weight.dtype}, but {name} is a {type(plain).__name__}, not a Linear"
        raise CheckpointError(path=str(weight.path), problem=problem)
    have, want = (layer.out_features, layer.in_features), (plain.out_features, plain.in_features)
    if have != want:
        problem = f"tensor {name}.weight is {weight.dtype} {weight.shape} for {have}; the configuration says {want}"
        raise CheckpointError(path=str(weight.path), problem=problem)
    size, bias = (layer.in_features, layer.out_features), plain.bias is not None
    quantised: nn.Module
    if layer.algorithm == NVFP4:
        quantised = NvFp4Linear(*size, bias, static=layer.static, device="meta", dtype=dtype)
    else:
        quantised = Fp8Linear(
            *size, bias, static=layer.static, per_channel=layer.per_channel, device="meta", dtype=dtype
        )
    setattr(model.get_submodule(parent_name), leaf, quantised)


def _check_names(model: nn.Module, export: Export) -> None:
    """Every tensor that the model wants is there in its shape, and no other is."""
    wanted = model.state_dict()
    for name, value in wanted.items():
        stored = export.tensors.get(name)
        if stored is None:
            problem = f"the weights hold no {name}, which {type(model).__name__} needs; it would be random numbers"
            raise CheckpointError(path=str(export.folder), problem=problem)
        if stored.shape != tuple(value.shape) and not _is_scale(name, export):
            problem = f"tensor {name} is {stored.shape}; the configuration says {tuple(value.shape)}"
            raise CheckpointError(path=str(stored.path), problem=problem)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name, stored in export.tensors.items():
        if name not in wanted and not any(re.search(pattern, name) for pattern in ignored):
            problem = f"tensor {name} belongs to nothing in a {type(model).__name__}"
            raise CheckpointError(path=str(stored.path), problem=problem)


def _is_scale(name: str, export: Export) -> bool:
    """Whether this is a scale, whose shape was checked already, and which may be ``(1,)`` or ``(N, 1)``."""
    module, _, leaf = name.rpartition(".")
    return module in export.layers and leaf.endswith(("_scale", "_scale_2"))


def _read(export: Export) -> Iterator[tuple[str, Tensor]]:
    for path in sorted({stored.path for stored in export.tensors.values()}):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of the one without memory; what the model ignores is left out."""
    module_name, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        return
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    elif leaf in module._buffers:
        if value.dtype == torch.float8_e4m3fn and leaf == "weight":
            value = value.view(torch.uint8)
        module._buffers[leaf] = value.reshape(module._buffers[leaf].shape)  # type: ignore[union-attr]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what diffusers raises over a configuration into one sentence that names the file."""
    default = torch.get_default_dtype()
    try:
        yield
    except (MemoryError, CheckpointError, ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise CheckpointError(path=str(path), problem=f"cannot be loaded: {first[:400]}") from error
    finally:
        torch.set_default_dtype(default)
