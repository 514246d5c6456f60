"""The proof of a whole picture: the same pipeline, eager twice and fused once, compared after every step.

Eager runs twice because the comparison is worth nothing where eager does not repeat itself: then it is void, and said
to be. What is compared are the latents after every denoising step and the final picture's pixels; both are named by
their SHA-256, and where they differ, the first element, both values and their distance are named too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from samebits import bits

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Picture:
    """One run of a pipeline.

    Attributes
    ----------
    image : PIL.Image.Image
        What it painted.
    image_sha256 : str
        SHA-256 of the picture's raw pixels: rows from the top, three bytes a pixel, no header.
    latents : tuple of Tensor
        Contiguous copies on the CPU of the latents after every step, in the pipeline's own shape and dtype.
    latents_sha256 : tuple of str
        SHA-256 of the raw bytes of each.
    seconds : float
        From the call to the picture, with everything in between: text encoder, steps, VAE, hashing.
    """

    image: Any
    image_sha256: str
    latents: tuple[torch.Tensor, ...]
    latents_sha256: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class FirstDifference:
    """The first thing in which two runs differ.

    Attributes
    ----------
    where : str
        ``"latents"``, ``"steps"`` (another number of them) or ``"image"``.
    step : int or None
        After which denoising step, counted from 1; ``None`` for the picture.
    expected, actual : str
        The two SHA-256, eager's first, or the two numbers of steps.
    detail : str
        A sentence: how many elements differ, where first, both values, how far apart.
    """

    where: str
    step: int | None
    expected: str
    actual: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The difference as a JSON-able dictionary."""
        return dict(self.__dict__)

    def __str__(self) -> str:
        place = "the final picture" if self.step is None else f"the latents after step {self.step}"
        return f"{place}: {self.detail}" if self.where != "steps" else self.detail


@dataclass(frozen=True)
class Proof:
    """What the comparison says.

    Attributes
    ----------
    equal : bool
        Every latent and the picture are the same bits. Never true when void.
    void : bool
        Eager differs from itself, so nothing follows from comparing anything with it.
    steps : int
        After how many steps the latents were compared.
    first_difference : FirstDifference or None
        Between eager and fused; between eager and eager when void.
    """

    equal: bool
    void: bool
    steps: int
    first_difference: FirstDifference | None

    def to_json(self) -> dict[str, Any]:
        """The proof as a JSON-able dictionary."""
        first = self.first_difference
        return {
            "equal": self.equal,
            "void": self.void,
            "steps": self.steps,
            "first_difference": None if first is None else first.to_json(),
        }

    def __str__(self) -> str:
        if self.void:
            return (
                f"Void: eager does not repeat itself on this machine, so nothing can be compared with it. First in "
                f"{self.first_difference}."
            )
        if self.first_difference is not None:
            return f"DIFFERENT from eager. First in {self.first_difference}."
        return f"Equal: the latents after each of {self.steps} steps and the picture have eager's bits."


def paint(pipeline: DiffusionPipeline, arguments: Mapping[str, Any], seed: int) -> Picture:
    """Run a pipeline once and keep the latents after every step.

    Parameters
    ----------
    arguments
        For the pipeline's call, without ``generator``, ``callback_on_step_end`` and ``output_type``.
    seed
        Of the initial noise, which is drawn on the CPU: the same on every device.
    """
    kept: list[torch.Tensor] = []

    def keep(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        kept.append(tensors["latents"].detach().to("cpu", copy=True).contiguous())
        return {}

    start = time.perf_counter()
    generator = torch.Generator("cpu").manual_seed(seed)
    image = pipeline(**arguments, generator=generator, callback_on_step_end=keep).images[0]
    hashes = tuple(sha256(latents) for latents in kept)
    pixels = hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()
    return Picture(image, pixels, tuple(kept), hashes, time.perf_counter() - start)


def sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's raw bytes in the order of its indices, the last one fastest."""
    plain = tensor.detach().cpu().contiguous()
    return hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def first_difference(actual: Picture, expected: Picture) -> FirstDifference | None:
    """Return the first thing in which two runs differ, in the order in which a run makes them; ``None`` if nothing."""
    for number, (ours, theirs) in enumerate(zip(actual.latents, expected.latents, strict=False)):
        found = bits.compare(ours, theirs)
        if found is not None:
            hashes = expected.latents_sha256[number], actual.latents_sha256[number]
            return FirstDifference("latents", number + 1, *hashes, str(found))
    counts = len(expected.latents), len(actual.latents)
    if counts[0] != counts[1]:
        detail = f"{counts[1]} denoising steps instead of {counts[0]}"
        return FirstDifference("steps", min(counts) + 1, str(counts[0]), str(counts[1]), detail)
    if (actual.image_sha256, actual.image.size) != (expected.image_sha256, expected.image.size):
        ours, theirs = (_pixels(picture) for picture in (actual, expected))
        detail = str(bits.compare(ours, theirs))
        return FirstDifference("image", None, expected.image_sha256, actual.image_sha256, detail)
    return None


def prove(eager: Picture, eager_again: Picture, fused: Picture) -> Proof:
    """Compare a fused run with eager, after comparing eager with itself."""
    steps = len(eager.latents)
    unsteady = first_difference(eager_again, eager)
    if unsteady is not None:
        return Proof(False, True, steps, unsteady)
    found = first_difference(fused, eager)
    return Proof(found is None, False, steps, found)


def _pixels(picture: Picture) -> torch.Tensor:
    """The picture as a tensor (height, width, 3) of uint8."""
    width, height = picture.image.size
    flat = torch.frombuffer(bytearray(picture.image.convert("RGB").tobytes()), dtype=torch.uint8)
    return flat.view(height, width, 3)
