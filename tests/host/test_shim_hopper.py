"""The shim's barriers, boxes and products of compute capability 9.0; a sentence where a GPU hangs or gives garbage."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from binary32 import to_bf16_bits

import samebits.ops
from samebits import host, jit
from samebits.errors import KernelArgumentError, LaunchError
from samebits.host.tensor_map import encode_on_cpu

CPU = torch.device("cpu")
U16 = npt.NDArray[np.uint16]
Array = npt.NDArray[Any]
Launch = Callable[..., None]
ORDERS = (0, 1, 2, 3)
ROOM = 1024  # to align tiles in shared memory
BOX_ROW_BYTES = 128
POISON = np.uint16(0xABCD)

MISSING = jit.unavailable(CPU, host=True)
pytestmark = [pytest.mark.host, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


class Map:
    """A tensor map of a matrix, which lives as long."""

    def __init__(self, matrix: U16, box_rows: int) -> None:
        self.matrix = matrix
        rows, columns = matrix.shape
        content = encode_on_cpu(matrix.ctypes.data, rows, columns, matrix.strides[0], box_rows)
        self.blob = ctypes.create_string_buffer(content, 128)
        self.address = ctypes.addressof(self.blob)


def empty_map() -> Map:
    return Map(np.zeros((8, 64), np.uint16), 8)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs a kernel of hopper_probe.cu, which is compiled beside the kernels' own header."""
    folder = tmp_path_factory.mktemp("hopper")
    shutil.copy(Path(__file__).with_name("sources") / "hopper_probe.cu", folder)
    shutil.copy(Path(samebits.ops.__file__).with_name("_hopper.cuh"), folder)

    def launch(name: str, *given: Array | Map, threads: int = 128, shared_bytes: int = ROOM, **scalars: object) -> None:
        kernel = jit.compile(folder / "hopper_probe.cu", name, {}, CPU)
        pointers = [each.address if isinstance(each, Map) else each.ctypes.data for each in given]
        kernel.bind((1, 1, 1), (threads, 1, 1), shared_bytes, **scalars)(0, *pointers)

    return launch


def counted(rows: int, columns: int, row_stride: int) -> U16:
    """A view ``(rows, columns)`` of memory in which every element is another one."""
    memory = np.arange(1, rows * row_stride + 1, dtype=np.uint16).reshape(rows, row_stride)
    return memory[:, :columns]


def box_of(matrix: U16, row: int, column: int, box_rows: int) -> U16:
    """The box, zero outside of the matrix."""
    rows, columns = np.arange(row, row + box_rows)[:, None], np.arange(column, column + 64)[None]
    inside = (rows >= 0) & (rows < matrix.shape[0]) & (columns >= 0) & (columns < matrix.shape[1])
    picked = matrix[rows.clip(0, matrix.shape[0] - 1), columns.clip(0, matrix.shape[1] - 1)]
    box: U16 = np.where(inside, picked, np.uint16(0))
    return box


def swizzled(box: U16) -> U16:
    """Rows of 128 bytes: of row r the 16 bytes number c at place ``c ^ (r % 8)``. It is its own inverse."""
    rows = np.arange(box.shape[0])[:, None]
    places = np.arange(8)[None] ^ (rows % 8)
    moved: U16 = box.reshape(-1, 8, 8)[rows, places].reshape(box.shape)
    return moved


# ---- boxes ----------------------------------------------------------------------------------------------------------

PLACES = [(0, 0), (3, 64), (40, 0), (5, 130), (-3, -10), (96, 192), (200, 0), (0, 300), (-200, 0)]
"""Rows and columns at which a box begins, in a matrix of 100 rows and 200 columns."""


@pytest.mark.parametrize("box_rows", [1, 8, 64, 256])
@pytest.mark.parametrize(("row", "column"), PLACES)
def test_a_box_comes_swizzled_and_clipped(launch: Launch, row: int, column: int, box_rows: int) -> None:
    matrix = counted(100, 200, 216)
    bytes_ = box_rows * BOX_ROW_BYTES
    out = np.full((box_rows, 64), POISON)
    sizes = {"bytes": bytes_, "expected": bytes_}
    launch("box_in", Map(matrix, box_rows), out, column=column, row=row, shared_bytes=bytes_ + ROOM + 8, **sizes)
    box = box_of(matrix, row, column, box_rows)
    assert (out == swizzled(box)).all()
    if box_rows > 1 and 0 <= row < 100 and 0 <= column < 200:
        assert (out != box).any(), "the box tells no swizzle from none"


