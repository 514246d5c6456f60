"""The gate: lets a kernel answer only for signatures whose bits were compared with eager's.

    unknown --compared, equal--> verified --re-checked, different--> refused
       |  \\--compared, different--> refused             \\--launch raises--> failed
       |---op or device does not take it--> unsupported
       |---does not compile or launch--> failed
       \\---out of memory, or retryable--> unknown, tried again after a growing number of calls

A signature met at a call is compared on that call's values and then on made-up ones: a first call may bring few
elements, or padding that is all zeros, on which a wrong summation order passes too.

Whatever happens, a call returns eager's bits: the kernel's when they are known to be the same, eager's own otherwise.
While a CUDA graph is captured, in this thread or another, nothing is compared; signatures first met then are
remembered by their description alone and compared on made-up inputs, one at each later call.

A verified signature can be watched: with ``recheck_every=N`` one call in N is made both ways again. On CUDA nothing
waits for that comparison; a later call reads its answer.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from samebits import capture
from samebits.errors import ContractViolation, CudaContextError, KernelFailed
from samebits.ops._op import Launcher, Op, Outputs
from samebits.settings import settings
from samebits.signature import Key, why_no_key
from samebits.site import Site
from samebits.trust import Store, Trust, Word, default_store
from samebits.verdict import SIGNATURE_LIMIT, Counters, Entry, Revocation, State, Table, Verdict
from samebits.verify import (
    Finding,
    Observation,
    check,
    check_made_up,
    count,
    is_retryable,
    is_sticky,
    observe,
    summary,
)
from samebits.watch import OUTSTANDING_LIMIT, Watched

__all__ = ["Gate", "Revocation", "Site", "State", "Verdict", "default_gate"]

PENDING_LIMIT = 256
"""Signatures remembered from captures; later ones are remembered when they are met again."""

A_CALL = "a call"
MADE_UP = "made-up inputs"
STORED = "a stored verdict"
VOUCHED = "a stored verdict and a call"
AWAITED = "a stored verdict says verified; the comparison that is to confirm it is not read yet"
CAPTURING = "a CUDA graph is being captured and this signature is not verified yet"
COMPARED = "compared with eager at this call"
ELSEWHERE = "another thread is comparing this signature"
FORKED = "this process was forked after CUDA was initialised"
FULL = f"the op already has {SIGNATURE_LIMIT} signatures, all of which are being compared"
KILLED = "SAMEBITS_DISABLE is set"
HINTED = "a stored verdict says verified; made both ways at this call, to confirm it"
RECHECKED = "a verified call that was made both ways again"
RETRY = "will be tried again"

_log = logging.getLogger("samebits")
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """A table of verdicts shared by its sites, and the rules by which they change.

    Parameters
    ----------
    strict : bool
        Whether sites raise on a refused or failed signature unless they say otherwise themselves.
    probe : CaptureProbe, optional
        Answers whether CUDA graphs are being captured.
    made_up_elements : int
        How many output elements a new signature is compared on beyond those of its first call; 0 for none.
    unavailable : callable, optional
        ``unavailable(device, host)`` says why no kernel can run on a device, or returns ``None``.
    recheck_every : int, optional
        One verified call of a site in how many is compared again, on average, unless the site says otherwise; 0 for
        none. By default what ``SAMEBITS_RECHECK_EVERY`` says.
    guessing : bool
        Whether sites guess at the signature of a call before they look it up by its key. It changes what a call
        costs and nothing else.
    store : Store, optional
        Where verdicts are kept beyond the process, such as a :class:`samebits.certificate.CertificateStore`.
    trust : {"hint", "stored", "anew"}
        How far the store is believed, see :meth:`use`.

    Raises
    ------
    ValueError
        ``recheck_every`` is negative, or ``trust`` is none of these.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        probe: capture.CaptureProbe | None = None,
        made_up_elements: int = 1 << 18,
        unavailable: Callable[[torch.device, bool], str | None] | None = None,
        recheck_every: int | None = None,
        guessing: bool = True,
        store: Store | None = None,
        trust: str = "hint",
    ) -> None:
        self.strict = strict
        self.guessing = guessing
        self.made_up_elements = made_up_elements
        self.recheck_every = settings().recheck_every if recheck_every is None else checked_recheck_every(recheck_every)
        self.pending: dict[Entry, Table] = {}
        """Signatures met during a capture and not compared yet, oldest first."""
        self._probe = capture.default_probe() if probe is None else probe
        self._unavailable = _jit_unavailable if unavailable is None else unavailable
        self._unavailable_known: dict[tuple[torch.device, bool], str | None] = {}
        self._warned: set[tuple[torch.device, bool]] = set()
        # Reentrant, because a signal handler that runs a model may interrupt the thread that holds it.
        self._lock = threading.RLock()
        self._tables: dict[tuple[int, bool], Table] = {}
        self._sites: list[weakref.ref[Site]] = []
        self._sites_made = self._plans = 0
        self._outstanding: list[Watched] = []
        self._lost = False
        self._stopped = KILLED if settings().disabled else None
        self._trust: Trust | None = None
        self.use(store, trust)
        _gates.add(self)

    def site(
        self,
        name: str,
        op: Op,
        *,
        strict: bool | None = None,
        host: bool = False,
        recheck_every: int | None = None,
    ) -> Site:
        """Return a new site of ``op``, called ``name`` in reports.

        Parameters
        ----------
        name : str
            Where in the model it stands.
        op : Op
            What it computes.
        strict : bool, optional
            Whether a refused or failed signature raises at this site; ``None`` follows the gate.
        host : bool
            Whether CPU tensors go to the kernel built for the CPU. Every such call is compared with eager, and counts
            as fused where the bits were equal: the CPU sums in another order than the GPU for which kernels are
            written, so one comparison says little about the next.
        recheck_every : int, optional
            One verified call in how many is compared again, on average; 0 for none, ``None`` follows the gate.

        Raises
        ------
        ValueError
            ``recheck_every`` is negative.
        """
        every = None if recheck_every is None else checked_recheck_every(recheck_every)
        with self._lock:
            table = self._tables.setdefault((id(op), host), Table(op, host))
            site = Site(name, op, self, table, strict, every, self._sites_made)
            self._sites_made += 1
            self._sites = [reference for reference in self._sites if reference() is not None]
            self._sites.append(weakref.ref(site))
        return site

    def use(self, store: Store | None, trust: str = "hint") -> None:
        """Ask ``store`` about new signatures from now on, and have it keep every verdict, those known now included.

        Kernels built for the CPU are compared at every call, so for them nobody is asked.

        Parameters
        ----------
        store : Store or None
            ``None``: no store.
        trust : {"hint", "stored", "anew"}
            ``"hint"``: a signature that is stored as verified is compared at its first call, without waiting for the
            answer and without made-up inputs; until the answer is read, eager's tensors go on. One stored as refused
            is verified anew. ``"stored"``: what is stored holds, and nothing is compared; for servers whose store
            was filled in the same environment. ``"anew"``: the store is not asked.

        Raises
        ------
        ValueError
            ``trust`` is none of these.
        """
        asked = None if store is None else Trust(store, trust)
        with self._lock:
            self._trust = asked
            known = [(table, entry) for table in self._tables.values() for entry in table.entries.values()]
        for table, entry in known:
            self._tell(table, entry)

    def flush(self) -> None:
        """Have the store, if there is one, write down what it was told. It also does so when the process exits."""
        if self._trust is not None:
            self._trust.flush()

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that are still in use, in the order they were made."""
        return tuple(site for reference in self._sites if (site := reference()) is not None)

    @property
    def stopped(self) -> str | None:
        """Why every call runs the reference, or ``None`` while the gate works."""
        return self._stopped

    @property
    def withdrawn(self) -> int:
        """How often a verified signature was sent back, refused or found to fail. Older graphs are out of date."""
        return sum(table.withdrawn for table in list(self._tables.values()))

    def unavailable(self, device: torch.device, host: bool) -> str | None:
        """Say why no kernel can run on ``device``, or return ``None``. The answer is looked up once."""
        where = (device, host)
        if where not in self._unavailable_known:
            self._unavailable_known[where] = self._unavailable(*where)
        return self._unavailable_known[where]

    def verdicts(self) -> list[Verdict]:
        """Return what is known about every signature that is remembered."""
        self.collect()
        with self._lock:
            return [verdict for table in self._tables.values() for verdict in table.verdicts()]

    def recheck(self, op: Op | None = None) -> int:
        """Have every verified signature (of ``op``) compared again at its next call that is not in a capture.

        A signature whose bits differ then is refused, and its verdict says that it was revoked and why. A comparison
        that is running meanwhile does not count as that: it began before.

        Returns
        -------
        int
            How many signatures will be compared, those included that are being compared now for the first time.
        """
        due = 0
        with self._lock:
            for table in self._tables.values():
                if op is None or table.op is op:
                    for entry in table.entries.values():
                        if entry.state is State.VERIFIED or entry.busy or entry.watched:
                            entry.ask()
                            table.withdraw(entry)
                            due += 1
        return due

    def collect(self) -> int:
        """Read the answers of re-checks that have arrived, without waiting for any.

        Returns
        -------
        int
            How many are still awaited.
        """
        for watched in tuple(self._outstanding):
            if not self._probe.here(watched.device):  # A capture must not be asked about events of others.
                self._read(watched)
        return len(self._outstanding)

    def disable(self, reason: str = "the gate is disabled") -> None:
        """Send every call to the reference, counted under ``reason``. Verdicts and loaded kernels are kept."""
        with self._lock:
            self._stopped = reason
            for table in self._tables.values():
                table.close()

    def enable(self) -> None:
        """Undo :meth:`disable`. The kill switch of the environment still wins.

        Raises
        ------
        CudaContextError
            The gate stopped because the CUDA context was lost.
        """
        with self._lock:
            if self._lost:
                raise CudaContextError(self._stopped)
            self._stopped = KILLED if settings().disabled else None
            if self._stopped is None:
                for table in self._tables.values():
                    table.reopen()

    # What follows is for sites: everything but the way of a verified call.

    def count_eager(self, counters: Counters, reason: str) -> None:
        """Count an eager call; many threads may share a site."""
        with self._lock:
            counters.count_eager(reason)

    def answer(self, site: Site, table: Table, key: Key | None, args: tuple[Any, ...]) -> Outputs:
        """Answer a call that may not simply launch: decide, compare if it is time to, and return eager's bits."""
        if self._stopped is not None:
            return site.run_eager(args, self._stopped)
        if key is None:
            return site.run_eager(args, why_no_key(args))
        if self._outstanding:
            self.collect()
        if self.pending:
            self._compare_one_pending(site)
        with self._lock:
            entry = table.entry(key, args)
            launcher = table.let_in(entry) if entry is not None and self._stopped is None else None
        if entry is None:
            return site.run_eager(args, FULL)
        if launcher is not None:
            if site.due and self._may_watch(site, entry):
                return self._recheck(site, table, entry, launcher, args)
            site.come_by(1 if self._outstanding else None)
            return site.launch(launcher, key, args)
        if entry.state in (State.REFUSED, State.UNSUPPORTED, State.FAILED):
            self._raise_if_strict(site, entry, None)
            return site.run_eager(args, entry.reason)
        obstacle = self._claim(table, entry)
        if obstacle is None:
            return self._compare(site, table, entry, args)
        trusted = entry.state is State.VERIFIED and not table.host
        if trusted and entry.launcher is not None and self._stopped is None:
            return site.launch(entry.launcher, key, args)  # A re-check that cannot be made now.
        return site.run_eager(args, obstacle)

    def launch_raised(
        self, site: Site, table: Table, key: Key | None, args: tuple[Any, ...], error: Exception
    ) -> Outputs:
        """Deal with a verified kernel that raised: eager answers, unless nothing can."""
        self._stop_if_sticky(error, site)
        reason = f"a launch raised {summary(error)}"
        entry = None if key is None else table.entries.get(key)
        if entry is not None and not is_retryable(error):
            with self._lock:
                table.settle(entry, State.FAILED, reason)
            self._warn(table, entry)
            self._raise_if_strict(site, entry, error)
            reason = entry.reason
        return site.run_eager(args, reason)

    def _claim(self, table: Table, entry: Entry) -> str | None:
        """Take ``entry`` for this thread to compare, or say why it is not compared now."""
        with self._lock:
            if entry.vouched:
                return AWAITED
            if entry.wait_calls > 0:
                entry.wait_calls -= 1
                return f"{RETRY}: {entry.cause}"
        device = entry.signature.devices[0] if entry.signature.devices else None
        if device is not None and device.type == "cuda" and capture.forked():
            return FORKED
        if self._capturing(device):
            with self._lock:
                if entry.state is State.UNKNOWN and len(self.pending) < PENDING_LIMIT:
                    self.pending[entry] = table
                    entry.queued = True
            return CAPTURING
        with self._lock:
            if entry.busy or entry.vouched or not (entry.state is State.UNKNOWN or entry.recheck):
                return AWAITED if entry.vouched else ELSEWHERE
            entry.busy = True
            entry.claim()
            self.pending.pop(entry, None)
            entry.queued = False
        return None

    def _capturing(self, device: torch.device | None) -> bool:
        return self._probe.here(device) or self._probe.anywhere()

    def _compare(self, site: Site, table: Table, entry: Entry, args: tuple[Any, ...]) -> Outputs:
        """Run both on a claimed entry. The caller gets eager's own tensors, unless a stored verdict is believed."""
        expected: Outputs | None = None
        error: Exception | None = None
        try:
            word = self._ask(table, entry, args)
            if word is not None and word.believed:
                self._settle_as_stored(table, entry, word)
            else:
                expected = table.op.reference(*args)
                if word is not None and len(self._outstanding) < OUTSTANDING_LIMIT:
                    error = self._confirm(site, table, entry, args, expected)
                else:
                    error = self._judge(site, table, entry, args, expected, A_CALL)
        finally:
            entry.busy = False
        try:
            if error is not None:
                self._stop_if_sticky(error, site)
            self._raise_if_strict(site, entry, error)
        finally:
            del error  # Its traceback leads to this frame: a cycle that would keep the tensors alive.
        if expected is None:
            if entry.state is State.VERIFIED and entry.launcher is not None and self._stopped is None:
                return site.launch(entry.launcher, entry.key, args)
            return site.run_eager(args, self._stopped or entry.reason)
        if table.host and entry.state is State.VERIFIED:
            with self._lock:
                site.counters.fused += 1
            return expected
        final = entry.state in (State.REFUSED, State.UNSUPPORTED, State.FAILED)
        confirming = entry.vouched or entry.basis == VOUCHED
        self.count_eager(site.counters, entry.reason if final else entry.cause or (HINTED if confirming else COMPARED))
        return expected

    def _compare_one_pending(self, site: Site) -> None:
        """Compare the oldest signature remembered from a capture on made-up inputs, if it is quiet now."""
        with self._lock:
            # What eager does under another flag says nothing about this signature.
            entry = next((entry for entry in self.pending if not entry.busy and entry.signature.current), None)
            if entry is None:
                return
            table = self.pending[entry]
        if self._claim(table, entry) is not None:
            return
        error: Exception | None
        try:
            if entry.signature.unfit is not None:
                with self._lock:
                    table.settle(entry, State.UNSUPPORTED, entry.signature.unfit)
                return
            # The state of this call was looked at for the devices of its own arguments, which may be others.
            plain = torch.autocast(entry.signature.devices[0].type, enabled=False)
            with torch.no_grad(), plain, self._probe.relaxed():
                args = entry.signature.rebuild(seed=len(table.entries))
                word = self._ask(table, entry, args)
                if word is not None and word.believed:
                    self._settle_as_stored(table, entry, word)
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
                self._stop_if_sticky(error, site)
        finally:
            del error  # As above.

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
                        with self._lock:
                            table.settle(entry, State.UNSUPPORTED, unfit)
                        return None
                    entry.launcher = table.op.prepare(*args)
                finding = check(table.op, entry.launcher, args, expected, entry.signature.names)
                if finding is None and basis == A_CALL and not revoking:
                    finding, more = check_made_up(table.op, entry.launcher, entry.signature, self.made_up_elements)
                    elements += more
        except Exception as error:
            return self._unfinished(table, entry, error)
        self._settle(site, table, entry, finding, basis, elements, revoking)
        return None

    def _unfinished(self, table: Table, entry: Entry, error: Exception) -> Exception:
        """Note what a comparison was ended by, and return it."""
        if not is_sticky(error):
            with self._lock:
                if is_retryable(error):
                    entry.postpone(summary(error))
                else:
                    table.settle(entry, State.FAILED, summary(error))
            if entry.state is State.FAILED:
                self._warn(table, entry)
        return error

    def _settle(
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
        with self._lock:
            entry.verifications += 1
            entry.elements += elements
            entry.basis = basis
            if revoking and not table.host:
                site.counters.rechecked += 1
            if finding is None:
                table.settle(entry, State.VERIFIED, open_to_calls=self._stopped is None)
            else:
                self._refuse(site, table, entry, finding.cause, revoking)
        if finding is not None:
            self._warn(table, entry)
        self._tell(table, entry)

    def _refuse(self, site: Site, table: Table, entry: Entry, cause: str, revoking: bool) -> None:
        entry.revoked = revoking
        if revoking:
            site.counters.count_revocation(Revocation(site.name, table.op.name, str(entry.signature), cause))
            cause = f"revoked by a re-check at {site.name}, it was verified before: {cause}"
        table.settle(entry, State.REFUSED, cause)

    # Verdicts that are kept beyond the process.

    def _ask(self, table: Table, entry: Entry, args: tuple[Any, ...]) -> Word | None:
        """Return what the store says about a claimed entry, with its kernel made ready, or ``None``."""
        trust = self._trust
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

    def _settle_as_stored(self, table: Table, entry: Entry, word: Word) -> None:
        with self._lock:
            entry.basis = STORED
            cause = f"by {STORED}: {word.cause}" if word.state is State.REFUSED else ""
            table.settle(entry, word.state, cause, open_to_calls=self._stopped is None)

    def _confirm(
        self, site: Site, table: Table, entry: Entry, args: tuple[Any, ...], expected: Outputs
    ) -> Exception | None:
        """Begin the comparison of a kernel that a stored verdict vouches for. Return what was raised on the way."""
        launcher = entry.launcher
        if launcher is None:
            return self._judge(site, table, entry, args, expected, A_CALL)
        try:
            with self._probe.relaxed():
                observation = observe(table.op, launcher, args, expected, entry.signature.names)
        except Exception as error:
            return self._unfinished(table, entry, error)
        with self._lock:
            entry.vouched = True
            entry.watched += 1
        device = entry.signature.devices[0]
        self._await(Watched(site, table, entry, observation, device, count(expected), vouched=True))
        return None

    def _tell(self, table: Table, entry: Entry) -> None:
        if self._trust is not None and not table.host:
            self._trust.tell(table.op, entry)

    # The watch over verified signatures.

    def _may_watch(self, site: Site, entry: Entry) -> bool:
        """Say whether this call of a verified signature, which is due, is made both ways; choose the next one."""
        with self._lock:
            self._plans += 1
            site.plan(self._plans)
        device = entry.signature.devices[0]
        if (device.type == "cuda" and capture.forked()) or self._capturing(device):
            return False
        with self._lock:
            if len(self._outstanding) >= OUTSTANDING_LIMIT:
                return False
            entry.watched += 1
        return True

    def _recheck(self, site: Site, table: Table, entry: Entry, launcher: Launcher, args: tuple[Any, ...]) -> Outputs:
        """Make a call of a verified signature both ways and have them compared. The caller gets eager's tensors."""
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
                with self._lock:
                    entry.watched -= 1
        try:
            if observation is not None:
                device, elements = entry.signature.devices[0], 0 if expected is None else count(expected)
                self._await(Watched(site, table, entry, observation, device, elements))
            elif error is not None:
                self._stop_if_sticky(error, site)
                if expected is not None and not is_retryable(error):
                    with self._lock:
                        table.settle(entry, State.FAILED, f"a launch raised {summary(error)}")
                    self._warn(table, entry)
                    self._raise_if_strict(site, entry, error)
        finally:
            del error  # Its traceback leads to this frame: a cycle that would keep the tensors alive.
        if expected is None:
            # The caller did not ask for eager: what stood in its way, memory for instance, is not the caller's matter.
            return site.launch(launcher, entry.key, args)
        self.count_eager(site.counters, entry.reason if entry.state is State.FAILED else RECHECKED)
        return expected

    def _await(self, watched: Watched) -> None:
        with self._lock:
            self._outstanding.append(watched)
        self._read(watched)
        watched.site.come_by(0 if self._outstanding else None)

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
            self._stop_if_sticky(error, site)
            _log.warning("samebits: a re-check at %s came to nothing: %s", site.name, summary(error))
            return
        if not self._drop(watched):
            return  # Another thread was faster.
        if watched.vouched:
            if finding is not None:
                finding = finding._replace(cause=f"{finding.cause}, although {STORED} says verified")
            if entry.state is State.UNKNOWN:
                self._settle(site, table, entry, finding, VOUCHED, watched.elements, revoking=False)
            return
        with self._lock:
            site.counters.rechecked += 1
            entry.verifications += 1
            entry.elements += watched.elements
            # Meanwhile it may have been refused, or failed, for another reason.
            standing = entry.state is State.VERIFIED
            if finding is not None and standing:
                self._refuse(site, table, entry, finding.cause, revoking=True)
        if finding is not None and standing:
            self._warn(table, entry)
            self._tell(table, entry)

    def _drop(self, watched: Watched) -> bool:
        with self._lock:
            if watched not in self._outstanding:
                return False
            self._outstanding.remove(watched)
            watched.entry.watched -= 1
            if watched.vouched:
                watched.entry.vouched = False
            return True

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

    def _warn(self, table: Table, entry: Entry) -> None:
        _log.warning("samebits: op %s is eager for %s; %s", table.op.name, entry.signature, entry.reason)

    def _raise_if_strict(self, site: Site, entry: Entry, error: Exception | None) -> None:
        kind = {State.REFUSED: ContractViolation, State.FAILED: KernelFailed}.get(entry.state)
        if kind is not None and site.strict:
            raise kind(op=site.op.name, site=site.name, signature=str(entry.signature), cause=entry.cause) from error

    def _stop_if_sticky(self, error: Exception, site: Site) -> None:
        if is_sticky(error):
            lost = CudaContextError(cause=summary(error), site=site.name, op=site.op.name)
            with self._lock:
                self._lost = True
            self.disable(str(lost))
            _log.error("samebits: %s", lost)
            raise lost from error

    def after_fork(self) -> None:
        """Make this gate usable in a forked child: other threads, and CUDA, stayed in the parent."""
        self._lock = threading.RLock()
        for table in self._tables.values():
            for entry in table.entries.values():
                entry.busy, entry.watched, entry.vouched = False, 0, False
                if capture.forked() and any(device.type == "cuda" for device in entry.signature.devices):
                    table.settle(entry, State.UNSUPPORTED, FORKED)
        self._outstanding.clear()
        if capture.forked():
            for entry in self.pending:
                entry.queued = False
            self.pending.clear()


def checked_recheck_every(recheck_every: int) -> int:
    """Return ``recheck_every``, or raise a ``ValueError`` where it is no number of calls."""
    if type(recheck_every) is not int:
        raise ValueError(f"recheck_every must be a whole number of calls, got {recheck_every!r}.")
    if recheck_every < 0:
        raise ValueError(f"recheck_every must be 0 (never) or more, got {recheck_every}.")
    return recheck_every


def _jit_unavailable(device: torch.device, host: bool) -> str | None:
    from samebits import jit  # Late, so that importing the gate looks for no CUDA and no compiler.

    return jit.unavailable(device, host)


_default: Gate | None = None
_default_lock = threading.Lock()


def default_gate() -> Gate:
    """Return the gate of this process, made at the first call."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Gate()
            trust = settings().certificates
            if trust != "off":
                _default.use(default_store(), trust)
        return _default


def _after_fork_in_child() -> None:
    global _default_lock
    _default_lock = threading.Lock()
    for gate in list(_gates):
        gate.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
