"""The source of the products that are finished on the chip, on the CPU: equal bits or a failure.

The GPU's tensor core rounds its inner sums in its own way, so every sum here is exact: small integers, or one product
that is not zero. A cluster has one block.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
from pathlib import Path

import aten_chains
import numpy as np
import pytest
import torch
from binary32 import decode, encode
from kernel_inputs import BF16
from kernel_runs import GuardedOutput, difference, needs_compiler

import samebits.ops
from samebits import host, jit
from samebits.bits import compare
from samebits.errors import LaunchError
from samebits.host.tensor_map import encode_on_cpu
from samebits.ops import by_name
from samebits.ops._library import blas_state

pytestmark = needs_compiler
Tensor = torch.Tensor

CPU = torch.device("cpu")
SOURCES = Path(samebits.ops.__file__).parent
THREADS = 384
STAGES_BYTES = 3 * (128 + 256) * 64 * 2
SHARED_BYTES = STAGES_BYTES + 128 * 256 * 2 + 10 * 8 + 1024  # the tiles, the barriers, and room to align them
TABLE_BYTES = 2 * (0x4180 - 0x3AFF + 1) * 4
X_BOX, W_BOX, Y_BOX = 64, 128, 64
"""Rows of a box of each matrix."""

Sizes = tuple[int, int, int, int]
SIZES: list[Sizes] = [
    # rows, columns, width, blocks
    (1, 64, 64, 1),
    (128, 256, 128, 1),
    (128, 128, 64, 2),
    (129, 320, 64, 2),
    (65, 64, 512, 1),
    (300, 832, 192, 3),  # a block takes several tiles, and not all take equally many
    (300, 832, 192, 1),
    (257, 576, 256, 40),  # more blocks than tiles
]


class Memory:
    """Tensor maps of matrices, kept alive."""

    def __init__(self) -> None:
        self._blobs: list[object] = []

    def map(self, matrix: Tensor, box_rows: int) -> int:
        """The address of a map."""
        rows, columns = matrix.shape
        content = encode_on_cpu(matrix.data_ptr(), rows, columns, matrix.stride(0) * 2, box_rows)
        blob = ctypes.create_string_buffer(content, 128)
        self._blobs.append(blob)
        return ctypes.addressof(blob)


def run(
    name: str,
    x: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    blocks: int,
    group: int = 2,
    cluster: int = 1,
    sources: Path = SOURCES,
) -> tuple[Tensor, str | None]:
    """The result of a kernel, and what is wrong with the memory around it."""
    constants = {"CLUSTER": cluster, "SIDE_BY_SIDE": 0, "GROUP": group}
    kernel = jit.compile(sources / f"{name}.cu", name, constants, CPU)
    (rows, width), columns = x.shape, weights[0].shape[0]
    output, memory = GuardedOutput(torch.empty(rows, columns, dtype=BF16)), Memory()
    pointers = [memory.map(x, X_BOX), *(memory.map(w, W_BOX) for w in weights), memory.map(output.tensor, Y_BOX)]
    if bias is not None:
        pointers.append(bias.data_ptr())
    shared_bytes = SHARED_BYTES + (TABLE_BYTES if bias is not None else 0)
    sizes = {"rows": rows, "columns": columns, "width": width}
    kernel.bind((blocks, 1, 1), (THREADS, 1, 1), shared_bytes, **sizes)(0, *pointers)
    return output.tensor, output.problem()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias``, every sum exact, rounded once."""
    with np.errstate(all="ignore"):
        sums = (x.double().numpy() @ weight.double().numpy().T).astype(np.float32)
        return encode(sums if bias is None else sums + decode(bias), BF16)


def gelu_problem(x: Tensor, w: Tensor, bias: Tensor, blocks: int, **changes: object) -> str | None:
    """What is wrong with the GELU of a linear, or ``None``."""
    y, problem = run("linear_gelu_tanh", x, (w,), bias, blocks, **changes)  # type: ignore[arg-type]
    found = compare((y,), (aten_chains.gelu_tanh(linear(x, w, bias)),))
    return problem or (str(found) if found is not None else None)


