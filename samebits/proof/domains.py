"""What a step is run on: every value, every pair, every fp32, or draws, in pieces that fit a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.proof.steps import FP32, Step, Types

EVERY_16 = 1 << 16
_SINGLES_PIECE = 1 << 26
_ATEN_PIECE = 1 << 26
_SINGLE_DRAWS = 1 << 15
"""Draws of an outer and of an inner fp32 operand: together 2^30 pairs."""
_DRAWS = 1 << 15
"""Draws of the outer operands where there are several, or one of fp32."""
_PART_OUTER, _PART_SINGLES, _PART_ROWS = 10, 1 << 15, 1 << 12
"""How much of a domain a CPU takes."""


@dataclass(frozen=True)
class Piece:
    """Operands of one launch, in a step's order: outer ones ``(O, 1)``, inner ones ``(1, I)``, I a power of two."""

    operands: tuple[Tensor, ...]
    outer: int
    inner: int


@dataclass(frozen=True)
class Domain:
    """A step's domain for one element type.

    Attributes
    ----------
    said : str
        For tables.
    exhaustive : bool
        Whether nothing that the step can meet is left out.
    """

    said: str
    exhaustive: bool


def _bits_of(integers: Tensor, dtype: torch.dtype) -> Tensor:
    return integers.to(torch.int32 if dtype == FP32 else torch.int16).view(dtype)


