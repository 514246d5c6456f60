"""Every case of every op's record, on two seeds, into poisoned memory between canaries."""

from __future__ import annotations

import pytest
import torch
from ring import Canaries, assert_same_bits, check

from samebits import bits
from samebits.bench.inputs import clone_args, unchanged
from samebits.ops import OPS, Case, Op

pytestmark = pytest.mark.gpu

CASES = [pytest.param(op, case, id=f"{op.name}-{case.dtype}-{case.name}") for op in OPS for case in op.cases]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_bits_of_every_case_of_the_record(op: Op, case: Case, device: torch.device) -> None:
    for seed in (0, 1):
        check(op, case.build(device, seed))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_launcher_serves_other_values_of_its_signature(op: Op, device: torch.device) -> None:
    case = op.cases[0]
    launcher = op.prepare(*case.build(device, 0))
    args = case.build(device, 5)
    expected = op.reference(*args)
    assert_same_bits(launcher(*args), expected)
    assert bits.compare(launcher(*case.build(device, 6)), expected) is not None, "other values, the same result"


def test_canaries_and_input_check_see_a_stray_write(device: torch.device) -> None:
    """The negative controls of ``check`` itself."""
    canaries = Canaries((torch.empty(8, 16, device=device),))
    assert canaries.alive()
    canaries.buffers[0][-1] = 0.0
    assert not canaries.alive()
    canaries = Canaries((torch.empty(8, 16, device=device, dtype=torch.bfloat16),))
    canaries.outputs[0].fill_(1.0)
    assert canaries.alive()
    whole = torch.zeros(4, 8, device=device)
    args = (whole[:, :4], None, 1.0)
    pristine = clone_args(args)
    assert unchanged(args, pristine)
    whole[0, 7] = 1.0  # between the rows of the view
    assert not unchanged(args, pristine)
