"""What the gate knows: a verdict per signature, and counts per site.

Everything here is changed under the gate's lock, which is only ever held for work on these records: no kernel, no
reference and no code of a user runs inside it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from samebits.ops._op import Launcher, Op
from samebits.signature import Key, Signature, parameter_names

SIGNATURE_LIMIT = 4096
"""Signatures an op may have before new ones stay eager: a program whose shapes never repeat must not fill memory."""
REASON_LIMIT = 64
"""Different reasons a site counts by name; the rest are counted together."""
_RETRY_LIMIT_CALLS = 1024


class State(enum.Enum):
    """Where a signature stands."""

    UNKNOWN = "unknown"
    """Not compared yet, or to be tried again."""
    VERIFIED = "verified"
    """The kernel gave eager's bits: it answers."""
    REFUSED = "refused"
    """The kernel gave other bits, or wrote to its input. Final."""
    UNSUPPORTED = "unsupported"
    """Neither this device nor this op takes it. Final."""
    FAILED = "failed"
    """The kernel could not be built or launched. Final."""


@dataclass(frozen=True)
class Verdict:
    """One row of a report: what was found about one signature.

    Attributes
    ----------
    op : str
        The name of the op.
    host : bool
        Whether the kernel was the one built for the CPU.
    signature : str
        The arguments without their values, readable.
    state : State
        Where the signature stands.
    cause : str
        Why, in a sentence; empty when verified.
    verifications : int
        How many comparisons with eager were finished.
    basis : str
        What the last one compared: ``"a call"``, ``"made-up inputs"`` (for a signature first met during a capture), or
        empty when none was finished.
    revoked : bool
        Whether a re-check withdrew a verdict that had been ``verified``.
    """

    op: str
    host: bool
    signature: str
    state: State
    cause: str
    verifications: int
    basis: str
    revoked: bool


@dataclass
class Counters:
    """How many calls of a site went which way. ``fused + eager`` is the number of calls that returned."""

    fused: int = 0
    eager: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why the eager ones were eager: the values sum to ``eager``."""

    def count_eager(self, reason: str) -> None:
        """Count one call that ran the reference."""
        self.eager += 1
        if reason not in self.reasons and len(self.reasons) >= REASON_LIMIT:
            reason = "other reasons"
        self.reasons[reason] += 1


@dataclass(eq=False)
class Entry:
    """The mutable record behind a :class:`Verdict`."""

    key: Key
    signature: Signature
    state: State = State.UNKNOWN
    cause: str = ""
    launcher: Launcher | None = None
    busy: bool = False
    """Some thread is verifying this signature right now."""
    recheck: bool = False
    """The next quiet call compares again although the verdict is ``verified``."""
    revoked: bool = False
    verifications: int = 0
    basis: str = ""
    wait_calls: int = 0
    """Calls that still go by before the next attempt."""
    attempts: int = 0

    @property
    def reason(self) -> str:
        """What a call that ran the reference because of this entry is counted under."""
        return f"{self.state.value}: {self.cause}"

    def postpone(self, cause: str) -> None:
        """Stay as it is and try again later, waiting twice as many calls each time."""
        self.cause = cause
        self.wait_calls = min(1 << self.attempts, _RETRY_LIMIT_CALLS)
        self.attempts += 1


class Table:
    """The verdicts of one op on one kind of kernel.

    ``launchers`` is all that a verified call looks at; it holds exactly the signatures that may skip the rest.
    """

    def __init__(self, op: Op, host: bool) -> None:
        self.op = op
        self.host = host
        self.names = parameter_names(op.reference)
        self.launchers: dict[Key | None, Launcher] = {}
        self.entries: dict[Key, Entry] = {}
        self.withdrawn = 0
        """How often a signature that answered stopped to; whoever holds on to its kernel has to look again."""

    def entry(self, key: Key, args: tuple[Any, ...]) -> Entry | None:
        """Return the entry of ``key``, made if it is new, or ``None`` when the table is full."""
        entry = self.entries.get(key)
        if entry is None and len(self.entries) < SIGNATURE_LIMIT:
            entry = self.entries[key] = Entry(key, Signature.of(self.names, args))
        return entry

    def settle(self, entry: Entry, state: State, cause: str = "", *, open_to_calls: bool = True) -> None:
        """Give ``entry`` its verdict and let calls past it, or not, accordingly."""
        entry.state, entry.cause = state, cause
        # The CPU's ATen sums in another order than the GPU's, which the kernels reproduce. On few elements the two
        # often round to the same result, so on the CPU an equal comparison opens nothing: every call is compared.
        entry.recheck = state is State.VERIFIED and self.host
        entry.wait_calls = entry.attempts = 0
        if state is not State.VERIFIED:
            self.withdraw(entry)
        elif open_to_calls and entry.launcher is not None and not self.host:
            self.launchers[entry.key] = entry.launcher

    def withdraw(self, entry: Entry) -> None:
        """Let ``entry`` answer no more calls."""
        self.withdrawn += self.launchers.pop(entry.key, None) is not None

    def close(self) -> None:
        """Send every call past the gate again; verdicts stay."""
        self.launchers.clear()

    def reopen(self) -> None:
        """Undo :meth:`close`."""
        for entry in self.entries.values():
            if entry.state is State.VERIFIED and not entry.recheck and entry.launcher is not None:
                self.launchers[entry.key] = entry.launcher

    def verdicts(self) -> Iterator[Verdict]:
        """Yield what is known, in the order the signatures were first met."""
        for entry in self.entries.values():
            yield Verdict(
                op=self.op.name,
                host=self.host,
                signature=str(entry.signature),
                state=entry.state,
                cause=entry.cause,
                verifications=entry.verifications,
                basis=entry.basis,
                revoked=entry.revoked,
            )
