"""The RMSNorm and scale kernel's source on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import aten_chains
import numpy as np
import pytest
import torch
from aten_emulator import reduce_plan
from binary32 import F32, decode, encode, tanh
from kernel_inputs import BF16, DTYPES, EPS, FP16, FP32, Arguments, odd_rows, randn, telling_rows, weights
from kernel_runs import difference, layout_of_eager, needs_compiler, run

from samebits import host
from samebits.bits import compare
from samebits.ops import by_name, rms_norm_scale

pytestmark = needs_compiler
RMS_NORM_SCALE = by_name("rms_norm_scale")


def normed(rows: int, width: int, dtype: torch.dtype, scaled: bool = True, seed: int = 0) -> Arguments:
    x, weight = randn((1, rows, width), dtype, seed + rows, 2.0), weights(width, dtype)[0]
    if not scaled:
        return x, weight, None, EPS
    scale, gate_msa, _, gate_mlp = randn((1, 1, 4 * width), dtype, seed + 9, 2.0).chunk(4, dim=-1)
    return x, weight, scale, EPS, gate_msa, gate_mlp


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


GATES = [
    # samples, width: less than a block of vectors, more than one, a last block with threads to spare
    *((batch, width, dtype) for batch, width in ((1, 128), (3, 132), (2, 1000)) for dtype in DTYPES),
    (1, 3840, BF16),
    (2, 8192, FP32),
    (5, 16384, BF16),
]


@pytest.mark.parametrize(("batch", "width", "dtype"), GATES)
def test_gates(batch: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn((batch, 3, width), dtype, 1), weights(width, dtype)[0]
    scale, gate_msa, other, gate_mlp = randn((batch, 1, 4 * width), dtype, 2, 2.0).chunk(4, dim=-1)
    for args in (
        (x, weight, scale, EPS, gate_msa, gate_mlp),
        (x, weight, None, EPS, gate_msa, gate_msa),
        (x, weight, scale, EPS, gate_msa[:1], other[:1]),
        (x[0], weight, None, EPS, other, gate_mlp.contiguous()),
    ):
        expected = aten_chains.rms_norm_scale(*args)
        assert len(expected) == 3
        for order in (0, 1, 2):
            with host.schedule(order, workers=2):
                assert difference(RMS_NORM_SCALE, args, expected) is None
        assert layout_of_eager(RMS_NORM_SCALE, args) is None


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_as_a_gate(dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1, 1024)
    args = (randn((64, 1, 1024), dtype, 1), weights(1024, dtype)[0], None, EPS, every, every.flip(-1).contiguous())
    expected = aten_chains.rms_norm_scale(*args)
    assert ((expected[1] == 0) & expected[1].signbit()).any()
    assert expected[1].isnan().any()
    assert difference(RMS_NORM_SCALE, args, expected) is None


def test_another_tanh_than_the_c_librarys() -> None:
    """The kernel computes with what it is given: ``tanh`` up to two ulps off, at random."""
    args = normed(3, 128, FP32)
    inputs = np.unique(np.concatenate([decode(t).flatten() for t in args[4:]]).view(np.uint32)).view(np.float32)
    outputs = tanh(inputs).view(np.int32) + np.random.default_rng(1).integers(-2, 3, inputs.size).astype(np.int32)
    outputs = outputs.view(np.float32)

    def moved(x: F32) -> F32:
        order = np.argsort(inputs)
        return outputs[order][np.searchsorted(inputs[order], x)]

    expected = aten_chains.rms_norm_scale(*args, tanh=moved)
    with host.recorded("tanhf", inputs.view(np.uint32).tolist(), outputs.view(np.uint32).tolist()):
        assert difference(RMS_NORM_SCALE, args, expected) is None
    found = difference(RMS_NORM_SCALE, args, expected)
    assert found is not None
    assert found.output == 1


def test_other_roundings_are_found() -> None:
    x, weight, scale, eps, gate_msa, gate_mlp = args = normed(20, 256, BF16)
    ours = run(RMS_NORM_SCALE, *args)
    normed_only = decode(aten_chains.scaled_norm(x, weight, None, eps))
    unrounded = encode(normed_only * (np.float32(1) + decode(scale)), BF16)
    product_and_sum = encode(normed_only + decode(encode(normed_only * decode(scale), BF16)), BF16)
    for wrong in (unrounded, product_and_sum, encode(normed_only * decode(scale), BF16)):
        assert compare(ours[:1], (wrong,)) is not None
    for wrong_args in ((x, weight, scale, eps, gate_mlp, gate_msa), (x, weight, gate_msa, eps, gate_msa, gate_mlp)):
        assert compare(ours, aten_chains.rms_norm_scale(*wrong_args)) is not None


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
@pytest.mark.parametrize("rows", [16, 20, 21, 30, 31, 50])
def test_blocks_that_take_one_row_after_another(
    rows: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows as blocks, one more, several rounds of rows, a last round that is not full."""
    monkeypatch.setattr(rms_norm_scale, "multiprocessors", lambda device: multiprocessors)
    args = normed(rows, 256, BF16)
    expected = aten_chains.rms_norm_scale(*args)
    for order in (0, 1, 2):
        with host.schedule(order, workers=2):
            assert difference(RMS_NORM_SCALE, args, expected) is None
