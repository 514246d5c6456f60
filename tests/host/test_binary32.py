"""Single precision of the emulator against exact fractions and torch's own conversions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from binary32 import decode, encode, fma, rsqrt, to_bf16_bits, to_fp16_bits


def _nearest_binary32(value: Fraction) -> float:
    """``value`` rounded to nearest even, by integers alone."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    units = round(magnitude / ulp)  # Fraction rounds half to even
    result = units * ulp
    signed = math.inf if result >= Fraction(2) ** 128 else float(result)
    return -signed if value < 0 else signed


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (3, 4000), dtype=np.uint64).astype(np.uint32)
    # Half of the cases have exponents near one another: only then does the addend meet the product.
    exponents = rng.integers(110, 144, (3, 2000)).astype(np.uint32) << 23
    bits[:, ::2] = (bits[:, ::2] & 0x807FFFFF) | exponents
    a, b, c = (row.view(np.float32) for row in bits)
    with np.errstate(all="ignore"):
        c[:500] = -(a[:500] * b[:500])  # what is left is the product's own rounding error
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[finite], b[finite], c[finite]
    expected = [
        _nearest_binary32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert np.array_equal(fma(a, b, c), np.array(expected, np.float32))


def test_fma_where_rounding_twice_goes_wrong() -> None:
    # Just below the middle between 1 + 2^-23 and 1 + 2^-22. In float64 the sum is that middle, a tie that goes up.
    a, b, c = np.float32(1 + 2**-23), np.float32(2**-24 * (1 - 2**-23)), np.float32(1 + 2**-23)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == np.float32(1 + 2**-22)
    assert fma(a, b, c) == c
    assert fma(-a, b, -c) == -c


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (math.inf, 1, -math.inf, math.nan),
        (math.inf, 0, 1, math.nan),
        (3e38, 3e38, -math.inf, -math.inf),
        (3e38, 10, 0, math.inf),
        (1e-30, 1e-30, 0, 0.0),
        (-1e-30, 1e-30, -0.0, -0.0),
        (1e-30, 1e-10, 0, 1e-40),
        (1, -1, 1, 0.0),
    ],
)
def test_fma_special_values(a: float, b: float, c: float, expected: float) -> None:
    result = np.atleast_1d(fma(np.float32(a), np.float32(b), np.float32(c)))
    wanted = np.atleast_1d(np.float32(expected))
    assert np.array_equal(result, wanted, equal_nan=True)
    assert np.signbit(result) == np.signbit(wanted) or math.isnan(expected)


def test_roundings_are_those_of_torch_for_every_kind_of_value() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 400_000, dtype=np.uint64).astype(np.uint32)
    bits[:200_000] = (bits[:200_000] & 0xFFFF0000) | rng.choice([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], 200_000)
    x = bits.view(np.float32)
    numbers = ~np.isnan(x)
    for dtype, short in ((torch.bfloat16, to_bf16_bits), (torch.float16, to_fp16_bits)):
        got = torch.from_numpy(short(x).view(np.int16))
        want = torch.from_numpy(x).to(dtype).view(torch.int16)
        assert torch.equal(got[numbers], want[numbers])
        assert set(got[~numbers].tolist()) == {0x7FFF}  # not the CPU's 0x7FC0 or 0x7E00
        assert torch.equal(encode(decode(want.view(dtype)), dtype).view(torch.int16)[numbers], want[numbers])


def test_rsqrt_through_float64_is_correctly_rounded_for_every_mantissa() -> None:
    # The two float64 roundings move a root by less than 2^-52 of it, which is 2^-28 float32 ulps. A root farther than
    # that from the middle between two float32 is rounded right; the others are checked exactly. The roots of the
    # mantissas and of their doubles are those of all numbers, up to powers of two.
    mantissas = np.arange(2**23, 2**24, dtype=np.float64)
    near = []
    for x in (mantissas, mantissas * 2):
        ulps = np.frexp(1.0 / np.sqrt(x))[0] * 2**24
        near += x[np.abs(np.abs(ulps - np.round(ulps)) - 0.5) < 2.0**-28].tolist()
    assert near == [12196067.0]
    for x in near:
        root = rsqrt(np.float32(x))
        below, above = (Fraction(float(np.nextafter(root, np.float32(end)))) for end in (0, 1))
        exact = Fraction(float(root))
        assert ((below + exact) / 2) ** 2 * Fraction(x) < 1 < ((above + exact) / 2) ** 2 * Fraction(x)


def test_rsqrt_special_values() -> None:
    assert np.isnan(rsqrt(np.float32(-1)))
    assert rsqrt(np.float32(0)) == np.inf
    assert rsqrt(np.float32(np.inf)) == 0
    assert rsqrt(np.float32(1e-40)) == np.float32(1 / math.sqrt(float(np.float32(1e-40))))  # a subnormal is not flushed
