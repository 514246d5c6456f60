"""A copy of the ops' sources in a folder of its own: where probes are compiled, and where a control breaks one file."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from samebits.ops import Op
from samebits.ops._layout import HERE

_numbers = count()


class Change(NamedTuple):
    """A textual change of one source, which must apply exactly once."""

    file: str
    old: str
    new: str

    def apply(self, folder: Path) -> None:
        """Make the change in the copy of the file that ``folder`` holds.

        Raises
        ------
        ValueError
            It does not apply exactly once, or changes nothing.
        """
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise ValueError(f"{self.file}: expected {self.old!r} once, found it {found} times; adapt the control.")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


class Workshop:
    """The sources of all ops, copied when it is made, with ``changes`` applied. A context manager.

    Raises
    ------
    ValueError
        A change does not apply, or applies more than once: the source reads differently from what the change was
        written against.
    """

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="samebits-proof-")
        self.path = Path(self._folder.name)
        self._modules: list[str] = []
        for path in HERE.iterdir():
            if path.suffix in (".cu", ".cuh", ".py"):
                shutil.copy(path, self.path)
        try:
            for change in changes:
                change.apply(self.path)
        except ValueError:
            self.close()
            raise

    def op(self, name: str) -> Op:
        """The op of this name as this folder has it: its module loaded anew, its kernel compiled from here."""
        path = self.path / f"{name}.py"
        label = f"_samebits_workshop_{next(_numbers)}_{name}"
        spec = importlib.util.spec_from_file_location(label, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[label] = module  # where dataclasses of the module look for themselves
        self._modules.append(label)
        spec.loader.exec_module(module)
        # The module's sources are named relative to the package; here they lie in this folder.
        for variable, value in list(vars(module).items()):
            if isinstance(value, Path) and value.parent == HERE:
                setattr(module, variable, self.path / value.name)
        op: Op = module.OP
        return op

    def close(self) -> None:
        for label in self._modules:
            sys.modules.pop(label, None)
        self._modules.clear()
        self._folder.cleanup()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
