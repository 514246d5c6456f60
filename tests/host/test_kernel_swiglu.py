"""The SwiGLU kernel's source on the CPU against the emulator: equal bits or a failure.

``exp`` is the C library's on both sides, or one that was made up for both.
"""

from __future__ import annotations

import aten_chains
import numpy as np
import pytest
import torch
from binary32 import F32, decode, encode, exp, rounded
from kernel_inputs import BF16, DTYPES, FP16, FP32, all_triples, randn
from kernel_runs import difference, layout_of_eager, needs_compiler, run

from samebits import host
from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
SWIGLU = by_name("swiglu")

SIZES = [
    # Every width is a compilation, so only some are tried with every element type.
    *((shape, dtype) for shape in ((2, 5, 132), (3, 1024)) for dtype in DTYPES),
    ((1024,), BF16),
    ((1, 1, 1, 1024), FP16),
    ((2, 3, 2, 1024), BF16),
    ((1, 3, 4), FP16),
    ((7, 8), BF16),
    ((1, 17, 516), FP32),
    ((1, 3, 1000), BF16),
    ((1, 2, 10240), BF16),
]


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 40.0, 300.0])
@pytest.mark.parametrize(("shape", "dtype"), SIZES)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype, amplitude: float) -> None:
    args = (randn(shape, dtype, 1, amplitude), randn(shape, dtype, 2, amplitude))
    assert difference(SWIGLU, args, aten_chains.swiglu(*args)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_halves_and_other_views(dtype: torch.dtype) -> None:
    packed, other = randn((2, 7, 2 * 1024), dtype, 3), randn((2, 7, 1028), dtype, 4)
    a, b = packed.chunk(2, dim=-1)
    for args in (
        (a, b),
        (b, a),
        (a, a),
        (a[:, :5].flatten(0, 0)[:1], b[:1, 2:]),
        (other[..., 4:], a),  # not on 16 bytes: narrow loads
        (a[0], other[1, :, :1024]),
        (a[1, ::2], b[0, ::2]),
        (packed[:, 3, :1024], packed[:, 4, 1024:]),
    ):
        assert difference(SWIGLU, args, aten_chains.swiglu(*args)) is None
        assert layout_of_eager(SWIGLU, args) is None


@pytest.mark.parametrize("factor", [1.0, -1.0, 1.0078125, 3e38, 1e-40])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_times_a_few(dtype: torch.dtype, factor: float) -> None:
    a = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1024)
    b = torch.full(a.shape, factor).to(dtype)  # in fp16 the last two are infinity and 0
    expected = aten_chains.swiglu(a, b)
    assert expected[a.isnan() | (a == -torch.inf)].isnan().all()
    assert difference(SWIGLU, (a, b), expected) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_special_value_with_every_other(dtype: torch.dtype) -> None:
    a, b, _ = (part.view(4, 1024) for part in all_triples(dtype))
    expected = aten_chains.swiglu(a, b)
    assert ((expected == 0) & expected.signbit()).any()
    assert difference(SWIGLU, (a, b), expected) is None


def test_a_product_beyond_fp16_is_infinite() -> None:
    a = torch.full((3, 1024), 300.0, dtype=FP16)
    assert run(SWIGLU, a, a)[0].eq(torch.inf).all()
    assert run(SWIGLU, a, -a)[0].eq(-torch.inf).all()


def test_a_nan_becomes_the_gpus_nan() -> None:
    a = torch.tensor([0x7FC1, -0x3F], dtype=torch.int16).view(BF16).repeat(3, 512)
    one = torch.ones_like(a)
    for args in ((a, one), (one, a), (a, a)):
        assert run(SWIGLU, *args)[0].view(torch.int16).eq(0x7FFF).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_exp_than_the_c_librarys(dtype: torch.dtype) -> None:
    """The kernel computes with what it is given: ``exp`` up to two ulps off, at random."""
    a, b = randn((3, 1024), dtype, 5, 4.0), randn((3, 1024), dtype, 6)
    inputs = np.unique((-decode(a)).view(np.uint32)).view(np.float32)
    outputs = exp(inputs).view(np.int32) + np.random.default_rng(1).integers(-2, 3, inputs.size).astype(np.int32)
    outputs = outputs.view(np.float32)

    def moved(x: F32) -> F32:
        order = np.argsort(inputs)
        return outputs[order][np.searchsorted(inputs[order], x)]

    expected = aten_chains.swiglu(a, b, exp=moved)
    with host.recorded("expf", inputs.view(np.uint32).tolist(), outputs.view(np.uint32).tolist()):
        assert difference(SWIGLU, (a, b), expected) is None
    # In half precision two ulps of exp are lost in the rounding of silu, nearly always.
    assert dtype != FP32 or difference(SWIGLU, (a, b), expected) is not None


def test_other_roundings_are_found() -> None:
    one = np.float32(1)
    for dtype in DTYPES:
        a, b = randn((64, 1024), dtype, 7), randn((64, 1024), dtype, 8)
        ours, (x, y) = run(SWIGLU, a, b), (decode(a), decode(b))
        once = encode(x / (one + exp(-x)) * y, dtype)
        assert (compare(ours, (once,)) is None) == (dtype == FP32)
        by_reciprocal = encode(rounded(x * (one / (one + exp(-x))), dtype) * y, dtype)
        assert dtype != FP32 or compare(ours, (by_reciprocal,)) is not None
        assert compare(ours, (aten_chains.swiglu(b, a),)) is not None


def test_what_is_declined() -> None:
    a = torch.zeros(2, 3, 64, dtype=BF16)
    for args, words in (
        ((a.double(), a.double()), "float32, float16 or bfloat16"),
        ((a, a.half()), "float32, float16 or bfloat16"),
        ((a.to(torch.float8_e4m3fn), a.to(torch.float8_e4m3fn)), "float32, float16 or bfloat16"),
        ((a, a[:1]), "one shape"),
        ((a[:0], a[:0]), "not be empty"),
        ((a, a.to("meta")), "one device"),
        ((a[..., :62], a[..., :62]), "multiple of 4"),
        ((a[..., ::2], a[..., ::2]), "contiguous"),
        ((a.transpose(0, 1), a.transpose(0, 1)), "at one distance"),
        ((a[:1, :1].expand(1, 3, 64), a[:1]), "in their order and apart"),
        ((torch.zeros(66, dtype=BF16)[2:], torch.zeros(64, dtype=BF16)), "not aligned"),
    ):
        assert words in str(SWIGLU.unsupported(*args)), (words, SWIGLU.unsupported(*args))
