"""The continuous watch: sampled re-checks of verified calls, and answers that arrive later."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, chain, fill_right, fill_zeros, inputs, make_gate, only
from test_gate_threads import together
from torch import Tensor

from samebits.awaited import OUTSTANDING_LIMIT
from samebits.bits import compare, integer_view
from samebits.errors import ContractViolation, CudaContextError, KernelFailed, LaunchError
from samebits.gate import RECHECKED, Gate, Site, State
from samebits.ops._op import Args
from samebits.watch import first_due, gap


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


class Clock:
    """Stands for a GPU: what is asked of it is done when a test says so."""

    def __init__(self) -> None:
        self.done = True
        self.marks = 0

    def mark(self, device: torch.device) -> Any:
        self.marks += 1
        return lambda: self.done


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("samebits.verify.mark", clock.mark)
    return clock


def watched(every: int = 1, probe: FakeProbe | None = None, **options: Any) -> tuple[Gate, FakeKernel, Site]:
    """A gate whose sites compare one verified call in ``every`` again, with one verified signature."""
    gate, kernel = make_gate(probe=probe, recheck_every=every, **options), FakeKernel()
    site = gate.site("block.3.norm", kernel.op())
    site(*inputs())
    return gate, kernel, site


# The case for which there is a watch.


def sums(order: int) -> Any:
    """A chain of row sums, forwards or backwards. Not sum(), which makes up for its own rounding errors."""

    def reference(x: Tensor, scale: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
        rows = [functools.reduce(operator.add, row.tolist()[::order]) for row in x]
        return torch.stack([row * torch.ones(8, dtype=x.dtype) for row in rows])

    return reference


@pytest.mark.parametrize("every", [3, 0])
def test_a_reference_that_became_a_reversed_sum_is_found(every: int, caplog: pytest.LogCaptureFixture) -> None:
    gate, kernel = make_gate(recheck_every=every), FakeKernel()
    kernel.reference = sums(1)
    kernel.fill = lambda args, outputs: outputs[0].copy_(sums(1)(*args))
    op = kernel.op("row_sum")
    sites = [gate.site(f"block.{n}", op) for n in range(4)]
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    args = (x * torch.logspace(0, 12, 8, dtype=torch.float64), torch.ones(8), 0.125)
    before, after = sums(1)(*args), sums(-1)(*args)
    assert compare(before, after) is not None
    for site in sites:
        assert compare(site(*args), before) is None
    for _ in range(6):
        for site in sites:
            assert compare(site(*args), before) is None
    assert only(gate).state is State.VERIFIED
    kernel.reference = sums(-1)
    with caplog.at_level(logging.WARNING, "samebits"):
        results = [site(*args) for _ in range(12) for site in sites]
    if not every:
        # The control: without the watch nobody ever notices.
        assert all(compare(result, before) is None for result in results)
        assert only(gate).state is State.VERIFIED
        return
    found = next(number for number, result in enumerate(results) if compare(result, after) is None)
    assert found < 4 * every
    assert all(compare(result, after) is None for result in results[found:])
    verdict = only(gate)
    assert (verdict.state, verdict.revoked) == (State.REFUSED, True)
    ((site, revocation),) = [(site, found) for site in sites for found in site.counters.revocations]
    assert (revocation.site, revocation.op, revocation.signature) == (site.name, "row_sum", verdict.signature)
    first = (before != after).flatten().tolist().index(True)
    index, was, due = list(divmod(first, 8)), before.flatten()[first].item(), after.flatten()[first].item()
    assert f"elements differ, first at {index}: {was!r} (0x" in revocation.cause
    assert f"instead of {due!r} (0x" in revocation.cause
    assert verdict.cause == f"revoked by a re-check at {site.name}, it was verified before: {revocation.cause}"
    assert f"refused: {verdict.cause}" in site.counters.reasons
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert sum(site.counters.differed for site in sites) == 1


def test_a_gpu_that_computes_wrongly_once_is_found_too() -> None:
    gate, kernel, site = watched()
    spoilt = iter([False, False, True])

    def fill(args: Args, outputs: tuple[Tensor, ...]) -> None:
        fill_right(args, outputs)
        if next(spoilt, False):
            integer_view(outputs[0])[2, 5] ^= 1 << 22

    kernel.fill = fill
    for _ in range(10):
        assert compare(site(*inputs()), chain(*inputs())) is None
    assert "1 of 32 elements differ, first at [2, 5]" in only(gate).cause


def test_a_kernel_that_begins_to_write_to_its_input_is_found_on_copies() -> None:
    gate, kernel, site = watched()

    def fill(args: Args, outputs: tuple[Tensor, ...]) -> None:
        fill_right(args, outputs)
        args[1][3] = 7.0

    kernel.fill = fill
    args = inputs()
    for _ in range(3):
        assert compare(site(*args), chain(*inputs())) is None
    assert compare(args[1], inputs()[1]) is None
    assert "the kernel wrote to its input scale: 1 of 8 elements differ, first at [3]: 7.0" in only(gate).cause


def test_an_element_that_is_never_written_is_named() -> None:
    gate, kernel, site = watched()
    kernel.fill = lambda args, outputs: outputs[0][:-1].copy_(chain(*args)[:-1])
    for _ in range(3):
        site(*inputs())
    assert only(gate).cause.endswith("the kernel never wrote that element")


# Which calls are compared.


def test_every_call_is_compared_where_every_is_one() -> None:
    gate, kernel, site = watched(1)
    references = kernel.references
    for seed in range(10):
        args = inputs(seed=seed)
        assert compare(site(*args), chain(*args)) is None
    counters = site.counters
    assert (counters.rechecked, counters.differed, counters.reasons[RECHECKED]) == (10, 0, 10)
    assert counters.fused == 0
    assert kernel.references == references + 10
    assert only(gate).verifications == 11


def test_the_caller_gets_eagers_own_tensor_and_the_kernel_sees_copies() -> None:
    _, kernel, site = watched(1)
    made: list[Tensor] = []
    kernel.reference = lambda *args: made.append(chain(*args)) or made[-1]
    x, scale, eps = inputs()
    kernel.seen.clear()
    assert site(x, scale, eps) is made[0]
    (seen,) = kernel.seen
    assert {seen[0].data_ptr(), seen[1].data_ptr()}.isdisjoint({x.data_ptr(), scale.data_ptr()})


@pytest.mark.parametrize(("every", "steps"), [(7, 28), (28, 28), (10, 10), (100, 50), (50, 100)])
def test_samples_are_spread_over_sites_and_steps(every: int, steps: int) -> None:
    gate, kernel = make_gate(recheck_every=every), FakeKernel()
    op, args = kernel.op(), inputs(1, 1)
    sites = [gate.site(f"block.{n}", op) for n in range(6)]
    compared: Counter[tuple[int, int]] = Counter()
    runs = 24 * every // steps + 1
    for _ in range(runs):
        for step in range(steps):
            for number, site in enumerate(sites):
                before = site.counters.reasons[RECHECKED]
                site(*args)
                compared[number, step] += site.counters.reasons[RECHECKED] - before
    total = sum(compared.values())
    calls = runs * steps * len(sites)
    assert 0.7 < total * every / calls < 1.3
    per_site = Counter(number for number, step in compared.elements())
    assert len(per_site) == len(sites)
    assert max(per_site.values()) <= 2 * min(per_site.values())
    hit = {step for number, step in compared.elements()}
    assert len(hit) > 0.6 * min(steps, total)


def test_the_first_samples_of_sites_lie_apart() -> None:
    dues = [first_due(number, 100) for number in range(60)]
    assert all(0 <= due < 100 for due in dues)
    assert len({due // 10 for due in dues}) == 10
    gaps = [gap(number, 100) for number in range(1000)]
    assert min(gaps) >= 1
    assert max(gaps) <= 199
    assert abs(sum(gaps) / len(gaps) - 100) < 2


def test_off_means_off() -> None:
    gate, kernel, site = watched(0)
    references, launches = kernel.references, kernel.launches
    for _ in range(100):
        site(*inputs())
    assert (kernel.references, kernel.launches) == (references, launches + 100)
    assert (site.counters.fused, site.counters.rechecked) == (100, 0)
    assert gate.collect() == 0


def test_a_site_may_say_otherwise_than_its_gate() -> None:
    gate, kernel = make_gate(recheck_every=1), FakeKernel()
    op = kernel.op()
    never, always = gate.site("never", op, recheck_every=0), gate.site("as the gate", op)
    for _ in range(6):
        never(*inputs())
        always(*inputs())
    assert never.counters.rechecked == 0
    assert always.counters.rechecked > 0


def test_the_variable_is_the_default_and_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_RECHECK_EVERY", "12")
    assert make_gate().recheck_every == 12
    assert make_gate(recheck_every=0).recheck_every == 0


def test_a_negative_number_is_refused() -> None:
    for value in (1.5, True, "3"):
        with pytest.raises(ValueError, match="recheck_every must be a whole number"):
            make_gate(recheck_every=value)
    with pytest.raises(ValueError, match=r"recheck_every must be 0 \(never\) or more, got -1"):
        make_gate(recheck_every=-1)
    with pytest.raises(ValueError, match="recheck_every must be"):
        make_gate().site("s", FakeKernel().op(), recheck_every=-2)


def test_kernels_for_the_cpu_are_compared_at_every_call_anyway() -> None:
    gate, kernel = make_gate(recheck_every=1), FakeKernel()
    site = gate.site("s", kernel.op(), host=True)
    for _ in range(4):
        site(*inputs())
    assert (site.counters.rechecked, site.counters.reasons[RECHECKED], kernel.launches) == (0, 0, 4)


# Captures.


@pytest.mark.parametrize("where", ["capturing_here", "capturing_elsewhere"])
def test_nothing_is_sampled_during_a_capture(where: str) -> None:
    probe = FakeProbe()
    gate, kernel, site = watched(1, probe)
    setattr(probe, where, True)
    references = kernel.references
    for _ in range(20):
        site(*inputs())
    assert (kernel.references, site.counters.fused, site.counters.rechecked) == (references, 20, 0)
    setattr(probe, where, False)
    for _ in range(4):
        site(*inputs())
    assert site.counters.rechecked > 0
    assert gate.pending == {}


def test_an_answer_is_not_asked_for_during_a_capture(clock: Clock) -> None:
    probe = FakeProbe()
    gate, _, site = watched(1, probe)
    clock.done = False
    site(*inputs())
    clock.done, probe.capturing_here = True, True
    asked = []
    (awaited,) = gate._awaited.outstanding
    awaited.observation.arrived = lambda: asked.append(1) or True
    for _ in range(3):
        site(*inputs())
    assert not asked
    assert gate.collect() == 1
    probe.capturing_here = False
    assert gate.collect() == 0


def test_every_recheck_protects_captures_that_begin_meanwhile() -> None:
    probe = FakeProbe()
    _, _, site = watched(1, probe)
    inside = probe.inside_relaxed
    site(*inputs())
    assert probe.inside_relaxed >= inside + 2


# Answers that arrive later.


def test_the_kernel_answers_until_the_answer_is_there(clock: Clock) -> None:
    gate, kernel, site = watched(2)
    clock.done = False
    kernel.fill = lambda args, outputs: integer_view(outputs[0].copy_(chain(*args)))[0, 0].add_(1)
    results = [site(*inputs()) for _ in range(12)]
    equal = [compare(result, chain(*inputs())) is None for result in results]
    assert sum(equal) == site.counters.reasons[RECHECKED] == gate.collect() == clock.marks
    assert 3 <= sum(equal) <= 9
    assert [entry.state for entry in site._table.entries.values()] == [State.VERIFIED]
    clock.done = True
    assert compare(site(*inputs()), chain(*inputs())) is None
    assert (only(gate).state, only(gate).revoked, gate.collect()) == (State.REFUSED, True, 0)
    assert "1 of 32 elements differ, first at [0, 0]" in only(gate).cause
    # The others found the same, and there was no verdict left to take back.
    assert (site.counters.rechecked, site.counters.differed) == (clock.marks, 1)


def test_an_answer_is_read_by_calls_of_other_sites_and_by_reports(clock: Clock) -> None:
    gate, kernel, site = watched(1)
    clock.done = False
    kernel.fill = fill_zeros
    site(*inputs())
    clock.done = True
    other = gate.site("other", FakeKernel().op())
    other(*inputs())
    assert state_of(site) is State.REFUSED
    assert site.counters.differed == 1


def state_of(site: Site) -> State:
    """The state of the site's only signature, read without looking for answers."""
    (entry,) = site._table.entries.values()
    return entry.state


