"""Loading and launching through cuda.core: the only place of this package that starts work on a GPU.

Where the host time of a launch goes: cuda.core converts the arguments and calls the driver; everything else is
prepared. Every argument travels as a Python int, cuda.core's shortest path: it stores the int's eight bytes and the
driver copies as many of them as the parameter has, so an int whose lowest bytes are the C value (see ``signature``)
is the value itself, whatever its type.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import torch

from samebits.errors import CompileError, CompileInCaptureError, KernelArgumentError, LaunchError
from samebits.jit import nvrtc
from samebits.jit.driver import STICKY, architecture, capturing, code_of, relaxed, runtime, sentence_of
from samebits.jit.kernel import BoundKernel, Dimensions, Kernel
from samebits.jit.signature import Parameter
from samebits.jit.source import Source

_SHARED_BYTES = 48 << 10
"""Shared memory, static and dynamic, that a block may use without the kernel having been allowed more."""
_ALL_INTS = frozenset({int}).issuperset
"""Whether an iterable of types holds int alone: the loop runs in C."""


class CudaToolchain:
    """NVRTC and cuda.core, for the architecture of one device.

    Parameters
    ----------
    device_index : int
    specific : bool
        Whether to compile for this architecture alone, with what no other has: ``sm_90a``.

    Raises
    ------
    CompileError
        NVRTC knows no architecture that runs there.
    """

    suffix = ".cubin"

    def __init__(self, device_index: int, specific: bool = False) -> None:
        self._device_index = device_index
        self.target = architecture(torch.device("cuda", device_index)) + ("a" if specific else "")

    def identity(self) -> str:
        """NVRTC's version, its flags and the CUDA headers."""
        return "\n".join((nvrtc.toolchain_identity(), *nvrtc.FLAGS))

    def compile(self, source: Source, name: str, constants: Mapping[str, int | str]) -> bytes:
        """Compile to a cubin, but not while a CUDA graph is being captured."""
        self._refuse_in_capture(name)
        return nvrtc.compile_source(source, name, constants, self.target)[0]

    def load(self, name: str, content: bytes) -> Any:
        """Load a cubin: cuda.core's object, which knows the kernel of this name."""
        self._refuse_in_capture(name)
        try:
            with relaxed():
                code = runtime().core.ObjectCode.from_cubin(content, name=name)
                code.get_kernel(name)  # cuda.core loads when the first kernel is asked for
        except Exception as error:
            if code_of(error) in STICKY:
                raise LaunchError(kernel=name, cause=sentence_of(error), sticky=True) from error
            raise CompileError(f"kernel {name} for {self.target} cannot be loaded: {sentence_of(error)}.") from error
        return code

    def kernel(self, module: Any, name: str, parameters: tuple[Parameter, ...]) -> CudaKernel:
        """One kernel of a loaded cubin."""
        return CudaKernel(name, parameters, self.target, module.get_kernel(name))

    def _refuse_in_capture(self, name: str) -> None:
        if capturing(self._device_index):
            raise CompileInCaptureError(kernel=name, target=f"cuda:{self._device_index}")


