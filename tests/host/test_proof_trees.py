"""The proof of orders on this CPU: the kernels' own headers, behind the shim, against the planned trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from aten_emulator import aten_mean_square, aten_moments, aten_sum, mean_factor, reduce_plan
from torch import Tensor

from samebits.ops import OPS, by_name
from samebits.proof import trees, welford
from samebits.proof.tree_kernels import HEAD_NORM, LAYER_NORM, ROW_SUM, SumKernels
from samebits.proof.trees import TreeProof, prove_trees
from samebits.proof.workshop import Change

pytestmark = pytest.mark.host
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def proof() -> TreeProof:
    return prove_trees(OPS, CPU, quick=True)


def test_every_op_that_sums_is_proved_and_no_row_differs(proof: TreeProof) -> None:
    summing = {op.name for op in OPS if any(p.name in (ROW_SUM, HEAD_NORM, LAYER_NORM) for p in op.sources)}
    assert {row["op"] for row in proof.rows} == summing
    assert len(summing) >= 6
    for row in proof.rows:
        assert {"op", "dtype", "step", "domain", "checked", "differ", "method"} <= set(row)
        assert row["differ"] == 0
        assert row["checked"] > 0
        assert "error" not in row
        assert "eager" not in row["step"], "no claim about eager on a GPU can come from a CPU"


def test_every_control_is_caught(proof: TreeProof) -> None:
    assert len(proof.controls) == 10
    assert [name for name, caught in proof.controls if not caught] == []


def test_torchs_cpu_sums_are_shown_and_not_claimed(proof: TreeProof) -> None:
    assert any("in another order" in note for note in proof.notes)
    assert any("shown and not claimed" in title for title, _ in proof.pictures)
    assert all(svg.startswith("<svg ") for _, svg in proof.pictures)
    assert len({svg for _, svg in proof.pictures}) == len(proof.pictures) >= 4


def test_progress_counts_up_to_the_end() -> None:
    seen: list[tuple[str, int, int]] = []
    prove_trees([by_name("layer_norm_modulate")], CPU, quick=True, progress=lambda *step: seen.append(step))
    numbers = [done for _, done, _ in seen]
    assert numbers == list(range(len(seen)))
    assert seen[-1][1] == seen[-1][2]


def test_a_kernel_with_another_order_is_a_row_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, as if the header itself were wrong."""

    class Wrong(SumKernels):
        def __init__(self, device: torch.device, change: Change | None = None) -> None:
            super().__init__(device, trees.LANES_BY_NEIGHBOURS if change is None else change)

    monkeypatch.setattr(trees, "SumKernels", Wrong)
    proof = prove_trees([by_name("rms_norm_scale")], CPU, quick=True)
    assert [row["differ"] for row in proof.rows] == [3]
    assert "do not meet before they meet" in proof.rows[0]["first"]


def test_what_cannot_be_run_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(SumKernels, "row_sum", broken)
    monkeypatch.setattr(SumKernels, "moments", broken)
    proof = prove_trees(OPS, CPU, quick=True)
    failed = {row["op"]: row for row in proof.rows if "error" in row}
    assert failed["rms_norm_scale"]["error"] == "RuntimeError: no such kernel"
    assert failed["layer_norm_modulate"]["checked"] == 0
    assert any(row["op"] == "qk_norm" and row["checked"] for row in proof.rows), "the rest went on"
    assert ("row sum: the plan of one row for sixteen", False) in proof.controls


def test_a_change_that_does_not_apply_is_refused() -> None:
    with pytest.raises(ValueError, match="found it 0 times"):
        SumKernels(CPU, Change(ROW_SUM, "no such text", ""))


def test_threads_of_a_row_that_do_not_agree_are_no_sum() -> None:
    """Each thread normalises its own elements, so each must have the sum."""
    only_first = Change(
        "_numerics.cuh", "__shfl_xor_sync(ALL_LANES, a, offset)", "__shfl_down_sync(ALL_LANES, a, offset)"
    )
    with SumKernels(CPU, only_first) as kernels:
        sums = kernels.row_sum(torch.bfloat16, 256, trees.Geometry(16, 256).plan)
        assert sums(torch.randn(2, 256).bfloat16()).isnan().all()


