"""What a certificate file says, how it is read, and every way in which one is not believed.

The file is one JSON document: an envelope (what this is, which version, a SHA-256) around the content (the whole
environment and the verdicts found in it). The checksum is over the content's own bytes, so a file that was cut off or
edited is noticed before anything in it is looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FORMAT = "samebits certificate"
VERSION = 1
MAX_BYTES = 8 << 20
"""The largest file that is read or written: some ten thousand verdicts."""
MAX_VERDICTS = 16_384
CAUSE_LIMIT = 2000
"""Characters of a cause that are kept; the rest of a longer one is dropped."""
Key = tuple[str, str, str]
"""Op, source hash and signature: what a verdict is about."""


def now() -> str:
    """The time in UTC to a microsecond, in a form that sorts as it passes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class StoredVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found about one signature.

    Attributes
    ----------
    op : str
        The name of the op.
    source : str
        The hash of its sources when the verdict was found.
    signature : str
        The whole signature, as the gate spells it for this purpose.
    state : str
        ``verified``, or ``refused``: the bits differed. Nothing else is worth keeping.
    cause : str
        Why, in a sentence; empty for a verified one.
    elements : int
        How many output elements were compared.
    basis : str
        What they were compared on, such as ``a call``.
    when : str
        Time in UTC; the default is now.
    """

    op: Annotated[str, Meta(min_length=1, max_length=128)]
    source: Annotated[str, Meta(min_length=1, max_length=128)]
    signature: Annotated[str, Meta(min_length=1, max_length=32_768)]
    state: Literal["verified", "refused"]
    cause: Annotated[str, Meta(max_length=CAUSE_LIMIT)] = ""
    elements: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    basis: Annotated[str, Meta(max_length=256)] = ""
    when: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z\Z")] = msgspec.field(
        default_factory=now
    )

    @property
    def key(self) -> Key:
        """What two verdicts about the same thing have in common."""
        return self.op, self.source, self.signature


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the envelope holds."""

    environment: dict[str, Any]
    verdicts: Annotated[list[StoredVerdict], Meta(max_length=MAX_VERDICTS)]


class _Head(msgspec.Struct):
    format: str
    version: int


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    sha256: str
    content: msgspec.Raw


class Unbelievable(ValueError):
    """A file that is no certificate, or not for here. The message completes "the file ..."."""


_heads = msgspec.json.Decoder(_Head)
_envelopes = msgspec.json.Decoder(_Envelope)
_contents = msgspec.json.Decoder(Content)
_verdicts = msgspec.json.Decoder(StoredVerdict)
_encoder = msgspec.json.Encoder()


