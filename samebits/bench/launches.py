"""Launch accounting: how many kernels one forward launches, and their time by class.

The profiler's CUDA activity is counted: kernels, copies and memsets, exactly what the GPU was asked to do. No
shapes, no stacks: they slow the host down and are not needed for a count.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebits.ops._op import Op

CLASSES = ("gemm", "attention", "ours", "copies", "other")
_GEMM = ("gemm", "cutlass", "nvjet", "xmma", "cublas", "gemv", "triton_tem_")
_ATTENTION = ("flash", "fmha", "sdpa", "cudnn_generated")
# extern "C" __global__ void [__cluster_dims__(...)] [__launch_bounds__(...)] name(
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__(?:cluster_dims|launch_bounds)__\s*\([^\n]*?\)\s+)*(\w+)\s*\('
)
NOBODYS: Mapping[str, str] = {}
"""No kernels of the library's own."""


def class_of(kernel: str, own: Mapping[str, str] = NOBODYS) -> str:
    """The class of a kernel, told from its name.

    Parameters
    ----------
    kernel : str
        The name that the profiler reports.
    own : mapping of str to str
        The library's own kernels and their classes, see :func:`kernels_of`; a kernel whose name is one of them, or
        starts with one followed by something that is no letter, digit or underscore, is of that class.
    """
    for name, kind in own.items():
        if kernel == name or (kernel.startswith(name) and kernel[len(name)] in "(<. "):
            return kind
    name = kernel.lower()
    if name.startswith("triton_") and not name.startswith("triton_tem_"):
        # Inductor names a fused kernel after the eager operations in it and beside it, GEMMs and attention included;
        # only what it makes from a template (triton_tem_) is one.
        return "other"
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


def account(events: Iterable[tuple[str, float]], own: Mapping[str, str] = NOBODYS, runs: int = 1) -> Launches:
    """Sort ``(kernel name, microseconds)`` pairs of ``runs`` equal runs into classes; counts and times are of one."""
    counts, ms = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0.0)
    kernels: dict[str, tuple[int, float]] = {}
    for name, us in events:
        kind = class_of(name, own)
        counts[kind] += 1
        ms[kind] += us / 1e3
        seen, spent = kernels.get(name, (0, 0.0))
        kernels[name] = (seen + 1, spent + us / 1e3)
    by_time = {
        name: (round(seen / runs), round(spent / runs, 6))
        for name, (seen, spent) in sorted(kernels.items(), key=lambda item: -item[1][1])
    }
    counted = {kind: round(count / runs) for kind, count in counts.items()}
    return Launches(counted, {kind: round(spent / runs, 4) for kind, spent in ms.items()}, by_time)


def owned(events: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Give the memsets right before a GEMM to the GEMM library, which zeroes its workspace so.

    Parameters
    ----------
    events : sequence of (kernel name, microseconds)
        In the order in which the GPU ran them.

    Returns
    -------
    list of (kernel name, microseconds)
        The same, with those memsets renamed so that they count as ``gemm``.
    """
    renamed = list(events)
    for index in range(len(renamed) - 2, -1, -1):
        name, us = renamed[index]
        if "memset" in name.lower() and class_of(renamed[index + 1][0]) == "gemm":
            renamed[index] = (f"{name} of the GEMM library", us)
    return renamed


def record(body: Callable[[], object], own: Mapping[str, str] = NOBODYS) -> Launches:
    """Run ``body`` once under the profiler and account for everything that the GPU did.

    ``body`` should have run before: a first run compiles, allocates and verifies.
    """
    return account(events_of(body), own)


def events_of(body: Callable[[], object], runs: int = 1) -> list[tuple[str, float]]:
    """Run ``body`` under the profiler ``runs`` times, after one run outside; what the GPU ran, in its order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    keep_cupti()
    body()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # The profiler warns about its own event buffers from one version to the next; none of it is about us.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(runs):
                body()
            torch.cuda.synchronize()
        return device_events(profiler.events() or ())


def keep_cupti() -> None:
    """Have the profiler leave its hooks into CUDA in place between two sessions, unless the user decided otherwise.

    Taking them out and putting them back is what sessions in quick succession, and graphs captured before, have
    hung or crashed on.
    """
    os.environ.setdefault("TEARDOWN_CUPTI", "0")


def device_events(events: Iterable[Any]) -> list[tuple[str, float]]:
    """``(name, microseconds)`` of those profiler events that ran on the GPU, in the order in which they began.

    Ranges that merely annotate the GPU's timeline carry device time too and would count twice.
    """
    ran = [
        event
        for event in events
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    ran.sort(key=lambda event: event.time_range.start)
    return [(event.name, float(event.device_time)) for event in ran]


def kernels_in(sources: Iterable[Path]) -> tuple[str, ...]:
    """Names of the ``extern "C"`` kernels that CUDA sources define."""
    names: list[str] = []
    for path in sources:
        if path.suffix == ".cu":
            names.extend(_KERNEL.findall(path.read_text(encoding="utf-8")))
    return tuple(dict.fromkeys(names))


def kernels_of(ops: Iterable[Op]) -> dict[str, str]:
    """The kernels of ``ops`` by name, each with its class.

    That is ``"ours"``, but ``"gemm"`` for a matrix product of ours: it does the work of the library's GEMM, which the
    floor has in its place.
    """
    return {name: "gemm" if op.is_product else "ours" for op in ops for name in kernels_in(op.sources)}
