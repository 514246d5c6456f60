"""Compiled kernels kept on disk, so that a second process compiles nothing.

Every entry carries the SHA-256 of its content. Whatever is wrong with a file (truncated, empty, another format, a
folder in its place, unreadable) makes it a miss, never an error: the kernel is compiled again and the file
replaced. Writing goes through a private file and one atomic rename, so any number of processes may write the same
key and none ever reads half of it. Where nothing can be written, nothing is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from pathlib import Path

from samebits.files import PART, write_whole

_MAGIC = b"samebits kernel, format 1\n"
_DIGEST_BYTES = 32
_HEADER_BYTES = len(_MAGIC) + _DIGEST_BYTES
MAX_ENTRY_BYTES = 64 << 20
"""No kernel comes near this; a larger file is not one of ours and is not read into memory."""
MAX_FOLDER_BYTES = 256 << 20
MAX_FOLDER_FILES = 4096
_ABANDONED_AFTER_S = 3600.0


def key(*parts: str) -> str:
    """One file name for everything that decides a compiled kernel: SHA-256 over the parts, in hexadecimal."""
    hasher = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return hasher.hexdigest()


class Cache:
    """A folder of compiled kernels.

    Parameters
    ----------
    folder : Path or None
        Created on the first write, readable by its owner only. ``None`` caches nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, name: str) -> bytes | None:
        """The content stored under ``name``, or ``None`` where there is none that can be trusted."""
        if self.folder is None or not _is_private(self.folder):
            return None
        path = self.folder / name
        try:
            # No symlink is followed and no pipe waited for: only a plain file can be an entry.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ENTRY_BYTES:
                    return None
                data = file.read()
        except OSError:
            return None
        content = data[_HEADER_BYTES:]
        if data[:_HEADER_BYTES] != _MAGIC + hashlib.sha256(content).digest():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest are thrown out first, and this one is in use
        return content

    def put(self, name: str, content: bytes) -> bool:
        """Store ``content`` under ``name``. False where that is not possible; never raises for the disk's sake."""
        if self.folder is None:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_private(self.folder):
                return False
            write_whole(self.folder / name, _MAGIC + hashlib.sha256(content).digest() + content)
            _prune(self.folder)
        except OSError:
            return False
        return True


def _prune(folder: Path) -> None:
    """Throw out the least recently used entries past the bounds, and files that a killed process left."""
    entries = []
    now = time.time()
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if entry.name.endswith(PART):
                if now - status.st_mtime > _ABANDONED_AFTER_S:
                    os.unlink(entry.path)
                continue
            entries.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    entries.sort(reverse=True)
    while len(entries) > MAX_FOLDER_FILES or total > MAX_FOLDER_BYTES:
        _, size, path = entries.pop()
        total -= size
        with contextlib.suppress(OSError):
            os.unlink(path)


def _is_private(folder: Path) -> bool:
    """Whether nobody else can put a file there: it is ours (or root runs this) and not writable by all.

    Entries become machine code of this process, so a checksum is not enough.
    """
    try:
        status = folder.stat()
    except OSError:
        return False
    ours = status.st_uid == os.geteuid() or os.geteuid() == 0
    return stat.S_ISDIR(status.st_mode) and ours and not status.st_mode & stat.S_IWOTH
