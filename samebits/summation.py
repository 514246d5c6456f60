"""Summation trees: in which order a reduction adds, and how to learn it from its results alone.

A floating-point sum of n numbers is a tree: the leaves are the numbers, an inner node is one addition. Two sums have
the same bits on every input if their trees are the same (up to the sides of an addition, which never matter). A tree
cannot be seen in random inputs, but it shows in chosen ones:

- *sizes* (FPRev: Xie et al., "FPRev: Revealing the Order of Floating-Point Summation", USENIX ATC 2025): +M at leaf i,
  -M at leaf j, a unit everywhere else. A unit that joins M or -M before these two meet is swallowed, so what is left
  counts the leaves outside the smallest subtree that holds i and j. From these sizes :func:`recover` finds the whole
  tree, blindly.
- *triples*: only three leaves are not zero. With +M, -M and a unit the sum is the unit if M and -M meet before they
  meet the unit's leaf, else zero. Where no input can be negative (sums of squares): a number B and two that are half a
  unit in B's last place. Alone each is swallowed by B (a tie, to even); if they meet first, their sum is not. So
  either way one triple answers "do j and k meet before they meet i?", written ``j k | i``.

:func:`confirm` needs one triple for each addition but the last. That is a proof, not a sample: let T be the expected
binary tree, with ``j k | i`` asked for every addition v below the root, j and k from the two sides of v, i from v's
sibling; and let another tree give all these answers. Link j and k for every triple. Every addition below the root
links its two sides, so the leaves of each child of T's root are linked with each other, and not with the other
child's. In the other tree linked leaves lie on one side of the root (they meet before i does), so its root has the
same two sides as T's; the triples inside a side say the same of that side, and so on down.

A leaf of the house: it knows torch and nothing of samebits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Sums = Callable[[Tensor], Tensor]
"""Takes ``(rows, leaves)`` and returns what it sums, or a function of that, one number a row: ``(rows,)``."""

Triple = tuple[int, int, int]
"""``(j, k, i)``: do leaves j and k meet before they meet i?"""

_CHUNK_BYTES = 1 << 26


class Builder:
    """Puts a tree together from the leaves up. Nodes are numbers: leaves first, then each addition as it is made."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.additions: list[tuple[int, ...]] = []

    def add(self, *nodes: int) -> int:
        """One addition of two nodes, or of more at once (a fused multi-term node)."""
        self.additions.append(nodes)
        return self.leaves + len(self.additions) - 1

    def serial(self, nodes: Iterable[int | None]) -> int | None:
        """``((a + b) + c) + ...``; ``None`` stands for a zero, which changes nothing."""
        total: int | None = None
        for node in nodes:
            if node is not None:
                total = node if total is None else self.add(total, node)
        return total

    def halves(self, nodes: Sequence[int | None], stop: int = 1) -> list[int | None]:
        """The lower half takes the upper half in, down to ``stop`` nodes: offsets n/2, ..., 2, 1."""
        level = list(nodes)
        while len(level) > stop:
            half = len(level) // 2
            level = [self.serial(pair) for pair in zip(level[:half], level[half:], strict=True)]
        return level

    def neighbours(self, nodes: Sequence[int | None]) -> int | None:
        """Every second node takes the next one in: offsets 1, 2, ..., n/2."""
        level = list(nodes)
        while len(level) > 1:
            level = [self.serial(level[at : at + 2]) for at in range(0, len(level), 2)]
        return level[0]

    def tree(self) -> Tree:
        """The finished tree.

        Raises
        ------
        ValueError
            The nodes do not make one tree over all leaves.
        """
        return Tree.of(self.leaves, self.additions)


