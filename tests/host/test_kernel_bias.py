"""The residuals that take in a linear's bias: their source on the CPU against exact arithmetic, equal bits or not."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import aten_chains
import pytest
import torch
from kernel_inputs import BF16, DTYPES, EPS, FP16, FP32, odd_rows, randn, special_values
from kernel_runs import difference, layout_of_eager, needs_compiler, run

from samebits.bits import compare
from samebits.ops import by_name
from samebits.ops._fma import fused_multiply_add
from samebits.ops._quantize import FP8, quantize_fp8

pytestmark = needs_compiler
RESIDUAL = by_name("bias_gated_residual")
WITH_NORM = by_name("bias_gated_residual_norm_modulate")
GUARD = {"x": -24576.0, "bias": -0.01055908203125, "gate": 206.0, "residual": -0.2080078125}
"""The case of CASES.md: through fp32 the sum lands on a tie that it is not."""


def inputs(
    batch: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0, amplitude: float = 3.0, rows: int = 1
) -> dict[str, torch.Tensor]:
    """h, y, bias and the thirds of one projection."""
    h, y = (randn((batch, tokens, width), dtype, seed + part, amplitude) for part in (0, 1))
    shift, scale, gate = randn((rows * batch, 3 * width), dtype, seed + 2).chunk(3, dim=-1)
    bias = randn((width,), dtype, seed + 3, amplitude)
    return {"h": h, "gate": gate, "y": y, "bias": bias, "scale": scale, "shift": shift}


def residual(given: dict[str, Any], native_fma: bool, clip: bool, index: torch.Tensor | None = None) -> torch.Tensor:
    named = {name: given[name] for name in ("h", "gate", "y", "bias")}
    return aten_chains.bias_gated_residual(*named.values(), native_fma, clip, index)


def exact(a: float, b: float, c: float, bits: int, least: int) -> float:
    """``a * b + c`` in fractions, rounded once to ``bits`` significant bits, no finer than ``2**least``."""
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if not value:
        return 0.0
    size, unit = abs(value), Fraction(2) ** least
    while size >= unit * 2**bits:
        unit *= 2
    count, rest = divmod(size, unit)
    count += rest * 2 > unit or (rest * 2 == unit and count % 2)
    return math.copysign(float(count * unit), value)


FORMATS = {BF16: (8, -133), FP16: (11, -24), FP32: (24, -149)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_multiply_add_of_the_reference_is_exact(dtype: torch.dtype) -> None:
    """Against fractions, on random bits and on sums that nearly cancel."""
    integer = torch.int32 if dtype == FP32 else torch.int16
    limits = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(0)
    a, b, c = (
        torch.randint(limits.min, limits.max + 1, (3000,), generator=generator, dtype=integer).view(dtype)
        for _ in range(3)
    )
    c = torch.where(torch.arange(3000) % 2 == 0, c, -(a.double() * b.double()).to(dtype))
    ours = fused_multiply_add(a, b, c).double()
    checked = 0
    for number in range(3000):
        values = [float(part[number]) for part in (a, b, c)]
        want = exact(*values, *FORMATS[dtype]) if all(map(math.isfinite, values)) else None
        if want is not None and abs(want) <= torch.finfo(dtype).max:
            assert float(ours[number]) == want, values
            checked += 1
    assert checked > 1500


def test_the_tie_guard() -> None:
    """Rounded once, twice as eager does, and by way of fp32: three answers, and each kernel gives its own."""
    given = {
        "h": torch.full((1, 2, 8), GUARD["residual"], dtype=BF16),
        "gate": torch.full((1, 8), GUARD["gate"], dtype=BF16),
        "y": torch.full((1, 2, 8), GUARD["x"], dtype=BF16),
        "bias": torch.full((8,), GUARD["bias"], dtype=BF16),
    }
    answers = {}
    for native_fma in (False, True):
        args = (*given.values(), native_fma)
        assert difference(RESIDUAL, args, residual(given, native_fma, False)) is None
        (answer,) = run(RESIDUAL, *args)
        answers[native_fma] = answer.flatten()[0].item()
    through_fp32 = (GUARD["gate"] * torch.tensor(GUARD["x"]) + GUARD["residual"]).to(BF16).item()
    assert answers == {True: -5079040.0, False: -5046272.0}
    assert through_fp32 != answers[True]


SIZES = [
    *((2, tokens, width, dtype) for tokens, width in ((5, 132), (3, 1024)) for dtype in DTYPES),
    (1, 3, 4, FP16),
    (3, 2, 1000, FP16),
    (1, 2, 3844, BF16),
    (1, 1, 16384, FP32),
]


@pytest.mark.parametrize("native_fma", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "width", "dtype"), SIZES)
def test_residual(batch: int, tokens: int, width: int, dtype: torch.dtype, native_fma: bool) -> None:
    given = inputs(batch, tokens, width, dtype, seed=width)
    args = (given["h"], given["gate"], given["y"], given["bias"], native_fma)
    assert difference(RESIDUAL, args, residual(given, native_fma, False)) is None


@pytest.mark.parametrize("native_fma", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "width", "dtype"), SIZES)
@pytest.mark.parametrize("quantized", [False, True])
def test_with_norm(batch: int, tokens: int, width: int, dtype: torch.dtype, native_fma: bool, quantized: bool) -> None:
    given = inputs(batch, tokens, width, dtype, seed=width)
    assert_same(given, native_fma, False, None, torch.tensor(0.0173) if quantized else None)


def assert_same(
    given: dict[str, Any],
    native_fma: bool,
    clip: bool,
    index: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> None:
    args = (*given.values(), EPS, native_fma, clip, index, input_scale)
    assert difference(WITH_NORM, args, aten_chains.bias_gated_residual_norm_modulate(*args)) is None


@pytest.mark.parametrize("native_fma", [False, True])
def test_clip_and_index(native_fma: bool) -> None:
    index = torch.randint(-1, 3, (9, 2), generator=torch.Generator().manual_seed(1)).to(torch.int32).t()
    given = inputs(2, 9, 1024, FP16, amplitude=2e4, rows=2)
    for clip in (False, True):
        args = (given["h"], given["gate"], given["y"], given["bias"], native_fma, clip, index)
        assert difference(RESIDUAL, args, residual(given, native_fma, clip, index)) is None
        assert_same(given, native_fma, clip, index, torch.tensor(0.01))
    other = residual(given, native_fma, True, 1 - index.clamp(0, 1))
    assert difference(RESIDUAL, args, other) is not None


@pytest.mark.parametrize("native_fma", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_odd_rows(dtype: torch.dtype, native_fma: bool) -> None:
    given = inputs(1, 11, 132, dtype)
    given["h"] = odd_rows(132, dtype)[None]
    args = (given["h"], given["gate"], given["y"], given["bias"], native_fma)
    assert difference(RESIDUAL, args, residual(given, native_fma, False)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_special_value_is_quantised(dtype: torch.dtype) -> None:
    """A residual of zeros and a norm of zeros leave the shift alone: any value that we like."""
    values = special_values(dtype)
    if dtype != FP32:
        values = torch.arange(65536).to(torch.int16).view(dtype)
    width = 1024
    count = -(-values.numel() // width)
    shift = torch.zeros(count * width, dtype=dtype)
    shift[: values.numel()] = values
    shift = shift.view(count, width)
    zeros = torch.zeros(count, 1, width, dtype=dtype)
    rest = {"gate": torch.zeros(count, width, dtype=dtype), "y": zeros, "bias": torch.zeros(width, dtype=dtype)}
    given = {"h": zeros, **rest, "scale": torch.zeros_like(shift), "shift": shift}
    for scale in (1.0, 0.0173, 3.0, 2.0**-120):
        input_scale = torch.tensor(scale)
        args = (*given.values(), EPS, False, False, None, input_scale)
        _, ours = run(WITH_NORM, *args)
        expected = quantize_fp8(shift[:, None] + 0.0, input_scale)
        # The GPU's product has one NaN, a positive one; this CPU's keeps a sign.
        wanted = expected.view(torch.uint8).masked_fill(shift[:, None].isnan(), 0x7F).view(FP8)
        assert compare(ours, wanted) is None, scale
        assert compare(ours, quantize_fp8(shift[:, None] + 0.0, input_scale * 1.5)) is not None


def test_what_is_declined() -> None:
    given = inputs(1, 2, 8, BF16)
    h, gate, y, bias, scale, shift = given.values()
    for changed, word in (
        (bias.float(), "bias must be"),
        (bias[:4], "bias must be"),
        (torch.stack([bias, bias], 1)[:, 0], "contiguous"),
        (torch.empty(8, dtype=BF16, device="meta"), "one device"),
    ):
        assert word in (RESIDUAL.unsupported(h, gate, y, changed) or "")
        assert word in (WITH_NORM.unsupported(h, gate, y, changed, scale, shift, EPS) or "")
    for changed, word in ((torch.ones(1), "one float32 number"), (torch.tensor(1.0).double(), "one float32 number")):
        reason = WITH_NORM.unsupported(h, gate, y, bias, scale, shift, EPS, False, False, None, changed)
        assert word in (reason or "")


def test_the_layout_is_eagers() -> None:
    given = inputs(2, 3, 1024, BF16)
    h, gate, y, bias, scale, shift = given.values()
    wide = torch.cat([h, h], dim=-1)[..., :1024]
    assert layout_of_eager(RESIDUAL, (wide, gate, y, bias)) is None
    rest = (scale, shift, EPS, False, False, None, torch.tensor(0.5))
    assert layout_of_eager(WITH_NORM, (wide, gate, y, bias, *rest)) is None
