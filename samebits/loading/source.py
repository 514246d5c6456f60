"""What is known of a model before a weight is loaded: its class, its sizes, its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import tiny
from samebits.errors import ModelError, SizeError


@dataclass(frozen=True)
class Source:
    """A model that was found, and how it wants to be asked.

    Attributes
    ----------
    model : str
        What the user wrote.
    pipeline : str
        The class that ``model_index.json`` names.
    folder : Path or None
        Where its files are; ``None`` for an embedded model and for one that is still on the hub.
    hub : bool
        Whether its weights may have to be fetched first.
    online : bool
        Whether the hub answered. If not, only what was fetched before is used.
    multiple, largest : int
        Each side of a picture is a multiple of the one and at most the other, in pixels.
    fewest_steps : int
        How many denoising steps its schedule needs to be defined.
    """

    model: str
    pipeline: str
    folder: Path | None
    hub: bool
    online: bool
    multiple: int
    largest: int
    fewest_steps: int = 1

    @property
    def embedded(self) -> bool:
        """Whether the model is built in code."""
        return self.model in tiny.NAMES

    @property
    def turbo(self) -> bool:
        """Whether its name says that it was distilled to few steps without guidance."""
        return "turbo" in (self.folder.resolve().name if self.folder and not self.hub else self.model).lower()

    @property
    def steps(self) -> int:
        """The number of denoising steps where none is asked for: diffusers' own default, fewer for distilled ones."""
        return 4 if self.embedded else 9 if self.turbo else 50

    @property
    def side(self) -> int:
        """The side of the square picture, in pixels, where no size is asked for."""
        return 256 if self.embedded else 1024

    def check_size(self, width: int, height: int) -> None:
        """Refuse a size that this model cannot paint, naming the nearest that it can.

        Raises
        ------
        SizeError
            A side is not a multiple of :attr:`multiple`, or is outside what the model's positions reach.
        """
        nearest = [self._nearest(side) for side in (width, height)]
        if nearest == [[width], [height]]:
            return
        choices = [f"{nearest[0][end]}x{nearest[1][end]}" for end in (0, -1)]
        choice = " or ".join(dict.fromkeys(choices))
        problem = (
            f"{self.pipeline} paints sides that are multiples of {self.multiple}, from {self.multiple} to "
            f"{self.largest} pixels (width first). The nearest is {choice}."
        )
        raise SizeError(width=width, height=height, problem=problem)

    def check_steps(self, steps: int) -> None:
        """Refuse a number of steps for which the schedule divides zero by zero: every latent would be NaN.

        Raises
        ------
        ModelError
            ``steps`` is below :attr:`fewest_steps`.
        """
        if steps < self.fewest_steps:
            problem = (
                f"its schedule ends at a given noise level and needs at least {self.fewest_steps} steps, not {steps}"
            )
            raise ModelError(model=self.model, problem=problem)

    def _nearest(self, side: int) -> list[int]:
        below = side // self.multiple * self.multiple
        near = [below] if below == side else [below, below + self.multiple]
        return sorted({min(max(value, self.multiple), self.largest) for value in near})

    def guidance(self, scale: float | None, negative: str | None) -> dict[str, Any]:
        """Return the arguments of the pipeline's call that set classifier-free guidance.

        Parameters
        ----------
        scale
            How strongly; ``None`` is what diffusers does by default: no guidance for Qwen-Image without a negative
            prompt and 4.0 with one; 5.0 for Z-Image, and 0.0 for a Turbo, which was distilled to do without.
        negative
            What the picture should not show.

        Raises
        ------
        ModelError
            A negative prompt together with a scale at which the pipeline would ignore it.
        """
        qwen = self.pipeline == "QwenImagePipeline"
        off = 1.0 if qwen else 0.0
        if scale is None:
            wanted = negative is not None or not (qwen or self.turbo)
            scale = off if not wanted else 4.0 if qwen else 5.0
        if scale <= off and negative is not None:
            problem = (
                f"a negative prompt has no effect with guidance {scale:g}: {self.pipeline} needs more than {off:g}"
            )
            raise ModelError(model=self.model, problem=problem)
        if qwen:
            # diffusers ignores the scale without a negative prompt; a single space is how it spells an empty one.
            empty = " " if scale > off else None
            return {"true_cfg_scale": scale, "negative_prompt": empty if negative is None else negative}
        return {"guidance_scale": scale, "negative_prompt": negative}
