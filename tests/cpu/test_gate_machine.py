"""The gate under random sequences of events, against a model of what it may do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, FakeStore, chain, fill_right, fill_zeros, inputs, make_gate
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from samebits.bits import compare
from samebits.certificate import StoredVerdict
from samebits.errors import LaunchError
from samebits.gate import State
from samebits.ops._op import Args
from samebits.signature import Signature
from samebits.verdict import Entry

LIMIT = 4
"""Signatures of a table: fewer than the calls have, so that some are forgotten now and then."""
ROWS = st.integers(1, 5)
TRUSTS = st.sampled_from(["hint", "hint", "stored", "anew", None])
EVERY = st.sampled_from([0, 1, 3])
NAMES = ("x", "scale", "eps", "shift")


class SpoilableStore(FakeStore):
    """A store that lies, or fails, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lies = self.fails = False

    def get(self, op: str, source: str, signature: str) -> StoredVerdict | None:
        """What was put, or that everything is well."""
        if self.fails:
            raise OSError("no disk")
        if self.lies:
            return StoredVerdict(op, source, signature, "verified")
        return super().get(op, source, signature)

    def put(self, verdict: StoredVerdict) -> None:
        """Keep it."""
        if self.fails:
            raise OSError("no disk")
        super().put(verdict)


