"""The gate with wrong and failing kernels: eager's bits whatever happens, the fault named, the rest untouched."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import logging
import math
import operator
import weakref
from collections.abc import Iterator

import pytest
import torch
from gate_fakes import FakeKernel, chain, fill_right, fill_zeros, inputs, make_gate, only
from torch import Tensor

from samebits.bits import compare, integer_view
from samebits.errors import CompileError, CompileInCaptureError, ContractViolation, KernelFailed, LaunchError
from samebits.gate import State
from samebits.ops._op import Args


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def fill_one_ulp_off(args: Args, outputs: tuple[Tensor, ...]) -> None:
    fill_right(args, outputs)
    integer_view(outputs[0])[1, 2] += 1


def fill_sign_of_zero(args: Args, outputs: tuple[Tensor, ...]) -> None:
    fill_right(args, outputs)
    outputs[0][0, 0] = -0.0


def fill_all_but_one(args: Args, outputs: tuple[Tensor, ...]) -> None:
    outputs[0][:-1] = chain(*args)[:-1]


def fill_and_write_input(args: Args, outputs: tuple[Tensor, ...]) -> None:
    fill_right(args, outputs)
    args[1][3] = 7.0


def fill_raises(args: Args, outputs: tuple[Tensor, ...]) -> None:
    raise LaunchError(kernel="k", cause="too many resources requested for launch")


# A wrong kernel never changes a result, and only its own signature falls.


@pytest.mark.parametrize(
    ("fill", "state", "cause"),
    [
        (fill_zeros, State.REFUSED, "32 of 32 elements differ, first at [0, 0]"),
        (fill_one_ulp_off, State.REFUSED, "1 of 32 elements differ, first at [1, 2]"),
        (fill_all_but_one, State.REFUSED, "the kernel never wrote that element"),
        (fill_and_write_input, State.REFUSED, "the kernel wrote to its input scale: 1 of 8 elements differ"),
        (fill_raises, State.FAILED, "LaunchError: kernel k could not be launched: too many resources"),
    ],
)
def test_a_wrong_kernel_is_eager_for_its_signature_alone(
    fill: object, state: State, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate, right, wrong = make_gate(), FakeKernel(), FakeKernel(fill)  # type: ignore[arg-type]
    good, bad = gate.site("good", right.op("right")), gate.site("bad", wrong.op("wrong"))
    args = inputs()
    kept = [arg.clone() for arg in args[:2]]
    expected = chain(*args)
    with caplog.at_level(logging.WARNING, "samebits"):
        for _ in range(3):
            assert compare(bad(*args), expected) is None
            assert compare(good(*args), expected) is None
    assert compare(list(args[:2]), kept) is None
    verdict = gate.verdicts()[1] if gate.verdicts()[1].op == "wrong" else gate.verdicts()[0]
    assert verdict.state is state
    assert cause in verdict.cause
    assert (bad.counters.fused, bad.counters.eager) == (0, 3)
    assert list(bad.counters.reasons) == [f"{state.value}: {verdict.cause}"]
    assert (good.counters.fused, good.counters.eager) == (2, 1)
    assert wrong.launches == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    # Another signature of the same op is judged for itself.
    wrong.fill = fill_right
    bad(*inputs(rows=5))
    bad(*inputs(rows=5))
    assert bad.counters.fused == 1


def test_one_ulp_is_named_with_both_values() -> None:
    gate, kernel = make_gate(), FakeKernel(fill_one_ulp_off)
    args = inputs()
    gate.site("s", kernel.op())(*args)
    value = chain(*args)[1, 2].item()
    assert f"instead of {value!r}" in only(gate).cause
    assert only(gate).cause.endswith("1 ulp apart")


def test_minus_zero_for_zero_is_refused() -> None:
    gate, kernel = make_gate(), FakeKernel(fill_sign_of_zero)
    x, scale, _ = inputs()
    x[0, 0] = 0.0
    args = (x, scale, 0.0)
    result = gate.site("s", kernel.op())(*args)
    assert only(gate).state is State.REFUSED
    assert math.copysign(1.0, result[0, 0].item()) == 1.0


def test_a_kernel_that_ignores_the_memory_it_is_handed_is_refused() -> None:
    gate, kernel = make_gate(), FakeKernel()
    op = kernel.op()
    object.__setattr__(op, "prepare", lambda *args: lambda *args, out=None: chain(*args))
    gate.site("s", op)(*inputs())
    assert "other tensors than the ones it was handed" in only(gate).cause


def test_a_kernel_of_another_structure_is_refused() -> None:
    gate, kernel = make_gate(), FakeKernel()
    kernel.reference = lambda *args: (chain(*args),)
    gate.site("s", kernel.op())(*inputs())
    assert only(gate).cause == "expected a tuple of 1 tensors, got one tensor"


def test_eager_that_differs_from_itself_makes_the_comparison_void() -> None:
    gate, kernel = make_gate(), FakeKernel()
    calls = iter(range(10))
    kernel.reference = lambda *args: chain(*args) + next(calls)
    kernel.fill = lambda args, outputs: outputs[0].copy_(chain(*args) + 99)
    gate.site("s", kernel.op())(*inputs())
    assert only(gate).state is State.REFUSED
    assert only(gate).cause.startswith("the comparison is void, eager differs from itself: 32 of 32 elements differ")


# Errors heal, fail or stop.


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 4 bytes"),
        CompileInCaptureError(kernel="k", target="sm_90"),
    ],
)
def test_what_can_heal_stays_unknown_and_is_tried_again(error: Exception) -> None:
    gate, kernel = make_gate(strict=True), FakeKernel()
    kernel.prepare_error = error
    site, args = gate.site("s", kernel.op()), inputs()
    for _ in range(4):  # Fails, waits 1, fails, waits 2 of 2 ...
        assert compare(site(*args), chain(*args)) is None
    assert only(gate).state is State.UNKNOWN
    assert only(gate).verifications == 0
    kernel.prepare_error = None
    site(*args)
    assert only(gate).state is State.UNKNOWN
    site(*args)
    assert only(gate).state is State.VERIFIED
    site(*args)
    assert (site.counters.fused, site.counters.eager) == (1, 6)


def test_waiting_grows_and_is_bounded() -> None:
    gate, kernel = make_gate(), FakeKernel()
    attempts = []
    kernel.prepare_error = torch.OutOfMemoryError("no")
    kernel.reason = lambda *args: attempts.append(site.counters.eager)
    site, args = gate.site("s", kernel.op()), inputs(1, 1)
    for _ in range(4000):
        site(*args)
    gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert gaps == [2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 1025]
    assert dict(site.counters.reasons) == {
        "out of memory": len(attempts),
        "will be tried again: out of memory": 4000 - len(attempts),
    }


def test_out_of_memory_in_the_comparison_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()

    def no_room(tensor: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("samebits.verify.protect", no_room)
        assert compare(site(*args), chain(*args)) is None
    assert only(gate).state is State.UNKNOWN
    site(*args)
    site(*args)
    assert only(gate).state is State.VERIFIED
    assert kernel.prepared == 1


def test_a_compile_error_fails_the_signature_and_is_not_repeated() -> None:
    gate, kernel = make_gate(), FakeKernel()
    kernel.prepare_error = CompileError(kernel="k", target="sm_90", log="k.cu(3): error: expected a ;")
    site, args = gate.site("s", kernel.op()), inputs()
    for _ in range(3):
        assert compare(site(*args), chain(*args)) is None
        kernel.prepare_error = None
    verdict = only(gate)
    assert (verdict.state, kernel.prepared) == (State.FAILED, 0)
    assert verdict.cause == "CompileError: kernel k does not compile for sm_90. The compiler said:"


def test_a_verified_launch_that_raises_later_fails_its_signature() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    site(*args)
    kernel.fill = fill_raises
    assert compare(site(*args), chain(*args)) is None
    kernel.fill = fill_right
    assert compare(site(*args), chain(*args)) is None
    assert only(gate).state is State.FAILED
    assert only(gate).cause.startswith("a launch raised LaunchError")
    assert (site.counters.fused, site.counters.eager) == (1, 3)


def test_a_verified_launch_without_memory_does_not_fail_its_signature() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)

    def no_room(args: Args, outputs: tuple[Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    kernel.fill = no_room
    site(*args)
    kernel.fill = fill_right
    site(*args)
    assert only(gate).state is State.VERIFIED
    assert site.counters.fused == 1
    assert site.counters.reasons["a launch raised out of memory"] == 1


def test_an_error_of_the_reference_is_the_callers_own() -> None:
    gate, kernel = make_gate(), FakeKernel()

    class Mine(Exception):
        pass

    def raises(*args: object) -> Tensor:
        raise Mine("yours")

    site, args = gate.site("s", kernel.op()), inputs()
    kernel.reference = raises
    for _ in range(2):
        with pytest.raises(Mine, match=r"^yours$") as caught:
            site(*args)
        assert caught.value.__context__ is None
    assert (site.counters.fused, site.counters.eager) == (0, 0)
    kernel.reference = chain
    site(*args)
    site(*args)
    assert site.counters.fused == 1


def test_an_interrupt_leaves_the_signature_unknown() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()

    def interrupted(args: Args, outputs: tuple[Tensor, ...]) -> None:
        raise KeyboardInterrupt

    kernel.fill = interrupted
    with pytest.raises(KeyboardInterrupt):
        site(*args)
    assert only(gate).state is State.UNKNOWN
    kernel.fill = fill_right
    site(*args)
    assert only(gate).state is State.VERIFIED


# Strict.


@pytest.mark.parametrize(
    ("fill", "error", "words"),
    [
        (fill_zeros, ContractViolation, "op scale_add at site 'block.3' is refused for x: float32"),
        (fill_raises, KernelFailed, "op scale_add at site 'block.3' failed for x: float32"),
    ],
)
def test_strict_raises_instead_of_falling_back(fill: object, error: type[Exception], words: str) -> None:
    gate, kernel = make_gate(strict=True), FakeKernel(fill)  # type: ignore[arg-type]
    op = kernel.op()
    strict, lenient = gate.site("block.3", op), gate.site("block.4", op, strict=False)
    for _ in range(2):
        with pytest.raises(error, match=words.replace("[", "\\[")):
            strict(*inputs())
    assert compare(lenient(*inputs()), chain(*inputs())) is None
    assert kernel.launches == 1


def test_strict_raises_when_a_verified_launch_raises() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op(), strict=True), inputs()
    site(*args)
    kernel.fill = fill_raises
    with pytest.raises(KernelFailed, match="a launch raised LaunchError") as caught:
        site(*args)
    assert isinstance(caught.value.__cause__, LaunchError)


# Re-checks.


def test_a_recheck_revokes_when_the_reference_is_swapped() -> None:
    """The reference becomes a sum in reversed order after its verdict: the next comparison must see it."""
    gate, kernel = make_gate(), FakeKernel()

    def summed(order: int) -> object:
        return lambda x, scale, eps, shift=None: torch.stack(
            # Not sum(), which from Python 3.12 on makes up for its own rounding errors.
            [functools.reduce(operator.add, row.tolist()[::order]) * torch.ones(8, dtype=x.dtype) for row in x]
        )

    kernel.reference = summed(1)
    kernel.fill = lambda args, outputs: outputs[0].copy_(summed(1)(*args))
    op = kernel.op()
    site, other = gate.site("s", op), gate.site("t", op)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        0, 12, 8, dtype=torch.float64
    )
    args = (x, torch.ones(8), 0.125)
    assert not torch.equal(summed(1)(*args), summed(-1)(*args))
    site(*args)
    assert gate.recheck(op) == 1
    site(*args)  # Compared again, still the same.
    site(*args)
    assert (only(gate).state, only(gate).verifications, site.counters.fused) == (State.VERIFIED, 2, 1)
    kernel.reference = summed(-1)
    assert gate.recheck() == 1
    result = other(*args)
    assert compare(result, summed(-1)(*args)) is None
    verdict = only(gate)
    assert (verdict.state, verdict.revoked) == (State.REFUSED, True)
    assert verdict.cause.startswith("revoked by a re-check at t, it was verified before: ")
    assert "elements differ, first at [" in verdict.cause
    assert compare(site(*args), summed(-1)(*args)) is None
    assert kernel.verified_launches == 1


def test_a_recheck_names_its_op() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    site(*inputs())
    assert gate.recheck(FakeKernel().op()) == 0
    site(*inputs())
    assert only(gate).verifications == 1


# What went wrong keeps nothing alive: where memory was short, it must be free again when the call is over.


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Broken(Exception):
    """Raised by a kernel of these tests, anew each time."""


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Broken, torch.OutOfMemoryError])
@pytest.mark.parametrize("step", ["unsupported", "prepare", "launch"])
def test_an_error_keeps_no_tensor_alive(step: str, kind: type[Exception], strict: bool) -> None:
    kernel, gate = FakeKernel(), make_gate(strict=strict)

    def fail(*args: object) -> None:
        raise kind("no luck")

    op = kernel.op()
    if step == "launch":
        kernel.fill = fail
    else:
        op = dataclasses.replace(op, **{step: fail})
    site, args = gate.site("s", op), inputs()
    kept = [weakref.ref(arg) for arg in args[:2]]
    try:
        kept.append(weakref.ref(site(*args)))
    except KernelFailed:
        assert strict
        assert kind is Broken
    kernel.seen.clear()
    del args
    assert [reference() for reference in kept] == [None] * len(kept)
    assert only(gate).state is (State.FAILED if kind is Broken else State.UNKNOWN)
