"""One self-contained HTML page of a proof: every step, every control, a picture of each summation tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = 'no page, because jinja2 is missing; pip install "samebits[prove]" brings it'
TEMPLATE = Path(__file__).with_name("page.html.j2")


def available() -> bool:
    return find_spec("jinja2") is not None


def render(document: Mapping[str, Any], pictures: Sequence[tuple[str, str]]) -> str:
    """The page of a record.

    Parameters
    ----------
    document : mapping
        What :meth:`samebits.proof.record.Proof.document` returned.
    pictures : sequence of (str, str)
        Title and SVG of each summation tree; the SVG is put into the page as it is.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["thousands"] = "{:,}".format
    environment.tests["wrong"] = wrong
    rows = document["ops"]
    names = list(dict.fromkeys(row["op"] for row in rows))
    groups = [(name, [row for row in rows if row["op"] == name]) for name in names]
    gpu = (document["environment"].get("gpu") or {}).get("name")
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(document=document, groups=groups, pictures=pictures, gpu=gpu)


def wrong(row: Mapping[str, Any]) -> bool:
    """Whether a row proves nothing."""
    return bool(row["differ"]) or not row["checked"] or "error" in row
