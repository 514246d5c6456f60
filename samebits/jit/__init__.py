"""CUDA C++ source to a kernel that can be launched: compile, cache, check, launch. The only room that launches.

Two toolchains give the same :class:`Kernel`: NVRTC and cuda.core for a CUDA device, the user's C++ compiler behind a
shim for the CPU. Importing this module loads neither.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from samebits.errors import CompileError, CompileInCaptureError
from samebits.jit.kernel import BoundKernel, Kernel
from samebits.jit.signature import Parameter, parse_parameters
from samebits.jit.source import Source, define_options
from samebits.jit.store import Cache, key

if TYPE_CHECKING:
    from samebits.jit.cuda import CudaKernel

__all__ = [
    "BoundKernel",
    "Kernel",
    "Parameter",
    "clear",
    "compile",
    "compile_to_cubin",
    "compile_to_ptx",
    "unavailable",
]

_kernels: dict[tuple[object, ...], Kernel] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}
_locks_lock = threading.Lock()


def compile(source: Path, name: str, constants: Mapping[str, int | str], device: torch.device) -> Kernel:
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
        return _compile_for_cpu(text, name, constants)
    if device.type == "cuda":
        return _compile_for_cuda(text, name, constants, device)
    raise CompileError(f"kernel {name}: there are kernels for CUDA devices and for the CPU, not for {device}.")


def _compile_for_cuda(
    source: Source, name: str, constants: Mapping[str, int | str], device: torch.device
) -> CudaKernel:
    from samebits.jit import cuda, nvrtc

    index = torch.cuda.current_device() if device.index is None else device.index
    architecture = cuda.architecture(torch.device("cuda", index))
    identity = (source.digest, name, define_options(constants), architecture)
    kernel = _kernels.get(identity)
    if kernel is None:
        if cuda.capturing(index):
            raise CompileInCaptureError(kernel=name, target=f"cuda:{index}")
        with _lock_for(identity):
            kernel = _kernels.get(identity)
            if kernel is None:
                parameters = parse_parameters(source.text, name, constants)
                entry = key(nvrtc.toolchain_identity(), *nvrtc.FLAGS, *map(str, identity)) + ".cubin"
                cubin = _cache().get(entry)
                if cubin is None:
                    cubin, _ = nvrtc.compile_source(source, name, constants, architecture)
                    _cache().put(entry, cubin)
                kernel = cuda.CudaKernel(name, parameters, architecture, cubin)
                _kernels[identity] = kernel
    assert isinstance(kernel, cuda.CudaKernel)
    kernel.load(index)
    return kernel


def _compile_for_cpu(source: Source, name: str, constants: Mapping[str, int | str]) -> Kernel:
    from samebits.jit import cpu

    identity = (source.digest, name, define_options(constants), "cpu")
    with _lock_for(identity):
        kernel = _kernels.get(identity)
        if kernel is None:
            parameters = parse_parameters(source.text, name, constants)
            entry = key(cpu.toolchain_identity(), *map(str, identity)) + ".so"
            content = _cache().get(entry)
            if content is None:
                content = cpu.compile_source(source, name, constants)
                _cache().put(entry, content)
            kernel = cpu.HostKernel(name, parameters, content)
            _kernels[identity] = kernel
    return kernel


def compile_to_ptx(source: Path, name: str, constants: Mapping[str, int | str], arch: str) -> str:
    """Compile for a real architecture such as ``sm_90`` and return the PTX. Needs no driver and uses no cache.

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
        from samebits.jit import cuda

        return cuda.unavailable(torch.device(kind) if index is None else torch.device(kind, index))
    if kind == "cpu":
        if not host:
            return "the tensors are on the CPU, where kernels run only when the host toolchain is asked for (host=True)"
        from samebits import host as toolchain

        return toolchain.unavailable()
    return f"there are kernels for CUDA devices, and the tensors are on {kind}"


def clear() -> None:
    """Forget every compiled kernel and every answer of :func:`unavailable` of this process. For tests."""
    _kernels.clear()
    _unavailable.cache_clear()


def _cache() -> Cache:
    from samebits.settings import settings

    return Cache(settings().cache_dir / "kernels")


def _lock_for(identity: tuple[object, ...]) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(identity, threading.Lock())
