"""A table that is full: the signatures met longest ago go, faults are remembered longer, memory is bounded."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, chain, fill_right, fill_zeros, inputs, make_gate
from torch import Tensor

from samebits.bits import compare
from samebits.gate import FULL, Gate, Site, State
from samebits.ops._op import Args
from samebits.verdict import LASTING_AGES

LIMIT = 16


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr("samebits.verdict.SIGNATURE_LIMIT", LIMIT)
    with torch.no_grad():
        yield


def bench(probe: FakeProbe | None = None) -> tuple[Gate, FakeKernel, Site]:
    gate, kernel = make_gate(probe=probe), FakeKernel()
    return gate, kernel, gate.site("s", kernel.op())


def call(site: Site, *rows: int) -> None:
    """Call with each number of rows; eager's bits come back whatever the table does."""
    for count in rows:
        args = inputs(count, 2)
        assert compare(site(*args), chain(*args)) is None


def known(site: Site) -> set[int]:
    """The numbers of rows whose signatures are remembered."""
    return {entry.signature.args[0].shape[0] for entry in site._table.entries.values()}


def check(site: Site) -> None:
    """What holds at every moment, whatever was forgotten."""
    table = site._table
    assert len(table.entries) <= LIMIT
    open_ones = {key: entry.open for key, entry in table.entries.items() if entry.open is not None}
    assert table.launchers == open_ones
    assert all(table.entries[key].state is State.VERIFIED for key in open_ones)


def test_a_program_whose_shapes_never_repeat_keeps_fusing_and_fills_no_memory() -> None:
    gate, _, site = bench()
    for rows in range(1, 200):
        call(site, rows, rows)
        check(site)
    assert site.counters.fused == 199
    assert FULL not in site.counters.reasons
    assert len(gate.verdicts()) <= LIMIT


