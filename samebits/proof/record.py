"""What a proof found: rows, controls, pictures; and the document that is kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits.files import write_whole
from samebits.proof.controls import Verdict
from samebits.proof.probe import Outcome

Row = dict[str, Any]
"""``{op, dtype, step, domain, checked, differ, method}``; also ``first``, what differs first, or ``error``."""

KIND = "prove"
ON_GPU = (
    "Every result was compared as an integer with what eager computed on the same GPU in the same run: a proof for "
    "this GPU, this driver and this build of torch, and for no other."
)
ON_CPU = (
    "There is no GPU here. The kernels' own sources ran on the CPU behind a shim, on a part of each domain, against "
    "the CPU's eager, and only steps that are IEEE arithmetic, whose bits every machine owes. That shows that the "
    "machinery works and that these steps round where they should; it shows nothing about rsqrt, exp, tanh, the order "
    "of ATen's CUDA sums, or NaN bits on a GPU."
)


def row(op: str, dtype: torch.dtype, step: str, domain: str, method: str, found: Outcome) -> Row:
    """A row of the record."""
    made: Row = {
        "op": op,
        "dtype": str(dtype).removeprefix("torch."),
        "step": step,
        "domain": domain,
        "checked": found.checked,
        "differ": found.differ,
        "method": method,
    }
    return made if found.first is None else {**made, "first": found.first}


def failed(op: str, dtype: torch.dtype, step: str, domain: str, method: str, error: Exception) -> Row:
    """A row of what could not be run: it proves nothing and says why."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    return {**row(op, dtype, step, domain, method, Outcome(0, 0)), "error": told}


@dataclass(frozen=True)
class Proof:
    """Everything that one run found.

    Attributes
    ----------
    rows : sequence of Row
    controls : sequence of Verdict
    pictures : sequence of (str, str)
        Title and SVG of each summation tree.
    seconds : float
    on_gpu : bool
    quick : bool
    distinct : int
        Results and rows compared, a step that several ops share counted once.
    notes : sequence of str
        What was seen and is not claimed.
    """

    rows: Sequence[Row]
    controls: Sequence[Verdict]
    pictures: Sequence[tuple[str, str]]
    seconds: float
    on_gpu: bool
    quick: bool
    distinct: int
    notes: Sequence[str] = ()

    @property
    def planted(self) -> int:
        """Controls that could be run here."""
        return sum(verdict.caught is not None for verdict in self.controls)

    @property
    def caught(self) -> int:
        return sum(verdict.caught is True for verdict in self.controls)

    @property
    def good(self) -> bool:
        """Whether nothing differed, nothing failed and every control was caught."""
        clean = all(row["differ"] == 0 and row["checked"] > 0 and "error" not in row for row in self.rows)
        return clean and bool(self.rows) and self.planted > 0 and self.caught == self.planted

    @property
    def shows(self) -> str:
        """What the run shows and what it does not."""
        return ON_GPU if self.on_gpu else ON_CPU

    def document(self, command: str, environment: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
        """The record as it is kept, ready for JSON."""
        return {
            "command": command,
            "environment": dict(environment),
            "source": dict(source),
            "shows": self.shows,
            "quick": self.quick,
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "controls": {
                "caught": self.caught,
                "planted": self.planted,
                "each": [vars(verdict) for verdict in self.controls],
            },
            "ops": list(self.rows),
        }


def write(document: Mapping[str, Any], folder: Path) -> Path:
    """Put ``prove.json`` into a folder; it appears whole or not at all."""
    head = json.dumps({k: v for k, v in document.items() if k != "ops"}, indent=2, allow_nan=False).removesuffix("\n}")
    # One row a line: a file that people compare line by line.
    rows = ",\n".join("    " + json.dumps(row, allow_nan=False) for row in document["ops"])
    text = f'{head},\n  "ops": [\n{rows}\n  ]\n}}\n' if rows else f'{head},\n  "ops": []\n}}\n'
    return put(folder / f"{KIND}.json", text)


def put(path: Path, text: str) -> Path:
    """Write a file in one step: an older one stays whole until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o644)  # evidence is for everybody
    return path
