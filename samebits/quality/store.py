"""Where quality records are kept: one file for each model and place, in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from samebits.certificate import digest
from samebits.quality.decision import Place
from samebits.quality.record import QualityRecord, Unbelievable, read_record, write_record

_log = logging.getLogger("samebits")


def path_of(folder: Path, place: Place) -> Path:
    """The file of a place's record under the cache folder."""
    parts = (place.model_hash, place.quantization or "", place.rounding, place.dtype, digest(place.environment))
    return folder / "quality" / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}.json"


def keep_record(folder: Path, record: QualityRecord) -> Path:
    """Write a record to where :func:`find_record` looks for it, and return that file.

    Raises
    ------
    OSError
        The folder cannot be written to.
    """
    path = path_of(folder, Place.of(record))
    write_record(record, path)
    return path


def find_record(folder: Path, place: Place) -> QualityRecord | None:
    """The record for a place, or ``None`` where there is none. One that cannot be believed is said once and ignored."""
    path = path_of(folder, place)
    try:
        return read_record(path)
    except FileNotFoundError:
        return None
    except Unbelievable as error:
        _log.warning("samebits: the quality record %s %s; it is ignored", path, error)
        return None
