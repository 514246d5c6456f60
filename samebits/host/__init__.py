"""The host toolchain: the kernels' own source, compiled for the CPU behind a shim.

For tests and for machines without a GPU: the same arithmetic, thread by thread, at the speed of an interpreter.
"""

from __future__ import annotations

from samebits.host.library import RECORDED_FUNCTIONS, Library, Schedule, recorded, schedule
from samebits.host.toolchain import build, find_compiler, shim_text, unavailable

__all__ = [
    "RECORDED_FUNCTIONS",
    "Library",
    "Schedule",
    "build",
    "find_compiler",
    "recorded",
    "schedule",
    "shim_text",
    "unavailable",
]