@dataclass(frozen=True)
class Tree:
    """A summation tree in its one canonical form: equal trees are equal objects.

    Attributes
    ----------
    leaves : int
        How many numbers are summed. Leaf k is node k.
    additions : tuple of tuple of int
        Addition a is node ``leaves + a`` and holds the nodes it adds, ordered by their first leaf. Additions come in
        the order of their size and first leaf, so the root is the last.
    """

    leaves: int
    additions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, leaves: int, additions: Sequence[tuple[int, ...]]) -> Tree:
        """Bring additions, each after those it uses, into the canonical form. See :meth:`Builder.tree`."""
        first, size = list(range(leaves)), [1] * leaves
        used = [False] * (leaves + len(additions))
        for nodes in additions:
            if len(nodes) < 2 or any(not 0 <= node < len(first) or used[node] for node in nodes):
                raise ValueError(f"expected an addition of two or more nodes that are known and free, got {nodes}")
            for node in nodes:
                used[node] = True
            first.append(min(first[node] for node in nodes))
            size.append(sum(size[node] for node in nodes))
        if leaves < 1 or size[-1] != leaves or used.count(False) != 1:
            raise ValueError(f"expected one tree over {leaves} leaves, got {used.count(False)}")
        order = sorted(range(leaves, len(first)), key=lambda node: (size[node], first[node]))
        name = list(range(leaves)) + [0] * len(additions)
        for position, node in enumerate(order):
            name[node] = leaves + position
        canonical = (sorted(additions[node - leaves], key=first.__getitem__) for node in order)
        return cls(leaves, tuple(tuple(name[node] for node in nodes) for nodes in canonical))

    @property
    def root(self) -> int:
        """The last addition, or the only leaf."""
        return self.leaves + len(self.additions) - 1

    def nodes_of(self, node: int) -> tuple[int, ...]:
        """What ``node`` adds; nothing for a leaf."""
        return () if node < self.leaves else self.additions[node - self.leaves]

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first leaf under every node."""
        first = list(range(self.leaves))
        for nodes in self.additions:
            first.append(first[nodes[0]])
        return tuple(first)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many leaves lie under every node."""
        sizes = [1] * self.leaves
        for nodes in self.additions:
            sizes.append(sum(sizes[node] for node in nodes))
        return tuple(sizes)

    @cached_property
    def shapes(self) -> tuple[int, ...]:
        """A number for every node; nodes have the same one if the trees under them differ in nothing but the leaves."""
        known: dict[tuple[int, ...], int] = {}
        shapes = [0] * self.leaves
        for nodes in self.additions:
            shapes.append(known.setdefault(tuple(sorted(shapes[node] for node in nodes)), len(known) + 1))
        return tuple(shapes)

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this tree."""
        return hashlib.sha256(repr((self.leaves, self.additions)).encode()).hexdigest()[:12]

    def leaves_of(self, node: int) -> list[int]:
        """All leaves under a node, in order."""
        found, waiting = [], [node]
        while waiting:
            node = waiting.pop()
            if node < self.leaves:
                found.append(node)
            else:
                waiting += self.nodes_of(node)
        return sorted(found)

    def differs_from(self, other: Tree) -> str | None:
        """Say where two trees part, at the smallest such addition, or ``None`` where they are the same."""
        if self == other:
            return None
        if self.leaves != other.leaves:
            return f"{self.leaves} leaves against {other.leaves}"
        theirs = {tuple(other.leaves_of(other.leaves + at)) for at in range(len(other.additions))}
        for at in range(len(self.additions)):
            under = self.leaves_of(self.leaves + at)
            if tuple(under) not in theirs:
                return f"{_some(under)} are added up by themselves in one tree and not in the other"
        return "an addition of several numbers at once is several additions in the other tree"

    @cached_property
    def triples(self) -> tuple[Triple, ...]:
        """The triples that fix this tree, smallest additions first: every one holds in it, and in no other tree do all.

        Raises
        ------
        ValueError
            An addition has more than two sides; that tree takes more than triples that hold.
        """
        if any(len(nodes) != 2 for nodes in self.additions):
            raise ValueError("expected a tree of additions of two numbers each")
        sibling = {a: b for nodes in self.additions for a, b in (nodes, nodes[::-1])}
        first = self.first
        return tuple(
            (first[a], first[b], first[sibling[self.leaves + at]]) for at, (a, b) in enumerate(self.additions[:-1])
        )


def _some(leaves: list[int]) -> str:
    shown = ", ".join(map(str, leaves[:6]))
    return f"leaves {shown}{f' and {len(leaves) - 6} more' if len(leaves) > 6 else ''}"


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """A reduction that can be asked.

    Attributes
    ----------
    sums : callable
        The reduction. It is always called with exactly ``rows`` rows, since the order may depend on their number.
    leaves, rows : int
        Columns and rows of every call.
    dtype : torch.dtype
        What the reduction takes.
    device : torch.device
    offset : int
        By how many elements every row starts after an address that is a multiple of 16 bytes; other than 0 only where
        all rows start alike, that is, where ``leaves`` elements are a multiple of 16 bytes.
    scale : float
        Squares only: B is ``scale`` times a power of two. See :func:`ask_squares`.
    """

    sums: Sums
    leaves: int
    rows: int
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    scale: float = 1.0

    def read(self, count: int, fill: float, places: Sequence[tuple[Tensor, float]]) -> Tensor:
        """Sum ``count`` rows, full of ``fill`` but for one value at each of ``places`` (leaf per row, value).

        Rows that a call has left over repeat the last ones. Returns ``(count,)`` in fp64, on the CPU.
        """
        size = self.dtype.itemsize
        together = max(1, _CHUNK_BYTES // (self.rows * self.leaves * size))  # calls prepared at once
        found = []
        for start in range(0, count, together * self.rows):
            calls = min(together, -(-(count - start) // self.rows))
            rows = calls * self.rows
            memory = torch.empty(rows * self.leaves + self.offset, dtype=self.dtype, device=self.device)
            x = memory[self.offset :].view(rows, self.leaves).fill_(fill)
            at = torch.arange(start, start + rows, device=self.device).clamp_(max=count - 1)
            for leaf, value in places:
                x.scatter_(1, leaf[at][:, None], value)
            found += [self.sums(call).reshape(-1) for call in x.view(calls, self.rows, self.leaves)]
        return torch.cat(found)[:count].to("cpu", torch.float64)


# M and the unit: so far apart that M swallows all units together in fp32, and not so far that fp64 would swallow one,
# so that a reduction with an accumulator of another precision is not taken for what it is not. For fp16 both are at the
# ends of its range. With a single unit in a row it may be larger, and then survives a rounding to fp16 at the end.
_M_OF = {torch.float16: (2.0**15, 2.0**-24), torch.bfloat16: (2.0**40, 1.0), torch.float32: (2.0**40, 1.0)}
_TRIPLE_M_OF = _M_OF | {torch.float16: (2.0**15, 2.0**-10)}
# 2^7 and 2^-5: the squares 2^14 and 2^-10 lie 24 binary places apart, and both are normal numbers of every type.
_BASE, _HALF_ULP_ROOT = 2.0**7, 2.0**-5


def ask_signed(probe: Probe, triples: Sequence[Triple]) -> Tensor:
    """Answer triples of a reduction that takes numbers of both signs: ``(len(triples),)`` bools.

    Reads only whether a result is zero, so any later factor or rounding does no harm.
    """
    j, k, i = torch.tensor(triples, device=probe.device).unbind(1)
    big, unit = _TRIPLE_M_OF[probe.dtype]
    return probe.read(len(triples), 0.0, [(j, big), (k, -big), (i, unit)]) != 0


def ask_squares(probe: Probe, triples: Sequence[Triple]) -> Tensor:
    """Answer triples of a reduction that squares what it takes. See :func:`ask_signed`.

    Reads whether a result is another than that of B alone, so the results may be a function of the sum that tells B
    from the next number: ``scale``, between 1 and 1.4 in steps of 1/128, picks a B for which it does.
    """
    j, k, i = torch.tensor(triples, device=probe.device).unbind(1)
    base, small = probe.scale * _BASE, _HALF_ULP_ROOT
    alone = probe.read(1, 0.0, [(i[:1], base)])
    return probe.read(len(triples), 0.0, [(j, small), (k, small), (i, base)]) != alone


def tell_squares(probe: Probe) -> Probe | None:
    """Return the probe with a ``scale`` for which :func:`ask_squares` can tell its results apart, or ``None``.

    Of three leaves two always meet first, so just one of the three triples must hold.
    """
    if probe.leaves < 3:
        return probe
    for step in range(53):
        scaled = replace(probe, scale=1 + step / 128)
        if ask_squares(scaled, [(0, 1, 2), (0, 2, 1), (1, 2, 0)]).sum() == 1:
            return scaled
    return None


Ask = Callable[[Probe, Sequence[Triple]], Tensor]


def confirm(probe: Probe, tree: Tree, ask: Ask, limit: int | None = None) -> str | None:
    """Say in which addition a reduction's tree is not ``tree``, or return ``None``: then it is that tree.

    Parameters
    ----------
    probe : Probe
    tree : Tree
        What is expected; every addition has two sides.
    ask : callable
        :func:`ask_signed` or :func:`ask_squares`.
    limit : int, optional
        Ask only about so many additions or little more, some of every size. Then ``None`` is no proof.

    Notes
    -----
    Beside the triples that hold in ``tree`` some are asked that do not, so that an instrument that always says yes is
    found.
    """
    positive = list(tree.triples)
    if limit is not None and len(positive) > limit:
        positive = _some_of_every_size(tree, limit)
    if not positive:
        return None
    # `j k | i` holds, so `j i | k` does not.
    negative = [(j, i, k) for j, k, i in positive[:: max(1, len(positive) // 64)]]
    answers = ask(probe, positive + negative).tolist()
    for (j, k, i), holds in zip(positive, answers, strict=False):
        if not holds:
            return f"leaves {j} and {k} do not meet before they meet {i}"
    for (j, k, i), holds in zip(negative, answers[len(positive) :], strict=True):
        if holds:
            return f"leaves {j} and {k} meet before they meet {i}"
    return None


def _some_of_every_size(tree: Tree, limit: int) -> list[Triple]:
    of_size: dict[int, list[Triple]] = {}
    for size, triple in zip(tree.sizes[tree.leaves :], tree.triples, strict=False):
        of_size.setdefault(size, []).append(triple)
    share = max(1, limit // len(of_size))
    chosen: list[Triple] = []
    for triples in of_size.values():
        step = max(1.0, len(triples) / share)
        chosen += [triples[int(at * step)] for at in range(min(share, len(triples)))]
    return chosen


def sizes_of(probe: Probe, pairs: Tensor) -> Tensor:
    """Return for each pair of leaves ``(P, 2)`` the size of the smallest subtree that holds both: ``(P,)``, on the CPU.

    The reduction must return its sum, or the sum times one factor, with enough bits to count: fp32 results, say.
    """
    big, unit = _M_OF[probe.dtype]
    pairs = pairs.to(probe.device)
    # All leaves but one are zeros: what one unit comes out as.
    one = probe.read(1, 0.0, [(pairs[:1, 0], unit)])
    left = probe.read(len(pairs), unit, [(pairs[:, 0], big), (pairs[:, 1], -big)])
    return probe.leaves - torch.round(left / one).long()


class _Task:
    """Leaves below one addition of ``whole`` leaves, on sides that do not hold the leaf that was asked about before."""

    def __init__(self, leaves: list[int], whole: int) -> None:
        self.leaves = leaves
        self.whole = whole
        self.joined: list[_Task] = []
        """What the first leaf meets on its way up, in order."""
        self.beside: _Task | None = None
        """What lies on further sides of the same addition: it adds several numbers at once."""

    def divide(self, sizes: list[int]) -> list[_Task]:
        """Sort the leaves by where they meet the first one, from the sizes of the subtrees that hold both."""
        groups: dict[int, list[int]] = {}
        for leaf, size in zip(self.leaves[1:], sizes, strict=True):
            groups.setdefault(size, []).append(leaf)
        beside = groups.pop(self.whole, None)
        if beside is not None:
            self.beside = _Task(beside, self.whole)
        together = 1
        for size in sorted(groups):
            together += len(groups[size])
            if together != size:
                raise ValueError(
                    f"expected {together} leaves below the addition at which leaf {self.leaves[0]} meets "
                    f"{groups[size][0]}, got {size}: this is no sum in a fixed order"
                )
            self.joined.append(_Task(groups[size], size))
        return self.joined if self.beside is None else [*self.joined, self.beside]


def recover(probe: Probe) -> Tree:
    """Find the tree of a reduction, knowing nothing about it. Additions of more than two numbers at once are found too.

    For a first leaf the sizes with every other leaf are asked. Leaves with one size join its way to the root at one
    addition; each such group is a smaller problem of the same kind, and all groups of one depth are asked together.
    That takes between n and n * n / 2 questions; for the trees of GPUs a few times n.

    Raises
    ------
    ValueError
        The answers are those of no tree: this is no sum in a fixed order.
    """
    whole = _Task(list(range(probe.leaves)), probe.leaves + 1)
    tasks, level = [whole], [whole]
    while level:
        asked = [(task.leaves[0], other) for task in level for other in task.leaves[1:]]
        sizes = sizes_of(probe, torch.tensor(asked)).tolist() if asked else []
        following, start = [], 0
        for task in level:
            end = start + len(task.leaves) - 1
            following += task.divide(sizes[start:end])
            start = end
        tasks += following
        level = following
    builder = Builder(probe.leaves)
    sides: dict[_Task, tuple[int, ...]] = {}
    for task in reversed(tasks):  # a task comes after the one that it is a part of
        node = task.leaves[0]
        for part in task.joined:
            node = builder.add(node, *sides.pop(part))
        sides[task] = (node,) if task.beside is None else (node, *sides.pop(task.beside))
    return builder.tree()
