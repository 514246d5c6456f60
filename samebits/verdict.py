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
"""Signatures of an op that are remembered: a program whose shapes never repeat must not fill memory."""
LASTING_AGES = 16
"""How many ages longer a refused or failed signature is remembered than one that costs nothing to forget."""
REASON_LIMIT = 64
"""Different reasons a site counts by name; the rest are counted together."""
REVOCATION_LIMIT = 64
"""Verdicts taken back that a site keeps with all they say; the counter goes on."""
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


FINAL = (State.REFUSED, State.UNSUPPORTED, State.FAILED)
"""After these no later call of the signature reaches the kernel."""


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
        What the verdict rests on: ``"a call"``; ``"made-up inputs"`` (for a signature first met during a capture);
        ``"a stored verdict and a call"``; ``"a stored verdict"`` alone, where that was to be believed; or empty when
        there was nothing of this.
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


@dataclass(frozen=True)
class Revocation:
    """A verdict that was taken back, because a later comparison found other bits.

    Attributes
    ----------
    site : str
        Where the comparison was made.
    op : str
        The name of the op.
    signature : str
        The arguments without their values, readable.
    cause : str
        What differed first, with both values.
    """

    site: str
    op: str
    signature: str
    cause: str

    def to_json(self) -> dict[str, Any]:
        """The revocation as a JSON-able dictionary."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"revoked at {self.site} (op {self.op}) for {self.signature}: {self.cause}"


@dataclass
class Counters:
    """How many calls of a site went which way. ``fused + eager`` is the number of calls that returned."""

    fused: int = 0
    eager: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why the eager ones were eager: the values sum to ``eager``."""
    rechecked: int = 0
    """How many calls of a verified signature were compared again and the answer read."""
    differed: int = 0
    """How many of those differed, each of which took a verdict back."""
    revocations: list[Revocation] = field(default_factory=list)
    """What those found; the first :data:`REVOCATION_LIMIT` of them."""

    def count_eager(self, reason: str) -> None:
        """Count one call that ran the reference."""
        self.eager += 1
        if reason not in self.reasons and len(self.reasons) >= REASON_LIMIT:
            reason = "other reasons"
        self.reasons[reason] += 1

    def count_revocation(self, revocation: Revocation) -> None:
        """Count a verdict that a comparison at this site took back."""
        self.differed += 1
        if len(self.revocations) < REVOCATION_LIMIT:
            self.revocations.append(revocation)


@dataclass(eq=False, slots=True)
class Entry:
    """The mutable record behind a :class:`Verdict`."""

    key: Key
    signature: Signature
    state: State = State.UNKNOWN
    cause: str = ""
    launcher: Launcher | None = None
    """The kernel, once it was prepared."""
    open: Launcher | None = None
    """The same while calls may go past the gate to it: what ``Table.launchers`` holds."""
    answers: bool = False
    """It was let in and not withdrawn since, although it has to be let in again in a new age."""
    busy: bool = False
    """Some thread is verifying this signature right now."""
    queued: bool = False
    """It waits to be compared on made-up inputs."""
    watched: int = 0
    """Comparisons of it whose answers are not read yet."""
    recheck: bool = False
    """The next quiet call compares again although the verdict is ``verified``."""
    asked: int = 0
    """How often a re-check was asked for."""
    claimed: int = 0
    """What ``asked`` was when the comparison began whose finding is the newest."""
    met: int = 0
    """The age of the table in which it was last met."""
    revoked: bool = False
    verifications: int = 0
    elements: int = 0
    """How many output elements were compared, over all comparisons."""
    basis: str = ""
    vouched: bool = False
    """A stored verdict vouches for it, and the comparison that is to confirm it is not read yet."""
    told: object = None
    """The store that was asked about it already."""
    wait_calls: int = 0
    """Calls that still go by before the next attempt."""
    attempts: int = 0

    @property
    def reason(self) -> str:
        """What a call that ran the reference because of this entry is counted under."""
        return f"{self.state.value}: {self.cause}"

    @property
    def held(self) -> bool:
        """Whether somebody is at work on it, so that it must not be forgotten."""
        return self.busy or self.queued or self.watched > 0

    @property
    def lasting(self) -> bool:
        """Whether its verdict cost a comparison and found a fault, which is worth remembering longer."""
        return self.state in (State.REFUSED, State.FAILED)

    def claim(self) -> None:
        """Begin a comparison: what is asked for from now on is not answered by it."""
        self.claimed = self.asked

    def ask(self) -> None:
        """Have it compared again, also where a comparison is running that began before."""
        self.asked += 1
        self.recheck = self.state is State.VERIFIED

    def postpone(self, cause: str) -> None:
        """Stay as it is and try again later, waiting twice as many calls each time."""
        self.cause = cause
        self.wait_calls = min(1 << self.attempts, _RETRY_LIMIT_CALLS)
        self.attempts += 1


