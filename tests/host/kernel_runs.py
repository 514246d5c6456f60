"""Runs an op's kernel, compiled for the CPU, in memory that shows a stray write or a skipped one; makes inputs for it.

Both sides of a comparison take the same ``rsqrt``: the correctly rounded one, or what a GPU was recorded to give.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from aten_emulator import aten_sum, mean_factor, reduce_plan
from binary32 import BITS, decode, encode, rounded

from samebits import jit
from samebits.bits import Difference, compare
from samebits.ops import Op

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
EPS = 1e-6
Arguments = tuple[Any, ...]

MISSING = jit.unavailable(torch.device("cpu"), host=True)
needs_compiler = [pytest.mark.host, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
"""Marks of a test that runs a kernel's source on the CPU."""

GUARD = 256
"""Elements of known content before and after every output; a multiple of every load's width."""


def _fill(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Memory of NaNs that no arithmetic makes: their payload counts up."""
    exponent = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    payload = torch.arange(count, dtype=torch.int64) % 0x3E + 1
    return (payload + exponent).to(BITS[dtype]).view(dtype)


class GuardedOutput:
    """One output in the middle of poisoned memory."""

    def __init__(self, like: torch.Tensor) -> None:
        self.memory = _fill(like.dtype, like.numel() + 2 * GUARD)
        self._before = self.memory.clone()
        self.tensor = self.memory[GUARD:-GUARD].view(like.shape)

    def problem(self) -> str | None:
        """What is wrong with the memory after a kernel ran, or ``None``."""
        view = BITS[self.memory.dtype]
        now, before = self.memory.view(view), self._before.view(view)
        outside = torch.cat([now[:GUARD] != before[:GUARD], now[-GUARD:] != before[-GUARD:]])
        if outside.any():
            return f"{int(outside.sum())} elements next to the output were written"
        untouched = now[GUARD:-GUARD] == before[GUARD:-GUARD]
        if untouched.any():
            return f"{int(untouched.sum())} output elements were not written, first {int(untouched.nonzero()[0])}"
        return None


def _view_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def run(op: Op, *args: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of the op's kernel for CPU tensors.

    Raises
    ------
    AssertionError
        If the op does not take the arguments, if an input changed, or if the outputs were not written exactly.
    """
    reason = op.unsupported(*args)
    assert reason is None, reason
    outputs = [GuardedOutput(like) for like in op.allocate(*args)]
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    before = [_view_of(arg.untyped_storage()).clone() for arg in inputs]
    op.prepare(*args)(*args, out=tuple(output.tensor for output in outputs))
    for position, (arg, content) in enumerate(zip(inputs, before, strict=True)):
        assert torch.equal(_view_of(arg.untyped_storage()), content), f"input {position} was written"
    for output in outputs:
        assert output.problem() is None, output.problem()
    return tuple(_with_one_nan(output.tensor) for output in outputs)


def _with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 NaNs as the GPU writes them: this CPU's additions and products keep a payload, the GPU's do not.

    16-bit results are left alone: the conversion writes one NaN there too, and that is the kernel's own doing.
    """
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.view(torch.int32).masked_fill(tensor.isnan(), 0x7FFFFFFF)
    return bits.view(torch.float32)


def difference(op: Op, args: tuple[Any, ...], expected: torch.Tensor | tuple[torch.Tensor, ...]) -> Difference | None:
    """Where the kernel's outputs are not the expected bits, or ``None``."""
    wanted = (expected,) if isinstance(expected, torch.Tensor) else expected
    return compare(run(op, *args), wanted)


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, amplitude: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * amplitude).to(dtype)


def odd_rows(width: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    """``(11, width)``: rows in which something is special, between ordinary ones."""
    rows = randn((11, width), FP32, seed)
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    rows[1] = 0
    rows[2] = -0.0
    rows[3] = 0.7  # no variance
    rows[4, width // 3] = 30000  # one huge outlier
    rows[5, 5] = torch.nan
    rows[6, width - 1] = torch.inf
    rows[7, 0], rows[7, 1] = torch.inf, -torch.inf
    rows[8] = rows[8].double().mul(tiny / 4).float()  # subnormals
    rows[9] = largest
    rows[9, ::2] = -largest
    return rows.to(dtype)


def telling_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """``(rows, width)`` numbers whose mean square depends on the order of summation in many ulps, not in the last one.

    A few squares are 2^24 times the others, so that one of the others is lost when it meets them alone, and a group
    of them is not.
    """
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand((rows, width), generator=generator) + 1) / 32
    large = 128 + torch.rand((rows, 3), generator=generator)
    x.scatter_(1, torch.randint(0, width, (rows, 3), generator=generator), large)
    return (x * (1 - 2 * torch.randint(0, 2, (rows, width), generator=generator))).to(dtype)


def rows_with_means_near_ties(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """``(rows, width)`` numbers in half precision; the mean of their squares is next to the middle of two others.

    Only there does a mean that is rounded to half precision show in which order it was summed. Three elements of a
    telling row are chosen to take it there, each from what the ones before have left; then the row is shuffled, and of
    many such rows those are taken whose sums came nearest.
    """
    candidates = 4096
    chosen, step = 3, 2.0**-8 if dtype == BF16 else 2.0**-11
    x = decode(telling_rows(candidates, width, dtype, seed))
    squares = rounded(x[:, chosen:] ** 2, dtype).astype(np.float64)
    goal = squares.sum(1) / width * 1.1
    ulp = np.exp2(np.floor(np.log2(goal))) * 2 * step
    goal = (np.ceil(goal / ulp) + 0.5) * ulp
    # Past the middle by less than what the small squares add up to, all or some of which are lost on the way.
    small = np.where(squares < 1, squares, 0).sum(1)
    left = goal * width - squares.sum(1) + small * np.random.default_rng(seed).random(candidates)
    for place in range(chosen):
        root = np.sqrt(left)
        nearest, below = (decode(torch.from_numpy(root * factor).to(dtype)) for factor in (1, 1 - step))
        x[:, place] = np.where(rounded(nearest**2, dtype) <= left, nearest, below)
        left = np.maximum(left - rounded(x[:, place] ** 2, dtype), 0)
    order = np.random.default_rng(seed).random((candidates, width)).argsort(1)
    x = np.take_along_axis(x, order, 1)
    means = aten_sum(rounded(x**2, dtype), reduce_plan(rows, width, 16)) * mean_factor(rows, width)
    cut_off = 1 << (16 if dtype == BF16 else 13)
    distance = np.abs((means.view(np.uint32) & np.uint32(cut_off - 1)).astype(np.int64) - cut_off // 2)
    return encode(x[distance.argsort()[:rows]], dtype)


def weights(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two norm weights around one."""
    return (1 + randn((width,), FP32, 11, 0.3)).to(dtype), (1 + randn((width,), FP32, 12, 0.3)).to(dtype)
