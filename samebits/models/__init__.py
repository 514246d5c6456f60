"""The families: which op stands for which lines of which exact diffusers class. One file and one name each."""

from __future__ import annotations

from samebits.models._family import Family, unwrapped
from samebits.models.qwen_image import FAMILY as QWEN_IMAGE
from samebits.models.z_image import FAMILY as Z_IMAGE

FAMILIES: tuple[Family, ...] = (QWEN_IMAGE, Z_IMAGE)

__all__ = ["FAMILIES", "Family", "family_of", "unwrapped"]


def family_of(module: object) -> Family | None:
    """The family that a module is the denoiser of, or ``None``. Looks inside ``torch.compile(module)``."""
    module = unwrapped(module)
    return next((family for family in FAMILIES if isinstance(module, family.model)), None)
