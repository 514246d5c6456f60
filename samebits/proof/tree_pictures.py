"""A picture of a summation tree that a person can read, however many numbers it adds.

A tree is drawn as a ladder, the root on top. Each rung is one addition: what comes from below, and in brackets what
joins it: numbers that are added one after the other, or a subtree that is built like the part below its rung or like
one further up. Where the two sides of an addition are built differently, the other one has a ladder of its own, aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from samebits.summation import Tree

MAX_ROWS = 48
_LINE, _INDENT, _LEFT, _TOP, _WIDTH = 30, 28, 24, 58, 1000
_BLOCKS = 3


@dataclass(frozen=True)
class Run:
    """Numbers that are added one after the other: ``count`` of them from ``start``, ``step`` apart."""

    start: int
    step: int
    count: int


class Row(NamedTuple):
    """A line of the picture: how far it is indented, whether it is an addition, and what stands there."""

    depth: int
    addition: bool
    text: str


def runs_of(tree: Tree) -> list[Run | None]:
    """For every node: the run that it is, or ``None``."""
    runs: list[Run | None] = [Run(leaf, 0, 1) for leaf in range(tree.leaves)]
    for nodes in tree.additions:
        run = runs[nodes[0]]
        if len(nodes) != 2 or run is None or nodes[1] >= tree.leaves:
            runs.append(None)
            continue
        step = nodes[1] - (run.start + run.step * (run.count - 1))
        fits = step > 0 and (run.count == 1 or step == run.step)
        runs.append(Run(run.start, step, run.count + 1) if fits else None)
    return runs


def describe(leaves: list[int]) -> str:
    """Name a set of numbers by its pattern: ``64-127, then every 128``."""
    first = leaves[0]
    starts = [leaf for at, leaf in enumerate(leaves) if at == 0 or leaves[at - 1] != leaf - 1]
    for period in [start - first for start in starts[1:]]:
        base = sum(leaf < first + period for leaf in leaves)
        if len(leaves) % base == 0 and all(b - a == period for a, b in zip(leaves, leaves[base:], strict=False)):
            return f"{_blocks(leaves[:base])}, then every {period:,}"
    return _blocks(leaves)


def _blocks(leaves: list[int]) -> str:
    blocks: list[list[int]] = []
    for leaf in leaves:
        if blocks and blocks[-1][-1] == leaf - 1:
            blocks[-1][1:] = [leaf]
        else:
            blocks.append([leaf])
    names = ["-".join(map(str, block)) for block in blocks]
    return ", ".join(names if len(names) <= _BLOCKS else [*names[: _BLOCKS - 1], "...", names[-1]])


def rows_of(tree: Tree) -> list[Row]:
    """The lines of a tree's picture, at most :data:`MAX_ROWS` of them and one that says so."""
    runs, found = runs_of(tree), list[Row]()
    for row in _walk(tree, runs):
        if len(found) == MAX_ROWS:
            return [*found, Row(0, False, "and so on")]
        found.append(row)
    return found


def _walk(tree: Tree, runs: list[Run | None]) -> Iterator[Row]:
    waiting, drawn = [(tree.root, 0)], set[int]()
    while waiting:
        node, depth = waiting.pop()
        run = runs[node]
        if run is not None:
            yield Row(depth, False, _run(run))
            continue
        drawn.add(tree.shapes[node])
        tail, bottom = _tail(tree, runs, node)
        if tail is not None:
            yield Row(depth, True, f"+ {tree.sizes[node]:,} = below, then {_run(tail)}")
            waiting.append((bottom, depth))
            continue
        first, *others = tree.nodes_of(node)
        sides, aside = ["below"], []
        for other in others:
            sibling, size = runs[other], f"{tree.sizes[other]:,} numbers"
            if sibling is not None:
                sides.append(f"[{_run(sibling)}]")
            elif tree.shapes[other] == tree.shapes[first]:
                sides.append(f"[{describe(tree.leaves_of(other))}: {size}, as below]")
            elif tree.shapes[other] in drawn:
                sides.append(f"[{describe(tree.leaves_of(other))}: {size}, as above]")
            else:
                sides.append(f"the {size} aside")
                drawn.add(tree.shapes[other])
                aside.append((other, depth + 1))
        yield Row(depth, True, f"+ {tree.sizes[node]:,} = {' + '.join(sides)}")
        waiting += [(first, depth), *aside]


def _tail(tree: Tree, runs: list[Run | None], node: int) -> tuple[Run | None, int]:
    """The single numbers, evenly apart, that are added last and one after the other, and the node they are added to."""
    found = list[int]()
    bottom = node
    while len(nodes := tree.nodes_of(bottom)) == 2 and nodes[1] < tree.leaves:
        if runs[bottom] is not None or (len(found) > 1 and found[-2] - found[-1] != found[-1] - nodes[1]):
            break
        if found and nodes[1] >= found[-1]:
            break
        found.append(nodes[1])
        bottom = nodes[0]
    if len(found) < 3:
        return None, node
    return Run(found[-1], found[-2] - found[-1], len(found)), bottom


def _run(run: Run) -> str:
    if run.count == 1:
        return f"number {run.start}"
    last = run.start + run.step * (run.count - 1)
    if run.count <= 4:
        return " then ".join(str(run.start + run.step * at) for at in range(run.count))
    return f"{run.start}, {run.start + run.step}, ..., {last}: {run.count:,} numbers one after the other"


def picture(tree: Tree, title: str) -> str:
    """Return a tree as the text of an SVG picture."""
    rows = rows_of(tree)
    height = _TOP + len(rows) * _LINE + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}" font-family="ui-monospace, monospace" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold" fill="#1a1a1a">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="42" fill="#5a5a5a">tree {tree.digest}: {tree.leaves:,} numbers, '
        f"{len(tree.additions):,} additions</text>",
    ]
    last_at: dict[int, int] = {}
    for number, row in enumerate(rows):
        x, y = _LEFT + row.depth * _INDENT, _TOP + number * _LINE + 14
        above = last_at.get(row.depth)
        if above is not None:
            parts.append(f'<line x1="{x + 6}" y1="{above + 6}" x2="{x + 6}" y2="{y - 6}" stroke="#8a8a8a"/>')
        elif row.depth:
            start = last_at.get(row.depth - 1, y)
            parts.append(
                f'<polyline points="{x - _INDENT + 6},{start + 6} {x - _INDENT + 6},{y} {x},{y}" fill="none" '
                'stroke="#8a8a8a" stroke-dasharray="3 3"/>'
            )
        last_at = {depth: place for depth, place in last_at.items() if depth < row.depth} | {row.depth: y}
        if row.addition:
            parts.append(f'<circle cx="{x + 6}" cy="{y}" r="6" fill="#2f6fb2"/>')
            text = row.text.removeprefix("+ ")
        else:
            parts.append(f'<rect x="{x}" y="{y - 6}" width="12" height="12" fill="#d98a2b"/>')
            text = row.text
        parts.append(f'<text x="{x + 20}" y="{y + 5}" fill="#1a1a1a">{escape(text)}</text>')
    return "".join([*parts, "</svg>"])
