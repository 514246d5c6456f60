"""A proof on the GPU: whole domains, real eager, every control caught."""

from __future__ import annotations

import pytest
import torch

from samebits.ops import by_name
from samebits.proof.prove import prove

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_a_quick_proof_finds_nothing_and_misses_nothing(device: torch.device) -> None:
    proof = prove([by_name("gated_residual"), by_name("swiglu")], device, quick=True)
    wrong = [row for row in proof.rows if row["differ"] or "error" in row or not row["checked"]]
    assert not wrong
    missed = [verdict for verdict in proof.controls if verdict.caught is not True]
    assert not missed
    assert proof.good
    pairs = [row for row in proof.rows if row["step"] == "round(a * b)" and row["dtype"] == "bfloat16"]
    assert {row["checked"] for row in pairs} == {2 * (1 << 32)}
    singles = [row for row in proof.rows if row["domain"] == "all 2^32 fp32 values"]
    assert {row["checked"] for row in singles} == {1 << 32}
    assert {row["method"] for row in (*pairs, *singles)} == {"exhaustive"}
