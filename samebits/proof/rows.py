"""Whole calls against eager: every pair where an op has no sum, adversarial rows, and random rows by the million."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits import bits
from samebits.ops import Args, Case, Op, Outputs
from samebits.ops._op import Launcher
from samebits.proof.domains import EVERY_16, every_16
from samebits.proof.forms import HEADS, Form, Inputs
from samebits.proof.probe import Outcome, is_nan
from samebits.verify import poison

ROW_COUNTS = (1, 2, 3, 4, 7, 8, 15, 16, 17)
"""Numbers of rows around which ATen takes another tree."""
_OUTER_PIECE = 1 << 9
_PART_OUTER = 6
_LOOK_EVERY = 16
_MANY_ROWS = 256


@dataclass(frozen=True)
class Shape:
    """Rows of one width."""

    rows: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}"


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Call:
    """One signature of an op: prepared once, its outputs in memory that is poisoned before the first run."""

    def __init__(self, op: Op, args: Args) -> None:
        reason = op.unsupported(*args)
        if reason is not None:
            raise ValueError(f"{op.name} declines the proof's own arguments: {reason}")
        self.op, self.args = op, args
        self.launcher: Launcher = op.prepare(*args)
        # Later runs find the results of another draw there: an element that is not written shows as well.
        self.out = tuple(poison(output) for output in op.allocate(*args))
        first = self.out[0]
        self.differ = torch.zeros((), dtype=torch.int64, device=first.device)
        self.elements = sum(output.numel() for output in self.out)

    def compare(self, reference: Callable[..., Outputs]) -> None:
        """Run both sides and count the elements that differ, on the device, without waiting for it."""
        expected = _tuple(reference(*self.args))
        self.launcher(*self.args, out=self.out)
        for ours, eager in zip(self.out, expected, strict=True):
            if (ours.dtype, ours.shape, ours.stride()) != (eager.dtype, eager.shape, eager.stride()):
                raise TypeError(f"{self.op.name}: {bits.compare(ours, eager)}")
            self.differ += _unequal(ours, eager)

    def first(self, reference: Callable[..., Outputs]) -> str | None:
        """The first difference of a run that is made now, as a sentence."""
        expected = _tuple(reference(*self.args))
        self.launcher(*self.args, out=self.out)
        found = bits.compare(tuple(map(_one_nan, self.out)), tuple(map(_one_nan, expected)))
        return None if found is None else str(found)


def _one_nan(tensor: Tensor) -> Tensor:
    """A CPU writes other NaNs than a GPU; there any NaN equals any other."""
    return tensor if tensor.is_cuda or tensor.itemsize == 1 else tensor.masked_fill(tensor.isnan(), torch.nan)


def _unequal(ours: Tensor, eager: Tensor) -> Tensor:
    """How many elements differ, ``()`` int64. Where words of eight bytes are equal, so are the elements in them."""
    one, other = bits.integer_view(ours), bits.integer_view(eager)
    if not ours.is_cuda:
        return ((one != other) & ~(is_nan(ours) & is_nan(eager))).sum()
    if one.numel() * one.element_size() % 8 == 0 and ours.data_ptr() % 8 == 0 and eager.data_ptr() % 8 == 0:
        one, other = one.view(-1).view(torch.int64), other.view(-1).view(torch.int64)
    return (one != other).sum()


def every_pair(op: Op, form: Form, name: str, dtype: torch.dtype, device: torch.device, whole: bool) -> Outcome:
    """Run the kernel itself over every value or pair of 16-bit elements; a part of the pairs unless ``whole``."""
    every = form.every[name]
    first = every_16(dtype, device)
    if not every.pairs:
        first = first[:1]
    elif not whole:
        generator = torch.Generator(device).manual_seed(3)
        first = first[torch.randperm(EVERY_16, generator=generator, device=device)[:_PART_OUTER]]
    call, checked = None, 0
    for start in range(0, first.numel(), _OUTER_PIECE):
        args = every.build(first[start : start + _OUTER_PIECE])
        call = call or Call(op, args)
        call.args = args
        call.compare(op.reference)
        checked += call.elements
    if call is None:
        raise ValueError(f"{op.name}: the calls of {name!r} have no values.")
    differ = int(call.differ.item())
    return Outcome(checked, differ, call.first(op.reference) if differ else None)


def case(op: Op, case: Case, device: torch.device, draws: int) -> Outcome:
    """Compare an op on one of its own cases, ``draws`` times anew."""
    differ, first, call = 0, None, None
    for seed in range(draws):
        args = case.build(device, seed)
        call = call or Call(op, args)
        call.args = args
        call.compare(op.reference)
    if call is not None:
        differ = int(call.differ.item())
        first = call.first(op.reference) if differ else None
    return Outcome(case.rows * draws, differ, first)


def fits(op: Op, form: Form, dtype: torch.dtype, shape: Shape, variant: str, device: torch.device) -> str | None:
    """Why the op does not take this shape, or ``None``."""
    try:
        args = form.build(Inputs(dtype, device), shape.rows, shape.width, variant)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return op.unsupported(*args)


def adversarial(
    op: Op, form: Form, dtype: torch.dtype, shape: Shape, variant: str, device: torch.device, draws: int
) -> Outcome:
    """Compare rows in which every pattern stands beside every other, ``draws`` times anew."""
    inputs = Inputs(dtype, device, seed=7)
    call = Call(op, form.build(inputs, shape.rows, shape.width, variant))
    for number in range(draws):
        inputs.adversarial(number)
        call.compare(op.reference)
    differ = int(call.differ.item())
    return Outcome(shape.rows * draws, differ, _again(op, call, inputs, inputs.adversarial, draws) if differ else None)


def random(
    op: Op,
    form: Form,
    dtype: torch.dtype,
    shape: Shape,
    variant: str,
    device: torch.device,
    rows: int,
    seconds: float,
) -> Outcome:
    """Compare random rows, until there were ``rows`` or until the time is over; the outcome says how many."""
    inputs = Inputs(dtype, device, seed=11)
    call = Call(op, form.build(inputs, shape.rows, shape.width, variant))
    started, done = time.perf_counter(), 0
    while done * shape.rows < rows:
        inputs.random(done)
        call.compare(op.reference)
        done += 1
        if done % _LOOK_EVERY == 0:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if time.perf_counter() - started > seconds:
                break
    differ = int(call.differ.item())
    return Outcome(shape.rows * done, differ, _again(op, call, inputs, inputs.random, done) if differ else None)


def _again(op: Op, call: Call, inputs: Inputs, fill: Callable[[int], None], draws: int) -> str:
    """Look for a difference to show: fresh draws of the same kind, until one differs."""
    for number in range(min(draws, 200)):
        fill(number)
        found = call.first(op.reference)
        if found is not None:
            return found
    return "seen in one draw and not in 200 fresh ones"


def adversarial_shapes(form: Form, quick: bool, whole: bool = True) -> Iterator[Shape]:
    """The shapes at which adversarial rows are compared: many rows of both widths, and few of the wide one.

    Not ``whole``: few rows of the narrow one, for a CPU.
    """
    wide, narrow = form.wide, form.narrow
    if not whole:
        yield from (Shape(rows * (1 if form.tokens_only else HEADS), narrow[1]) for rows in (48, 5))
        return
    many = _MANY_ROWS if form.tokens_only else _MANY_ROWS * HEADS
    yield Shape(many, wide[1])
    if narrow[1] != wide[1]:
        yield Shape(many, narrow[1])
    for rows in (1, 5) if quick else ROW_COUNTS:
        yield Shape(rows, wide[1])
