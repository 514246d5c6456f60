"""Results that a kernel quantises on their way out: the bytes that eager makes of the unquantised ones."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from kernel_inputs import BF16, DTYPES, FP16, FP32, randn, special_values
from kernel_runs import needs_compiler, run

from samebits.bits import compare
from samebits.ops import OPS, Op, by_name
from samebits.ops._quantize import FP8, quantize_fp8

pytestmark = needs_compiler
QUANTIZE = by_name("quantize_fp8")
ONLY_HERE = frozenset({"quantize_fp8"})
"""Ops that have no unquantised form."""


def place_of_scale(op: Op) -> int | None:
    names = list(inspect.signature(op.reference).parameters)
    return names.index("input_scale") if "input_scale" in names else None


def small_cases() -> list[Any]:
    """Every case of every op that quantises, but for the few that a CPU would work on for long."""
    found = []
    for op in OPS:
        place = place_of_scale(op)
        if place is None or op.name in ONLY_HERE:
            continue
        for case in op.cases:
            if "fp8" in case.name and case.rows <= 100:
                found.append(pytest.param(op, case, place, id=f"{op.name}-{case.name}-{case.dtype}"))
    return found


def test_the_ops_that_quantise() -> None:
    assert {op.name for op in OPS if place_of_scale(op) is not None} == {
        "layer_norm_modulate",
        "gated_residual_norm_modulate",
        "rms_norm_scale",
        "gated_residual_rms_norm",
        "gelu_tanh",
        "swiglu",
        "quantize_fp8",
        "bias_gated_residual_norm_modulate",
    }
    assert {param.values[0].name for param in small_cases()} == {
        op.name for op in OPS if place_of_scale(op) is not None
    } - ONLY_HERE


@pytest.mark.parametrize(("op", "case", "place"), small_cases())
def test_the_same_bytes_as_in_two_steps(op: Op, case: Any, place: int) -> None:
    args = case.build(torch.device("cpu"), 3)
    names = list(inspect.signature(op.reference).parameters)
    places = [place, *(names.index("text_input_scale") for _ in (0,) if "text_input_scale" in names[: len(args)])]
    scales = [args[at] for at in places if args[at] is not None]
    unquantised = tuple(None if at in places else arg for at, arg in enumerate(args))
    quantised, plain = run(op, *args), run(op, *unquantised)
    of_it = [number for number, output in enumerate(quantised) if output.dtype == FP8]
    assert len(of_it) == len(scales)
    scale_of = dict(zip(of_it, scales, strict=True))
    for number, (ours, before) in enumerate(zip(quantised, plain, strict=True)):
        assert compare(ours, quantize_fp8(before, scale_of[number]) if number in of_it else before) is None
    for number, scale in scale_of.items():
        assert compare(quantised[number], quantize_fp8(plain[number], scale * 1.5)) is not None
        assert op.allocate(*args)[number].dtype == FP8
    assert op.bytes_moved(*args) < op.bytes_moved(*unquantised)


def with_one_nan(expected: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The GPU's product has one NaN, a positive one; this CPU's keeps a sign."""
    return expected.view(torch.uint8).masked_fill(x.isnan(), 0x7F).view(FP8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value(dtype: torch.dtype) -> None:
    x = special_values(dtype) if dtype == FP32 else torch.arange(65536).to(torch.int16).view(dtype)
    x = x[: x.numel() // 8 * 8]
    for scale in (1.0, 0.0173, 3.0, 2.0**-120, 2.0**126):
        input_scale = torch.tensor(scale)
        (ours,) = run(QUANTIZE, x, input_scale)
        assert compare(ours, with_one_nan(quantize_fp8(x, input_scale), x)) is None, scale


def test_ties_and_the_ends() -> None:
    """Between two neighbours of e4m3, at the smallest subnormal, and at the largest value: worked out by hand."""
    cases = {17.0: 16.0, 19.0: 20.0, 18.0: 18.0, 2.0**-10: 0.0, 3 * 2.0**-11: 2.0**-9, 1.5 * 2.0**-9: 2.0**-8}
    cases |= {464.0: 448.0, 1e30: 448.0, 447.0: 448.0, 2.0**-6: 2.0**-6, 0.0: 0.0}
    x = torch.tensor([*cases, *(-value for value in cases), 0.0, 0.0])
    (ours,) = run(QUANTIZE, x, torch.tensor(1.0))
    assert ours.float().tolist()[:-2] == [*cases.values(), *(-value for value in cases.values())]
    assert ours.view(torch.uint8)[len(cases) + list(cases).index(0.0)] == 0x80  # -0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gaps(dtype: torch.dtype) -> None:
    wide = randn((2, 9, 1040), dtype, 5)
    scale = torch.tensor(0.02)
    for x in (wide[:, 2:7, :1024], wide[:, ::3, 4:1028], wide[0, :, :516]):
        (ours,) = run(QUANTIZE, x, scale)
        assert compare(ours, quantize_fp8(x, scale)) is None
        assert ours.is_contiguous()


def test_what_is_declined() -> None:
    x, scale = randn((2, 8), BF16, 0), torch.tensor(1.0)
    for changed, word in (
        (x.double(), "float32, float16 or bfloat16"),
        (x[:, :6], "multiple of 4"),
        (randn((8, 8), BF16, 0).t(), "contiguous"),
        (x[:0], "at least one row"),
        (torch.zeros(17, dtype=BF16)[1:].view(2, 8), "aligned"),
    ):
        assert word in (QUANTIZE.unsupported(changed, scale) or "")
    for changed, word in ((scale[None], "one float32 number"), (scale.half(), "one float32 number")):
        assert word in (QUANTIZE.unsupported(x, changed) or "")
    gelu = by_name("gelu_tanh")
    assert "multiple of eight" in (gelu.unsupported(randn((1, 12), FP16, 0), scale) or "")
    assert gelu.unsupported(randn((1, 12), FP16, 0)) is None
