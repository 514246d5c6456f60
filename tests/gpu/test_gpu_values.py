"""Values that break careless arithmetic: overflow, signed zeros, subnormals, outliers, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ring import (
    DTYPES,
    assert_same_bits,
    awkward_rows,
    check,
    modulate_args,
    qk_args,
    randn,
    rms_args,
    unusual_rows,
)

from samebits.bits import integer_view
from samebits.gate import Gate
from samebits.ops import by_name

pytestmark = pytest.mark.gpu

MODULATE, QK, RMS = by_name("layer_norm_modulate"), by_name("qk_norm"), by_name("rms_norm_scale")
KINDS = [
    (kind, dtype)
    for kind in ("diffusers", "native", "torch")
    for dtype in DTYPES
    if not (kind == "native" and dtype is torch.float32)
]


def heads(rows: torch.Tensor) -> torch.Tensor:
    """``(N, hd)`` rows as ``(1, N, 1, hd)``: one head a token."""
    return rows[None, :, None, :].contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3072, 3844])
def test_awkward_rows_layer_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    check(MODULATE, modulate_args(awkward_rows(width, dtype, device)[None]))


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_awkward_rows_qk_norm(head_dim: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    rows = awkward_rows(head_dim, dtype, device)
    check(QK, qk_args(heads(rows), heads(rows.flip(0)), kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_rows_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    check(RMS, rms_args(awkward_rows(3840, dtype, device)[None]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype, device: torch.device) -> None:
    check(MODULATE, modulate_args(unusual_rows(3072, dtype, device)[None]))
    check(RMS, rms_args(unusual_rows(3840, dtype, device)[None]))
    rows = unusual_rows(128, dtype, device)
    check(QK, qk_args(heads(rows), heads(rows.flip(0)), "diffusers"))
    check(QK, qk_args(heads(rows), heads(rows.flip(0)), "torch"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_row_with_scale_minus_two_gives_minus_zero(dtype: torch.dtype, device: torch.device) -> None:
    scale = torch.full((1, 3072), -2.0, dtype=dtype, device=device)
    shift = torch.full_like(scale, -0.0)
    zeros = torch.zeros(1, 5, 3072, dtype=dtype, device=device)
    expected = MODULATE.reference(zeros, scale, shift, 1e-6)
    minus_zero = integer_view(torch.full_like(expected, -0.0))
    assert bool((integer_view(expected) == minus_zero).all()), "not the case meant"
    check(MODULATE, (zeros, scale, shift, 1e-6))
    check(MODULATE, (torch.full_like(zeros, 1.5), scale, shift, 1e-6))


def test_fp16_overflow_to_infinity_keeps_the_op_enabled(device: torch.device) -> None:
    """n * (1 + scale) leaves fp16's range: the bits are eager's, so the signature is verified all the same."""
    x = randn(1, 7, 3072, dtype=torch.float16, device=device)
    scale = torch.full((1, 3072), 6.0e4, dtype=torch.float16, device=device)
    args = (x, scale, torch.full_like(scale, 1.0e4), 1e-6)
    assert bool(MODULATE.reference(*args).isinf().any()), "not the case meant"
    check(MODULATE, args)
    site = Gate().site("overflow", MODULATE)
    for _ in range(3):
        assert_same_bits(site(*args), MODULATE.reference(*args))
    assert site.counters.fused >= 1, dict(site.counters.reasons)


def test_fp16_squares_beyond_the_range_of_fp16(device: torch.device) -> None:
    x = randn(1, 5, 3840, dtype=torch.float32, device=device)
    x = torch.where(x > 0, 3.0e4, -3.0e4).to(torch.float16)
    assert bool((x * x).isinf().all()), "not the case meant"
    expected = RMS.reference(*rms_args(x, scaled=False))
    assert bool(expected.isfinite().all()), "fp32 squares must not overflow"
    check(RMS, rms_args(x))
    check(RMS, rms_args(x, scaled=False))
    for kind in ("diffusers", "native", "torch"):
        q: Any = x.view(1, 5, 30, 128)
        check(QK, qk_args(q, q.flip(1).contiguous(), kind))


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 40.0, 200.0])
def test_amplitudes(amplitude: float, device: torch.device) -> None:
    for dtype in DTYPES:
        x = randn(2, 33, 3072, dtype=dtype, device=device, amplitude=amplitude)
        check(MODULATE, modulate_args(x))
        check(RMS, rms_args(x))
        q = x.view(2, 33, 24, 128)
        for kind in ("diffusers", "torch"):
            check(QK, qk_args(q, q.flip(1).contiguous(), kind))
