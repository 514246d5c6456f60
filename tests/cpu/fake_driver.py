"""A driver, torch's CUDA functions and cuda.core, as far as samebits.jit uses them, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits import capture, jit
from samebits.jit import driver as jit_driver


class DriverError(Exception):
    """What cuda.core raises, with its kind of message."""


class FakeCuda:
    """The state of an imagined machine, and everything that was asked of it.

    Attributes
    ----------
    capabilities : list of tuple of int
        One per device.
    launches : list of tuple
        ``(device, stream, grid, block, shared_bytes, arguments)`` of each launch.
    failures : list of str
        Messages that the next launches fail with.
    """

    def __init__(self) -> None:
        self.capabilities = [(9, 0), (9, 0), (8, 0)]
        self.device = 0
        self.streams = {0: 0, 1: 0, 2: 0}
        self.capturing = False
        self.has_context = True
        self.shared_limit = 227 << 10
        self.static_shared = 0
        self.parameter_sizes: list[int] | None = None
        self.launches: list[tuple[Any, ...]] = []
        self.failures: list[str] = []
        self.loads: list[int] = []
        self.loaded_cubins: list[bytes] = []
        self.bad_cubins: list[bytes] = []
        self.wrapped: list[int] = []
        self.allowed: list[int] = []
        self.relaxed_depth = 0

    # ---- cuda.core ----

    def from_cubin(self, content: bytes, *, name: str = "") -> Any:
        def get_kernel(kernel: str) -> Any:
            assert self.relaxed_depth or content in self.loaded_cubins, "loading may break another thread's capture"
            if content in self.bad_cubins:
                raise DriverError("CUDA_ERROR_INVALID_IMAGE: the device kernel image is invalid")
            self.loaded_cubins.append(content)
            return FakeKernel(self, kernel)

        return SimpleNamespace(get_kernel=get_kernel)

    def launch(self, stream: str, config: Any, kernel: Any, *arguments: int) -> None:
        if not self.has_context:
            raise DriverError("CUDA_ERROR_INVALID_CONTEXT: no context is bound")
        if self.failures:
            raise DriverError(self.failures.pop(0))
        self.launches.append((self.device, stream, config.grid, config.block, config.shmem_size, arguments))

    def from_handle(self, handle: int) -> str:
        self.wrapped.append(handle)
        return f"stream {handle}"

    def set_current(self) -> None:
        self.has_context = True

    # ---- cuda.bindings.driver ----

    def status(self, name: str = "CUDA_SUCCESS") -> Any:
        return SimpleNamespace(name=name, value=int(name != "CUDA_SUCCESS"))

    def load_function(self, function: Any) -> tuple[Any, ...]:
        assert self.relaxed_depth
        self.loads.append(self.device)
        return (self.status(),)

    def launch_kernel(self, function: Any, *size_stream_and_arguments: Any) -> tuple[Any, ...]:
        """``cuLaunchKernel``: reads every argument where its address says that it lies."""
        *size, shared_bytes, stream, addresses, extra = size_stream_and_arguments
        assert extra == 0
        if not self.has_context:
            return (self.status("CUDA_ERROR_INVALID_CONTEXT"),)
        if self.failures:
            return (self.status(self.failures.pop(0)),)
        assert self.parameter_sizes is not None
        places = (ctypes.c_uint64 * len(self.parameter_sizes)).from_address(addresses)
        arguments = tuple(map(ctypes.string_at, places, self.parameter_sizes))
        self.launches.append((self.device, stream, tuple(size[:3]), tuple(size[3:]), shared_bytes, arguments))
        return (self.status(),)

    def encode_map(self, *described: Any) -> tuple[Any, ...]:
        """``cuTensorMapEncodeTiled``: the address and the sizes, so that a test can tell maps apart."""
        if not self.has_context:
            return self.status("CUDA_ERROR_INVALID_CONTEXT"), None
        _, _, address, sizes, strides, box, *_ = described
        self.memory = (ctypes.c_uint64 * 16)(address, *sizes, *strides, *box)
        return self.status(), SimpleNamespace(getPtr=lambda: ctypes.addressof(self.memory))

    def set_attribute(self, attribute: str, value: int, kernel: Any, device: int) -> tuple[Any, ...]:
        if value + self.static_shared > self.shared_limit:
            return (self.status("CUDA_ERROR_INVALID_VALUE"),)
        self.allowed.append(value)
        return (self.status(),)

    # ---- torch ----

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        self.relaxed_depth += 1
        try:
            yield
        finally:
            self.relaxed_depth -= 1


class FakeStream(str):
    """cuda.core's object, which equals its name; ``handle`` is what the driver takes."""

    __slots__ = ()

    @property
    def handle(self) -> str:
        return str(self)


