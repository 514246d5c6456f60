"""Launch accounting: how many kernels one forward launches, and their time by class.

The profiler's CUDA activity is counted: kernels, copies and memsets, exactly what the GPU was asked to do. No
shapes, no stacks: they slow the host down and are not needed for a count.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLASSES = ("gemm", "attention", "ours", "copies", "other")
_GEMM = ("gemm", "cutlass", "nvjet", "xmma", "cublas", "gemv")
_ATTENTION = ("flash", "fmha", "sdpa", "cudnn_generated")
# extern "C" __global__ void [__launch_bounds__(...)] name(
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^\n]*?\)\s+)?(\w+)\s*\(')


def class_of(kernel: str, ours: Iterable[str] = ()) -> str:
    """The class of a kernel, told from its name.

    Parameters
    ----------
    kernel : str
        The name that the profiler reports.
    ours : iterable of str
        Names of the library's own kernels; a kernel whose name is one of them, or starts with one followed by
        something that is no letter, digit or underscore, is ours.
    """
    if any(kernel == name or (kernel.startswith(name) and kernel[len(name)] in "(<. ") for name in ours):
        return "ours"
    name = kernel.lower()
    if any(word in name for word in _ATTENTION):
        return "attention"
    if any(word in name for word in _GEMM):
        return "gemm"
    if "memcpy" in name or "memset" in name:
        return "copies"
    return "other"


@dataclass(frozen=True)
class Launches:
    """What one run launched."""

    counts: dict[str, int] = field(default_factory=dict)
    """Launches by class; every class of ``CLASSES`` is a key."""
    ms: dict[str, float] = field(default_factory=dict)
    """GPU time by class, in milliseconds."""
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Launches and milliseconds by kernel name, the largest time first."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def account(events: Iterable[tuple[str, float]], ours: Iterable[str] = ()) -> Launches:
    """Sort ``(kernel name, microseconds)`` pairs into classes."""
    names = tuple(ours)
    counts, ms = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0.0)
    kernels: dict[str, tuple[int, float]] = {}
    for name, us in events:
        kind = class_of(name, names)
        counts[kind] += 1
        ms[kind] += us / 1e3
        seen, spent = kernels.get(name, (0, 0.0))
        kernels[name] = (seen + 1, spent + us / 1e3)
    by_time = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return Launches(counts, {kind: round(spent, 4) for kind, spent in ms.items()}, by_time)


def record(body: Callable[[], object], ours: Iterable[str] = ()) -> Launches:
    """Run ``body`` once under the profiler and account for everything that the GPU did.

    ``body`` should have run before: a first run compiles, allocates and verifies.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    body()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # The profiler warns about its own event buffers from one version to the next; none of it is about us.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            body()
            torch.cuda.synchronize()
        return account(device_events(profiler.events() or ()), ours)


def device_events(events: Iterable[Any]) -> list[tuple[str, float]]:
    """``(name, microseconds)`` of those profiler events that ran on the GPU.

    Ranges that merely annotate the GPU's timeline carry device time too and would count twice.
    """
    return [
        (event.name, float(event.device_time))
        for event in events
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


def kernels_in(sources: Iterable[Path]) -> tuple[str, ...]:
    """Names of the ``extern "C"`` kernels that CUDA sources define."""
    names: list[str] = []
    for path in sources:
        if path.suffix == ".cu":
            names.extend(_KERNEL.findall(path.read_text(encoding="utf-8")))
    return tuple(dict.fromkeys(names))
