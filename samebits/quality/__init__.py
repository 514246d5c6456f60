"""Image quality, measured and kept: what allows a pipeline to move its bits on purpose (the contract ``measured``)."""

from __future__ import annotations

from samebits.quality.decision import Decision, Place, decide
from samebits.quality.record import Figures, Pair, QualityRecord, Thresholds, Unbelievable, read_record, write_record
from samebits.quality.store import find_record, keep_record

__all__ = [
    "Decision",
    "Figures",
    "Pair",
    "Place",
    "QualityRecord",
    "Thresholds",
    "Unbelievable",
    "decide",
    "find_record",
    "keep_record",
    "read_record",
    "write_record",
]