def swiglu_problem(x: Tensor, gate: Tensor, up: Tensor, blocks: int, **changes: object) -> str | None:
    """What is wrong with the SwiGLU of two linears, or ``None``."""
    y, problem = run("linear_swiglu", x, (gate, up), None, blocks, **changes)  # type: ignore[arg-type]
    found = compare((y,), (aten_chains.swiglu(linear(x, gate, None), linear(x, up, None)),))
    return problem or (str(found) if found is not None else None)


def integers(rows: int, columns: int, seed: int, row_stride: int | None = None, most: int = 3) -> Tensor:
    """Small ones in rows that lie ``row_stride`` apart; between the rows lie NaNs."""
    memory = torch.full((rows, row_stride or columns), torch.nan, dtype=BF16)
    values = torch.randint(-most, most + 1, (rows, columns), generator=torch.Generator().manual_seed(seed))
    memory[:, :columns] = values.to(BF16)
    return memory[:, :columns]


def ordinary(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, two weights and a bias, such that the sums are exact in fp32, few of them in bf16, and many near zero."""
    rows, columns, width, _ = sizes
    w, w2 = (integers(columns, width, seed, most=60) / 256 for seed in (2, 3))
    return integers(rows, width, 1), w, w2, integers(1, columns, 4)[0] * 0.5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gelu_of_a_linear(sizes: Sizes) -> None:
    x, w, _, bias = ordinary(sizes)
    assert gelu_problem(x, w, bias, sizes[3]) is None
    assert gelu_problem(x, w, bias.roll(1), sizes[3]) is None
    y, _ = run("linear_gelu_tanh", x, (w,), bias, sizes[3])
    assert compare((y,), (aten_chains.gelu_tanh(linear(x, w, bias.roll(1))),)) is not None, "any bias would do"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_swiglu_of_two_linears(sizes: Sizes) -> None:
    x, gate, up, _ = ordinary(sizes)
    assert swiglu_problem(x, gate, up, sizes[3]) is None
    y, _ = run("linear_swiglu", x, (gate, up), None, sizes[3])
    swapped = aten_chains.swiglu(linear(x, up, None), linear(x, gate, None))
    assert compare((y,), (swapped,)) is not None, "either weight would do for the other"


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_under_other_schedules(order: int, workers: int) -> None:
    sizes = (300, 832, 256, 5)
    x, w, w2, bias = ordinary(sizes)
    with host.schedule(order, workers):
        assert gelu_problem(x, w, bias, 5) is None
        assert swiglu_problem(x, w, w2, 5) is None


@pytest.mark.parametrize("group", [1, 3, 64])
def test_however_tiles_are_grouped(group: int) -> None:
    sizes = (600, 640, 64, 4)
    x, w, w2, bias = ordinary(sizes)
    assert gelu_problem(x, w, bias, 4, group=group) is None
    assert swiglu_problem(x, w, w2, 4, group=group) is None


def test_rows_that_lie_apart() -> None:
    x, w, w2 = (integers(count, 128, count, 192) for count in (200, 320, 321))
    assert gelu_problem(x, w, integers(1, 320, 5)[0], 2) is None
    assert swiglu_problem(x, w, w2[:320], 2) is None


def every_finite_value() -> Tensor:
    """``(256, 256)``, with zeros for infinities and NaNs."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    return torch.where(values.isfinite(), values, torch.zeros((), dtype=BF16))


def test_every_finite_value_through_the_gelu() -> None:
    x, chosen = every_finite_value(), torch.eye(256, dtype=BF16)
    bias = torch.zeros(256, dtype=BF16)
    z = linear(x, chosen, bias)
    assert compare((z,), (x + 0,)) is None  # -0 is 0 after the sum
    assert np.unique(decode(z)).size == 65536 - 2 * 128 - 1
    assert gelu_problem(x, chosen, bias, 1) is None


@pytest.mark.parametrize("factor", [1.0, -3.0, 3e38, 1e-40])
def test_every_finite_value_through_the_swiglu(factor: float) -> None:
    """The gate's product is each value, the other one's a number for each column."""
    values, nothing = every_finite_value(), torch.zeros(256, 64, dtype=BF16)
    ones = nothing.clone()
    ones[:, 7] = 1
    second = nothing.clone()
    second[:, 7] = (torch.arange(256) % 5 - 2) * factor
    x = torch.cat([values, ones], 1)
    gate = torch.cat([torch.eye(256, dtype=BF16), nothing], 1)
    up = torch.cat([torch.zeros(256, 256, dtype=BF16), second], 1)
    assert np.unique(decode(linear(x, up, None))).size == 5
    assert swiglu_problem(x, gate, up, 1) is None


def special_products() -> tuple[Tensor, Tensor]:
    """x (8, 64) and a weight (64, 64): NaNs, infinities of both signs, infinity minus infinity, zeros of both signs."""
    x, w = torch.zeros(8, 64), torch.ones(64, 64)
    w[::2] = -1
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3, 0], x[3, 63] = torch.inf, -torch.inf
    x[4, 20] = 3e38  # twice that is beyond fp32
    w[32:, 20] = 4
    x[5, 20] = 2.0**-70  # 2^-140 is no zero in fp32, and in bf16 a zero that keeps its sign
    w[8:16, 20] = -(2.0**-70)
    x[6, 20] = -(2.0**-70)
    x[7, 1], x[7, 2] = 2, -2
    w[1, 40] = torch.inf
    return x.to(BF16), w.to(BF16)


