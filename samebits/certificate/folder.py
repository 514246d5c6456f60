"""The folder of certificates: what is read from it, how a file is replaced, and what is not touched.

Nothing here follows a symbolic link, waits for a pipe, reads more than a bounded number of bytes, or believes a file
that somebody else could have written: a verdict lets a kernel answer without a comparison. Every name is looked up
relative to the opened folder, so a folder that is exchanged in the meantime changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from samebits.certificate.record import MAX_BYTES, StoredVerdict, Unbelievable, decode, digest

MAX_FILES = 128
"""Environments that are kept; those used least recently go first."""
MAX_FOLDER_BYTES = 128 << 20
LOCK_TIMEOUT_S = 20.0
"""How long a process waits for the others to finish writing. Each takes milliseconds; a killed one holds nothing."""
_LOCK = "lock"
_NAME = re.compile(r"v1-[0-9a-f]{32}\.json")
_PART = re.compile(r"\.[0-9a-f]{16}\.part")
_ABANDONED_AFTER_S = 3600.0


def folder_in(cache_dir: Path) -> Path:
    """The folder of certificates below samebits' cache folder."""
    return cache_dir / "certificates"


def name_of(environment: Mapping[str, Any]) -> str:
    """What the certificate of an environment is called. Another version of the format has other names."""
    return f"v1-{digest(environment)[:32]}"


def file_name(environment: Mapping[str, Any]) -> str:
    """The name of the file for an environment."""
    return f"{name_of(environment)}.json"


@contextlib.contextmanager
def opened(folder: Path, *, create: bool = False) -> Iterator[int]:
    """Open the folder, and give its descriptor.

    Raises
    ------
    Unbelievable
        It is no folder, belongs to somebody else, or others may write to it.
    OSError
        It is not there, or cannot be made or opened.
    """
    if create:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            link = folder.is_symlink()
            raise Unbelievable("is a symbolic link" if link else "is no folder") from None
        raise
    try:
        _check_owner(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. It is the kernel's (flock), so it ends with the process however that ends.

    Raises
    ------
    filelock.Timeout
        Another process has held it for all of :data:`LOCK_TIMEOUT_S`.
    OSError, NotImplementedError
        It cannot be made, or this file system has no such locks.
    """
    with FileLock(folder / _LOCK, timeout=LOCK_TIMEOUT_S, mode=0o600):
        yield


def read(descriptor: int, name: str, *, use: bool = True) -> bytes | None:
    """The bytes of a file in the opened folder, or ``None`` if there is none. ``use`` marks it as used now.

    Raises
    ------
    Unbelievable
        It is no plain file, too large, of another owner, or open to others' writing.
    OSError
        It cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unbelievable("is a symbolic link") from None
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise Unbelievable("is a folder" if stat.S_ISDIR(status.st_mode) else "is no plain file")
        _check_owner(status)
        chunks: list[bytes] = []
        left = MAX_BYTES + 1
        while left > 0 and (chunk := os.read(file, left)):
            chunks.append(chunk)
            left -= len(chunk)
        if left <= 0:
            raise Unbelievable(f"is larger than {MAX_BYTES >> 20} MiB")
        if use:
            with contextlib.suppress(OSError):
                os.utime(file)  # the least recently used go first
    finally:
        os.close(file)
    return b"".join(chunks)


def write(descriptor: int, name: str, data: bytes) -> None:
    """Replace a file in the opened folder: at every moment it is the old one or the new one, whole.

    Raises
    ------
    OSError
        The disk is full or cannot be written to. The old file is untouched then.
    """
    part = f".{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(part, flags, 0o600, dir_fd=descriptor)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(part, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=descriptor)
        raise
    os.fsync(descriptor)


def prune(descriptor: int) -> None:
    """Throw out what is past the bounds, least recently used first, and what killed processes left half-written."""
    now, entries = time.time(), []
    with os.scandir(descriptor) as listing:
        for entry in listing:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if _PART.fullmatch(entry.name) and now - status.st_mtime > _ABANDONED_AFTER_S:
                    os.unlink(entry.name, dir_fd=descriptor)
                elif _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                    entries.append((status.st_mtime, status.st_size, entry.name))
    entries.sort(reverse=True)
    total = sum(size for _, size, _ in entries)
    while entries and (len(entries) > MAX_FILES or total > MAX_FOLDER_BYTES):
        _, size, name = entries.pop()
        total -= size
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=descriptor)


@dataclass(frozen=True)
class Certificate:
    """One file of the folder, as a person looks at it.

    Attributes
    ----------
    name : str
        The file name without its ending: what ``samebits certificates`` calls it.
    size_bytes : int
        The size of the file.
    environment : dict
        The whole fingerprint; empty where the file is not believed.
    verdicts : tuple of StoredVerdict
        Newest first.
    problem : str or None
        Why the file is not believed, completing "it ...".
    """

    name: str
    size_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)
    verdicts: tuple[StoredVerdict, ...] = ()
    problem: str | None = None


def inspect(folder: Path) -> list[Certificate]:
    """Look at every file of the folder, most recently used first. Where there is no folder there is nothing.

    Raises
    ------
    Unbelievable
        The folder is not one that would be used.
    OSError
        It cannot be read.
    """
    found: list[tuple[float, Certificate]] = []
    try:
        with opened(folder) as descriptor:
            for name in sorted(name for name in os.listdir(descriptor) if _NAME.fullmatch(name)):
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    found.append((status.st_mtime, _inspect(descriptor, name, status.st_size)))
    except FileNotFoundError:
        return []
    return [certificate for _, certificate in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _inspect(descriptor: int, name: str, size: int) -> Certificate:
    stem = name.removesuffix(".json")
    try:
        content = decode(read(descriptor, name, use=False) or b"")
        if file_name(content.environment) != name:
            raise Unbelievable("is for another environment than its name says")
    except (Unbelievable, RecursionError) as error:
        return Certificate(stem, size, problem=str(error))
    except OSError as error:
        return Certificate(stem, size, problem=f"cannot be read ({error.strerror or error})")
    verdicts = sorted(content.verdicts, key=lambda verdict: verdict.when, reverse=True)
    return Certificate(stem, size, content.environment, tuple(verdicts))


def remove(folder: Path, names: Sequence[str]) -> list[str]:
    """Delete files by the names that :func:`inspect` gives; return those that were there.

    Raises
    ------
    Unbelievable, OSError, filelock.Timeout
        The folder is not one that would be used, a file cannot be deleted, or others hold the lock.
    """
    gone = []
    try:
        with opened(folder) as descriptor, locked(folder):
            for name in names:
                if not _NAME.fullmatch(f"{name}.json"):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    try:
                        os.unlink(f"{name}.json", dir_fd=descriptor)
                    except (IsADirectoryError, PermissionError):  # macOS says the latter about folders
                        os.rmdir(f"{name}.json", dir_fd=descriptor)
                    gone.append(name)
            prune(descriptor)
    except FileNotFoundError:
        return gone
    return gone


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise Unbelievable(f"belongs to user {status.st_uid} and not to user {os.geteuid()}, who runs this")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unbelievable(f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o})")
