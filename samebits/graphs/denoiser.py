"""One denoiser's graphs: which call is replayed, which is captured, which runs plainly, and why.

    a key's first call --its ops verified--> a call is watched, captured, replayed, compared --equal--> graph
       |                                        |--no graph can hold it, or other bits--> plain from now on
       |                                        |--an error, no memory--> plain, tried again after more and more calls
       |--ops not verified yet--> plain
    graph --the model changed--> gone: from the start
       |--an argument differs for the first time--> replayed and compared with a plain call
       |      |--other bits--> gone: plain from now on
       |--room is needed--> gone, the least recently used first

Every call returns what a plain call returns, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from samebits.errors import ContractViolation
from samebits.graphs.attempt import Graph, OtherBits, Unfit, Watched, capture, watch
from samebits.graphs.calls import Call, Key, Output, read, switches
from samebits.graphs.cuda import Backend, CudaBackend, Pool
from samebits.graphs.model_state import TRUSTED, ModelState
from samebits.graphs.row import (
    AUTOCAST,
    BUSY,
    CAPTURED,
    CAPTURING,
    CAPTURING_ELSEWHERE,
    CHECKED,
    CLOSED,
    FIRST,
    GRADIENTS,
    NO_MEMORY,
    NO_ROOM,
    OTHER_REASONS,
    UNSETTLED,
    GraphRow,
)

MAX_GRAPHS = 8
SEEN_LIMIT = 256
"""Keys remembered besides the graphs; a program whose sizes never repeat must not fill memory."""
ATTEMPTS = 3
"""Captures of one key that may fail before it stays plain. Running out of memory does not count."""
LONGEST_WAIT = 1024
LONGEST_REST = 64
REASON_LIMIT = 64
"""Different reasons that are counted by name; the rest are counted together."""
SETTLED_REPLAYS = 4
"""After so many replays of a graph its model counts as one that stays as it is."""

_log = logging.getLogger("samebits")
_any_autocast = torch._C._is_any_autocast_enabled


class GateView(Protocol):
    """What graphs need to know of the gate and of the sites inside the denoiser."""

    def stopped(self) -> str | None:
        """Why every op runs eager, or None."""
        ...

    def unsettled(self) -> int:
        """How many calls of the sites so far were comparisons, or waited for one."""
        ...

    def withdrawn(self) -> int:
        """How many verified signatures so far lost that verdict or are to be compared again."""
        ...


@dataclass
class _Seen:
    """What is known of a key that has no graph now."""

    calls: int = 0
    settled: bool = False
    """The last plain call found every op verified."""
    refused: str | None = None
    wait_calls: int = 0
    waiting_for: str = ""
    waits: int = 0
    failures: int = 0

    def wait(self, reason: str) -> None:
        """Stay plain for a while, twice as long each time."""
        self.waiting_for = reason
        self.wait_calls = min(1 << self.waits, LONGEST_WAIT)
        self.waits += 1


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _is_short_of_memory(error: BaseException) -> bool:
    # While it captures, torch's allocator stumbles over an assertion of its own on the way to saying so.
    words = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "captures_underway" in words


class DenoiserGraphs:
    """The graphs of one denoiser, and the function to call instead of its forward.

    Parameters
    ----------
    name : str
        What reports call it.
    model : torch.nn.Module
        The denoiser.
    gate : GateView
        Of the sites inside it.
    foreign : callable
        Whose forward was put on an instance: a sentence, or None.
    max_graphs : int
        How many graphs there may be; the one that was not used for longest goes first.
    max_bytes : int or None
        How much memory they may hold together; by default a quarter of the device's.
    strict : bool
        Raise where a replay gives other bits, and on any other fault of ours.
    backend : Backend, optional
        What captures; CUDA by default.
    trusted : frozenset of str
        Packages whose modules may be captured.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        gate: GateView,
        *,
        foreign: Callable[[nn.Module], str | None] = lambda module: None,
        max_graphs: int = MAX_GRAPHS,
        max_bytes: int | None = None,
        strict: bool = False,
        backend: Backend | None = None,
        trusted: frozenset[str] = TRUSTED,
    ) -> None:
        self.name, self.max_graphs, self.max_bytes, self.strict = name, max_graphs, max_bytes, strict
        self._model, self._gate, self._foreign, self._trusted = model, gate, foreign, trusted
        self._backend: Backend = CudaBackend() if backend is None else backend
        self._original: Callable[..., Any] = model.forward
        # Reentrant, because the thread that is inside may run out of memory, or be interrupted by a signal handler.
        self._lock = threading.RLock()
        self._closed = False
        self._inside: int | None = None
        """The thread whose call is being answered."""
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        self._pool: Pool | None = None
        self._state: ModelState | None = None
        """The model as all graphs know it."""
        self._blocked: ModelState | None = None
        """The model as it was found with an obstacle."""
        self._withdrawn = 0
        self._rest_calls = self._rests = 0
        self._rest_reason = ""
        self._replayed = self._captured = 0
        self._reasons: Counter[str] = Counter()
        self._count_lock = threading.Lock()
        self._theirs: BaseException | None = None
        """What the denoiser's own forward raised while this thread is inside."""

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that answers for ``original``, the denoiser's own forward."""
        self._original = original
        return self._call

    @property
    def row(self) -> GraphRow:
        """What happened so far."""
        with self._count_lock:
            reasons = dict(self._reasons)
        pool = self._pool
        held = 0 if pool is None else pool.bytes()
        plain = sum(reasons.values())
        return GraphRow(self.name, self._replayed, plain, self._captured, len(self._graphs), held, reasons)

    def close(self) -> None:
        """Free every graph; all later calls are plain. While a call is inside, that call does it at its end."""
        self._closed = True
        self._drop_if_free()

    def __del__(self) -> None:
        # What the GPU still reads must not be handed to others.
        with contextlib.suppress(Exception):
            self._drop_all()

    # The way of a call.

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        reason = self._why_plain()
        if reason is not None:
            return self._plain(reason, args, kwargs)
        call = read(args, kwargs, self._backend.place)
        if isinstance(call, str):
            return self._plain(call, args, kwargs)
        if not self._lock.acquire(blocking=False):
            return self._plain(BUSY, args, kwargs)
        try:
            if self._inside is not None:  # the forward called itself, or a signal handler did
                return self._plain(BUSY, args, kwargs)
            self._inside = threading.get_ident()
            try:
                return self._answer(call, args, kwargs)
            except Exception as error:
                if self.strict or error is self._theirs:
                    raise
                fault = f"a fault of samebits: {_summary(error)}"
                _log.exception("samebits: %s runs without CUDA graphs from now on, because of %s", self.name, fault)
            finally:
                self._inside, self._theirs = None, None
                if self._closed:
                    self._drop_all()
            self.close()
            return self._plain(fault, args, kwargs)
        finally:
            self._lock.release()

    def _why_plain(self) -> str | None:
        if self._closed:
            return CLOSED
        stopped = self._gate.stopped()
        if stopped is not None:
            return stopped
        if torch.is_grad_enabled():
            return GRADIENTS
        if _any_autocast():
            return AUTOCAST
        return CAPTURING if self._backend.capturing() else None

    def _plain(self, reason: str, args: Any, kwargs: Any) -> Any:
        """Run the denoiser's own forward and count why. What it raises is the caller's own."""
        try:
            result = self._run(args, kwargs)
        except torch.OutOfMemoryError:
            if not self._graphs or not self._drop_if_free(inside_too=True):
                raise
        else:
            self._count(reason)
            return result
        # Only here is the failed call's memory free again, and what the graphs held too.
        result = self._run(args, kwargs)
        self._count(reason)
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._original(*args, **kwargs)
        except Exception as error:
            if self._inside == threading.get_ident():
                self._theirs = error
            raise

    def _count(self, reason: str) -> None:
        with self._count_lock:
            known = reason in self._reasons or len(self._reasons) < REASON_LIMIT
            self._reasons[reason if known else OTHER_REASONS] += 1

    def _answer(self, call: Call, args: Any, kwargs: Any) -> Any:
        if self._graphs:
            change = self._why_stale()
            if change is not None:
                self._drop_all()
                self._seen.clear()
                self._rest(f"the model changed since the last call: {change}")
        graph = self._graphs.get(call.key)
        if graph is not None:
            return self._replay(graph, call, args, kwargs)
        seen = self._seen.setdefault(call.key, _Seen())
        self._seen.move_to_end(call.key)
        if len(self._seen) > SEEN_LIMIT:
            self._seen.popitem(last=False)
        reason = self._why_not_now(seen)
        if reason is None:
            result = self._capture(seen, call, args, kwargs)
        else:
            before = self._gate.unsettled()
            result = self._plain(reason, args, kwargs)
            seen.settled = self._gate.unsettled() == before
            seen.calls += 1
        settled = switches()
        if settled != call.switches and self._seen.get(call.key) is seen:
            # The call itself made torch settle one of its switches, and the next one like it comes with that.
            del self._seen[call.key]
            self._seen.setdefault((settled, call.arguments), seen)
        return result

    def _why_stale(self) -> str | None:
        if self._gate.withdrawn() != self._withdrawn:
            return "a verdict on one of its ops was withdrawn"
        return None if self._state is None else self._state.change()

    def _why_not_now(self, seen: _Seen) -> str | None:
        """Why this call, whose key has no graph, is not captured: a sentence, or None."""
        if seen.refused is not None:
            return seen.refused
        if self._rest_calls > 0:
            self._rest_calls -= 1
            return self._rest_reason
        if self._blocked is not None and self._blocked.change() is None:
            return self._blocked.obstacle
        self._blocked = None
        if seen.wait_calls > 0:
            seen.wait_calls -= 1
            return seen.waiting_for
        if not seen.settled:
            return UNSETTLED if seen.calls else FIRST
        return CAPTURING_ELSEWHERE if self._backend.capturing_anywhere() else None

    def _rest(self, reason: str) -> None:
        """Look at the model again only after some calls, more and more of them where it never stays the same."""
        self._rest_reason = reason
        self._rest_calls = min(1 << self._rests, LONGEST_REST)
        self._rests += 1

    # Capture.

    def _capture(self, seen: _Seen, call: Call, args: Any, kwargs: Any) -> Any:
        state = self._state
        if state is None:
            self._withdrawn = self._gate.withdrawn()
            state = ModelState(self._model, self._backend.place.device_type, self._foreign, self._trusted)
            if state.obstacle is not None:
                self._blocked = state
                self._rest(state.obstacle)
                return self._plain(state.obstacle, args, kwargs)
            self._state = state
        results: tuple[Any, ...] = ()
        try:
            watched = watch(self._original, call, args, kwargs, state, self._backend)
        except Unfit as unfit:
            results = unfit.results
            if unfit.may_pass:
                self._fail(seen, str(unfit))
            else:
                seen.refused = str(unfit)
        except Exception as error:
            # Perhaps the caller's own mistake: then the plain call says so.
            self._give_way(seen, error)
        else:
            self._try(seen, call, watched, args, kwargs, state)
            results = (watched.result,)
        reason = CAPTURED if call.key in self._graphs else seen.refused or seen.waiting_for
        if not self._graphs:
            self._drop_all()  # what was made for the first of them
        if not results:
            return self._plain(reason, args, kwargs)
        self._count(reason)
        return results[0]

    def _try(self, seen: _Seen, call: Call, watched: Watched, args: Any, kwargs: Any, state: ModelState) -> None:
        """Make a graph of a call that was watched, or write down why there is none."""
        device = call.leaves[0].device
        try:
            while len(self._graphs) >= self.max_graphs:
                self._evict()
            if self._pool is None:
                self._pool = self._backend.pool(device)
            before = self._gate.unsettled()
            graph = capture(self._original, watched, args, kwargs, state, self._pool)
            if self._gate.unsettled() != before and seen.failures < ATTEMPTS - 1:
                # An op met a signature that no plain call had, and lies in the graph as eager's own launches.
                graph.free()
                seen.settled, seen.waiting_for = False, UNSETTLED
                seen.failures += 1
                return
        except OtherBits as other:
            self._refuse(seen, f"a replay did not give a plain call's bits: {other}")
        except Exception as error:
            self._give_way(seen, error)
        else:
            self._graphs[call.key] = graph
            self._captured += 1
            limit = self._backend.most_bytes(device) if self.max_bytes is None else self.max_bytes
            needed = self._pool.bytes()
            if needed > limit and len(self._graphs) == 1:
                self._drop_all()
                seen.refused = f"its graph needs {needed:,} bytes, {limit:,} are allowed"
            elif needed > limit:
                # The memory of a pool comes back only when all of its graphs are gone.
                for key in self._graphs:
                    self._seen.setdefault(key, _Seen(settled=True)).wait(NO_ROOM)
                self._drop_all()

    def _evict(self) -> None:
        """Let go of the graph that was not used for longest."""
        key, graph = self._graphs.popitem(last=False)
        graph.free()
        # Soon wanted again, it would chase out another one, and so on: longer and longer waits end that.
        self._seen.setdefault(key, _Seen(settled=True)).wait(NO_ROOM)

    def _refuse(self, seen: _Seen, reason: str) -> None:
        seen.refused = reason
        _log.warning("samebits: %s runs without a CUDA graph for such arguments: %s", self.name, reason)
        if self.strict:
            raise ContractViolation(op="cuda graph", site=self.name, signature="such arguments", cause=reason)

    def _give_way(self, seen: _Seen, error: Exception) -> None:
        """An attempt raised. Make room if that was the matter, and try again later if that may help."""
        if _is_short_of_memory(error):
            self._drop_all()
            seen.wait(NO_MEMORY)
            return
        if self.strict and not isinstance(error, RuntimeError):  # RuntimeErrors are CUDA's way to say no
            raise error
        self._fail(seen, f"capturing it raised {_summary(error)}")

    def _fail(self, seen: _Seen, reason: str) -> None:
        seen.failures += 1
        if seen.failures < ATTEMPTS:
            seen.wait(f"{reason}, will be tried again")
        else:
            seen.refused = reason
            _log.warning("samebits: %s runs without a CUDA graph for such arguments: %s", self.name, reason)

    # Replay.

    def _replay(self, graph: Graph, call: Call, args: Any, kwargs: Any) -> Any:
        self._graphs.move_to_end(call.key)
        seen = self._seen.setdefault(call.key, _Seen(settled=True))
        try:
            with graph.pool.turn():
                news = graph.news(call.leaves)
                versions = graph.state.versions()
                graph.fill(call.leaves)
                result, leaves = graph.run()
        except Exception as error:
            self._drop(call.key)
            self._give_way(seen, error)
            return self._plain(seen.refused or seen.waiting_for, args, kwargs)
        if not news and versions == graph.versions:
            self._replayed += 1
            graph.replays += 1
            if graph.replays == SETTLED_REPLAYS:
                self._rests = 0
            return result
        plain = self._plain(CHECKED, args, kwargs)
        difference = graph.difference(leaves, Output(plain))
        if difference is None:
            graph.follow(news, versions)
        else:
            self._drop(call.key)
            self._refuse(seen, f"a replay did not follow a change: {difference}")
        return plain

    # Letting go.

    def _drop(self, key: Key) -> None:
        graph = self._graphs.pop(key, None)  # it may be gone already, to make room
        if graph is not None:
            graph.free()
        if not self._graphs:
            self._drop_all()

    def _drop_all(self) -> None:
        """Free all graphs and give their memory back."""
        while self._graphs:
            self._graphs.popitem()[1].free()
        pool, self._pool, self._state = self._pool, None, None
        if pool is not None:
            pool.close()

    def _drop_if_free(self, inside_too: bool = False) -> bool:
        """Free all graphs unless a thread is inside that may be using one. Says whether it did."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._inside is not None and not inside_too:
                return False
            self._drop_all()
            return True
        finally:
            self._lock.release()
