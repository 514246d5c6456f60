"""Who is listening: is torch code being traced, and is a CUDA graph being captured, here or in any thread?

The gate must not verify while a graph is captured: verifying synchronises, and loading a kernel does too. The
driver answers the question per stream only, so :class:`CudaProbe` asks it about every stream that torch can hand
out. What it cannot see, a stream made by another library without torch, is protected by
:meth:`CudaProbe.relaxed`: calls made inside it do not invalidate a capture of another thread.

A leaf: it knows torch and the CUDA driver, and nothing of samebits.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.utils._device import DeviceContext

# torch annotates neither of these.
_cuda: Any = torch.cuda
_modes: Any = torch.overrides._get_current_function_mode_stack

# torch keeps one pool of streams per priority and clamps what it does not have, so a few too many cost nothing.
_PRIORITIES = range(0, -8, -1)
_POOL_LIMIT = 4096


class CaptureProbe(Protocol):
    """What the gate asks about captures. Tests hand in their own."""

    def here(self, device: torch.device | None = None) -> bool:
        """Say whether this thread's current stream on ``device`` is capturing."""
        ...

    def anywhere(self) -> bool:
        """Say whether any stream of the process is capturing, as far as can be known."""
        ...

    def relaxed(self) -> AbstractContextManager[None]:
        """Keep what is done inside from invalidating a capture that another thread begins meanwhile."""
        ...


def interception() -> str | None:
    """Name what stands between this thread's torch calls and eager execution, or return ``None``.

    Tracers, functorch transforms and dispatch modes see every torch call. A kernel launched beside torch would be
    invisible to them, so inside one the reference must run. A default device is no such thing: it only adds a
    ``device=`` to factory calls. A function mode of ours says so of itself by ``sees_only_factories``.
    """
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export is tracing"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a torch dispatch mode is active"
    if torch._C._len_torch_function_stack() > 0:
        for mode in _modes():
            if type(mode) is not DeviceContext and not getattr(mode, "sees_only_factories", False):
                return "a torch function mode is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return None


def tracing() -> bool:
    """Say whether torch calls of this thread are being traced, transformed or intercepted."""
    return interception() is not None


def forked() -> bool:
    """Say whether this process was forked after CUDA was initialised: then it must never touch CUDA."""
    return bool(_cuda._is_in_bad_fork())


def forked_from(device: torch.device | None) -> bool:
    """Say whether ``device`` is one that only the parent of this process may touch."""
    return device is not None and device.type == "cuda" and forked()


def capturing(probe: CaptureProbe, device: torch.device | None) -> bool:
    """Say whether a graph is being captured: by this thread on ``device``, or by any."""
    return probe.here(device) or probe.anywhere()


