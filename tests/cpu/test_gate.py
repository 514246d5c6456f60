"""The gate with kernels made of Python: the way of a call, what makes a signature, and who never sees a kernel."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from gate_fakes import FakeKernel, chain, fill_right, fill_zeros, inputs, make_gate, only
from torch import Tensor

from samebits.bits import compare
from samebits.gate import COMPARED, KILLED, Gate, State
from samebits.ops._op import Args


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


# The way of a verified call.


def test_first_call_compares_and_later_calls_only_launch() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("block.0", kernel.op())
    args = inputs()
    expected = chain(*args)
    for _ in range(4):
        assert compare(site(*args), expected) is None
    assert (kernel.prepared, kernel.references, kernel.launches, kernel.verified_launches) == (1, 1, 4, 3)
    assert (site.counters.fused, site.counters.eager, dict(site.counters.reasons)) == (3, 1, {COMPARED: 1})
    verdict = only(gate)
    assert (verdict.state, verdict.cause, verdict.verifications, verdict.basis) == (State.VERIFIED, "", 1, "a call")
    assert verdict.signature == "x: float32[4, 8] cpu, scale: float32[8] cpu, eps=0.125"


def test_the_first_caller_gets_eagers_own_tensor_and_the_kernel_never_sees_the_originals() -> None:
    gate, kernel = make_gate(), FakeKernel()
    x, scale, eps = inputs()
    made = []
    kernel.reference = lambda *args: made.append(chain(*args)) or made[-1]
    assert gate.site("s", kernel.op())(x, scale, eps) is made[0]
    (seen,) = kernel.seen
    assert {seen[0].data_ptr(), seen[1].data_ptr()}.isdisjoint({x.data_ptr(), scale.data_ptr()})


def test_a_verified_kernel_sees_the_originals() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    site(*args)
    assert kernel.seen[1][0] is args[0]


def test_sites_share_verdicts_and_count_for_themselves() -> None:
    gate, kernel = make_gate(), FakeKernel()
    op = kernel.op()
    first, second = gate.site("a", op), gate.site("b", op)
    first(*inputs())
    second(*inputs(seed=1))
    assert (first.counters.fused, first.counters.eager) == (0, 1)
    assert (second.counters.fused, second.counters.eager) == (1, 0)
    assert gate.sites == (first, second)
    del second
    assert gate.sites == (first,)


def test_ops_and_host_kernels_have_verdicts_of_their_own() -> None:
    gate, one, other = make_gate(), FakeKernel(), FakeKernel(fill_zeros)
    op = one.op()
    for site in (gate.site("a", op), gate.site("b", other.op()), gate.site("c", op, host=True)):
        site(*inputs())
    states = [(verdict.host, verdict.state) for verdict in gate.verdicts()]
    assert states == [(False, State.VERIFIED), (False, State.REFUSED), (True, State.VERIFIED)]


@pytest.mark.parametrize("change", ["rows", "dtype", "strides", "alignment", "eps", "eps type", "none", "parameter"])
def test_every_change_that_matters_is_another_signature(change: str) -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    x, scale, eps = inputs()
    site(x, scale, eps)
    if change == "rows":
        site(x[:3], scale, eps)
    elif change == "dtype":
        site(x.double(), scale, eps)
    elif change == "strides":
        site(x.t().contiguous().t(), scale, eps)
    elif change == "alignment":
        site(torch.empty(33)[1:].view(4, 8).copy_(x), scale, eps)
    elif change == "eps":
        site(x, scale, 0.25)
    elif change == "eps type":
        site(x, scale, 0)
        site(x, scale, False)
        site(x, scale, 0.0)
        site(x, scale, -0.0)
    elif change == "none":
        site(x, scale, eps, None)
        site(x, scale, eps, scale)
    else:
        site(x, torch.nn.Parameter(scale), eps)
    extra = {"eps type": 4, "none": 2, "parameter": 0}.get(change, 1)
    assert len(gate.verdicts()) == 1 + extra
    assert site.counters.fused == (1 if change == "parameter" else 0)


def test_a_nan_scalar_does_not_grow_the_table() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    x, scale, _ = inputs()
    for _ in range(3):
        site(x, scale, math.nan)
    assert len(gate.verdicts()) == 1


# Unsupported: never a kernel, never an error.


def test_unsupported_is_settled_once_with_its_sentence() -> None:
    gate, kernel = make_gate(), FakeKernel()
    asked = []
    kernel.reason = lambda *args: asked.append(args) or "the width 8 is no multiple of 16"
    site, args = gate.site("s", kernel.op()), inputs()
    for _ in range(3):
        assert compare(site(*args), chain(*args)) is None
    assert (len(asked), kernel.prepared, kernel.launches) == (1, 0, 0)
    assert dict(site.counters.reasons) == {"unsupported: the width 8 is no multiple of 16": 3}


def test_an_unavailable_device_is_asked_about_once_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = []
    gate = Gate(unavailable=lambda device, host: asked.append((device, host)) or "there is no GPU")
    kernel = FakeKernel()
    site = gate.site("s", kernel.op(), strict=True)
    with caplog.at_level(logging.WARNING, "samebits"):
        for rows in (3, 4, 4):
            site(*inputs(rows))
    assert asked == [(torch.device("cpu"), False)]
    assert dict(site.counters.reasons) == {"unsupported: there is no GPU": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "samebits: everything on cpu runs eager: there is no GPU"
    ]
    assert kernel.prepared == 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: x.as_subclass(type("Wrapped", (Tensor,), {})), "a tensor subclass (test_gate.Wrapped)"),
        (lambda x: torch.randn(4, 8, dtype=torch.complex64).conj().imag, "a tensor with a lazy negation"),
        (lambda x: x.to("meta"), "a tensor on the meta device"),
        (lambda x: x[:0], "an empty tensor"),
        (lambda x: x.to_sparse(), "a tensor of layout torch.sparse_coo"),
    ],
)
def test_only_plain_tensors_reach_a_kernel(spoil: object, reason: str) -> None:
    gate, kernel = make_gate(), FakeKernel()
    kernel.reference = lambda *args: torch.zeros(1)
    site = gate.site("s", kernel.op())
    x, scale, eps = inputs()
    site(x, scale, eps)
    site(spoil(x), scale, eps)  # type: ignore[operator]
    assert kernel.launches == 1
    assert any(counted.startswith(f"argument 0 is {reason}") for counted in site.counters.reasons)


def test_other_arguments_are_named() -> None:
    gate, kernel = make_gate(), FakeKernel()
    kernel.reference = lambda *args: torch.zeros(1)
    site = gate.site("s", kernel.op())
    site(torch.ones(1), [1, 2], 0.5)
    assert list(site.counters.reasons) == ["argument 1 is a builtins.list, neither a tensor nor a scalar"]
    site(1, 2, 0.5)
    assert "unsupported: no argument is a tensor" in site.counters.reasons


def test_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.verdict.REASON_LIMIT", 2)
    gate, kernel = make_gate(), FakeKernel()
    kernel.reason = lambda x, *rest: f"{len(x)} rows"
    site = gate.site("s", kernel.op())
    for rows in (1, 2, 3, 4, 1):
        site(*inputs(rows))
    assert dict(site.counters.reasons) == {"unsupported: 1 rows": 2, "unsupported: 2 rows": 1, "other reasons": 2}


# Off and on.


def test_disable_and_enable() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    gate.disable("switched off for a test")
    assert gate.stopped == "switched off for a test"
    site(*args)
    site(*inputs(rows=7))
    assert site.counters.reasons["switched off for a test"] == 2
    assert len(gate.verdicts()) == 1
    gate.enable()
    site(*args)
    assert (site.counters.fused, gate.stopped) == (1, None)


def test_disabled_during_a_comparison_stays_disabled() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()

    def disabling(args: Args, outputs: tuple[Tensor, ...]) -> None:
        fill_right(args, outputs)
        gate.disable()

    kernel.fill = disabling
    site(*args)
    site(*args)
    assert (only(gate).state, site.counters.fused) == (State.VERIFIED, 0)
    gate.enable()
    site(*args)
    assert site.counters.fused == 1


def test_the_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_DISABLE", "1")
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    site(*inputs())
    gate.enable()
    site(*inputs())
    assert dict(site.counters.reasons) == {KILLED: 2}
    assert kernel.prepared == 0
    monkeypatch.delenv("SAMEBITS_DISABLE")
    gate.enable()
    site(*inputs())
    assert kernel.prepared == 1