@pytest.mark.parametrize("box_rows", [8, 64])
@pytest.mark.parametrize(("row", "column"), PLACES)
def test_a_box_goes_back_and_writes_nothing_outside(launch: Launch, row: int, column: int, box_rows: int) -> None:
    memory = np.full((104, 216), POISON)
    matrix = memory[2:102, 8:208]
    box = counted(box_rows, 64, 64)
    bytes_ = box_rows * BOX_ROW_BYTES
    where = {"column": column, "row": row, "bytes": bytes_, "shared_bytes": bytes_ + ROOM}
    launch("box_out", Map(matrix, box_rows), swizzled(box), shift=0, **where)
    expected = memory.copy()
    expected[:] = POISON
    rows, columns = np.arange(100)[:, None] - row, np.arange(200)[None] - column
    inside = (rows >= 0) & (rows < box_rows) & (columns >= 0) & (columns < 64)
    picked = box[rows.clip(0, box_rows - 1), columns.clip(0, 63)]
    expected[2:102, 8:208] = np.where(inside, picked, POISON)
    assert (memory == expected).all()


def test_a_tile_must_lie_where_the_swizzle_begins(launch: Launch) -> None:
    matrix = np.zeros((8, 64), np.uint16)
    with pytest.raises(LaunchError, match="128 bytes past a multiple of 1024"):
        launch("box_out", Map(matrix, 8), counted(8, 64, 64), column=0, row=0, bytes=1024, shift=128, shared_bytes=4096)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wait", [True, False])
def test_a_load_is_done_at_once_or_as_late_as_it_may(launch: Launch, order: int, wait: bool) -> None:
    """Without a wait its place holds what it held before, which is garbage, in every order but the ascending one."""
    matrix, out = counted(8, 64, 64), np.full((8, 64), POISON)
    with host.schedule(order):
        launch("hurried_load", Map(matrix, 8), out, wait=wait, shared_bytes=1024 + ROOM)
    assert (out == (swizzled(matrix) if wait or order == 0 else 0xFFFF)).all()


@pytest.mark.parametrize(("wait", "content"), [(True, 0x0101), (False, 0x0202)])
def test_a_store_reads_as_late_as_it_may(launch: Launch, wait: bool, content: int) -> None:
    matrix = np.zeros((8, 64), np.uint16)
    launch("overwritten_store", Map(matrix, 8), bytes=1024, wait=wait, shared_bytes=1024 + ROOM)
    assert (matrix == content).all()


def test_a_store_that_nobody_waits_for(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="thread 0 returned and did not wait for its stores"):
        launch("store_left_behind", empty_map(), shared_bytes=2048)


def test_a_load_that_nobody_waits_for(launch: Launch) -> None:
    with (
        pytest.raises(LaunchError, match="all threads have returned, and nobody has waited for 1 loads"),
        host.schedule(order=1),
    ):
        launch("load_left_behind", empty_map(), shared_bytes=2048)


def test_a_tensor_map_is_no_scalar(launch: Launch) -> None:
    with pytest.raises(KernelArgumentError, match="it is a tensor_map"):
        launch("overwritten_store", matrix=1, bytes=1024, wait=True)


# ---- barriers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_phases_hand_one_place_to_and_fro(launch: Launch, order: int) -> None:
    out = np.zeros((7, 32), np.int32)
    with host.schedule(order):
        launch("ring", out, rounds=7, threads=64)
    assert (out == 100 * np.arange(7)[:, None] + np.arange(31, -1, -1)).all()


