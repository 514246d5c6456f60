"""CUDA C++ source to a kernel that can be launched: compile, cache, check, launch. The only room that launches.

Two toolchains give the same :class:`Kernel`: NVRTC and cuda.core for a CUDA device, the user's C++ compiler behind a
shim for the CPU. Importing this module loads neither.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from samebits.errors import CompileError
from samebits.jit.kernel import BoundKernel, Kernel
from samebits.jit.maps import TensorMap, tensor_map
from samebits.jit.signature import Parameter, parse_parameters
from samebits.jit.source import Source, define_options
from samebits.jit.store import Cache, key

__all__ = [
    "BoundKernel",
    "Kernel",
    "Parameter",
    "TensorMap",
    "clear",
    "compile",
    "compile_to_cubin",
    "compile_to_ptx",
    "tensor_map",
    "unavailable",
]

_kernels: dict[tuple[object, ...], Kernel] = {}
_modules: dict[tuple[object, ...], Any] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}
_locks_lock = threading.Lock()


class Toolchain(Protocol):
    """What turns a source into machine code and machine code into kernels."""

    target: str
    """``sm_90`` or ``cpu``."""
    suffix: str

    def identity(self) -> str:
        """Everything besides source and constants that the machine code depends on."""
        ...

    def compile(self, source: Source, name: str, constants: Mapping[str, int | str]) -> bytes:
        """Compile all kernels of a source; ``name`` is for messages."""
        ...

    def load(self, name: str, content: bytes) -> Any:
        """Load machine code into this process."""
        ...

    def kernel(self, module: Any, name: str, parameters: tuple[Parameter, ...]) -> Kernel:
        """One kernel of loaded code."""
        ...


def compile(
    source: Path, name: str, constants: Mapping[str, int | str], device: torch.device, specific: bool = False
) -> Kernel:
    """Compile one kernel of a source for one device, or find it compiled.

    Parameters
    ----------
    source : Path
        A ``.cu`` file. What it includes in quotes lies beside it.
    name : str
        The kernel, declared there as ``extern "C" __global__ void name(...)``.
    constants : mapping of str to int or str
        Macros: ``{"WIDTH": 3072, "ELEMENT": "__nv_bfloat16"}``.
    device : torch.device
        A CUDA device, or the CPU for the host toolchain.
    specific : bool
        Whether the source uses instructions that only the device's own architecture has: ``sm_90a``, not ``sm_90``.

    Returns
    -------
    Kernel
        Loaded on the device. The same object for the same source text, name, constants and architecture.

    Raises
    ------
    CompileError
        The toolchain is missing or the source does not compile; its log is in the message.
    CompileInCaptureError
        The kernel is not loaded yet and a CUDA graph is being captured.
    """
    text = Source.read(source)
    if device.type == "cpu":
        from samebits.jit import cpu

        return _kernel(text, name, constants, cpu.HostToolchain())
    if device.type == "cuda":
        from samebits.jit import cuda

        index = torch.cuda.current_device() if device.index is None else device.index
        kernel = _kernel(text, name, constants, cuda.CudaToolchain(index, specific))
        kernel.load(index)
        return kernel
    raise CompileError(f"kernel {name}: there are kernels for CUDA devices and for the CPU, not for {device}.")


def _kernel(source: Source, name: str, constants: Mapping[str, int | str], toolchain: Toolchain) -> Kernel:
    """Find a kernel in memory, else its machine code on disk, else compile it."""
    code = (source.digest, define_options(constants), toolchain.target)
    kernel = _kernels.get((code, name))
    if kernel is not None:
        return kernel
    parameters = parse_parameters(source.text, name, constants)
    with _lock_for(code):
        kernel = _kernels.get((code, name))
        if kernel is None:
            module = _modules.get(code)
            if module is None:
                module = _modules[code] = _load(source, name, constants, toolchain, code)
            kernel = _kernels[code, name] = toolchain.kernel(module, name, parameters)
    return kernel


def _load(
    source: Source,
    name: str,
    constants: Mapping[str, int | str],
    toolchain: Toolchain,
    code: tuple[object, ...],
) -> Any:
    entry = key(toolchain.identity(), *map(str, code)) + toolchain.suffix
    stored = _cache().get(entry)
    if stored is not None:
        try:
            return toolchain.load(name, stored)
        except CompileError:
            # Intact, yet not loadable here: written by a machine that only looks the same. Ours replaces it.
            stored = None
    content = toolchain.compile(source, name, constants)
    _cache().put(entry, content)
    return toolchain.load(name, content)


def compile_to_ptx(source: Path, name: str, constants: Mapping[str, int | str], arch: str) -> str:
    """Compile for a real architecture, ``sm_90`` or ``sm_90a``, and return the PTX. Needs no driver, uses no cache.

    Raises
    ------
    CompileError
        As for :func:`compile`.
    """
    from samebits.jit import nvrtc

    text = Source.read(source)
    parse_parameters(text.text, name, constants)
    return nvrtc.compile_source(text, name, constants, arch)[1]


def compile_to_cubin(source: Path, name: str, constants: Mapping[str, int | str], arch: str) -> bytes:
    """Like :func:`compile_to_ptx`, but return the machine code."""
    from samebits.jit import nvrtc

    text = Source.read(source)
    parse_parameters(text.text, name, constants)
    return nvrtc.compile_source(text, name, constants, arch)[0]


def unavailable(device: torch.device, host: bool = False) -> str | None:
    """Why no kernel can run on a device, as a sentence without a full stop, or ``None``.

    Parameters
    ----------
    device : torch.device
    host : bool
        Whether the host toolchain may be used for tensors on the CPU.

    Notes
    -----
    The answer is found once per device and kept: it costs a dictionary look-up afterwards.
    """
    return _unavailable(device.type, device.index, host)


@cache
def _unavailable(kind: str, index: int | None, host: bool) -> str | None:
    if kind == "cuda":
        from samebits.jit import driver

        return driver.unavailable(torch.device(kind) if index is None else torch.device(kind, index))
    if kind == "cpu":
        if not host:
            return "the tensors are on the CPU, where kernels run only when the host toolchain is asked for (host=True)"
        from samebits import host as toolchain

        return toolchain.unavailable()
    return f"there are kernels for CUDA devices, and the tensors are on {kind}"


def clear() -> None:
    """Forget every compiled kernel and every answer of :func:`unavailable` of this process. For tests."""
    _kernels.clear()
    _modules.clear()
    _unavailable.cache_clear()


def _cache() -> Cache:
    from samebits.settings import settings

    return Cache(settings().cache_dir / "kernels")


def _lock_for(identity: tuple[object, ...]) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(identity, threading.Lock())


def _after_fork_in_child() -> None:
    """Forget the locks: a thread that held one while the process was forked is not there to let go of it."""
    global _locks_lock
    _locks_lock = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
