"""Kernels built for the CPU: every call is compared, because the CPU's sums only happen to agree with the GPU's."""

from __future__ import annotations

from gate_fakes import FakeKernel, chain, fill_right, fill_zeros, inputs, make_gate, only

from samebits import bits
from samebits.gate import State


def test_every_call_is_compared_and_gets_eager_s_bits() -> None:
    kernel = FakeKernel()
    gate = make_gate()
    site = gate.site("block.0", kernel.op(), host=True)
    for seed in range(3):
        args = inputs(seed=seed)
        assert bits.compare(site(*args), chain(*args)) is None
    assert (kernel.launches, kernel.references) == (3, 3)
    assert (site.counters.fused, site.counters.eager) == (3, 0)
    assert only(gate).verifications == 3


def test_a_kernel_that_agreed_by_chance_changes_no_bit_later() -> None:
    kernel = FakeKernel(fill_right)
    gate = make_gate()
    site = gate.site("block.0", kernel.op(), host=True)
    site(*inputs(seed=0))
    assert only(gate).state is State.VERIFIED
    kernel.fill = fill_zeros
    for seed in (1, 2):
        args = inputs(seed=seed)
        assert bits.compare(site(*args), chain(*args)) is None
    assert only(gate).state is State.REFUSED
    assert only(gate).revoked
    assert (site.counters.fused, site.counters.eager) == (1, 2)
    assert kernel.launches == 2, "a refused kernel was run again"


def test_on_a_gpu_s_table_a_verified_kernel_is_not_compared_again() -> None:
    """The control: the same calls without ``host``."""
    kernel = FakeKernel()
    site = make_gate().site("block.0", kernel.op())
    for seed in range(3):
        site(*inputs(seed=seed))
    assert (kernel.launches, kernel.verified_launches, kernel.references) == (3, 2, 1)
    assert (site.counters.fused, site.counters.eager) == (2, 1)
