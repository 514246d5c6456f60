"""How time is taken: CUDA graphs of many calls over rotating inputs, interleaved, medians; host cost per call.

Device time. One call of a fused kernel takes microseconds, less than it takes the host to launch an eager
chain, so calls are captured into a CUDA graph and whole replays are timed with device events. The calls of a
graph rotate over input sets whose bytes are several times the L2 cache, so that every call reads from memory.
Competitors are replayed in turns, so that a clock that drifts drifts for all of them; the median of the
replays is the result.

Host time. A loop of calls without a synchronisation inside, short enough that the launch queue never fills,
read with a wall clock; the median of several loops is the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

import torch

MIN_SETS = 12
MAX_SETS = 256
MIN_CALLS = 60
REPLAYS = 30
L2_MULTIPLE = 4
SETS_BUDGET_BYTES = 12 * 2**30


class Stopwatch(Protocol):
    """What timing needs of a device. The tests hand in one with a clock of their own."""

    def synchronize(self) -> None:
        """Wait until everything that was launched has finished."""
        ...

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Record the launches of ``body`` once and return what replays them."""
        ...

    def elapsed_ms(self, body: Callable[[], object]) -> float:
        """Run ``body`` and return the time between its first and its last launch on the device, in ms."""
        ...


class CudaStopwatch:
    """Device events and CUDA graphs of one GPU.

    Parameters
    ----------
    device : torch.device
        The GPU. It must be the current device while the stopwatch is in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph.replay

    def elapsed_ms(self, body: Callable[[], object]) -> float:
        event: Callable[..., Any] = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


class WallStopwatch:
    """A processor's wall clock, for runs whose figures mean nothing: the same code without a GPU."""

    def synchronize(self) -> None:
        """Nothing runs on the side."""

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        return body

    def elapsed_ms(self, body: Callable[[], object]) -> float:
        start = time.perf_counter()
        body()
        return (time.perf_counter() - start) * 1e3


def sets_needed(bytes_per_set: int, l2_bytes: int, budget_bytes: int = SETS_BUDGET_BYTES) -> int:
    """How many input sets a graph must rotate over.

    Parameters
    ----------
    bytes_per_set : int
        Bytes that the inputs and outputs of one set occupy.
    l2_bytes : int
        Size of the device's L2 cache.
    budget_bytes : int
        The most bytes that all sets together may take.

    Returns
    -------
    int
        At least ``MIN_SETS``, enough for ``L2_MULTIPLE`` times the cache, at most ``MAX_SETS``, and never more
        than fit the budget (but at least one).
    """
    if bytes_per_set <= 0:
        raise ValueError(f"bytes_per_set must be positive, got {bytes_per_set}")
    past_the_cache = -(-L2_MULTIPLE * l2_bytes // bytes_per_set)
    wanted = min(max(MIN_SETS, past_the_cache), MAX_SETS)
    return max(1, min(wanted, budget_bytes // bytes_per_set))


def calls_per_graph(sets: int, at_least: int = MIN_CALLS) -> int:
    """The smallest multiple of ``sets`` that is not below ``at_least``: every set is used equally often."""
    return -(-at_least // sets) * sets


def device_us(
    calls: Mapping[str, Callable[[int], object]], sets: int, stopwatch: Stopwatch, replays: int = REPLAYS
) -> dict[str, float]:
    """Median device time of one call of each competitor, in microseconds.

    Parameters
    ----------
    calls : mapping of str to callable
        ``call(i)`` launches one call on input set ``i``. It must not synchronise.
    sets : int
        How many input sets there are; ``i`` runs from 0 to ``sets - 1``.
    stopwatch : Stopwatch
        The device.
    replays : int
        How many times each competitor's graph is timed. They take turns.

    Returns
    -------
    dict of str to float
    """
    count = calls_per_graph(sets)
    replay_of = {}
    for name, call in calls.items():
        for index in range(sets):
            call(index)
        stopwatch.synchronize()
        replay_of[name] = stopwatch.capture(lambda call=call: [call(j % sets) for j in range(count)])  # type: ignore[misc]
    for replay in replay_of.values():
        replay()
    stopwatch.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, replay in replay_of.items():
            samples[name].append(stopwatch.elapsed_ms(replay))
    return {name: median(taken) * 1e3 / count for name, taken in samples.items()}


def host_us(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    calls: int = 100,
    loops: int = 25,
    clock: Callable[[], float] = time.perf_counter,
    pause: Callable[[], object] = lambda: time.sleep(0.01),
) -> float:
    """Host time of one call, in microseconds, the device's time left out: the fastest of the loops.

    What else runs on the host can only add to a loop; the fastest is nearest to what the calls themselves take.

    Parameters
    ----------
    call : callable
        Launches one call. Its device time should be below its host time, or the queue of ``calls`` launches
        must fit the device's launch queue (1,024 on current GPUs).
    synchronize : callable
        Empties the launch queue; called before each loop, outside the time taken.
    calls, loops : int
        ``loops`` times ``calls`` calls are made after one loop that warms up.
    clock : callable
        Seconds.
    pause : callable
        Called between loops: what slows a host down for a moment, such as a neighbour on a shared machine, outlasts
        loops that follow each other at once.
    """
    taken = []
    for _ in range(loops + 1):
        pause()
        synchronize()
        start = clock()
        for _ in range(calls):
            call()
        taken.append(clock() - start)
    synchronize()
    return min(taken[1:]) * 1e6 / calls


def interleaved_ms(
    bodies: Mapping[str, Callable[[], object]],
    stopwatch: Stopwatch,
    rounds: int,
    before: Mapping[str, Callable[[], object]] | None = None,
    repeats: int = 3,
) -> dict[str, float]:
    """Median time of each body in ms, taken in turns; ``before[name]`` runs untimed ahead of each turn.

    The first run of a turn warms up and is not counted.
    """
    samples: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            if before is not None and name in before:
                before[name]()
            body()
            stopwatch.synchronize()
            samples[name].extend(stopwatch.elapsed_ms(body) for _ in range(repeats))
    return {name: median(taken) for name, taken in samples.items()}


def copy_gb_per_s(device: torch.device, stopwatch: Stopwatch, elements: int = 2**26) -> float:
    """Device-to-device copy bandwidth, bytes read plus bytes written, in 10^9 bytes per second.

    Three pairs of float32 tensors of ``elements`` elements (256 MiB each by default) are copied in turns, on
    random data: zeros can be cheaper to move.
    """
    sources = [torch.randn(elements, device=device) for _ in range(3)]
    targets = [torch.empty_like(source) for source in sources]
    taken = device_us({"copy": lambda i: targets[i].copy_(sources[i])}, len(sources), stopwatch, replays=10)
    return 2 * sources[0].numel() * sources[0].element_size() / taken["copy"] / 1e3
