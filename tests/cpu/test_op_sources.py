"""An op's hash covers every file whose text decides its bits, or a change would leave a stale claim standing."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.jit.source import Source
from samebits.ops import OPS, Op

FOLDER = Path(__file__).parents[2] / "samebits" / "ops"
# The record itself says nothing about bits.
NEUTRAL = {"_op.py"}


def deciding(op: Op) -> set[str]:
    """The module of an op, the modules of this folder that it imports, its kernel and what that includes, by name."""
    waiting, found = [f"{op.name}.py"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in found or name in NEUTRAL:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "samebits.ops":
                waiting += [f"{alias.name}.py" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samebits.ops."):
                waiting.append(f"{node.module.rsplit('.', 1)[1]}.py")  # type: ignore[union-attr]
    for path in op.sources:
        if path.suffix == ".cu":
            found |= {path.name, *Source.read(path).headers}
    return found


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_sources_are_all_that_decides(op: Op) -> None:
    named = {path.name for path in op.sources}
    # A kernel of ours has a source; a call into a library has none, and says which.
    assert (f"{op.name}.cu" in named) == (not op.library)
    assert op.library in ("", "gemm", "attention")
    assert named == deciding(op)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_changed_source_has_another_hash(op: Op, tmp_path: Path) -> None:
    for path in op.sources:
        changed = tmp_path / path.name
        changed.write_bytes(path.read_bytes() + b" ")
        other = replace(op, sources=tuple(changed if source == path else source for source in op.sources))
        assert other.source_hash != op.source_hash
