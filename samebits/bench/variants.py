"""One forward of a denoiser, every way there is, in one process and in turns: eager, torch.compile, ours, the floor.

Each variant's output is compared with eager's as integers before anything is timed. A variant of ours whose bits
differ is not timed at all. torch.compile and the floor claim no bits; what they say is for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from samebits.apply import Handle, apply
from samebits.bench import denoisers, evidence, floor, launches
from samebits.bench.comparing import Bench, said
from samebits.bench.denoisers import Calls, Observation, equal, observe
from samebits.bench.inputs import poison
from samebits.bench.models import Denoiser
from samebits.bench.timing import interleaved_ms
from samebits.ops._op import Op

ROUNDS = 12
REPEATS = 2
PROFILED_RUNS = 3
EAGER, OURS = "eager", "ours"
APPLIED: Mapping[str, Mapping[str, Any]] = {OURS: {}}
"""The states in which samebits is applied, with what ``apply`` gets besides the model."""

COMPILED: Mapping[str, Mapping[str, Any]] = {
    "compile": {},
    "compile_max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "compile_emulate_precision_casts": {"options": {"emulate_precision_casts": True}},
}
"""What ``compile_repeated_blocks(fullgraph=True)`` gets besides, by variant."""


class Switch:
    """Brings one model into the state that a variant needs: eager, compiled in some way, or with samebits applied.

    All share one set of weights. What compilation and samebits put on the modules is taken off and put back as it is,
    which takes no time: a variant that had to be applied anew for each turn would start on a card that has cooled.

    Parameters
    ----------
    model : torch.nn.Module
    applied : mapping of str to mapping
        The states in which samebits is applied, each with what ``apply`` gets besides the model; by default ``"ours"``.
    """

    def __init__(self, model: nn.Module, applied: Mapping[str, Mapping[str, Any]] = APPLIED) -> None:
        self.model: Any = model
        self.handles: dict[str, Handle] = {}
        """What ``apply`` returned, by state; there once the model was in that state."""
        self._applied = applied
        self._attributes: dict[str, dict[nn.Module, dict[str, Any]]] = {EAGER: {}}
        self._state = EAGER

    def compile(self, name: str, options: Mapping[str, Any]) -> None:
        """Mark the repeated blocks for compilation, which happens at their next call; the state is then ``name``."""
        self._add(name, lambda: self.model.compile_repeated_blocks(fullgraph=True, **options))

    def _add(self, name: str, change: Callable[[], object]) -> None:
        """Let ``change`` put attributes on modules, and remember them as the state ``name``."""
        self.to(EAGER)
        before = {module: set(module.__dict__) for module in self.model.modules()}
        try:
            change()
        finally:  # what a change that failed half-way has put there comes off again too
            self._attributes[name] = {
                module: added
                for module, names in before.items()
                if (added := {key: value for key, value in module.__dict__.items() if key not in names})
            }
            self._state = name

    def to(self, state: str) -> None:
        """Bring the model into a state: ``"eager"``, one in which samebits is applied, or something compiled."""
        if state == self._state:
            return
        for module, added in self._attributes[self._state].items():
            for key in added:
                module.__dict__.pop(key, None)
        self._state = EAGER
        if state in self._applied and state not in self.handles:
            self._add(state, partial(self._apply, state))
        for module, added in self._attributes[state].items():
            module.__dict__.update(added)
        self._state = state

    def _apply(self, state: str) -> None:
        self.handles[state] = apply(self.model, **self._applied[state])

    def close(self) -> None:
        """Leave the model as it was."""
        for state, handle in self.handles.items():
            self.to(state)
            handle.remove()
            self._attributes[state] = {}
        self.handles.clear()
        self.to(EAGER)


@dataclass
class Lane:
    """One variant of a forward, ready to run."""

    body: Callable[[], object]
    state: str | None
    """What the switch must say while it runs; ``None`` for a graph, which needs nothing of the model."""
    bits_equal: bool
    again: Callable[[], bool] | None = None
    """Runs it once more and compares: for those that claim bits."""
    account: launches.Launches | None = None


@dataclass
class Outcome:
    """What one model at one size and batch gave."""

    rows: list[evidence.Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences for a reader: what failed, which calls of ours were eager and why."""


