"""The sums of the ops' own headers, each compiled into a kernel that writes nothing but the sum.

The text of a header is compiled as it is, in a folder of its own; a control changes one place of it first.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from samebits import jit
from samebits.ops._layout import CTYPES, HERE
from samebits.ops._reduce_plan import ReducePlan
from samebits.proof.workshop import Change

ROW_SUM, HEAD_NORM, LAYER_NORM = "_row_sum.cuh", "_head_norm.cuh", "_layer_norm.cuh"
"""The headers that sum. What an op sums follows from which of them its sources name."""

KINDS = {"diffusers": 0, "native": 1, "torch": 2}
_WARPS = 8

_TEXTS = {
    ROW_SUM: """
// grid (rows), block as _row_sum.cuh says, shared (WIDTH,) elements; sums (rows, THREADS)
extern "C" __global__ void __launch_bounds__(THREADS) row_sum(const ELEMENT* x, float* sums) {
  extern __shared__ uint4 shared[];
  Element* row = reinterpret_cast<Element*>(shared);
  fetch_row(row, x + (long long)blockIdx.x * WIDTH);
  sums[(long long)blockIdx.x * THREADS + thread_of_row()] = sum_of_squares(row);
}
""",
    HEAD_NORM: """
// grid (blocks), block (32, WARPS); sums (rows, LANES): of every lane that has the row's sum
extern "C" __global__ void __launch_bounds__(32 * WARPS) head_sum(const ELEMENT* x, float* sums, int rows) {
#ifndef VECTOR
  const int lane = threadIdx.x % 16, row = (blockIdx.x * WARPS + threadIdx.y) * 2 + threadIdx.x / 16;
  Vector<Element, 8> v = {};
  if (row < rows) v = load<Element, 8>(x + (long long)row * HEAD_DIM + lane * 8);
  const float total = sum_of_squares(v);
  if (row < rows) sums[row * 16 + lane] = total;
#else
  const int lane = threadIdx.x, row = blockIdx.x * WARPS + threadIdx.y;
  if (row >= rows) return;
  // As row_reciprocal_root hands it to every lane.
  sums[row * 32 + lane] = __shfl_sync(ALL_LANES, sum_of_squares<ROW_COLUMNS>(x + (long long)row * HEAD_DIM, lane), 0);
#endif
}
""",
    LAYER_NORM: """
// grid (rows), block (32, 4); moments (2, rows): mean and rstd
extern "C" __global__ void __launch_bounds__(THREADS) moments(const ELEMENT* x, float* out, float eps) {
  const Element* row = x + (long long)blockIdx.x * WIDTH;
  Share v;
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (has_vector(i)) v[i] = load<Element, 4>(row + element_of(i));
  }
  const Statistics s = layer_norm_statistics(v, eps);
  if (thread_of_row() == 0) out[blockIdx.x] = s.mean, out[gridDim.x + blockIdx.x] = s.rstd;
}
""",
}
_HEADS = """#include "_numerics.cuh"
using Element = ELEMENT;
using Weight = ELEMENT;
"""


class SumKernels:
    """Kernels that write the sums of the headers. A context manager; leaving it deletes its folder.

    Parameters
    ----------
    device : torch.device
        A CUDA device, or the CPU, where they run behind the shim.
    change : Change, optional
        Applied to the copied headers.

    Raises
    ------
    ValueError
        The change does not apply exactly once: the header reads differently from what it was written against.
    """

    def __init__(self, device: torch.device, change: Change | None = None) -> None:
        self.device = device
        self._folder = tempfile.TemporaryDirectory(prefix="samebits-sums-")
        self._path = Path(self._folder.name)
        for header in HERE.glob("*.cuh"):
            shutil.copy(header, self._path)
        for header_name, text in _TEXTS.items():
            source = f'{_HEADS}#include "{header_name}"\n{text}'
            self._source(header_name).write_text(source, encoding="utf-8")
        if change is not None:
            try:
                change.apply(self._path)
            except ValueError:
                self._folder.cleanup()
                raise

    def _source(self, header: str) -> Path:
        return self._path / f"sum_of{header.removesuffix('h')}"

    def __enter__(self) -> SumKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def row_sum(self, dtype: torch.dtype, width: int, plan: ReducePlan) -> Callable[[Tensor], Tensor]:
        """Return the sum of squares of ``_row_sum.cuh``: ``(rows, width)`` to ``(rows,)`` fp32."""
        wide = 8 if dtype.itemsize == 2 and width % 8 == 0 else 4
        constants = {"WIDTH": width, "COLUMNS": plan.columns, "GROUPS": plan.groups, "WIDE": wide}
        kernel = self._compile(ROW_SUM, "row_sum", dtype, constants)
        threads = plan.block[0] * plan.block[1]

        def sums(x: Tensor) -> Tensor:
            bound = kernel.bind((len(x), 1, 1), plan.block, width * x.element_size())
            out = torch.full((len(x), threads), torch.nan, device=x.device)
            bound(self._index, x.data_ptr(), out.data_ptr())
            return _agreed(out)

        return sums

    def head_sum(
        self, dtype: torch.dtype, head_dim: int, kind: str, plan: ReducePlan | None
    ) -> Callable[[Tensor], Tensor]:
        """Return the sum of squares of ``_head_norm.cuh``; no plan means its way for heads of 128 in half precision."""
        constants: dict[str, int | str] = {"WEIGHT": CTYPES[dtype], "HEAD_DIM": head_dim, "REFERENCE": KINDS[kind]}
        lanes, rows_per_block = 16, 2 * _WARPS
        if plan is not None:
            constants |= {"VECTOR": plan.vector, "ROW_COLUMNS": plan.columns}
            lanes, rows_per_block = 32, _WARPS
        kernel = self._compile(HEAD_NORM, "head_sum", dtype, constants)

        def sums(x: Tensor) -> Tensor:
            bound = kernel.bind((-(-len(x) // rows_per_block), 1, 1), (32, _WARPS, 1), rows=len(x))
            out = torch.full((len(x), lanes), torch.nan, device=x.device)
            bound(self._index, x.data_ptr(), out.data_ptr())
            return _agreed(out)

        return sums

    def moments(self, dtype: torch.dtype, width: int) -> Callable[[Tensor, float], tuple[Tensor, Tensor]]:
        """Return mean and rstd of ``_layer_norm.cuh``: ``(rows, width)`` and eps to two ``(rows,)`` fp32."""
        kernel = self._compile(LAYER_NORM, "moments", dtype, {"WIDTH": width})

        def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            out = torch.full((2, len(x)), torch.nan, device=x.device)
            kernel.bind((len(x), 1, 1), (32, 4, 1), eps=eps)(self._index, x.data_ptr(), out.data_ptr())
            return out[0], out[1]

        return moments

    @property
    def _index(self) -> int:
        return self.device.index or 0

    def _compile(self, header: str, name: str, dtype: torch.dtype, constants: Mapping[str, int | str]) -> jit.Kernel:
        return jit.compile(self._source(header), name, {"ELEMENT": CTYPES[dtype], **constants}, self.device)


def _agreed(sums: Tensor) -> Tensor:
    """The sum that all threads of a row have, or NaN where they do not agree: each normalises its part with its own."""
    return torch.where((sums == sums[:, :1]).all(1), sums[:, 0], torch.nan)
