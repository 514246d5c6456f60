"""The gate's books: every verdict, whether the gate works at all, and the one lock under which both change.

Nothing here runs a kernel or a reference. Whoever compares (:mod:`samebits.trial`, :mod:`samebits.awaited`) says what
was found; the ledger gives the signature its verdict, warns, tells the store, raises at a strict site, and closes
everything when the CUDA context is lost.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from samebits import capture
from samebits.errors import ContractViolation, CudaContextError, KernelFailed
from samebits.ops._op import Op
from samebits.reasons import FORKED, KILLED, STORED
from samebits.settings import settings
from samebits.trust import Store, Trust, Word
from samebits.verdict import Counters, Entry, Revocation, State, Table, Verdict
from samebits.verify import Finding, is_retryable, is_sticky, summary

if TYPE_CHECKING:
    from samebits.site import Site

_log = logging.getLogger("samebits")


class Ledger:
    """The verdicts of one gate.

    Attributes
    ----------
    lock : threading.RLock
        Held for work on these records alone. Ask for it anew each time: a forked child has another one.
    stopped : str or None
        Why every call runs the reference, or ``None`` while the gate works.
    trust : Trust or None
        The store that is asked and told, if there is one.
    """

    def __init__(self) -> None:
        # Reentrant, because a signal handler that runs a model may interrupt the thread that holds it.
        self.lock = threading.RLock()
        self.stopped = _kill_switch()
        self.trust: Trust | None = None
        self._tables: dict[tuple[int, bool], Table] = {}
        self._lost = False

    # Tables and verdicts.

    def table(self, op: Op, host: bool) -> Table:
        """Return the table of ``op``, made if it is new. The lock is held."""
        return self._tables.setdefault((id(op), host), Table(op, host))

    @property
    def withdrawn(self) -> int:
        """How often a verified signature was sent back, refused or found to fail."""
        return sum(table.withdrawn for table in list(self._tables.values()))

    def verdicts(self) -> list[Verdict]:
        """Return what is known about every signature that is remembered."""
        with self.lock:
            return [verdict for table in self._tables.values() for verdict in table.verdicts()]

    def recheck(self, op: Op | None) -> int:
        """Have every verified signature (of ``op``) compared again; return how many that will be."""
        due = 0
        with self.lock:
            for table in self._tables.values():
                if op is None or table.op is op:
                    for entry in table.entries.values():
                        if entry.state is State.VERIFIED or entry.busy or entry.watched:
                            entry.ask()
                            table.withdraw(entry)
                            due += 1
        return due

    def count_eager(self, counters: Counters, reason: str) -> None:
        """Count an eager call; many threads may share a site."""
        with self.lock:
            counters.count_eager(reason)

    # What a comparison, or a launch, came to.

    def settle(self, table: Table, entry: Entry, state: State, cause: str) -> None:
        """Give ``entry`` a verdict that no comparison stands behind."""
        with self.lock:
            table.settle(entry, state, cause)

    def settle_as_stored(self, table: Table, entry: Entry, word: Word) -> None:
        """Give ``entry`` the verdict that a store that is believed has for it."""
        with self.lock:
            entry.basis = STORED
            cause = f"by {STORED}: {word.cause}" if word.state is State.REFUSED else ""
            table.settle(entry, word.state, cause, open_to_calls=self.stopped is None)

    def conclude(
        self,
        site: Site,
        table: Table,
        entry: Entry,
        finding: Finding | None,
        basis: str,
        elements: int,
        revoking: bool,
    ) -> None:
        """Write down what a finished comparison found. ``revoking``: the signature was verified before."""
        with self.lock:
            entry.verifications += 1
            entry.elements += elements
            entry.basis = basis
            if revoking and not table.host:
                site.counters.rechecked += 1
            if finding is None:
                table.settle(entry, State.VERIFIED, open_to_calls=self.stopped is None)
            else:
                self._refuse(site, table, entry, finding.cause, revoking)
        if finding is not None:
            self._warn(table, entry)
        self._tell(table, entry)

    def conclude_watch(self, site: Site, table: Table, entry: Entry, finding: Finding | None, elements: int) -> None:
        """Write down what the comparison of a call of a verified signature found, read some calls later."""
        with self.lock:
            site.counters.rechecked += 1
            entry.verifications += 1
            entry.elements += elements
            # Meanwhile it may have been refused, or failed, for another reason.
            standing = entry.state is State.VERIFIED
            if finding is not None and standing:
                self._refuse(site, table, entry, finding.cause, revoking=True)
        if finding is not None and standing:
            self._warn(table, entry)
            self._tell(table, entry)

    def _refuse(self, site: Site, table: Table, entry: Entry, cause: str, revoking: bool) -> None:
        entry.revoked = revoking
        if revoking:
            site.counters.count_revocation(Revocation(site.name, table.op.name, str(entry.signature), cause))
            cause = f"revoked by a re-check at {site.name}, it was verified before: {cause}"
        table.settle(entry, State.REFUSED, cause)

    def interrupted(self, table: Table, entry: Entry, error: Exception) -> None:
        """Note that a comparison was ended by ``error``: the signature is to be tried again, or has failed."""
        if is_sticky(error):
            return  # That the context is lost is no fault of the signature.
        if is_retryable(error):
            with self.lock:
                entry.postpone(summary(error))
        else:
            self.fail(table, entry, summary(error))

    def fail(self, table: Table, entry: Entry, cause: str) -> None:
        """Give ``entry`` the verdict ``failed``."""
        self.settle(table, entry, State.FAILED, cause)
        self._warn(table, entry)

    def _warn(self, table: Table, entry: Entry) -> None:
        _log.warning("samebits: op %s is eager for %s; %s", table.op.name, entry.signature, entry.reason)

    def raise_if_strict(self, site: Site, entry: Entry, error: Exception | None) -> None:
        """Raise for a refused or failed signature at a strict site, because of ``error`` if there is one."""
        kind = {State.REFUSED: ContractViolation, State.FAILED: KernelFailed}.get(entry.state)
        if kind is not None and site.strict:
            raise kind(op=site.op.name, site=site.name, signature=str(entry.signature), cause=entry.cause) from error

    # Verdicts that are kept beyond the process.

    def use(self, store: Store | None, trust: str) -> None:
        """Ask ``store`` from now on, and have it keep every verdict, those known now included."""
        asked = None if store is None else Trust(store, trust)
        with self.lock:
            self.trust = asked
            known = [(table, entry) for table in self._tables.values() for entry in table.entries.values()]
        for table, entry in known:
            self._tell(table, entry)

    def flush(self) -> None:
        """Have the store, if there is one, write down what it was told."""
        if self.trust is not None:
            self.trust.flush()

    def _tell(self, table: Table, entry: Entry) -> None:
        if self.trust is not None and not table.host:
            self.trust.tell(table.op, entry)

    # Whether the gate works at all.

    def disable(self, reason: str) -> None:
        """Send every call to the reference. Verdicts and loaded kernels are kept."""
        with self.lock:
            self.stopped = reason
            for table in self._tables.values():
                table.close()

    def enable(self) -> None:
        """Undo :meth:`disable`, unless the kill switch is on.

        Raises
        ------
        CudaContextError
            The CUDA context was lost.
        """
        with self.lock:
            if self._lost:
                raise CudaContextError(self.stopped)
            self.stopped = _kill_switch()
            if self.stopped is None:
                for table in self._tables.values():
                    table.reopen()

    def stop_if_sticky(self, error: Exception, site: Site) -> None:
        """Stop for good, and raise a :class:`CudaContextError`, where ``error`` means that the context is lost."""
        if is_sticky(error):
            lost = CudaContextError(cause=summary(error), site=site.name, op=site.op.name)
            with self.lock:
                self._lost = True
            self.disable(str(lost))
            _log.error("samebits: %s", lost)
            raise lost from error

    def after_fork(self) -> None:
        """Make the books usable in a forked child: the threads that were at work on them stayed in the parent."""
        self.lock = threading.RLock()
        for table in self._tables.values():
            for entry in table.entries.values():
                entry.busy, entry.watched, entry.vouched = False, 0, False
                if any(capture.forked_from(device) for device in entry.signature.devices):
                    table.settle(entry, State.UNSUPPORTED, FORKED)


def _kill_switch() -> str | None:
    return KILLED if settings().disabled else None
