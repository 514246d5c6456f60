"""Runs steps: device code compiled beside the ops' own sources, ATen on the same operands, an integer comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samebits import jit
from samebits.bits import integer_view
from samebits.ops._layout import CTYPES
from samebits.ops._quantize import FP8
from samebits.proof.domains import Piece, domain_of, pieces
from samebits.proof.steps import FP32, Step, Unit

_THREADS = 256
_C_TYPES = {"E": "Element", "W": "Weight", "f": "float", "i": "int", "B": "Byte"}
_NAMES = "abcdefgh"


@dataclass(frozen=True)
class Outcome:
    """What came of one step: results compared, results that differ, and the first that does."""

    checked: int
    differ: int
    first: str | None = None


def source_text(unit: Unit, steps: Sequence[Step]) -> str:
    """A ``.cu`` file with one kernel for each step, ``step_0``, ``step_1``, ..."""
    lines = [
        '#include "_numerics.cuh"',
        "using Element = ELEMENT;",
        "using Weight = WEIGHT;",
        "template <> struct PairOf<int> { using type = int2; };",
        "using Byte = unsigned char;",
        "struct TwoBytes { Byte x, y; };",
        "template <> struct PairOf<Byte> { using type = TwoBytes; };",
        "__device__ __forceinline__ TwoBytes two_bytes(unsigned q) { return TwoBytes{Byte(q & 255u), Byte(q >> 8)}; }",
        f'#include "{unit.source}"',
    ]
    return "\n".join([*lines, *(_kernel(number, step) for number, step in enumerate(steps))]) + "\n"


def _kernel(number: int, step: Step) -> str:
    """One thread takes two neighbours: as one pair, in one order or the other, or one after the other."""
    types = [_C_TYPES[letter] for letter in step.operands]
    out = _C_TYPES[step.out]
    # The types as the compiler's macros spell them: a parameter list is read from this text.
    spelled = [
        {"Element": "ELEMENT", "Weight": "WEIGHT", "Byte": "unsigned char"}.get(name, name) for name in (*types, out)
    ]
    parameters = ", ".join(f"const {name}* p{at}" for at, name in enumerate(spelled[:-1]))

    def take(at: int, index: str) -> str:
        return f"p{at}[{index} >> shift]" if step.places[at] == "o" else f"p{at}[{index} & mask]"

    if step.each:
        operands = "".join(f"    const {name} {_NAMES[at]} = {take(at, 'n')};\n" for at, name in enumerate(types))
        if step.parts == 1:
            keep = f"    out[n] = {step.code};\n"
        else:
            keep = f"    const Pair<{out}> r = {step.code};\n    out[2 * n] = r.x;\n    out[2 * n + 1] = r.y;\n"
        body = f"  for (int n = first; n < first + 2; n++) {{\n{operands}{keep}  }}\n"
    else:
        operands = "".join(
            f"  const Pair<{name}> {_NAMES[at]} = {{{take(at, 'low')}, {take(at, 'high')}}};\n"
            for at, name in enumerate(types)
        )
        body = (
            "  const int low = first + place, high = first + 1 - place;\n"
            f"{operands}  const Pair<{out}> r = {step.code};\n  out[low] = r.x;\n  out[high] = r.y;\n"
        )
    return (
        f'extern "C" __global__ void step_{number}({parameters}, {spelled[-1]}* out, int shift, int mask, int count, '
        f"int place) {{\n  const int first = 2 * (blockIdx.x * {_THREADS} + threadIdx.x);\n"
        f"  if (first >= count) return;\n{body}}}\n"
    )


class Probes:
    """The steps of one unit and element type, compiled from the sources in ``folder``."""

    def __init__(
        self, folder: Path, unit: Unit, dtype: torch.dtype, steps: Iterable[Step], device: torch.device
    ) -> None:
        self.steps = tuple(steps)
        self.dtype, self.device = dtype, device
        self._types = unit.types(dtype)
        macros: dict[str, int | str] = dict(unit.macros(dtype))
        macros |= {"ELEMENT": CTYPES[dtype], "WEIGHT": CTYPES[self._types.weight]}
        name = "_".join(["probe", Path(unit.source).stem, *map(str, macros.values())]).replace(" ", "")
        path = folder / f"{name}.cu"
        path.write_text(source_text(unit, self.steps), encoding="utf-8")
        self._kernels = [jit.compile(path, f"step_{at}", macros, device) for at in range(len(self.steps))]

    def ours(self, step: Step, piece: Piece, place: int) -> Tensor:
        """The device code's results on one piece, ``(O, I)``, or ``(O, I, parts)``."""
        kernel = self._kernels[self.steps.index(step)]
        known = {"E": self._types.element, "W": self._types.weight, "f": FP32, "B": FP8}
        shape = (piece.outer, piece.inner) + ((step.parts,) if step.parts > 1 else ())
        out = torch.empty(shape, dtype=known[step.out], device=self.device)
        count = piece.outer * piece.inner
        bound = kernel.bind(
            (-(-count // (2 * _THREADS)), 1, 1),
            (_THREADS, 1, 1),
            shift=piece.inner.bit_length() - 1,
            mask=piece.inner - 1,
            count=count,
            place=place,
        )
        operands = [operand.contiguous() for operand in piece.operands]
        bound(self.device.index or 0, *(operand.data_ptr() for operand in operands), out.data_ptr())
        return out

    def aten(self, step: Step, piece: Piece) -> Tensor:
        """ATen's results on one piece."""
        return step.aten(self._types, *piece.operands)

    def run(self, step: Step, whole: bool) -> Outcome:
        """Compare both sides over the step's domain; all of it, or a part that a CPU can take."""
        places = (0, 1) if whole and not step.each and "o" in step.places else (0,)
        differ = torch.zeros((), dtype=torch.int64, device=self.device)
        checked = 0
        for piece in pieces(step, self.dtype, self.device, whole):
            expected = self.aten(step, piece)
            for place in places:
                ours = self.ours(step, piece, place)
                _same_form(step, ours, expected)
                differ += _unequal(ours, expected).sum()
                checked += ours.numel()
        found = int(differ.item())
        return Outcome(checked, found, self._first(step, whole) if found else None)

    def _first(self, step: Step, whole: bool) -> str:
        """Find a difference again and spell it: the operands' bits and both results'."""
        for piece in pieces(step, self.dtype, self.device, whole):
            for place in (0, 1):
                ours, expected = self.ours(step, piece, place), self.aten(step, piece)
                where = _unequal(ours, expected)
                if where.any():
                    at = int(where.flatten().to(torch.uint8).argmax())
                    row, column = divmod(at // step.parts, piece.inner)
                    given = [
                        f"{name} = {_bits(operand, row if where_ == 'o' else column)}"
                        for name, operand, where_ in zip(_NAMES, piece.operands, step.places, strict=False)
                    ]
                    return f"{', '.join(given)}: {_bits(ours, at)} instead of {_bits(expected, at)}"
        return "seen once and not again"


def _same_form(step: Step, ours: Tensor, expected: Tensor) -> None:
    if ours.dtype != expected.dtype or ours.shape != expected.shape:
        raise TypeError(
            f"the step {step.name!r}: expected {expected.dtype} {tuple(expected.shape)} as ATen has it, got "
            f"{ours.dtype} {tuple(ours.shape)} from the device code. Correct the step's `out`."
        )


def _unequal(ours: Tensor, expected: Tensor) -> Tensor:
    """Where bits differ. A CPU writes other NaNs than a GPU; there any NaN equals any other."""
    unequal = integer_view(ours) != integer_view(expected)
    return unequal if ours.is_cuda else unequal & ~(is_nan(ours) & is_nan(expected))


def is_nan(tensor: Tensor) -> Tensor:
    """Where a tensor is NaN; an eight-bit type has no test of its own."""
    return (tensor.float() if tensor.itemsize == 1 else tensor).isnan()


def _bits(tensor: Tensor, at: int) -> str:
    value = tensor.reshape(-1)[at]
    if not value.is_floating_point():
        return str(int(value))
    digits = value.element_size() * 2
    pattern = int(integer_view(value.reshape(1)).item()) & ((1 << 4 * digits) - 1)
    return f"{value.float().item():g} (0x{pattern:0{digits}x})"


def method_of(step: Step, dtype: torch.dtype, whole: bool) -> tuple[str, str]:
    """What a record says of a step: its domain and ``exhaustive`` or ``sampled``."""
    domain = domain_of(step, dtype, whole)
    return domain.said, "exhaustive" if domain.exhaustive else "sampled"
