"""What a rounding step is: a device function of the ops' own sources beside the ATen operation it stands for.

A step's device code calls the very functions that the kernels call, compiled from the very files. ``probe.py`` runs
both sides over the step's domain and counts the results that differ; ``chains.py`` says which steps each op has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES, ALL = (BF16, FP16), (BF16, FP16, FP32)


class Types(NamedTuple):
    """The element types of one probe: what ``Element`` and ``Weight`` are in it."""

    element: torch.dtype
    weight: torch.dtype


@dataclass(frozen=True)
class Unit:
    """A source whose device functions are called, and the macros that it wants.

    Attributes
    ----------
    source : str
        A file of the ops' folder.
    constants, single : tuple of (str, int)
        Macros besides ``ELEMENT`` and ``WEIGHT``; ``single`` in their place where the elements are fp32.
    weight : torch.dtype, optional
        The weight's type where it is not the element's.
    """

    source: str
    constants: tuple[tuple[str, int], ...] = ()
    single: tuple[tuple[str, int], ...] | None = None
    weight: torch.dtype | None = None

    def types(self, dtype: torch.dtype) -> Types:
        return Types(dtype, self.weight or dtype)

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        return dict(self.constants if self.single is None or dtype != FP32 else self.single)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a chain, as device code and as an ATen operation.

    Attributes
    ----------
    name : str
        The step as a formula, for tables.
    unit : Unit
    code : str
        A C++ expression in ``a``, ``b``, ...: the operands in pairs of neighbours (``Pair<Element>``, ``float2``),
        or one by one where ``each`` is set.
    out : str
        The type of the result: ``E`` Element, ``W`` Weight, ``f`` float, ``B`` the byte of an e4m3.
    operands : str
        A letter for each operand: the same, and ``i`` for int.
    aten : callable
        ``aten(types, a, b, ...)``, the operands being tensors that broadcast.
    layout : str
        ``o`` for an operand of the outer loop, which both neighbours share, and ``i`` for one of the inner loop.
    each : bool
        Whether ``code`` takes single operands and not pairs.
    parts : int
        Numbers in one result: 2 for a complex one.
    dtypes : tuple of torch.dtype
        The element types for which the step exists.
    portable : bool
        Whether a CPU's ATen owes the same bits: IEEE arithmetic and nothing that the hardware approximates.
    grid : tuple, optional
        The outer values and the end of a count from 1 that the inner operand runs through, instead of every value.
    """

    name: str
    unit: Unit
    code: str
    out: str
    operands: str
    aten: Callable[..., Tensor]
    layout: str = ""
    each: bool = False
    parts: int = 1
    dtypes: tuple[torch.dtype, ...] = ALL
    portable: bool = True
    grid: tuple[tuple[int, ...], int] | None = None

    @property
    def places(self) -> str:
        """``layout``, by default the last operand inside and the others outside."""
        return self.layout or "o" * (len(self.operands) - 1) + "i"
