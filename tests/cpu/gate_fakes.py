"""Ops whose kernels are written in Python, and a capture probe that says what a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samebits.certificate import StoredVerdict
from samebits.gate import Gate, Verdict
from samebits.ops._op import Args, Op, Outputs

Fill = Callable[[Args, tuple[Tensor, ...]], None]
"""A kernel's work: read the arguments, write the outputs."""


def chain(x: Tensor, scale: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
    """The reference of the fake op: two roundings, then perhaps a third."""
    y = x * (1 + scale) + eps
    return y if shift is None else y + shift


def fill_right(args: Args, outputs: tuple[Tensor, ...]) -> None:
    """What a right kernel does: eager's bits into the memory it was handed."""
    outputs[0].copy_(chain(*args))


def fill_zeros(args: Args, outputs: tuple[Tensor, ...]) -> None:
    """What a wrong kernel does."""
    outputs[0].zero_()


class FakeKernel:
    """A kernel made of Python, and everything that ever happened to it.

    Attributes
    ----------
    fill : callable
        What a launch writes; a test may change it at any time.
    prepared, launches, verified_launches : int
        How often it was built, run at all, and run without handed memory: as a verified call does.
    """

    def __init__(self, fill: Fill = fill_right) -> None:
        self.fill = fill
        self.prepare_error: Exception | None = None
        self.reason: Callable[..., str | None] = lambda *args: None
        self.reference: Callable[..., Outputs] = chain
        self.prepared = self.launches = self.verified_launches = self.references = 0
        self.seen: list[Args] = []
        self._lock = threading.Lock()

    def op(self, name: str = "scale_add") -> Op:
        """The record of an op with this kernel."""

        def reference(x: Tensor, scale: Tensor, eps: float, shift: Tensor | None = None) -> Outputs:
            self.references += 1
            return self.reference(x, scale, eps, shift)

        return Op(
            name=name,
            reference=reference,
            unsupported=lambda *args: self.reason(*args),
            prepare=self._prepare,
            allocate=_allocate,
            bytes_moved=lambda *args: 0,
            cases=(),
            sources=(),
        )

    def _prepare(self, *args: Any) -> Callable[..., Outputs]:
        if self.prepare_error is not None:
            raise self.prepare_error
        with self._lock:
            self.prepared += 1

        def launch(*args: Any, out: tuple[Tensor, ...] | None = None) -> Outputs:
            with self._lock:
                self.launches += 1
                self.verified_launches += out is None
                self.seen.append(args)
            outputs = _allocate(*args) if out is None else out
            self.fill(args, outputs)
            return outputs[0]

        return launch


def _allocate(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (torch.empty(x.shape, dtype=x.dtype, device=x.device),)


class FakeProbe:
    """Captures where a test says so, and counts how often it was asked."""

    def __init__(self) -> None:
        self.capturing_here = False
        self.capturing_elsewhere = False
        self.asked = 0
        self.inside_relaxed = 0

    def here(self, device: torch.device | None = None) -> bool:
        """Whether this thread captures."""
        self.asked += 1
        return self.capturing_here

    def anywhere(self) -> bool:
        """Whether any thread captures."""
        return self.capturing_here or self.capturing_elsewhere

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Count how often a verification protected captures of others."""
        self.inside_relaxed += 1
        yield


class FakeStore:
    """A store in memory, and how often each of its methods was called."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str, str], StoredVerdict] = {}
        self.gets = self.puts = self.flushes = 0

    def get(self, op: str, source: str, signature: str) -> StoredVerdict | None:
        """What was put."""
        self.gets += 1
        return self.known.get((op, source, signature))

    def put(self, verdict: StoredVerdict) -> None:
        """Keep it."""
        self.puts += 1
        self.known[verdict.key] = verdict

    def flush(self) -> None:
        """Count."""
        self.flushes += 1


def make_gate(
    *, strict: bool = False, probe: FakeProbe | None = None, made_up_elements: int = 0, **options: Any
) -> Gate:
    """A gate of its own, with kernels on any device; it compares calls alone, so that they can be counted."""
    return Gate(
        strict=strict,
        probe=probe or FakeProbe(),
        made_up_elements=made_up_elements,
        unavailable=lambda device, host: None,
        **options,
    )


def inputs(rows: int = 4, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of one call; calls with other ``rows`` have other signatures."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    return x, torch.randn(width, generator=generator).to(dtype), 0.125


def only(gate: Gate) -> Verdict:
    """The verdict of a gate that has exactly one."""
    (verdict,) = gate.verdicts()
    return verdict