@pytest.mark.parametrize("width", [4, 516, 1000, 3072])
def test_two_emulators_of_layer_norm_agree(width: int) -> None:
    """One in numpy and one in torch, written apart."""
    for name, x in welford.rows_that_tell(5, width, torch.float32, CPU):
        ours, theirs = welford.moments(x.float()), aten_moments(x.float().numpy())
        for one, other in zip(ours, theirs, strict=True):
            assert np.array_equal(one.numpy(), other, equal_nan=True), name


# --- what runs on a GPU, with the emulator in eager's place -----------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The proof as on a GPU, on few geometries; ATen's CUDA kernels are the numpy emulator's."""

    def mean(x: Tensor) -> Tensor:
        rows, width = x.shape
        shift = x.data_ptr() % 16 // x.element_size()
        total = aten_sum(x.float().numpy(), reduce_plan(rows, width, 8 * x.element_size()), shift)
        return (torch.from_numpy(total) * torch.tensor(float(mean_factor(rows, width)))).to(x.dtype)

    def root(x: Tensor) -> Tensor:
        return torch.from_numpy(1 / np.sqrt(aten_mean_square(x.float().numpy())).astype(np.float32))

    def layer_norm(x: Tensor, shape: list[int], weight: None, bias: None, eps: float) -> tuple[Tensor, ...]:
        average, variance = (torch.from_numpy(part) for part in aten_moments(x.float().numpy()))
        rstd = welford.rsqrt(variance + torch.tensor(eps))
        return (rstd[:, None] * (x.float() - average[:, None])).to(x.dtype), average[:, None], rstd[:, None]

    real = trees.thresholds
    monkeypatch.setattr(trees, "_CpuWork", trees._GpuWork)
    monkeypatch.setattr(trees, "ROWS", (5, 16))
    monkeypatch.setattr(trees, "QUICK_WIDTHS", (256,))
    monkeypatch.setattr(trees, "QUICK_HEADS", (128,))
    monkeypatch.setattr(trees, "QUICK_MOMENT_WIDTHS", (516,))
    monkeypatch.setattr(trees, "KERNEL_ROWS", 256)
    monkeypatch.setattr(trees, "thresholds", lambda least: real(least, 132))
    monkeypatch.setattr(trees, "UNALIGNED_WIDTHS", (128,))
    monkeypatch.setattr(trees.planner, "mean", mean)
    monkeypatch.setattr(trees.planner, "reciprocal_root", root)
    monkeypatch.setattr(torch, "native_layer_norm", layer_norm)
    return monkeypatch


@pytest.mark.slow
def test_on_a_gpu_both_sides_are_proved(emulated: pytest.MonkeyPatch) -> None:
    proof = prove_trees(OPS, CPU, quick=True)
    assert [row for row in proof.rows if row["differ"] or "error" in row] == []
    steps = {(row["op"], row["step"]) for row in proof.rows}
    for step in ("mean: eager's order of summation", "sum of squares: the kernel's order of summation"):
        assert ("rms_norm_scale", step) in steps
    for what in ("mean over heads", "mean over heads in half", "F.rms_norm over heads"):
        for side in ("eager", "the kernel"):
            assert ("qk_norm_rope", f"{what}: {side}'s order of summation") in steps
    assert ("layer_norm_modulate", "LayerNorm's mean and rstd and result: eager") in steps
    assert any("unaligned" in step for _, step in steps)
    assert [name for name, caught in proof.controls if not caught] == []
    assert len(proof.controls) == 13
    assert {one.method for one in proof.findings} == {trees.RECOVERED, trees.CONFIRMED}
    assert {one.rows for one in proof.findings} >= {5, 16}
    titles = [title for title, _ in proof.pictures]
    assert any(title.startswith("eager and kernel: mean of 5 rows of 256 float32") for title in titles)


@pytest.mark.slow
def test_an_eager_of_another_order_is_found_and_drawn(emulated: pytest.MonkeyPatch) -> None:
    right = trees.planner.mean
    # What a release would do whose blocks count rows otherwise.
    emulated.setattr(trees.planner, "mean", lambda x: right(x.repeat(8, 1))[: len(x)])
    proof = prove_trees([by_name("rms_norm_scale")], CPU, quick=True)
    eager = [row for row in proof.rows if row["step"] == "mean: eager's order of summation"]
    assert sum(row["differ"] for row in eager) > 0
    assert "added up by themselves in one tree and not in the other" in eager[0]["first"]
    assert any("not the planned tree" in title for title, _ in proof.pictures)
    assert all(not row["differ"] for row in proof.rows if "the kernel" in row["step"])
