"""Products of matrices that are finished on the chip: what they take, and how they are launched. See ``_product.cuh``.

The sums have the bits of the library's product where that sums up each element from the first column to the last, which
it does wherever there are tiles enough to keep the GPU busy. With few rows it splits the columns among blocks; those
calls are not taken. Whether the library did so after all is what every signature is compared for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from samebits import jit
from samebits.ops._layout import HERE, MAX_ROWS, multiprocessors
from samebits.ops._library import TUNABLE

ARCHITECTURES = ("sm_90a",)
SOURCES = (
    HERE / "_product.cuh",
    HERE / "_hopper.cuh",
    HERE / "_numerics.cuh",
    HERE / "_product.py",
    HERE / "_library.py",
    HERE / "_layout.py",
)
THREADS = 384
_TILE_ROWS, _TILE_COLUMNS, _STEP = 128, 256, 64
_STAGES = 3
_SHARED_BYTES = 2 * (_STAGES * (_TILE_ROWS + _TILE_COLUMNS) * _STEP + _TILE_ROWS * _TILE_COLUMNS) + 8 * (
    2 * _STAGES + 4
)
_ALIGNMENT_BYTES = 1024
_ROWS_TOGETHER = 2048
"""About so many rows of x are taken together, so that they and the columns on their way stay in the L2."""
_X_BOX, _W_BOX = 64, 128


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _blocks_at_once(device: torch.device) -> int:
    # On the CPU few, so that a block takes several tiles there too.
    return multiprocessors(device) if device.type == "cuda" else 3


def why_not_product(
    x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, state: str, least_width: int
) -> str | None:
    """Say why the kernels do not take these arguments, or return ``None``.

    Parameters
    ----------
    x : torch.Tensor
        ``(B, S, K)``, contiguous bfloat16.
    weights : sequence of torch.Tensor
        One or two, each ``(N, K)``, contiguous bfloat16; K and N are multiples of 64.
    bias : torch.Tensor, optional
        ``(N,)``, contiguous bfloat16.
    state : str
        :func:`samebits.ops._library.blas_state` at this call.
    least_width : int
        On a GPU: with less, a tile is multiplied sooner than the one before it is finished.
    """
    device = x.device
    if device.type == "cuda" and _capability(device) != (9, 0):
        return "the product is written for compute capability 9.0; elsewhere the library's runs, then the activation"
    if f"{TUNABLE}=True" in state:
        return "TunableOp is enabled, which chooses kernels by their time"
    if x.dim() != 3 or x.numel() == 0 or any(w.dim() != 2 or w.shape != weights[0].shape for w in weights):
        return "x must be (batch, tokens, width) and not empty, and the weights (columns, width) of one shape"
    columns, width = weights[0].shape
    if x.shape[2] != width or (bias is not None and tuple(bias.shape) != (columns,)):
        return f"x has {x.shape[2]} columns, the weights {width}, and the bias must have {columns} elements"
    for name, tensor in (("x", x), *(("the weight", w) for w in weights), ("the bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != torch.bfloat16 or tensor.device != device:
            return f"{name} must be bfloat16 on {device}; it is {tensor.dtype} on {tensor.device}"
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            return f"{name} must be contiguous and aligned to 16 bytes"
    if width % _STEP or columns % _STEP:
        return f"width and columns must be multiples of {_STEP}; they are {width} and {columns}"
    rows = x.shape[0] * x.shape[1]
    if rows > MAX_ROWS - 2 * _TILE_ROWS or columns > MAX_ROWS - 2 * _TILE_COLUMNS:
        return f"at most {MAX_ROWS - 2 * _TILE_ROWS} rows; there are {rows}"
    if device.type == "cuda":
        if width < least_width:
            return f"x has {width} columns; below {least_width} the library's product and the activation are faster"
        plan = plan_of(rows, columns, len(weights), device)
        if plan.tiles < plan.clusters_at_once:
            return f"{rows} rows are too few to keep the GPU busy: the library splits such products"
    return None


@dataclass(frozen=True)
class Plan:
    """How a product is divided among blocks."""

    constants: dict[str, int | str]
    tiles: int
    """Of clusters."""
    clusters_at_once: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return int(self.constants["CLUSTER"]) * min(self.tiles, self.clusters_at_once), 1, 1


def plan_of(rows: int, columns: int, weights: int, device: torch.device) -> Plan:
    """Divide a product of so many rows and columns; with two weights a tile holds half as many columns of each."""
    cluster = 2 if device.type == "cuda" else 1
    # Two blocks below each other, unless that left half a cluster without rows.
    side_by_side = cluster == 2 and -(-rows // _TILE_ROWS) % 2 == 1
    tile_rows = _TILE_ROWS * (1 if side_by_side else cluster)
    tile_columns = _TILE_COLUMNS // weights * (cluster if side_by_side else 1)
    down, across = -(-rows // tile_rows), -(-columns // tile_columns)
    group = -(-down // max(1, round(rows / _ROWS_TOGETHER)))
    constants: dict[str, int | str] = {"CLUSTER": cluster, "SIDE_BY_SIDE": int(side_by_side), "GROUP": group}
    return Plan(constants, down * across, max(1, _blocks_at_once(device) // cluster))


def shared_bytes(more: int = 0) -> int:
    """Dynamic shared memory of a block, ``more`` bytes of the kernel's own included."""
    return _SHARED_BYTES + _ALIGNMENT_BYTES - 1 + more


class Maps:
    """The maps of one argument of a launcher: memory comes back at addresses that were seen before."""

    _MOST = 512

    def __init__(self, rows: int, columns: int, box_rows: int) -> None:
        self._shape = rows, columns
        self._box_rows = box_rows
        self._known: dict[int, jit.TensorMap] = {}

    def __call__(self, tensor: torch.Tensor) -> jit.TensorMap:
        address = tensor.data_ptr()
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            found = self._known[address] = jit.tensor_map(tensor.detach().view(self._shape), self._box_rows)
        return found


def maps_of_x(rows: int, width: int) -> Maps:
    """For x, ``(rows, width)``; and for the result, ``(rows, columns)``."""
    return Maps(rows, width, _X_BOX)


def maps_of_w(columns: int, width: int) -> Maps:
    """For a weight."""
    return Maps(columns, width, _W_BOX)
