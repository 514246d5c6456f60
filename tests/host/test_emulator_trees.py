"""Launch plans and summation trees of the emulated ``mean``, against tables and trees written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from aten_emulator import ReducePlan, aten_sum, reduce_plan

# (width, height) of the block for 1, 2-3, 4-7, 8-15 and 16 or more rows, by how many loads a row has.
BLOCKS = {
    32: ((32, 1), (32, 2), (32, 4), (32, 8), (32, 16)),
    64: ((64, 1), (64, 2), (64, 4), (64, 8), (32, 16)),
    128: ((128, 1), (128, 2), (128, 4), (64, 8), (32, 16)),
    256: ((256, 1), (256, 2), (128, 4), (64, 8), (32, 16)),
    512: ((512, 1), (256, 2), (128, 4), (64, 8), (32, 16)),
}
CLASS_OF_ROWS = {1: 0, 2: 1, 3: 1, 4: 2, 7: 2, 8: 3, 15: 3, 16: 4, 17: 4, 31: 4, 512: 4, 126_720: 4}
FP32_LOADS = {32: 32, 63: 32, 64: 64, 120: 64, 127: 64, 128: 32, 136: 32, 252: 32, 256: 64, 512: 128, 1024: 256}
FP32_LOADS |= dict.fromkeys((2048, 3072, 3584, 3840, 7936, 8160, 8164, 8192, 8200, 12288, 16384), 512)
HALF_LOADS = {32: 32, 64: 64, 120: 64, 248: 16, 256: 32, 512: 64, 1024: 128, 2048: 256, 3072: 256, 4096: 512, 8192: 512}


@pytest.mark.parametrize("width", FP32_LOADS)
def test_blocks_of_fp32_means(width: int) -> None:
    for rows, column in CLASS_OF_ROWS.items():
        plan = reduce_plan(rows, width)
        assert (plan.width, plan.height) == BLOCKS[FP32_LOADS[width]][column], rows
        assert plan.vector == (4 if width >= 128 else 0)


@pytest.mark.parametrize("width", HALF_LOADS)
def test_blocks_of_16_bit_means(width: int) -> None:
    blocks = BLOCKS | {16: ((16, 1), (16, 2), (16, 4), (16, 8), (16, 16))}
    for rows, column in CLASS_OF_ROWS.items():
        plan = reduce_plan(rows, width, 16)
        expected = (16, 32) if HALF_LOADS[width] == 16 and rows >= 32 else blocks[HALF_LOADS[width]][column]
        assert (plan.width, plan.height) == (expected if rows != 31 else blocks[HALF_LOADS[width]][column]), rows
        assert plan.vector == (8 if width >= 128 else 0)


@pytest.mark.parametrize(
    ("rows", "first"),
    [(1, 7681), (2, 7937), (3, 7937), (4, 8065), (7, 8065), (8, 8129), (15, 8129), (16, 8161), (17, 8161)],
)
@pytest.mark.parametrize("bits", [32, 16])
def test_the_width_from_which_a_row_goes_over_the_whole_block(rows: int, first: int, bits: int) -> None:
    before, after = reduce_plan(rows, first - 1, bits), reduce_plan(rows, first, bits)
    assert (before.split, after.split) == (False, True)
    assert (before.width, before.height) == (after.width, after.height)
    assert after.threads == 512


def test_longer_rows_than_one_block_takes_are_refused() -> None:
    assert reduce_plan(16, 512 * 255).split
    with pytest.raises(ValueError, match="split across blocks"):
        reduce_plan(16, 512 * 255 + 1)


# --- trees --------------------------------------------------------------------------------------------------------
# A tree is a leaf number or a pair of trees. It is known when for every two leaves the number of leaves below their
# meeting point is known; a summation shows that number: +M at one leaf, -M at the other, 1 everywhere else, and what
# is added before M and -M meet is swallowed.

Tree = object


def _serial(items: list[Tree]) -> Tree:
    tree = items[0]
    for item in items[1:]:
        tree = (tree, item)
    return tree


def _fold_halves(items: list[Tree]) -> Tree:
    while len(items) > 1:
        half = len(items) // 2
        items = list(zip(items[:half], items[half:], strict=True))
    return items[0]


def _leaves_below_meeting_points(tree: Tree, width: int) -> np.ndarray:
    below = np.ones((width, width), np.int64)

    def walk(node: Tree) -> list[int]:
        if isinstance(node, int):
            return [node]
        left, right = walk(node[0]), walk(node[1])
        below[np.ix_(left, right)] = below[np.ix_(right, left)] = len(left) + len(right)
        return left + right

    assert sorted(walk(tree)) == list(range(width))
    return below


def _vector_tree(width: int, threads: int, vector: int, block_x: int) -> Tree:
    """By hand, for widths that fill every load: a column of loads per thread, its lanes one after the other, halves."""
    partials = []
    for thread in range(threads):
        starts = range(thread * vector, width, threads * vector)
        partials.append(_serial([_serial([start + lane for start in starts]) for lane in range(vector)]))
    rows = [_fold_halves(partials[first : first + block_x]) for first in range(0, threads, block_x)]
    return _fold_halves(rows)


def _strided_tree(width: int, threads: int) -> Tree:
    """By hand, below 128: four sums a thread, element by element, `threads` apart."""
    partials = []
    for thread in range(threads):
        chains = [list(range(thread + lane * threads, width, 4 * threads)) for lane in range(4)]
        partials.append(_serial([_serial(chain) for chain in chains if chain]))
    return _fold_halves(partials)


def _probe(plan: ReducePlan, width: int, pairs: np.ndarray, offset: int = 0) -> np.ndarray:
    found = np.empty(len(pairs), np.int64)
    # Rows of such a width lie at different distances from a boundary, so each is summed as the first one.
    batch = 1 if plan.vector and width % plan.vector else 1024
    for start in range(0, len(pairs), batch):
        some = pairs[start : start + batch]
        x = np.ones((len(some), width), np.float32)
        every = np.arange(len(some))
        x[every, some[:, 0]] = 2.0**60
        x[every, some[:, 1]] = -(2.0**60)
        found[start : start + batch] = width - aten_sum(x, plan, offset).astype(np.int64)
    return found


def _pairs(width: int, seed: int) -> np.ndarray:
    if width <= 128:
        return np.array([(i, j) for i in range(width) for j in range(i)])
    pairs = np.random.default_rng(seed).integers(0, width, (1500, 2))
    neighbours = np.array([(i, j) for i in range(0, width, max(1, width // 200)) for j in (0, 1, 4, 8, width - 1)])
    pairs = np.concatenate([pairs, neighbours])
    return pairs[pairs[:, 0] != pairs[:, 1]]


TREES = [
    # rows, width, bits, the tree by hand: threads that share a row, loads of so many, threads in x
    (1, 64, 32, _strided_tree(64, 64)),
    (16, 64, 32, _strided_tree(64, 32)),
    (8, 96, 32, _strided_tree(96, 64)),
    (16, 96, 32, _strided_tree(96, 32)),
    (16, 120, 16, _strided_tree(120, 32)),
    (1, 128, 32, _vector_tree(128, 32, 4, 32)),
    (17, 128, 32, _vector_tree(128, 32, 4, 32)),
    (17, 128, 16, _vector_tree(128, 16, 8, 16)),
    (1, 256, 32, _vector_tree(256, 64, 4, 64)),
    (16, 256, 32, _vector_tree(256, 32, 4, 32)),
    (1, 3072, 32, _vector_tree(3072, 512, 4, 512)),
    (2, 3072, 32, _vector_tree(3072, 256, 4, 256)),
    (7, 3072, 32, _vector_tree(3072, 128, 4, 128)),
    (15, 3072, 32, _vector_tree(3072, 64, 4, 64)),
    (16, 3072, 32, _vector_tree(3072, 32, 4, 32)),
    (16, 3072, 16, _vector_tree(3072, 32, 8, 32)),
]


@pytest.mark.parametrize(("rows", "width", "bits", "tree"), TREES, ids=[f"{r}x{w}-{b}bit" for r, w, b, _ in TREES])
def test_trees_are_those_written_by_hand(rows: int, width: int, bits: int, tree: Tree) -> None:
    pairs = _pairs(width, rows)
    expected = _leaves_below_meeting_points(tree, width)[pairs[:, 0], pairs[:, 1]]
    assert np.array_equal(_probe(reduce_plan(rows, width, bits), width, pairs), expected)


@pytest.mark.parametrize(("rows", "block_x", "block_y"), [(2, 256, 2), (16, 32, 16)])
def test_trees_of_rows_that_go_over_the_whole_block(rows: int, block_x: int, block_y: int) -> None:
    width = 8192
    pairs = _pairs(width, rows)[::4]
    tree = _vector_tree(width, block_x * block_y, 4, block_x)
    expected = _leaves_below_meeting_points(tree, width)[pairs[:, 0], pairs[:, 1]]
    assert np.array_equal(_probe(reduce_plan(rows, width), width, pairs), expected)


def test_a_wrong_tree_is_found() -> None:
    pairs = _pairs(3072, 0)
    wrong = _leaves_below_meeting_points(_vector_tree(3072, 64, 4, 64), 3072)[pairs[:, 0], pairs[:, 1]]
    assert not np.array_equal(_probe(reduce_plan(16, 3072), 3072, pairs), wrong)
    # The folds of torch 2.9 and before, neighbours first, differ too.
    lanes = [_serial([4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3]) for t in range(32)]
    while len(lanes) > 1:
        lanes = list(zip(lanes[::2], lanes[1::2], strict=True))
    pairs = _pairs(128, 0)
    older = _leaves_below_meeting_points(lanes[0], 128)[pairs[:, 0], pairs[:, 1]]
    assert not np.array_equal(_probe(reduce_plan(16, 128), 128, pairs), older)


def test_a_tail_joins_the_first_sums_of_the_first_threads() -> None:
    # 130 elements: 32 loads and two left over, which threads 0 and 1 add to their first sum, after their load.
    partials = [_serial([4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3]) for t in range(32)]
    partials[0] = _serial([(0, 128), 1, 2, 3])
    partials[1] = _serial([(4, 129), 5, 6, 7])
    pairs = _pairs(130, 0)
    expected = _leaves_below_meeting_points(_fold_halves(partials), 130)[pairs[:, 0], pairs[:, 1]]
    assert np.array_equal(_probe(reduce_plan(1, 130), 130, pairs), expected)


def test_an_unaligned_head_joins_the_first_sums_before_the_loads() -> None:
    # One element past a boundary: threads 1, 2, 3 start with elements 0, 1, 2, then the loads begin at element 3.
    # 31 loads leave element 127 over for thread 0, and the last thread has nothing: it adds zero to thread 15.
    partials = [_serial([3 + 4 * t, 4 + 4 * t, 5 + 4 * t, 6 + 4 * t]) for t in range(31)]
    partials[0] = _serial([(3, 127), 4, 5, 6])
    for thread in (1, 2, 3):
        first = 3 + 4 * thread
        partials[thread] = _serial([(thread - 1, first), first + 1, first + 2, first + 3])
    sixteen = [*zip(partials[:15], partials[16:31], strict=True), partials[15]]
    expected = _leaves_below_meeting_points(_fold_halves(sixteen), 128)
    pairs = _pairs(128, 0)
    found = _probe(reduce_plan(1, 128), 128, pairs, offset=1)
    assert np.array_equal(found, expected[pairs[:, 0], pairs[:, 1]])
    assert not np.array_equal(found, _probe(reduce_plan(1, 128), 128, pairs))
