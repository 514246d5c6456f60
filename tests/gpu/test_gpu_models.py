"""Two blocks of each family at their real width: every block, the output, a sampler; and removal inside a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ring import assert_same_bits

from samebits.apply import apply
from samebits.bench import denoisers, models
from samebits.bench.comparing import Bench
from samebits.bench.evidence import DENOISERS
from samebits.bench.models import Denoiser
from samebits.gate import Gate
from samebits.ops import OPS

pytestmark = pytest.mark.gpu

BUILD: dict[str, Callable[[torch.device], Denoiser]] = {
    "qwen-image": partial(models.qwen_image, side=16, num_layers=2),
    "z-image": partial(models.z_image, side=32, n_layers=2, n_refiner_layers=1),
}


LEFT = ("rows are too few", "compute capability 9.0")
"""Why a product leaves a call to the linears and the activation's own site, which has it fused."""


@pytest.mark.parametrize("name", BUILD)
def test_blocks_output_and_sampler_have_eagers_bits(name: str, device: torch.device) -> None:
    row = denoisers.measure(BUILD[name](device), Bench.on(device), OPS, rounds=1)
    print(row)
    assert DENOISERS.problem(row) is None
    assert not row["void"], "eager differs from itself"
    assert row["finite"]
    assert DENOISERS.bits_equal(row), row
    assert row["fused_calls"] > 0
    # cuBLAS may compute a product of so few rows otherwise with joined weights; then the linears run apart.
    counted = {why: calls for why, calls in row["reasons"].items() if calls and not why.startswith("refused")}
    others = {why: calls for why, calls in counted.items() if not any(words in why for words in LEFT)}
    assert not others, others
    assert 0 < row["launches_ours"] < row["launches_eager"]
    assert row["by_class_ours"]["ours"] > 0
    assert row["by_class_eager"]["ours"] == 0


@pytest.mark.parametrize("name", BUILD)
def test_removal_and_garbage_collection_inside_a_capture(name: str, device: torch.device) -> None:
    denoiser = BUILD[name](device)

    def forward() -> torch.Tensor:
        return denoiser.velocity(denoiser.latents, 0.7)

    expected = forward().clone()
    handle = apply(denoiser.model, gate=Gate())
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            assert_same_bits(forward(), expected)
    torch.cuda.current_stream().wait_stream(side)
    fused = sum(row.fused for row in handle.report().rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = forward()
        counted = sum(row.fused for row in handle.report().rows)
        handle.remove()
        del handle
        gc.collect()
        eager = forward()
    assert counted > fused, "the first half of the graph holds no kernel of ours"
    for _ in range(2):
        ours.fill_(float("nan"))
        eager.fill_(float("nan"))
        graph.replay()
        assert_same_bits(ours, expected)
        assert_same_bits(eager, expected)
