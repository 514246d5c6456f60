"""What a denoiser is at a moment: its tree, attributes and weights, compared before every replay.

A graph holds what Python decided while it was captured: which submodules ran, with which numbers, on the memory of
which weights. Values that change inside that memory it follows by itself; everything else is compared, at the speed of
C: every attribute of every module, every list and dict in them, the identity, address, shape, strides and type of every
weight. On a model of two thousand modules that takes one or two milliseconds of the host's time, in which the GPU
still computes the step before.

Nothing here keeps a weight or a submodule alive: they are known by address, and one that goes away is noticed.
"""

from __future__ import annotations

import enum
import operator
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

TRUSTED = frozenset({"torch", "diffusers", "peft", "samebits"})
"""Packages whose modules do nothing on the host that a graph would have to do again."""

_DEEPEST = 4
_NO_PART_OF_A_FORWARD = frozenset(
    {
        "_backward_hooks",
        "_backward_pre_hooks",
        "_is_full_backward_hook",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    }
)
_PLAIN: tuple[type, ...] = (
    *(type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type, enum.Enum, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
"""What cannot change inside, and modules, which are met by themselves."""

_dtype = operator.attrgetter("dtype")
_version = operator.attrgetter("_version")


class ModelState:
    """A denoiser as it is now.

    Parameters
    ----------
    model : torch.nn.Module
        The denoiser.
    device_type : str
        Where its weights have to be.
    foreign : callable
        ``foreign(module)`` says whose forward was put on an instance, or returns None where it is nobody's or ours.
    trusted : frozenset of str
        Packages whose modules and processors may be captured.

    Attributes
    ----------
    obstacle : str or None
        Why no graph can be captured while the model is like this.
    device : torch.device or None
        Where all of its weights are.
    """

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        foreign: Callable[[nn.Module], str | None],
        trusted: frozenset[str] = TRUSTED,
    ) -> None:
        self.obstacle: str | None = None
        self.device: torch.device | None = None
        self._device_type, self._foreign, self._trusted = device_type, foreign, trusted
        self._gone = False
        # Containers that were empty; the others beside copies of them, with what they are called.
        self._empty: list[Any] = []
        self._live: list[Any] = []
        self._copies: list[Any] = []
        self._names: list[str] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._tables: list[dict[str, Tensor | None]] = []
        self._loose: list[Tensor] = []
        """Tensors that are plain attributes, or lie in lists and dicts of them."""
        self._holders: list[Any] = []
        """The containers in which those lie: two tensors of one element would be compared by their values."""
        self._seen: set[int] = set()
        self._modules: list[weakref.ref[nn.Module]] = []
        self._classes: dict[type, dict[str, Any]] = {}
        """What the classes of modules and processors consist of, their bases included."""
        for path, module in model.named_modules():
            self._modules.append(weakref.ref(module, self._died))
            self._add_module(path or type(model).__name__, module, is_top=module is model)
        tensors = self.tensors()
        self._child_ids = self._ids_of_children()
        self._held_ids = self._ids_of_held()
        self._ids = list(map(id, tensors))
        self._addresses = self._addresses_of(tensors)
        # Together with the strides the number of elements fixes the shape.
        self._numbers = list(map(Tensor.numel, tensors))
        self._strides = list(map(Tensor.stride, tensors))
        self._dtypes = list(map(_dtype, tensors))
        del self._seen

    def _died(self, reference: object) -> None:
        self._gone = True
        # What is left of a removed module, its weights above all, must not wait for the next call.
        self._empty, self._live, self._copies, self._children, self._tables = [], [], [], [], []
        self._loose, self._holders = [], []

    def _add_module(self, path: str, module: nn.Module, is_top: bool) -> None:
        attributes = vars(module)
        self._refuse(self._why_not(path, module, attributes, is_top))
        self._add_class(module)
        self._add_class(attributes.get("processor"))
        for name in ("_parameters", "_buffers"):
            table = attributes[name]
            (self._tables if table else self._empty).append(table)
            for key, tensor in table.items():
                self._refuse(self._why_not_tensor(f"{path}.{key}", tensor))
        children = attributes["_modules"]
        (self._children if children else self._empty).append(children)
        self._track(path, attributes)
        for name, value in attributes.items():
            if name not in _NO_PART_OF_A_FORWARD and name not in ("_parameters", "_buffers", "_modules"):
                self._add(f"{path}.{name}", value, 0)

    def _add_class(self, thing: object) -> None:
        for base in type(thing).__mro__[:-1]:
            if base not in self._classes:
                self._classes[base] = dict(vars(base))

    def _add(self, path: str, value: Any, depth: int) -> None:
        """Track what can change inside the value of an attribute."""
        if isinstance(value, _PLAIN) or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._loose.append(value)
            return
        if isinstance(value, list | tuple | set | frozenset | dict | deque):
            self._track(path, value)
            for item in _items(value):
                self._add(path, item, depth + 1)
        elif isinstance(value, bytearray | array) or _is_ndarray(value):
            self._refuse(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which can change unseen")
        inside = None if type(value) is OrderedDict else getattr(value, "__dict__", None)
        if isinstance(inside, dict):
            self._track(path, inside)
            for name, item in inside.items():
                self._add(f"{path}.{name}", item, depth + 1)

    def _track(self, path: str, container: Any) -> None:
        if isinstance(container, tuple | frozenset):
            return  # it cannot change, and the attribute that holds it is compared
        if not container:
            self._empty.append(container)
            return
        self._live.append(container)
        plain = next(kind for kind in (dict, set, list, deque) if isinstance(container, kind))
        self._copies.append(plain(container))
        self._names.append(path)
        if any(isinstance(item, Tensor) for item in _items(container)):
            self._holders.append(container)

    def _refuse(self, reason: str | None) -> None:
        self.obstacle = self.obstacle or reason

    def _why_not(self, path: str, module: nn.Module, attributes: dict[str, Any], is_top: bool) -> str | None:
        hook = attributes.get("_hf_hook")
        if hook is not None:
            return f"{path} carries a hook of accelerate ({type(hook).__name__}), which may move weights"
        hooks = getattr(attributes.get("_diffusers_hook"), "hooks", None)
        if hooks:
            return f"{path} carries a hook of diffusers ({', '.join(hooks)})"
        if attributes.get("_compiled_call_impl") is not None or "_orig_mod" in attributes["_modules"]:
            return f"torch.compile runs {path}"
        if not is_top and (attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]):
            return f"{path} carries a forward hook, which a replay would not call"
        foreign = self._foreign(module)
        if foreign is not None:
            return f"{path}: {foreign}"
        for thing in (module, attributes.get("processor")):
            if thing is not None and type(thing).__module__.partition(".")[0] not in self._trusted:
                kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
                return f"{path} runs code of {kind}, which may do on the host what a replay would leave out"
        return None

    def _why_not_tensor(self, path: str, tensor: Tensor | None) -> str | None:
        if tensor is None:
            return None
        if type(tensor) is not Parameter and type(tensor) is not Tensor:
            return f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor"
        if tensor.device.type != self._device_type:
            return f"{path} is on {tensor.device.type}, not on {self._device_type}"
        if self.device is not None and tensor.device != self.device:
            return f"its weights are on {self.device} and on {tensor.device}"
        self.device = tensor.device
        return None

    def tensors(self) -> list[Tensor]:
        """Every weight and buffer as it is now, and the tensors that are plain attributes."""
        return [
            *(tensor for table in self._tables for tensor in table.values() if tensor is not None),
            *self._loose,
        ]

    def change(self) -> str | None:
        """What is not as it was, in a few words, or None."""
        if self._gone:
            return "a submodule was removed"
        try:
            return self._change()
        except (RuntimeError, TypeError, ValueError):
            # Things without a truth value were asked whether they are equal, or a weight has no address any more.
            return "an attribute that holds a tensor or an array changed"

    def _change(self) -> str | None:
        if any(self._empty):
            return "a hook, a weight or an attribute was added to a submodule"
        if self._live != self._copies:
            pairs = zip(self._live, self._copies, self._names, strict=True)
            return f"{next(name for live, copy, name in pairs if live != copy)} changed"
        if self._ids_of_held() != self._held_ids:
            return "an attribute that holds a tensor changed"
        if self._ids_of_children() != self._child_ids:
            return "a submodule was replaced"
        for kind, attributes in self._classes.items():
            if vars(kind) != attributes:
                return f"something was put on the class {kind.__name__}"
        tensors = self.tensors()
        if list(map(id, tensors)) != self._ids or self._addresses_of(tensors) != self._addresses:
            return "weights were replaced or moved"
        if (
            list(map(Tensor.numel, tensors)) != self._numbers
            or list(map(Tensor.stride, tensors)) != self._strides
            or list(map(_dtype, tensors)) != self._dtypes
        ):
            return "weights changed their shape, strides or type"
        return None

    def _ids_of_children(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._children))))

    def _ids_of_held(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(_items, self._holders))))

    @staticmethod
    def _addresses_of(tensors: list[Tensor]) -> list[int]:
        return list(map(Tensor.data_ptr, tensors))

    def versions(self) -> list[int]:
        """How often each weight was written in place, as far as torch counts that."""
        return _versions_of(self.tensors())


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _is_ndarray(value: Any) -> bool:
    """Whether it is an array of numpy, which need not be installed."""
    return any(base.__name__ == "ndarray" and base.__module__ == "numpy" for base in type(value).__mro__)


def _versions_of(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # some were made in inference mode and count nothing
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
