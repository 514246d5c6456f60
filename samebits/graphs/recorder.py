"""Watches one plain forward to learn what a graph of it would read, and what would keep it from being one.

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
from torch.utils._python_dispatch import TorchDispatchMode

_READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


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
            self.reason = self._why_not(func, {tensor.device.type for tensor in (*given, *made)})
        return result

    def _why_not(self, func: Any, devices: set[str]) -> str | None:
        if self._device_type not in devices:
            return None
        tags = getattr(func, "tags", ())
        if any(tag in tags for tag in _READS_BACK):
            return f"the forward waits for a value on the host ({func})"
        if len(devices) > 1:
            return f"the forward mixes tensors of the host and the GPU ({func})"
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
