"""The LayerNorm and modulate kernel's source on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import aten_chains
import pytest
import torch
from binary32 import BITS
from kernel_inputs import BF16, DTYPES, EPS, FP16, FP32, Arguments, odd_rows, randn, rows_that_show_moments
from kernel_runs import difference, needs_compiler

from samebits.ops import by_name

pytestmark = needs_compiler
LAYER_NORM_MODULATE = by_name("layer_norm_modulate")


def modulated(
    batch: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0, amplitude: float = 1.0
) -> Arguments:
    """Plain arguments with scale and shift as the two halves of one projection."""
    shift, scale = randn((batch, 2 * width), dtype, seed + 1).chunk(2, dim=-1)
    return randn((batch, tokens, width), dtype, seed, amplitude), scale, shift, EPS


SIZES = [
    # (batch, tokens, width): widths of one load, of part of a round of 128 loads, of whole rounds, of both; long rows.
    # Every width is a compilation, so only some are tried with every element type.
    *((2, tokens, width, dtype) for tokens, width in ((5, 132), (9, 1024), (3, 3072)) for dtype in DTYPES),
    *((1, tokens, 1024, BF16) for tokens in (1, 2, 7, 8, 17)),
    (1, 3, 4, FP16),
    (1, 1, 128, FP32),
    (1, 2, 516, BF16),
    (1, 3, 1000, FP16),
    (1, 2, 3844, BF16),
    (3, 5, 512, FP16),
    (1, 2, 3584, BF16),
    (1, 2, 5120, BF16),
    (2, 1, 8192, FP16),
    (1, 1, 16384, FP32),
    (1, 1, 16384, BF16),
]


@pytest.mark.parametrize(("batch", "tokens", "width", "dtype"), SIZES)
def test_layer_norm_modulate(batch: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    args = modulated(batch, tokens, width, dtype, seed=width, amplitude=3.0)
    assert difference(LAYER_NORM_MODULATE, args, aten_chains.layer_norm_modulate(*args)) is None


@pytest.mark.parametrize("width", [132, 1024])
@pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(FP16, torch.int32), (FP32, torch.int32), (BF16, torch.int32), (BF16, torch.int64)]
)
def test_layer_norm_modulate_by_index(width: int, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    x, scale, shift, eps = modulated(4, 9, width, dtype)
    # Two samples of nine tokens; everything but 0 chooses the second row. A strided index, as a transposed one is.
    index = torch.randint(-1, 3, (9, 2), generator=torch.Generator().manual_seed(1)).to(index_dtype).t()
    for args in ((x[:2], scale, shift, eps, index), (x[2:], scale, shift, eps, index.contiguous())):
        assert difference(LAYER_NORM_MODULATE, args, aten_chains.layer_norm_modulate(*args)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [132, 1024])
def test_layer_norm_modulate_of_views(width: int, dtype: torch.dtype) -> None:
    wide = randn((2, 12, 2 * width), dtype, 3)
    six = randn((2, 6 * width), dtype, 4).chunk(6, dim=-1)
    for x in (wide[:, 1:6, :width], wide[:, ::3, width:], wide[:, :1, width:], wide[:, 0:5, :width].transpose(0, 1)):
        shift, scale = six[0][:1].expand(x.shape[0], width).clone(), six[4][1:].expand(x.shape[0], width)
        if x.shape[0] == 2:
            shift, scale = six[0], six[4]
        args = (x, scale, shift, EPS)
        assert difference(LAYER_NORM_MODULATE, args, aten_chains.layer_norm_modulate(*args)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [132, 1024])
def test_layer_norm_modulate_of_odd_rows(width: int, dtype: torch.dtype) -> None:
    x = odd_rows(width, dtype)[None]
    scale, shift = randn((2, 1, width), dtype, 5)
    scale[:, ::3] = -2  # a constant row becomes -0 there, and stays it where the shift is -0
    shift[:, ::6] = -0.0
    scale[:, 7], shift[:, 8], scale[:, 10] = torch.inf, -torch.inf, torch.nan
    args = (x, scale, shift, EPS)
    expected = aten_chains.layer_norm_modulate(*args)
    assert (expected.view(BITS[dtype]) == torch.iinfo(BITS[dtype]).min).any()  # there are -0 to be got right
    assert expected.isnan().any()
    assert difference(LAYER_NORM_MODULATE, args, expected) is None


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 40.0, 200.0])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_layer_norm_modulate_scales_and_eps(amplitude: float, eps: float) -> None:
    x, scale, shift, _ = modulated(1, 8, 1024, BF16, amplitude=amplitude)
    args = (x + amplitude, scale, shift, eps)
    assert difference(LAYER_NORM_MODULATE, args, aten_chains.layer_norm_modulate(*args)) is None


@pytest.mark.parametrize("kind", ["far from zero", "threads differ", "warps differ"])
@pytest.mark.parametrize("width", [132, 516, 3072, 3844])
def test_layer_norm_modulate_where_every_rounding_shows(width: int, kind: str) -> None:
    x = rows_that_show_moments(40, width, kind)[None]
    args = (x, torch.zeros(1, width), torch.zeros(1, width), EPS)
    assert difference(LAYER_NORM_MODULATE, args, aten_chains.layer_norm_modulate(*args)) is None
