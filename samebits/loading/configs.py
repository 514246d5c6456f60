"""Looks at the kind of every value in a pipeline's configuration files before a weight is read.

diffusers takes what it is given: a text where a number belongs is found by some line in the middle of a picture, or
counts as true. What a value must be is read off the class that will be built from the file: the annotation of its
argument, or its default where there is none. Keys that the class does not know are left alone, as diffusers does.
"""

from __future__ import annotations

import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.checkpoint import read_json
from samebits.errors import CheckpointError


@dataclass(frozen=True)
class Kind:
    """What a JSON value must be.

    Attributes
    ----------
    one, many : str
        How to say it of one value and of several.
    fits : callable
        Whether a value is of this kind.
    """

    one: str
    many: str
    fits: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_switch(value: Any) -> bool:
    return type(value) is bool or (type(value) is int and value in (0, 1))


INTEGER = Kind("an integer", "integers", _is_integer)
NUMBER = Kind("a finite number", "finite numbers", _is_number)
SWITCH = Kind("true or false", "true/false values", _is_switch)
TEXT = Kind("a text", "texts", lambda value: isinstance(value, str))
OBJECT = Kind("an object", "objects", lambda value: isinstance(value, dict))
NOTHING = Kind("null", "null", lambda value: value is None)

_SIMPLE: Mapping[Any, Kind] = {
    int: INTEGER,
    float: NUMBER,
    bool: SWITCH,
    str: TEXT,
    dict: OBJECT,
    types.NoneType: NOTHING,
    None: NOTHING,
}


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """A list of values of one kind, of a given length or any."""
    count = "" if length is None else f"{length} "
    told = f"list of {count}{kind.many}"

    def fits(value: Any) -> bool:
        return isinstance(value, list) and (length is None or len(value) == length) and all(map(kind.fits, value))

    return Kind(f"a {told}", f"lists of {count}{kind.many}", fits)


def any_of(*kinds: Kind) -> Kind:
    """A value of one of these kinds."""
    one, many = (" or ".join(dict.fromkeys(getattr(kind, form) for kind in kinds)) for form in ("one", "many"))
    return Kind(one, many, lambda value: any(kind.fits(value) for kind in kinds))


def _choice(values: Sequence[Any]) -> Kind:
    told = f"one of {', '.join(map(repr, values))}"
    return Kind(told, told, lambda value: value in values)


def kind_of(annotation: Any, default: Any = inspect.Parameter.empty) -> Kind | None:
    """What an argument with this annotation and default takes; ``None`` where neither says.

    Parameters
    ----------
    annotation
        A type, or ``inspect.Parameter.empty`` where the argument has none.
    default
        Of the argument. ``None`` is always taken where it is the default.
    """
    known = _annotated(annotation) if annotation is not inspect.Parameter.empty else _like(default)
    if known is None or default is not None or known.fits(None):
        return known
    return any_of(known, NOTHING)


def _annotated(annotation: Any) -> Kind | None:
    try:
        if annotation in _SIMPLE:
            return _SIMPLE[annotation]
    except TypeError:  # an annotation that cannot be hashed
        return None
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _choice(parts)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for part in parts if (kind := _annotated(part)) is not None]
        return any_of(*kinds) if len(kinds) == len(parts) else None
    if origin in (list, tuple, Sequence) and parts:
        item = _annotated(parts[0])
        # diffusers writes tuple[int] for a tuple of any length.
        fixed = origin is tuple and len(parts) > 1 and ... not in parts and len(set(parts)) == 1
        return None if item is None else list_of(item, len(parts) if fixed else None)
    return None


def _like(default: Any) -> Kind | None:
    if isinstance(default, list | tuple):
        item = _like(default[0]) if default else None
        return None if item is None else list_of(item)
    return None if default is None else _SIMPLE.get(type(default))


