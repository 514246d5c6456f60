"""The gated residual kernel's source on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import aten_chains
import pytest
import torch
from binary32 import decode, encode, fma
from kernel_inputs import BF16, DTYPES, FP16, FP32, Arguments, all_triples, randn
from kernel_runs import difference, layout_of_eager, needs_compiler, run

from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
GATED_RESIDUAL = by_name("gated_residual")


def gated(batch: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0, amplitude: float = 1.0) -> Arguments:
    """Plain arguments; the gate is the last third of one projection."""
    h, y = (randn((batch, tokens, width), dtype, seed + part, amplitude) for part in (0, 1))
    return h, randn((batch, 3 * width), dtype, seed + 2).chunk(3, dim=-1)[2], y


def indexed(
    batch: int, tokens: int, width: int, dtype: torch.dtype, clip: bool, index_dtype: torch.dtype = torch.int32
) -> Arguments:
    """Two gate rows a sample; everything but 0 chooses the second. The index is strided, as a transposed one is."""
    h, _, y = gated(batch, tokens, width, dtype)
    gate = randn((2 * batch, 3 * width), dtype, 5)[:, width : 2 * width]
    index = torch.randint(-1, 3, (tokens, batch), generator=torch.Generator().manual_seed(1)).to(index_dtype).t()
    return h, gate, y, clip, index


SIZES = [
    # Every width is a compilation, so only some are tried with every element type.
    *((2, tokens, width, dtype) for tokens, width in ((5, 132), (3, 1024)) for dtype in DTYPES),
    *((1, tokens, 1024, BF16) for tokens in (1, 2, 7, 17)),
    (1, 3, 4, FP16),
    (3, 1, 8, BF16),
    (1, 2, 516, FP32),
    (3, 2, 1000, FP16),
    (1, 2, 3844, BF16),
    (1, 1, 16384, FP32),
    (1, 1, 16384, BF16),
]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "width", "dtype"), SIZES)
def test_gated_residual(batch: int, tokens: int, width: int, dtype: torch.dtype, clip: bool) -> None:
    args = (*gated(batch, tokens, width, dtype, seed=width, amplitude=3e4 if clip else 3.0), clip)
    assert difference(GATED_RESIDUAL, args, aten_chains.gated_residual(*args)) is None


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(FP16, torch.int32), (FP32, torch.int32), (BF16, torch.int32), (BF16, torch.int64)]
)
def test_gated_residual_by_index(dtype: torch.dtype, index_dtype: torch.dtype, clip: bool) -> None:
    h, gate, y, _, index = indexed(2, 9, 1024, dtype, clip, index_dtype)
    for args in ((h, gate, y, clip, index), (h, gate, y, clip, index.contiguous())):
        assert difference(GATED_RESIDUAL, args, aten_chains.gated_residual(*args)) is None
    other = aten_chains.gated_residual(h, gate, y, clip, 1 - index.clamp(0, 1))
    assert difference(GATED_RESIDUAL, (h, gate, y, clip, index), other) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_residual_of_views(dtype: torch.dtype) -> None:
    width = 1024
    wide, other = randn((2, 12, 2 * width + 4), dtype, 3), randn((2, 12, 2 * width), dtype, 4)
    rows = randn((2, 6 * width), dtype, 5)
    gate, shifted = rows[:, width : 2 * width], rows[:, width + 4 : 2 * width + 4]  # the second asks for narrow loads
    for args in (
        (wide[:, 1:6, :width], gate, other[:, 2:7, width:]),
        (wide[:, ::3, width : 2 * width], shifted, other[:, ::3, :width]),
        (wide[..., 4 : width + 4], gate, other[..., :width]),
        (other[..., :width], gate, other[..., :width]),
        (wide[:, :1, :width], gate[:1].expand(2, width), other[:, 3:4, width:]),
        (wide[1:, 2:5, :width], gate[:1], other[:1, 4:5, width:].expand(1, 3, width)),
    ):
        assert difference(GATED_RESIDUAL, args, aten_chains.gated_residual(*args)) is None
        assert layout_of_eager(GATED_RESIDUAL, args) is None


def test_every_layout_that_is_taken_gives_a_contiguous_result() -> None:
    def layouts() -> Iterator[torch.Tensor]:
        yield torch.zeros(2, 3, 8)
        yield torch.zeros(2, 3, 16)[..., :8]
        yield torch.zeros(3, 2, 8).transpose(0, 1)
        yield torch.zeros(3, 1, 8).transpose(0, 1).expand(2, 3, 8)
        yield torch.zeros(2, 1, 8).expand(2, 3, 8)
        yield torch.zeros(1, 1, 8).expand(2, 3, 8)

    taken = 0
    for h, y, batch, tokens in itertools.product(layouts(), layouts(), (1, 2), (1, 3)):
        args = (h[:batch, :tokens], torch.zeros(batch, 8), y[:batch, :tokens])
        if GATED_RESIDUAL.unsupported(*args) is None:
            taken += 1
            assert layout_of_eager(GATED_RESIDUAL, args) is None, (args[0].stride(), args[2].stride())
    assert taken == 40


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_special_value_with_every_other_two(dtype: torch.dtype, clip: bool) -> None:
    h, gate, y = all_triples(dtype)
    args = (h[None, None], gate[None], y[None, None], clip)
    expected = aten_chains.gated_residual(*args)
    assert expected.isnan().any()
    assert expected.isinf().any() != clip
    assert torch.equal(expected == 0, (h + gate * y)[None, None] == 0)
    assert ((expected == 0) & expected.signbit()).any()
    assert difference(GATED_RESIDUAL, args, expected) is None


def test_a_clip_brings_fp16_back_into_its_range() -> None:
    h, gate, y = (torch.full((1, 1, 1024), value, dtype=FP16) for value in (6e4, 100.0, 100.0))
    h[..., ::2], y[..., ::2] = -6e4, -100.0
    overflow = run(GATED_RESIDUAL, h, gate[0], y, False)[0]
    assert overflow.isinf().all()
    clipped = run(GATED_RESIDUAL, h, gate[0], y, True)[0]
    assert torch.equal(clipped, torch.where(h > 0, 65504.0, -65504.0).to(FP16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_sum_are_never_contracted(dtype: torch.dtype) -> None:
    h, gate, y = gated(1, 5, 1024, dtype)
    ours = run(GATED_RESIDUAL, h, gate, y)
    contracted = encode(fma(decode(gate)[:, None], decode(y), decode(h)), dtype)
    assert compare(ours, (contracted,)) is not None


def test_one_sum_that_a_contraction_would_change() -> None:
    h, gate, y = (torch.full((1, 1, 8), value, dtype=BF16) for value in (0.00390625, 1.0078125, 1.0078125))
    assert run(GATED_RESIDUAL, h, gate[0], y)[0].unique().tolist() == [1.015625]
    assert encode(fma(decode(gate), decode(y), decode(h)), BF16).unique().tolist() == [1.0234375]


def test_what_is_declined() -> None:
    h, gate, y = gated(2, 5, 64, FP32)
    index = torch.zeros(2, 5, dtype=torch.int32)
    for args, words in (
        ((h[0], gate, y), "(batch, tokens, width)"),
        ((h.double(), gate, y), "float32, float16 or bfloat16"),
        ((h.to(torch.float8_e4m3fn), gate, y), "float32, float16 or bfloat16"),
        ((h, gate.half(), y), "must have h's dtype"),
        ((h, gate, y[:, :4]), "y must be (2, 5, 64)"),
        ((h[..., :62], gate[:, :62], y[..., :62]), "multiple of 4"),
        ((h, gate[:1], y), "gate must be (2, 64)"),
        ((h, gate, y, False, index), "gate must be (4, 64)"),
        ((h, gate.repeat(2, 1), y, False, index.short()), "of int32 or int64"),
        ((h, gate.repeat(2, 1), y, False, index[:, :4]), "index must be (2, 5)"),
        ((h.transpose(1, 2).contiguous().transpose(1, 2), gate, y), "rows of h must be contiguous"),
        ((h, gate, randn((2, 5, 65), FP32, 1)[..., 1:]), "rows of y must be contiguous and aligned"),
        ((h.transpose(0, 1).contiguous().transpose(0, 1), gate, y), "in their order and apart"),
        ((h[:, :1].expand(2, 5, 64), gate, y), "in their order and apart"),
        ((h, gate.to("meta"), y), "one device"),
    ):
        assert words in str(GATED_RESIDUAL.unsupported(*args)), words
