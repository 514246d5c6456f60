"""Negative controls: our own sources made wrong on purpose, each of which the proof's own checks must catch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebits import ops
from samebits.proof import rows
from samebits.proof.forms import FORMS
from samebits.proof.probe import Outcome, Probes
from samebits.proof.rows import Shape
from samebits.proof.steps import Step
from samebits.proof.values import PATTERNS
from samebits.proof.workshop import Change, Workshop

DRAWS = len(PATTERNS)
"""How often adversarial rows are drawn: so often that a lone row has met every pattern."""


@dataclass(frozen=True)
class Steps:
    """A control that the steps of one unit must catch."""

    steps: tuple[Step, ...]
    dtype: torch.dtype

    @property
    def portable(self) -> bool:
        return any(step.portable for step in self.steps)

    def run(self, workshop: Workshop, device: torch.device, whole: bool) -> Outcome:
        steps = self.steps if whole else [step for step in self.steps if step.portable]
        probes = Probes(workshop.path, steps[0].unit, self.dtype, steps, device)
        found = [probes.run(step, whole) for step in steps]
        return max(found, key=lambda outcome: outcome.differ)


@dataclass(frozen=True)
class Every:
    """A control that a call over every value or pair must catch."""

    op: str
    name: str
    dtype: torch.dtype

    @property
    def portable(self) -> bool:
        return FORMS[self.op].portable

    def run(self, workshop: Workshop, device: torch.device, whole: bool) -> Outcome:
        return rows.every_pair(workshop.op(self.op), FORMS[self.op], self.name, self.dtype, device, whole)


@dataclass(frozen=True)
class Rows:
    """A control that adversarial rows of one shape must catch."""

    op: str
    dtype: torch.dtype
    shape: Shape
    variant: str = ""

    @property
    def portable(self) -> bool:
        return FORMS[self.op].portable

    def run(self, workshop: Workshop, device: torch.device, whole: bool) -> Outcome:
        op = workshop.op(self.op)
        return rows.adversarial(op, FORMS[self.op], self.dtype, self.shape, self.variant, device, DRAWS)


@dataclass(frozen=True)
class Case:
    """A control that one of a product's own cases must catch. It takes the library's product, so a GPU."""

    op: str
    name: str

    @property
    def portable(self) -> bool:
        return False

    def why_not(self, device: torch.device) -> str | None:
        """Why this GPU cannot run it, or ``None``."""
        op = ops.by_name(self.op)
        return None if op.is_for(device) else f"the kernel is written for {', '.join(op.architectures)}"

    def run(self, workshop: Workshop, device: torch.device, whole: bool) -> Outcome:
        op = workshop.op(self.op)
        return rows.case(op, next(case for case in op.cases if case.name == self.name), device, 1)


@dataclass(frozen=True)
class Control:
    """One wrong kernel.

    Attributes
    ----------
    name : str
        What is wrong with it.
    changes : tuple of Change
    check : Steps, Every, Rows or Case
        The part of the proof that must catch it.
    """

    name: str
    changes: tuple[Change, ...]
    check: Steps | Every | Rows | Case
    of_nan: bool = False
    """Whether only another NaN shows; a CPU's eager writes other ones anyway."""

    @property
    def portable(self) -> bool:
        """Whether it can be caught without a GPU."""
        return self.check.portable and not self.of_nan


@dataclass(frozen=True)
class Verdict:
    """Whether one control was caught; ``caught`` is ``None`` where it could not be run here."""

    name: str
    caught: bool | None
    seen: str


def run(control: Control, device: torch.device) -> Verdict:
    """Compile the wrong kernel beside the right ones and put it through the check."""
    whole = device.type == "cuda"
    if not whole and not control.portable:
        return Verdict(control.name, None, "needs a GPU: a CPU's eager computes other bits there")
    if isinstance(control.check, Case) and (reason := control.check.why_not(device)) is not None:
        return Verdict(control.name, None, reason)
    with Workshop(control.changes) as workshop:
        outcome = control.check.run(workshop, device, whole)
    seen = f"{outcome.differ:,} differ, first: {outcome.first}" if outcome.differ else "nothing differs"
    return Verdict(control.name, outcome.differ > 0, seen)