def test_special_values_through_the_gelu() -> None:
    x, w = special_products()
    bias = torch.zeros(64, dtype=BF16)
    z = linear(x, w, bias)
    negative_zero = (z == 0) & z.signbit()
    assert negative_zero[5, 8:16].all()
    assert not negative_zero[6, 8:16].any()
    assert (z == torch.inf).any()
    assert (z == -torch.inf).any()
    assert z.isnan().any()
    assert gelu_problem(x, w, bias, 1) is None
    bias[::3], bias[1::3], bias[5] = -0.0, torch.inf, torch.nan
    assert gelu_problem(x, w, bias, 1) is None


def test_special_values_through_the_swiglu() -> None:
    x, w = special_products()
    assert swiglu_problem(x, w, w.roll(1, 0), 1) is None
    assert swiglu_problem(x, w.flip(0), w, 1) is None


@pytest.mark.parametrize("sizes", [(2, 150, 320, 128), (1, 65, 64, 64), (3, 128, 832, 64)], ids=str)
def test_as_the_ops_launch_them(sizes: tuple[int, int, int, int]) -> None:
    batch, tokens, columns, width = sizes
    x, w, w2, bias = ordinary((batch * tokens, columns, width, 1))
    for name, weights, expected in (
        ("linear_gelu_tanh", (w, bias), aten_chains.gelu_tanh(linear(x, w, bias))),
        ("linear_swiglu", (w, w2), aten_chains.swiglu(linear(x, w, None), linear(x, w2, None))),
    ):
        args = (x.view(batch, tokens, width), *weights, blas_state())
        assert difference(by_name(name), args, expected.view(batch, tokens, columns)) is None


def test_a_cluster_has_one_block_here() -> None:
    x, w, _, bias = ordinary((128, 256, 64, 2))
    with pytest.raises(LaunchError, match="load_box_to_both: on the CPU a cluster has one block"):
        gelu_problem(x, w, bias, 2, cluster=2)


# ---- negative controls ----------------------------------------------------------------------------------------------

