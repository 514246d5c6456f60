"""The GELU kernels' source on the CPU against the emulator: equal bits or a failure.

``tanh`` is the C library's on both sides, or one that was made up for both.
"""

from __future__ import annotations

import aten_chains
import numpy as np
import pytest
import torch
from binary32 import F32, fma, tanh
from kernel_inputs import BF16, DTYPES, FP16, FP32, randn
from kernel_runs import difference, needs_compiler, run

from samebits import host
from samebits.bits import compare
from samebits.jit.kernel import BoundKernel
from samebits.ops import by_name, gelu_tanh

pytestmark = needs_compiler
GELU = by_name("gelu_tanh")


def every_value(dtype: torch.dtype, elements: int = 65536) -> torch.Tensor:
    """Every bf16 or fp16 value in turn, NaNs and all."""
    return torch.arange(elements, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.fixture
def table_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 goes through the table however few elements there are, on two multiprocessors."""
    monkeypatch.setattr(gelu_tanh, "TABLE_FROM", 1)
    monkeypatch.setattr(gelu_tanh, "multiprocessors", lambda device: 2)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value(dtype: torch.dtype) -> None:
    x = every_value(dtype)
    assert x.isnan().any()
    assert difference(GELU, (x,), aten_chains.gelu_tanh(x)) is None


@pytest.mark.parametrize("more", [0, 1, 7, 8, 12])
def test_every_value_by_the_table(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many elements that the table is used; up to seven are left over after the last vector."""
    elements = 1 << 20
    monkeypatch.setattr(gelu_tanh, "TABLE_FROM", elements)
    x = every_value(BF16, elements + more)
    expected = aten_chains.gelu_tanh(every_value(BF16)).repeat(17)[: x.numel()]
    assert difference(GELU, (x,), expected) is None


@pytest.mark.usefixtures("table_for_all")
@pytest.mark.parametrize("elements", [1, 5, 8, 9, 1024 * 8, 1024 * 8 + 8, 5 * 1024 * 8 + 3, 65536])
def test_few_elements_by_the_table(elements: int) -> None:
    """Fewer than one vector, than one block, than all blocks; more than all blocks take in one step."""
    x = every_value(BF16)[-elements:].flip(0).contiguous()
    expected = aten_chains.gelu_tanh(x)
    for order in (0, 1, 2):
        with host.schedule(order, workers=2):
            assert difference(GELU, (x,), expected) is None


@pytest.mark.usefixtures("table_for_all")
@pytest.mark.parametrize("seed", range(3))
def test_the_table_and_the_formula_agree_whatever_tanh_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tanh`` up to two ulps off, at random: nothing in the table's use of it depends on how it was computed."""
    x = every_value(BF16)
    asked: list[F32] = []
    plain = aten_chains.gelu_tanh(x, tanh=lambda inner: tanh(asked.append(inner) or inner))
    inner = np.unique(asked[0][~np.isnan(asked[0])].view(np.uint32)).view(np.float32)
    ulps = np.random.default_rng(seed).integers(-2, 3, inner.size).astype(np.int32)
    outputs = np.clip((tanh(inner).view(np.int32) + ulps).view(np.float32), -1, 1)
    outputs = np.where((np.abs(inner) > 10) | (inner == 0), tanh(inner), outputs).astype(np.float32)
    known = dict(zip(inner.view(np.uint32).tolist(), outputs.tolist(), strict=True))

    def moved(values: F32) -> F32:
        return np.array([known.get(int(bits), np.nan) for bits in values.view(np.uint32)], np.float32)

    expected = aten_chains.gelu_tanh(x, tanh=moved)
    assert compare(expected, plain) is not None, "so small a change does not show"
    with host.recorded("tanhf", inner.view(np.uint32).tolist(), outputs.view(np.uint32).tolist()):
        assert difference(GELU, (x,), expected) is None
        monkeypatch.setattr(gelu_tanh, "TABLE_FROM", x.numel() + 1)
        assert difference(GELU, (x,), expected) is None


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_what_is_left_over(dtype: torch.dtype, amplitude: float) -> None:
    for shape in ((1,), (3,), (2, 4), (7, 1, 37), (1, 5, 1000), (2048 + 5,)):
        x = randn(shape, dtype, sum(shape), amplitude)
        assert difference(GELU, (x,), aten_chains.gelu_tanh(x)) is None


def test_special_values_in_fp32() -> None:
    largest, least = torch.finfo(FP32).max, torch.finfo(FP32).smallest_normal
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, largest, -largest, least, -least, least / 4, 1e13, -1e13]
    x = torch.tensor([*special, 0.7978846, 9.01, -9.01, 5.5, -5.5, 2**-9, -16.0, 16.0, 1e-40])
    expected = aten_chains.gelu_tanh(x)
    assert expected.isnan().tolist() == [value == -torch.inf or value != value for value in x.tolist()]
    assert difference(GELU, (x,), expected) is None


def test_other_roundings_are_found() -> None:
    x = randn((4096,), FP32, 1)
    values, half = x.numpy(), np.float32(0.5)
    beta, kappa = np.float32(0.7978845608028654), np.float32(0.044715)
    ours = run(GELU, x)
    cube = values * values * values
    uncontracted = beta * (values + kappa * cube)
    contracted = beta * fma(kappa, cube, values)
    for inner, same in ((contracted, True), (uncontracted, False)):
        y = half * values * (np.float32(1) + tanh(inner))
        assert (compare(ours, (torch.from_numpy(y),)) is None) == same
    regrouped = half * (values * (np.float32(1) + tanh(contracted)))
    assert compare(ours, (torch.from_numpy(regrouped),)) is None  # to halve is exact
    distributed = fma(half * values, tanh(contracted), half * values)
    assert compare(ours, (torch.from_numpy(distributed),)) is not None


def test_the_table_is_used_from_where_it_pays_on() -> None:
    for elements, name in (
        (gelu_tanh.TABLE_FROM - 1, "gelu_tanh_direct"),
        (gelu_tanh.TABLE_FROM, "gelu_tanh_by_table"),
    ):
        x = torch.zeros(elements, dtype=BF16)
        (bound,) = [
            cell.cell_contents
            for cell in GELU.prepare(x).__closure__ or ()
            if isinstance(cell.cell_contents, BoundKernel)
        ]
        assert bound.name == name


def test_what_is_declined() -> None:
    for x, words in (
        (torch.zeros(8, dtype=torch.float64), "float32, float16 or bfloat16"),
        (torch.zeros(0), "not empty"),
        (torch.zeros(4, 8).t(), "contiguous"),
        (torch.zeros(9)[1:], "not aligned to 16 bytes"),
    ):
        assert words in str(GELU.unsupported(x))
