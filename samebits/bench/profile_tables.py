"""A profile as text: classes side by side, the byte floor, the chains that remain."""

from __future__ import annotations

from collections.abc import Sequence

from samebits.bench.chains import FUSIBLE, Chain
from samebits.bench.launches import CLASSES
from samebits.bench.profile import Profile
from samebits.bench.targets import table

TITLES = {"gemm": "GEMM", "attention": "attention", "ours": "ours", "copies": "copies", "other": "other eager"}
_WIDEST = 110


def profile_table(profile: Profile, top: int = 20) -> str:
    """Everything that a person wants to see; ``top`` chains at most."""
    head = f"{profile.name}, {profile.where}: one forward"
    parts = [head, classes_table(profile), floor_text(profile), *_remarks(profile)]
    if profile.bits_equal:
        parts.append(chains_table(profile.chains, top))
    return "\n\n".join(parts)


def classes_table(profile: Profile) -> str:
    """Launches and ms by class, eager beside ours."""
    lines = [
        (
            TITLES[kind],
            f"{profile.eager.counts[kind]:,}",
            f"{profile.eager.ms[kind]:.3f}",
            f"{profile.ours.counts[kind]:,}",
            _ours(profile, profile.ours.ms[kind]),
        )
        for kind in CLASSES
    ]
    lines.append(
        (
            "together",
            f"{profile.eager.total:,}",
            f"{sum(profile.eager.ms.values()):.3f}",
            f"{profile.ours.total:,}",
            _ours(profile, sum(profile.ours.ms.values())),
        )
    )
    return table(("class", "eager launches", "ms", "ours launches", "ms"), lines)


def _ours(profile: Profile, ms: float) -> str:
    return f"{ms:.3f}" if profile.bits_equal else "-"


def floor_text(profile: Profile) -> str:
    """The fewest bytes of the fused chains, by op, and the time that a copy of them takes."""
    lines = [(op, f"{calls:,}", f"{size / 1e6:,.1f}") for op, (calls, size) in profile.bytes_by_op.items()]
    lines.append(
        (
            "together",
            f"{sum(calls for calls, _ in profile.bytes_by_op.values()):,}",
            f"{profile.floor_bytes / 1e6:,.1f}",
        )
    )
    told = table(("byte floor of the fused chains", "calls", "MB"), lines)
    if profile.floor_ms is None:
        return told
    told += f"\nAt the copy bandwidth of this run, {profile.copy_gb_s:,.0f} GB/s: {profile.floor_ms:.3f} ms"
    if profile.bits_equal:
        outside = sum(profile.ours.ms[kind] for kind in ("ours", *FUSIBLE))
        told += f"; spent outside GEMM and attention: {outside:.3f} ms"
    return told + "."


def _remarks(profile: Profile) -> list[str]:
    told = [f"Calls of sites: {profile.calls.fused:,} fused, {profile.calls.eager:,} eager."]
    told += [f"  {reason} ({count:,} calls)" for reason, count in profile.calls.reasons.items()]
    if not profile.bits_equal:
        told.append("DIFFERENT: the output has other bits than eager's, so no time of ours is shown.")
    return ["\n".join(told)]


def chains_table(chains: Sequence[Chain], top: int) -> str:
    """The chains that run in eager, the longest time first."""
    if not chains:
        return "No eager chain remains."
    lines = [
        (
            f"{chain.where}, {chain.after} to {chain.before}",
            f"{chain.times:,}",
            f"{chain.launches:,}",
            f"{chain.ms:.3f}",
        )
        for chain in chains[:top]
    ]
    texts = ["operators", *(_short(", ".join(chain.operators)) for chain in chains[:top])]
    drawn = table(("eager chains that remain", "times", "launches", "ms"), lines).splitlines()
    told = "\n".join(f"{line}  {text}" for line, text in zip(drawn, texts, strict=True))
    rest = chains[top:]
    if rest:
        told += f"\nand {len(rest)} more kinds of chains, {sum(chain.ms for chain in rest):.3f} ms together"
    return told


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
