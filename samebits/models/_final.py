"""Sites beside which another fused way lies: they are left for good where the gate's verdict is final.

Where a site's reference runs, that is right and slow. A forward that could call two smaller sites instead should not
go on asking the larger one once the gate has said that it will never open for these tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from samebits.models._family import Line

LIMIT = 512
"""So many shapes are remembered at most: a program whose shapes never repeat must not fill memory."""

_deterministic = torch.are_deterministic_algorithms_enabled


class Learnt:
    """A site, and the shapes for which its reference will always run.

    Parameters
    ----------
    line : Line
        The site.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._known: dict[tuple[Any, ...], str] = {}
        """Shapes whose verdict is final and against us, with the gate's words for it."""

    def why_not(self, x: Tensor, text: Tensor | None, about: Hashable = None) -> str | None:
        """Why the site is not asked about tensors of these shapes any more, or ``None``."""
        return self._known.get(_shapes(x, text, about)) if self._known else None

    def __call__(self, x: Tensor, text: Tensor | None, *args: Any, about: Hashable = None) -> Any:
        """What the site returns for ``args``.

        A final verdict is remembered for the shapes of ``x`` and ``text`` and for what else the verdict is ``about``:
        flags of a library, which may be set back.
        """
        site = self._line.site
        eager = site.counters.eager
        result = site(*args)
        if site.counters.eager != eager:  # this thread's call or another's
            told = site.final(args)
            if told is not None:
                remember(self._known, _shapes(x, text, about), told)
        return result


def remember(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Keep ``value``; where there are too many, all others are forgotten and asked for again."""
    if len(known) >= LIMIT:
        known.clear()
    known[key] = value


def _shapes(x: Tensor, text: Tensor | None, about: Hashable) -> tuple[Any, ...]:
    words = None if text is None else (text.shape, text.stride())
    return x.dtype, x.device, x.shape, x.stride(), words, about, _deterministic()
