"""The record of ``samebits prove``, read back and summed up for the documents. It lies beside the other evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.errors import EvidenceError
from samebits.ops import Op

KIND = "prove"
HEADS = ("op", "dtype", "steps on every input", "steps sampled", "sums by their trees", "random rows", "differ")
_OTHERS = ("exhaustive", "sampled", "adversarial", "random")
COLUMNS: Mapping[str, type] = {
    "op": str,
    "dtype": str,
    "step": str,
    "domain": str,
    "checked": int,
    "differ": int,
    "method": str,
}
_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "command": str,
    "environment": dict,
    "source": dict,
    "shows": str,
    "quick": bool,
    "seconds": (int, float),
    "notes": list,
    "controls": dict,
    "ops": list,
}


def read(path: Path) -> dict[str, Any]:
    """Read and validate ``prove.json``.

    Raises
    ------
    EvidenceError
        It is not what the tool writes.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EvidenceError(kind=KIND, where=str(path), problem=f"not JSON: {error}") from error
    if not isinstance(data, dict) or set(data) != set(_KEYS):
        raise EvidenceError(kind=KIND, where=str(path), problem=f"the keys must be exactly {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(data[key], kind):
            raise EvidenceError(kind=KIND, where=str(path), problem=f"{key!r} is a {type(data[key]).__name__}")
    controls = data["controls"]
    counts = [controls.get(name) for name in ("caught", "planted")]
    if any(type(count) is not int for count in counts) or not 0 <= counts[0] <= counts[1]:
        raise EvidenceError(kind=KIND, where=str(path), problem=f"controls must say caught of planted, got {counts}")
    for number, row in enumerate(data["ops"]):
        problem = _problem(row)
        if problem is not None:
            raise EvidenceError(kind=KIND, where=f"{path}, row {number}", problem=problem)
    return data


def _problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "every row must be an object"
    for name, kind in COLUMNS.items():
        if type(row.get(name)) is not kind or row[name] == "" or (kind is int and row[name] < 0):
            return f"column {name!r} must be {'a count' if kind is int else 'a text'}, got {row.get(name)!r}"
    return None


def table_lines(data: Mapping[str, Any], ops: Sequence[Op]) -> list[tuple[str, ...]]:
    """A line under ``HEADS`` for each op and element type whose source is still the one that was proved."""
    proved = data["source"].get("ops", {})
    lines: list[tuple[str, ...]] = []
    for op in ops:
        rows = [row for row in data["ops"] if row["op"] == op.name]
        if not rows or proved.get(op.name) != op.source_hash:
            continue
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            mine = [row for row in rows if row["dtype"] == dtype]
            every = sum(row["method"] == "exhaustive" for row in mine)
            random = sum(row["checked"] for row in mine if row["method"] == "random")
            wrong = [row for row in mine if row["differ"] or not row["checked"] or "error" in row]
            sampled = sum(row["method"] == "sampled" for row in mine)
            trees = sum(row["checked"] for row in mine if row["method"] not in _OTHERS)
            told = "none" if not wrong else "; ".join(f"{row['step']}, {row['domain']}" for row in wrong)
            lines.append((f"`{op.name}`", dtype, f"{every}", f"{sampled}", f"{trees:,}", f"{random:,}", told))
    return lines


def sampled_lines(data: Mapping[str, Any], ops: Sequence[Op]) -> list[tuple[str, ...]]:
    """Every step that was only sampled: its name, element types, domain and the number of results compared."""
    names = {op.name for op in ops}
    found: dict[tuple[str, str], tuple[list[str], int]] = {}
    for row in data["ops"]:
        if row["method"] != "sampled" or row["op"] not in names:
            continue
        dtypes, most = found.setdefault((row["step"], row["domain"]), ([], 0))
        if row["dtype"] not in dtypes:
            dtypes.append(row["dtype"])
        found[row["step"], row["domain"]] = (dtypes, max(most, row["checked"]))
    return [(step, ", ".join(dtypes), domain, f"{most:,}") for (step, domain), (dtypes, most) in found.items()]
