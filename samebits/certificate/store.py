"""The store that the gate asks: verdicts of this environment, read once, written together."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samebits.certificate import folder as files
from samebits.certificate import record
from samebits.certificate.record import Key, StoredVerdict, Unbelievable

Environment = Mapping[str, Any]

_log = logging.getLogger("samebits")
_stores: weakref.WeakSet[CertificateStore] = weakref.WeakSet()
_unwritten: set[CertificateStore] = set()
"""Stores that hold what no file holds yet: kept until the exit even if nobody else keeps them."""


class _Verdicts:
    """What is known for one environment: from the disk, and found since and not written yet."""

    def __init__(self, environment: dict[str, Any]) -> None:
        self.environment = environment
        self.name = files.file_name(environment)
        self.known: dict[Key, StoredVerdict] = {}
        self.new: dict[Key, StoredVerdict] = {}


class CertificateStore:
    """Stored verdicts, one file per environment.

    A file that is off in any way is ignored, with one line in the log, and what it said is found out anew. Nothing here
    raises for the sake of a disk. Use from any number of threads and processes.

    Parameters
    ----------
    folder : Path
        Where the files are; made when first written to, for its owner only.
    environment : mapping or callable
        The fingerprint of this process (``samebits.environment.certified``), or a function that returns it. A
        function is asked at every look-up, so that a flag that changes in between leads to another file.

    Notes
    -----
    What is put is written by :meth:`flush`, which also runs when the interpreter exits.
    """

    def __init__(self, folder: Path, environment: Environment | Callable[[], Environment]) -> None:
        self.folder = folder
        self._environment = environment
        self.problem: str | None = None
        """The line that was said about what went wrong first, or ``None`` while all is well."""
        # Reentrant, because a signal handler may come here while its thread is in one of them.
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._flushing = False
        self._by_environment: dict[str, _Verdicts] = {}
        _stores.add(self)

    def get(self, op: str, source: str, signature: str) -> StoredVerdict | None:
        """Return what is stored about a signature of an op whose sources have the hash ``source``."""
        try:
            with self._lock:
                verdicts = self._here()
                key = (op, source, signature)
                return verdicts.new.get(key) or verdicts.known.get(key)
        except Exception as error:
            self._say(f"no stored verdict is used: {_cause(error)}")
            return None

    def put(self, verdict: StoredVerdict) -> None:
        """Remember a verdict for the next :meth:`flush`. It counts for :meth:`get` at once. Never raises.

        A signature that was refused once stays refused; see :func:`samebits.certificate.record.merged`.
        """
        try:
            checked = record.validated(verdict)
            with self._lock:
                verdicts = self._here()
                earlier = verdicts.new.get(checked.key) or verdicts.known.get(checked.key)
                if earlier is None or record.outranks(checked, earlier):
                    verdicts.new[checked.key] = checked
                    _unwritten.add(self)
        except Exception as error:
            self._say(f"a verdict is not kept: {_cause(error)}")

    def verdicts(self) -> list[StoredVerdict]:
        """Return everything that :meth:`get` would find in the environment as it is now."""
        try:
            with self._lock:
                verdicts = self._here()
                return list((verdicts.known | verdicts.new).values())
        except Exception as error:
            self._say(f"no stored verdict is used: {_cause(error)}")
            return []

    def flush(self) -> None:
        """Write what was put: merged with what other processes wrote, whole or not at all. Never raises.

        What cannot be written is kept for the next attempt.
        """
        with self._lock:
            waiting = [(verdicts, dict(verdicts.new)) for verdicts in self._by_environment.values() if verdicts.new]
        if not waiting:
            return
        with self._writing:
            if self._flushing:  # This is a signal handler, and its thread is at it.
                return
            self._flushing = True
            try:
                with files.opened(self.folder, create=True) as descriptor, files.locked(self.folder):
                    for verdicts, new in waiting:
                        self._write(descriptor, verdicts, new)
                    files.prune(descriptor)
            except Exception as error:
                self._say(f"verdicts could not be kept: {_cause(error)}. The next process finds them out again")
            finally:
                self._flushing = False

    def _write(self, descriptor: int, verdicts: _Verdicts, new: dict[Key, StoredVerdict]) -> None:
        found = self._read(descriptor, verdicts)
        together = record.merged(found.values(), new.values())
        if together != found:
            files.write(descriptor, verdicts.name, record.encode(verdicts.environment, together.values()))
        with self._lock:
            verdicts.known = record.merged(verdicts.known.values(), together.values())
            for key, verdict in new.items():
                if verdicts.new.get(key) is verdict:
                    del verdicts.new[key]
            if not any(other.new for other in self._by_environment.values()):
                _unwritten.discard(self)

    def _here(self) -> _Verdicts:
        """The verdicts of the environment as it is now, read at the first look-up. Under the lock."""
        environment = self._environment() if callable(self._environment) else self._environment
        spelled = record.canonical(environment)
        verdicts = self._by_environment.get(spelled)
        if verdicts is None:
            verdicts = self._by_environment[spelled] = _Verdicts(json.loads(spelled))
            try:
                with files.opened(self.folder) as descriptor:
                    verdicts.known = self._read(descriptor, verdicts)
            except FileNotFoundError:
                pass  # Nothing was stored yet.
            except (Unbelievable, OSError) as error:
                self._say(f"the certificates in {self.folder} are ignored: the folder {_cause(error)}")
        return verdicts

    def _read(self, descriptor: int, verdicts: _Verdicts) -> dict[Key, StoredVerdict]:
        """What the disk says now; nothing where the file is not believed."""
        try:
            data = files.read(descriptor, verdicts.name)
            if data is None:
                return {}
            return record.merged(record.decode(data, verdicts.environment).verdicts)
        except (Unbelievable, OSError) as error:
            path = self.folder / verdicts.name
            self._say(f"the certificate {path} is ignored: it {_cause(error)}. Every signature is verified anew")
            return {}

    def _say(self, text: str) -> None:
        """Warn once; what goes wrong after that has the same root, or is not worth a second line."""
        line = " ".join(f"{text}.".replace("..", ".").split())
        _log.log(logging.WARNING if self.problem is None else logging.DEBUG, "samebits: %s", line)
        self.problem = self.problem or line

    def after_fork(self) -> None:
        """Make this store usable in a forked child: whoever held a lock stayed in the parent, who writes its own."""
        self._lock, self._writing, self._flushing = threading.RLock(), threading.RLock(), False
        for verdicts in self._by_environment.values():
            verdicts.known |= verdicts.new
            verdicts.new.clear()
        _unwritten.discard(self)


def _cause(error: Exception) -> str:
    if isinstance(error, Unbelievable):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be used ({error.strerror or error})"
    return f"{type(error).__name__}: {error}"


def _flush_all() -> None:
    for store in list(_unwritten):
        store.flush()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store.after_fork()


atexit.register(_flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
