"""What a report says about the graphs of a denoiser, and the sentences in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTOCAST = "autocast is on"
BUSY = "another thread is using the graphs of this model"
CAPTURED = "captured at this call"
CAPTURING = "the caller captures a CUDA graph itself"
CAPTURING_ELSEWHERE = "another capture is in progress"
CHECKED = "compared with a replay, because an argument or a weight changed for the first time"
CLOSED = "the graphs are removed"
FIRST = "first call with such arguments"
GRADIENTS = "gradients are on"
NO_MEMORY = "out of memory, will be tried again"
NO_ROOM = "its graph made room for others, will be captured again"
OTHER_REASONS = "other reasons"
UNSETTLED = "ops are still being compared for such arguments"


@dataclass(frozen=True)
class GraphRow:
    """What happened to the calls of one denoiser. ``str()`` is a paragraph of a report.

    Attributes
    ----------
    model : str
        Which denoiser.
    replayed, plain : int
        Calls that a graph answered, and all others.
    captured : int
        How many graphs were captured so far.
    graphs, bytes : int
        How many there are now, and the memory they hold.
    reasons : mapping
        Why calls were plain: sentence to number of calls.
    """

    model: str
    replayed: int
    plain: int
    captured: int
    graphs: int
    bytes: int
    reasons: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON-able dictionary."""
        return {**vars(self), "reasons": dict(self.reasons)}

    def __str__(self) -> str:
        kinds = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        held = f"; {kinds} in {self.bytes / 2**20:,.0f} MiB" if self.graphs else ""
        lines = [f"cuda graph of {self.model}: replayed {self.replayed:,}, plain {self.plain:,}{held}"]
        return "\n".join([*lines, *(f"  {reason}: {calls:,}" for reason, calls in self.reasons.items())])
