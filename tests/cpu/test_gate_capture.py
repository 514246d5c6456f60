"""The gate while CUDA graphs are captured, here or in another thread, and what it catches up on afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, chain, fill_zeros, inputs, make_gate, only
from torch import Tensor

from samebits.bits import compare
from samebits.errors import CudaContextError
from samebits.gate import CAPTURING, State
from samebits.ops._library import blas_state


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_verified_signature_is_captured_as_it_is() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    probe.capturing_here = True
    asked = probe.asked
    site(*args)
    assert (site.counters.fused, kernel.verified_launches) == (1, 1)
    assert probe.asked == asked  # The way of a verified call asks nobody.


@pytest.mark.parametrize("where", ["capturing_here", "capturing_elsewhere"])
def test_an_unknown_signature_runs_eager_and_is_compared_at_the_next_quiet_call(where: str) -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe, strict=True)
    op = kernel.op()
    site, other = gate.site("s", op), gate.site("other", FakeKernel().op())
    args = inputs()
    setattr(probe, where, True)
    for _ in range(3):
        assert compare(site(*args), chain(*args)) is None
    assert (kernel.prepared, kernel.launches) == (0, 0)
    assert dict(site.counters.reasons) == {CAPTURING: 3}
    assert only(gate).state is State.UNKNOWN
    assert len(gate.pending) == 1
    setattr(probe, where, False)
    other(*inputs(rows=2))  # A quiet call of any site of this gate.
    assert len(gate.pending) == 0
    verdict = next(verdict for verdict in gate.verdicts() if verdict.signature.startswith("x: float32[4, 8]"))
    assert (verdict.state, verdict.basis) == (State.VERIFIED, "made-up inputs")
    setattr(probe, where, True)
    site(*args)  # Captured again, now fused.
    assert (site.counters.fused, kernel.verified_launches) == (1, 1)


def test_one_pending_signature_at_a_call_also_at_calls_that_launch() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    site(*inputs(rows=1))
    probe.capturing_here = True
    for rows in (2, 3, 4):
        site(*inputs(rows=rows))
    probe.capturing_here = False
    for left in (2, 1, 0):
        fused = site.counters.fused
        site(*inputs(rows=1))
        assert (len(gate.pending), site.counters.fused) == (left, fused + 1)


def test_a_real_call_of_a_pending_signature_compares_that_call() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    probe.capturing_here = True
    for rows in (2, 3):
        site(*inputs(rows=rows))
    probe.capturing_here = False
    site(*inputs(rows=3))  # The oldest on made-up inputs, and this one on its own.
    assert [verdict.basis for verdict in gate.verdicts()] == ["made-up inputs", "a call"]
    assert len(gate.pending) == 0


def test_verified_calls_inside_a_capture_with_pending_signatures_stay_fused() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    site(*inputs(rows=1))
    probe.capturing_here = True
    site(*inputs(rows=2))
    site(*inputs(rows=1))
    site(*inputs(rows=1))
    assert (site.counters.fused, len(gate.pending)) == (2, 1)


def test_a_recheck_waits_for_the_end_of_a_capture_and_the_kernel_answers_meanwhile() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    gate.recheck()
    probe.capturing_elsewhere = True
    site(*args)
    assert (only(gate).verifications, site.counters.fused) == (1, 1)
    probe.capturing_elsewhere = False
    site(*args)
    assert (only(gate).verifications, site.counters.fused, len(gate.pending)) == (2, 1, 0)


def test_no_tensor_is_kept_for_later() -> None:
    import gc
    import weakref

    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    probe.capturing_here = True
    args = inputs()
    gate.site("s", kernel.op())(*args)
    kept = [weakref.ref(arg) for arg in args[:2]]
    del args
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert len(gate.pending) == 1


def test_an_error_in_a_pending_comparison_keeps_no_tensor_alive() -> None:
    import gc
    import weakref

    probe, kernel, kept = FakeProbe(), FakeKernel(), []

    def fail(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        kept.extend(map(weakref.ref, (*args[:2], *outputs)))
        kernel.seen.clear()
        raise RuntimeError("no luck")

    gate = make_gate(probe=probe)
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    probe.capturing_here = True
    site(*inputs(rows=2))
    probe.capturing_here, kernel.fill = False, fail
    gc.disable()
    try:
        site(*args)
        assert [reference() for reference in kept[:3]] == [None] * 3
    finally:
        gc.enable()
    assert gate.verdicts()[1].state is State.FAILED


def test_autocast_of_another_device_does_not_reach_a_pending_comparison() -> None:
    """The call that makes the comparison brings no tensor of that device here, so autocast does not stop it."""
    probe, kernel = FakeProbe(), FakeKernel()

    def matmul(x: Tensor, scale: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
        return x @ scale.expand(x.shape[1], -1)  # in bf16 where autocast is on

    def fill(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        with torch.autocast("cpu", enabled=False):
            outputs[0].copy_(matmul(*args))

    kernel.fill, kernel.reference = fill, matmul
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    probe.capturing_here = True
    site(*inputs(rows=2))
    probe.capturing_here = False
    kernel.reference = lambda *args: torch.zeros(1) if args[0] is None else matmul(*args)
    with torch.autocast("cpu", torch.bfloat16):
        site(None, None, 0.5)
    assert gate.verdicts()[0].state is State.VERIFIED


def test_a_pending_signature_waits_for_the_determinism_flag_it_was_met_with() -> None:
    """Eager may choose another kernel under the flag: what is compared without it says nothing about it."""
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site, other = gate.site("s", kernel.op()), gate.site("other", FakeKernel().op())
    torch.use_deterministic_algorithms(True)
    try:
        probe.capturing_here = True
        site(*inputs())
        probe.capturing_here = False
        torch.use_deterministic_algorithms(False)
        other(*inputs())
        assert (len(gate.pending), kernel.launches) == (1, 0)
        torch.use_deterministic_algorithms(True)
        other(*inputs())
        assert (len(gate.pending), kernel.launches) == (0, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert gate.verdicts()[0].signature.endswith("eps=0.125, deterministic algorithms")


def test_a_pending_signature_waits_for_the_library_s_flags_that_it_was_met_with() -> None:
    """A library chooses its kernel by them, and a kernel of ours has the bits of one of those."""
    probe, kernel = FakeProbe(), FakeKernel()
    op = dataclasses.replace(kernel.op(), reference=lambda x, scale, eps, state: chain(x, scale, eps))
    kernel.fill = lambda args, outputs: outputs[0].copy_(chain(*args[:3]))
    gate = make_gate(probe=probe)
    site, other = gate.site("s", op), gate.site("other", FakeKernel().op())
    matmul = torch.backends.cuda.matmul
    was = matmul.allow_bf16_reduced_precision_reduction
    try:
        probe.capturing_here = True
        site(*inputs(), blas_state())
        probe.capturing_here = False
        matmul.allow_bf16_reduced_precision_reduction = not was
        other(*inputs())
        assert (len(gate.pending), kernel.launches) == (1, 0)
        matmul.allow_bf16_reduced_precision_reduction = was
        other(*inputs())
        assert (len(gate.pending), kernel.launches) == (0, 1)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = was


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.trial.PENDING_LIMIT", 2)
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    probe.capturing_here = True
    for rows in range(1, 6):
        site(*inputs(rows=rows))
    assert len(gate.pending) == 2


def test_made_up_inputs_have_the_signature_and_leave_the_random_state_alone() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    site = gate.site("s", kernel.op())
    base = torch.zeros(4, 3, 9)
    x = base[:, 1:, 1::2]
    scale = torch.zeros(1).expand(4)
    steps = torch.zeros(3, dtype=torch.int64)[1:].view(2, 1)
    probe.capturing_here = True
    kernel.reference = lambda *args: chain(*args).clone(memory_format=torch.contiguous_format)
    kernel.fill = lambda args, outputs: outputs[0].copy_(chain(*args))
    site(x, scale, 0.5, steps)
    probe.capturing_here = False
    state = torch.get_rng_state()
    gate.site("other", FakeKernel().op())(*inputs())
    assert torch.equal(torch.get_rng_state(), state)
    made = kernel.seen[0]
    for one, other in zip(made, (x, scale, 0.5, steps), strict=True):
        if isinstance(other, Tensor):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.data_ptr() % 16 == other.data_ptr() % 16
    assert made[0].std() > 0.3
    assert set(made[3].flatten().tolist()) <= {0, 1}
    assert made[2] == 0.5
    site(x, scale, 0.5, steps)
    assert site.counters.fused == 1


def test_a_pending_mismatch_raises_at_its_own_site_only() -> None:
    probe, wrong = FakeProbe(), FakeKernel(fill_zeros)
    gate = make_gate(probe=probe, strict=True)
    bad, good = gate.site("bad", wrong.op()), gate.site("good", FakeKernel().op())
    probe.capturing_here = True
    bad(*inputs())
    probe.capturing_here = False
    good(*inputs())
    states = {verdict.state for verdict in gate.verdicts()}
    assert states == {State.REFUSED, State.VERIFIED}
    with pytest.raises(Exception, match="is refused for"):
        bad(*inputs())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("made-up inputs do not suit me")])
def test_trouble_with_made_up_inputs_is_nobodys_error_and_leaves_the_signature_unknown(error: Exception) -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe, strict=True)
    site, other = gate.site("s", kernel.op()), gate.site("other", FakeKernel().op())
    probe.capturing_here = True
    site(*inputs())
    probe.capturing_here = False

    def raises(*args: Any) -> Tensor:
        raise error

    kernel.reference = raises
    assert compare(other(*inputs(rows=2)), chain(*inputs(rows=2))) is None
    kernel.reference = chain
    assert len(gate.pending) == 0
    site(*inputs())
    site(*inputs())
    assert site.counters.fused == 1


def test_a_pending_signature_without_a_tensor_is_unsupported() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    kernel.reference = lambda *args: torch.zeros(1)
    probe.capturing_here = True
    gate.site("s", kernel.op())(1.0, 2.0, 3.0)
    probe.capturing_here = False
    gate.site("other", FakeKernel().op())(*inputs())
    assert gate.verdicts()[0].cause == "no argument is a tensor"


def test_every_comparison_protects_captures_that_begin_meanwhile() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    site = make_gate(probe=probe).site("s", kernel.op())
    site(*inputs())
    site(*inputs())
    assert probe.inside_relaxed == 1


def test_a_sticky_error_in_a_pending_comparison_stops_the_gate() -> None:
    probe, kernel = FakeProbe(), FakeKernel()
    gate = make_gate(probe=probe)
    probe.capturing_here = True
    gate.site("s", kernel.op())(*inputs())
    probe.capturing_here = False
    kernel.prepare_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(CudaContextError):
        gate.site("other", FakeKernel().op())(*inputs())
    assert gate.stopped is not None