def canonical(environment: Mapping[str, Any]) -> str:
    """Spell a fingerprint in the one way that equal ones share.

    Raises
    ------
    ValueError
        It holds a NaN or an infinity, for which JSON has no word.
    TypeError
        It holds something that is no JSON.
    """
    return json.dumps(environment, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(environment: Mapping[str, Any]) -> str:
    """The SHA-256 of a fingerprint, in hexadecimal: the same as ``samebits.environment.digest``."""
    return hashlib.sha256(canonical(environment).encode()).hexdigest()


def validated(verdict: StoredVerdict) -> StoredVerdict:
    """Return ``verdict`` as it would be read back, its cause cut to what is kept.

    Raises
    ------
    ValueError, TypeError
        It would not be read back.
    """
    if isinstance(verdict.cause, str) and len(verdict.cause) > CAUSE_LIMIT:
        verdict = msgspec.structs.replace(verdict, cause=verdict.cause[: CAUSE_LIMIT - 3] + "...")
    checked = _verdicts.decode(_encoder.encode(verdict))
    _check_time(checked)
    return checked


def encode(environment: Mapping[str, Any], verdicts: Iterable[StoredVerdict]) -> bytes:
    """Make the bytes of a file, leaving out the oldest verdicts where there are too many."""
    newest = sorted(verdicts, key=lambda verdict: verdict.when, reverse=True)[:MAX_VERDICTS]
    known = json.loads(canonical(environment))
    while True:
        content = _encoder.encode(Content(known, newest))
        sha256 = hashlib.sha256(content).hexdigest()
        data = _encoder.encode(_Envelope(FORMAT, VERSION, sha256, msgspec.Raw(content)))
        if len(data) <= MAX_BYTES:
            return data
        if not newest:
            raise ValueError(f"an environment of {len(data):,} bytes does not fit into a certificate")
        # A tenth less than would fit on average, so that a few rounds do.
        newest = newest[: len(newest) * 9 * MAX_BYTES // (10 * len(data))]


def decode(data: bytes, environment: Mapping[str, Any] | None = None) -> Content:
    """Read a file's bytes, and believe them only if they are exactly what :func:`encode` makes.

    Parameters
    ----------
    data : bytes
        The whole file.
    environment : mapping, optional
        The environment that the file must be for. ``None`` accepts any, to look at a file without using it.

    Raises
    ------
    Unbelievable
        Anything is off.
    """
    if not data:
        raise Unbelievable("is empty")
    try:
        head = _heads.decode(data)
        if head.format != FORMAT:
            raise Unbelievable(f"is a {head.format[:40]!r} and no {FORMAT}")
        if head.version != VERSION:
            raise Unbelievable(f"has version {head.version}; this samebits reads version {VERSION}")
        envelope = _envelopes.decode(data)
        inner = bytes(envelope.content)
        if hashlib.sha256(inner).hexdigest() != envelope.sha256:
            raise Unbelievable("was changed after it was written: its checksum does not fit")
        content = _contents.decode(inner)
        # Whatever a reader may overlook, a key that stands twice or space between, no file of ours has.
        if _encoder.encode(envelope) != data or _encoder.encode(content) != inner:
            raise Unbelievable("is spelled in another way than samebits spells it")
        for verdict in content.verdicts:
            _check_time(verdict)
    except Unbelievable:
        raise
    except RecursionError:
        raise Unbelievable("is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:  # a UnicodeDecodeError is a ValueError too
        raise Unbelievable(f"is cut off or of another kind ({_short(error)})") from None
    if environment is not None:
        here = json.loads(canonical(environment))
        where = next(differences(content.environment, here), None)
        if where is not None:
            raise Unbelievable(f"is for another environment ({where})")
    return content


def differences(then: Any, here: Any, path: str = "") -> Iterator[str]:
    """Say where two JSON values differ, place by place. ``true``, ``1`` and ``1.0`` are different."""
    if isinstance(then, dict) and isinstance(here, dict):
        for name in (*then, *(name for name in here if name not in then)):
            inner = f"{path}.{name}" if path else name
            if name not in then or name not in here:
                yield f"{inner} is only in {'the file' if name in then else 'this process'}"
            else:
                yield from differences(then[name], here[name], inner)
    elif isinstance(then, list) and isinstance(here, list) and len(then) == len(here):
        for number, (one, other) in enumerate(zip(then, here, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif type(then) is not type(here) or then != here:
        yield f"{path} was {_short(then)} and is {_short(here)}"


def merged(*groups: Iterable[StoredVerdict]) -> dict[Key, StoredVerdict]:
    """Put verdicts together by what they are about.

    The later one counts, but one that was refused stays refused, whatever came later: equal bits on other values
    are no answer to a difference that somebody saw.
    """
    found: dict[Key, StoredVerdict] = {}
    for group in groups:
        for verdict in group:
            other = found.get(verdict.key)
            if other is None or outranks(verdict, other):
                found[verdict.key] = verdict
    return found


def outranks(verdict: StoredVerdict, other: StoredVerdict) -> bool:
    """Whether ``verdict`` takes the place of ``other``, which is about the same signature."""
    return (verdict.state == "refused", verdict.when) > (other.state == "refused", other.when)


def _check_time(verdict: StoredVerdict) -> None:
    """Raise a ``ValueError`` where ``when`` has the form of a time and is none: which verdict is later hangs on it."""
    datetime.fromisoformat(verdict.when)


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
