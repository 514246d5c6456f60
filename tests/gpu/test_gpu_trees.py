"""Eager's orders of summation on a real GPU: the trees, and what an unrecorded version of torch is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ring import assert_same_bits, qk_args, randn, rms_args

from samebits.gate import Gate
from samebits.ops import OPS, _reduce_plan, by_name
from samebits.ops._reduce_plan import why_no_plan, why_no_rms_norm_plan
from samebits.proof.trees import prove_trees

pytestmark = pytest.mark.gpu

RMS, QK = by_name("rms_norm_scale"), by_name("qk_norm")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ASKING_MS = 100
"""Most of it is spent on writing down the tree, not on the GPU."""


def test_eagers_trees_are_the_planned_ones_and_the_kernels_are(device: torch.device) -> None:
    proof = prove_trees(OPS, device, quick=True)
    assert [row for row in proof.rows if row["differ"] or "error" in row or not row["checked"]] == []
    assert [name for name, caught in proof.controls if not caught] == [], proof.notes
    assert any(one.side == "eager" for one in proof.findings)
    assert any(one.side == "kernel" for one in proof.findings)


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(_reduce_plan, "_recorded", lambda device: False)
    monkeypatch.setattr(_reduce_plan, "_found", {})
    return monkeypatch


geometries = pytest.mark.parametrize(
    ("rows", "width"), [(4224, 3840), (16, 3072), (8, 3840), (1, 3840), (135168, 128), (1, 8192)]
)


@geometries
def test_an_unrecorded_version_is_asked_once(
    unrecorded: pytest.MonkeyPatch, device: torch.device, rows: int, width: int
) -> None:
    asked: list[tuple[Any, ...]] = []

    def counted(question: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            asked.append((question, *args))
            return question(*args)

        return ask

    for name in ("probe_mean", "probe_rms_norm"):
        unrecorded.setattr(_reduce_plan, name, counted(getattr(_reduce_plan, name)))
    for number, dtype in enumerate((FP32, BF16, FP16), start=1):
        for _ in range(2):
            assert why_no_plan(rows, width, dtype, device) is None
            if width == 128:
                assert why_no_rms_norm_plan(width, dtype, device) is None
        assert len(asked) == len(set(asked)) == number * (2 if width == 128 else 1)


@pytest.mark.alone
@geometries
def test_an_unrecorded_version_is_asked_quickly(
    unrecorded: pytest.MonkeyPatch, device: torch.device, rows: int, width: int
) -> None:
    def ask_ms(dtype: torch.dtype) -> float:
        start = time.perf_counter()
        assert why_no_plan(rows, width, dtype, device) is None
        return (time.perf_counter() - start) * 1e3

    for dtype in (FP32, BF16, FP16):
        first, again = ask_ms(dtype), ask_ms(dtype)
        print(f"{rows} rows of {width} {dtype}: asked in {first:.1f} ms, known in {again * 1e3:.0f} us")
        assert again < first
        if dtype != FP32:  # that one loads ATen's kernels
            assert first < ASKING_MS


def test_signatures_open_on_an_unrecorded_version(unrecorded: pytest.MonkeyPatch, device: torch.device) -> None:
    gate = Gate()
    for op, args in (
        (RMS, rms_args(randn(1, 21, 3840, dtype=BF16, device=device))),
        *((QK, qk_args(*randn(2, 1, 9, 3, 128, dtype=BF16, device=device), kind)) for kind in ("diffusers", "torch")),
    ):
        site = gate.site("unrecorded", op)
        for _ in range(2):
            assert_same_bits(site(*args), op.reference(*args))
        assert site.counters.fused == 1, dict(site.counters.reasons)


def test_another_order_than_planned_is_unsupported(unrecorded: pytest.MonkeyPatch, device: torch.device) -> None:
    """As if a release counted rows otherwise: the kernel would be wrong, so the reference answers, and says why."""
    right = _reduce_plan.mean
    unrecorded.setattr(_reduce_plan, "mean", lambda x: right(x.repeat(16, 1))[: len(x)])
    site = Gate(strict=True).site("another order", RMS)
    args = rms_args(randn(1, 2, 3840, dtype=BF16, device=device))
    for _ in range(2):
        assert_same_bits(site(*args), RMS.reference(*args))
    assert site.counters.fused == 0
    (reason,) = site.counters.reasons
    assert "in an order that no kernel has" in reason


def test_nothing_is_asked_in_a_capture(unrecorded: pytest.MonkeyPatch, device: torch.device) -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(8, device=device)
    with torch.cuda.graph(graph):
        x += 1  # torch warns of a graph of nothing
        reason = why_no_plan(16, 3072, FP32, device)
    assert "a graph is being captured now" in str(reason)
    assert why_no_plan(16, 3072, FP32, device) is None
