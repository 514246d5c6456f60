"""The settings of a process: one frozen record, and the only code that reads ``SAMEBITS_*`` variables.

Few on purpose. What a program wants to decide goes through the arguments of :func:`samebits.apply`; a
variable exists only for what must be decided from outside the program.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from samebits.errors import SettingsError

CACHE_DIR = "SAMEBITS_CACHE_DIR"
"""The variable that moves the folder of compiled kernels and certificates; for those who start processes."""

CERTIFICATES = "SAMEBITS_CERTIFICATES"
"""The variable that says what stored verdicts are worth; for those who start processes."""

_ON = frozenset({"1", "true", "yes", "on"})
_MOST_DIGITS = 18
_OFF = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class Settings:
    """What the environment of this process says.

    Attributes
    ----------
    disabled : bool
        ``SAMEBITS_DISABLE``: the kill switch. Every site runs its reference, nothing is compiled.
    cache_dir : Path
        ``SAMEBITS_CACHE_DIR``: where compiled kernels and certificates are kept. Absolute; it need not exist.
        By default the user's cache folder, or one under the temporary folder where the user has no home.
    recheck_every : int
        ``SAMEBITS_RECHECK_EVERY``: one verified call in how many is compared with eager again, on average, where the
        program does not say; 0, the default, for none.
    certificates : str
        ``SAMEBITS_CERTIFICATES``: what the gate of the process makes of stored verdicts where the program does not say:
        ``hint`` (the default: they are checked at the first call), ``stored`` (they are believed), ``anew`` (they are
        not asked for, but kept) or ``off``.
    """

    disabled: bool
    cache_dir: Path
    recheck_every: int = 0
    certificates: str = "hint"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from ``environ``.

        Raises
        ------
        SettingsError
            A variable holds a value that means nothing. A misspelt kill switch must not count as off.
        """
        return cls(
            disabled=_flag(environ, "SAMEBITS_DISABLE"),
            cache_dir=_cache_dir(environ.get(CACHE_DIR, "")),
            recheck_every=_count(environ, "SAMEBITS_RECHECK_EVERY"),
            certificates=_certificates(environ, CERTIFICATES),
        )


def settings() -> Settings:
    """Return the settings of this process as they are now.

    Nothing is kept between calls: reading two variables costs microseconds, and a kept answer would be
    wrong in tests and in programs that set the variable after the import.
    """
    return Settings.from_environ(os.environ)


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "")
    word = value.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise SettingsError(variable=variable, value=value, expected="1 or 0 (also true/false, yes/no, on/off)")


def _count(environ: Mapping[str, str], variable: str) -> int:
    value = environ.get(variable, "")
    word = value.strip().lower()
    if word in _OFF:
        return 0
    if word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS:
        return int(word)
    raise SettingsError(variable=variable, value=value, expected="a whole number of calls, or 0 for never")


def _certificates(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable, "")
    word = value.strip().lower()
    if not word or word in _ON:
        return "hint"
    if word in _OFF:
        return "off"
    if word in ("hint", "stored", "anew"):
        return word
    raise SettingsError(variable=variable, value=value, expected="hint, stored, anew or off")


def _cache_dir(value: str) -> Path:
    if value:
        try:
            return Path(value).expanduser().absolute()
        except RuntimeError:
            raise SettingsError(
                variable=CACHE_DIR, value=value, expected="a folder; nobody here has that home folder"
            ) from None
    path = Path(platformdirs.user_cache_dir("samebits", appauthor=False))
    if path.is_absolute():
        return path
    # Without HOME and without an entry in the user database there is no home: a "~" stays in the path, and
    # a relative cache would follow the working directory around.
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"samebits-{owner}"