MISTAKES = {
    "the results are not swizzled": ("(j % 8) ^ (row % 8)", "(j % 8)"),
    "the rows below have another swizzle": ("(j % 8) ^ (row % 8)", "(j % 8) ^ ((row + 8 * below) % 16 / 2)"),
    "a thread's rows are others": ("thread / 32 * 16 + thread % 32 / 4", "thread / 32 * 8 + thread % 32 / 4"),
    "a tile begins with the last one's sums": ("columns_from(b, i), k | i)", "columns_from(b, i), 1)"),
    "every step begins again": ("columns_from(b, i), k | i)", "columns_from(b, i), i)"),
    "a step is skipped": ("i < STEP / 16", "i < STEP / 16 - 1"),
    "the same columns of w again": ("columns_from(b, i), k", "columns_from(b, 0), k"),
    "the last chunk is not stored": ("chunk < OUT_COLUMNS / STEP", "chunk < OUT_COLUMNS / STEP - 1"),
    "the second half lies on the first": ("tile.row + half * HALF_ROWS", "tile.row"),
    "both groups take the same rows": ("+ half * (X_TILE / 2)", ""),
    "nobody waits for a stage": ("barrier_wait(&shared.full[turn.stage], turn.parity);", ""),
    "nobody waits until a stage was read": ("barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);", ""),
    "nobody waits until a tile was stored": ("barrier_wait(&shared.stored[half], parity);", ""),
    "nobody waits until a store has read": ("stores_have_read();", ""),
    "a stage is not given back": ("if (k > 0) release(shared, before, thread);", ""),
    "a stage is given back before it was read": ("if (k > 0) release(shared, before", "release(shared, turn.stage"),
    "the sums are read before the products are done": ("products_wait<0>();", ""),
    "fewer bytes are expected": ("barrier_expect(full, STAGE_BYTES)", "barrier_expect(full, STAGE_BYTES - 16)"),
    "nobody waits for the other finishers": ("group_sync(1, FINISHERS);", ""),
    "a thread finishes fewer results": ("at += FINISHERS * 8", "at += 2 * FINISHERS * 8"),
    "a column of tiles is left out": ("return down * across;", "return down * (across - 1);"),
    "a tile is left out": (
        "number < tiles.count(); number += gridDim.x",
        "number < tiles.count() - 1; number += gridDim.x",
    ),
}


def with_mistake(folder: Path, old: str, new: str) -> Path:
    """A folder with the sources, in one of which something is changed."""
    for path in [*SOURCES.glob("*.cuh"), *SOURCES.glob("linear_*.cu")]:
        shutil.copy(path, folder)
    header = folder / "_product.cuh"
    text = header.read_text(encoding="utf-8")
    assert old in text, "the source no longer has what is to be changed"
    header.write_text(text.replace(old, new), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name: str, tmp_path: Path) -> None:
    """Of each, under one schedule or another, the results or the shim tell."""
    sources = with_mistake(tmp_path, *MISTAKES[name])
    found = None
    for sizes, order in itertools.product([(300, 320, 512, 2), (600, 320, 64, 1)], [0, 1, 2]):
        x, gate, up, _ = ordinary(sizes)
        try:
            with host.schedule(order):
                found = found or swiglu_problem(x, gate, up, sizes[3], sources=sources)
        except LaunchError as error:
            found = str(error)
        if found:
            return
    pytest.fail("nobody saw it")


def test_a_bias_that_joins_after_the_rounding_is_found(tmp_path: Path) -> None:
    sources = with_mistake(
        tmp_path, "f = sum(f, widen(biases[j]));", "f = widen(sum(round_pair<Half>(f.x, f.y), biases[j]));"
    )
    x, w, _, bias = ordinary((128, 256, 256, 1))
    assert gelu_problem(x, w, bias, 1) is None
    assert "differ" in str(gelu_problem(x, w, bias, 1, sources=sources))
