"""samebits: diffusion transformers that run faster and give the same bits.

The public names are resolved lazily: importing this package touches neither CUDA nor a compiler.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.apply import Handle, apply
    from samebits.environment import fingerprint
    from samebits.warming import warm

__version__ = "0.1.0"

_HOME = {
    "apply": "samebits.apply",
    "Handle": "samebits.apply",
    "fingerprint": "samebits.environment",
    "warm": "samebits.warming",
}

__all__ = ["Handle", "__version__", "apply", "fingerprint", "warm"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'samebits' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Face(ModuleType):
    """Keeps ``samebits.apply`` the function: importing the file of that name would put the file in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
