"""The continuous watch over verified kernels: which calls are compared again, and what came of it.

A gate compares a signature once and then believes. What changes afterwards, a reference that somebody patches, a GPU
that begins to compute wrongly, is only found by comparing again: with ``recheck_every=N``, one call in N on average.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from samebits.verdict import Entry, Table
from samebits.verify import Observation

if TYPE_CHECKING:
    from samebits.site import Site

NEVER = sys.maxsize
OUTSTANDING_LIMIT = 64
"""Comparisons whose answers are awaited at the same time; while there are so many, no more are begun."""

# Multiples of the golden ratio, taken modulo 1, never fall into step with the number of sites or of sampling steps.
_GOLDEN = 0.6180339887498949


@dataclass(eq=False)
class Watched:
    """A comparison that was made and whose answer is not read yet."""

    site: Site
    table: Table
    entry: Entry
    observation: Observation
    device: torch.device
    elements: int
    """How many output elements are compared."""
    vouched: bool = False
    """Whether it is to confirm a stored verdict about a kernel that answers no calls yet."""


def first_due(number: int, every: int) -> int:
    """Return how many calls a gate's site ``number`` answers before its first re-check, from 0 to ``every - 1``."""
    return int((number + 1) * _GOLDEN % 1.0 * every)


def gap(number: int, every: int) -> int:
    """Return how many calls after a re-check of a site the next one is, ``every`` on average.

    It differs from one to the next (``number`` counts them), so that sites whose calls repeat with the steps of a
    sampler are not always compared at the same step.
    """
    return 1 + int((number + 1) * _GOLDEN % 1.0 * (2 * every - 1))
