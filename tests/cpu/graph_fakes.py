"""Graphs without a GPU: a tape of torch calls that is played again on the same memory with the same numbers.

A tape bakes in what a CUDA graph bakes in: addresses, Python numbers, and which calls there were. What its forward
did on the host it does not do again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.graphs.calls import Place
from samebits.graphs.recorder import memory_of


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def aliased(value: Any) -> Any:
    """The same with every tensor replaced by another one on its present memory."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(aliased(item) for item in value)
    return {name: aliased(item) for name, item in value.items()} if isinstance(value, dict) else value


NOT_PERMITTED = "operation not permitted when stream is capturing"


class NoCopiesFromTheHost(TorchFunctionMode):
    """Numbers on the host cannot become a tensor on the GPU during a capture."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor):
            raise RuntimeError(NOT_PERMITTED)
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records calls, and plays them again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.freed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(NOT_PERMITTED)
        kept = aliased((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        given = {memory_of(tensor) for tensor in tensors_in(kept)}
        made = [None if memory_of(tensor) in given else tensor for tensor in tensors_in(result)]
        self.calls.append((func, *kept, made))
        return result

    def replay(self) -> None:
        """Do every call again, into the memory of its first result."""
        assert not self.freed
        for func, args, kwargs, made in self.calls:
            for old, new in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)

    def free(self) -> None:
        """Forget everything."""
        assert not self.freed
        self.freed = True
        self.calls = []


class Stale(Tape):
    """A wrong graph: its results stay those of the capture."""

    def replay(self) -> None:
        """Do nothing."""


@dataclass
class TapePool:
    """Tapes that share nothing."""

    backend: TapeBackend
    closed: bool = False

    def record(self, run: Callable[[], Any]) -> tuple[Tape, Any]:
        """Record a tape of ``run``."""
        self.backend.attempts += 1
        if self.backend.error is not None:
            raise self.backend.error
        with NoCopiesFromTheHost(), self.backend.kind() as tape:
            result = run()
        self.backend.tapes.append(tape)
        return tape, result

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Tapes need no order."""
        assert not self.closed
        yield

    def wait(self) -> None:
        """Tapes run at once."""

    def bytes(self) -> int:
        """As many as the test says, for each tape."""
        return self.backend.bytes_each * len(self.backend.live)

    def close(self) -> None:
        """Nothing may be left."""
        assert not self.closed
        assert not self.backend.live
        self.closed = True


class TapeBackend:
    """Captures on the CPU, and does what a test asks for.

    Attributes
    ----------
    error : Exception or None
        What a capture raises.
    kind : type
        What a capture makes.
    """

    place = Place("cpu", 64)  # what torch aligns to on the CPU

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.kind: type[Tape] = Tape
        self.bytes_each, self.limit = 1000, 1 << 40
        self.attempts = 0
        self.here = self.anywhere = False
        self.tapes: list[Tape] = []
        self.pools: list[TapePool] = []

    @property
    def live(self) -> list[Tape]:
        """The tapes that were not freed."""
        return [tape for tape in self.tapes if not tape.freed]

    def capturing(self) -> bool:
        """Whether the test says so."""
        return self.here

    def capturing_anywhere(self) -> bool:
        """Whether the test says so."""
        return self.anywhere

    def pool(self, device: torch.device) -> TapePool:
        """A new pool, which the backend remembers."""
        self.pools.append(TapePool(self))
        return self.pools[-1]

    def random_state(self, device: torch.device) -> tuple[Tensor, ...]:
        """Of the CPU's generator."""
        return (torch.get_rng_state(),)

    def most_bytes(self, device: torch.device) -> int:
        """As the test says."""
        return self.limit


class OpenGate:
    """A gate that verified everything, or what a test says."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.unsettled_calls = self.withdrawals = 0

    def stopped(self) -> str | None:
        """Why the gate is stopped."""
        return self.reason

    def unsettled(self) -> int:
        """Calls that were not verified."""
        return self.unsettled_calls

    def withdrawn(self) -> int:
        """Verdicts that were withdrawn."""
        return self.withdrawals
