"""The q and k norm kernels' source on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import aten_chains
import pytest
import torch
from kernel_inputs import (
    BF16,
    DTYPES,
    EPS,
    FP16,
    FP32,
    odd_rows,
    randn,
    rows_with_means_near_ties,
    telling_rows,
    weights,
)
from kernel_runs import difference, needs_compiler

from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
QK_NORM = by_name("qk_norm")

KINDS = [
    *(("diffusers", dtype, dtype) for dtype in DTYPES),
    *(("diffusers", dtype, FP32) for dtype in (BF16, FP16)),
    *(("native", dtype, dtype) for dtype in (BF16, FP16)),
    *(("torch", dtype, dtype) for dtype in DTYPES),
]
HEADS, K_HEADS = 3, 1  # the same everywhere, because every number of heads is a compilation
ALL = [(*kind, width) for width in (128, 136) for kind in KINDS]
# The other widths with some of the kinds each.
SOME = [(*KINDS[(3 * at + turn) % len(KINDS)], width) for at, width in enumerate((32, 40, 64, 120)) for turn in (0, 6)]
SOME += [(*KINDS[at], 248) for at in (0, 5, 7)] + [(*KINDS[at], 256) for at in (2, 6, 8)]


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL + SOME, ids=_name)
def test_qk_norm(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    # Twelve rows of q and four of k have other trees than sixteen and more.
    q, k = randn((2, 2, HEADS, width), dtype, width, 3.0), randn((1, 4, K_HEADS, width), dtype, 1, 0.05)
    args = (q, k, *weights(width, weight_dtype), EPS, kind)
    assert difference(QK_NORM, args, aten_chains.qk_norm(*args)) is None


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL, ids=_name)
def test_qk_norm_of_a_fused_projection(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    fused = randn((2, 67, (HEADS + 2 * K_HEADS) * width), dtype, 2, 2.0)
    q, k, _ = fused.split([HEADS * width, K_HEADS * width, K_HEADS * width], dim=-1)
    q, k = q.unflatten(-1, (HEADS, width)), k.unflatten(-1, (K_HEADS, width))
    # And q a slice of every second token, k one sample that begins in the middle.
    for args in ((q, k), (q[:, ::2], k[:1, 5:])):
        args = (*args, *weights(width, weight_dtype), EPS, kind)
        assert difference(QK_NORM, args, aten_chains.qk_norm(*args)) is None


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL, ids=_name)
def test_qk_norm_of_heads_that_lie_apart(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    """Query, key and value of one head side by side, and keys alone: every step of the two differs."""
    fused = randn((2, 5, HEADS, 3, width), dtype, 2, 2.0)
    k = randn((3, 7, K_HEADS, width), dtype, 3, 0.5)
    for args in ((fused[..., 0, :], k), (k, fused[..., 1, :])):
        args = (*args, *weights(width, weight_dtype), EPS, kind)
        assert difference(QK_NORM, args, aten_chains.qk_norm(*args)) is None


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL, ids=_name)
def test_qk_norm_of_odd_rows(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    q = torch.cat([odd_rows(width, dtype), odd_rows(width, dtype, 9)[:10]]).unflatten(0, (1, 7, HEADS))
    k = odd_rows(width, dtype, 8).flip(-1)[None, :, None].contiguous()
    q_weight, k_weight = weights(width, weight_dtype)
    k_weight[3], k_weight[4], k_weight[5] = -0.0, torch.inf, torch.nan
    args = (q, k, q_weight, k_weight, EPS, kind)
    expected = aten_chains.qk_norm(*args)
    assert expected[1].isnan().any()
    assert difference(QK_NORM, args, expected) is None


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL, ids=_name)
def test_qk_norm_where_the_order_shows(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    # The mean of the native kind is rounded to half precision, which hides nearly everything.
    near = kind == "native"
    q = rows_with_means_near_ties(300, width, dtype) if near else telling_rows(300, width, dtype)
    q, k = q.unflatten(0, (1, -1, HEADS)), telling_rows(300, width, dtype, 1)[None, :, None]
    args = (q, k, *weights(width, weight_dtype), EPS, kind)
    assert difference(QK_NORM, args, aten_chains.qk_norm(*args)) is None


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 15, 16, 17, 65])
@pytest.mark.parametrize("width", [96, 256])
def test_qk_norm_takes_the_tree_of_its_rows(rows: int, width: int) -> None:
    other, found = 1 if rows > 15 else 16, False
    for seed in range(-(-20 // rows)):  # the other tree shows in some of twenty rows
        q, k = (telling_rows(rows, width, BF16, 2 * seed + part) for part in (0, 1))
        args = (q[None, :, None], k[:, None, None], *weights(width, FP32), EPS, "diffusers")
        expected = aten_chains.qk_norm(*args)
        assert difference(QK_NORM, args, expected) is None
        found = found or compare(expected, aten_chains.qk_norm(*args, rows=other)) is not None
    assert found


@pytest.mark.parametrize("rows", [8, 15, 16, 65])
@pytest.mark.parametrize("width", [96, 256])
def test_native_qk_norm_takes_the_tree_of_its_rows(rows: int, width: int) -> None:
    other, found = 1 if rows > 15 else 16, False
    for seed in range(-(-50 // rows)):
        q, k = (rows_with_means_near_ties(rows, width, BF16, 2 * seed + part) for part in (0, 1))
        args = (q[None, :, None], k[:, None, None], *weights(width, BF16), EPS, "native")
        expected = aten_chains.qk_norm(*args)
        assert difference(QK_NORM, args, expected) is None
        found = found or compare(expected, aten_chains.qk_norm(*args, rows=other)) is not None
    assert found == (width == 96)  # 256 elements are 32 loads of 8, for any number of rows


@pytest.mark.parametrize("amplitude", [0.005, 1.0, 40.0, 200.0])
@pytest.mark.parametrize(("kind", "dtype", "weight_dtype"), KINDS, ids=_name)
def test_qk_norm_amplitudes(amplitude: float, kind: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    q, k = randn((1, 100, HEADS, 128), dtype, 3, amplitude), randn((1, 200, K_HEADS, 128), dtype, 4, amplitude)
    args = (q, k, *weights(128, weight_dtype), EPS, kind)
    assert difference(QK_NORM, args, aten_chains.qk_norm(*args)) is None
