"""A signature on trial: one thread claims it, runs eager and the kernel, and brings the finding to the ledger.

A signature met at a call is compared on that call's values and then on made-up ones: a first call may bring few
elements, or padding that is all zeros, on which a wrong summation order passes too. While a CUDA graph is captured, in
this thread or another, nothing is compared; signatures first met then wait here, remembered by their description alone,
and are compared on made-up inputs, one at each later call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from samebits import capture
from samebits.ops._library import attention_state, blas_state
from samebits.ops._op import Outputs
from samebits.reasons import (
    A_CALL,
    AWAITED,
    CAPTURING,
    COMPARED,
    ELSEWHERE,
    FORKED,
    HINTED,
    MADE_UP,
    RETRY,
    VOUCHED,
)
from samebits.trust import Word
from samebits.verdict import FINAL, Entry, State, Table
from samebits.verify import check, check_made_up, count

if TYPE_CHECKING:
    from samebits.awaited import Awaited
    from samebits.ledger import Ledger
    from samebits.site import Site

PENDING_LIMIT = 256
"""Signatures remembered from captures; later ones are remembered when they are met again."""

STATE = "state"
"""What the argument of a reference is called that holds the flags of one of torch's libraries."""

_log = logging.getLogger("samebits")


class Trials:
    """The comparisons by which one gate's signatures get their verdicts.

    Parameters
    ----------
    ledger : Ledger
    awaited : Awaited
        Where a stored verdict is confirmed without waiting.
    probe : CaptureProbe
    unavailable : callable
        ``unavailable(device, host)`` says why no kernel can run on a device, or returns ``None``.
    made_up_elements : int
        How many output elements a new signature is compared on beyond those of its first call.

    Attributes
    ----------
    pending : dict of Entry to Table
        Signatures met during a capture and not compared yet, oldest first.
    """

    def __init__(
        self,
        ledger: Ledger,
        awaited: Awaited,
        probe: capture.CaptureProbe,
        unavailable: Callable[[torch.device, bool], str | None],
        made_up_elements: int,
    ) -> None:
        self.pending: dict[Entry, Table] = {}
        self.made_up_elements = made_up_elements
        self._ledger, self._awaited, self._probe = ledger, awaited, probe
        self._unavailable = unavailable
        self._unavailable_known: dict[tuple[torch.device, bool], str | None] = {}
        self._warned: set[tuple[torch.device, bool]] = set()

    def unavailable(self, device: torch.device, host: bool) -> str | None:
        """Say why no kernel can run on ``device``, or return ``None``. The answer is looked up once."""
        where = (device, host)
        if where not in self._unavailable_known:
            self._unavailable_known[where] = self._unavailable(*where)
        return self._unavailable_known[where]

    def claim(self, table: Table, entry: Entry) -> str | None:
        """Take ``entry`` for this thread to compare, or say why it is not compared now."""
        with self._ledger.lock:
            if entry.vouched:
                return AWAITED
            if entry.wait_calls > 0:
                entry.wait_calls -= 1
                return f"{RETRY}: {entry.cause}"
        device = entry.signature.devices[0] if entry.signature.devices else None
        if capture.forked_from(device):
            return FORKED
        if capture.capturing(self._probe, device):
            with self._ledger.lock:
                if entry.state is State.UNKNOWN and len(self.pending) < PENDING_LIMIT:
                    self.pending[entry] = table
                    entry.queued = True
            return CAPTURING
        with self._ledger.lock:
            if entry.busy or entry.vouched or not (entry.state is State.UNKNOWN or entry.recheck):
                return AWAITED if entry.vouched else ELSEWHERE
            entry.busy = True
            entry.claim()
            self.pending.pop(entry, None)
            entry.queued = False
        return None

    def compare(self, site: Site, table: Table, entry: Entry, args: tuple[Any, ...]) -> Outputs:
        """Run both on a claimed entry. The caller gets eager's own tensors, unless a stored verdict is believed."""
        ledger = self._ledger
        expected: Outputs | None = None
        error: Exception | None = None
        try:
            word = self._ask(table, entry, args)
            if word is not None and word.believed:
                ledger.settle_as_stored(table, entry, word)
            else:
                expected = table.op.reference(*args)
                if word is not None and entry.launcher is not None and not self._awaited.full:
                    error = self._awaited.confirm(site, table, entry, entry.launcher, args, expected)
                else:
                    error = self._judge(site, table, entry, args, expected, A_CALL)
        finally:
            entry.busy = False
        try:
            if error is not None:
                ledger.stop_if_sticky(error, site)
            ledger.raise_if_strict(site, entry, error)
        finally:
            del error  # Its traceback leads to this frame: a cycle that would keep the tensors alive.
        if expected is None:
            if entry.state is State.VERIFIED and entry.launcher is not None and ledger.stopped is None:
                return site.launch(entry.launcher, entry.key, args)
            return site.run_eager(args, ledger.stopped or entry.reason)
        if table.host and entry.state is State.VERIFIED:
            with ledger.lock:
                site.counters.fused += 1
            return expected
        final = entry.state in FINAL
        confirming = entry.vouched or entry.basis == VOUCHED
        reason = entry.reason if final else entry.cause or (HINTED if confirming else COMPARED)
        ledger.count_eager(site.counters, reason)
        return expected

    def compare_one_pending(self, site: Site) -> None:
        """Compare the oldest signature remembered from a capture on made-up inputs, if it is quiet now."""
        ledger = self._ledger
        with ledger.lock:
            # What eager does under another flag says nothing about this signature.
            entry = next((entry for entry in self.pending if not entry.busy and _is_current(entry)), None)
            if entry is None:
                return
            table = self.pending[entry]
        if self.claim(table, entry) is not None:
            return
        error: Exception | None
        try:
            if entry.signature.unfit is not None:
                ledger.settle(table, entry, State.UNSUPPORTED, entry.signature.unfit)
                return
            # The state of this call was looked at for the devices of its own arguments, which may be others.
            plain = torch.autocast(entry.signature.devices[0].type, enabled=False)
            with torch.no_grad(), plain, self._probe.relaxed():
                args = entry.signature.rebuild(seed=len(table.entries))
                word = self._ask(table, entry, args)
                if word is not None and word.believed:
                    ledger.settle_as_stored(table, entry, word)
                    return
                expected = table.op.reference(*args)
                error = self._judge(site, table, entry, args, expected, MADE_UP)
        except Exception as raised:
            # Not this caller's doing: the signature stays unknown until a real call brings it.
            error = raised
        finally:
            entry.busy = False
        try:
            if error is not None:
                ledger.stop_if_sticky(error, site)
        finally:
            del error  # As above.

    def after_fork(self) -> None:
        """Forget what waits, in a process that may not touch CUDA."""
        if capture.forked():
            for entry in self.pending:
                entry.queued = False
            self.pending.clear()

    def _judge(
        self, site: Site, table: Table, entry: Entry, args: tuple[Any, ...], expected: Outputs, basis: str
    ) -> Exception | None:
        """Give a claimed entry its verdict. Return what was raised on the way, after settling it."""
        revoking, elements = entry.state is State.VERIFIED, count(expected)
        try:
            with self._probe.relaxed():
                if entry.launcher is None:
                    unfit = self._unfit(table, entry, args)
                    if unfit is not None:
                        self._ledger.settle(table, entry, State.UNSUPPORTED, unfit)
                        return None
                    entry.launcher = table.op.prepare(*args)
                finding = check(table.op, entry.launcher, args, expected, entry.signature.names)
                if finding is None and basis == A_CALL and not revoking:
                    finding, more = check_made_up(table.op, entry.launcher, entry.signature, self.made_up_elements)
                    elements += more
        except Exception as error:
            self._ledger.interrupted(table, entry, error)
            return error
        self._ledger.conclude(site, table, entry, finding, basis, elements, revoking)
        return None

    def _ask(self, table: Table, entry: Entry, args: tuple[Any, ...]) -> Word | None:
        """Return what the store says about a claimed entry, with its kernel made ready, or ``None``."""
        trust = self._ledger.trust
        if trust is None or table.host or entry.state is not State.UNKNOWN or entry.told is trust:
            return None
        entry.told = trust
        try:
            with self._probe.relaxed():
                if self._unfit(table, entry, args) is not None:
                    return None
                word = trust.ask(table.op, entry)
                if word is not None and word.state is State.VERIFIED and entry.launcher is None:
                    entry.launcher = table.op.prepare(*args)
        except Exception:
            return None  # The comparison will meet the same, and knows what to do about it.
        return word

    def _unfit(self, table: Table, entry: Entry, args: tuple[Any, ...]) -> str | None:
        reason = entry.signature.unfit
        if reason is not None:
            return reason
        device = entry.signature.devices[0]
        reason = self.unavailable(device, table.host)
        if reason is not None and (device, table.host) not in self._warned:
            self._warned.add((device, table.host))
            _log.warning("samebits: everything on %s runs eager: %s", device, reason)
        return reason or table.op.unsupported(*args)


def _is_current(entry: Entry) -> bool:
    """Whether eager would dispatch now as it did when the signature was met, as far as flags of the process decide.

    Ops whose sums are a library's have its flags among their arguments, called ``state``.
    """
    signature = entry.signature
    if not signature.current:
        return False
    then = [arg for name, arg in zip(signature.names, signature.args, strict=True) if name == STATE]
    return not then or all(state in (blas_state(), attention_state()) for state in then)
