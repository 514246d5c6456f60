"""The source of the q and k norm with RoPE on the CPU against the emulator: equal bits or a failure."""

from __future__ import annotations

from typing import Any

import aten_chains
import numpy as np
import pytest
import torch
from binary32 import decode, encode, fma
from kernel_inputs import BF16, DTYPES, EPS, FP16, FP32, odd_rows, randn, telling_rows, weights
from kernel_runs import difference, layout_of_eager, needs_compiler, run

from samebits import host
from samebits.bits import compare
from samebits.ops import by_name

pytestmark = needs_compiler
OP = by_name("qk_norm_rope")

KINDS = [
    *(("diffusers", dtype, dtype) for dtype in DTYPES),
    *(("diffusers", dtype, FP32) for dtype in (BF16, FP16)),
    *(("native", dtype, dtype) for dtype in (BF16, FP16)),
    *(("torch", dtype, dtype) for dtype in DTYPES),
]
HEADS = 3  # the same nearly everywhere, because every number of heads is a compilation
ALL = [(*kind, width) for width in (128, 72) for kind in KINDS]
# The other widths with some of the kinds each.
SOME = [(*KINDS[(3 * at + turn) % len(KINDS)], width) for at, width in enumerate((32, 40, 64, 120)) for turn in (0, 6)]
SOME += [(*KINDS[at], 248) for at in (0, 5, 7)] + [(*KINDS[at], 256) for at in (2, 6, 8)]
NO_TEXT = (None,) * 6


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def angles(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A table of unit complex numbers."""
    angle = randn(shape, FP32, seed, 3.0)
    return torch.complex(angle.cos(), angle.sin())


def stream(
    batch: int,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    seed: int = 0,
    *,
    fused: bool = True,
    values: bool = True,
    per_sample: bool = False,
) -> tuple[Any, ...]:
    """One stream: q, k, v as slices of one fused projection or alone, both weights, the table."""
    shape = (batch, tokens, HEADS, width)
    if fused:
        parts = randn((batch, tokens, 3 * HEADS * width), dtype, seed, 2.0).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, width)) for part in parts)
    else:
        q, k, v = (randn(shape, dtype, seed + part, 2.0) for part in range(3))
    table = angles((batch, tokens, width // 2) if per_sample else (tokens, width // 2), seed + 9)
    q_weight, k_weight = weights(width, weight_dtype)
    return q, k, v if values else None, q_weight, k_weight, table


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL + SOME, ids=_name)
def test_two_streams(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    values = dtype == weight_dtype
    image = stream(2, 7, width, dtype, weight_dtype, 1, values=values)
    text = stream(2, 3, width, dtype, weight_dtype, 20, values=values, fused=False)
    args = (*image, *text, EPS, kind)
    assert difference(OP, args, aten_chains.qk_norm_rope(*args)) is None
    assert layout_of_eager(OP, args) is None


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL + SOME, ids=_name)
def test_one_stream(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    # More rows than a block takes, and fewer than a warp does.
    for batch, tokens, per_sample in ((2, 23, True), (1, 1, False)):
        image = stream(batch, tokens, width, dtype, weight_dtype, 1, values=False, per_sample=per_sample)
        args = (*image, *NO_TEXT, EPS, kind)
        assert difference(OP, args, aten_chains.qk_norm_rope(*args)) is None
        assert layout_of_eager(OP, args) is None


@pytest.mark.parametrize("width", [128, 72])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(("per_sample", "text_per_sample"), [(False, True), (True, False), (True, True)])
def test_tables_and_values(width: int, values: bool, per_sample: bool, text_per_sample: bool) -> None:
    image = stream(3, 5, width, BF16, BF16, 1, values=values, per_sample=per_sample)
    text = stream(3, 9, width, BF16, BF16, 20, values=values, per_sample=text_per_sample)
    args = (*image, *text, EPS, "diffusers")
    expected = aten_chains.qk_norm_rope(*args)
    assert len(expected) == (3 if values else 2)
    for order in (0, 1, 2):
        with host.schedule(order, workers=2):
            assert difference(OP, args, expected) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 72])
def test_views(width: int, dtype: torch.dtype) -> None:
    wide = randn((2, 40, 3 * HEADS * width + 4), dtype, 2, 2.0)
    q, k, v = (part.unflatten(-1, (HEADS, width)) for part in wide[..., : 3 * HEADS * width].chunk(3, dim=-1))
    late = wide[..., 4 : 4 + HEADS * width].unflatten(-1, (HEADS, width))  # not on 16 bytes
    table = angles((40, width // 2), 3)
    pair = weights(width, dtype)
    for parts, rows in (
        ((q[:, ::2], k[:, 20:], v[:, :20]), table[20:]),
        ((q[:1, 5:], k[1:, :35], v[1:, 5:]), table[None, 5:]),
        ((late, k, v), table.expand(2, 40, width // 2)),
    ):
        text = (late[: parts[0].shape[0], :4], q[: parts[0].shape[0], 4:8], late[-parts[0].shape[0] :, 8:12])
        args = (*parts, *pair, rows, *text, *pair[::-1], table[:4], EPS, "diffusers")
        assert difference(OP, args, aten_chains.qk_norm_rope(*args)) is None
        assert layout_of_eager(OP, args) is None


@pytest.mark.parametrize(("kind", "dtype", "weight_dtype", "width"), ALL, ids=_name)
def test_odd_rows(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    q, k = (odd_rows(width, dtype, seed)[:9].view(1, 3, HEADS, width) for seed in (7, 8))
    q_weight, k_weight = weights(width, weight_dtype)
    k_weight[3], k_weight[4], k_weight[5] = -0.0, torch.inf, torch.nan
    table = angles((3, width // 2), 3)
    table[0, :4] = torch.tensor([1, 1j, -1, 0], dtype=torch.complex64)
    table[1, :3] = torch.tensor([complex("inf"), complex("nan"), complex(-0.0, -0.0)])
    args = (q, k.flip(-1).contiguous(), None, q_weight, k_weight, table, *NO_TEXT, EPS, kind)
    expected = aten_chains.qk_norm_rope(*args)
    assert all(t.isnan().any() for t in expected)
    assert any(((t == 0) & t.signbit()).any() for t in expected)
    assert difference(OP, args, expected) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 72])
def test_values_are_copied_bit_by_bit(width: int, dtype: torch.dtype) -> None:
    image, text = (list(stream(1, tokens, width, dtype, dtype, tokens)) for tokens in (7, 4))
    integer, first = (torch.int32, 0x7F7FFF00) if dtype == FP32 else (torch.int16, 0x7E80)
    for part in (image, text):
        bits = torch.arange(first, first + part[2].numel(), dtype=torch.int64)
        part[2] = bits.to(integer).view(dtype).view(part[2].shape)  # the last numbers, infinity, NaNs
        assert part[2].isnan().any()
    args = (*image, *text, EPS, "torch")
    joint = OP.prepare(*args)(*args)[2]  # not `run`, which makes one NaN of all
    assert torch.equal(joint.view(integer), torch.cat([text[2], image[2]], 1).view(integer))


def heads_of(values: list[float], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of signs, ``(1, 1, 1, 128)``, and a weight: normed with no eps the row is ``values`` again and again."""
    weight = torch.tensor(values, dtype=dtype).repeat(128 // len(values))
    return torch.ones(1, 1, 1, 128, dtype=dtype), weight


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_orientation_of_the_complex_product(dtype: torch.dtype) -> None:
    """(1 + 2^-23, -1) times (1, 1 - 2^-24): every other way to contract it, or none, has another imaginary part."""
    real, imaginary, cos, sin = (np.float32(value) for value in (1 + 2**-23, -1, 1, 1 - 2**-24))
    x, weight = heads_of([float(real), float(imaginary)], FP32)
    table = torch.full((1, 64), complex(1, 1 - 2**-24), dtype=torch.complex64)
    y = run(OP, x.to(dtype), x.to(dtype), None, weight, weight, table, *NO_TEXT, 0.0, "diffusers")[0].flatten()
    ours = y[:2].numpy()
    assert (y.view(-1, 2).numpy() == ours).all()
    assert ours.tolist() == [fma(real, cos, -(imaginary * sin)), fma(real, sin, imaginary * cos)]
    assert ours[1] not in (fma(imaginary, cos, real * sin), real * sin + imaginary * cos)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_of_zero(dtype: torch.dtype) -> None:
    x, weight = heads_of([-0.0, 0.0], dtype)
    for angle, expected in (((1.0, 0.0), [True, False]), ((-1.0, 0.0), [False, False]), ((0.0, 1.0), [True, False])):
        table = torch.full((1, 64), complex(*angle), dtype=torch.complex64)
        args = (x, x, None, weight, weight, table, *NO_TEXT, 0.0, "diffusers")
        y = run(OP, *args)[0].view(64, 2)
        assert (y == 0).all()
        assert difference(OP, args, aten_chains.qk_norm_rope(*args)) is None
        if angle == (1.0, 0.0):  # -0 * 1 - 0 * 0 and -0 * 0 + 0 * 1
            assert y.signbit().unique(dim=0).tolist() == [expected]


@pytest.mark.parametrize("width", [96, 256])
def test_every_stream_takes_the_tree_of_its_rows(width: int) -> None:
    """Few rows of text and many of the image, and the other way round; each shows when the other's tree is taken."""
    for image_rows, text_rows in ((40, 2), (2, 40), (15, 16)):
        found = set()
        for seed in range(20):
            parts = []
            for rows, side in ((image_rows, 0), (text_rows, 1)):
                q, k = (telling_rows(rows, width, BF16, 4 * seed + 2 * side + part)[None, :, None] for part in (0, 1))
                parts += [q, k, None, *weights(width, FP32), angles((rows, width // 2), side)]
            args = (*parts, EPS, "diffusers")
            expected = aten_chains.qk_norm_rope(*args)
            assert difference(OP, args, expected) is None
            for rows in {image_rows, text_rows}:
                wrong = aten_chains.qk_norm_rope(*args, rows=rows)
                for side, part in (("text", slice(None, text_rows)), ("image", slice(text_rows, None))):
                    if compare(tuple(t[:, part] for t in wrong), tuple(t[:, part] for t in expected)) is not None:
                        found.add((side, rows))
            if len(found) == 2:
                break
        assert found == {("text", image_rows), ("image", text_rows)}


def test_other_products_are_found() -> None:
    args = (*stream(2, 5, 128, FP32, FP32, values=False), *NO_TEXT, EPS, "diffusers")
    ours = run(OP, *args)[0]
    normed = aten_chains.qk_norm(args[0], args[1], args[3], args[4], EPS, "diffusers")[0]
    pairs, table = decode(normed).reshape(2, 5, HEADS, 64, 2), torch.view_as_real(args[5]).numpy()[:, None]
    real, imaginary, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    for turned, same in (
        ((fma(real, cos, -(imaginary * sin)), fma(real, sin, imaginary * cos)), True),
        ((fma(-imaginary, sin, real * cos), fma(real, sin, imaginary * cos)), False),
        ((fma(real, cos, -(imaginary * sin)), fma(imaginary, cos, real * sin)), False),
        ((real * cos - imaginary * sin, real * sin + imaginary * cos), False),
    ):
        assert (compare(ours, encode(np.stack(turned, -1).reshape(normed.shape), FP32)) is None) == same


def test_other_chains_are_found() -> None:
    image, text = (stream(2, tokens, 128, BF16, BF16, tokens) for tokens in (5, 3))
    ours = run(OP, *image, *text, EPS, "diffusers")
    for wrong in (
        (*text, *image, EPS, "diffusers"),
        (*image[:5], image[5].conj().resolve_conj(), *text, EPS, "diffusers"),
        (image[1], image[0], *image[2:], *text, EPS, "diffusers"),
        (*image[:3], image[4], image[3], image[5], *text, EPS, "diffusers"),
        (*image, *text, EPS, "native"),
        (*image, *text, EPS, "torch"),
    ):
        assert compare(ours, aten_chains.qk_norm_rope(*wrong)) is not None


def test_what_is_declined() -> None:
    image, text = (stream(2, tokens, 64, BF16, BF16, tokens) for tokens in (5, 3))
    q, k, v, q_weight, k_weight, table = image
    end = (*NO_TEXT, EPS, "diffusers")
    eighth = tuple(t.to(torch.float8_e4m3fn) for t in (q, k))
    sparse = table.repeat_interleave(2, 1)[:, ::2]
    unpacked = q.repeat_interleave(2, 2)[:, :, ::2]
    for args, words in (
        ((q, k, v, q_weight, k_weight, table, *end), "values of one stream stay where they are"),
        ((q, k, None, q_weight, k_weight, table.real.to(BF16), *end), "must be complex64; it is torch.bfloat16"),
        (
            (q, k, None, q_weight, k_weight, table.to(torch.complex128), *end),
            "must be complex64; it is torch.complex128",
        ),
        ((*eighth, None, q_weight, k_weight, table, *end), "must be float32, float16 or bfloat16"),
        ((q, k, None, q_weight, k_weight, table[:4], *end), "the table of the image must be ([2,] 5, 32)"),
        ((q, k, None, q_weight, k_weight, table.repeat(3, 1, 1), *end), "the table of the image must be ([2,] 5, 32)"),
        ((q, k, None, q_weight, k_weight, sparse, *end), "rows of the image's table must be contiguous"),
        ((q, k, None, q_weight, k_weight, table.to("meta"), *end), "rows of the image's table must be contiguous"),
        ((q, k[:, :4], None, q_weight, k_weight, table, *end), "must have one shape"),
        ((unpacked, k, None, q_weight, k_weight, table, *end), "heads of the image's query must be packed"),
        ((q, k, v, q_weight.float(), k_weight.float(), table, *text, EPS, "diffusers"), "the query's dtype"),
        ((*image, *text[:2], None, *text[3:], EPS, "diffusers"), "either both streams have values or none"),
        ((*image, None, *text[1:], EPS, "diffusers"), "whole or not at all"),
        ((*image, *stream(1, 3, 64, BF16, BF16), EPS, "diffusers"), "both streams must have one batch"),
        ((*image, *stream(2, 3, 64, FP16, FP16), EPS, "diffusers"), "both streams must have one dtype"),
        ((*image, *text[:5], text[5][:2], EPS, "diffusers"), "the table of the text must be ([2,] 3, 32)"),
        ((*image, *text, EPS, "another"), "kind must be one of"),
    ):
        assert words in str(OP.unsupported(*args)), (words, OP.unsupported(*args))
