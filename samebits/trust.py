"""Stored verdicts: what a gate asks a store and what it tells it, so that a verdict outlives its process.

What a store says is somebody else's word. As a *hint* it saves time and is checked on the first call, whose caller gets
eager's tensor. Only with ``"stored"``, for servers whose store was filled in the same environment, does it let a kernel
answer at once. Whatever a store does, raise, hang on to nonsense or lie about what it was asked, nothing of it reaches
a user's call.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from samebits.ops._op import Op
from samebits.settings import settings
from samebits.verdict import Entry, State

if TYPE_CHECKING:
    from samebits.certificate import StoredVerdict

TRUSTS = ("hint", "stored", "anew")
"""Check what is stored at the first call; believe it; or ask for nothing and only keep what is found."""

_STATES = {"verified": State.VERIFIED, "refused": State.REFUSED}
_log = logging.getLogger("samebits")


class Store(Protocol):
    """Where verdicts are kept; :class:`samebits.certificate.CertificateStore` is one."""

    def get(self, op: str, source: str, signature: str) -> StoredVerdict | None:
        """Return what is kept about a signature of an op whose sources have the hash ``source``."""
        ...

    def put(self, verdict: StoredVerdict) -> None:
        """Keep a verdict, at the latest at the next :meth:`flush`."""
        ...

    def flush(self) -> None:
        """Write down what was put."""
        ...


class Word(NamedTuple):
    """What a store says about a signature."""

    state: State
    cause: str
    believed: bool
    """Whether it holds without a comparison."""


class Trust:
    """A store behind which nothing can go wrong.

    Parameters
    ----------
    store : Store
    trust : {"hint", "stored", "anew"}
        How far it is believed.

    Raises
    ------
    ValueError
        ``trust`` is none of these.
    """

    def __init__(self, store: Store, trust: str) -> None:
        if trust not in TRUSTS:
            raise ValueError(f"trust must be one of {', '.join(TRUSTS)}, got {trust!r}.")
        self.store = store
        self.trust = trust
        self._broken = False

    def ask(self, op: Op, entry: Entry) -> Word | None:
        """Return what the store says about the signature of ``entry``; ``None`` where it says nothing of use.

        As a hint, a refusal is of none: verifying it anew is all that can be done about it.
        """
        if self._broken or self.trust == "anew":
            return None
        try:
            asked = (op.name, op.source_hash, entry.signature.canonical())
            found: Any = self.store.get(*asked)
            if found is None or (found.op, found.source, found.signature) != asked:
                return None
            state, cause, believed = _STATES.get(found.state), found.cause, self.trust == "stored"
            if state is None or not isinstance(cause, str) or not (believed or state is State.VERIFIED):
                return None
            return Word(state, cause, believed)
        except Exception as error:
            self._give_up(error)
            return None

    def tell(self, op: Op, entry: Entry) -> None:
        """Have the verdict on ``entry`` kept, if it is one that was found by comparing."""
        if self._broken or entry.state not in _STATES.values() or not entry.verifications:
            return
        try:
            from samebits.certificate import StoredVerdict

            signature = entry.signature.canonical()
            self.store.put(
                StoredVerdict(
                    op=op.name,
                    source=op.source_hash,
                    signature=signature,
                    state="verified" if entry.state is State.VERIFIED else "refused",
                    cause=entry.cause,
                    elements=entry.elements,
                    basis=entry.basis,
                )
            )
        except Exception as error:
            self._give_up(error)

    def flush(self) -> None:
        """Have the store write down what it was told."""
        if self._broken:
            return
        try:
            self.store.flush()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        lines = str(error).strip().splitlines() or [""]
        _log.warning(
            "samebits: stored verdicts are neither asked for nor kept from now on: %s: %s",
            type(error).__name__,
            lines[0],
        )


_stores: dict[Path, Store] = {}


def default_store() -> Store:
    """Return the certificates of this process, in the cache folder that the settings name now."""
    # Late, so that nothing is read, hashed or asked before there is a verdict to ask for.
    from samebits.certificate import CertificateStore, folder_in
    from samebits.environment import certified

    folder = folder_in(settings().cache_dir)
    return _stores.setdefault(folder, CertificateStore(folder, certified))
