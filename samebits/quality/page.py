"""What a person looks at: a contact sheet of all pairs, and one self-contained page with the figures beside them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from samebits.quality.record import QualityRecord, Thresholds

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("exact", "measured", "difference x{gain}", "FLIP")
GAIN = 16
"""The difference is shown this many times as large, around grey."""
THUMBNAIL = 256
MOST_PICTURES = 64
"""Pairs on the sheet and on the page, the worst first; the record holds all of them."""


@dataclass
class Shown:
    """One pair as pictures."""

    caption: str
    exact: Image
    measured: Image
    flip: Any
    badness: tuple[float, float] = (0.0, 0.0)
    """What the worst pairs have least of: SSIM, then PSNR."""


def sheet(pairs: Sequence[Shown]) -> Image:
    """A row for each pair: both pictures, their difference and FLIP's map."""
    from PIL import Image, ImageDraw

    line, cell = 18, THUMBNAIL
    canvas = Image.new("RGB", (len(COLUMNS) * (cell + 8) + 8, line + len(pairs) * (cell + line + 8)), "white")
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(COLUMNS):
        draw.text((8 + column * (cell + 8), 4), title.format(gain=GAIN), fill="black")
    for row, pair in enumerate(pairs):
        top = line + row * (cell + line + 8)
        for column, picture in enumerate(panels(pair)):
            small = picture.copy()
            small.thumbnail((cell, cell))
            canvas.paste(small, (8 + column * (cell + 8), top))
        draw.text((8, top + cell + 2), pair.caption, fill="black")
    return canvas


def panels(pair: Shown) -> tuple[Image, Image, Image, Image]:
    """The four pictures of one row."""
    import numpy as np
    from PIL import Image

    one, other = (np.asarray(picture.convert("RGB"), dtype=np.int32) for picture in (pair.exact, pair.measured))
    difference = Image.fromarray(np.clip((other - one) * GAIN + 128, 0, 255).astype(np.uint8))
    flip = Image.fromarray((np.clip(pair.flip, 0, 1) * 255).astype(np.uint8))
    return pair.exact, pair.measured, difference, flip


def page(record: QualityRecord, thresholds: Thresholds, pairs: Sequence[Shown]) -> str:
    """The page as HTML, with everything inside it.

    Raises
    ------
    ModuleNotFoundError
        jinja2 is not installed.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("samebits.quality").joinpath("page.html").read_text(encoding="utf-8"))
    rows = [
        {"caption": pair.caption, "pictures": [_embedded(picture) for picture in panels(pair)]}
        for pair in pairs[:MOST_PICTURES]
    ]
    return template.render(
        record=record,
        worst=record.worst,
        mean=record.mean,
        thresholds=thresholds,
        shortfall=record.why_not_within(thresholds),
        columns=[title.format(gain=GAIN) for title in COLUMNS],
        rows=rows,
        gpu=(record.environment.get("gpu") or {}).get("name") or "CPU",
        torch=(record.environment.get("torch") or {}).get("version", ""),
    )


def _embedded(picture: Image) -> str:
    small = picture.copy()
    small.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    memory = io.BytesIO()
    small.save(memory, "PNG")
    return "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode()