PHASES = {
    # arrivals besides the expecting one, bytes expected, boxes of 1024 bytes: what is missing after how many phases
    "one arrival": (0, 0, 0, 0, "parity 0, which lacks 1 arrivals and 0 bytes"),
    "bytes": (1, 1024, 0, 0, "parity 0, which lacks 0 arrivals and 1024 bytes"),
    "one of two boxes": (1, 2048, 1, 0, "parity 0, which lacks 0 arrivals and 1024 bytes"),
    "one box too many": (1, 1024, 2, 0, "parity 0, which lacks 0 arrivals and -1024 bytes"),
    "the next phase": (1, 1024, 1, 1, "parity 1, which lacks 2 arrivals and 0 bytes"),
    "the next phase's second arrival": (2, 1024, 1, 1, "parity 1, which lacks 1 arrivals and 0 bytes"),
}


@pytest.mark.parametrize("name", PHASES)
def test_what_keeps_a_phase_open(launch: Launch, name: str) -> None:
    arrivals, expected, loads, phases, words = PHASES[name]
    out = np.zeros(1, np.int32)
    matrix = empty_map()
    with pytest.raises(LaunchError, match=re.escape(words)) as caught:
        launch("open_phase", matrix, out, arrivals=arrivals, expected=expected, loads=loads, later=0, shared_bytes=2048)
    assert "wait for each other for ever: 0 at __syncthreads, 0 at a warp operation, 128 at barrier_wait" in str(
        caught.value
    )
    assert out[0] == phases


def test_two_phases_end(launch: Launch) -> None:
    out = np.zeros(1, np.int32)
    sizes = {"arrivals": 1, "expected": 1024, "loads": 1, "later": 2, "shared_bytes": 2048}
    launch("open_phase", empty_map(), out, threads=1, **sizes)
    assert out[0] == 2
    # The first thread ends the second phase before another one has seen that the first is over.
    with pytest.raises(LaunchError, match="thread 1 for a phase of parity 0, which lacks 2 arrivals"):
        launch("open_phase", empty_map(), out, threads=2, **sizes)


def test_more_arrivals_than_a_barrier_was_made_for(launch: Launch) -> None:
    out = np.zeros(1, np.int32)
    matrix = empty_map()
    words = "barrier_arrive: all 2 arrivals of this phase are there, and it still waits for 64 bytes"
    with pytest.raises(LaunchError, match=words):
        launch("open_phase", matrix, out, arrivals=2, expected=64, loads=0, later=0, shared_bytes=2048)


def test_a_barrier_counts_so_many_bytes(launch: Launch) -> None:
    matrix = empty_map()
    sizes = {"arrivals": 0, "loads": 0, "later": 0, "shared_bytes": 2048}
    with pytest.raises(LaunchError, match="counts up to 1048575 bytes, and this would be 1048576"):
        launch("open_phase", matrix, np.zeros(1, np.int32), expected=1 << 20, **sizes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("barrier_of_nobody", "barrier_arrive: nobody has made this barrier"),
        ("arrives_elsewhere", "block 1 of the cluster is meant, and on the CPU a cluster has one block"),
        ("groups_differ", r"group_sync\(1, 64\): others wait there for 96 threads"),
        (
            "two_kinds_of_barrier",
            r"96 at __syncthreads, 0 at a warp operation, 32 at cluster_sync \(for example thread 31\), 0 returned",
        ),
        ("products_differ", "threads 0 and 70 of a warp group multiply different tiles"),
        ("waits_alone", r"127 at products_wait \(for example thread 127\), 1 returned"),
    ],
)
def test_a_fault_is_a_sentence_and_not_a_hang(launch: Launch, name: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        launch(name, np.zeros(128, np.int32), shared_bytes=64 << 10)


def test_a_box_for_two_blocks(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="load_box_to_both: on the CPU a cluster has one block"):
        launch("loads_to_both", empty_map(), np.zeros(1, np.int32), shared_bytes=2048)


def test_a_warp_group_needs_all_its_threads(launch: Launch) -> None:
    sizes = {"first": 0, "steps": 1, "add": False, "shared_bytes": (64 + 256) * 128 + ROOM}
    maps = Map(np.zeros((64, 64), np.uint16), 64), Map(np.zeros((256, 64), np.uint16), 256)
    with pytest.raises(LaunchError, match="thread 128 multiplies, but its warp group lacks threads"):
        launch("products", *maps, np.zeros((192, 128), np.float32), threads=192, **sizes)


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_warps_meet(launch: Launch, order: int) -> None:
    out = np.full(192, -1, np.int32)
    with host.schedule(order):
        launch("groups", out, rounds=5, threads=192)
    first, second = np.arange(64), np.arange(96)
    expected = np.concatenate([(first + 5) % 64 + 10, 64 + (second + 5) % 96 + 10, np.full(32, -1)])
    assert (out == expected).all()


@pytest.mark.parametrize("order", ORDERS)
def test_all_threads_of_a_block_are_its_cluster(launch: Launch, order: int) -> None:
    out = np.zeros(96, np.int32)
    with host.schedule(order):
        launch("all_of_a_cluster", out, threads=96)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("number", "expected", "come", "words"),
    [
        (0, 96, 96, "expected a number from 1 to 15"),
        (16, 96, 96, "expected a number from 1 to 15"),
        (1, 48, 48, "some warps' threads, of the 128 that the block has"),
        (1, 160, 128, "some warps' threads, of the 128 that the block has"),
        (3, 96, 64, "64 at group_sync (for example thread 63 at number 3, where 64 of 96 have come), 64 returned"),
    ],
)
def test_groups_that_never_meet(launch: Launch, number: int, expected: int, come: int, words: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(words)):
        launch("group_of", np.zeros(128, np.int32), number=number, expected=expected, come=come)


