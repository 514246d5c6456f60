"""From a name to a pipeline: an embedded one, a local folder, or a hub id.

In two halves. :func:`find` is cheap: it reads a few small JSON files and answers what the model is and which sizes it
can paint, so that bad input is refused within a second. :func:`load` does the work, and refuses a checkpoint that
diffusers or transformers would fill up with random weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import tiny
from samebits.checkpoint import INDEX, check_folder, components, read_json
from samebits.errors import CheckpointError, DeviceError, ModelError
from samebits.loading import configs, prompts
from samebits.loading.configs import INTEGER, SWITCH, check_values, list_of
from samebits.loading.source import Source
from samebits.quant.export import read_export

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

__all__ = ["OFFLOADS", "Source", "find", "load"]

OFFLOADS = ("none", "model", "group")
"""Where the weights wait: on the device, in memory by component, in memory by layer."""

_PATCH = 2
"""Both denoisers cut the latent into patches of 2 x 2."""

_TEXT_TOKENS = 1024
"""The longest prompt that ``QwenImagePipeline`` passes on."""

_EMBEDDED = {"tiny-qwen-image": ("QwenImagePipeline", 2), "tiny-z-image": ("ZImagePipeline", 1)}
"""The class of each embedded pipeline, and how many steps its schedule needs."""


def find(model: str, beside: Iterable[str] = ()) -> Source:
    """Find out what a name stands for. Reads small files only, from the disk or from the hub.

    Parameters
    ----------
    model
        A name of :data:`samebits.tiny.NAMES`, a folder with a ``model_index.json``, or a hub id ``owner/name``. An
        existing folder wins over a hub id of the same spelling.
    beside
        Names that the caller takes without asking here; the error for a name that is nothing has them too.

    Raises
    ------
    ModelError
        The name is none of these, the hub does not know it or does not answer, or the pipeline is of another class.
    CheckpointError
        The folder is broken.
    """
    if model in tiny.NAMES:
        name, fewest_steps = _EMBEDDED[model]
        return Source(model, name, None, False, False, 8 * _PATCH, 512 * 8 * _PATCH, fewest_steps)
    path, there = _on_disk(model)
    if there:
        if not path.is_dir():
            raise ModelError(model=model, problem="is a file; expected a folder with a model_index.json")
        source = _describe(model, path, hub=False, online=False)
        _check(path)
        return source
    owner, _, name = model.partition("/")
    if not (owner and name) or "/" in name or owner in {".", "..", "~"}:
        names = ", ".join((*beside, *tiny.NAMES))
        problem = f"no such model. Expected {names}, a folder that exists, or a hub id such as Qwen/Qwen-Image."
        raise ModelError(model=model, problem=problem)
    from samebits.loading import hub

    online = hub.reach(model)
    return _describe(model, hub.small_files(model, online), hub=True, online=online)


def _on_disk(model: str) -> tuple[Path, bool]:
    """Return the path that a name may be, and whether anything is there."""
    path = Path(model)
    try:
        path = path.expanduser()
        return path, bool(model) and path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        # Too long, or not to be looked at; the home folder of nobody; a NUL.
        cause = getattr(error, "strerror", None) or error
        raise ModelError(model=model[:200], problem=f"cannot be looked for on this disk ({cause})") from None


def load(
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    offload: str = "none",
    look: Callable[[Any], object] = lambda pipeline: None,
) -> DiffusionPipeline:
    """Load the pipeline that :func:`find` found, its weights in ``dtype``, ready to run on ``device``.

    Parameters
    ----------
    offload
        One of :data:`OFFLOADS`: everything on the device; whole components brought there one after the other; or
        single layers, with transfers on a stream of their own.
    look
        Called with a pipeline that has its tokenizer and perhaps nothing else yet, before a weight is read.

    Raises
    ------
    CheckpointError
        A file is missing or broken, or the files hold not all of the weights that the configuration asks for.
    ModelError
        The hub went away, or a component's class is not one of diffusers or transformers.
    DeviceError
        Offload without a GPU to bring the weights to.
    """
    if offload not in OFFLOADS:
        raise ValueError(f"expected offload to be one of {', '.join(OFFLOADS)}, got {offload!r}")
    if offload != "none" and device.type != "cuda":
        problem = f"offload {offload!r} moves weights between memory and a GPU, and this is none. Leave it out."
        raise DeviceError(device=str(device), problem=problem)
    if source.embedded:
        pipeline = tiny.build(source.model, dtype)
        look(pipeline)
    else:
        folder = source.folder
        if source.hub:
            from samebits.loading import hub

            folder = hub.download(source.model, source.online)
            _check(folder)
        if folder is None:
            raise ModelError(model=source.model, problem="has no folder; use find() to make a Source")
        pipeline = _load_folder(folder, source, dtype, look)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "group":
        pipeline.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)
    else:
        pipeline.to(device)
    return pipeline


def _describe(model: str, folder: Path, *, hub: bool, online: bool) -> Source:
    index = read_json(folder / INDEX)
    name = index.get("_class_name")
    if not isinstance(name, str):
        problem = f"'_class_name' must be a text, got {json.dumps(name)[:80]}"
        raise CheckpointError(path=str(folder / INDEX), problem=problem)
    if name not in {"QwenImagePipeline", "ZImagePipeline"}:
        problem = f"is a {name}; samebits paints with QwenImagePipeline and ZImagePipeline"
        raise ModelError(model=model, problem=problem)
    for part in ("vae", "transformer", "text_encoder", "tokenizer", "scheduler"):
        if part not in components(index) and index.get(part) is not None:
            problem = f"{part!r} must be a list of a library and a class, got {json.dumps(index[part])[:80]}"
            raise CheckpointError(path=str(folder / INDEX), problem=problem)
        if part not in components(index):
            raise CheckpointError(path=str(folder / INDEX), problem=f"names no {part}, which a {name} needs")
    vae, transformer = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
    schedule = read_json(folder / "scheduler" / "scheduler_config.json")
    if name == "QwenImagePipeline":
        check_values(folder / "vae" / "config.json", vae, {"temperal_downsample": list_of(SWITCH)})
        halvings = len(vae.get("temperal_downsample", (False, True, True)))
        # Positions are counted from the middle in both directions, 4096 each; the text's follow the picture's.
        patches = 2 * (4096 - _TEXT_TOKENS)
    else:
        check_values(folder / "vae" / "config.json", vae, {"block_out_channels": list_of(INTEGER)})
        check_values(folder / "transformer" / "config.json", transformer, {"axes_lens": list_of(INTEGER, 3)})
        halvings = max(0, len(vae.get("block_out_channels", (1, 1, 1, 1))) - 1)
        patches = min(transformer.get("axes_lens", (1024, 512, 512))[1:])
    multiple = _PATCH << halvings
    # Stretched so that its last step ends at a given noise level, a schedule of one step is 0/0.
    fewest = 2 if schedule.get("shift_terminal") else 1
    return Source(model, name, folder, hub, online, multiple, patches * multiple, fewest)


def _load_folder(folder: Path, source: Source, dtype: torch.dtype, look: Callable[[Any], object]) -> DiffusionPipeline:
    import diffusers

    classes, loaded = {}, {}
    for name, (library, class_name) in components(read_json(folder / INDEX)).items():
        if library not in {"diffusers", "transformers"}:
            raise ModelError(model=source.model, problem=f"component {name} needs {library}.{class_name}, unknown code")
        cls = getattr(import_module(library), class_name, None)
        if cls is None:
            raise ModelError(model=source.model, problem=f"component {name}: {library} has no {class_name}")
        classes[name] = cls
    configs.check(folder, classes, _explained)
    home = folder / "tokenizer"
    tokenizer = _explained(home, lambda: classes["tokenizer"].from_pretrained(home, local_files_only=True))
    if tokenizer.pad_token is None:
        problem = "'pad_token' is null or missing, and the pipeline fills prompts up with it"
        raise CheckpointError(path=str(home / "tokenizer_config.json"), problem=problem)
    if source.pipeline == "ZImagePipeline":
        _check_chat_template(tokenizer, home)
    cls = getattr(diffusers, source.pipeline)
    look(prompts.hollow(cls, tokenizer))
    for name in ("transformer", "vae", "text_encoder"):
        loaded[name] = _load_component(classes[name], folder / name, dtype)
    return _explained(folder, lambda: cls.from_pretrained(folder, local_files_only=True, **loaded))


def _check_chat_template(tokenizer: Any, folder: Path) -> None:
    """Put a prompt into the tokenizer's chat template, which the pipeline does after minutes of loading."""
    messages = [{"role": "user", "content": "a fox"}]
    _explained(
        folder,
        lambda: tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        ),
    )


def _check(folder: Path) -> None:
    """Check every file of a pipeline folder, and a quantised transformer's tensors against each other."""
    check_folder(folder)
    read_export(folder / "transformer")


def _load_component(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    export = read_export(folder) if folder.name == "transformer" else None
    if export is not None:
        from samebits.quant import build

        return build(export, cls, dtype)
    arguments = {"dtype": dtype, "use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    component, info = _explained(folder, lambda: cls.from_pretrained(folder, **arguments))
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"the weights hold no {missing[0]}{more}, which {cls.__name__} needs; they would be random numbers"
        raise CheckpointError(path=str(folder), problem=problem)
    return component


def _explained(folder: Path, loading: Any) -> Any:
    """Call ``loading``; turn what it raises into one sentence that names the folder."""
    import torch

    default = torch.get_default_dtype()
    try:
        return loading()
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first, *others = str(error).strip().split("\n")
        if first.endswith(":") and others:  # a heading: what it is about comes below
            first = f"{first} {others[0].strip()}"
        raise CheckpointError(path=str(folder), problem=f"cannot be loaded: {first[:400]}") from error
    finally:
        # diffusers sets it while it makes a model, and leaves it so where that fails.
        torch.set_default_dtype(default)
