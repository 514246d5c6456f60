"""From a plain call to a graph: run the forward once under watch, capture it, and compare a replay with that run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits import bits
from samebits.graphs.calls import Call, Output, Static, read, refill
from samebits.graphs.cuda import Backend, Pool, Recording
from samebits.graphs.model_state import ModelState
from samebits.graphs.recorder import HostConstants, Recorder

Forward = Callable[..., Any]


class Unfit(Exception):
    """No graph can stand for this call.

    Attributes
    ----------
    results : tuple
        The result of the call as the only element, or nothing where the call has to be made again: it did something to
        its arguments, and what it was given while it was watched were copies.
    may_pass : bool
        Whether a later call may be another matter.
    """

    def __init__(self, reason: str, *results: Any, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.results = results
        self.may_pass = may_pass


class OtherBits(Exception):
    """A replay did not give the bits of the plain call; the message says in which element first."""


@dataclass
class Watched:
    """A plain call that was made on the memory that a graph would read."""

    statics: list[Static]
    result: Any
    output: Output
    kept: tuple[Any, ...]
    constants: HostConstants


def watch(forward: Forward, call: Call, args: Any, kwargs: Any, state: ModelState, backend: Backend) -> Watched:
    """Make the call plainly, on copies of its arguments, and look for everything that a graph could not do again.

    Raises
    ------
    Unfit
        There is such a thing.
    """
    device = call.leaves[0].device
    if state.device is not None and state.device != device:
        raise Unfit(f"the arguments are on {device}, the weights on {state.device}")
    statics = [Static(leaf, backend.place) for leaf in call.leaves]
    for static, leaf in zip(statics, call.leaves, strict=True):
        static.fill(leaf)
    views = [static.view for static in statics]
    versions = [view._version for view in views]
    random_state = backend.random_state(device)
    weights = state.versions()
    given = refill((args, kwargs), iter(views))
    constants = HostConstants(backend.place.device_type)
    with constants, Recorder(backend.place.device_type, [*state.tensors(), *views]) as recorder:
        result = forward(*given[0], **given[1])

    # The copies are strided and aligned as the originals, so they have the same key.
    again = read(given[0], given[1], backend.place)
    if (
        isinstance(again, str)
        or again.arguments != call.arguments
        or list(map(id, again.leaves)) != list(map(id, views))
    ):
        raise Unfit("the forward changes its arguments")
    if [view._version for view in views] != versions:
        raise Unfit("the forward writes to its arguments")
    try:
        output = Output(result)
    except TypeError as error:
        raise Unfit(f"the forward returns {error}", result) from None
    if recorder.gave_back(output.leaves):
        raise Unfit("the forward returns memory that was there before")
    if again.switches != call.switches:
        raise Unfit("the forward changes a switch of torch", result, may_pass=True)
    change = state.change() or ("a weight was written" if state.versions() != weights else None)
    if change is not None:
        raise Unfit(f"the forward changes the model ({change})", result, may_pass=True)
    reason = recorder.reason
    if not output.leaves:
        reason = "the forward returns no tensor"
    elif any(map(_differ, random_state, backend.random_state(device))):
        reason = "the forward draws random numbers"
    elif reason is None and constants.written():
        reason = "the forward writes to a tensor that it made from numbers on the host"
    elif reason is None and recorder.keeps(output.leaves):
        reason = "the forward keeps a tensor that it made for later"
    if reason is not None:
        raise Unfit(reason, result)
    return Watched(statics, result, output, recorder.kept, constants)


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)


def capture(forward: Forward, watched: Watched, args: Any, kwargs: Any, state: ModelState, pool: Pool) -> Graph:
    """Capture the call that was watched, replay it once and compare.

    Raises
    ------
    OtherBits
        The replay gave something else.
    """
    given = refill((args, kwargs), iter([static.view for static in watched.statics]))

    def run() -> Any:
        with watched.constants.played():
            return forward(*given[0], **given[1])

    recording, value = pool.record(run)
    try:
        graph = Graph(recording, pool, state, watched, Output(value))
        del value
        with pool.turn():
            _, leaves = graph.run()
            difference = graph.difference(leaves, watched.output)
        if difference is not None:
            raise OtherBits(difference)
        change = state.change()
        if change is not None:
            raise OtherBits(f"the forward changes the model at every second call ({change})")
    except BaseException:
        pool.wait()
        recording.free()
        raise
    return graph


class Graph:
    """One captured forward, the memory of its arguments, and the changes that it was seen to follow.

    Attributes
    ----------
    versions : list of int
        The versions of the weights with which a replay was last compared with a plain call.
    replays : int
        Calls that it answered.
    """

    def __init__(self, recording: Recording, pool: Pool, state: ModelState, watched: Watched, output: Output) -> None:
        self.pool = pool
        self.state = state
        self.versions = state.versions()
        self.replays = 0
        self._recording = recording
        self._statics = watched.statics
        self._output = output
        self._kept = (watched.kept, watched.constants)  # only to keep them alive
        self._follows = [False] * len(watched.statics)
        self._marks: list[Any] = [None] * len(watched.statics)

    def news(self, leaves: list[Tensor]) -> list[int]:
        """Which arguments differ from those of the capture for the first time.

        A tensor that is the same object in the same version is not looked at; another object is compared by its
        values, which waits for the GPU, until it was seen to change once.
        """
        if all(self._follows):
            return []
        found = []
        for number, (leaf, mark) in enumerate(zip(leaves, self._marks, strict=True)):
            if self._follows[number] or _is_marked(leaf, mark):
                continue
            if bits.compare(self._statics[number].view, leaf) is None:
                self._marks[number] = _mark(leaf)
            else:
                found.append(number)
        return found

    def follow(self, numbers: list[int], versions: list[int]) -> None:
        """A replay after these arguments, and the weights, had changed gave the bits of a plain call."""
        for number in numbers:
            self._follows[number] = True
        self.versions = versions

    def fill(self, leaves: list[Tensor]) -> None:
        """Copy the arguments in."""
        for static, leaf in zip(self._statics, leaves, strict=True):
            static.fill(leaf)

    def run(self) -> tuple[Any, list[Tensor]]:
        """Replay, and return the result in memory of its own, and its tensors."""
        self._recording.replay()
        return self._output.copy()

    def difference(self, leaves: list[Tensor], plain: Output) -> str | None:
        """In what the result of a replay, of which ``leaves`` are the tensors, is not that of a plain call."""
        if self._output.form != plain.form:
            return "the result has another form"
        found = bits.compare(leaves, plain.leaves)
        return None if found is None else str(found)

    def free(self) -> None:
        """Let go of it, once the GPU has."""
        self.pool.wait()
        self._recording.free()


def _mark(leaf: Tensor) -> Any:
    return None if leaf.is_inference() else (weakref.ref(leaf), leaf._version)


def _is_marked(leaf: Tensor, mark: Any) -> bool:
    return mark is not None and mark[0]() is leaf and mark[1] == leaf._version
