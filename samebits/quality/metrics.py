"""How near two pictures are: SSIM, PSNR and LPIPS by torchmetrics, FLIP by its authors' own package."""

from __future__ import annotations

import hashlib
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samebits.quality.record import Figures

if TYPE_CHECKING:
    from PIL.Image import Image

LPIPS_BACKBONE = "alexnet-owt-7be5be79.pth"
"""The file that torchvision would download for LPIPS' backbone."""
SMALLEST_SIDE = 8
NEEDS = "samebits quality needs torchmetrics and flip-evaluator: pip install 'samebits[quality]'"


def missing_packages() -> str | None:
    """Say what is not installed, or return ``None``."""
    return None if find_spec("torchmetrics") and find_spec("flip_evaluator") else NEEDS


def lpips_weights() -> Path | None:
    """The weights of LPIPS' backbone if they are on this disk: nothing is downloaded for a figure."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / LPIPS_BACKBONE
    return path if path.is_file() and find_spec("torchvision") else None


def pixels_sha256(image: Image) -> str:
    """SHA-256 of the raw pixels, as ``samebits generate`` prints it."""
    return hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()


def figures(measured: Image, exact: Image) -> tuple[Figures, Any]:
    """Compare two pictures of one size.

    Returns
    -------
    Figures
    numpy.ndarray
        FLIP's error map in its own colours, ``(height, width, 3)``, 0 to 1.

    Raises
    ------
    ValueError
        The sizes differ, or a side is shorter than SSIM's window reaches.
    """
    import flip_evaluator
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    if measured.size != exact.size:
        raise ValueError(f"expected two pictures of one size, got {measured.size} and {exact.size}.")
    if min(measured.size) < SMALLEST_SIDE:
        raise ValueError(f"expected sides of at least {SMALLEST_SIDE} pixels, got {measured.size}.")
    ours, theirs = _tensor(measured), _tensor(exact)
    similarity: Any = structural_similarity_index_measure(ours, theirs, data_range=1.0)
    ssim, psnr = float(similarity), float(peak_signal_noise_ratio(ours, theirs, data_range=1.0))
    maps, flip, _ = flip_evaluator.evaluate(_array(exact), _array(measured), "LDR")
    return Figures(
        ssim=max(-1.0, min(1.0, ssim)),
        psnr=None if math.isinf(psnr) else psnr,
        flip=max(0.0, min(1.0, float(flip))),
        lpips=_lpips(ours, theirs),
    ), maps


def _lpips(ours: torch.Tensor, theirs: torch.Tensor) -> float | None:
    if lpips_weights() is None:
        return None
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    metric = LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True)
    with torch.no_grad():
        return float(metric(ours, theirs))


def _array(image: Image) -> Any:
    import numpy as np

    return np.asarray(image.convert("RGB"), dtype=np.float32) / 255.0


def _tensor(image: Image) -> torch.Tensor:
    """``(1, 3, height, width)`` fp32, 0 to 1."""
    return torch.from_numpy(_array(image)).permute(2, 0, 1)[None].contiguous()
