"""The benchmark in FP8 on few blocks of both models: every variant, graphs, launches by class, biases absorbed."""

from __future__ import annotations

import pytest
import torch

from samebits.bench import evidence, models, quant
from samebits.bench.comparing import Bench
from samebits.bench.variants import Outcome
from samebits.ops import OPS
from samebits.quant._scaled_mm import why_no_fp8

pytestmark = pytest.mark.gpu

SIZE, BLOCKS = 512, 2


@pytest.fixture
def outcome(device: torch.device) -> Outcome:
    reason = why_no_fp8(device, 16, 16)
    if reason is not None:
        pytest.skip(reason)
    with torch.no_grad():
        denoiser = models.at_size(models.qwen_image(device, num_layers=BLOCKS), SIZE)
        found = quant.measure(denoiser, Bench.on(device), OPS, SIZE, 1, graphs=True, rounds=2)
    print(*found.rows, *found.notes, sep="\n")
    return found


def test_every_variant_of_a_forward_in_fp8(outcome: Outcome) -> None:
    rows = {row["variant"]: row for row in outcome.rows}
    assert tuple(rows) == evidence.QUANT_VARIANTS
    for name, row in rows.items():
        assert evidence.QUANT.problem(row) is None
        assert row["ms"] is not None, row
        assert row["bits_equal"] or name == "fp8_absorbed_graph", name
        assert row["launches"] == sum(row[f"launches_{kind}"] for kind in ("gemm", "attention", "other"))
        assert row["launches_attention"] >= BLOCKS
        # twelve FP8 products and two modulations a block; the scaled products count as what they are
        assert row["launches_gemm"] >= 14 * BLOCKS, name
        assert row["ms_gemm"] > 0
    assert rows["fp8_fused"]["launches"] < rows["fp8_unfused"]["launches"]
    absorbed = rows["fp8_absorbed_graph"]
    assert absorbed["biases_absorbed"] == 4 * BLOCKS
    assert absorbed["output_relative_error"] < 0.05
    assert quant.good(outcome)


def test_z_image_has_every_variant_but_the_one_that_absorbs(device: torch.device) -> None:
    reason = why_no_fp8(device, 16, 16)
    if reason is not None:
        pytest.skip(reason)
    with torch.no_grad():
        denoiser = models.at_size(models.z_image(device, n_layers=BLOCKS, n_refiner_layers=1), SIZE)
        found = quant.measure(denoiser, Bench.on(device), OPS, SIZE, 1, graphs=True, rounds=2)
    print(*found.rows, *found.notes, sep="\n")
    rows = {row["variant"]: row for row in found.rows}
    assert tuple(rows) == evidence.QUANT_VARIANTS[:-1]
    for name, row in rows.items():
        assert evidence.QUANT.problem(row) is None
        assert row["ms"] is not None, row
        assert row["bits_equal"], name
        # in each of four blocks seven products in FP8, in bf16 five, three being one there
        assert row["launches_gemm"] >= (5 if name == "bf16_exact_graph" else 7) * (BLOCKS + 2), name
    assert rows["fp8_fused"]["launches"] < rows["fp8_unfused"]["launches"]
    assert quant.good(found)


@pytest.mark.alone
def test_fused_it_spends_less_beside_the_products(outcome: Outcome) -> None:
    rows = {row["variant"]: row for row in outcome.rows}
    assert rows["fp8_fused"]["ms_other"] < rows["fp8_unfused"]["ms_other"]
