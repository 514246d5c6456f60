"""The gated residuals: values that break careless arithmetic, numbers of rows, views, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ring import (
    DTYPES,
    assert_same_bits,
    awkward_rows,
    check,
    check_or_declined,
    randn,
    residual_args,
    residual_modulate_args,
    residual_rms_args,
    special_triples,
    unusual_rows,
)

from samebits.bits import integer_view
from samebits.gate import Gate
from samebits.ops import Args, Op, by_name

pytestmark = pytest.mark.gpu

RESIDUAL, MODULATE, RMS = (
    by_name(name) for name in ("gated_residual", "gated_residual_norm_modulate", "gated_residual_rms_norm")
)
BF16, FP16 = torch.bfloat16, torch.float16
MAKERS: dict[str, tuple[Op, Callable[..., Args]]] = {
    op.name: (op, make)
    for op, make in ((RESIDUAL, residual_args), (MODULATE, residual_modulate_args), (RMS, residual_rms_args))
}
FORMS = ("modulated", "next-block", "per-token", "plain", "last")
every_op = pytest.mark.parametrize("name", MAKERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@every_op
def test_awkward_and_unusual_rows(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op, make = MAKERS[name]
    for width in (3072, 3844):
        for rows in (awkward_rows(width, dtype, device), unusual_rows(width, dtype, device)):
            ordinary = randn(*rows.shape, dtype=dtype, device=device, seed=13)
            for h, y in ((rows, ordinary), (ordinary, rows), (rows, rows.flip(0))):
                check(op, make(h[None], y[None]))


@pytest.mark.parametrize("clip", [False, True])
@every_dtype
def test_every_special_value_with_every_other_two(dtype: torch.dtype, clip: bool, device: torch.device) -> None:
    """Signed zeros, infinities and NaNs in the residual, the gate and the branch, with and without the clip."""
    h, gate, y = special_triples(dtype, device)
    expected = RESIDUAL.reference(h[None, None], gate[None], y[None, None], clip)
    assert bool(((expected == 0) & expected.signbit()).any()), "not the case meant"
    check(RESIDUAL, (h[None, None], gate[None], y[None, None], clip))


@every_op
def test_fp16_overflow_and_the_clip_keep_the_op_enabled(name: str, device: torch.device) -> None:
    h, y = (torch.full((1, 7, 3072), value, dtype=FP16, device=device) for value in (6e4, 100.0))
    gate = torch.full((1, 3072), 100.0, dtype=FP16, device=device)
    assert bool((h + gate * y).isinf().all()), "not the case meant"
    op, make = MAKERS[name]
    if op is RMS:  # no clip here: the infinity is the stream's, and NaN its norm
        x, _, y, y_weight, weight, scale, eps = make(h, y)
        args: Args = (x, gate[:, None] * 1e3, y, y_weight, weight, scale, eps)
    else:
        _, _, _, *rest = make(h, y, clip=True)
        args = (h, gate, y, *rest)
    check(op, args)
    site = Gate().site("overflow", op)
    for _ in range(3):
        assert_same_bits(site(*args), op.reference(*args))
    assert site.counters.fused >= 1, dict(site.counters.reasons)


def test_one_sum_that_a_contraction_would_change(device: torch.device) -> None:
    h, gate, y = (torch.full((1, 1, 3072), v, dtype=BF16, device=device) for v in (0.00390625, 1.0078125, 1.0078125))
    args = (h, gate[0], y, False)
    assert RESIDUAL.reference(*args).unique().tolist() == [1.015625], "a contracted one gives 1.0234375"
    check(RESIDUAL, args)
    scale, shift = randn(2, 1, 3072, dtype=BF16, device=device)
    check(MODULATE, (h, gate[0], y, scale, shift, 1e-6))


@every_dtype
def test_a_constant_row_becomes_minus_zero(dtype: torch.dtype, device: torch.device) -> None:
    h, y, gate, scale, shift = (
        torch.full((1, 5, 3072), value, dtype=dtype, device=device) for value in (1.5, 2.0, -0.5, -2.0, -0.0)
    )
    args = (h, gate[:, 0], y, scale[:, 0], shift[:, 0], 1e-6)
    normed = MODULATE.reference(*args)[1]
    minus_zero = integer_view(torch.full_like(normed, -0.0))
    assert bool((integer_view(normed) == minus_zero).all()), "not the case meant"
    check(MODULATE, args)


def test_fp16_squares_beyond_the_range_of_fp16(device: torch.device) -> None:
    x = randn(1, 5, 3840, dtype=torch.float32, device=device)
    x = torch.where(x > 0, 3.0e4, -3.0e4).to(FP16)
    assert bool((x * x).isinf().all()), "not the case meant"
    for form in FORMS:
        args = residual_rms_args(x, x.flip(1), form)
        outputs = RMS.reference(*args)
        assert all(bool(t.isfinite().all()) for t in (outputs if isinstance(outputs, tuple) else (outputs,)))
        check(RMS, args)


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 40.0, 200.0])
@every_op
def test_amplitudes(name: str, amplitude: float, device: torch.device) -> None:
    op, make = MAKERS[name]
    for dtype in DTYPES:
        h, y = (randn(2, 33, 3072, dtype=dtype, device=device, seed=seed, amplitude=amplitude) for seed in (0, 1))
        check(op, make(h, y))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_two_rows_of_modulation_a_sample(index_dtype: torch.dtype, clip: bool, device: torch.device) -> None:
    for dtype in DTYPES:
        h, y = (randn(3, 37, 3072, dtype=dtype, device=device, seed=seed, amplitude=1e3) for seed in (0, 1))
        index = (randn(37, 3, dtype=torch.float32, device=device, seed=2) > 0).to(index_dtype).t()
        shift, scale, gate = randn(6, 3 * 3072, dtype=dtype, device=device, seed=3).chunk(3, dim=-1)
        check(RESIDUAL, (h, gate, y, clip, index))
        check(MODULATE, (h, gate, y, scale, shift, 1e-6, clip, index.contiguous()))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 15, 16, 17, 4096])
def test_both_norms_take_the_tree_of_their_rows(rows: int, device: torch.device) -> None:
    for width in (128, 256, 2560, 3072, 3584, 3840, 5120, 8192, 8200, 12288):
        x, y = (randn(1, rows, width, dtype=BF16, device=device, seed=width + part) for part in (0, 1))
        for form in FORMS if width == 3840 else ("modulated",):
            assert check_or_declined(RMS, residual_rms_args(x, y, form)) is None


@every_op
def test_one_verdict_does_not_cover_another_batch(name: str, device: torch.device) -> None:
    op, make = MAKERS[name]
    gate = Gate()
    site = gate.site("batch", op)
    for number, batch in enumerate((1, 2, 3), start=1):
        h, y = (randn(batch, 5, 3072, dtype=BF16, device=device, seed=batch + part) for part in (0, 10))
        args = make(h, y)
        for _ in range(3):
            assert_same_bits(site(*args), op.reference(*args))
        assert len(list(gate.verdicts())) == number, f"batch {batch} shares a verdict"
    assert site.counters.fused >= 6, dict(site.counters.reasons)
    check(op, args)


@every_op
def test_views(name: str, device: torch.device) -> None:
    op, make = MAKERS[name]
    plain = randn(2, 74, 3072, dtype=BF16, device=device, seed=1)
    wide = randn(2, 74, 6144, dtype=BF16, device=device)
    permuted = randn(2, 3072, 74, dtype=BF16, device=device).transpose(-1, -2)
    assert check_or_declined(op, make(permuted, plain)) is not None, "the last dimension is not contiguous"
    assert check_or_declined(op, make(wide[..., ::2], plain)) is not None
    assert check_or_declined(op, make(plain, wide[..., ::2])) is not None
    for h, y in ((wide[..., 3072:], plain), (plain, wide[..., :3072]), (wide[..., 3072:], wide[..., :3072])):
        assert check_or_declined(op, make(h, y)) is None, "rows that are slices of longer rows"
    half = randn(2, 148, 3072, dtype=BF16, device=device).chunk(2, 1)[1]
    assert check_or_declined(op, make(half, plain)) is None
    assert check_or_declined(op, make(plain, half)) is None
    one = randn(1, 74, 3072, dtype=BF16, device=device)
    check_or_declined(op, make(one.expand(2, -1, -1), plain))
    check_or_declined(op, make(plain, one.expand(2, -1, -1)))
    check_or_declined(op, make(plain, randn(74, 2, 3072, dtype=BF16, device=device).transpose(0, 1)))
    for tokens in (1985, 37):
        h = randn(1, tokens, 3072, dtype=BF16, device=device)
        assert check_or_declined(op, make(h, h)) is None


@every_op
def test_rows_that_start_later_and_the_widest_ones(name: str, device: torch.device) -> None:
    op, make = MAKERS[name]
    for dtype in DTYPES:
        buffer = randn(16 + 5 * 3584, dtype=dtype, device=device)
        plain = randn(1, 5, 3584, dtype=dtype, device=device, seed=1)
        for start in (1, 2, 4, 8):
            late = buffer[start : start + 5 * 3584].view(1, 5, 3584)
            check_or_declined(op, make(late, plain))
            check_or_declined(op, make(plain, late))
        widest = randn(1, 5, 16384, dtype=dtype, device=device)
        assert check_or_declined(op, make(widest, widest)) is None
        wider = randn(1, 5, 16388, dtype=dtype, device=device)
        assert check_or_declined(op, make(wider, wider)) is not None


@every_op
def test_text_lengths(name: str, device: torch.device) -> None:
    """One verification a length and no more, whatever happens in between."""
    op, make = MAKERS[name]
    lengths = (1, 5, 17, 31, 32, 33, 1024)

    def args_of(length: int) -> Any:
        return make(*(randn(1, length, 3072, dtype=BF16, device=device, seed=length + part) for part in (0, 5000)))

    gate = Gate()
    site = gate.site("text", op)
    for _ in range(3):
        for length in lengths:
            args = args_of(length)
            assert_same_bits(site(*args), op.reference(*args))
    assert len(list(gate.verdicts())) <= len(lengths)
    assert site.counters.fused >= 2 * len(lengths), dict(site.counters.reasons)
    for length in lengths:
        check(op, args_of(length))


@every_dtype
def test_a_text_stream_beside_the_image(dtype: torch.dtype, device: torch.device) -> None:
    """One launch of both: many rows beside few and few beside many, one sample and two, indexed, clipped, quantised."""

    def stream(batch: int, tokens: int, seed: int, amplitude: float = 1.0) -> Args:
        rows = (
            randn(batch, tokens, 3072, dtype=dtype, device=device, seed=seed + at, amplitude=amplitude) for at in (0, 1)
        )
        return residual_modulate_args(*rows, seed + 2)

    scales = (torch.tensor(0.02, device=device), torch.tensor(0.03, device=device))
    for batch, tokens, text_tokens in ((1, 4096, 128), (2, 37, 5), (1, 1, 1), (3, 2, 74)):
        image, text = stream(batch, tokens, 1), stream(batch, text_tokens, 50)
        rows = (part.repeat(2, 1) for part in (image[1], image[3], image[4]))
        index = (torch.arange(batch * tokens, device=device) % 2).view(batch, tokens)
        gate, scale, shift = (
            row + 0.5 * (torch.arange(2 * batch, device=device)[:, None] // batch).to(dtype) for row in rows
        )
        indexed = (image[0], gate, image[2], scale, shift, 1e-6, False, index)
        for args in ((*image[:6], False, None), (*image[:6], True, None), indexed):
            check(MODULATE, (*args, None, *text[:5]))
            check(MODULATE, (*args, scales[0], *text[:5], scales[1]))
        both = MODULATE.prepare(*image, None, None, *text[:5])(*image, None, None, *text[:5])
        assert_same_bits(both, (*MODULATE.prepare(*image)(*image), *MODULATE.prepare(*text)(*text)))


@every_dtype
def test_awkward_rows_of_a_text_stream(dtype: torch.dtype, device: torch.device) -> None:
    for width in (3072, 3844):
        for rows in (awkward_rows(width, dtype, device), unusual_rows(width, dtype, device)):
            ordinary = randn(*rows.shape, dtype=dtype, device=device, seed=13)[None]
            image, text = (
                residual_modulate_args(ordinary, ordinary.flip(1)),
                residual_modulate_args(rows[None], ordinary),
            )
            check(MODULATE, (*image, None, None, *text[:5]))
            check(MODULATE, (*text, None, None, *image[:5]))
