"""The continuous watch over verified kernels: which of their calls are compared again.

A gate compares a signature once and then believes. What changes afterwards, a reference that somebody patches, a GPU
that begins to compute wrongly, is only found by comparing again: with ``recheck_every=N``, one call in N on average.
"""

from __future__ import annotations

import sys

NEVER = sys.maxsize

# Multiples of the golden ratio, taken modulo 1, never fall into step with the number of sites or of sampling steps.
_GOLDEN = 0.6180339887498949


def first_due(number: int, every: int) -> int:
    """Return how many calls a gate's site ``number`` answers before its first re-check, from 0 to ``every - 1``."""
    return int((number + 1) * _GOLDEN % 1.0 * every)


def gap(number: int, every: int) -> int:
    """Return how many calls after a re-check of a site the next one is, ``every`` on average.

    It differs from one to the next (``number`` counts them), so that sites whose calls repeat with the steps of a
    sampler are not always compared at the same step.
    """
    return 1 + int((number + 1) * _GOLDEN % 1.0 * (2 * every - 1))
