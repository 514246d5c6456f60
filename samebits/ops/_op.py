"""The record that every op is: one fused chain, its eager reference and what it takes.

Tests, the gate, the proof, the benchmarks and the documentation tables read this record; none of them
knows an op by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

Args = tuple[Any, ...]
"""The positional arguments of one call: tensors, ``None``, ints, floats and strings."""

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
"""What a chain returns: one tensor or a tuple of tensors."""


Variant = tuple[str, dict[str, int | str], bool]
"""A kernel as the tests compile it: its name, its constants, and whether its arithmetic owes an FMA."""


Launcher = Callable[..., Outputs]
"""A kernel made ready for one signature: everything but the pointers is already decided.

``launcher(*args, out=None)`` runs it on arguments of the signature that it was prepared for and returns its outputs.
With ``out`` the given tensors are filled instead of fresh ones: the gate hands in poisoned memory, the tests canaries.
"""


@dataclass(frozen=True)
class Case:
    """One input of an op, from which tests, proofs and benchmarks are made."""

    name: str
    """What a table prints, for example ``4096x3072``."""
    dtype: torch.dtype
    rows: int
    """How many rows the reduction of this case has, counted over all inputs."""
    build: Callable[[torch.device, int], Args]
    """``build(device, seed)`` returns fresh arguments; the same seed gives the same values."""


@dataclass(frozen=True)
class Op:
    """One fused chain: the eager reference, the kernel, what it does not take, its cases."""

    name: str
    reference: Callable[..., Outputs]
    """The eager chain, spelled as diffusers spells it. It is the definition of right."""
    unsupported: Callable[..., str | None]
    """A sentence that says why these arguments never reach the kernel, or ``None``.

    Decided by the signature alone: dtypes, shapes, strides, alignment, scalars. Where eager's order of summation was
    never recorded for this torch and GPU, that order too, which is then asked once; so no call of it may be in a graph
    capture.
    """
    prepare: Callable[..., Launcher]
    """Compiles (or finds) the kernel for the signature of these arguments and plans its launch."""
    allocate: Callable[..., tuple[torch.Tensor, ...]]
    """Uninitialised outputs for these arguments, always as a tuple."""
    bytes_moved: Callable[..., int]
    """The fewest bytes one call must read and write: every input once, every output once."""
    cases: tuple[Case, ...]
    sources: tuple[Path, ...]
    """The files whose text decides the kernel's bits: the ``.cu``, what it includes, the ``.py``."""
    contract: str = "exact"
    headline: tuple[str, ...] = field(default=())
    """Names of the cases that the benchmark times; empty means all of them."""
    library: str = ""
    """``"gemm"`` or ``"attention"`` where the kernel is a call into one of torch's libraries: it has no ``.cu``, its
    launches count as what they are, and its time is not one of moving bytes. Empty for a kernel of ours."""
    is_product: bool = False
    """Whether the kernel is of ours and holds a matrix product: its launches count as products, its time is not one of
    moving bytes, and its sums are the library's wherever that does not choose another order."""
    architectures: tuple[str, ...] = ()
    """What the kernel is written for, ``sm_90a``; empty where it is for every one."""

    def is_for(self, device: torch.device) -> bool:
        """Whether the kernel is written for this device's architecture; on a CPU every one can run."""
        if not self.architectures or device.type != "cuda":
            return True
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}a" in self.architectures

    @property
    def moves_bytes(self) -> bool:
        """Whether the time of a call is that of moving its bytes."""
        return not self.library and not self.is_product

    @cached_property
    def source_hash(self) -> str:
        """SHA-256 over the sources, shortened to 16 hexadecimal digits. A changed kernel has another one."""
        digest = hashlib.sha256()
        for path in self.sources:
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]
