"""One launch for both streams of a block: the text's few rows beside the image's many.

A launch for 128 tokens takes as long as a launch for none. Where both streams of a block are plain enough for it, one
site serves both; each has the two sites of the streams beside it, which take over where the gate's verdict on the
larger one is final, or where the two streams differ in what a call must have in common.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samebits.models._family import Line
from samebits.models._final import Learnt

TOGETHER = "its lines run together with those of the other stream, as {}"
ONE_BY_ONE = "the two streams are served one by one: {}"

Scales = tuple[Tensor | None, Tensor | None]
Vectors = tuple[Tensor, ...]


class Both:
    """A site that serves both streams, or declines so that the two sites of the streams do.

    Parameters
    ----------
    line : Line
        The site.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._learnt = Learnt(line)

    def obstacle(self, device: Any) -> str | None:
        """Why no call on ``device`` would reach a kernel, or ``None``."""
        reason: str | None = self._line.site.obstacle(device)
        return reason

    def __call__(self, x: Tensor, text: Tensor, *args: Any) -> Any:
        """What the op returns for ``args``, of which ``x`` and ``text`` are the streams; ``None``: call the two."""
        if (
            type(x) is not Tensor
            or type(text) is not Tensor
            or self._line.site.obstacle(x.device) is not None
            or self._learnt.why_not(x, text) is not None
        ):
            return None
        return self._learnt(x, text, *args)


def residual_norms(
    site: Both,
    streams: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    branches: tuple[Tensor, Tensor],
    vectors: tuple[Vectors, Vectors],
    eps: tuple[float, float],
    clips: tuple[bool, bool],
    index: Any,
    scales: Scales,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The gated residual and the modulated norm of both streams, or ``None``: call the two sites.

    Parameters
    ----------
    site : Both
        Of the op ``gated_residual_norm_modulate``.
    streams, gates, branches : tuple of Tensor
        Of the image and of the text, as all that follows.
    vectors : tuple of tuple of Tensor
        Shift and scale.
    eps : tuple of float
    clips : tuple of bool
        Whether the stream is clipped, as diffusers does in fp16 at the end of a block.
    index : Tensor or None
        Of the image alone.
    scales : tuple of Tensor or None
        What the norms are quantised with.

    Returns
    -------
    tuple or None
        The image's stream and its norm, which is bytes where it is quantised, and the same two of the text.
    """
    if eps[0] != eps[1] or clips[0] != clips[1] or (scales[0] is None) != (scales[1] is None):
        return None
    (x, text), (shift, scale), (text_shift, text_scale) = streams, *vectors
    image = (x, gates[0], branches[0], scale, shift, eps[0], clips[0], index, scales[0])
    words = (text, gates[1], branches[1], text_scale, text_shift)
    results = site(x, text, *image, *words) if scales[1] is None else site(x, text, *image, *words, scales[1])
    return results  # type: ignore[no-any-return]
