"""``samebits profile``: the launches of one forward, eager beside ours, and what is left to fuse.

Three things side by side. What the GPU did, by class. The fewest bytes that the fused chains must move, and the time
that takes at the copy bandwidth of the same run. And the chains that still run in eager while samebits is applied:
everything between one GEMM, attention or kernel of ours and the next one, block by block, the longest time first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from samebits import bits
from samebits.apply import apply
from samebits.bench import launches, trace
from samebits.bench.chains import Chain, chains, kinds_of
from samebits.bench.comparing import Bench
from samebits.bench.denoisers import Calls
from samebits.bench.launches import CLASSES, Launches
from samebits.bench.timing import copy_gb_per_s
from samebits.bench.trace import SITE_MARK, Launch
from samebits.gate import Gate
from samebits.ops._op import Op


@dataclass(frozen=True)
class Subject:
    """A denoiser and one way to call it."""

    name: str
    model: nn.Module
    forward: Callable[[], Any]

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The repeated blocks of the model by path, as diffusers names them."""
        repeated = getattr(self.model, "_repeated_blocks", None) or ()
        return {path: part for path, part in self.model.named_modules() if type(part).__name__ in repeated}


@dataclass
class Profile:
    """What one forward launched and what it need not.

    Attributes
    ----------
    eager, ours : Launches
        By class, with the memsets that the GEMM library makes counted as its own.
    bits_equal : bool
        Whether the output with samebits applied has eager's bits. If not, its times are shown nowhere.
    calls : Calls
        How many calls of sites kernels answered in one forward, and why others did not.
    bytes_by_op : dict
        ``(calls, bytes)`` by op: every input once, every output once.
    copy_gb_s : float or None
        Copy bandwidth in the same run; ``None`` on a CPU.
    chains, chains_eager : list of Chain
        What runs in eager while samebits is applied, and without it.
    """

    name: str
    where: str
    eager: Launches
    ours: Launches
    bits_equal: bool
    calls: Calls
    bytes_by_op: dict[str, tuple[int, int]]
    copy_gb_s: float | None
    chains: list[Chain] = field(default_factory=list)
    chains_eager: list[Chain] = field(default_factory=list)

    @property
    def floor_bytes(self) -> int:
        """The fewest bytes that all calls of all sites must move."""
        return sum(size for _, size in self.bytes_by_op.values())

    @property
    def floor_ms(self) -> float | None:
        """How long a copy of so many bytes takes; ``None`` on a CPU."""
        return None if self.copy_gb_s is None else self.floor_bytes / self.copy_gb_s / 1e6

    def to_json(self) -> dict[str, Any]:
        """The profile as a JSON-able dictionary; our times are null where bits differ."""
        ours_ms = self.ours.ms if self.bits_equal else dict.fromkeys(self.ours.ms)
        return {
            "model": self.name,
            "where": self.where,
            "bits_equal": self.bits_equal,
            "eager": {"launches": self.eager.counts, "ms": self.eager.ms, "kernels": _kernels(self.eager)},
            "ours": {
                "launches": self.ours.counts,
                "ms": ours_ms,
                "kernels": _kernels(self.ours) if self.bits_equal else [],
            },
            "calls": {"fused": self.calls.fused, "eager": self.calls.eager, "reasons": dict(self.calls.reasons)},
            "byte_floor": {
                "bytes": self.floor_bytes,
                "copy_gb_per_s": self.copy_gb_s,
                "ms": self.floor_ms,
                "by_op": {op: {"calls": calls, "bytes": size} for op, (calls, size) in self.bytes_by_op.items()},
            },
            "chains": [chain.__dict__ for chain in self.chains] if self.bits_equal else [],
            "chains_eager": [chain.__dict__ for chain in self.chains_eager],
        }


def _kernels(counted: Launches) -> list[dict[str, Any]]:
    return [{"kernel": name, "launches": count, "ms": round(ms, 4)} for name, (count, ms) in counted.kernels.items()]


