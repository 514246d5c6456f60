"""GELU and SwiGLU: every value that half precision has, and a great many of fp32."""

from __future__ import annotations

import pytest
import torch
from ring import DTYPES, assert_same_bits, check, check_or_declined, every_half, randn, special_triples

from samebits.bits import integer_view
from samebits.gate import Gate
from samebits.ops import by_name, gelu_tanh

pytestmark = pytest.mark.gpu

GELU, SWIGLU = by_name("gelu_tanh"), by_name("swiglu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = (BF16, FP16)


def any_fp32(count: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """fp32 numbers of every exponent: random patterns."""
    generator = torch.Generator(device).manual_seed(seed)
    low, high = -(2**31), 2**31
    patterns = torch.randint(low, high, (count,), generator=generator, device=device, dtype=torch.int64)
    return patterns.to(torch.int32).view(FP32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gelu_of_every_value(dtype: torch.dtype, device: torch.device) -> None:
    check(GELU, (every_half(dtype, device),))


@pytest.mark.parametrize("more", [0, 1, 5, 8])
def test_gelu_of_every_value_by_the_table(more: int, device: torch.device) -> None:
    """So many bf16 elements that the table is used; from one to eight are left over, or make one more vector."""
    times = gelu_tanh.TABLE_FROM // 65536
    check(GELU, (every_half(BF16, device, times, more),))
    check(GELU, (every_half(BF16, device, 8 * times, more).flip(0).contiguous(),))


def test_gelu_of_a_hundred_million_fp32_numbers(device: torch.device) -> None:
    for seed in range(6):
        check(GELU, (any_fp32(1 << 24, device, seed),))
    check(GELU, (torch.linspace(-12, 12, 1 << 24, device=device),))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_of_odd_sizes(dtype: torch.dtype, device: torch.device) -> None:
    for elements in (1, 3, 7, 8, 9, 2047, 2049, 100_003, (1 << 20) - 1, (1 << 20) + 3):
        check(GELU, (randn(elements, dtype=dtype, device=device, seed=elements, amplitude=3.0),))
    assert check_or_declined(GELU, (randn(17, dtype=dtype, device=device)[1:],)) is not None
    assert check_or_declined(GELU, (randn(16, 8, dtype=dtype, device=device).t(),)) is not None


@pytest.mark.parametrize("factor", [1.0, -1.0, 1.0078125, 3e38, 1e-40])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_swiglu_of_every_value_times_a_few(dtype: torch.dtype, factor: float, device: torch.device) -> None:
    a = every_half(dtype, device).view(64, 1024)
    check(SWIGLU, (a, torch.full(a.shape, factor, device=device).to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_of_every_special_value_with_every_other(dtype: torch.dtype, device: torch.device) -> None:
    """Both NaNs with a payload among them, 0x7FC1 and 0xFFC1 in half precision."""
    a, b, _ = (part.view(4, 1024) for part in special_triples(dtype, device))
    check(SWIGLU, (a, b))


def test_swiglu_of_a_hundred_million_fp32_numbers(device: torch.device) -> None:
    for seed in range(6):
        check(SWIGLU, tuple(any_fp32(1 << 24, device, 2 * seed + part).view(4096, 4096) for part in (0, 1)))
    dense = torch.linspace(-110, 110, 1 << 24, device=device).view(4096, 4096)
    check(SWIGLU, (dense, torch.ones_like(dense)))


def test_fp16_overflow_to_infinity_keeps_the_op_enabled(device: torch.device) -> None:
    a = torch.full((3, 1024), 300.0, dtype=FP16, device=device)
    assert bool(SWIGLU.reference(a, a).isinf().all()), "not the case meant"
    check(SWIGLU, (a, a))
    site = Gate().site("overflow", SWIGLU)
    for _ in range(3):
        assert_same_bits(site(a, -a), SWIGLU.reference(a, -a))
    assert site.counters.fused >= 1, dict(site.counters.reasons)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_of_packed_halves_and_other_views(dtype: torch.dtype, device: torch.device) -> None:
    packed = randn(2, 37, 2 * 10240, dtype=dtype, device=device)
    a, b = packed.chunk(2, dim=-1)
    for args in ((a, b), (b, a), (a, a), (a[:, ::2], b[:, 1::2].expand(2, -1, -1)), (a.contiguous(), b)):
        if args[0].shape == args[1].shape:
            assert check_or_declined(SWIGLU, args) is None
    for start in (1, 2, 4, 8):
        late = randn(16 + 5 * 1024, dtype=dtype, device=device)[start : start + 5 * 1024].view(5, 1024)
        check_or_declined(SWIGLU, (late, late.clone()))
        check_or_declined(SWIGLU, (late.clone(), late))
    assert check_or_declined(SWIGLU, (a[..., ::2], b[..., ::2])) is not None
    assert check_or_declined(SWIGLU, (a.transpose(0, 1), b.transpose(0, 1))) is not None


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 40.0, 200.0])
def test_amplitudes(amplitude: float, device: torch.device) -> None:
    for dtype in DTYPES:
        a, b = (randn(64, 10240, dtype=dtype, device=device, seed=seed, amplitude=amplitude) for seed in (0, 1))
        check(GELU, (a,))
        check(SWIGLU, (a, b))


def test_text_lengths(device: torch.device) -> None:
    """One verification a length and no more; a table from 2^20 elements on is another kernel and another verdict."""
    lengths = (1, 5, 17, 31, 32, 33, 1024)
    for op, width in ((GELU, 12288), (SWIGLU, 10240)):
        gate = Gate()
        site = gate.site("text", op)
        for _ in range(3):
            for length in lengths:
                a, b = (randn(1, length, width, dtype=BF16, device=device, seed=length + part) for part in (0, 5000))
                args = (a,) if op is GELU else (a, b)
                assert_same_bits(site(*args), op.reference(*args))
        assert len(list(gate.verdicts())) <= len(lengths)
        assert site.counters.fused >= 2 * len(lengths), dict(site.counters.reasons)


def test_a_nan_becomes_the_gpus_nan(device: torch.device) -> None:
    nans = torch.tensor([0x7FC1, 0xFFC1 - (1 << 16)], dtype=torch.int16, device=device).view(BF16).repeat(3, 512)
    one = torch.ones_like(nans)
    for args in ((nans, one), (one, nans), (nans, nans)):
        check(SWIGLU, args)
        assert integer_view(SWIGLU.prepare(*args)(*args)).unique().tolist() == [0x7FFF]
    check(GELU, (nans,))
