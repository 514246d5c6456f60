"""The RMSNorm and scale kernel's source on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import aten_chains
import pytest
import torch
from aten_emulator import reduce_plan
from kernel_inputs import BF16, DTYPES, EPS, FP16, FP32, Arguments, odd_rows, randn, telling_rows, weights
from kernel_runs import difference, needs_compiler

from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
RMS_NORM_SCALE = by_name("rms_norm_scale")


def normed(rows: int, width: int, dtype: torch.dtype, scaled: bool = True, seed: int = 0) -> Arguments:
    x, weight = randn((1, rows, width), dtype, seed + rows, 2.0), weights(width, dtype)[0]
    return x, weight, randn((1, 1, width), dtype, seed + 9) if scaled else None, EPS


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 15, 16, 17])
@pytest.mark.parametrize("width", [128, 256, 3840, 8192])
def test_rms_norm_scale_takes_the_tree_of_its_rows(rows: int, width: int) -> None:
    weight, found = weights(width, FP32)[0], set()
    others = {other: reduce_plan(other, width) for other in (1, 2, 4, 8, 16)}
    for seed in range(-(-20 // rows)):  # every other tree shows in some of twenty rows
        args = (telling_rows(rows, width, FP32, seed)[None], weight, None, EPS)
        expected = aten_chains.rms_norm_scale(*args)
        assert difference(RMS_NORM_SCALE, args, expected) is None
        found |= {other for other in others if compare(expected, aten_chains.rms_norm_scale(*args, rows=other))}
    # The tree is that of the threads which share a row; see test_emulator_trees.py.
    own = reduce_plan(rows, width)
    assert found == {other for other, plan in others.items() if (plan.width, plan.threads) != (own.width, own.threads)}


SIZES = [
    # Every width is a compilation, so only some are tried with every element type.
    *((rows, width, dtype) for rows, width in ((5, 132), (17, 1000)) for dtype in DTYPES),
    (3, 3072, FP16),
    (17, 3584, FP32),
    # The last width before ATen puts the whole block on one row, and the first after it.
    (2, 7936, BF16),
    (2, 7940, FP32),
    (16, 8160, FP32),
    (16, 8164, BF16),
    (1, 16384, FP16),
    (33, 12288, BF16),
]


@pytest.mark.parametrize(("rows", "width", "dtype"), SIZES)
def test_rms_norm_scale(rows: int, width: int, dtype: torch.dtype) -> None:
    args = normed(rows, width, dtype, scaled=width % 1000 != 0)
    assert difference(RMS_NORM_SCALE, args, aten_chains.rms_norm_scale(*args)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_scale_of_views(dtype: torch.dtype) -> None:
    wide, weight = randn((3, 7, 3, 264), dtype, 5), weights(256, dtype)[0]
    gates = randn((3, 4 * 256), dtype, 6).unsqueeze(1).chunk(4, dim=2)
    per_token = randn((3, 7, 512), dtype, 7)
    x = wide[:, :, 1, 4:260]
    for args in (
        (x, weight, gates[2], EPS),
        (x, weight, gates[3][:1], EPS),
        (x, weight, per_token[..., 256:], EPS),
        (x[:, 1::2], weight, gates[0], EPS),
        (x[1], weight, None, EPS),
        (wide[:, :, :, 8:], weight, None, EPS),
    ):
        assert difference(RMS_NORM_SCALE, args, aten_chains.rms_norm_scale(*args)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 1000])
def test_rms_norm_scale_of_odd_rows(width: int, dtype: torch.dtype) -> None:
    scale, weight = randn((1, 1, width), dtype, 9), weights(width, dtype)[0]
    scale[..., 3], scale[..., 4], weight[6] = -0.0, torch.inf, torch.nan
    args = (odd_rows(width, dtype)[None], weight, scale, EPS)
    expected = aten_chains.rms_norm_scale(*args)
    assert expected.isnan().any()
    assert difference(RMS_NORM_SCALE, args, expected) is None