class Table:
    """The verdicts of one op on one kind of kernel.

    ``launchers`` is all that a verified call looks at; it holds exactly the signatures that may skip the rest.

    Where it is full, the eighth of its signatures goes that was not met for longest. Nothing on the way of a verified
    call says when it was made. Instead, with every eighth of a table of new signatures a new age begins, in which
    ``launchers`` is empty: the first call of a signature in an age finds no kernel there, comes here, and puts it back.
    """

    def __init__(self, op: Op, host: bool) -> None:
        self.op = op
        self.host = host
        self.names = parameter_names(op.reference)
        self.launchers: dict[Key | None, Launcher] = {}
        self.entries: dict[Key, Entry] = {}
        self.withdrawn = 0
        """How often a signature that answered stopped to; whoever holds on to its kernel has to look again."""
        self._age = self._new = 0

    def entry(self, key: Key, args: tuple[Any, ...]) -> Entry | None:
        """Return the entry of ``key``, made if it is new, or ``None`` when every other one is being worked on."""
        entry = self.entries.get(key)
        if entry is None:
            if len(self.entries) >= SIGNATURE_LIMIT and not self._forget():
                return None
            if self._new >= _eighth():
                self._begin_age()
            self._new += 1
            entry = self.entries[key] = Entry(key, Signature.of(self.names, args))
        entry.met = self._age
        return entry

    def settle(self, entry: Entry, state: State, cause: str = "", *, open_to_calls: bool = True) -> None:
        """Give ``entry`` its verdict and let calls past it, or not, accordingly."""
        entry.state, entry.cause = state, cause
        # The CPU's ATen sums in another order than the GPU's, which the kernels reproduce. On few elements the two
        # often round to the same result, so on the CPU an equal comparison opens nothing: every call is compared.
        entry.recheck = state is State.VERIFIED and (self.host or entry.asked != entry.claimed)
        entry.wait_calls = entry.attempts = 0
        if state is not State.VERIFIED:
            self.withdraw(entry)
        elif open_to_calls:
            self.let_in(entry)

    def let_in(self, entry: Entry) -> Launcher | None:
        """Let calls past ``entry`` if it is verified and not due; return its kernel then."""
        if entry.state is not State.VERIFIED or entry.recheck or entry.launcher is None:
            return None
        if self.entries.get(entry.key) is not entry:
            return None  # It was forgotten while a thread held on to it.
        entry.answers = True
        entry.open = self.launchers[entry.key] = entry.launcher
        return entry.launcher

    def withdraw(self, entry: Entry) -> None:
        """Let ``entry`` answer no more calls."""
        self.withdrawn += entry.answers
        entry.answers = False
        self._shut(entry)

    def close(self) -> None:
        """Send every call past the gate again; verdicts stay."""
        for entry in self.entries.values():
            self._shut(entry)

    def reopen(self) -> None:
        """Undo :meth:`close`."""
        for entry in self.entries.values():
            self.let_in(entry)

    def _shut(self, entry: Entry) -> None:
        entry.open = None
        self.launchers.pop(entry.key, None)

    def _begin_age(self) -> None:
        self._age += 1
        self._new = 0
        for entry in self.entries.values():
            self._shut(entry)

    def _forget(self) -> bool:
        """Make room for new signatures; say whether there is any."""
        faults = sum(entry.lasting for entry in self.entries.values())
        longer = LASTING_AGES if 2 * faults <= SIGNATURE_LIMIT else 0  # They must not take the whole table.
        free = [entry for entry in self.entries.values() if not entry.held]
        free.sort(key=lambda entry: entry.met + longer * entry.lasting)
        for entry in free[: _eighth()]:
            self.withdraw(entry)
            del self.entries[entry.key]
        return bool(free)

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


def _eighth() -> int:
    return max(1, SIGNATURE_LIMIT // 8)