def test_answers_that_are_awaited_are_bounded(clock: Clock) -> None:
    gate, _, site = watched(1)
    clock.done = False
    for _ in range(OUTSTANDING_LIMIT + 20):
        site(*inputs())
    assert gate.collect() == OUTSTANDING_LIMIT
    assert site.counters.fused == 20
    clock.done = True
    assert gate.collect() == 0
    assert site.counters.rechecked == OUTSTANDING_LIMIT
    site(*inputs())  # And it goes on.
    assert site.counters.rechecked == OUTSTANDING_LIMIT + 1


def test_an_answer_that_comes_after_the_verdict_fell_changes_nothing(clock: Clock) -> None:
    gate, kernel, site = watched(1)
    clock.done = False
    kernel.fill = fill_zeros
    site(*inputs())
    (entry,) = site._table.entries.values()
    with gate._ledger.lock:
        site._table.settle(entry, State.FAILED, "of something else")
    clock.done = True
    gate.collect()
    assert (entry.state, entry.cause, entry.revoked) == (State.FAILED, "of something else", False)
    assert site.counters.differed == 0


def test_a_disabled_gate_reads_answers_and_samples_nothing(clock: Clock) -> None:
    gate, kernel, site = watched(1)
    clock.done = False
    kernel.fill = fill_zeros
    site(*inputs())
    gate.disable()
    clock.done = True
    launches = kernel.launches
    site(*inputs())
    assert kernel.launches == launches
    assert only(gate).state is State.REFUSED
    gate.enable()
    assert compare(site(*inputs()), chain(*inputs())) is None


