"""What ``gelu_tanh.cu`` says about GELU's gate, shown on every bf16 value: by arithmetic alone, no kernel runs here."""

from __future__ import annotations

import aten_chains
import numpy as np
import pytest
import torch
from binary32 import F32, encode, from_bits, tanh, to_bf16_bits

BF16 = torch.bfloat16
EVERY = from_bits(np.arange(65536, dtype=np.uint32).astype(np.uint16), BF16)
LEAST, MOST = np.float32(2**-9), np.float32(2**4)


def gelu(x: F32, ulps: int = 0) -> np.ndarray:
    """The formula's bf16 patterns; ``tanh`` so many ulps off, as an approximation may be, but exact far from 0."""

    def approximate(inner: F32) -> F32:
        moved = np.clip((tanh(inner).view(np.int32) + ulps).view(np.float32), -1, 1)
        return np.where((np.abs(inner) > 10) | (inner == 0), tanh(inner), moved).astype(np.float32)

    return aten_chains.gelu_tanh(encode(x, BF16), tanh=approximate).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("ulps", range(-4, 5))
def test_below_the_table_the_gate_is_one_half(ulps: int) -> None:
    below = EVERY[np.abs(EVERY) < LEAST]
    assert below.size == 2 * 0x3B00
    assert (gelu(below, ulps) == to_bf16_bits(below * np.float32(0.5))).all()
    # The table begins where it must: just above, halves are not always right.
    above = EVERY[(np.abs(EVERY) >= LEAST) & (np.abs(EVERY) < 2 * LEAST)]
    assert (gelu(above, ulps) != to_bf16_bits(above * np.float32(0.5))).any()


@pytest.mark.parametrize("ulps", range(-4, 5))
def test_above_the_table_the_gate_is_one_or_zero(ulps: int) -> None:
    with np.errstate(all="ignore"):
        for x, gate in ((EVERY[EVERY >= MOST], 1), (EVERY[EVERY <= -MOST], 0)):
            assert x.size == 0x7F80 - 0x4180 + 1
            assert (gelu(x, ulps) == to_bf16_bits(x * np.float32(gate))).all()
    minus_zero, nan = 0x8000, 0x7FFF
    assert (gelu(EVERY[(EVERY <= -MOST) & np.isfinite(EVERY)]) == minus_zero).all()
    assert gelu(np.array([-np.inf], np.float32)).tolist() == [nan]
    assert (gelu(EVERY[np.isnan(EVERY)]) == nan).all()


def test_half_of_the_sum_is_as_good_as_half_of_x() -> None:
    inside = EVERY[(np.abs(EVERY) >= LEAST) & (np.abs(EVERY) < MOST)]
    assert inside.size == 3328
    generator = np.random.default_rng(0)
    for _ in range(16):  # whatever tanh is, the two products are one number before they are rounded to bf16
        one_plus = np.float32(1) + generator.uniform(-1, 1, inside.size).astype(np.float32)
        ours, atens = inside * (np.float32(0.5) * one_plus), (np.float32(0.5) * inside) * one_plus
        assert (ours.view(np.uint32) == atens.view(np.uint32)).all()
