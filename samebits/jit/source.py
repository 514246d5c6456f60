"""A kernel's source as one thing: the ``.cu`` file and every file it includes in quotes.

The text is read once and handed to the compiler from memory, so what is hashed is what is compiled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from samebits.errors import CompileError
from samebits.jit.signature import strip_comments

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', flags=re.MULTILINE)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Source:
    """The text of a ``.cu`` file and of its own headers.

    Attributes
    ----------
    path : Path
    text : str
    headers : dict of str to str
        The name as it is written in the ``#include`` and the text.
    """

    path: Path
    text: str
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a source and, recursively, what it includes in quotes.

        Raises
        ------
        CompileError
            A file cannot be read, or an included file lies outside the source's own folder.
        """
        text = _read(path)
        headers: dict[str, str] = {}
        waiting = [text]
        while waiting:
            for name in _INCLUDE.findall(strip_comments(waiting.pop())):
                if name in headers:
                    continue
                if Path(name).name != name:
                    raise CompileError(
                        f'{path.name} includes "{name}": expected a file of its own folder, named without a path.'
                    )
                headers[name] = _read(path.with_name(name))
                waiting.append(headers[name])
        return cls(path, text, headers)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and texts, in hexadecimal. The folder plays no part."""
        hasher = hashlib.sha256()
        for name, text in [(self.path.name, self.text), *sorted(self.headers.items())]:
            for part in (name.encode(), text.encode()):
                hasher.update(len(part).to_bytes(8, "little") + part)
        return hasher.hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"the kernel source {path} cannot be read: {error}.") from error


def define_options(constants: Mapping[str, int | str]) -> tuple[str, ...]:
    """The constants as ``-DNAME=VALUE`` options, sorted by name.

    Raises
    ------
    CompileError
        A name is no C identifier, or a value is neither an int nor a text of one line.
    """
    options = []
    for name, value in sorted(constants.items()):
        if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
            raise CompileError(f"the constant {name!r} cannot be a macro: expected a C identifier.")
        if isinstance(value, bool) or not isinstance(value, int | str) or "\n" in str(value):
            raise CompileError(
                f"the constant {name}={value!r} cannot be a macro: expected an int or a text of one line "
                f"(a bool is written 0 or 1, a float as the C text that means it), got {type(value).__name__}."
            )
        options.append(f"-D{name}={value}")
    return tuple(options)
