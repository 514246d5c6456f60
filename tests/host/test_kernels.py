"""The comparison of kernels with the emulator finds what it is there to find."""

from __future__ import annotations

import aten_chains
import pytest
import torch
from kernel_inputs import BF16, DTYPES, EPS, FP32, Arguments, randn, weights
from kernel_runs import GuardedOutput, difference, needs_compiler, run

from samebits import host
from samebits.bits import compare, integer_view
from samebits.ops import OPS, by_name

pytestmark = needs_compiler
QK_NORM, RMS_NORM_SCALE = map(by_name, ("qk_norm", "rms_norm_scale"))

X, Y, ROW = randn((1, 2, 512), BF16, 4), randn((1, 2, 512), BF16, 3), randn((1, 1, 512), BF16, 5)
Q, K = randn((1, 2, 3, 64), BF16, 1), randn((1, 2, 1, 64), BF16, 2)
TABLE = torch.polar(torch.ones(2, 32), randn((2, 32), FP32, 7))
SMALL: dict[str, Arguments] = {
    "layer_norm_modulate": (X, ROW[0], ROW[0], EPS),
    "gated_residual": (X, ROW[0], Y),
    "gated_residual_norm_modulate": (X, ROW[0], Y, ROW[0], ROW[0], EPS),
    "rms_norm_scale": (X, weights(512, BF16)[0], ROW, EPS, ROW, ROW.flip(-1)),
    "gated_residual_rms_norm": (X, ROW, Y, *weights(512, BF16), ROW, EPS),
    "qk_norm": (Q, K, *weights(64, BF16), EPS, "torch"),
    "qk_norm_rope": (Q, Q.flip(1), None, *weights(64, BF16), TABLE, *(None,) * 6, EPS, "torch"),
    "gelu_tanh": (X,),
    "swiglu": (X, Y),
    "quantize_fp8": (X, torch.tensor(0.1)),
    "bias_gated_residual": (X, ROW[0], Y, ROW[0, 0], True),
    "bias_gated_residual_norm_modulate": (X, ROW[0], Y, ROW[0, 0], ROW[0], ROW[0], EPS),
}


def test_every_op_is_here() -> None:
    # What a library computes on a CPU says nothing about a GPU; test_kernel_products.py has the products.
    assert sorted(SMALL) == sorted(op.name for op in OPS if op.moves_bytes)


@pytest.mark.parametrize("name", SMALL)
def test_one_ulp_in_one_element_is_found(name: str) -> None:
    op, args = by_name(name), SMALL[name]
    expected = getattr(aten_chains, name)(*args)
    last = expected if isinstance(expected, torch.Tensor) else expected[-1]
    assert difference(op, args, expected) is None
    integer_view(last).view(-1)[-1] ^= 1
    found = difference(op, args, expected)
    assert found is not None
    assert (found.differing, found.ulp) == (1, 1)
    assert found.index == tuple(size - 1 for size in last.shape)


@pytest.mark.parametrize("name", SMALL)
def test_the_order_in_which_threads_run_does_not_matter(name: str) -> None:
    op, args = by_name(name), SMALL[name]
    expected = getattr(aten_chains, name)(*args)
    for order in (0, 1, 2, 3):  # ascending, descending, two shuffles
        with host.schedule(order, workers=2):
            assert difference(op, args, expected) is None


def test_the_tree_of_another_number_of_rows_is_found() -> None:
    args = (randn((1, 15, 3840), FP32, 6), weights(3840, FP32)[0], None, EPS)
    assert difference(RMS_NORM_SCALE, args, aten_chains.rms_norm_scale(*args)) is None
    for other in (1, 2, 4, 16):
        assert difference(RMS_NORM_SCALE, args, aten_chains.rms_norm_scale(*args, rows=other)) is not None
    q, k = randn((1, 15, 4, 256), FP32, 1), randn((1, 2, 1, 256), FP32, 2)
    args = (q, k, *weights(256, FP32), EPS, "diffusers")
    assert difference(QK_NORM, args, aten_chains.qk_norm(*args)) is None
    assert difference(QK_NORM, args, aten_chains.qk_norm(*args, rows=2)) is not None


def test_another_kind_is_found() -> None:
    q, k = randn((1, 15, 4, 128), BF16, 1), randn((1, 15, 4, 128), BF16, 2)
    results = {kind: run(QK_NORM, q, k, *weights(128, BF16), EPS, kind) for kind in ("diffusers", "native", "torch")}
    for kind, result in results.items():
        for other in results.keys() - {kind}:
            assert compare(result, results[other]) is not None


def test_memory_next_to_an_output_and_elements_left_out_are_found() -> None:
    for dtype in DTYPES:
        output = GuardedOutput(torch.empty(4, 8, dtype=dtype))
        assert "32 output elements were not written" in str(output.problem())
        output.tensor.zero_()
        assert output.problem() is None
        output.memory[255] = 0
        assert "next to the output" in str(output.problem())
