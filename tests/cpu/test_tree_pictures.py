"""The proof of orders: what it covers, how a tree is drawn, and the emulator of LayerNorm's moments."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from itertools import pairwise as pairwise_of

import pytest
import torch
from test_summation import fused, pairwise, sequential, shuffled

from samebits.ops._reduce_plan import reduce_plan, reduce_tree
from samebits.proof import welford
from samebits.proof.tree_pictures import MAX_ROWS, describe, picture, rows_of
from samebits.proof.trees import ROWS, WIDEST, Geometry, thresholds
from samebits.summation import Tree

CPU = torch.device("cpu")


def planned(rows: int, width: int, size: int = 4, shift: int = 0) -> Tree:
    plan = reduce_plan(rows, width, size)
    assert plan is not None
    return reduce_tree(plan, width, shift=shift)


def test_the_thresholds_are_all_there_are() -> None:
    """Between two neighbouring thresholds nothing changes; at each something does."""
    found = thresholds(128)
    for rows in ROWS:
        edges = [at.width for at in found if at.rows == rows]
        changes = list(zip(edges[::2], edges[1::2], strict=True))
        assert changes
        assert all(upper == lower + 4 for lower, upper in changes)
        borders = [128, *(upper for _, upper in changes), WIDEST + 4]
        for start, end in pairwise_of(borders):
            assert len({Geometry(rows, width).plan for width in range(start, end, 4)}) <= 1
    # The width from which a row goes over the whole block, known from the sources.
    assert {(at.rows, at.width) for at in found} >= {(1, 124), (1, 128), (2, 7936), (2, 7940), (16, 8160), (16, 8164)}


# --- pictures ---------------------------------------------------------------------------------------------------------


def lines(tree: Tree) -> list[str]:
    return [f"{'  ' * row.depth}{row.text}" for row in rows_of(tree)]


def test_the_tree_of_a_full_row_is_a_short_ladder() -> None:
    assert lines(planned(16, 3840)) == [
        "+ 3,840 = below + [4-7, then every 8: 1,920 numbers, as below]",
        "+ 1,920 = below + [8-11, then every 16: 960 numbers, as below]",
        "+ 960 = below + [16-19, then every 32: 480 numbers, as below]",
        "+ 480 = below + [32-35, then every 64: 240 numbers, as below]",
        "+ 240 = below + [64-67, then every 128: 120 numbers, as below]",
        "+ 120 = below + [3, 131, ..., 3715: 30 numbers one after the other]",
        "+ 90 = below + [2, 130, ..., 3714: 30 numbers one after the other]",
        "+ 60 = below + [1, 129, ..., 3713: 30 numbers one after the other]",
        "0, 128, ..., 3712: 30 numbers one after the other",
    ]


def test_other_trees_are_drawn_as_they_are() -> None:
    assert lines(sequential(100)) == ["0, 1, ..., 99: 100 numbers one after the other"]
    assert lines(pairwise(8)) == [
        "+ 8 = below + [4-7: 4 numbers, as below]",
        "+ 4 = below + [2 then 3]",
        "0 then 1",
    ]
    assert lines(fused(5)) == ["+ 5 = below + [number 1] + [number 2] + [number 3] + [number 4]", "number 0"]
    # A thread's sum that an unaligned element opens, and a side that is built otherwise.
    unaligned = lines(planned(16, 3840, shift=1))
    assert "+ 3,840 = below + the 1,922 numbers aside" in unaligned
    assert any("below, then 139, 267, ..., 3723: 29 numbers one after the other" in line for line in unaligned)


def test_a_tree_without_a_pattern_is_cut_off_and_says_so() -> None:
    drawn = lines(shuffled(400, 1))
    assert len(drawn) == MAX_ROWS + 1
    assert drawn[-1] == "and so on"


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        ([3], "3"),
        ([4, 5, 6], "4-6"),
        ([0, 1, 8, 9, 16, 17], "0-1, then every 8"),
        ([0, 1, 4, 5, 16, 17, 20, 21], "0-1, 4-5, then every 16"),
        ([1, 5, 6], "1, 5-6"),
        ([1, 3, 6, 10, 15, 21], "1, 3, ..., 21"),
    ],
)
def test_numbers_are_named_by_their_pattern(leaves: list[int], text: str) -> None:
    assert describe(leaves) == text


def test_a_picture_is_one_self_contained_svg() -> None:
    text = picture(planned(1, 8200), "<eager> & kernel")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "<eager> & kernel"
    assert planned(1, 8200).digest in words[1]
    assert "8,199 additions" in words[1]
    assert "href" not in text
    assert picture(planned(16, 8200), "x") != picture(planned(1, 8200), "x")


# --- LayerNorm's moments ----------------------------------------------------------------------------------------------


def to_fp32(value: Fraction) -> float:
    """The fp32 number nearest to ``value``, ties to even, by whole numbers alone."""
    if value == 0:
        return 0.0
    size, exponent = abs(value), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(abs(value) / unit) * unit  # Python rounds halves to even
    return math.copysign(float(rounded), value) if rounded < Fraction(2) ** 128 else math.copysign(math.inf, value)


def operands() -> torch.Tensor:
    """``(n, 3)`` fp32: any, and such that a sum lies in the middle of two numbers or next to it."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3000, 3), generator=generator).to(torch.int32)
    anything = bits.view(torch.float32)
    near = torch.randn((2000, 3), generator=generator)
    near[:, 2] *= torch.exp2(torch.randint(-30, 30, (2000,), generator=generator))
    # a * b is half a unit in c's last place, or less than that by what not even fp64 holds.
    little = torch.arange(500) % 2 * 2.0**-23
    ties = torch.stack([1 + little, 2.0**-24 * (1 - little), torch.ones(500) + torch.arange(500) // 2 * 2.0**-23], 1)
    tiny = near[:500] * 2.0**-70
    tiny[:, 2] *= 2.0**-70
    every = torch.cat([anything, near, ties, ties * torch.tensor([-1.0, 1.0, 1.0]), tiny])
    return every[every.isfinite().all(1)]


def test_the_fma_has_one_rounding() -> None:
    a, b, c = operands().unbind(1)
    found = welford.fma(a, b, c)
    twice = 0
    for at in range(len(a)):
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        assert float(found[at]) == to_fp32(exact), (a[at], b[at], c[at])
        twice += float((a[at].double() * b[at].double() + c[at].double()).float()) != to_fp32(exact)
    assert twice > 0, "these operands do not tell an fma from fp64 rounded twice"


def test_the_fma_hands_on_what_is_not_finite() -> None:
    inf, nan, one = torch.tensor(torch.inf), torch.tensor(torch.nan), torch.tensor(1.0)
    assert welford.fma(inf, one, one) == inf
    assert welford.fma(inf, one, -inf).isnan()
    assert welford.fma(nan, one, one).isnan()
    assert welford.fma(torch.tensor(3e38), torch.tensor(3e38), one) == inf


@pytest.mark.parametrize("width", [4, 128, 1000, 3072])
def test_the_moments_are_near_the_exact_ones_and_the_controls_elsewhere(width: int) -> None:
    x = torch.randn((50, width), generator=torch.Generator().manual_seed(width)) + 3
    mean, variance = welford.moments(x)
    assert torch.allclose(mean.double(), x.double().mean(1), rtol=1e-6)
    assert torch.allclose(variance.double(), x.double().var(1, correction=0), rtol=1e-5)
    without = welford.moments(x, welford.two_roundings)
    assert not torch.equal(torch.stack(without), torch.stack((mean, variance)))
    if width == 1000:
        swapped = welford.moments(x, swapped=True)
        assert not torch.equal(torch.stack(swapped), torch.stack((mean, variance)))


def test_a_width_of_no_whole_vectors_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        welford.moments(torch.zeros(2, 6))