class CountingGate(Gate):
    """A gate whose sites add up the bytes that their calls must move, and mark their calls in a trace.

    Attributes
    ----------
    bytes_by_op : Counter
        Bytes by op since the last ``clear``.
    calls_by_op : Counter
        Calls by op.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bytes_by_op: Counter[str] = Counter()
        self.calls_by_op: Counter[str] = Counter()
        self.marking = False

    def clear(self) -> None:
        """Start to count anew."""
        self.bytes_by_op.clear()
        self.calls_by_op.clear()

    def site(self, name: str, op: Op, **options: Any) -> Any:
        """A site that counts and then does what every site does."""
        return _CountedSite(super().site(name, op, **options), self)


class _CountedSite:
    def __init__(self, site: Any, gate: CountingGate) -> None:
        self._site = site
        self._gate = gate

    def __call__(self, *args: Any) -> Any:
        op, gate = self._site.op, self._gate
        gate.calls_by_op[op.name] += 1
        if op.moves_bytes:  # what a matrix product or attention takes is no question of bytes
            gate.bytes_by_op[op.name] += op.bytes_moved(*args)
        name = f"{SITE_MARK}{self._site.name} ({op.name})"
        with torch.autograd.profiler.record_function(name) if gate.marking else nullcontext():
            return self._site(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)


def measure(subject: Subject, bench: Bench, ops: Sequence[Op], where: str, gate: CountingGate | None = None) -> Profile:
    """Profile one forward in eager and one with samebits applied.

    Parameters
    ----------
    subject : Subject
        Left as it was.
    bench : Bench
        The device.
    ops : sequence of Op
        Whose kernels count as ours, or as GEMMs where they are products.
    where : str
        For a reader: the device, the size.
    gate : CountingGate, optional
        The tests hand in one whose kernels are Python.
    """
    cuda = bench.device.type == "cuda"
    names = launches.kernels_of(ops)
    with torch.no_grad():
        expected = _tensors(subject.forward())
        expected = [tensor.clone() for tensor in expected]
        eager = trace.record(subject.forward, subject.blocks, cuda)
        gate = CountingGate() if gate is None else gate
        with apply(subject.model, gate=gate) as handle:
            subject.forward()  # first sight: every signature runs both ways and is compared
            before = Calls.of(handle)
            gate.clear()
            actual = _tensors(subject.forward())
            calls = Calls.of(handle).since(before)
            moved = {op: (gate.calls_by_op[op], size) for op, size in gate.bytes_by_op.items()}
            gate.marking = True
            ours = trace.record(subject.forward, subject.blocks, cuda)
        copy = copy_gb_per_s(bench.device, bench.stopwatch) if cuda else None
    return Profile(
        subject.name,
        where,
        _account(eager, names),
        _account(ours, names),
        bits.compare(tuple(actual), tuple(expected)) is None,
        calls,
        moved,
        copy,
        chains(ours, names),
        chains(eager, names),
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, list | tuple) else []


def _account(found: Sequence[Launch], own: Mapping[str, str]) -> Launches:
    counts, ms = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0.0)
    kernels: dict[str, tuple[int, float]] = {}
    for launch, kind in zip(found, kinds_of(found, own), strict=True):
        counts[kind] += 1
        ms[kind] += launch.us / 1e3
        seen, spent = kernels.get(launch.name, (0, 0.0))
        kernels[launch.name] = (seen + 1, spent + launch.us / 1e3)
    by_time = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return Launches(counts, {kind: round(spent, 4) for kind, spent in ms.items()}, by_time)


def charted(profile: Profile) -> tuple[Mapping[str, Mapping[str, float]], list[tuple[str, float]]]:
    """Bars and lines for :func:`samebits.bench.charts.stacked_chart`."""
    bars = {"eager": profile.eager.ms}
    lines: list[tuple[str, float]] = []
    if profile.bits_equal:
        bars["samebits"] = profile.ours.ms
        needed = profile.ours.ms["gemm"] + profile.ours.ms["attention"]
        lines.append(("GEMM and attention", needed))
        if profile.floor_ms is not None:
            lines.append(("and the byte floor", needed + profile.floor_ms))
    return bars, lines
