"""The prober against sums whose order is known, and against torch's CPU sums, whose order it has to find out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from samebits.summation import (
    Builder,
    Probe,
    Tree,
    Triple,
    ask_signed,
    ask_squares,
    confirm,
    recover,
    tell_squares,
)

CPU = torch.device("cpu")
FP32 = torch.float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def evaluate(tree: Tree, x: Tensor) -> Tensor:
    """Add the columns of ``x`` in fp32 as ``tree`` says. Additions of several numbers cut each at the largest's end."""
    values = list(x.float().unbind(1))
    for nodes in tree.additions:
        parts = [values[node] for node in nodes]
        if len(parts) == 2:
            values.append(parts[0] + parts[1])
        else:
            largest = torch.stack(parts).abs().amax(0).double()
            place = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - 23)
            values.append(sum(torch.trunc(part.double() / place) * place for part in parts).float())  # type: ignore[union-attr]
    return values[-1]


def sequential(n: int) -> Tree:
    builder = Builder(n)
    builder.serial(range(n))
    return builder.tree()


def pairwise(n: int) -> Tree:
    builder = Builder(n)
    builder.neighbours(range(n))
    return builder.tree()


def strided(n: int, lanes: int = 8) -> Tree:
    builder = Builder(n)
    builder.halves([builder.serial(range(lane, n, lanes)) for lane in range(lanes)])
    return builder.tree()


def fused(n: int, terms: int = 4) -> Tree:
    """Like a matrix unit: an accumulator and some products are added at once."""
    builder, total = Builder(n), 0
    for start in range(1, n, terms):
        total = builder.add(total, *range(start, min(start + terms, n)))
    return builder.tree()


def shuffled(n: int, seed: int) -> Tree:
    draw, builder, free = random.Random(seed), Builder(n), list(range(n))
    while len(free) > 1:
        draw.shuffle(free)
        free.append(builder.add(free.pop(), free.pop()))
    return builder.tree()


HAND_MADE: dict[str, Callable[[int], Tree]] = {
    "sequential": sequential,
    "pairwise": pairwise,
    "strided": strided,
    "shuffled": lambda n: shuffled(n, n),
}


def probe_of(tree: Tree, rows: int = 3, dtype: torch.dtype = FP32) -> Probe:
    return Probe(lambda x: evaluate(tree, x), tree.leaves, rows, dtype, CPU)


@pytest.mark.parametrize("n", [1, 2, 3, 64, 100])
@pytest.mark.parametrize("kind", [*HAND_MADE, "fused"])
def test_trees_made_by_hand_are_recovered(kind: str, n: int) -> None:
    if kind == "strided" and n < 8:
        n = 8
    tree = (HAND_MADE | {"fused": fused})[kind](n)
    for dtype in DTYPES:
        assert recover(probe_of(tree, dtype=dtype)) == tree


def test_a_fused_addition_of_several_terms_is_seen_as_one() -> None:
    tree = recover(probe_of(fused(33)))
    assert {len(nodes) for nodes in tree.additions} == {5}
    with pytest.raises(ValueError, match="two numbers"):
        _ = tree.triples


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HAND_MADE)
def test_a_tree_is_confirmed_and_every_other_is_not(kind: str, dtype: torch.dtype) -> None:
    signed = probe_of(HAND_MADE[kind](64), dtype=dtype)
    squares = replace(signed, sums=lambda x: signed.sums(x.float() ** 2))
    for other, make in HAND_MADE.items():
        for probe, ask in ((signed, ask_signed), (squares, ask_squares)):
            wrong = confirm(probe, make(64), ask)
            assert (wrong is None) == (other == kind), (other, ask)
            assert (confirm(probe, make(64), ask, limit=20) is None) == (other == kind)


def all_trees(leaves: tuple[int, ...]) -> list[list[tuple[frozenset[int], frozenset[int]]]]:
    """Every binary tree over these leaves, each as its additions, the largest first."""
    if len(leaves) == 1:
        return [[]]
    first, *others = leaves
    found = []
    for size in range(len(others)):
        for some in combinations(others, size):
            left, right = (first, *some), tuple(leaf for leaf in others if leaf not in some)
            for one in all_trees(left):
                found += [[(frozenset(left), frozenset(right)), *one, *other] for other in all_trees(right)]
    return found


def holds(tree: list[tuple[frozenset[int], frozenset[int]]], triple: Triple) -> bool:
    """Whether the two sides of the addition where all three have met part j and k from i."""
    j, k, i = triple
    return any((j in a) == (k in a) != (i in a) and {j, k, i} <= a | b for a, b in tree)