@dataclass(frozen=True)
class Choice:
    """Which variants run, and how long.

    Attributes
    ----------
    compiled : tuple of str
        Keys of ``COMPILED``. Only ``"compile"`` is run as a graph too.
    graphs : bool
        Whether graphs are captured and the floor is measured; false where there is no GPU.
    rounds : int
        How many turns each variant has.
    only : tuple of str
        Variants that are timed; empty: all that the rest says. One that another needs is made ready and not timed.
    options : mapping
        For torch.compile, beside what ``COMPILED`` says. The tests compile with a backend that takes no time.
    """

    compiled: tuple[str, ...] = ("compile",)
    graphs: bool = True
    rounds: int = ROUNDS
    options: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The variants that leave a row, in the order of the record."""
        found = {EAGER, OURS, *self.compiled}
        if self.graphs:
            found |= {"floor_graph", *(f"{name}_graph" for name in (EAGER, "compile", OURS) if name in found)}
        every = (*evidence.VARIANTS, *evidence.EXTRA_VARIANTS)
        return tuple(name for name in every if name in found and (not self.only or name in self.only))

    @property
    def needed(self) -> frozenset[str]:
        """The variants that must be made ready: those and what their graphs are captured from."""
        return frozenset(self.wanted) | {name.removesuffix("_graph") for name in self.wanted}


def measure(denoiser: Denoiser, bench: Bench, ops: Sequence[Op], size: int, batch: int, choice: Choice) -> Outcome:
    """Run every variant of one forward: bits, then time in turns, then launches and classes.

    The profiler comes last, because launches can stay slower for the rest of a process in which it ran.
    """
    outcome = Outcome()
    contest = Contest(denoiser, bench, ops, outcome)
    try:
        with _room_to_recompile(choice):
            contest.enter(choice)
            taken = contest.time(choice.rounds)
            contest.profile(min(choice.rounds, PROFILED_RUNS))
    finally:
        contest.switch.close()
    for name in choice.wanted:
        head = {"model": denoiser.name, "size": size, "batch": batch, "variant": name}
        outcome.rows.append({**head, **figures(contest.lanes.get(name), taken.get(name), name)})
    return outcome


def figures(lane: Lane | None, ms: float | None, name: str, schema: evidence.Schema = evidence.MODELS) -> evidence.Row:
    """The measured columns of a row; a variant that failed or that claims bits and lacks them has no times."""
    row: evidence.Row = {
        "ms": None if ms is None else round(ms, 3),
        "bits_equal": lane is not None and lane.bits_equal,
        "launches": 0,
        "ms_gemm": None,
        "ms_attention": None,
        "ms_other": None,
    }
    if lane is not None and lane.account is not None:
        spent = lane.account.ms
        row["launches"] = lane.account.total
        row["ms_gemm"], row["ms_attention"] = round(spent["gemm"], 3), round(spent["attention"], 3)
        row["ms_other"] = round(sum(spent[kind] for kind in ("ours", "copies", "other")), 3)
    if name in (schema.claims or ()) and not row["bits_equal"]:
        row = evidence.without_speeds(row)
    return row


class Contest:
    """The variants of one forward, entered one after the other."""

    schema = evidence.MODELS
    """The kind of record: it says which variants claim the reference's bits."""
    applied = APPLIED

    def __init__(self, denoiser: Denoiser, bench: Bench, ops: Sequence[Op], outcome: Outcome) -> None:
        self.denoiser = denoiser
        self.bench = bench
        self.names = launches.kernels_of(ops)
        self.outcome = outcome
        self.switch = Switch(denoiser.model, self.applied)
        self.lanes: dict[str, Lane] = {}
        self._pool: Any = None

    def enter(self, choice: Choice) -> None:
        """Make every chosen variant ready, its bits compared with eager's. One that fails is a note, not the end."""
        reference, steady = self.reference()
        # Applying moves weights, once: no graph may be captured before, it would read where they were.
        self.switch.to(OURS)
        self.switch.to(EAGER)
        forward = self.denoiser.forward
        output = reference.output

        def matches(result: torch.Tensor) -> bool:
            return steady and equal([result], [output])

        needed = choice.needed

        def enter(name: str, make: Callable[[], Lane], after: str = "") -> None:
            if name in needed and (not after or after in self.lanes):
                self._try(name, make)

        enter(EAGER, lambda: Lane(forward, EAGER, steady, lambda: matches(forward())))
        enter("eager_graph", lambda: self._graph(EAGER, matches))
        enter("floor_graph", self._floor)
        for name in choice.compiled:
            enter(name, partial(self._compile, name, {**COMPILED[name], **choice.options}, matches))
            if name == "compile":
                enter("compile_graph", lambda: self._graph("compile", matches), name)
        enter(OURS, lambda: self._ours(reference, steady, matches))
        enter("ours_graph", lambda: self._graph(OURS, matches), OURS)
        self.switch.to(EAGER)
        # What was only made ready for another has no turns.
        self.lanes = {name: lane for name, lane in self.lanes.items() if name in choice.wanted}

    def reference(self, steps: int = 0) -> tuple[Observation, bool]:
        """What eager gives, in a forward and in ``steps`` steps of the sampler, and whether it gives it twice.

        Raises
        ------
        RuntimeError
            The comparison is blind to one changed bit.
        """
        reference, again = observe(self.denoiser, steps), observe(self.denoiser, 0)
        steady = same(again, reference)
        if not steady:
            self.outcome.notes.append("void: eager differs from itself, so no comparison with it means anything")
        elif not denoisers.sees_one_bit(reference.output):
            raise RuntimeError("the comparison did not see one bit that was changed on purpose")
        return reference, steady

    def _try(self, name: str, make: Callable[[], Lane]) -> None:
        try:
            self.lanes[name] = make()
        except Exception as error:
            self.outcome.notes.append(f"{name} failed: {said(error)}")

    def _compile(self, name: str, options: Mapping[str, Any], matches: Callable[[torch.Tensor], bool]) -> Lane:
        self.switch.compile(name, options)
        self.denoiser.forward()
        return Lane(self.denoiser.forward, name, matches(self.denoiser.forward()))

    def _ours(
        self, reference: Observation, steady: bool, matches: Callable[[torch.Tensor], bool], state: str = OURS
    ) -> Lane:
        self.switch.to(state)
        handle = self.switch.handles[state]
        self.denoiser.forward()  # first sight: every signature runs both ways and is compared
        first = Calls.of(handle)
        seen = observe(self.denoiser, 0)
        calls = Calls.of(handle).since(first)
        why = "".join(f"; {reason} ({count})" for reason, count in calls.reasons.items())
        self.outcome.notes.append(f"{state}: {calls.fused} calls fused, {calls.eager} eager in one forward{why}")
        good = steady and same(seen, reference)
        if steady and not good and state in (self.schema.claims or ()):
            blocks = denoisers.share(seen.blocks, reference.blocks)
            self.outcome.notes.append(f"{state}: bits DIFFER from eager's; {blocks} blocks are equal")
        return Lane(self.denoiser.forward, state, good, lambda: matches(self.denoiser.forward()))

    def _graph(self, state: str, matches: Callable[[torch.Tensor], bool]) -> Lane:
        self.switch.to(state)
        replay, output = self._capture(self.denoiser.forward)

        def replayed() -> bool:
            poison([output])
            replay()
            return matches(output)

        return Lane(replay, None, replayed(), replayed if state in (self.schema.claims or ()) else None)

    def _floor(self) -> Lane:
        self.switch.to(EAGER)
        recorded = floor.record(self.denoiser.forward, self.denoiser.model)
        gemms, attentions = recorded.count("gemm"), recorded.count("attention")
        self.outcome.notes.append(f"floor: {gemms} GEMM calls and {attentions} attention calls, nothing else")
        replay, _ = self._capture(recorded.run)
        return Lane(replay, None, False)

    def _capture(self, body: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Record ``body`` as a CUDA graph; what replays it, and the memory that a replay writes its result to.

        The graphs of one contest share their memory: each replay fills what it needs again, and nothing of it but
        the result is read afterwards.
        """
        stream: Any = torch.cuda.Stream
        side = stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = body()

        def replay(_keeps: object = body) -> None:
            # A graph knows addresses alone: what the body holds, such as the inputs of the floor's calls, must live on.
            graph.replay()

        return replay, output

    def profile(self, runs: int = PROFILED_RUNS) -> None:
        """Count every variant's launches and their time by class. On a CPU there is nothing to count."""
        if self.bench.device.type != "cuda":
            return
        for name, lane in self.lanes.items():
            try:
                self._ready(lane)
                events = launches.owned(launches.events_of(lane.body, runs))
                if not events:
                    raise RuntimeError("the profiler saw nothing on the GPU; is another profiler attached to it?")
                lane.account = launches.account(events, self.names, runs)
            except Exception as error:  # the times are there, and not worth losing
                self.outcome.notes.append(f"{name} was not profiled: {said(error)}")

    def time(self, rounds: int) -> dict[str, float]:
        """Median ms of every variant, in turns; then those that claim bits are compared once more."""
        claims = self.schema.claims or ()
        timed = {name: lane for name, lane in self.lanes.items() if lane.bits_equal or name not in claims}
        taken = interleaved_ms(
            {name: lane.body for name, lane in timed.items()},
            self.bench.stopwatch,
            rounds,
            {name: partial(self._ready, lane) for name, lane in timed.items()},
            repeats=REPEATS,
        )
        for name, lane in timed.items():
            if lane.again is not None and lane.bits_equal:
                self._ready(lane)
                lane.bits_equal = lane.again()
                if not lane.bits_equal:
                    self.outcome.notes.append(f"{name}: bits differ from eager's first output after the timed runs")
        return taken

    def _ready(self, lane: Lane) -> None:
        if lane.state is not None:
            self.switch.to(lane.state)


def same(one: Observation, other: Observation) -> bool:
    """Whether two forwards gave the same output and the same block outputs, bit for bit."""
    blocks = zip(one.blocks, other.blocks, strict=True)
    return equal([one.output], [other.output]) and all(equal(a, b) for a, b in blocks)


def _room_to_recompile(choice: Choice) -> AbstractContextManager[Any]:
    """Several ways to compile share each block's code, and torch.compile bounds how often one code is compiled."""
    if len(choice.compiled) < 2:
        return nullcontext()
    from torch._dynamo import config

    patched: AbstractContextManager[Any] = config.patch(recompile_limit=8 * len(choice.compiled))
    return patched


def forget_compiled() -> None:
    """Drop what torch.compile keeps, so that the next size is compiled for itself and not for sizes in general."""
    torch.compiler.reset()