def every_16(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All 65,536 bit patterns of a 16-bit type, in order."""
    return _bits_of(torch.arange(EVERY_16, device=device, dtype=torch.int32), dtype)


def draw(count: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """``count`` values: a quarter any bit patterns, the others of an ordinary size with any mantissa.

    Any bit pattern of fp32 is mostly huge or tiny, which overflows or vanishes at the first product.
    """
    if dtype.itemsize == 2:
        integers = torch.randint(0, EVERY_16, (count,), generator=generator, device=device, dtype=torch.int32)
        return _bits_of(integers, dtype)
    integers = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, device=device, dtype=torch.int64)
    bits = integers.to(torch.int32)
    ordinary = (bits & ~0x40000000 & ~0x08000000) | 0x30000000  # exponents 96 to 127, less eight of each sixteen
    return torch.where(torch.arange(count, device=device) % 4 == 0, bits, ordinary).view(FP32)


def _letters(step: Step, types: Types) -> list[torch.dtype]:
    known = {"E": types.element, "W": types.weight, "f": FP32, "i": torch.int32}
    return [known[letter] for letter in step.operands]


def domain_of(step: Step, dtype: torch.dtype, whole: bool) -> Domain:
    """Say what :func:`pieces` runs through."""
    kinds = _letters(step, step.unit.types(dtype))
    outer = sum(place == "o" for place in step.places)
    part = "" if whole else "a part of "
    if step.grid is not None:
        values, last = step.grid
        start = 1 if whole else last - _PART_ROWS + 1
        widths = f", {len(values)} widths" if len(values) > 1 else ""
        return Domain(f"every count from {start:,} to {last:,}{widths}", whole)
    sixteen = all(kind.itemsize == 2 for kind in kinds)
    if outer == 0:
        return Domain("all 2^16 values" if sixteen else f"{part}all 2^32 fp32 values", sixteen or whole)
    if sixteen and len(kinds) == 2:
        places = ", each in both places of a register" if not step.each and whole else ""
        return Domain(f"{part}all 2^32 pairs{places}", whole)
    draws = _PART_OUTER if not whole else _SINGLE_DRAWS if not sixteen and outer == 1 else _DRAWS
    inner = kinds[step.places.index("i")]
    first = "all 2^16 values" if inner.itemsize == 2 else f"{_inner_draws(whole):,} drawn values"
    return Domain(f"{first}, each with {draws:,} draws of the other operands", False)


def _inner_draws(whole: bool) -> int:
    return _SINGLE_DRAWS if whole else 1 << 12


def pieces(step: Step, dtype: torch.dtype, device: torch.device, whole: bool) -> Iterator[Piece]:
    """The operands of a step, launch by launch.

    Parameters
    ----------
    step : Step
    dtype : torch.dtype
        The element type.
    device : torch.device
    whole : bool
        All of the domain; else a part that a CPU can take.
    """
    kinds = _letters(step, step.unit.types(dtype))
    generator = torch.Generator(device).manual_seed(20)
    if step.grid is not None:
        yield _grid(step, device, whole)
    elif step.places == "i" and kinds[0].itemsize == 4:
        yield from _singles(device, whole, generator)
    else:
        yield from _products(step, kinds, device, whole, generator)


def _grid(step: Step, device: torch.device, whole: bool) -> Piece:
    if step.grid is None:
        raise ValueError(f"the step {step.name!r} has no grid.")
    values, last = step.grid
    first = 1 if whole else last - _PART_ROWS + 1
    inner = torch.arange(first, last + 1, device=device, dtype=torch.int32)
    outer = torch.tensor(values, device=device, dtype=torch.int32)
    return Piece((outer[:, None], inner[None]), len(values), inner.numel())


def single_starts() -> range:
    """Where the pieces of all 2^32 fp32 bit patterns start, as signed integers."""
    return range(-(1 << 31), 1 << 31, _SINGLES_PIECE)


def _singles(device: torch.device, whole: bool, generator: torch.Generator) -> Iterator[Piece]:
    if not whole:
        drawn = draw(_PART_SINGLES, FP32, device, generator)
        # The ends: zeros, subnormals, infinities and NaNs of both signs.
        edge = torch.arange(-1024, 1024, device=device, dtype=torch.int32)
        for number, start in enumerate((0, -(1 << 31) + 1024, 0x7F800000, 0x7F800000 - (1 << 31))):
            drawn.view(torch.int32)[number * 2048 : number * 2048 + 2048] = edge + start
        yield Piece((drawn[None],), 1, _PART_SINGLES)
        return
    integers = torch.arange(_SINGLES_PIECE, device=device, dtype=torch.int32)
    for start in single_starts():
        yield Piece(((integers + start).view(FP32)[None],), 1, _SINGLES_PIECE)


def _products(
    step: Step, kinds: list[torch.dtype], device: torch.device, whole: bool, generator: torch.Generator
) -> Iterator[Piece]:
    """Outer operands against inner ones: all of both, or draws where there is more than two 16-bit values hold."""
    all_outer = whole and kinds.count(FP32) == 0 and step.places.count("o") <= 1
    single = FP32 in kinds and step.places.count("o") == 1
    draws = _PART_OUTER if not whole else _SINGLE_DRAWS if single else _DRAWS
    outer = EVERY_16 if all_outer else draws
    if "o" not in step.places:
        outer = 1
    columns: list[Tensor] = []
    for kind, place in zip(kinds, step.places, strict=True):
        if place == "o":
            columns.append(every_16(kind, device) if all_outer else draw(outer, kind, device, generator))
        elif kind.itemsize == 2:
            columns.append(every_16(kind, device))
        else:
            columns.append(_inner_singles(columns, whole, device, generator))
    inner = max(c.numel() for c, place in zip(columns, step.places, strict=True) if place == "i")
    most = max(1, _ATEN_PIECE // (inner * step.parts))
    for start in range(0, outer, most):
        operands = tuple(
            column[None] if place == "i" else column[start : start + most, None]
            for column, place in zip(columns, step.places, strict=True)
        )
        yield Piece(operands, min(most, outer - start), inner)


def _inner_singles(outer: list[Tensor], whole: bool, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draws, half of them next to the negative of an outer value, where a sum cancels."""
    count = _inner_draws(whole)
    drawn = draw(count, FP32, device, generator)
    if outer and outer[0].dtype == FP32:
        near = min(count // 2, outer[0].numel())
        offsets = torch.arange(near, device=device, dtype=torch.int32) % 9 - 4
        drawn[:near] = (outer[0][:near].view(torch.int32) + offsets ^ -(1 << 31)).view(FP32)
    return drawn
