"""How far two runs' outputs lie apart, where bits may move: relative error, PSNR, and SSIM of latents as pictures.

SSIM is that of Wang et al. (2004) with the choices of torchmetrics, so that figures of latents and of pictures go
together: a Gaussian window of 11 x 11 with a standard deviation of 1.5, K1 = 0.01, K2 = 0.03, pictures continued by
reflection. Everything is computed in fp64 on the CPU.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW = 11
_SIGMA = 1.5
_K1, _K2 = 0.01, 0.03


def relative_error(found: Tensor, expected: Tensor) -> float:
    """``|found - expected| / |expected|``, both norms over all elements; 0.0 for two zeros."""
    difference, norm = float((_wide(found) - _wide(expected)).norm()), float(_wide(expected).norm())
    return 0.0 if difference == 0 else difference / norm if norm else math.inf


def psnr_db(found: Tensor, expected: Tensor) -> float:
    """Peak signal to noise ratio in decibels; the peak is the range of ``expected``. Infinite where nothing differs."""
    squares = float((_wide(found) - _wide(expected)).square().mean())
    return math.inf if squares == 0 else 10 * math.log10(_range(expected) ** 2 / squares) if _range(expected) else 0.0


def ssim(found: Tensor, expected: Tensor) -> float | None:
    """Structural similarity, averaged over pictures, channels and windows.

    Parameters
    ----------
    found, expected : Tensor
        ``(B, C, H, W)``. The range that the constants refer to is that of ``expected``.

    Returns
    -------
    float or None
        1.0 for equal pictures; ``None`` where a picture is too small to be continued by reflection: a side below 6.
    """
    rim = _WINDOW // 2
    if min(expected.shape[-2:]) <= rim:
        return None
    a, b = (
        F.pad(_wide(picture).reshape(-1, 1, *picture.shape[-2:]), (rim, rim, rim, rim), mode="reflect")
        for picture in (found, expected)
    )
    offsets = torch.arange(_WINDOW, dtype=torch.float64) - rim
    line = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def mean(picture: Tensor) -> Tensor:
        return F.conv2d(picture, window[None, None])

    mean_a, mean_b = mean(a), mean(b)
    variances = mean(a * a) - mean_a**2 + mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = (_K1 * _range(expected)) ** 2, (_K2 * _range(expected)) ** 2
    above = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    below = (mean_a**2 + mean_b**2 + c1) * (variances + c2)
    # Two pictures of one and the same colour, which has no range, are alike.
    return float(torch.where(below == 0, 1.0, above / below).mean())


def qwen_image_pictures(latents: Tensor) -> Tensor:
    """Qwen-Image's latents as pictures: ``(B, S, 4 * C)``, a token for each 2 x 2, square, to ``(B, C, H, W)``."""
    batch, tokens, width = latents.shape
    side = math.isqrt(tokens)
    if side * side != tokens or width % 4:
        raise ValueError(f"expected the latents of square pictures in patches of 2 x 2, got {tuple(latents.shape)}")
    patches = latents.view(batch, side, side, width // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, width // 4, 2 * side, 2 * side)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _range(tensor: Tensor) -> float:
    return float(_wide(tensor).max() - _wide(tensor).min())