class CudaKernel(Kernel):
    """A kernel loaded through cuda.core. One object serves every device of its architecture."""

    def __init__(self, name: str, parameters: tuple[Parameter, ...], architecture: str, handle: Any) -> None:
        super().__init__(name, parameters)
        self.architecture = architecture
        self.handle = handle
        self.runtime = runtime()
        self._lock = threading.Lock()
        self._allowed: dict[int, int] = {}
        """Per device on which the kernel is loaded: the dynamic shared memory a block may ask for, in bytes."""
        self.functions: dict[int, Any] = {}
        """The driver's function, likewise."""
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Compare what was read from the source with what the machine code says of itself."""
        try:
            sizes = [info.size for info in self.handle.arguments_info]
        except Exception:  # drivers before CUDA 12.4 cannot tell
            return
        expected = [parameter.bytes for parameter in self.parameters]
        if sizes != expected:
            raise KernelArgumentError(
                f"kernel {self.name}: the source was read as parameters of {expected} bytes, but the machine code "
                f"has {sizes}. Write the parameter list in plain types."
            )

    def load(self, device_index: int, shared_bytes: int = 0) -> None:
        """Put the kernel on a device now and allow a block this much dynamic shared memory.

        Without it the driver loads at the first launch, which may fall into a capture.

        Raises
        ------
        CompileInCaptureError
            It is not loaded there and a CUDA graph is being captured.
        KernelArgumentError
            The device has another architecture.
        LaunchError
            The driver refused, for example because a block may not have that much shared memory.
        """
        with self._lock:
            if device_index not in self._allowed:
                if capturing(device_index):
                    raise CompileInCaptureError(kernel=self.name, target=f"cuda:{device_index}")
                actual = architecture(torch.device("cuda", device_index))
                if actual != self.architecture.removesuffix("a"):
                    raise self._error(
                        "device_index", f"a device of {self.architecture}", f"cuda:{device_index}, which is {actual}"
                    )
                self._allowed[device_index] = self._load_on(device_index)
            if shared_bytes > self._allowed[device_index]:
                self._allow(device_index, shared_bytes)
                self._allowed[device_index] = shared_bytes

    def ready_devices(self, shared_bytes: int) -> set[int]:
        """The devices on which a launch with this much dynamic shared memory needs no further step."""
        return {device for device, allowed in self._allowed.items() if allowed >= shared_bytes}

    def _load_on(self, device_index: int) -> int:
        """Load, and return how much dynamic shared memory a block may use without being allowed more."""
        driver = self.runtime.driver
        try:
            with torch.cuda.device(device_index), relaxed():
                # torch sets a device up lazily and per thread; the driver needs its context to be current.
                self.runtime.core.Device(device_index).set_current()
                status, function = driver.cuKernelGetFunction(self.handle.handle)
                self._check(status)
                self.functions[device_index] = function
                with contextlib.suppress(RuntimeError):  # a driver before CUDA 12.4 does not have it
                    self._check(driver.cuFuncLoad(function)[0])
            return _SHARED_BYTES - int(self.handle.attributes[device_index].shared_size_bytes)
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(kernel=self.name, cause=sentence_of(error), sticky=code_of(error) in STICKY) from error

    def _allow(self, device_index: int, shared_bytes: int) -> None:
        driver = self.runtime.driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        status, device = driver.cuDeviceGet(device_index)
        self._check(status)
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self.handle.handle, device)
        self._check(status, f" ({shared_bytes} bytes of dynamic shared memory a block were asked for)")

    def _check(self, status: Any, context: str = "") -> None:
        if status.value:
            raise LaunchError(kernel=self.name, cause=f"{status.name}{context}", sticky=status.name in STICKY)

    def _bind(
        self, grid: Dimensions, block: Dimensions, shared_bytes: int, template: tuple[int | None, ...]
    ) -> CudaBound:
        for device_index in tuple(self._allowed):
            self.load(device_index, shared_bytes)
        if any(parameter.kind == "tensor_map" for parameter in self.parameters):
            return CudaBoundWithMaps(self, grid, block, shared_bytes, template)
        return CudaBound(self, grid, block, shared_bytes, template)


class CudaBound(BoundKernel):
    """A kernel with its launch configuration and scalars; calling it is the hot path."""

    def __init__(
        self,
        kernel: CudaKernel,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        template: tuple[int | None, ...],
    ) -> None:
        super().__init__(kernel.name, template)
        self._kernel = kernel
        self._shared_bytes = shared_bytes
        self._ready = kernel.ready_devices(shared_bytes)
        self._config = kernel.runtime.core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
        # Attributes of self cost less than those of self._kernel.runtime, and a launch has microseconds.
        self._handle = kernel.handle
        self._launch = kernel.runtime.launch
        self._current_device = kernel.runtime.current_device
        self._current_stream = kernel.runtime.current_stream
        self._find_stream = kernel.runtime.find_stream

    def __call__(self, device_index: int, *pointers: int) -> None:
        if device_index not in self._ready:
            self._kernel.load(device_index, self._shared_bytes)
            self._ready.add(device_index)
        if self._current_device() != device_index:
            with torch.cuda.device(device_index):
                return self(device_index, *pointers)
        if len(pointers) != self._count or not _ALL_INTS(map(type, pointers)):
            self._check_pointers(pointers)
        raw = self._current_stream(device_index)
        stream = self._find_stream(raw) or self._kernel.runtime.wrap_stream(raw)
        tail = self._tail
        try:
            if tail is not None:
                self._launch(stream, self._config, self._handle, *pointers, *tail)
            else:
                self._start(stream, pointers)
        except Exception as error:
            self._explain(error, device_index, stream, pointers)
        return None

    def _start(self, stream: Any, pointers: tuple[int, ...]) -> None:
        self._launch(stream, self._config, self._handle, *self._arguments(pointers))

    def _explain(self, error: Exception, device_index: int, stream: Any, pointers: tuple[int, ...]) -> None:
        if code_of(error) == "CUDA_ERROR_INVALID_CONTEXT":
            # A thread that made no CUDA call yet has no context, although torch names a current device for it.
            try:
                self._kernel.runtime.core.Device(device_index).set_current()
                return self._start(stream, pointers)
            except Exception as again:
                error = again
        raise LaunchError(kernel=self.name, cause=sentence_of(error), sticky=code_of(error) in STICKY) from error


class CudaBoundWithMaps(CudaBound):
    """The same for a kernel that takes tensor maps by value: 128 bytes each, which cuda.core's ints cannot carry.

    The driver reads every argument at an address: a map's is what the caller hands in, that of anything else is a
    place of eight bytes beside it.
    """

    def __init__(
        self,
        kernel: CudaKernel,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        template: tuple[int | None, ...],
    ) -> None:
        super().__init__(kernel, grid, block, shared_bytes, template)
        self._tail = None  # every launch goes through _start
        self._size = (*grid, *block, shared_bytes)
        self._is_map = tuple(parameter.kind == "tensor_map" for parameter in kernel.parameters)
        self._slots = ctypes.c_int64 * len(template)
        self._addresses = ctypes.c_void_p * len(template)

    def _start(self, stream: Any, pointers: tuple[int, ...]) -> None:
        arguments = self._arguments(pointers)
        slots = self._slots(*arguments)
        first = ctypes.addressof(slots)
        addresses = self._addresses(
            *[
                argument if is_map else first + 8 * place
                for place, (argument, is_map) in enumerate(zip(arguments, self._is_map, strict=True))
            ]
        )
        function = self._kernel.functions[self._current_device()]
        driver = self._kernel.runtime.driver
        (status,) = driver.cuLaunchKernel(function, *self._size, stream.handle, ctypes.addressof(addresses), 0)
        if status.value:
            raise RuntimeError(f"{status.name}: cuLaunchKernel refused the launch")
