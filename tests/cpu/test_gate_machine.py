"""The gate under random sequences of events, against a model of what it may do."""

from __future__ import annotations

import torch
from gate_fakes import FakeKernel, FakeProbe, chain, fill_right, fill_zeros, inputs, make_gate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from samebits.bits import compare
from samebits.errors import LaunchError
from samebits.gate import State
from samebits.ops._op import Args

ROWS = st.integers(1, 3)


class GateMachine(RuleBasedStateMachine):
    """Calls of three signatures mixed with captures, faults, re-checks and switching off.

    The kernel is right, lies (gives other bits), raises, or finds no memory. A lie must never reach a caller once
    its signature is due for a comparison.
    """

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.kernel = FakeProbe(), FakeKernel(self._fill)
        self.gate = make_gate(probe=self.probe)
        self.site = self.gate.site("s", self.kernel.op())
        self.mode = "right"
        self.calls = 0
        self.final: dict[str, State] = {}
        self.answers_with = fill_right

    def _fill(self, args: Args, outputs: tuple[Tensor, ...]) -> None:
        if self.mode == "raises":
            raise LaunchError(kernel="k", cause="refused")
        if self.mode == "no memory":
            raise torch.OutOfMemoryError("no")
        self.answers_with(args, outputs)

    @initialize(known=st.lists(ROWS, max_size=3))
    def begin_with_verified_signatures(self, known: list[int]) -> None:
        self.call(known)

    @rule(rows=st.lists(ROWS, min_size=1, max_size=5))
    def call(self, rows: list[int]) -> None:
        for count in rows:
            self._call(count)

    def _call(self, rows: int) -> None:
        args = inputs(rows, 2)
        self.calls += 1
        launched = self.kernel.verified_launches
        # A re-check that waits for memory lets the kernel answer meanwhile, also one that turned after its verdict.
        waits = any(entry.wait_calls for entry in self.site._table.entries.values())
        with torch.no_grad():
            result = self.site(*args)
        if self.mode != "lies" or not waits:
            assert compare(result, chain(*args)) is None
            assert self.mode != "lies" or self.kernel.verified_launches == launched

    @rule(mode=st.sampled_from(["right", "lies", "raises", "no memory"]))
    def become(self, mode: str) -> None:
        self.mode = mode
        self.answers_with = fill_zeros if mode == "lies" else fill_right
        if mode == "lies":
            self.gate.recheck()  # As a sampled re-check would, sooner or later.

    @rule(here=st.booleans(), rows=st.lists(ROWS, min_size=1, max_size=3))
    def call_during_a_capture(self, here: bool, rows: list[int]) -> None:
        if self.mode == "lies":
            return  # Its re-check cannot be made inside a capture.
        self.probe.capturing_here, self.probe.capturing_elsewhere = here, not here
        self.call(rows)
        self.probe.capturing_here = self.probe.capturing_elsewhere = False

    @rule()
    def recheck(self) -> None:
        self.gate.recheck()

    @rule(rows=ROWS)
    def call_while_switched_off(self, rows: int) -> None:
        self.gate.disable()
        fused = self.site.counters.fused
        self._call(rows)
        assert self.site.counters.fused == fused
        assert not self.site._table.launchers
        self.gate.enable()

    @invariant()
    def every_call_is_counted_once(self) -> None:
        counters = self.site.counters
        assert counters.fused + counters.eager == self.calls
        assert sum(counters.reasons.values()) == counters.eager
        assert "" not in counters.reasons

    @invariant()
    def verdicts_that_are_final_stay(self) -> None:
        for verdict in self.gate.verdicts():
            assert self.final.get(verdict.signature, verdict.state) is verdict.state
            if verdict.state in (State.REFUSED, State.FAILED):
                self.final[verdict.signature] = verdict.state

    @invariant()
    def only_verified_signatures_skip_the_gate(self) -> None:
        table = self.site._table
        for key in table.launchers:
            assert key is not None
            entry = table.entries[key]
            assert entry.state is State.VERIFIED
            assert not entry.recheck
        assert not any(entry.busy for entry in table.entries.values())


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
