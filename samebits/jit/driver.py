"""What torch, cuda.core and the driver know: devices, streams, captures, the names of errors."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from samebits.errors import CompileError
from samebits.jit import nvrtc

OLDEST_CAPABILITY = (8, 0)
_MAX_STREAMS = 1024

STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "EXTERNAL_DEVICE",
        "CONTAINED",
        "MPS_CLIENT_TERMINATED",
        "UNKNOWN",
    )
)
"""The driver's errors after which the context, and with it every CUDA call of the process, is lost."""


class Runtime:
    """The functions of torch and cuda.core that a launch uses, looked up once.

    Attributes
    ----------
    launch : callable
        ``cuda.core.launch``.
    current_device : callable
        ``() -> int``.
    current_stream : callable
        ``(device_index) -> int``, the raw handle.
    """

    def __init__(self) -> None:
        try:
            import cuda.core
            from cuda.bindings import driver

            legacy, per_thread = cuda.core.LEGACY_DEFAULT_STREAM, cuda.core.PER_THREAD_DEFAULT_STREAM
            self.launch: Callable[..., None] = cuda.core.launch
        except Exception as error:  # a missing shared library raises its own class, an old version lacks a name
            raise CompileError(
                f"cuda-core cannot be used: {error}. `pip install 'cuda-core>=1.2'` brings what is needed."
            ) from error
        self.core: Any = cuda.core
        self.driver: Any = driver
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._streams: dict[int, Any] = {
            # torch's handle 0 always means the legacy default stream; to the driver it means whichever of the two
            # the calling library was built or told to use.
            0: legacy,
            1: legacy,
            2: per_thread,
        }
        self.find_stream = self._streams.get

    def wrap_stream(self, handle: int) -> Any:
        """cuda.core's object for a raw handle that was not seen before."""
        if len(self._streams) > _MAX_STREAMS:  # external streams may come and go without end
            for known in [known for known in self._streams if known > 2]:
                self._streams.pop(known, None)
        stream = self.core.Stream.from_handle(handle)
        self._streams[handle] = stream
        return stream


_making = threading.Lock()


def runtime() -> Runtime:
    """The one runtime of this process.

    Made by one thread while others wait: one that finds cuda.core half imported by another takes it for broken.
    """
    with _making:
        return _runtime()


@cache
def _runtime() -> Runtime:
    return Runtime()


def _after_fork_in_child() -> None:
    """Forget the lock: a thread that held it while the process was forked is not there to let go of it."""
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def capturing(device_index: int) -> bool:
    """Whether this thread or another captures a CUDA graph: loading a module would break that capture."""
    from samebits import capture

    return capture.capturing_here(torch.device("cuda", device_index)) or capture.capturing_anywhere()


def relaxed() -> AbstractContextManager[None]:
    """A context in which loading does not break a capture that another thread begins after we asked."""
    from samebits import capture

    return capture.default_probe().relaxed()


def architecture(device: torch.device) -> str:
    """The ``sm_XX`` that kernels for this device are compiled for."""
    return nvrtc.architecture_for(*torch.cuda.get_device_capability(device))


def unavailable(device: torch.device) -> str | None:
    """Why no kernel can run on a CUDA device, as a sentence, or ``None``."""
    if torch.version.cuda is None:
        build = "ROCm" if getattr(torch.version, "hip", None) else "CPU"
        return f"this is a {build} build of torch {torch.__version__}; the kernels need a CUDA build"
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device: no NVIDIA GPU, or no driver for it"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"there is no {device}: torch sees {count} CUDA device{'s' if count != 1 else ''}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            f"the kernels need {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer"
        )
    if sys.byteorder != "little":
        return "arguments are handed to the driver in little-endian order, which this machine does not have"
    try:
        runtime()
        nvrtc.include_folder()
        nvrtc.architecture_for(*capability)
    except CompileError as error:
        return str(error).rstrip(".")
    return None


def code_of(error: Exception) -> str:
    """The driver's name for an error, which cuda.core puts into the message; empty where there is none."""
    found = re.search(r"CUDA_ERROR_\w+", str(error))
    return found[0] if found else ""


def sentence_of(error: Exception) -> str:
    """An error's text on one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")
