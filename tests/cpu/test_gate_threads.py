"""Threads on one gate: one verdict per signature, exact counts, eager's bits for everybody, no deadlock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, chain, fill_right, inputs, make_gate, only
from torch import Tensor

from samebits.bits import compare
from samebits.gate import COMPARED, ELSEWHERE, State
from samebits.ops._op import Args


@pytest.fixture(autouse=True)
def _hurried_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*bodies: Callable[[], None]) -> None:
    """Run every body in a thread of its own, all at once, and raise what any of them raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                barrier.wait(30)
                body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


def test_two_threads_on_a_cold_op_a_hundred_times() -> None:
    for attempt in range(100):
        gate, kernel = make_gate(), FakeKernel()
        site = gate.site("s", kernel.op())
        args = inputs(seed=attempt)
        expected = chain(*args)

        def body(site=site, args=args, expected=expected) -> None:  # type: ignore[no-untyped-def]
            for _ in range(3):
                assert compare(site(*args), expected) is None

        together(body, body)
        assert (only(gate).state, only(gate).verifications, kernel.prepared) == (State.VERIFIED, 1, 1)
        assert site.counters.fused + site.counters.eager == 6
        assert site.counters.reasons[COMPARED] == 1
        assert set(site.counters.reasons) <= {COMPARED, ELSEWHERE}
        assert kernel.verified_launches == site.counters.fused


def test_counts_are_exact() -> None:
    gate, kernel = make_gate(), FakeKernel()
    kernel.fill = lambda args, outputs: None
    kernel.reason = lambda x, *rest: "three rows" if len(x) == 3 else None
    kernel.reference = lambda *args: outputs[len(args[0])]
    outputs = {rows: torch.full((rows, 1), 0.0) for rows in (2, 3)}
    site = gate.site("s", kernel.op())
    fused, eager = inputs(2, 1), inputs(3, 1)
    kernel.fill = lambda args, outs: outs[0].zero_()
    with torch.no_grad():
        site(*fused)
        site(*eager)  # Else threads that meet it together count that another one is comparing it.

    def body() -> None:
        for _ in range(500):
            site(*fused)
            site(*eager)

    together(*[body] * 4)
    assert (site.counters.fused, site.counters.eager) == (2000, 2002)
    assert dict(site.counters.reasons) == {COMPARED: 1, "unsupported: three rows": 2001}


def test_the_other_thread_does_not_wait_for_a_comparison() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    inside, done = threading.Event(), threading.Event()

    def slow(args: Args, outputs: tuple[Tensor, ...]) -> None:
        inside.set()
        assert done.wait(30)
        fill_right(args, outputs)

    kernel.fill = slow

    def first() -> None:
        site(*args)

    def second() -> None:
        assert inside.wait(30)
        assert compare(site(*args), chain(*args)) is None
        assert site.counters.reasons[ELSEWHERE] == 1
        site(*inputs(rows=9))  # And it may compare another signature meanwhile.
        done.set()

    kernel.reason = lambda x, *rest: "nine rows" if len(x) == 9 else None
    together(first, second)
    assert (only_state(gate), kernel.launches) == ({State.VERIFIED, State.UNSUPPORTED}, 1)


def only_state(gate: object) -> set[State]:
    """The states of all verdicts of a gate."""
    return {verdict.state for verdict in gate.verdicts()}  # type: ignore[attr-defined]


def test_no_lock_is_held_while_code_of_others_runs() -> None:
    """The reference and the kernel may use the gate themselves, from this thread or by waiting for another."""
    gate, inner, kernel = make_gate(), FakeKernel(), FakeKernel()
    nested = gate.site("inner", inner.op("inner"))
    site = gate.site("outer", kernel.op("outer"))
    args = inputs()

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: (gate.verdicts(), nested(*args), gate.site("x", inner.op())))
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "the gate's lock is held"

    def reference(*args: object) -> Tensor:
        elsewhere()
        return nested(*args)

    def fill(args: Args, outputs: tuple[Tensor, ...]) -> None:
        elsewhere()
        fill_right(args, outputs)

    kernel.reference, kernel.fill = reference, fill
    kernel.reason = lambda *args: elsewhere()
    for _ in range(3):
        with torch.no_grad():
            assert compare(site(*args), chain(*args)) is None
    assert site.counters.fused == 2


def test_pending_signatures_are_compared_once_by_many_threads() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    probe.capturing_here = True
    with torch.no_grad():
        for rows in range(1, 9):
            site(*inputs(rows, 1))
    probe.capturing_here = False
    other = gate.site("other", FakeKernel().op())

    def body() -> None:
        for _ in range(20):
            other(*inputs(3, 1))

    together(*[body] * 4)
    assert len(gate.pending) == 0
    mine = [verdict for verdict in gate.verdicts() if verdict.basis == "made-up inputs"]
    assert [verdict.verifications for verdict in mine] == [1] * 8
    assert kernel.launches == 8


@pytest.mark.parametrize("asked", [True, False])
def test_a_recheck_that_is_asked_for_during_a_comparison_is_not_lost(asked: bool) -> None:
    """The comparison began before: what the reference became since then is only seen by another one."""
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    inside, done = threading.Event(), threading.Event()

    def slow(args: Args, outputs: tuple[Tensor, ...]) -> None:
        fill_right(args, outputs)
        inside.set()
        assert done.wait(30)

    kernel.fill = slow

    def swapped(x: Tensor, scale: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
        return chain(x, scale, 2 * eps, shift)

    def swap() -> None:
        assert inside.wait(30)
        kernel.reference = swapped
        assert not asked or gate.recheck() == 1
        kernel.fill = fill_right
        done.set()

    together(lambda: site(*args), swap)
    assert only(gate).state is State.VERIFIED
    with torch.no_grad():
        result = site(*args)
    if not asked:  # The control: nobody looks again by itself.
        assert compare(result, chain(*args)) is None
        return
    assert compare(result, swapped(*args)) is None
    verdict = only(gate)
    assert (verdict.state, verdict.verifications, verdict.revoked) == (State.REFUSED, 2, True)


def test_a_recheck_during_a_recheck_is_not_lost_either() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    asked: list[int] = []

    def fill(args: Args, outputs: tuple[Tensor, ...]) -> None:
        fill_right(args, outputs)
        if len(asked) < 3:
            asked.append(gate.recheck())

    kernel.fill = fill
    with torch.no_grad():
        for _ in range(5):
            assert compare(site(*args), chain(*args)) is None
    assert asked == [1, 1, 1]
    assert (only(gate).verifications, site.counters.fused) == (4, 1)


def test_rechecks_and_switching_off_while_threads_call() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs(2, 1)
    expected = chain(*args)
    callers = [threading.Event(), threading.Event()]

    def call(finished: threading.Event) -> None:
        try:
            for _ in range(300):
                assert compare(site(*args), expected) is None
        finally:
            finished.set()

    def disturb() -> None:
        while not all(finished.is_set() for finished in callers):
            gate.recheck()
            gate.disable()
            gate.enable()

    together(lambda: call(callers[0]), lambda: call(callers[1]), disturb)
    assert site.counters.fused + site.counters.eager == 600
    with torch.no_grad():
        site(*args)  # Perhaps a last re-check.
        fused = site.counters.fused
        site(*args)
    assert only(gate).state is State.VERIFIED
    assert site.counters.fused == fused + 1
