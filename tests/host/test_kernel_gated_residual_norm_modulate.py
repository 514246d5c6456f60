"""The source of the gated residual with LayerNorm on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

import aten_chains
import pytest
import torch
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
    rows_that_show_moments,
    special_values,
)
from kernel_runs import difference, layout_of_eager, needs_compiler, run

from samebits import host
from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
OP = by_name("gated_residual_norm_modulate")


def plain(batch: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0, amplitude: float = 1.0) -> Arguments:
    """Plain arguments: shift, scale and gate are the thirds of one projection."""
    h, y = (randn((batch, tokens, width), dtype, seed + part, amplitude) for part in (0, 1))
    shift, scale, gate = randn((batch, 3 * width), dtype, seed + 2).chunk(3, dim=-1)
    return h, gate, y, scale, shift, EPS


SIZES = [
    # Every width is a compilation, so only some are tried with every element type.
    *((2, tokens, width, dtype) for tokens, width in ((5, 132), (3, 1024)) for dtype in DTYPES),
    *((1, tokens, 1024, BF16) for tokens in (1, 2, 7, 17)),
    (1, 3, 4, FP16),
    (1, 1, 128, FP32),
    (1, 2, 516, BF16),
    (3, 2, 1000, FP16),
    (1, 3, 3072, BF16),
    (1, 2, 3844, BF16),
    (1, 1, 16384, FP32),
    (1, 1, 16384, BF16),
]


@pytest.mark.parametrize(("batch", "tokens", "width", "dtype"), SIZES)
def test_gated_residual_norm_modulate(batch: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    args = plain(batch, tokens, width, dtype, seed=width, amplitude=3.0)
    assert difference(OP, args, aten_chains.gated_residual_norm_modulate(*args)) is None


@pytest.mark.parametrize(("width", "dtype"), [(132, FP16), (1024, FP16), (1024, BF16), (1024, FP32)])
def test_with_a_clip(width: int, dtype: torch.dtype) -> None:
    h, gate, y, *modulation = plain(2, 3, width, dtype, amplitude=3e4)
    args = (h.clamp(-6e4, 6e4), gate, y.clamp(-6e4, 6e4), *modulation, True)
    expected = aten_chains.gated_residual_norm_modulate(*args)
    assert difference(OP, args, expected) is None
    if dtype == FP16:  # without it infinities would make rows of NaN
        assert not expected[1].isnan().any()
        assert aten_chains.gated_residual_norm_modulate(*args[:-1])[1].isnan().any()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(FP16, torch.int32), (FP32, torch.int32), (BF16, torch.int32), (BF16, torch.int64)]
)
def test_by_index(dtype: torch.dtype, index_dtype: torch.dtype, clip: bool) -> None:
    h, _, y, *_ = plain(2, 9, 1024, dtype)
    shift, scale, gate = randn((4, 3 * 1024), dtype, 5).chunk(3, dim=-1)
    index = torch.randint(-1, 3, (9, 2), generator=torch.Generator().manual_seed(1)).to(index_dtype).t()
    args = (h, gate, y, scale, shift, EPS, clip, index)
    assert difference(OP, args, aten_chains.gated_residual_norm_modulate(*args)) is None
    # The rows of the gate, of the scale and of the shift are all chosen: each of them once from the others' row.
    for place in (1, 3, 4):
        swapped = list(args)
        swapped[place] = swapped[place].roll(2, 0)
        assert difference(OP, args, aten_chains.gated_residual_norm_modulate(*swapped)) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [132, 1024])
def test_views(width: int, dtype: torch.dtype) -> None:
    wide, other = randn((2, 12, 2 * width), dtype, 3), randn((2, 12, 2 * width), dtype, 4)
    shift, scale, gate, *_ = randn((2, 6 * width), dtype, 5).chunk(6, dim=-1)
    for args in (
        (wide[:, 1:6, :width], gate, other[:, 2:7, width:], scale, shift, 0.1),
        (wide[:, ::3, width:], gate[:1].expand(2, width), other[:, ::3, :width], scale, shift, EPS),
        (wide[1:, :1, width:], gate[1:], other[1:, 5:6, width:], scale[1:], shift[:1], EPS),
    ):
        assert difference(OP, args, aten_chains.gated_residual_norm_modulate(*args)) is None
        assert layout_of_eager(OP, args) is None


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_rows(dtype: torch.dtype, clip: bool) -> None:
    width = 1024
    h, y = odd_rows(width, dtype)[None], odd_rows(width, dtype, 8).flip(0)[None]
    scale, shift, gate = randn((3, 1, width), dtype, 5)
    gate[:, ::5] = 0
    scale[:, ::3], shift[:, ::6] = -2, -0.0  # a constant row becomes -0 there, and stays it where the shift is -0
    scale[:, 7], shift[:, 8], scale[:, 10], gate[:, 11] = torch.inf, -torch.inf, torch.nan, torch.inf
    for y_row in (y, torch.zeros_like(y)):
        args = (h, gate, y_row, scale, shift, EPS, clip)
        expected = aten_chains.gated_residual_norm_modulate(*args)
        assert all(t.isnan().any() for t in expected)
        assert difference(OP, args, expected) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_row_becomes_minus_zero(dtype: torch.dtype) -> None:
    h, y, gate, scale, shift = (torch.full((1, 2, 1024), value, dtype=dtype) for value in (1.5, 2.0, -0.5, -2.0, -0.0))
    stream, normed = run(OP, h, gate[:, 0], y, scale[:, 0], shift[:, 0], EPS)
    assert torch.equal(stream, torch.full_like(h, 0.5))
    assert (normed == 0).all()
    assert normed.signbit().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stream_of_special_values(dtype: torch.dtype) -> None:
    special = special_values(dtype)
    width = special.numel() ** 2
    first, second = (part.flatten() for part in torch.meshgrid(special, special, indexing="ij"))
    for gate in special:
        args = (first[None, None], gate.expand(1, width).contiguous(), second[None, None], *[first[None]] * 2, EPS)
        assert difference(OP, args, aten_chains.gated_residual_norm_modulate(*args)) is None


@pytest.mark.parametrize("kind", ["far from zero", "threads differ", "warps differ"])
@pytest.mark.parametrize("width", [516, 3072])
def test_where_every_rounding_of_the_moments_shows(width: int, kind: str) -> None:
    zeros = torch.zeros(1, width)
    y = rows_that_show_moments(40, width, kind)[None]
    args = (torch.zeros_like(y), zeros + 1, y, zeros, zeros, EPS)
    assert difference(OP, args, aten_chains.gated_residual_norm_modulate(*args)) is None


# A text stream beside the image.


def with_text(image: Arguments, text: Arguments, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> Arguments:
    """One call of both: the image's arguments, and of the text's all but the eps."""
    image = (*image, *(None if place > 6 else False for place in range(len(image), 9)))
    return (*image[:8], scales and scales[0], *text[:5], scales and scales[1])


BOTH = [
    *((batch, tokens, few, 132, dtype) for batch, tokens, few in ((1, 5, 2), (2, 3, 7), (3, 1, 1)) for dtype in DTYPES),
    (2, 3, 1, 1024, BF16),
    (1, 4, 33, 516, FP16),
    (1, 2, 3, 3072, BF16),
    (1, 1, 2, 16384, FP32),
    (1, 2, 1, 4, BF16),
]


@pytest.mark.parametrize(("batch", "tokens", "few", "width", "dtype"), BOTH)
def test_two_streams(batch: int, tokens: int, few: int, width: int, dtype: torch.dtype) -> None:
    image, text = plain(batch, tokens, width, dtype, 1, 3.0), plain(batch, few, width, dtype, 50, 2.0)
    args = with_text(image, text)
    expected = aten_chains.of_both_streams(image, text[:5])
    assert difference(OP, args, expected) is None
    assert layout_of_eager(OP, args) is None
    for order in (0, 1, 2):
        with host.schedule(order, workers=2):
            assert difference(OP, args, expected) is None
    # Each stream has its own of everything: with one tensor of the other stream there are other bits.
    for place in (1, 3, 4):
        swapped = list(args)
        swapped[place], swapped[9 + place] = args[9 + place], args[place]
        found = run(OP, *swapped)
        assert compare(found[1:2], expected[1:2]) is not None
        assert compare(found[3:], expected[3:]) is not None


def test_two_streams_are_the_calls_of_each() -> None:
    for dtype in DTYPES:
        image, text = plain(2, 5, 1024, dtype, 1, 3.0), plain(2, 3, 1024, dtype, 50, 2.0)
        assert compare(run(OP, *with_text(image, text)), (*run(OP, *image), *run(OP, *text))) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_streams_of_which_the_image_has_an_index(dtype: torch.dtype) -> None:
    h, _, y, *_ = plain(2, 9, 132, dtype)
    shift, scale, gate = randn((4, 3 * 132), dtype, 5).chunk(3, dim=-1)
    index = torch.randint(0, 2, (2, 9), generator=torch.Generator().manual_seed(1))
    image, text = (h, gate, y, scale, shift, EPS, False, index), plain(2, 4, 132, dtype, 50)
    expected = aten_chains.of_both_streams(image, text[:5])
    assert difference(OP, with_text(image, text), expected) is None
    assert difference(OP, with_text((*image[:7], 1 - index), text), expected) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_streams_as_parts_of_more(dtype: torch.dtype) -> None:
    """The branches are ranges of the joint attention's tokens, as for two samples without a copy."""
    joint, streams = randn((2, 14, 132), dtype, 3), randn((2, 20, 2 * 132), dtype, 4)
    vectors = randn((2, 12 * 132), dtype, 5).chunk(12, dim=-1)
    image = (streams[:, 2:11, :132], vectors[0], joint[:, 5:], vectors[1], vectors[2], EPS)
    text = (streams[:, ::4, 132:], vectors[3], joint[:, :5], vectors[4], vectors[5])
    args = with_text(image, text)
    assert difference(OP, args, aten_chains.of_both_streams(image, text)) is None
    assert layout_of_eager(OP, args) is None


