"""The gate: lets a kernel answer only for signatures whose bits were compared with eager's.

    unknown --compared, equal--> verified --re-checked, different--> refused
       |  \\--compared, different--> refused             \\--launch raises--> failed
       |---op or device does not take it--> unsupported
       |---does not compile or launch--> failed
       \\---out of memory, or retryable--> unknown, tried again after a growing number of calls

Whatever happens, a call returns eager's bits: the kernel's when they are known to be the same, eager's own otherwise.

This file is the gate's face and decides which way a call goes. A signature's first comparison is in
:mod:`samebits.trial`, the watch over verified ones in :mod:`samebits.awaited`, the verdicts and their lock in
:mod:`samebits.ledger`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from samebits import capture
from samebits.awaited import Awaited
from samebits.ledger import Ledger
from samebits.ops._op import Op, Outputs
from samebits.reasons import (
    AWAITED,
    CAPTURING,
    COMPARED,
    ELSEWHERE,
    FORKED,
    FULL,
    HINTED,
    KILLED,
    RECHECKED,
    RETRY,
    STORED,
    VOUCHED,
)
from samebits.settings import settings
from samebits.signature import Key, why_no_key
from samebits.site import Site
from samebits.trial import Trials
from samebits.trust import Store, default_store
from samebits.verdict import FINAL, Revocation, State, Table, Verdict
from samebits.verify import is_retryable, summary

__all__ = [
    "AWAITED",
    "CAPTURING",
    "COMPARED",
    "ELSEWHERE",
    "FORKED",
    "FULL",
    "HINTED",
    "KILLED",
    "RECHECKED",
    "RETRY",
    "STORED",
    "VOUCHED",
    "Gate",
    "Revocation",
    "Site",
    "State",
    "Verdict",
    "default_gate",
]

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
        self.recheck_every = settings().recheck_every if recheck_every is None else checked_recheck_every(recheck_every)
        probe = capture.default_probe() if probe is None else probe
        self._ledger = Ledger()
        self.count_eager = self._ledger.count_eager  # For sites, without another call in between.
        self._awaited = Awaited(self._ledger, probe)
        self._trials = Trials(
            self._ledger,
            self._awaited,
            probe,
            _jit_unavailable if unavailable is None else unavailable,
            made_up_elements,
        )
        self.pending = self._trials.pending
        """Signatures met during a capture and not compared yet, oldest first."""
        self._sites: list[weakref.ref[Site]] = []
        self._sites_made = 0
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
        with self._ledger.lock:
            table = self._ledger.table(op, host)
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
        self._ledger.use(store, trust)

    def flush(self) -> None:
        """Have the store, if there is one, write down what it was told. It also does so when the process exits."""
        self._ledger.flush()

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that are still in use, in the order they were made."""
        return tuple(site for reference in self._sites if (site := reference()) is not None)

    @property
    def stopped(self) -> str | None:
        """Why every call runs the reference, or ``None`` while the gate works."""
        return self._ledger.stopped

    @property
    def withdrawn(self) -> int:
        """How often a verified signature was sent back, refused or found to fail. Older graphs are out of date."""
        return self._ledger.withdrawn

    def unavailable(self, device: torch.device, host: bool) -> str | None:
        """Say why no kernel can run on ``device``, or return ``None``. The answer is looked up once."""
        return self._trials.unavailable(device, host)

    def verdicts(self) -> list[Verdict]:
        """Return what is known about every signature that is remembered."""
        self.collect()
        return self._ledger.verdicts()

    def recheck(self, op: Op | None = None) -> int:
        """Have every verified signature (of ``op``) compared again at its next call that is not in a capture.

        A signature whose bits differ then is refused, and its verdict says that it was revoked and why. A comparison
        that is running meanwhile does not count as that: it began before.

        Returns
        -------
        int
            How many signatures will be compared, those included that are being compared now for the first time.
        """
        return self._ledger.recheck(op)

    def collect(self) -> int:
        """Read the answers of re-checks that have arrived, without waiting for any.

        Returns
        -------
        int
            How many are still awaited.
        """
        return self._awaited.collect()

    def disable(self, reason: str = "the gate is disabled") -> None:
        """Send every call to the reference, counted under ``reason``. Verdicts and loaded kernels are kept."""
        self._ledger.disable(reason)

    def enable(self) -> None:
        """Undo :meth:`disable`. The kill switch of the environment still wins.

        Raises
        ------
        CudaContextError
            The gate stopped because the CUDA context was lost.
        """
        self._ledger.enable()

    # What follows is for sites: everything but the way of a verified call.

    def answer(self, site: Site, table: Table, key: Key | None, args: tuple[Any, ...]) -> Outputs:
        """Answer a call that may not simply launch: decide, compare if it is time to, and return eager's bits."""
        ledger, awaited, trials = self._ledger, self._awaited, self._trials
        if ledger.stopped is not None:
            return site.run_eager(args, ledger.stopped)
        if key is None:
            return site.run_eager(args, why_no_key(args))
        if awaited.outstanding:
            awaited.collect()
        if self.pending:
            trials.compare_one_pending(site)
        with ledger.lock:
            entry = table.entry(key, args)
            launcher = table.let_in(entry) if entry is not None and ledger.stopped is None else None
        if entry is None:
            return site.run_eager(args, FULL)
        if launcher is not None:
            if site.due and awaited.may_recheck(site, entry):
                return awaited.recheck(site, table, entry, launcher, args)
            site.come_by(1 if awaited.outstanding else None)
            return site.launch(launcher, key, args)
        if entry.state in FINAL:
            ledger.raise_if_strict(site, entry, None)
            return site.run_eager(args, entry.reason)
        obstacle = trials.claim(table, entry)
        if obstacle is None:
            return trials.compare(site, table, entry, args)
        trusted = entry.state is State.VERIFIED and not table.host
        if trusted and entry.launcher is not None and ledger.stopped is None:
            return site.launch(entry.launcher, key, args)  # A re-check that cannot be made now.
        return site.run_eager(args, obstacle)

    def launch_raised(
        self, site: Site, table: Table, key: Key | None, args: tuple[Any, ...], error: Exception
    ) -> Outputs:
        """Deal with a verified kernel that raised: eager answers, unless nothing can."""
        self._ledger.stop_if_sticky(error, site)
        reason = f"a launch raised {summary(error)}"
        entry = None if key is None else table.entries.get(key)
        if entry is not None and not is_retryable(error):
            self._ledger.fail(table, entry, reason)
            self._ledger.raise_if_strict(site, entry, error)
            reason = entry.reason
        return site.run_eager(args, reason)

    def after_fork(self) -> None:
        """Make this gate usable in a forked child: other threads, and CUDA, stayed in the parent."""
        for part in (self._ledger, self._awaited, self._trials):
            part.after_fork()


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
