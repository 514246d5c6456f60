"""What is left to fuse: the launches of eager between one GEMM, attention or kernel of ours and the next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from samebits.bench import floor, launches
from samebits.bench.trace import Launch

FUSIBLE = ("copies", "other")
"""The classes of what could be fused."""


@dataclass(frozen=True)
class Chain:
    """Launches of eager that follow each other with no GEMM, attention or kernel of ours between them.

    Attributes
    ----------
    where : str
        The block, its number replaced by ``*``.
    after, before : str
        What it stands between: ``gemm``, ``attention``, ``ours``, or ``the start`` and ``the end`` of the block.
    operators : tuple of str
        What launched it, in order; ``mul x2`` for two in a row, ``[site (op)] x6`` for six launches of a site whose
        reference ran.
    times : int
        How often it occurs in one forward.
    launches : int
        How many launches all of them are.
    ms : float
        Their time together, in one forward.
    """

    where: str
    after: str
    before: str
    operators: tuple[str, ...]
    times: int
    launches: int
    ms: float


def kinds_of(found: Sequence[Launch], own: Mapping[str, str] = launches.NOBODYS) -> list[str]:
    """The class of every launch, in order; a memset right before a GEMM is the GEMM library's."""
    kinds = [_kind(launch, own) for launch in found]
    for index in range(len(kinds) - 2, -1, -1):
        if "memset" in found[index].name.lower() and kinds[index + 1] == "gemm":
            kinds[index] = "gemm"
    return kinds


def _kind(launch: Launch, own: Mapping[str, str]) -> str:
    if not launch.name.startswith("aten::"):
        return launches.class_of(launch.name, own)
    # On a CPU there are operators instead of kernels.
    known = floor.kind_of(launch.name)
    return known or ("copies" if launch.name in {"aten::copy_", "aten::cat", "aten::clone"} else "other")


def chains(found: Sequence[Launch], own: Mapping[str, str] = launches.NOBODYS) -> list[Chain]:
    """The chains of eager launches, equal ones of different blocks together, the longest time first."""
    together: dict[tuple[str, str, str, tuple[str, ...]], tuple[int, int, float]] = {}
    for block, run in _by_block(zip(found, kinds_of(found, own), strict=True)):
        parts = [(fusible, list(part)) for fusible, part in groupby(run, key=lambda pair: pair[1] in FUSIBLE)]
        edges = [None, *parts, None]
        for before, (here, after) in zip(edges, pairwise(edges[1:]), strict=False):
            if here is None or not here[0]:
                continue
            key = (
                _starred(block) or "outside of the blocks",
                "the start" if before is None else before[1][-1][1],
                "the end" if after is None else after[1][0][1],
                _operators([launch for launch, _ in here[1]]),
            )
            times, count, ms = together.get(key, (0, 0, 0.0))
            spent = sum(launch.us for launch, _ in here[1]) / 1e3
            together[key] = (times + 1, count + len(here[1]), ms + spent)
    listed = [Chain(*key, times, count, round(ms, 4)) for key, (times, count, ms) in together.items()]
    return sorted(listed, key=lambda chain: -chain.ms)


def _by_block(pairs: Iterable[tuple[Launch, str]]) -> Iterator[tuple[str, list[tuple[Launch, str]]]]:
    for block, run in groupby(pairs, key=lambda pair: pair[0].block):
        yield block, list(run)


def _starred(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _operators(run: Sequence[Launch]) -> tuple[str, ...]:
    names = [
        f"[{_starred(launch.site)}]" if launch.site else launch.operator.removeprefix("aten::") or launch.name[:60]
        for launch in run
    ]
    counted = [(name, len(list(same))) for name, same in groupby(names)]
    return tuple(name if count == 1 else f"{name} x{count}" for name, count in counted)