def test_two_streams_with_a_clip() -> None:
    image, text = plain(2, 3, 132, FP16, 0, 3e4), plain(2, 5, 132, FP16, 50, 3e4)
    image, text = ((h.clamp(-6e4, 6e4), g, y.clamp(-6e4, 6e4), *rest) for h, g, y, *rest in (image, text))
    expected = aten_chains.of_both_streams((*image, True), text[:5])
    assert difference(OP, with_text((*image, True), text), expected) is None
    assert not expected[3].isnan().any()
    assert difference(OP, with_text(image, text), aten_chains.of_both_streams(image, text[:5])) is None
    assert run(OP, *with_text(image, text))[3].isnan().any()


def test_two_streams_that_are_declined() -> None:
    image, text = plain(2, 5, 64, FP32), plain(2, 3, 64, FP32)
    scale = torch.tensor(0.5)
    whole = with_text(image, text)
    assert OP.unsupported(*whole) is None

    def changed(**parts: object) -> Arguments:
        names = ("h", "gate", "y", "scale", "shift")
        return (*whole[:9], *(parts.get(name, text[place]) for place, name in enumerate(names)), parts.get("input"))

    for args, words in (
        (changed(gate=None), "whole or not at all"),
        (changed(h=None), "whole or not at all"),
        ((*whole[:9], *(None,) * 5, scale), "whole or not at all"),
        (changed(input=scale), "both streams are quantised or neither"),
        ((*whole[:8], scale, *whole[9:]), "both streams are quantised or neither"),
        (with_text(image, plain(1, 3, 64, FP32)), "one batch and width"),
        (with_text(image, plain(2, 3, 68, FP32)), "one batch and width"),
        (with_text(image, plain(2, 3, 64, FP16)), "one dtype"),
        (changed(gate=text[1][:1]), "the text stream: gate must be (2, 64)"),
        (changed(y=text[2].half()), "the text stream: gate and y must have h's dtype"),
        (changed(h=text[0][:, :1].expand(2, 3, 64)), "the text stream: the dimensions of h"),
        (with_text((image[0].double(), *image[1:]), text), "h must be float32"),
    ):
        assert words in str(OP.unsupported(*args)), words