def test_a_table_that_forgets_nothing_would_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what came before, new signatures stay eager for ever."""
    _, _, site = bench()
    monkeypatch.setattr("samebits.verdict.Table._forget", lambda self: False)
    for rows in range(1, LIMIT + 4):
        call(site, rows, rows)
    assert site.counters.reasons[FULL] == 6
    assert site.counters.fused == LIMIT


def test_what_is_called_again_and_again_stays_and_is_verified_once() -> None:
    gate, _, site = bench()
    for rows in range(2, 300):
        call(site, 1, rows)
        check(site)
    assert 1 in known(site)
    verdict = next(v for v in gate.verdicts() if v.signature.startswith("x: float32[1, 2]"))
    assert verdict.verifications == 1
    assert site.counters.fused == 297


def test_the_ones_not_met_for_longest_go_first() -> None:
    _, _, site = bench()
    call(site, *range(1, LIMIT + 1))
    call(site, 1, 4)
    call(site, 100)  # No room: the two oldest that were not met again go.
    assert known(site) == {1, *range(4, LIMIT + 1), 100}
    call(site, 5, 101, 102)
    assert known(site) == {1, 4, 5, *range(8, LIMIT + 1), 100, 101, 102}


def test_a_verified_signature_is_open_again_after_one_call() -> None:
    _, kernel, site = bench()
    call(site, *range(1, LIMIT + 1))
    call(site, 100)
    assert not site._table.launchers or set(site._table.launchers) == {
        key for key, entry in site._table.entries.items() if entry.signature.args[0].shape[0] == 100
    }
    prepared, launches = kernel.prepared, kernel.verified_launches
    call(site, 5)
    assert (kernel.prepared, kernel.verified_launches) == (prepared, launches + 1)
    check(site)
    answered = []
    site._gate.answer = lambda *args: answered.append(args)  # type: ignore[method-assign]
    call(site, 5)
    assert not answered


def test_a_signature_that_was_not_met_in_this_age_is_called_in_a_capture_as_a_verified_one() -> None:
    probe = FakeProbe()
    gate, _, site = bench(probe)
    call(site, *range(1, LIMIT + 1))
    call(site, 100)
    probe.capturing_here = True
    fused = site.counters.fused
    call(site, 7)
    assert site.counters.fused == fused + 1
    assert not gate.pending


def test_refused_and_failed_signatures_are_remembered_longer_but_not_for_ever() -> None:
    _, kernel, site = bench()
    kernel.fill = fill_zeros
    call(site, 1)
    kernel.prepare_error = ValueError("a mistake of ours")
    call(site, 2)
    kernel.prepare_error, kernel.fill = None, fill_right
    call(site, 3)
    lasted = {}
    for rows in range(4, 200):
        call(site, rows)
        check(site)
        for number in {1, 2, 3} & known(site):
            lasted[number] = rows
    assert lasted[3] < LIMIT + 4
    assert lasted[1] > lasted[3] + LIMIT // 8 * (LASTING_AGES - 2)
    assert lasted[2] > lasted[3] + LIMIT // 8 * (LASTING_AGES - 2)
    assert max(lasted.values()) < 100


def test_a_table_full_of_refusals_still_takes_new_signatures() -> None:
    _, kernel, site = bench()
    kernel.fill = fill_zeros
    for rows in range(1, 60):
        call(site, rows, rows)
        check(site)
    kernel.fill = fill_right
    call(site, 100, 100, 100)
    assert site.counters.fused == 2


def test_what_is_being_worked_on_is_never_forgotten() -> None:
    _, kernel, site = bench()
    inside, done = threading.Event(), threading.Event()

    def slow(args: Args, outputs: tuple[Tensor, ...]) -> None:
        if args[0].shape[0] == 1:
            inside.set()
            assert done.wait(30)
        fill_right(args, outputs)

    kernel.fill = slow
    thread = threading.Thread(target=call, args=(site, 1))
    thread.start()
    assert inside.wait(30)
    with torch.no_grad():
        call(site, *range(2, 100))
    assert 1 in known(site)
    done.set()
    thread.join(30)
    call(site, 1)
    assert site._table.entries[next(iter(site._table.launchers))].state is State.VERIFIED
    check(site)


def test_signatures_of_a_capture_stay_until_they_were_compared() -> None:
    probe = FakeProbe()
    gate, _, site = bench(probe)
    probe.capturing_here = True
    call(site, 1, 2)
    probe.capturing_here = False
    gate.pending, pending = {}, dict(gate.pending)  # Nothing is caught up on meanwhile.
    call(site, *range(3, 100))
    assert {1, 2} <= known(site)
    gate.pending.update(pending)
    check(site)


def test_with_every_signature_being_compared_a_new_one_is_eager() -> None:
    _, _, site = bench()
    call(site, *range(1, LIMIT + 1))
    for entry in site._table.entries.values():
        entry.busy = True
    call(site, 100)
    assert site.counters.reasons[FULL] == 1


def test_an_entry_that_was_forgotten_during_its_comparison_opens_nothing() -> None:
    _, kernel, site = bench()

    def forgotten(args: Args, outputs: tuple[Tensor, ...]) -> None:
        fill_right(args, outputs)
        site._table.entries.clear()

    kernel.fill = forgotten
    call(site, 1)
    assert not site._table.launchers
    kernel.fill = fill_right
    call(site, 1, 1)
    assert site.counters.fused == 1


def test_forgetting_a_verified_signature_counts_as_withdrawn_and_frees_its_kernel() -> None:
    gate, _, site = bench()
    call(site, 1)
    (entry,) = site._table.entries.values()
    kept = weakref.ref(entry.launcher)
    del entry
    call(site, *range(2, LIMIT + 1))
    assert gate.withdrawn == 0
    call(site, 100)
    assert gate.withdrawn == 2
    gc.collect()
    assert kept() is None


def test_pointers_that_change_at_every_call_make_no_signatures() -> None:
    gate, _, site = bench()
    kept: list[Any] = []
    for seed in range(50):
        x, scale, eps = inputs(4, 16, seed=seed)
        kept.append((x, scale))
        scale.data = scale.data.clone()
        assert compare(site(x, torch.nn.Parameter(scale) if seed % 2 else scale, eps), chain(x, scale, eps)) is None
    assert len({x.data_ptr() for x, _ in kept}) > 10
    assert len(gate.verdicts()) == 1
    assert site.counters.fused == 49
