"""What graphs need of CUDA: capture, replay, order between streams, the memory they take. Tests hand in their own.

A recording belongs to a *pool*: the memory of all graphs of one denoiser, which never run at the same time, so they
may lie on top of each other. torch gives that memory back only when the last graph of the pool is gone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from samebits import capture
from samebits.graphs.calls import Place

# torch annotates none of what is used of these.
_cuda: Any = torch.cuda
_C: Any = torch._C

_SHARE_OF_DEVICE = 4


class Recording(Protocol):
    """One captured forward."""

    def replay(self) -> None:
        """Run it on the current stream."""
        ...

    def free(self) -> None:
        """Let go of it; it must not be running."""
        ...


class Pool(Protocol):
    """The graphs of one denoiser on one device."""

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        """Capture what ``run`` does and return it with what ``run`` returned. After an error all is as before."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """A context in which to fill inputs, replay and copy results: after all earlier turns, on any stream."""
        ...

    def wait(self) -> None:
        """Wait on the host until nothing of this pool runs any more."""
        ...

    def bytes(self) -> int:
        """How much memory its graphs hold, in bytes."""
        ...

    def close(self) -> None:
        """Give the memory back; all recordings are freed."""
        ...


class Backend(Protocol):
    """The kind of device that is captured on."""

    place: Place

    def capturing(self) -> bool:
        """Whether this thread's current stream captures."""
        ...

    def capturing_anywhere(self) -> bool:
        """Whether any stream of the process captures, as far as can be known."""
        ...

    def pool(self, device: torch.device) -> Pool:
        """A new pool."""
        ...

    def random_state(self, device: torch.device) -> tuple[Tensor, ...]:
        """The states of the generators from which a forward draws by default."""
        ...

    def most_bytes(self, device: torch.device) -> int:
        """How much memory graphs may hold where nobody said so."""
        ...


class CudaBackend:
    """CUDA, through torch."""

    # The GEMM library chooses its kernels by the alignment of addresses, up to 256 bytes.
    place = Place("cuda", 256)

    def capturing(self) -> bool:
        return capture.capturing_here()

    def capturing_anywhere(self) -> bool:
        return capture.capturing_here() or capture.capturing_anywhere()

    def pool(self, device: torch.device) -> Pool:
        return CudaPool(device)

    def random_state(self, device: torch.device) -> tuple[Tensor, ...]:
        return torch.get_rng_state(), _cuda.get_rng_state(device)

    def most_bytes(self, device: torch.device) -> int:
        return int(_cuda.get_device_properties(device).total_memory) // _SHARE_OF_DEVICE


class _CudaRecording:
    """A graph of torch, which belongs to the device it was captured on."""

    def __init__(self, graph: Any, pool: CudaPool) -> None:
        self._graph = graph
        self._pool = pool

    def replay(self) -> None:
        self._graph.replay()

    def free(self) -> None:
        with capture.default_probe().relaxed():
            self._graph.reset()
        self._pool.recordings -= 1


_streams: dict[int, list[Any]] = {}
"""Capture streams that no pool uses now, by device. Streams are never destroyed, so they are used again."""
_streams_lock = threading.Lock()


class CudaPool:
    """One memory pool, one capture stream, and the event after which the next turn may begin.

    Attributes
    ----------
    recordings : int
        How many graphs lie in the pool now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = int(_cuda.current_device() if device.index is None else device.index)
        self._handle: Any = None
        self.recordings = 0
        with _streams_lock:
            free = _streams.setdefault(self._index, [])
            self._stream = free.pop() if free else capture.private_stream(self._index)
        self._done: Any = None
        self._last_stream: Any = None

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        if not self.recordings:
            self._handle = _cuda.graph_pool_handle()  # torch takes none twice once its last graph is gone
        _cuda.empty_cache()  # a pool cannot take memory that torch keeps for others, or have it given back meanwhile
        graph = _cuda.CUDAGraph()
        with _cuda.device(self._index), _cuda.stream(self._stream):
            # What other threads do meanwhile is theirs to do: only this thread is watched for unsafe calls.
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except BaseException:
                self._abort(graph)
                raise
        self.recordings += 1
        return _CudaRecording(graph, self), result

    def _abort(self, graph: Any) -> None:
        """Undo a capture that failed: the stream, torch's allocator and its generator would stay in capture."""
        with contextlib.suppress(RuntimeError):
            # Where the forward raised, this makes a graph of what it did before. An invalid capture raises here.
            graph.capture_end()
        with contextlib.suppress(RuntimeError):
            # It raises before torch tells its allocator, which would go on to look for a stream that captures.
            _C._cuda_endAllocateToPool(self._index, self._handle)
            _C._cuda_releasePool(self._index, self._handle)
        graph.reset()
        with contextlib.suppress(RuntimeError):
            self._heal_generator()

    def _heal_generator(self) -> None:
        """After a failed capture the default generator of some releases of torch believes that it still goes on."""
        state = _cuda.get_rng_state(self._index)
        try:
            torch.rand(1, device=self._device)
        except RuntimeError as error:
            if "graph capture" not in str(error):
                raise
            generator = _cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())
        _cuda.set_rng_state(state, self._index)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with _cuda.device(self._index):
            stream = _cuda.current_stream()
            if self._done is None:
                self._done = _cuda.Event()
            elif stream != self._last_stream:
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)
                self._last_stream = stream

    def wait(self) -> None:
        if self._done is not None:
            with capture.default_probe().relaxed():
                self._done.synchronize()

    def bytes(self) -> int:
        if self._handle is None:
            return 0
        try:
            return sum(int(segment["total_size"]) for segment in _cuda.memory_snapshot(self._handle))
        except RuntimeError:  # an allocator that does not tell
            return 0

    def close(self) -> None:
        with _streams_lock:
            _streams[self._index].append(self._stream)
        if not (capture.capturing_here() or capture.capturing_anywhere()):
            _cuda.empty_cache()
