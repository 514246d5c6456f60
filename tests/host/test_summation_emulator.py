"""The planned trees against the emulator of ATen's kernels, which was written apart from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from aten_emulator import aten_mean_square, aten_sum
from aten_emulator import reduce_plan as emulated_plan
from torch import Tensor

from samebits.ops._reduce_plan import layer_norm_tree, reduce_plan, reduce_tree
from samebits.summation import Probe, Tree, ask_signed, ask_squares, confirm, recover

CPU = torch.device("cpu")


def planned(rows: int, width: int, size: int, shift: int = 0) -> Tree:
    plan = reduce_plan(rows, width, size)
    assert plan is not None
    return reduce_tree(plan, width, shift=shift)


def emulator(rows: int, width: int, bits: int, shift: int = 0) -> Callable[[Tensor], Tensor]:
    plan = emulated_plan(rows, width, bits)
    return lambda x: torch.from_numpy(aten_sum(x.float().numpy(), plan, shift))


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 17])
@pytest.mark.parametrize("width", [32, 40, 64, 96, 120, 128, 136, 256, 1000])
def test_planned_trees_are_the_emulators(width: int, rows: int, shift: int) -> None:
    for bits, dtype in ((32, torch.float32), (16, torch.bfloat16), (16, torch.float16)):
        probe = Probe(emulator(rows, width, bits, shift), width, 64, dtype, CPU)
        tree = planned(rows, width, bits // 8, shift)
        assert confirm(probe, tree, ask_signed) is None
        if width in (40, 128):
            assert recover(probe) == tree
        if width >= 128:
            other = planned(rows, width, bits // 8, shift + 1)
            assert confirm(probe, other, ask_signed) is not None


@pytest.mark.parametrize(("rows", "width"), [(1, 3840), (17, 3072), (2, 8200), (16, 8192)])
def test_planned_trees_of_long_rows_are_the_emulators(rows: int, width: int) -> None:
    probe = Probe(emulator(rows, width, 32), width, 256, torch.float32, CPU)
    assert confirm(probe, planned(rows, width, 4), ask_signed) is None
    squares = replace(probe, sums=lambda x: probe.sums(x * x))
    assert confirm(squares, planned(rows, width, 4), ask_squares) is None
    assert confirm(probe, planned(5, width, 4), ask_signed) is not None


@pytest.mark.parametrize("width", [4, 40, 128, 256, 516, 3072])
def test_the_fused_rms_norms_tree_is_the_emulators(width: int) -> None:
    probe = Probe(
        lambda x: torch.from_numpy(aten_mean_square(x.numpy()) * np.float32(width)), width, 128, torch.float32, CPU
    )
    assert confirm(probe, layer_norm_tree(width), ask_squares) is None
    if width > 128:
        assert confirm(probe, planned(16, width, 4), ask_squares) is not None
