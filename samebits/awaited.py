"""Comparisons that nobody waits for: a call is made both ways, eager's tensors go on, a later call reads the answer.

Verified signatures are watched in this way (:mod:`samebits.watch` says at which calls), and kernels that a stored
verdict vouches for are confirmed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from samebits import capture
from samebits.ops._op import Launcher, Outputs
from samebits.reasons import RECHECKED, STORED, VOUCHED
from samebits.verdict import Entry, State, Table
from samebits.verify import Finding, Observation, count, is_retryable, observe, summary

if TYPE_CHECKING:
    from samebits.ledger import Ledger
    from samebits.site import Site

OUTSTANDING_LIMIT = 64
"""Comparisons whose answers are awaited at the same time; while there are so many, no more are begun."""

_log = logging.getLogger("samebits")


@dataclass(eq=False)
class Watched:
    """A comparison that was made and whose answer is not read yet."""

    site: Site
    table: Table
    entry: Entry
    observation: Observation
    device: torch.device
    elements: int
    """How many output elements are compared."""
    vouched: bool = False
    """Whether it is to confirm a stored verdict about a kernel that answers no calls yet."""


class Awaited:
    """The comparisons of one gate whose answers are not read yet.

    Attributes
    ----------
    outstanding : list of Watched
    """

    def __init__(self, ledger: Ledger, probe: capture.CaptureProbe) -> None:
        self.outstanding: list[Watched] = []
        self._ledger = ledger
        self._probe = probe
        self._plans = 0

    @property
    def full(self) -> bool:
        """Whether no more comparisons are begun."""
        return len(self.outstanding) >= OUTSTANDING_LIMIT

    def may_recheck(self, site: Site, entry: Entry) -> bool:
        """Say whether this call of a verified signature, which is due, is made both ways; choose the next one.

        Where it says yes, :meth:`recheck` has to follow.
        """
        with self._ledger.lock:
            self._plans += 1
            site.plan(self._plans)
        device = entry.signature.devices[0]
        if capture.forked_from(device) or capture.capturing(self._probe, device):
            return False
        with self._ledger.lock:
            if self.full:
                return False
            entry.watched += 1
        return True

    def recheck(self, site: Site, table: Table, entry: Entry, launcher: Launcher, args: tuple[Any, ...]) -> Outputs:
        """Make a call of a verified signature both ways and have them compared. The caller gets eager's tensors."""
        ledger = self._ledger
        error: Exception | None = None
        expected: Outputs | None = None
        observation: Observation | None = None
        try:
            with self._probe.relaxed():
                expected = table.op.reference(*args)
                observation = observe(table.op, launcher, args, expected, entry.signature.names)
        except Exception as raised:
            error = raised
        finally:
            if observation is None:
                with ledger.lock:
                    entry.watched -= 1
        try:
            if observation is not None:
                device, elements = entry.signature.devices[0], 0 if expected is None else count(expected)
                self._await(Watched(site, table, entry, observation, device, elements))
            elif error is not None:
                ledger.stop_if_sticky(error, site)
                if expected is not None and not is_retryable(error):
                    ledger.fail(table, entry, f"a launch raised {summary(error)}")
                    ledger.raise_if_strict(site, entry, error)
        finally:
            del error  # Its traceback leads to this frame: a cycle that would keep the tensors alive.
        if expected is None:
            # The caller did not ask for eager: what stood in its way, memory for instance, is not the caller's matter.
            return site.launch(launcher, entry.key, args)
        ledger.count_eager(site.counters, entry.reason if entry.state is State.FAILED else RECHECKED)
        return expected

    def confirm(
        self, site: Site, table: Table, entry: Entry, launcher: Launcher, args: tuple[Any, ...], expected: Outputs
    ) -> Exception | None:
        """Begin the comparison of a kernel that a stored verdict vouches for. Return what was raised on the way."""
        try:
            with self._probe.relaxed():
                observation = observe(table.op, launcher, args, expected, entry.signature.names)
        except Exception as error:
            self._ledger.interrupted(table, entry, error)
            return error
        with self._ledger.lock:
            entry.vouched = True
            entry.watched += 1
        device = entry.signature.devices[0]
        self._await(Watched(site, table, entry, observation, device, count(expected), vouched=True))
        return None

    def collect(self) -> int:
        """Read the answers that have arrived, without waiting for any; return how many are still awaited."""
        for watched in tuple(self.outstanding):
            if not self._probe.here(watched.device):  # A capture must not be asked about events of others.
                self._read(watched)
        return len(self.outstanding)

    def after_fork(self) -> None:
        """Forget them all: whoever computes the answers stayed in the parent."""
        self.outstanding.clear()

    def _await(self, watched: Watched) -> None:
        with self._ledger.lock:
            self.outstanding.append(watched)
        self._read(watched)
        watched.site.come_by(0 if self.outstanding else None)

    def _read(self, watched: Watched) -> None:
        """Read an answer if it has arrived, and act on it."""
        site, table, entry = watched.site, watched.table, watched.entry
        finding: Finding | None = None
        try:
            with self._probe.relaxed():
                if not watched.observation.arrived():
                    return
            finding = watched.observation.finding()
        except Exception as error:
            self._drop(watched)
            self._ledger.stop_if_sticky(error, site)
            _log.warning("samebits: a re-check at %s came to nothing: %s", site.name, summary(error))
            return
        if not self._drop(watched):
            return  # Another thread was faster.
        if not watched.vouched:
            self._ledger.conclude_watch(site, table, entry, finding, watched.elements)
            return
        if finding is not None:
            finding = finding._replace(cause=f"{finding.cause}, although {STORED} says verified")
        if entry.state is State.UNKNOWN:
            self._ledger.conclude(site, table, entry, finding, VOUCHED, watched.elements, revoking=False)

    def _drop(self, watched: Watched) -> bool:
        with self._ledger.lock:
            if watched not in self.outstanding:
                return False
            self.outstanding.remove(watched)
            watched.entry.watched -= 1
            if watched.vouched:
                watched.entry.vouched = False
            return True
