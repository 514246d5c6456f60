"""May bits move here? The one place that decides, from a record of what was measured and never from a list of names.

What a GPU can do decides nothing: the same scheme on a card of the same capability, with another driver, another
torch or another model, is another measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits.certificate import digest
from samebits.quality.record import QualityRecord, Thresholds

CONTRACTS = ("exact", "measured")


@dataclass(frozen=True)
class Place:
    """What a decision is about: a model with its scheme, and where it runs.

    Attributes
    ----------
    model_hash : str
        Of the denoiser's weights.
    quantization : str or None
        The scheme of its linears, for example ``modelopt FP8``; ``None`` where none is quantised.
    rounding : str
        ``eager`` or ``fma``: how a late bias is added.
    dtype : str
        Of the activations.
    capability : tuple of int or None
        Of the GPU.
    environment : mapping
        The fingerprint.
    sources : mapping
        Source hash by op, of the ops that would move the bits.
    """

    model_hash: str
    quantization: str | None
    rounding: str
    dtype: str
    capability: tuple[int, int] | None
    environment: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: QualityRecord) -> Place:
        """The place that a record was measured at."""
        capability = None if record.capability is None else (record.capability[0], record.capability[1])
        return cls(
            record.model_hash,
            record.quantization,
            record.rounding,
            record.dtype,
            capability,
            record.environment,
            record.sources,
        )


@dataclass(frozen=True)
class Decision:
    """Whether bits may move, and a sentence that says why or why not."""

    allowed: bool
    reason: str


def decide(contract: str, place: Place, record: QualityRecord | None, thresholds: Thresholds | None = None) -> Decision:
    """Decide whether the bits of ``place`` may move.

    Parameters
    ----------
    contract : str
        ``"exact"`` or ``"measured"``: what the user asked for.
    record : QualityRecord, optional
        What was measured; it must be for exactly this place.
    thresholds : Thresholds, optional
        How near every picture of it has to be; SSIM 0.95 and PSNR 29 dB by default.

    Raises
    ------
    ValueError
        There is no such contract.
    """
    if contract not in CONTRACTS:
        raise ValueError(f"contract must be one of {', '.join(CONTRACTS)}, got {contract!r}.")
    if contract == "exact":
        return Decision(False, "the contract is exact")
    if place.quantization is None:
        return Decision(False, "no linear of this model is quantised, so none can leave its bias to another kernel")
    if record is None:
        return Decision(False, "there is no quality record for this model here: run samebits quality")
    there = Place.of(record)
    for what, now, then in (
        ("another scheme", place.quantization, there.quantization),
        ("other weights", place.model_hash, there.model_hash),
        ("another rounding", place.rounding, there.rounding),
        ("another dtype", place.dtype, there.dtype),
        ("another compute capability", place.capability, there.capability),
        ("other kernels", dict(place.sources), dict(there.sources)),
    ):
        if now != then:
            return Decision(False, f"the quality record is for {what}: run samebits quality again")
    if digest(place.environment) != digest(there.environment):
        return Decision(False, "the quality record is for another environment: run samebits quality again")
    shortfall = record.why_not_within(thresholds or Thresholds())
    if shortfall is not None:
        return Decision(False, f"the quality record does not allow it: {shortfall}")
    worst = record.worst
    decibels = "no difference" if worst.psnr is None else f"PSNR {worst.psnr:.2f} dB"
    return Decision(True, f"measured on {len(record.pairs)} pictures, the worst SSIM {worst.ssim:.4f}, {decibels}")