def test_other_chains_are_found() -> None:
    h, gate, y, scale, shift, eps = args = plain(1, 5, 1024, BF16)
    ours = run(OP, *args)
    # The norm is of the sum after its rounding, and the sum is not contracted with its product.
    unrounded = encode(decode(h) + decode(gate * y), FP32)
    contracted = encode(fma(decode(gate)[:, None], decode(y), decode(h)), BF16)
    for stream in (unrounded, contracted):
        normed = aten_chains.layer_norm_modulate(stream, scale, shift, eps)
        assert compare(ours[1:], (normed.to(BF16),)) is not None
    assert compare(ours, aten_chains.gated_residual_norm_modulate(h, gate, y, shift, scale, eps)) is not None


def test_what_is_declined() -> None:
    h, gate, y, scale, shift, eps = plain(2, 5, 64, FP32)
    for args, words in (
        ((h[0], gate, y, scale, shift, eps), "h must be (batch, tokens, width)"),
        ((h.double(), gate, y, scale, shift, eps), "h must be float32, float16 or bfloat16"),
        ((h, gate, y.half(), scale, shift, eps), "must have h's dtype"),
        ((h, gate, y, scale.half(), shift, eps), "scale and shift must have"),
        ((h, gate, y[:, :4], scale, shift, eps), "y must be (2, 5, 64)"),
        ((h, gate[:1], y, scale, shift, eps), "gate must be (2, 64)"),
        ((h, gate, y, scale[:1], shift, eps), "scale and shift must be (2, 64)"),
        ((h[:, :1].expand(2, 5, 64), gate, y, scale, shift, eps), "in their order and apart"),
    ):
        assert words in str(OP.unsupported(*args)), words