class Names:
    """An enumeration of the driver's: every member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeKernel:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name
        self.handle = f"kernel {name}"
        shared = SimpleNamespace(shared_size_bytes=cuda.static_shared)
        self.attributes = dict.fromkeys(range(len(cuda.capabilities)), shared)

    @property
    def arguments_info(self) -> list[Any]:
        if self._cuda.parameter_sizes is None:
            raise NotImplementedError("the driver is too old")
        return [SimpleNamespace(size=size) for size in self._cuda.parameter_sizes]


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let samebits.jit see an imagined machine with two devices of sm_90 and one of sm_80."""
    cuda = FakeCuda()
    runtime = jit_driver.Runtime.__new__(jit_driver.Runtime)
    runtime.core = SimpleNamespace(
        ObjectCode=SimpleNamespace(from_cubin=cuda.from_cubin),
        Stream=SimpleNamespace(from_handle=lambda handle: FakeStream(cuda.from_handle(handle))),
        LaunchConfig=SimpleNamespace,
        Device=lambda index: SimpleNamespace(set_current=cuda.set_current),
    )
    attributes = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max dynamic shared")
    runtime.driver = SimpleNamespace(
        cuKernelGetFunction=lambda kernel: (cuda.status(), kernel),
        cuFuncLoad=cuda.load_function,
        cuDeviceGet=lambda index: (cuda.status(), index),
        cuKernelSetAttribute=cuda.set_attribute,
        cuLaunchKernel=cuda.launch_kernel,
        cuTensorMapEncodeTiled=cuda.encode_map,
        cuuint64_t=int,
        cuuint32_t=int,
        **{
            f"CUtensorMap{what}": Names()
            for what in ("DataType", "Interleave", "Swizzle", "L2promotion", "FloatOOBfill")
        },
        CUfunction_attribute=attributes,
    )
    runtime.launch = cuda.launch
    runtime.current_device = lambda: cuda.device
    runtime.current_stream = lambda index: cuda.streams[index]
    legacy, per_thread = FakeStream("legacy"), FakeStream("per thread")
    runtime._streams = {0: legacy, 1: legacy, 2: per_thread}
    runtime.find_stream = runtime._streams.get

    def patch(target: Any, name: str, value: Callable[..., Any]) -> None:
        monkeypatch.setattr(target, name, value)

    from samebits.jit import cuda as jit_cuda

    for module in (jit_driver, jit_cuda):
        patch(module, "runtime", lambda: runtime)
        patch(module, "relaxed", cuda.relaxed)
    patch(torch.cuda, "device", cuda.on_device)
    patch(torch.cuda, "current_device", lambda: cuda.device)
    patch(torch.cuda, "device_count", lambda: len(cuda.capabilities))
    patch(torch.cuda, "is_available", lambda: bool(cuda.capabilities))
    patch(torch.cuda, "get_device_name", lambda device: "an imagined GPU")
    patch(torch.cuda, "get_device_capability", lambda device: cuda.capabilities[getattr(device, "index", device) or 0])
    patch(capture, "capturing_here", lambda device=None: cuda.capturing)
    patch(capture, "capturing_anywhere", lambda: cuda.capturing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    jit.clear()
    return cuda
