"""The source of the gated residual with RMSNorms on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import aten_chains
import pytest
import torch
from aten_emulator import reduce_plan
from binary32 import decode, encode, fma
from kernel_inputs import (
    BF16,
    DTYPES,
    EPS,
    FP16,
    FP32,
    Arguments,
    odd_rows,
    randn,
    special_values,
    telling_rows,
    weights,
)
from kernel_runs import as_tuple, difference, layout_of_eager, needs_compiler, run

from samebits import host
from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
OP = by_name("gated_residual_rms_norm")
FORMS = ("modulated", "next block", "per token", "no gate", "no scale", "no modulation", "last", "last, no gate")
OUTPUTS = {"next block": 4, "last": 1, "last, no gate": 1}


def normed(
    batch: int, tokens: int, width: int, dtype: torch.dtype, form: str = "modulated", seed: int = 0
) -> Arguments:
    """Arguments of one form; gate and scale are the halves of one projection."""
    x, y = (randn((batch, tokens, width), dtype, seed + part, 2.0) for part in (0, 1))
    y_weight, weight = weights(width, dtype)
    rows = tokens if form == "per token" else 1
    gate, scale = randn((batch, rows, 2 * width), dtype, seed + 2).chunk(2, dim=-1)
    next_scale, gate_msa, _, gate_mlp = randn((batch, 1, 4 * width), dtype, seed + 3, 2.0).chunk(4, dim=-1)
    return {
        "next block": (x, gate, y, y_weight, weight, next_scale, EPS, gate_msa, gate_mlp),
        "no gate": (x, None, y, y_weight, weight, scale, EPS),
        "no scale": (x, gate, y, y_weight, weight, None, EPS),
        "no modulation": (x, None, y, y_weight, weight, None, EPS),
        "last": (x, gate, y, y_weight, None, None, EPS),
        "last, no gate": (x, None, y, y_weight, None, None, EPS),
    }.get(form, (x, gate, y, y_weight, weight, scale, EPS))


SIZES = [
    # Every width is a compilation, so only some are tried with every element type.
    *((2, tokens, width, dtype) for tokens, width in ((5, 132), (9, 1000)) for dtype in DTYPES),
    *((1, tokens, 1024, BF16) for tokens in (1, 2, 3, 4, 7, 8, 15, 16, 17)),
    (1, 1, 128, FP32),
    (1, 5, 3840, BF16),
    (1, 17, 3840, BF16),
    # The last width before ATen puts the whole block on one row, and the first after it.
    (1, 2, 7936, BF16),
    (1, 2, 7940, FP32),
    (1, 16, 8160, FP16),
    (1, 16, 8164, BF16),
    (1, 1, 16384, FP32),
    (2, 2, 16384, BF16),
]


@pytest.mark.parametrize(("batch", "tokens", "width", "dtype"), SIZES)
def test_gated_residual_rms_norm(batch: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    args = normed(batch, tokens, width, dtype, seed=width)
    assert difference(OP, args, aten_chains.gated_residual_rms_norm(*args)) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "tokens", "dtype"), [(132, 9, BF16), (256, 2, FP16), (256, 20, FP32)])
def test_forms(form: str, width: int, tokens: int, dtype: torch.dtype) -> None:
    args = normed(2, tokens, width, dtype, form)
    expected = aten_chains.gated_residual_rms_norm(*args)
    assert len(as_tuple(expected)) == OUTPUTS.get(form, 2)
    for order in (0, 1, 2):
        with host.schedule(order, workers=2):
            assert difference(OP, args, expected) is None
    assert layout_of_eager(OP, args) is None


@pytest.mark.parametrize("norm", ["of the branch", "of the stream"])
@pytest.mark.parametrize(
    ("rows", "width"),
    [*((rows, 128) for rows in (1, 2, 3, 4, 7, 8, 15, 16, 17)), *((rows, 3840) for rows in (1, 2, 5, 8, 15, 16))],
)
def test_each_norm_takes_the_tree_of_its_rows(rows: int, width: int, norm: str) -> None:
    y_weight, weight = weights(width, FP32)
    others, found = {other: reduce_plan(other, width) for other in (1, 2, 4, 8, 16)}, set()
    for seed in range(-(-20 // rows)):  # every other tree shows in some of twenty rows
        told = telling_rows(rows, width, FP32, seed)[None]
        if norm == "of the branch":
            args = (torch.zeros_like(told), None, told, y_weight, None, None, EPS)
        else:  # the stream is x, whatever the branch
            args = (told, torch.zeros(1, 1, width), torch.ones_like(told), y_weight, weight, None, EPS)
        expected = as_tuple(aten_chains.gated_residual_rms_norm(*args))
        assert difference(OP, args, expected) is None
        for other in others:
            wrong = as_tuple(aten_chains.gated_residual_rms_norm(*args, rows=other))
            found |= {other} if compare(expected[-1], wrong[-1]) is not None else set()
    # The tree is that of the threads which share a row; see test_emulator_trees.py.
    own = reduce_plan(rows, width)
    assert found == {other for other, plan in others.items() if (plan.width, plan.threads) != (own.width, own.threads)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views(dtype: torch.dtype) -> None:
    wide, other = randn((3, 7, 3, 264), dtype, 5), randn((3, 7, 2 * 256), dtype, 4)
    gates = randn((3, 4 * 256), dtype, 6).unsqueeze(1).chunk(4, dim=2)
    per_token = randn((3, 7, 512), dtype, 7)
    y_weight, weight = weights(256, dtype)
    x, y = wide[:, :, 1, 4:260], other[..., 256:]
    for args in (
        (x, gates[2], y, y_weight, weight, gates[1], EPS),
        (x, gates[3][:1], y, y_weight, weight, per_token[..., 256:], EPS),
        (y, per_token[..., :256], x, y_weight, weight, gates[0][:1], EPS),
        (y[:, 1::2], per_token[:1, 1::2, 256:], x[:, ::2][:, :3], y_weight, weight, None, EPS),
        (x[1:2], None, y[1:2], y_weight, None, None, EPS),
        (x, gates[2], x, y_weight, weight, gates[2], EPS),
    ):
        assert difference(OP, args, aten_chains.gated_residual_rms_norm(*args)) is None
        assert layout_of_eager(OP, args) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 1000])
def test_odd_rows(width: int, dtype: torch.dtype) -> None:
    x, y = odd_rows(width, dtype)[None], odd_rows(width, dtype, 8).flip(0)[None]
    gate, scale = randn((2, 1, 1, width), dtype, 9)
    y_weight, weight = weights(width, dtype)
    scale[..., 3], scale[..., 4], weight[6], gate[..., 7] = -0.0, torch.inf, torch.nan, torch.inf
    for stream, branch in ((x, y), (x, torch.ones_like(y)), (torch.zeros_like(x), y), (-torch.zeros_like(x), y)):
        args = (stream, gate, branch, y_weight, weight, scale, EPS)
        expected = aten_chains.gated_residual_rms_norm(*args)
        assert all(t.isnan().any() for t in expected)
        assert difference(OP, args, expected) is None


def test_the_stream_keeps_minus_zero() -> None:
    x = torch.full((1, 2, 128), -0.0, dtype=BF16)
    y, ones = torch.ones_like(x), torch.ones(128, dtype=BF16)
    for gate, sign in ((0.0, False), (-0.0, True)):  # -0 + 0 is 0 and -0 + -0 is -0
        args = (x, torch.full((1, 1, 128), gate, dtype=BF16), y, ones, ones, None, EPS)
        for output in run(OP, *args):
            assert (output == 0).all()
            assert (output.signbit() == sign).all()
        assert difference(OP, args, aten_chains.gated_residual_rms_norm(*args)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_in_gate_stream_and_scale(dtype: torch.dtype) -> None:
    special = special_values(dtype)
    first, second = (part.flatten() for part in torch.meshgrid(special, special, indexing="ij"))
    y, one = randn((1, 1, 256), dtype, 1), torch.ones(256, dtype=dtype)
    args = (first[None, None], second[None, None], y, one, one, first.flip(0)[None, None].clone(), EPS)
    assert difference(OP, args, aten_chains.gated_residual_rms_norm(*args)) is None


def test_fp16_squares_beyond_the_range_of_fp16() -> None:
    sign = torch.where(randn((1, 5, 256), FP32, 3) > 0, 1.0, -1.0)
    x, one = (3e4 * sign).to(FP16), torch.ones(256, dtype=FP16)
    stream, scaled = run(OP, x, None, x, one, one, None, EPS)
    assert torch.equal(stream, (x.float() + sign).to(FP16))
    assert torch.equal(scaled, sign.to(FP16))


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 40.0, 200.0])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_amplitudes_and_eps(amplitude: float, eps: float) -> None:
    x, gate, y, y_weight, weight, scale, _ = normed(1, 20, 256, BF16)
    args = (x * amplitude, gate, y * amplitude, y_weight, weight, scale, eps)
    assert difference(OP, args, aten_chains.gated_residual_rms_norm(*args)) is None


def test_other_chains_are_found() -> None:
    x, gate, y, y_weight, weight, scale, eps = args = normed(1, 20, 256, BF16)
    ours = run(OP, *args)
    branch = aten_chains.rms_norm_scale(y, y_weight, None, eps)
    contracted = encode(fma(decode(gate), decode(branch), decode(x)), BF16)
    assert compare(ours[:1], (contracted,)) is not None
    for wrong in (
        (x, gate, y, weight, y_weight, scale, eps),
        (x, scale, y, y_weight, weight, gate, eps),
        (x, gate, y, y_weight, weight, None, eps),
        (x, None, y, y_weight, weight, scale, eps),
        (x, gate, y, y_weight, weight, scale, 1e-3),
    ):
        assert compare(ours, aten_chains.gated_residual_rms_norm(*wrong)) is not None


def test_gates_of_the_next_block_that_change_places_are_found() -> None:
    *args, gate_msa, gate_mlp = normed(2, 9, 132, BF16, "next block")
    ours = run(OP, *args, gate_msa, gate_mlp)
    for wrong in ((gate_mlp, gate_msa), (gate_msa, gate_msa)):
        found = compare(ours, aten_chains.gated_residual_rms_norm(*args, *wrong))
        assert found is not None
        assert found.output in (2, 3)


def test_what_is_declined() -> None:
    x, gate, y, y_weight, weight, scale, eps = normed(2, 5, 256, BF16)
    for args, words in (
        ((x[0], gate, y[0], y_weight, weight, scale, eps), "(batch, tokens, width) alike"),
        ((x, gate, y[:, :4], y_weight, weight, scale, eps), "(batch, tokens, width) alike"),
        ((x, gate, y.half(), y_weight, weight, scale, eps), "one dtype"),
        ((x, gate, y, y_weight, None, scale, eps), "a scale needs the weight"),
        ((x, gate, y, y_weight, None, None, eps, gate, gate), "the gates of a next block need the weight"),
        ((x, gate, y, y_weight, weight, scale, eps, gate, None), "the residual stream: either both gates"),
        ((x, gate, y, y_weight, weight, scale, eps, y, y), "the residual stream: both gates must be"),
        ((x, gate, y, y_weight.float(), weight, scale, eps), "the branch: weight and gate must have x's dtype"),
        ((x, gate, y, y_weight, weight.float(), scale, eps), "the residual stream: weight and scale must have"),
        ((x, gate.expand(2, 4, 256), y, y_weight, weight, scale, eps), "the branch: gate must broadcast"),
        ((x, gate, y, y_weight, weight, scale.squeeze(1), eps), "the residual stream: x and its scale must be"),
        (normed(2, 5, 124, BF16), "from 128 to 16384"),
        ((x.transpose(0, 1).contiguous().transpose(0, 1), gate, y, y_weight, weight, scale, eps), "in their order"),
        ((x, gate, y[:, :1].expand(2, 5, 256), y_weight, weight, scale, eps), "in their order"),
    ):
        assert words in str(OP.unsupported(*args)), (words, OP.unsupported(*args))
