"""Writing a file whole: at every moment there is the old one or the new one, and never a part of either.

A leaf that knows the file system alone. Certificates have their own way (:mod:`samebits.certificate.folder`): theirs
looks up every name in a folder that is already open, so that nobody can exchange it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

PART = ".part"
"""How the name of a file ends that is not in its place yet; a killed process leaves one behind."""


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Write ``data`` into a hidden file beside ``path`` and move it there, over what there was.

    Parameters
    ----------
    path : Path
        In a folder that exists. A link there is replaced and not followed.
    data : bytes
        All that the file is to hold.
    mode : int
        Who may read and write it, whatever the umask says.
    durable : bool
        Whether to wait until the disk has the data before the old file goes. Without it a machine that stops at once
        afterwards may be left with an empty file.

    Raises
    ------
    OSError
        The folder is missing or cannot be written to, or the disk is full. The old file is untouched then, and the
        hidden one is gone.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=PART)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # mkstemp makes files for their owner alone
            file.write(data)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
