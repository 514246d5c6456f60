"""The record of a comparison of pictures: what was painted, on what, and how near the two ways came to each other.

One JSON file. It is data of the user's own machine and decides what runs there, so it is read like any stored file: a
schema, a size, and nothing believed that does not fit.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from samebits.files import write_whole

FORMAT: Final = "samebits quality record"
VERSION: Final = 1
MAX_BYTES = 16 << 20

MAX_PAIRS = 100_000
MAX_PROMPT_CHARACTERS = 32_768

Text = Annotated[str, Meta(max_length=4096)]
Share = Annotated[float, Meta(ge=-1.0, le=1.0)]


class Unbelievable(ValueError):
    """A file that is no quality record. The message completes "the file ..."."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How near two pictures are.

    Attributes
    ----------
    ssim : float
        Structural similarity, 1 for equal pictures.
    psnr : float or None
        Peak signal to noise ratio in dB; ``None`` where the pictures are identical and it would be infinite.
    flip : float
        Mean error of FLIP, 0 for equal pictures.
    lpips : float or None
        Learned perceptual distance; ``None`` where its weights are not on this disk.
    """

    ssim: Share
    psnr: Annotated[float, Meta(ge=0.0, le=1000.0)] | None
    flip: Annotated[float, Meta(ge=0.0, le=1.0)]
    lpips: Annotated[float, Meta(ge=0.0)] | None = None

    @property
    def db(self) -> float:
        """The PSNR as a number to compare with."""
        return math.inf if self.psnr is None else self.psnr


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt and seed, painted both ways."""

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
    seed: Annotated[int, Meta(ge=0)]
    exact_sha256: Text
    measured_sha256: Text
    figures: Figures

    @property
    def identical(self) -> bool:
        """Whether both ways gave the same pixels."""
        return self.exact_sha256 == self.measured_sha256


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How near every picture has to be."""

    ssim: Share = 0.95
    psnr: Annotated[float, Meta(ge=0.0, le=1000.0)] = 29.0


class QualityRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured, and everything that it holds for.

    Attributes
    ----------
    model : str
        As the user named it.
    model_hash : str
        Of the denoiser's weights, see :func:`samebits.quality.weights.model_hash`.
    quantization : str
        The scheme of the weights, for example ``modelopt FP8``.
    rounding : str
        How the kernels add a late bias: ``eager`` or ``fma``.
    dtype : str
        Of the activations, for example ``bfloat16``.
    capability : list of int or None
        Of the GPU; ``None`` on a CPU.
    environment : dict
        The whole fingerprint.
    sources : dict
        Source hash by op, of the ops that moved the bits.
    pairs : list of Pair
    """

    format: Literal["samebits quality record"] = FORMAT
    version: Literal[1] = VERSION
    model: Text
    model_hash: Annotated[str, Meta(min_length=16, max_length=128)]
    quantization: Text
    rounding: Literal["eager", "fma"]
    dtype: Text
    capability: Annotated[list[int], Meta(min_length=2, max_length=2)] | None
    environment: dict[str, Any]
    sources: dict[str, str]
    steps: Annotated[int, Meta(ge=1)]
    size: Annotated[list[int], Meta(min_length=2, max_length=2)]
    pairs: Annotated[list[Pair], Meta(min_length=1, max_length=MAX_PAIRS)]
    command: Text = ""
    commit: Text = ""
    when: Text = ""

    @property
    def worst(self) -> Figures:
        """The worst of each figure over all pictures: a threshold holds for every one of them."""
        figures = [pair.figures for pair in self.pairs]
        psnr = min(each.db for each in figures)
        distances = [each.lpips for each in figures if each.lpips is not None]
        return Figures(
            ssim=min(each.ssim for each in figures),
            psnr=None if math.isinf(psnr) else psnr,
            flip=max(each.flip for each in figures),
            lpips=max(distances) if len(distances) == len(figures) else None,
        )

    @property
    def mean(self) -> Figures:
        """The mean of each figure; that of the PSNR over the pictures that differ."""
        figures = [pair.figures for pair in self.pairs]
        finite = [each.psnr for each in figures if each.psnr is not None]
        distances = [each.lpips for each in figures if each.lpips is not None]
        return Figures(
            ssim=fmean(each.ssim for each in figures),
            psnr=fmean(finite) if finite else None,
            flip=fmean(each.flip for each in figures),
            lpips=fmean(distances) if len(distances) == len(figures) else None,
        )

    def why_not_within(self, thresholds: Thresholds) -> str | None:
        """Say which picture is not near enough, or return ``None``."""
        for pair in self.pairs:
            figures = pair.figures
            if not figures.ssim >= thresholds.ssim:
                return f"SSIM {figures.ssim:.4f} is below {thresholds.ssim:g} (seed {pair.seed}, {pair.prompt!r})"
            if not figures.db >= thresholds.psnr:
                return f"PSNR {figures.db:.2f} dB is below {thresholds.psnr:g} dB (seed {pair.seed}, {pair.prompt!r})"
        return None

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON-able dictionary, with ``worst`` and ``mean`` beside what is stored."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return {**document, "worst": msgspec.to_builtins(self.worst), "mean": msgspec.to_builtins(self.mean)}


_decoder = msgspec.json.Decoder(QualityRecord)


def read_record(path: Path) -> QualityRecord:
    """Read a record.

    Raises
    ------
    Unbelievable
        The file cannot be read, is no plain file, is too large, or is no quality record of this version.
    FileNotFoundError
        There is none.
    """
    try:
        # Neither through a link nor, where somebody put a pipe, for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Unbelievable("cannot be read (it is no plain file)")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise Unbelievable(f"cannot be read ({problem})") from error
    if len(data) > MAX_BYTES:
        raise Unbelievable(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Unbelievable(f"is no quality record: {error}") from error


def encoded(record: QualityRecord) -> bytes:
    """The bytes of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def write_record(record: QualityRecord, path: Path) -> None:
    """Write a record whole or not at all, readable by its owner alone.

    Raises
    ------
    OSError
        The folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, encoded(record), durable=True)
