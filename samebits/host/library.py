"""A kernel's shared library in this process: loading it, running it, the recorded values it uses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.errors import CompileError

RECORDED_FUNCTIONS = ("rsqrtf", "expf", "tanhf", "erff")
"""What the GPU's hardware approximates, so that its values can only be recorded."""

_MESSAGE_BYTES = 1024
_MANY_THREADS = 4096
"""CUDA threads from which a launch is worth several OS threads."""


@dataclass(frozen=True)
class Schedule:
    """How a launch is laid out on the CPU. A correct kernel gives the same bits under every schedule.

    Attributes
    ----------
    order : int
        In which order the threads of a block run up to their next barrier: 0 ascending, 1 descending, any other
        number is the seed of a shuffle. Copies of boxes to shared memory are done at once where it is 0, else as late
        as can be.
    workers : int or None
        OS threads that share the blocks; ``None`` decides by the size of the launch.
    """

    order: int = 0
    workers: int | None = None


_schedule = Schedule()
_tables: dict[str, tuple[bytes, bytes]] = {}
_libraries: weakref.WeakSet[Library] = weakref.WeakSet()
_lock = threading.Lock()


class Library:
    """The kernels of one source, loaded.

    Parameters
    ----------
    name : str
        For messages.
    content : bytes
        As :func:`samebits.host.toolchain.build` returned it.

    Raises
    ------
    CompileError
        The system refuses to load it.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        # Loaded from a private file that is gone at once: nobody can change what was checked. The name is new each
        # time, because the loader takes a known name for the library it already has.
        descriptor, path = tempfile.mkstemp(prefix="samebits-", suffix=".so")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            library = ctypes.CDLL(path)
        except OSError as error:
            raise CompileError(f"kernel {name}, compiled for this CPU, cannot be loaded: {error}.") from error
        finally:
            os.unlink(path)
        library.samebits_misses.restype = ctypes.c_uint64
        library.samebits_misses.argtypes = [ctypes.c_char_p]
        library.samebits_record.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]
        self._library = library
        self._entries: dict[str, Any] = {}
        with _lock:
            for function, table in _tables.items():
                self._record(function, table)
            _libraries.add(self)

    def parameters(self, kernel: str) -> tuple[str, ...]:
        """The compiler's own view of each parameter of a kernel: ``p8``, ``i4``, ``u8``, ``f4``, ``b1``, ``t128``.

        The single word ``absent`` for a kernel that the constants leave out.
        """
        describe = self._library[f"samebits_parameters_{kernel}"]
        describe.restype = ctypes.c_char_p
        return tuple(describe().decode().split())

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        slots: Sequence[int],
    ) -> str:
        """Run a kernel to its end. Returns an empty string, or the sentence that says what went wrong."""
        schedule = _schedule
        blocks = grid[0] * grid[1] * grid[2]
        workers = schedule.workers
        if workers is None:
            small = blocks * block[0] * block[1] * block[2] < _MANY_THREADS
            workers = 1 if small else min(os.cpu_count() or 1, 8)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._entry(kernel)(
            (ctypes.c_uint32 * 6)(*grid, *block),
            shared_bytes,
            (ctypes.c_int64 * max(len(slots), 1))(*slots),
            min(workers, blocks),
            schedule.order,
            message,
            _MESSAGE_BYTES,
        )
        return message.value.decode(errors="replace")

    def _entry(self, kernel: str) -> Any:
        entry = self._entries.get(kernel)
        if entry is None:
            entry = self._library[f"samebits_launch_{kernel}"]
            entry.argtypes = [
                ctypes.POINTER(ctypes.c_uint32),
                ctypes.c_uint32,
                ctypes.POINTER(ctypes.c_int64),
                ctypes.c_uint32,
                ctypes.c_uint64,
                ctypes.c_char_p,
                ctypes.c_uint64,
            ]
            self._entries[kernel] = entry
        return entry

    def misses(self, function: str) -> int:
        """How often ``function`` was asked for an input that its recorded table did not hold."""
        return int(self._library.samebits_misses(function.encode()))

    def _record(self, function: str, table: tuple[bytes, bytes]) -> None:
        inputs, outputs = table
        self._library.samebits_record(function.encode(), inputs, outputs, len(inputs) // 4)


@contextlib.contextmanager
def schedule(order: int = 0, workers: int | None = None) -> Iterator[None]:
    """Within the block, lay launches of this process out as given; see :class:`Schedule`.

    Raises
    ------
    ValueError
        ``order`` is negative or ``workers`` is less than 1.
    """
    global _schedule
    if order < 0 or (workers is not None and workers < 1):
        raise ValueError(f"order must be 0 or more and workers 1 or more, got order={order} and workers={workers}")
    previous, _schedule = _schedule, Schedule(order, workers)
    try:
        yield
    finally:
        _schedule = previous


@contextlib.contextmanager
def recorded(function: str, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[None]:
    """Within the block, ``function`` gives recorded values to every host kernel of this process.

    Parameters
    ----------
    function : str
        One of ``RECORDED_FUNCTIONS``.
    inputs, outputs : sequence of int
        The bits of fp32 arguments and of the results that a GPU gave, as unsigned 32-bit integers. Arguments that
        are not among them keep the host library's value and are counted; see :meth:`Library.misses`.

    Raises
    ------
    ValueError
        There is no such function, or the lengths differ.
    """
    if function not in RECORDED_FUNCTIONS:
        raise ValueError(f"{function!r} has no recorded values: expected one of {', '.join(RECORDED_FUNCTIONS)}")
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs but {len(outputs)} outputs of {function}")
    previous = _tables.get(function, (b"", b""))
    _set_table(function, (_pack(inputs), _pack(outputs)))
    try:
        yield
    finally:
        _set_table(function, previous)


def _pack(values: Sequence[int]) -> bytes:
    return bytes((ctypes.c_uint32 * len(values))(*values))


def _set_table(function: str, table: tuple[bytes, bytes]) -> None:
    with _lock:
        _tables[function] = table
        for library in _libraries:
            library._record(function, table)


def _after_fork_in_child() -> None:
    """As in ``samebits.jit``: whoever held the lock stayed in the parent."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