def test_the_triples_of_a_tree_hold_in_no_other_tree() -> None:
    """The claim behind :func:`confirm`, for trees over six leaves: each seventh against all 945."""
    trees = all_trees(tuple(range(6)))
    assert len(trees) == 945
    for number in range(0, len(trees), 7):
        builder, node = Builder(6), {frozenset({leaf}): leaf for leaf in range(6)}
        for a, b in reversed(trees[number]):
            node[a | b] = builder.add(node[a], node[b])
        triples = builder.tree().triples
        assert len(triples) == 4
        fitting = [at for at, other in enumerate(trees) if all(holds(other, triple) for triple in triples)]
        assert fitting == [number]
        assert sum(all(holds(other, triple) for triple in triples[1:]) for other in trees) > 1, "one is not needed"


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("n", [7, 128, 600])
def test_the_tree_of_torchs_own_cpu_sum_gives_its_bits(n: int, rows: int) -> None:
    tree = recover(Probe(lambda x: x.sum(-1), n, rows, FP32, CPU))
    x = torch.randn((rows * 40, n), generator=torch.Generator().manual_seed(n))
    sums = torch.cat([part.sum(-1) for part in x.split(rows)])
    assert torch.equal(evaluate(tree, x), sums)
    if n > 8:
        assert not torch.equal(evaluate(sequential(n), x), sums)
        assert confirm(Probe(lambda x: x.sum(-1), n, rows, FP32, CPU), sequential(n), ask_signed)


def test_a_factor_after_the_sum_does_no_harm() -> None:
    tree = strided(96)
    mean = Probe(lambda x: evaluate(tree, x) * (1 / 96), 96, 2, FP32, CPU)
    assert recover(mean) == tree
    half = replace(mean, sums=lambda x: (evaluate(tree, x) * (1 / 96)).half(), dtype=torch.float16)
    assert confirm(half, tree, ask_signed) is None


def test_an_accumulator_of_another_precision_is_no_tree_of_fp32() -> None:
    """Then the order hardly matters, and a kernel that adds in fp32 has other bits whatever its order."""
    wide = Probe(lambda x: x.double().sum(-1).float(), 64, 1, FP32, CPU)
    with pytest.raises(ValueError, match=r"no sum in a fixed order"):
        recover(wide)
    assert confirm(wide, pairwise(64), ask_signed) is not None
    assert confirm(replace(wide, sums=lambda x: (x.double() ** 2).sum(-1)), pairwise(64), ask_squares) is not None


@pytest.mark.parametrize("answer", [0.0, 1.0])
def test_an_instrument_that_always_says_the_same_confirms_nothing(answer: float) -> None:
    stuck = Probe(lambda x: torch.full((len(x),), answer), 64, 4, FP32, CPU)
    assert confirm(stuck, pairwise(64), ask_signed) is not None
    assert confirm(stuck, pairwise(64), ask_squares) is not None
    assert tell_squares(stuck) is None


def test_a_reading_that_merges_neighbours_needs_another_scale() -> None:
    """A reciprocal root maps two neighbouring sums to one number half of the time."""
    tree = pairwise(16)

    def root(x: Tensor) -> Tensor:
        return (evaluate(tree, x.float() ** 2) / 15).rsqrt()

    found = [
        confirm(replace(probe_of(tree), sums=root, scale=1 + step / 128), tree, ask_squares) is None
        for step in range(53)
    ]
    assert any(found)
    assert not all(found)
    told = tell_squares(replace(probe_of(tree), sums=root))
    assert told is not None
    assert found[round((told.scale - 1) * 128)]


def test_every_call_has_the_rows_that_it_should_and_starts_where_it_should() -> None:
    calls = []

    def sums(x: Tensor) -> Tensor:
        calls.append((tuple(x.shape), x.data_ptr() % 16))
        return evaluate(tree, x)

    tree = pairwise(64)
    assert recover(Probe(sums, 64, 7, FP32, CPU, offset=3)) == tree
    assert set(calls) == {((7, 64), 12)}


def test_trees_say_where_they_part() -> None:
    assert sequential(8).differs_from(sequential(8)) is None
    assert sequential(8).differs_from(pairwise(8)) == (
        "leaves 0, 1, 2 are added up by themselves in one tree and not in the other"
    )
    assert "8 leaves against 9" in str(sequential(8).differs_from(sequential(9)))
    assert len({make(64).digest for make in HAND_MADE.values()}) == len(HAND_MADE)


def test_the_sides_of_an_addition_do_not_matter() -> None:
    one, other = Builder(4), Builder(4)
    one.add(one.add(0, 1), one.add(2, 3))
    other.add(other.add(3, 2), other.add(1, 0))
    assert one.tree() == other.tree()
    assert one.tree() != sequential(4)


@pytest.mark.parametrize("additions", [[(0, 1)], [(0, 0), (3, 1)], [(0, 1), (0, 2)], [(0,), (1, 2)], [(0, 9)]])
def test_what_is_no_tree_is_refused(additions: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Tree.of(3, additions)
