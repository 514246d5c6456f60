"""Sites beside which another fused way lies: they are left for good where the gate's verdict is final.

Where a site's reference runs, that is right and slow. A forward that could call two smaller sites instead should not
go on asking the larger one once the gate has said that it will never open for these tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samebits.models._family import Line

FINAL = ("refused", "unsupported", "failed")
"""How a reason begins that no later call changes."""


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
        self._counted: dict[str, int] = {}

    def why_not(self, x: Tensor, text: Tensor | None) -> str | None:
        """Why the site is not asked about tensors of these shapes any more, or ``None``."""
        return self._known.get(_shapes(x, text)) if self._known else None

    def __call__(self, x: Tensor, text: Tensor | None, *args: Any) -> Any:
        """What the site returns for ``args``; a final verdict is remembered for the shapes of ``x`` and ``text``."""
        site = self._line.site
        counters = site.counters
        eager = counters.eager
        result = site(*args)
        if counters.eager != eager:
            self._look(x, text, counters.reasons)
        return result

    def _look(self, x: Tensor, text: Tensor | None, reasons: Any) -> None:
        final = {reason: calls for reason, calls in list(reasons.items()) if reason.startswith(FINAL)}
        told = next((reason for reason, calls in final.items() if calls > self._counted.get(reason, 0)), None)
        self._counted = final
        if told is not None:
            self._known[_shapes(x, text)] = told


def _shapes(x: Tensor, text: Tensor | None) -> tuple[Any, ...]:
    return x.dtype, x.device, tuple(x.shape), x.stride(), None if text is None else (tuple(text.shape), text.stride())
