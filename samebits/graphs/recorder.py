"""Watches one plain forward to learn what a graph of it would read, and what would keep it from being one.

Tensors that a forward makes from numbers on the host would have to be copied to the GPU, which no capture can do. They
are the same at every call of a key, so a capture is given the ones that the watched call made.

A graph reads memory by address. The weights' addresses are compared before every replay; whatever else a forward
reads, a table of positions in some cache for example, has to stay alive as long as the graph. And what a forward
does on the host, a graph does not do again: it must neither look at a value on the host nor keep a tensor.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_FROM_THE_HOST = (torch.tensor, torch.as_tensor, torch.asarray)


def memory_of(tensor: Tensor) -> Any:
    """What two tensors have in common when they share memory."""
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates neither
    """A dispatch mode around one forward.

    Parameters
    ----------
    device_type : str
        Where the tensors of the forward are; any other is the host.
    guarded : iterable of Tensor
        Weights and inputs: their memory is looked after elsewhere.

    Attributes
    ----------
    reason : str or None
        The first thing that no graph can hold.
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str, guarded: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self._device_type = device_type
        self._guarded = {memory_of(tensor) for tensor in guarded}
        self._made: dict[Any, weakref.ref[Any]] = {}
        self._kept: dict[Any, Any] = {}

    @property
    def kept(self) -> tuple[Any, ...]:
        """The memory that was read, was there before and is not guarded."""
        return tuple(self._kept.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        for tensor in given:
            memory = memory_of(tensor)
            if memory not in self._guarded and memory not in self._kept and not self._is_made(memory):
                self._kept[memory] = tensor.untyped_storage()
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        for tensor in made:
            storage = tensor.untyped_storage()
            memory = storage._cdata
            if memory not in self._guarded and memory not in self._kept:
                self._made[memory] = weakref.ref(storage)
        if self.reason is None:
            self.reason = self._why_not(func, given, made)
        return result

    def _why_not(self, func: Any, given: list[Tensor], made: list[Tensor]) -> str | None:
        given_from, made_on = ({tensor.device.type for tensor in tensors} for tensors in (given, made))
        if self._device_type not in given_from | made_on:
            return None
        tags = getattr(func, "tags", ())
        if any(tag in tags for tag in _READS_BACK) and not _indexes_by_numbers(func, given):
            return f"the forward waits for a value on the host ({func})"
        # A host tensor beside a result of the GPU is no matter: attention returns the seed of its dropout like that.
        if given_from - {self._device_type}:
            return f"the forward takes a tensor from the host to the GPU ({func})"
        if func is torch.ops.aten._to_copy.default and made_on - {self._device_type}:
            return f"the forward waits for a value on the host ({func})"
        return None

    def _is_made(self, memory: Any) -> bool:
        # What is dead has left its address to somebody else.
        made = self._made.get(memory)
        return made is not None and made() is not None

    def keeps(self, output: Iterable[Tensor]) -> bool:
        """Whether a tensor that was made meanwhile is still alive and is not part of the result."""
        returned = {memory_of(tensor) for tensor in output}

        def left() -> bool:
            return any(memory not in returned and self._is_made(memory) for memory in self._made)

        if left():
            gc.collect()  # it may only be waiting in a cycle
        return left()

    def gave_back(self, output: Iterable[Tensor]) -> bool:
        """Whether a result lies in memory that was there before."""
        return not all(self._is_made(memory_of(tensor)) for tensor in output)


def _indexes_by_numbers(func: Any, given: list[Tensor]) -> bool:
    """Whether this is an index by positions, whose result has a known size, and not by a mask."""
    by_index = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
    return func in by_index and not any(index.dtype in (torch.bool, torch.uint8) for index in given[1:])


class HostConstants(TorchFunctionMode):
    """The tensors that a forward makes from numbers on the host, in order; then, while it is captured, these again.

    Parameters
    ----------
    device_type : str
        Where the tensors of interest are.
    """

    sees_only_factories = True
    """Our own kernels may run inside: this mode looks at no other call."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._made: list[tuple[str, Tensor, int]] = []
        self._played: int | None = None

    def played(self) -> HostConstants:
        """The same, from now on giving out what was made before."""
        self._played = 0
        return self

    def written(self) -> bool:
        """Whether the forward wrote to such a tensor: then it is another one at the next call."""
        return any(tensor._version != version for _, tensor, version in self._made)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FROM_THE_HOST or any(True for _ in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        # As text, because numbers that are equal may still differ (-0.0), and arrays do not say whether they are.
        call = repr((func, args, kwargs))
        if self._played is not None and self._played < len(self._made) and self._made[self._played][0] == call:
            self._played += 1
            return self._made[self._played - 1][1]
        made = func(*args, **kwargs)
        if self._played is None and made.device.type == self._device_type and not made.is_inference():
            self._made.append((call, made, made._version))
        return made


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