def check_values(path: Path, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Refuse the first value that is not what it must be.

    Raises
    ------
    CheckpointError
        Names the file, the key, what was expected there and what is there.
    """
    for key, kind in kinds.items():
        if key in values and not kind.fits(values[key]):
            got = json.dumps(values[key])
            shown = got if len(got) <= 80 else f"{got[:77]}..."
            raise CheckpointError(path=str(path), problem=f"{key!r} must be {kind.one}, got {shown}")


def arguments_of(cls: Any) -> dict[str, Kind]:
    """What each argument of a class takes, as far as its annotations and defaults say."""
    function: Any = cls.__init__
    try:
        annotations = typing.get_type_hints(function)
    except (NameError, TypeError):  # a name that is there for type checkers only
        annotations = {}
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = kind_of(annotations.get(name, inspect.Parameter.empty), parameter.default)
        if name != "self" and parameter.default is not inspect.Parameter.empty and kind is not None:
            found[name] = kind
    return found


_TOKEN = any_of(
    *(TEXT, NOTHING),
    Kind("an object with a 'content'", "objects with a 'content'", lambda v: isinstance(v, dict) and "content" in v),
)
_SIDE = _choice(("left", "right"))
_TOKENIZER: Mapping[str, Kind] = {
    "add_prefix_space": any_of(SWITCH, NOTHING),
    "added_tokens_decoder": OBJECT,
    "additional_special_tokens": any_of(list_of(any_of(TEXT, OBJECT)), NOTHING),
    "bos_token": _TOKEN,
    "chat_template": any_of(TEXT, list_of(OBJECT), NOTHING),
    "clean_up_tokenization_spaces": any_of(SWITCH, NOTHING),
    "eos_token": _TOKEN,
    "errors": TEXT,
    "extra_special_tokens": any_of(list_of(any_of(TEXT, OBJECT)), OBJECT, NOTHING),
    "model_max_length": any_of(NUMBER, NOTHING),
    "pad_token": _TOKEN,
    "padding_side": _SIDE,
    "split_special_tokens": SWITCH,
    "tokenizer_class": any_of(TEXT, NOTHING),
    "truncation_side": _SIDE,
    "unk_token": _TOKEN,
}
_HEAD: Mapping[str, Kind] = {"_class_name": TEXT, "_diffusers_version": TEXT}
_READ_BY_PIPELINES: Mapping[str, Kind] = {
    **dict.fromkeys(("base_image_seq_len", "max_image_seq_len"), INTEGER),
    **dict.fromkeys(("base_shift", "max_shift", "scaling_factor", "shift_factor"), NUMBER),
    "siglip_feat_dim": any_of(INTEGER, NOTHING),
}
"""What a pipeline calculates with, though the component itself could do without, and what no annotation says."""
_ROPE: Mapping[str, Kind] = {
    "factor": NUMBER,
    "mrope_section": list_of(INTEGER),
    "partial_rotary_factor": NUMBER,
    "rope_theta": NUMBER,
    "rope_type": TEXT,
}
"""Of a text encoder's positions, of which transformers says only that they are an object."""


def check(folder: Path, classes: Mapping[str, Any], explained: Callable[[Path, Callable[[], Any]], Any]) -> None:
    """Refuse a pipeline folder in whose configuration files a value is of the wrong kind.

    Parameters
    ----------
    folder
        Of the pipeline.
    classes
        The class of every component, by name.
    explained
        ``explained(path, loading)`` calls ``loading`` and turns what it raises into a sentence that names the path.

    Raises
    ------
    CheckpointError
        Names the file, the key, what was expected there and what is there.
    """
    for name, cls in classes.items():
        if name.startswith("tokenizer"):
            path = folder / name / "tokenizer_config.json"
            if path.exists():
                check_values(path, read_json(path), _TOKENIZER)
        elif getattr(cls, "config_name", None) is not None:  # of diffusers
            path = folder / name / cls.config_name
            check_values(path, read_json(path), {**_HEAD, **arguments_of(cls), **_READ_BY_PIPELINES})
        elif getattr(cls, "config_class", None) is not None:  # of transformers, which checks most by itself
            path = folder / name / "config.json"
            _check_encoder(path, cls.config_class, explained)


def _check_encoder(path: Path, cls: Any, explained: Callable[[Path, Callable[[], Any]], Any]) -> None:
    check_values(path, read_json(path), {"model_type": TEXT})
    config = explained(path, lambda: cls.from_pretrained(path.parent, local_files_only=True))
    parts = {"": config, **{name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}}
    for name, part in parts.items():
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict):
            prefix = f"{name}.rope_parameters." if name else "rope_parameters."
            check_values(
                path,
                {prefix + key: value for key, value in rope.items()},
                {prefix + key: kind for key, kind in _ROPE.items()},
            )
