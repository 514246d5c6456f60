"""A new signature is compared on made-up inputs too: its first call may bring too little to tell kernels apart."""

from __future__ import annotations

import pytest
import torch
from gate_fakes import FakeKernel, chain, fill_right, inputs, make_gate, only
from torch import Tensor

from samebits.bits import compare
from samebits.gate import State
from samebits.ops._op import Args


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def fill_right_on_zeros_alone(args: Args, outputs: tuple[Tensor, ...]) -> None:
    fill_right(args, outputs)
    if args[0].any():
        outputs[0][-1, -1] = torch.nextafter(outputs[0][-1, -1], torch.tensor(torch.inf))


def zeros() -> Args:
    x, scale, eps = inputs()
    return torch.zeros_like(x), scale, eps


def test_a_kernel_that_is_right_on_zeros_alone_is_refused_at_its_first_call() -> None:
    gate, kernel = make_gate(made_up_elements=64), FakeKernel(fill_right_on_zeros_alone)
    site = gate.site("block.0", kernel.op())
    for args in (zeros(), inputs()):
        assert compare(site(*args), chain(*args)) is None
    verdict = only(gate)
    assert verdict.state is State.REFUSED
    assert "on made-up inputs, 1 of 32 elements differ, first at [3, 7]" in verdict.cause
    assert kernel.verified_launches == 0


def test_without_made_up_inputs_such_a_kernel_would_have_been_believed() -> None:
    gate, kernel = make_gate(made_up_elements=0), FakeKernel(fill_right_on_zeros_alone)
    site = gate.site("block.0", kernel.op())
    site(*zeros())
    assert only(gate).state is State.VERIFIED
    assert compare(site(*inputs()), chain(*inputs())) is not None


def test_draws_stop_once_enough_elements_were_compared() -> None:
    gate, kernel = make_gate(made_up_elements=65), FakeKernel()
    site = gate.site("block.0", kernel.op())
    site(*inputs())  # 32 elements a draw
    assert (only(gate).state, kernel.launches, kernel.references) == (State.VERIFIED, 4, 4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("not such values")])
def test_what_only_made_up_inputs_raise_leaves_the_comparison_of_the_call(error: Exception) -> None:
    kernel = FakeKernel()

    def reference(x: Tensor, scale: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
        if kernel.references > 1:
            raise error
        return chain(x, scale, eps, shift)

    kernel.reference = reference
    gate = make_gate(made_up_elements=64)
    site = gate.site("block.0", kernel.op())
    for _ in range(2):
        assert compare(site(*inputs()), chain(*inputs())) is None
    assert (only(gate).state, kernel.verified_launches) == (State.VERIFIED, 1)
