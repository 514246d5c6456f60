"""Puts a forward on ONE module instance, under every hook that is already there, and takes it off again.

A module's ``forward`` is often a chain: accelerate and diffusers add a hook by storing the present forward and
setting a wrapper in its place. Ours goes to the *bottom* of that chain, right where the class's own forward
was, so that every hook keeps seeing the calls it saw before. Hooks that come later wrap ours as they would
wrap the original. To undo, the chain is walked again: wherever ours ended up by then, the original takes its
place back. Classes and module globals are never written to.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from samebits.capture import tracing

Function = Callable[..., Any]

_has_any_global_hook: Callable[[], bool] = _module._has_any_global_hook

_STATE = "_samebits"
"""Where a patched instance keeps its ``Placed``: a plain attribute, no parameter, buffer or submodule."""
_LONGEST_CHAIN = 256
"""More wrappers than this on one module is a cycle, not a chain."""


class Placed:
    """What a patched module knows: the function that answers for its forward, and who asked for it.

    A deep copy or a pickle holds ``None`` in its place. A copy is therefore eager, shares nothing with the module
    it came from, and loading it does not need samebits.
    """

    __slots__ = ("owner", "replacement")

    def __init__(self, replacement: Function, owner: object) -> None:
        self.replacement = replacement
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_DISPATCHERS: dict[Function, Function] = {}
"""By the class's own forward, which Dynamo wants to see as a plain function."""


def _dispatcher(theirs: Function) -> Function:
    """The function that stands for ``theirs``, a class's own forward, on patched instances.

    One for all instances of a class and bound to the instance like any method: Dynamo then guards on the function
    alone and compiles a repeated block once, as it does without us. The first question is the only one that it
    traces, and it knows the answer: a traced graph is diffusers' own. Process-wide module hooks want to see every
    submodule's call, so they get the class's forward too.
    """

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return theirs(self, *args, **kwargs)
        placed = self.__dict__.get(_STATE)
        if placed is None or _has_any_global_hook() or tracing():
            return theirs(self, *args, **kwargs)
        return placed.replacement(*args, **kwargs)

    if theirs not in _DISPATCHERS:  # inspect.signature follows the wrapping to the class's own signature
        _DISPATCHERS[theirs] = functools.update_wrapper(forward, theirs)
    return _DISPATCHERS[theirs]


def _is_ours(function: Any) -> bool:
    return isinstance(function, types.MethodType) and any(function.__func__ is ours for ours in _DISPATCHERS.values())


@dataclass(frozen=True)
class _Slot:
    """One link of a chain: an attribute of ``holder`` that holds the next function to call."""

    holder: Any
    name: str

    def get(self) -> Any:
        return self.holder.__dict__.get(self.name)

    def set(self, function: Function) -> None:
        self.holder.__dict__[self.name] = function

    def clear(self) -> None:
        self.holder.__dict__.pop(self.name, None)


def _inner_slot(module: nn.Module, wrapper: Any) -> _Slot | None:
    """The slot that a known hook's wrapper calls next, or ``None`` if this is no known hook of ``module``.

    accelerate's wrapper calls ``module._old_forward``. The wrapper of diffusers' ``HookRegistry`` closes over a
    ``HookFunctionReference`` and calls its ``original_forward`` where the hook brings a forward of its own, else
    its ``forward``.
    """
    if not isinstance(wrapper, functools.partial) or not wrapper.args or wrapper.args[0] is not module:
        return None
    function = wrapper.func
    if not isinstance(function, types.FunctionType) or function.__name__ != "new_forward":
        return None
    if function.__module__ == "accelerate.hooks" and "_old_forward" in module.__dict__:
        return _Slot(module, "_old_forward")
    if function.__module__ == "diffusers.hooks.hooks":
        for cell in function.__closure__ or ():
            reference = cell.cell_contents
            if hasattr(reference, "original_forward") and hasattr(reference, "forward"):
                return _Slot(reference, "forward" if reference.original_forward is None else "original_forward")
    return None


def _chain(module: nn.Module) -> Iterator[_Slot]:
    """The slots of a module's forward, from the outermost hook to the innermost function."""
    slot = _Slot(module, "forward")
    for _ in range(_LONGEST_CHAIN):
        yield slot
        inner = _inner_slot(module, slot.get())
        if inner is None:
            return
        slot = inner


def _is_own(module: nn.Module, function: Any) -> bool:
    """Whether ``function`` is nothing but the forward that the module's class defines."""
    if function is None:
        return True
    return (
        isinstance(function, types.MethodType)
        and function.__self__ is module
        and function.__func__ is type(module).forward
    )


def find(module: nn.Module) -> Placed | None:
    """What is placed on this module, or ``None`` where nothing is."""
    placed: Placed | None = module.__dict__.get(_STATE)
    return placed


def obstacle(module: nn.Module) -> str | None:
    """Why no forward can be put on this module: a sentence, or ``None`` if one can.

    A forward that somebody set on the instance is theirs and wins over ours.
    """
    *_, last = _chain(module)
    function = last.get()
    if _is_own(module, function) or _is_ours(function):
        return None
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"its forward was replaced on the instance by {name}, which wins over ours"


class Patch:
    """One forward that was put on one module, and the way back.

    Parameters
    ----------
    module : torch.nn.Module
        The instance to patch. Its class and all other instances stay as they are.
    write : callable
        ``write(original)`` returns the function to run instead of ``original``, with the same signature.
    owner : object
        Whoever asked for it; ``find(module).owner`` gives it back.

    Raises
    ------
    ValueError
        The module's forward cannot be patched; ``obstacle(module)`` says why.
    """

    def __init__(self, module: nn.Module, write: Callable[[Function], Function], owner: object = None) -> None:
        reason = obstacle(module)
        if reason is not None:
            raise ValueError(f"{type(module).__name__} cannot be patched: {reason}.")
        if find(module) is not None:
            raise ValueError(f"{type(module).__name__} is patched already: undo that patch first.")
        *_, slot = _chain(module)
        # In a copy of a patched module our own forward is there, and there is no reason to leave it behind.
        self._was_absent = slot.get() is None or _is_ours(slot.get())
        original = types.MethodType(type(module).forward, module)
        placed = Placed(write(original), owner)
        module.__dict__[_STATE] = placed
        slot.set(types.MethodType(_dispatcher(type(module).forward), module))
        self._module: nn.Module | None = module

    def undo(self) -> str | None:
        """Take our forward off again. A second call does nothing.

        Returns
        -------
        str or None
            ``None`` where the module is as if it had never been patched. A sentence where a wrapper that we
            do not know may still hold our forward: it passes every call on to the class's from now on.
        """
        module, self._module = self._module, None
        if module is None:
            return None
        module.__dict__.pop(_STATE, None)
        for slot in _chain(module):
            if not _is_ours(slot.get()):
                continue
            if self._was_absent and slot.holder is module and slot.name == "forward":
                slot.clear()
            else:
                slot.set(types.MethodType(type(module).forward, module))
            return None
        outermost = module.__dict__.get("forward")
        if _is_own(module, outermost):
            return None  # somebody put the class's forward back: nothing of ours is left
        name = getattr(outermost, "__qualname__", type(outermost).__qualname__)
        return f"a forward that came later ({name}) may still call ours, which now only passes on to the class's own"
