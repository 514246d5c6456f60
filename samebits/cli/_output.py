"""Where the picture goes: checked before the work, written whole or not at all, never lost."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import click

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".png": ("PNG", {}),
    ".webp": ("WEBP", {"lossless": True}),
    ".jpg": ("JPEG", {"quality": 95}),
    ".jpeg": ("JPEG", {"quality": 95}),
}
"""File name ending to Pillow's format and its options."""


def check(path: Path, force: bool) -> None:
    """Refuse an output that could not be written at the end.

    Raises
    ------
    click.UsageError
        The ending is unknown, the folder is missing or cannot be written to, or the file exists and ``force`` is off.
    """
    if path.suffix.lower() not in FORMATS:
        raise click.UsageError(f"{path}: expected a file name that ends in {', '.join(FORMATS)}.")
    try:
        if path.is_dir():
            raise click.UsageError(f"{path}: is a folder; expected the name of a file.")
        if not path.parent.is_dir():
            raise click.UsageError(f"{path}: the folder {path.parent} does not exist. Make it first.")
        if path.exists() and not force:
            raise click.UsageError(f"{path}: exists already. Choose another -o, or overwrite it with --force.")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".samebits-"):
            pass
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be written ({error.strerror or error}).") from None


def save(image: Any, path: Path, force: bool) -> Path:
    """Write the picture and return where it is.

    The file appears whole: it is written beside its place and moved there. If somebody made a file of that name in the
    meantime and ``force`` is off, the picture goes to the next free name; if the place cannot be written to any more,
    to the folder for temporary files.

    Raises
    ------
    OSError
        It could be written nowhere.
    """
    try:
        return _write(image, Path(os.path.realpath(path)), path, force)
    except OSError as error:
        refuge = Path(tempfile.gettempdir()) / path.name
        click.echo(f"samebits: {path}: cannot be written ({error.strerror or error}); trying {refuge}", err=True)
        return _write(image, refuge, refuge, False)


def beside(path: Path, word: str) -> Path:
    """Return a name next to ``path``: fox.png becomes fox.word.png."""
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def _write(image: Any, real: Path, shown: Path, force: bool) -> Path:
    kind, options = FORMATS[shown.suffix.lower()]
    handle, name = tempfile.mkstemp(dir=real.parent, prefix=".samebits-", suffix=real.suffix)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            image.save(file, kind, **options)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        if force:
            part.replace(real)
            return shown
        for number in range(1000):
            ending = f"-{number}{real.suffix}" if number else real.suffix
            if _move_if_free(part, real.with_name(real.stem + ending)):
                return shown.with_name(shown.stem + ending)
        raise FileExistsError(None, "a thousand files of that name exist", str(real))
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _move_if_free(part: Path, target: Path) -> bool:
    """Move a file to a name that nobody has. A hard link fails where a rename would overwrite."""
    try:
        os.link(part, target)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links.
        if target.exists():
            return False
        part.replace(target)
    return True
