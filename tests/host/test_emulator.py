"""The emulator against ``float64`` and in cases whose result is known without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aten_chains import layer_norm_modulate, qk_norm, rms_norm_scale
from aten_emulator import (
    aten_layer_norm,
    aten_mean_16bit,
    aten_mean_fp32,
    aten_mean_square,
    aten_moments,
    aten_rms_norm_fused,
    mean_factor,
    reduce_plan,
)
from binary32 import BITS, encode, fma, rounded

ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("width", [32, 64, 120, 128, 136, 256, 512, 3072, 3584, 3840, 8160, 8192, 8200, 12288, 16384])
def test_means_are_close_to_float64_and_depend_on_the_rows(width: int) -> None:
    x = _random((150, width), width) ** 2
    exact = x.astype(np.float64).mean(-1)
    means = {rows: aten_mean_fp32(x, rows) for rows in ROWS}
    for mean in means.values():
        assert np.abs(mean / exact - 1).max() < 2e-6
    halves = rounded(x, torch.bfloat16)
    exact = halves.astype(np.float64).mean(-1)
    assert np.abs(aten_mean_16bit(halves, torch.bfloat16) / exact - 1).max() < 2**-8
    blocks = {(plan.threads, plan.width) for plan in (reduce_plan(rows, width) for rows in ROWS)}
    # With 64 elements, 64 threads of one element fold into what 32 threads of two add by themselves: one tree.
    trees = 1 if width == 64 else len(blocks)
    assert len({mean.tobytes() for mean in means.values()}) == trees


def test_a_mean_does_not_depend_on_the_other_rows() -> None:
    x = _random((17, 3072), 3)
    assert np.array_equal(aten_mean_fp32(x)[5:6], aten_mean_fp32(x[5:6], rows=17))


def test_the_factor_of_a_mean_is_a_quotient_of_rounded_counts() -> None:
    assert mean_factor(17, 3840) == np.float32(1) / np.float32(3840)
    rows = 2**24 + 1  # not a float32 number
    assert mean_factor(rows, 3) == np.float32(2**24) / np.float32(rows * 3)


@pytest.mark.parametrize("width", [4, 128, 132, 512, 516, 3072, 3840, 16384])
def test_moments_are_close_to_float64(width: int) -> None:
    x = _random((7, width), width) + np.float32(3)
    mean, variance = aten_moments(x)
    exact = x.astype(np.float64)
    assert np.abs(mean - exact.mean(-1)).max() < 2e-6
    assert np.abs(variance / exact.var(-1) - 1).max() < 2e-5
    assert np.abs(aten_mean_square(x) / (exact**2).mean(-1) - 1).max() < 2e-6


def test_a_row_of_one_value_has_no_variance() -> None:
    x = np.full((3, 3072), np.float32(0.7))
    normed = aten_layer_norm(x, 1e-6, torch.float32)
    assert np.array_equal(aten_moments(np.ones((1, 3072), np.float32)), np.array([[1.0], [0.0]], np.float32))
    assert np.abs(normed).max() < 1e-2
    assert np.array_equal(aten_layer_norm(np.zeros((3, 3072), np.float32), 1e-6, torch.float32), np.zeros((3, 3072)))


@pytest.mark.parametrize("width", [126, 3074])
def test_widths_of_another_kernel_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="divisible by 4"):
        aten_moments(np.zeros((1, width), np.float32))
    with pytest.raises(ValueError, match="divisible by 4"):
        aten_mean_square(np.zeros((1, width), np.float32))


def test_serial_welford_of_one_thread_is_the_textbook_one() -> None:
    # With 4 elements only thread 0 works, and every fold must hand its moments on: shares of 4 of 4 are exact.
    x = np.array([[1.5, -2.25, 7.0, 0.3]], np.float32)
    mean = m2 = np.float32(0)
    for count, value in enumerate(x[0], 1):
        delta = value - mean
        mean = fma(delta, np.float32(1) / np.float32(count), mean)
        m2 = fma(delta, value - mean, m2)
    found = aten_moments(x)
    assert (found[0][0], found[1][0]) == (mean, m2 / np.float32(4))


TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_are_close_to_the_same_chains_in_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 5, 136, generator=generator).to(dtype)
    scale, shift = torch.randn(2, 4, 136, generator=generator).to(dtype)
    index = torch.tensor([[0, 1, 0, 0, 1], [1, 1, 0, 1, 0]])
    wide = x.double()
    normed = torch.nn.functional.layer_norm(wide, (136,), None, None, 1e-6)
    plain = normed * (1 + scale[:2].double())[:, None] + shift[:2].double()[:, None]
    rows = torch.arange(2)[:, None] + 2 * index
    chosen = normed * (1 + scale.double()[rows]) + shift.double()[rows]
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(layer_norm_modulate(x, scale[:2], shift[:2], 1e-6).double(), plain, **near)
    torch.testing.assert_close(layer_norm_modulate(x, scale, shift, 1e-6, index).double(), chosen, **near)

    q, k = x.reshape(2, 5, 1, 136), torch.randn(2, 5, 3, 136, generator=generator).to(dtype)
    weight = torch.rand(136, generator=generator).to(dtype)
    for kind in ("diffusers", "native", "torch"):
        for given, got in zip((q, k), qk_norm(q, k, weight, weight, 1e-6, kind), strict=True):
            exact = given.double() * torch.rsqrt(given.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
            torch.testing.assert_close(got.double(), exact, **near)
            assert got.dtype == dtype
    rms = x.double() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    gate = scale[:2, None]
    torch.testing.assert_close(rms_norm_scale(x, weight, gate, 1e-6).double(), rms * (1 + gate.double()), **near)
    assert torch.equal(rms_norm_scale(x, weight, None, 1e-6), qk_norm(x, x, weight, weight, 1e-6, "diffusers")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_types_of_diffusers_rms_norm(dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, 1, 32, dtype=dtype)
    full = qk_norm(x, x, torch.ones(32), torch.ones(32, dtype=dtype), 1e-6, "diffusers")
    assert [part.dtype for part in full] == [torch.float32, dtype]
    assert rms_norm_scale(x, None, None, 1e-6).dtype == dtype
    with pytest.raises(TypeError, match="fused kernel"):
        qk_norm(x, x, torch.ones(32), torch.ones(32), 1e-6, "torch")


def test_the_three_rms_norm_references_differ() -> None:
    x = torch.from_numpy(_random((1, 40, 2, 128), 9, 2.0)).bfloat16()
    weight = torch.from_numpy(1 + np.arange(128, dtype=np.float32) / 128).bfloat16()
    results = [qk_norm(x, x, weight, weight, 1e-6, kind)[0] for kind in ("diffusers", "native", "torch")]
    for i in range(3):
        for j in range(i):
            assert not torch.equal(results[i].view(torch.int16), results[j].view(torch.int16))


def test_nan_and_infinity_stay_in_their_row() -> None:
    x = np.ones((3, 128), np.float32)
    x[1, 7], x[2, 9] = np.nan, np.inf
    for dtype in DTYPES:
        normed = aten_layer_norm(x, 1e-6, dtype)
        assert np.isfinite(normed[0]).all()
        assert np.isnan(normed[1:]).all()
        scaled = aten_rms_norm_fused(x, None, 1e-6, dtype)
        assert np.isnan(scaled[1]).all()
        assert np.isnan(scaled[2]).sum() == 1  # inf * 0
        assert (scaled[2] == 0).sum() == 127
        assert encode(normed[1], dtype).view(BITS[dtype]).unique().tolist() == [torch.iinfo(BITS[dtype]).max]