class CudaProbe:
    """The answers of the CUDA driver. Without an initialised CUDA every answer is no, at no cost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, frozenset[int]] = {}
        self._private: dict[int, frozenset[int]] = {}

    def private_stream(self, device: int) -> Any:
        """Return a new stream that torch hands out to nobody; this probe asks about it too. It lives for ever.

        torch keeps one workspace of the GEMM library per stream, and a graph keeps using the one of the stream it
        was captured on. On a stream of the pool, work of somebody else could use it at the same time.
        """
        driver = _driver()
        if driver is None:
            return _cuda.Stream(device)
        with _context(driver, device) as current:
            # Not a blocking stream: those wait for the legacy default stream, and break its users while capturing.
            status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING) if current else (1, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return _cuda.Stream(device)
        handle = int(stream)
        with self._lock:
            self._private[device] = self._private.get(device, frozenset()) | {handle}
        return _cuda.ExternalStream(handle, device=device)

    def here(self, device: torch.device | None = None) -> bool:
        """Say whether this thread's current stream on ``device`` (default: the current device) is capturing."""
        if not _cuda.is_initialized():
            return False
        if device is None or device.type != "cuda":
            return bool(_cuda.is_current_stream_capturing())
        with _cuda.device(device):
            return bool(_cuda.is_current_stream_capturing())

    def anywhere(self) -> bool:
        """Say whether a stream of torch's pools, a default stream or a blocking stream of anybody captures.

        Only devices whose context exists are asked: asking must not create one. Any answer but a clear no
        counts as a capture. It costs a driver call per stream, so it is asked before a verification and never
        on the way of a verified call.
        """
        if not _cuda.is_initialized():
            return False
        driver = _driver()
        if driver is None:
            return True
        with self.relaxed():
            return any(self._device_captures(driver, device) for device in range(_cuda.device_count()))

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Put this thread into the driver's relaxed capture mode and back.

        In the default mode an allocation or a module load of this thread would invalidate a capture that another
        thread has open in global mode, which is the mode of ``torch.cuda.graph``.
        """
        driver = _driver() if _cuda.is_initialized() else None
        if driver is None:
            yield
            return
        status, before = driver.cuThreadExchangeStreamCaptureMode(
            driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
        try:
            yield
        finally:
            if status == driver.CUresult.CUDA_SUCCESS:
                driver.cuThreadExchangeStreamCaptureMode(before)

    def _device_captures(self, driver: Any, device: int) -> bool:
        good, none = driver.CUresult.CUDA_SUCCESS, driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        status, _flags, active = driver.cuDevicePrimaryCtxGetState(device)
        if status == good and not active:
            return False
        handles = {_cuda.current_stream(device).cuda_stream, *self._pool(device), *self._private.get(device, ())}
        capture_stream = getattr(_cuda.graph, "default_capture_stream", None)
        if capture_stream is not None:
            handles.add(capture_stream.cuda_stream)
        with _context(driver, device) as current:
            # The legacy default stream is asked as well: the driver refuses to answer (which counts as yes)
            # while any blocking stream of the context captures, streams that torch has never seen included.
            handles |= {0} if current else set()
            return any(tuple(driver.cuStreamIsCapturing(driver.CUstream(handle))) != (good, none) for handle in handles)

    def _pool(self, device: int) -> frozenset[int]:
        """Return the handles of every stream that torch can hand out on ``device``. They live for ever.

        torch hands its streams out in turn, so they have all been seen once a whole round brings nothing new.
        A round more than that is drawn, because another thread may draw in between; whole rounds also leave the
        turn where it was.
        """
        with self._lock:
            found = self._pools.get(device)
            if found is None:
                handles: set[int] = set()
                for priority in _PRIORITIES:
                    handles |= _drawn(device, priority)
                found = self._pools[device] = frozenset(handles)
            return found


def _drawn(device: int, priority: int) -> set[int]:
    handles: set[int] = set()
    repeated = 0
    for _ in range(_POOL_LIMIT):
        handle = _cuda.Stream(device, priority=priority).cuda_stream
        if handle in handles:
            repeated += 1
        else:
            handles.add(handle)
            repeated = 0
        if repeated >= len(handles):
            break
    return handles


@contextmanager
def _context(driver: Any, device: int) -> Iterator[bool]:
    """Make the primary context of ``device`` current, as a thread that never used CUDA has none. Yield success."""
    good = driver.CUresult.CUDA_SUCCESS
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    if status != good:
        yield False
        return
    try:
        pushed = driver.cuCtxPushCurrent(context)[0] == good
        try:
            yield pushed
        finally:
            if pushed:
                driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


_PROBE = CudaProbe()


def private_stream(device: int) -> Any:
    """Return a new stream that torch hands out to nobody. See :meth:`CudaProbe.private_stream`."""
    return _PROBE.private_stream(device)


def capturing_here(device: torch.device | None = None) -> bool:
    """Say whether this thread's current stream is capturing a CUDA graph."""
    return _PROBE.here(device)


def capturing_anywhere() -> bool:
    """Say whether any thread is capturing a CUDA graph. See :meth:`CudaProbe.anywhere`."""
    return _PROBE.anywhere()


def default_probe() -> CaptureProbe:
    """Return the probe of this process, whose list of streams is shared by all gates."""
    return _PROBE


def lane(device: torch.device) -> Hashable | None:
    """Name where this thread's work for ``device`` is put now, or return ``None`` where that cannot be told.

    What was computed in a lane may be read in that lane at once, and is computed again whenever the reader is. The
    CPU is one lane. On CUDA a lane is the current stream and, while that is capturing, the capture.
    """
    if device.type == "cpu":
        return device.type
    if device.type != "cuda" or not _cuda.is_initialized() or torch._C._cuda_getDevice() != device.index:
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    if not _cuda.is_current_stream_capturing():
        return device.index, stream
    driver = _driver()
    if driver is None:
        return None
    status, active, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    if status != driver.CUresult.CUDA_SUCCESS or active != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    return device.index, stream, int(number)  # the driver never gives a number twice
