"""Runs an op's kernel, compiled for the CPU, in memory that shows a stray write or a skipped one.

Both sides of a comparison take the same ``rsqrt``: the correctly rounded one, or what a GPU was recorded to give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from binary32 import BITS

from samebits import jit
from samebits.bits import Difference, compare
from samebits.ops import Op

MISSING = jit.unavailable(torch.device("cpu"), host=True)
needs_compiler = [pytest.mark.host, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
"""Marks of a test that runs a kernel's source on the CPU."""

GUARD = 256
"""Elements of known content before and after every output; a multiple of every load's width."""


def _fill(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Memory of NaNs that no arithmetic makes: their payload counts up. e4m3 has no payload, but a negative NaN."""
    if dtype == torch.float8_e4m3fn:
        return torch.full((count,), 0xFF, dtype=torch.uint8).view(dtype)
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
        view = BITS.get(self.memory.dtype, torch.uint8)
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
        If the op does not take the arguments, if an input changed, if the outputs were not written exactly, or if the
        memory that a verified call takes by itself is other memory or holds other bits.
    """
    reason = op.unsupported(*args)
    assert reason is None, reason
    outputs = [GuardedOutput(like) for like in op.allocate(*args)]
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    before = [_view_of(arg.untyped_storage()).clone() for arg in inputs]
    launch = op.prepare(*args)
    launch(*args, out=tuple(output.tensor for output in outputs))
    for position, (arg, content) in enumerate(zip(inputs, before, strict=True)):
        assert torch.equal(_view_of(arg.untyped_storage()), content), f"input {position} was written"
    for output in outputs:
        assert output.problem() is None, output.problem()
    own = compare(as_tuple(launch(*args)), tuple(output.tensor for output in outputs))
    assert own is None, f"without memory from the gate: {own}"
    return tuple(_with_one_nan(output.tensor) for output in outputs)


def _with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 NaNs as the GPU writes them: this CPU's additions and products keep a payload, the GPU's do not.

    16-bit results are left alone: the conversion writes one NaN there too, and that is the kernel's own doing.
    """
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.view(torch.int32).masked_fill(tensor.isnan(), 0x7FFFFFFF)
    return bits.view(torch.float32)


def as_tuple(value: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """One tensor or several, always as a tuple."""
    return (value,) if isinstance(value, torch.Tensor) else value


def difference(op: Op, args: tuple[Any, ...], expected: torch.Tensor | tuple[torch.Tensor, ...]) -> Difference | None:
    """Where the kernel's outputs are not the expected bits, or ``None``."""
    return compare(run(op, *args), as_tuple(expected))


def layout_of_eager(op: Op, args: tuple[Any, ...]) -> str | None:
    """Where the kernel's outputs differ from eager's in element type, shape or strides, or ``None``.

    Eager on the CPU lays its results out as eager on a GPU does, whatever their bits.
    """
    expected = op.reference(*args)
    for number, (ours, eager) in enumerate(zip(run(op, *args), as_tuple(expected), strict=True)):
        layouts = [(t.dtype, tuple(t.shape), t.stride()) for t in (ours, eager)]
        if layouts[0] != layouts[1]:
            return f"output {number} is {layouts[0]}, eager's is {layouts[1]}"
    return None