# ---- products -------------------------------------------------------------------------------------------------------


def small_integers(rows: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).integers(-8, 9, (rows, 64)).astype(np.float32)


def sums_of_threads(product: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``(128, 128)``: which of the sums ``(64, 256)`` each thread of a warp group has, one after another."""
    result = np.empty((128, 128), np.float32)
    for thread in range(128):
        row, column = 16 * (thread // 32) + thread % 32 // 4, thread % 4 * 2
        for j in range(32):
            for at in range(4):
                result[thread, 4 * j + at] = product[row + 8 * (at // 2), 8 * j + column + at % 2]
    return result


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("first", "steps"), [(0, 1), (1, 1), (3, 1), (0, 4), (1, 2)])
def test_products_of_tiles(launch: Launch, first: int, steps: int, add: bool) -> None:
    a, b = small_integers(64, 1), small_integers(256, 2)
    maps = Map(to_bf16_bits(a), 64), Map(to_bf16_bits(b), 256)
    out = np.zeros((128, 128), np.float32)
    launch("products", *maps, out, first=first, steps=steps, add=add, shared_bytes=(64 + 256) * 128 + ROOM)
    columns = slice(16 * first, 16 * (first + steps))
    product = a[:, columns] @ b[:, columns].T + np.float32(1000 if add else 0)
    assert (out == sums_of_threads(product)).all()
    assert (out != sums_of_threads(product[::-1])).mean() > 0.9, "the integers do not tell one row from another"


def test_a_product_has_one_nan(launch: Launch) -> None:
    a, b = np.ones((64, 64), np.float32), np.ones((256, 64), np.float32)
    a[3, 5], a[4, 5], a[5, 0], a[5, 1] = np.nan, np.inf, np.inf, -np.inf
    a_bits = to_bf16_bits(a)
    a_bits[3, 5] = 0xFFC1
    maps = Map(a_bits, 64), Map(to_bf16_bits(b), 256)
    out = np.zeros((128, 128), np.float32)
    launch("products", *maps, out, first=0, steps=1, add=False, shared_bytes=(64 + 256) * 128 + ROOM)
    expected = np.full((64, 256), 16, np.float32)
    expected[3], expected[4] = np.uint32(0x7FFFFFFF).view(np.float32), np.inf
    expected[5] = expected[3]
    assert (out.view(np.uint32) == sums_of_threads(expected).view(np.uint32)).all()


@pytest.mark.parametrize("wait", [True, False])
def test_a_product_reads_as_late_as_it_may(launch: Launch, wait: bool) -> None:
    """Two products of ones; the second of twos where the tiles were written again before it was waited for."""
    out = np.zeros((128, 128), np.float32)
    launch("two_products", out, wait=wait, shared_bytes=(64 + 256) * 128 + ROOM)
    assert (out == (32 if wait else 16 + 64)).all()