class GateMachine(RuleBasedStateMachine):
    """Calls of five signatures at two sites, mixed with everything that may happen to a gate.

    Captures begin and end, the gate is switched off and on, its table is too small, answers of the device come late,
    re-checks are asked for, verdicts are stored, loaded and believed by other gates, and the store lies or fails. The
    kernel is right, lies (gives other bits), raises, or finds no memory. Every call must return eager's bits: a kernel
    that lies may answer nothing, unless it began to lie after its verdict and nothing made the gate look again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()
        self.monkeypatch.setattr("samebits.verdict.SIGNATURE_LIMIT", LIMIT)
        self.monkeypatch.setattr("samebits.verify.mark", lambda device: lambda: self.arrived)
        self.probe, self.kernel, self.store = FakeProbe(), FakeKernel(self._fill), SpoilableStore()
        self.arrived = True
        self.mode = "right"
        self.answers_with = fill_right
        self.trust: str | None = None
        self._open(None, 0)

    def teardown(self) -> None:
        self.monkeypatch.undo()

    def _open(self, trust: str | None, every: int) -> None:
        """Begin as another process would: a new gate, the same store."""
        self.trust, self.every = trust, every
        store = None if trust is None else self.store
        self.gate = make_gate(probe=self.probe, store=store, trust=trust or "hint", recheck_every=every)
        op = self.kernel.op()
        self.sites = [self.gate.site(name, op) for name in ("s", "t")]
        self.table = self.sites[0]._table
        self.calls = [0, 0]
        self.final: dict[Entry, State] = {}

    def _fill(self, args: Args, outputs: tuple[Tensor, ...]) -> None:
        if self.mode == "raises":
            raise LaunchError(kernel="k", cause="refused")
        if self.mode == "no memory":
            raise torch.OutOfMemoryError("no")
        self.answers_with(args, outputs)

    @initialize(stored=st.sets(ROWS), known=st.lists(ROWS, max_size=3), trust=TRUSTS, every=EVERY)
    def begin_as_a_later_process(self, stored: set[int], known: list[int], trust: str | None, every: int) -> None:
        for rows in sorted(stored):
            self._plant(rows, "verified")
        self._open(trust, every)
        self.call(known, 0)

    # Calls.

    @rule(rows=st.lists(ROWS, min_size=1, max_size=8), number=st.integers(0, 1))
    def call(self, rows: list[int], number: int) -> None:
        for count in rows:
            self._call(count, number)

    def _call(self, rows: int, number: int = 0) -> None:
        args = inputs(rows, 2)
        self.calls[number] += 1
        launched = self.kernel.verified_launches
        # A re-check that waits for memory lets the kernel answer meanwhile, also one that turned after its verdict.
        waits = any(entry.wait_calls for entry in self.table.entries.values())
        with torch.no_grad():
            result = self.sites[number](*args)
        if self.mode != "lies" or not waits:
            assert compare(result, chain(*args)) is None
            assert self.mode != "lies" or self.kernel.verified_launches == launched
        if self.mode == "lies" and self.arrived and not waits and self.gate.stopped is None:
            states = [entry.state for entry in self.table.entries.values() if entry.signature.args[0].shape[0] == rows]
            assert State.VERIFIED not in states, "a lie was compared and nothing came of it"

    @rule(here=st.booleans(), rows=st.lists(ROWS, min_size=1, max_size=3))
    def call_during_a_capture(self, here: bool, rows: list[int]) -> None:
        if self.mode == "lies":
            return  # Its re-check cannot be made inside a capture.
        self.probe.capturing_here, self.probe.capturing_elsewhere = here, not here
        launches, verified = self.kernel.launches, self.kernel.verified_launches
        self.call(rows, 0)
        assert self.kernel.launches - launches == self.kernel.verified_launches - verified  # Nothing was compared.
        self.probe.capturing_here = self.probe.capturing_elsewhere = False

    @rule(rows=ROWS)
    def call_while_switched_off(self, rows: int) -> None:
        self.gate.disable()
        fused = self.sites[0].counters.fused
        self._call(rows)
        assert self.sites[0].counters.fused == fused
        assert not self.table.launchers
        self.gate.enable()

    # The kernel, the device, time.

    @rule(mode=st.sampled_from(["right", "right", "lies", "lies", "raises", "no memory"]))
    def become(self, mode: str) -> None:
        if mode == "lies" and self.trust == "stored":
            self.trust_otherwise("hint")  # See begin_again.
        self.mode = mode
        self.answers_with = fill_zeros if mode == "lies" else fill_right
        if mode == "lies" and not (self.every == 1 and self.arrived):
            self.gate.recheck()  # As a sampled re-check would, sooner or later. At every call, it does at once.

    # Single steps seldom come in the orders in which something can go wrong: those are steps of their own.

    @rule(rows=ROWS, number=st.integers(0, 1), every=EVERY)
    def turn_wrong_after_a_verdict(self, rows: int, number: int, every: int) -> None:
        self.become("right")
        self._open(None, every)
        self.call([rows] * 3, number)
        self.become("lies")
        self.call([rows] * 2, number)

    @rule(rows=ROWS, between=st.lists(st.sampled_from(["lies", "right", "recheck", "other", "off"]), max_size=3))
    def confirm_a_hint_late(self, rows: int, between: list[str]) -> None:
        self._plant(rows, "verified")
        self.answers_arrive_or_are_late(arrived=False)
        self._open("hint", 0)
        self._call(rows)
        for event in between:
            if event in ("lies", "right"):
                self.become(event)
            elif event == "recheck":
                self.gate.recheck()
            elif event == "off":
                self.call_while_switched_off(rows)
            self.call([rows, 1 + rows % 5 if event == "other" else rows], 1)
        self.answers_arrive_or_are_late(arrived=True)
        self.call([rows] * 3, 0)

    @rule()
    def recheck(self) -> None:
        due = self.gate.recheck()
        assert due <= len(self.table.entries)
        assert not self.table.launchers

    @rule(arrived=st.booleans())
    def answers_arrive_or_are_late(self, arrived: bool) -> None:
        if self.mode == "lies" and not arrived:
            self.gate.recheck()  # Too many late answers, and re-checks pause.
        self.arrived = arrived
        left = self.gate.collect()
        assert left == 0 or not arrived

    # The store.

    @rule(trust=TRUSTS, every=EVERY)
    def begin_again(self, trust: str | None, every: int) -> None:
        """A new process: it loads what the last one stored."""
        # To believe a store is to believe it: what it vouches for must be true, which here means a right kernel.
        self._open("hint" if trust == "stored" and self.mode != "right" else trust, every)

    @rule(trust=st.sampled_from([None, "hint", "anew"]))
    def trust_otherwise(self, trust: str | None) -> None:
        """The same process, told to make something else of the store."""
        self.trust = trust
        self.gate.use(None if trust is None else self.store, trust or "hint")

    @rule(kind=st.sampled_from(["honest", "lies", "lies", "fails"]))
    def corrupt_the_store(self, kind: str) -> None:
        if self.trust != "stored":
            self.store.lies, self.store.fails = kind == "lies", kind == "fails"

    @rule(rows=ROWS, state=st.sampled_from(["verified", "verified", "refused"]))
    def plant_a_verdict(self, rows: int, state: Any) -> None:
        """Somebody else wrote into the store, truly or not."""
        if self.trust != "stored":
            self._plant(rows, state)

    def _plant(self, rows: int, state: Any) -> None:
        signature, source = Signature.of(NAMES, inputs(rows, 2)).canonical(), self.sites[0].op.source_hash
        self.store.known["scale_add", source, signature] = StoredVerdict("scale_add", source, signature, state)

    # What holds after every step.

    @invariant()
    def every_call_is_counted_once(self) -> None:
        for site, calls in zip(self.sites, self.calls, strict=True):
            counters = site.counters
            assert counters.fused + counters.eager == calls
            assert sum(counters.reasons.values()) == counters.eager
            assert "" not in counters.reasons
            assert counters.differed == len(counters.revocations) <= counters.rechecked

    @invariant()
    def verdicts_that_are_final_stay_until_they_are_forgotten(self) -> None:
        final = {}
        for entry in self.table.entries.values():
            assert self.final.get(entry, entry.state) is entry.state
            if entry.state in (State.REFUSED, State.FAILED):
                final[entry] = entry.state
        self.final = final

    @invariant()
    def only_verified_signatures_skip_the_gate(self) -> None:
        entries = self.table.entries
        assert self.table.launchers == {key: entry.open for key, entry in entries.items() if entry.open is not None}
        for entry in entries.values():
            if entry.open is not None:
                assert entry.state is State.VERIFIED
                assert not entry.recheck
            assert not entry.busy

    @invariant()
    def everything_is_bounded_and_nothing_hangs(self) -> None:
        entries = self.table.entries.values()
        assert len(entries) <= LIMIT
        assert {entry for entry in entries if entry.queued} == set(self.gate.pending)
        awaited = self.gate._awaited.outstanding
        assert sum(entry.watched for entry in entries) == len(awaited)
        assert {entry for entry in entries if entry.vouched} == {one.entry for one in awaited if one.vouched}
        assert not (self.arrived and awaited)
        for site in self.sites:
            assert len(site._guesses) <= 4


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


class BlindMachine(GateMachine):
    """The control: a gate that takes a hint's word for it lets lies through, and the machine must notice."""

    @rule(rows=ROWS)
    def believe_a_lie(self, rows: int) -> None:
        self._open("hint", 0)
        self.store.fails, self.store.lies = False, True
        assert self.gate._ledger.trust is not None
        self.gate._ledger.trust.trust = "stored"
        self.mode, self.answers_with = "lies", fill_zeros
        self._call(rows)


def test_the_machine_notices_a_gate_that_believes_too_much() -> None:
    seen = settings(
        max_examples=20, stateful_step_count=10, deadline=None, database=None, phases=[Phase.generate]
    )  # Nobody needs the smallest example of it.
    with pytest.raises(AssertionError):
        run_state_machine_as_test(BlindMachine, settings=seen)