def test_no_tensor_of_the_call_is_kept_while_an_answer_is_awaited(clock: Clock) -> None:
    gate, kernel, site = watched(1)
    clock.done = False
    args = inputs()
    result = site(*args)
    kept = [weakref.ref(tensor) for tensor in (*args[:2], result)]
    kernel.seen.clear()
    del args, result
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    assert gate.collect() == 1


def test_after_a_fork_nobody_waits_for_the_parents_answers(clock: Clock) -> None:
    gate, _, site = watched(1)
    clock.done = False
    site(*inputs())
    gate.after_fork()
    assert gate.collect() == 0
    clock.done = True
    for _ in range(4):
        site(*inputs())
    assert site.counters.rechecked > 0


# Errors on the way.


def test_a_reference_without_memory_leaves_the_call_to_the_kernel() -> None:
    gate, kernel, site = watched(1)

    def no_room(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    kernel.reference = no_room
    for _ in range(4):
        assert compare(site(*inputs()), chain(*inputs())) is None
    assert (only(gate).state, site.counters.fused, site.counters.rechecked) == (State.VERIFIED, 4, 0)


def test_a_comparison_without_memory_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, _, site = watched(1)

    def no_room(tensor: Tensor) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("samebits.verify.protect", no_room)
        assert compare(site(*inputs()), chain(*inputs())) is None
    assert (only(gate).state, site.counters.rechecked) == (State.VERIFIED, 0)
    for _ in range(3):
        site(*inputs())
    assert site.counters.rechecked > 0


@pytest.mark.parametrize("strict", [False, True])
def test_a_kernel_that_raises_in_a_recheck_fails_its_signature(strict: bool) -> None:
    gate, kernel, site = watched(1, strict=strict)

    def refuse(args: Args, outputs: tuple[Tensor, ...]) -> None:
        raise LaunchError(kernel="k", cause="too many resources")

    kernel.fill = refuse
    if strict:
        with pytest.raises(KernelFailed, match="a launch raised LaunchError"):
            site(*inputs())
    else:
        assert compare(site(*inputs()), chain(*inputs())) is None
        assert any(reason.startswith("failed: a launch raised LaunchError") for reason in site.counters.reasons)
    assert only(gate).state is State.FAILED


def test_strict_raises_at_the_next_call_of_a_revoked_signature() -> None:
    _, kernel, site = watched(1, strict=True)
    kernel.fill = fill_zeros
    assert compare(site(*inputs()), chain(*inputs())) is None  # Here the answer is not known yet.
    with pytest.raises(ContractViolation, match=r"revoked by a re-check at block\.3\.norm"):
        site(*inputs())


@pytest.mark.parametrize("where", ["kernel", "reference", "answer"])
def test_a_lost_context_in_a_recheck_stops_the_gate(where: str, clock: Clock) -> None:
    gate, kernel, site = watched(1)

    def dies(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if where == "answer":
        clock.done = False
        site(*inputs())
        (awaited,) = gate._awaited.outstanding
        awaited.observation.arrived = dies
    else:
        setattr(kernel, "fill" if where == "kernel" else "reference", dies)
    with pytest.raises(CudaContextError, match=r"block\.3\.norm"):
        site(*inputs())
    assert gate.stopped is not None
    assert gate.collect() == 0


def test_an_answer_that_cannot_be_read_is_given_up(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    gate, _, site = watched(1)
    clock.done = False
    site(*inputs())
    (awaited,) = gate._awaited.outstanding
    awaited.observation.arrived = lambda: 1 // 0
    with caplog.at_level(logging.WARNING, "samebits"):
        for _ in range(4):
            assert compare(site(*inputs()), chain(*inputs())) is None
    assert any("came to nothing: ZeroDivisionError" in record.getMessage() for record in caplog.records)
    assert only(gate).state is State.VERIFIED


def test_an_interrupt_in_a_recheck_leaves_nothing_behind() -> None:
    gate, kernel, site = watched(1)

    def interrupted(args: Args, outputs: tuple[Tensor, ...]) -> None:
        raise KeyboardInterrupt

    kernel.fill = interrupted
    with pytest.raises(KeyboardInterrupt):
        site(*inputs())
    kernel.fill = fill_right
    for _ in range(4):
        assert compare(site(*inputs()), chain(*inputs())) is None
    assert site.counters.rechecked > 0
    assert only(gate).state is State.VERIFIED


# Threads, and the cost.


def test_threads_on_watched_sites() -> None:
    gate, kernel = make_gate(recheck_every=3), FakeKernel()
    op = kernel.op()
    sites = [gate.site(f"s{n}", op) for n in range(2)]
    calls = [inputs(rows, 1) for rows in (2, 3)]
    expected = [chain(*args) for args in calls]

    def body() -> None:
        for number in range(200):
            args, right = calls[number % 2], expected[number % 2]
            assert compare(sites[number % 3 % 2](*args), right) is None

    together(*[body] * 4)
    counters = [site.counters for site in sites]
    assert sum(counter.fused + counter.eager for counter in counters) == 800
    assert sum(counter.rechecked for counter in counters) > 20
    assert sum(counter.differed for counter in counters) == 0
    assert {verdict.state for verdict in gate.verdicts()} == {State.VERIFIED}
    assert gate.collect() == 0


def test_threads_see_a_revocation_and_nothing_else_after_it() -> None:
    gate, kernel = make_gate(recheck_every=2), FakeKernel()
    sites = [gate.site(f"s{n}", kernel.op()) for n in range(2)]
    args = inputs(2, 1)
    sites[0](*args)
    kernel.fill = fill_zeros

    def body() -> None:
        for number in range(100):
            sites[number % 2](*args)

    together(*[body] * 3)
    for site in sites:
        assert compare(site(*args), chain(*args)) is None
    assert sum(site.counters.differed for site in sites) <= len(gate.verdicts())
    assert {verdict.state for verdict in gate.verdicts()} == {State.REFUSED}
    assert sum(site.counters.fused + site.counters.eager for site in sites) == 303


def test_a_call_that_is_not_due_asks_the_gate_nothing() -> None:
    gate, _, site = watched(1000)
    for _ in range(3):
        site(*inputs())
    asked: list[Any] = []
    answer = gate.answer
    gate.answer = lambda *args: asked.append(args) or answer(*args)  # type: ignore[method-assign]
    for _ in range(100):
        site(*inputs())
    assert len(asked) <= 2
