"""How ATen's ``reduce_kernel`` divides a row: a mirror of ``setReduceConfig`` in ``Reduce.cuh``.

The order of a sum follows from this geometry, and the geometry from the number of rows, the row's length
and the element size, so a kernel that wants ATen's bits must ask here before it compiles.

Read in the headers of torch 2.13 and 2.14 (``torch/include/ATen/native/cuda/Reduce.cuh``). They differ only in how many
blocks may share one row, which no kernel here stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_THREADS = 512
_WARP = 32
_MIN_VECTORISED = 128


@dataclass(frozen=True)
class ReducePlan:
    """The geometry of one contiguous row reduction.

    Attributes
    ----------
    columns : int
        Threads along the row (``block_width``).
    groups : int
        Groups of ``columns`` threads that share a row (``block_height`` where the input is split across warps, else 1).
    vector : int
        Consecutive elements a thread loads at once; 1 means ATen keeps four strided accumulators instead.
    """

    columns: int
    groups: int
    vector: int

    @property
    def block(self) -> tuple[int, int, int]:
        """The block in which ``_row_sum.cuh`` sums one row."""
        return (128, 1, 1) if self.columns * self.groups == 32 else (self.columns, self.groups, 1)


def _last_power_of_two(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def reduce_plan(rows: int, width: int, element_size: int) -> ReducePlan | None:
    """Return the geometry in which ATen sums ``rows`` contiguous rows of ``width`` elements.

    Parameters
    ----------
    rows : int
        Number of sums, that is, of output elements.
    width : int
        Elements in a row.
    element_size : int
        Bytes of one element as the reduction reads it: 4 for fp32, 2 for fp16 and bf16.

    Returns
    -------
    ReducePlan or None
        ``None`` where ATen splits a row across blocks: that order depends on the number of multiprocessors.
    """
    vector = (8 if element_size == 2 else 4) if width >= _MIN_VECTORISED else 1
    length = width // vector
    length_pow2 = min(_last_power_of_two(length), _MAX_THREADS)
    rows_pow2 = min(_last_power_of_two(rows), _MAX_THREADS)
    columns = min(length_pow2, _WARP)
    height = min(rows_pow2, _MAX_THREADS // columns)
    columns = min(length_pow2, _MAX_THREADS // height)

    values_per_thread = -(-width // columns)
    if values_per_thread < min(height * 16, 256):
        return ReducePlan(columns, 1, vector)
    if -(-width // (columns * height)) >= 256:
        return None
    return ReducePlan(columns, height, vector)
