"""Maps of matrices in memory, by which a kernel copies boxes of them to and from shared memory.

CUDA's tensor memory accelerator reads such a map from a kernel's parameters; the driver writes it
(``cuTensorMapEncodeTiled``). On the CPU the shim's copies read one of its own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from samebits.errors import CompileError, LaunchError

BYTES = 128
_ALIGNMENT = 64
BOX_COLUMNS = 64
"""Columns of a box of 16-bit elements: rows of 128 bytes, which is the widest swizzle."""


class TensorMap:
    """A map of one matrix.

    Attributes
    ----------
    address : int
        Where its 128 bytes lie on the host, for as long as this object lives: what a launch hands in for a parameter
        of the type ``TensorMap``.
    """

    __slots__ = ("_memory", "address")

    def __init__(self, content: bytes) -> None:
        if len(content) != BYTES:
            raise ValueError(f"a tensor map has {BYTES} bytes; these are {len(content)}")
        self._memory = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _ALIGNMENT
        ctypes.memmove(self.address, content, BYTES)


def tensor_map(matrix: torch.Tensor, box_rows: int) -> TensorMap:
    """Describe a matrix whose boxes of ``box_rows`` rows and 64 columns a kernel copies, swizzled by 128 bytes.

    Parameters
    ----------
    matrix : torch.Tensor
        bfloat16, ``(rows, columns)``, unit stride along the columns; address and row stride are multiples of 16 bytes.
    box_rows : int
        At most 256.

    Raises
    ------
    LaunchError
        The driver refuses such a map.
    ValueError
        The matrix is none that can be described.
    """
    if matrix.dim() != 2 or matrix.dtype != torch.bfloat16 or matrix.stride(1) != 1:
        raise ValueError(f"expected rows of bfloat16, got {matrix.dtype} {tuple(matrix.shape)} {matrix.stride()}")
    rows, columns = matrix.shape
    address, row_bytes = matrix.data_ptr(), matrix.stride(0) * matrix.element_size()
    if matrix.device.type == "cpu":
        from samebits.host.tensor_map import encode_on_cpu

        return TensorMap(encode_on_cpu(address, rows, columns, row_bytes, box_rows))
    return TensorMap(_encode(address, rows, columns, row_bytes, box_rows, matrix.device.index or 0))


def _encode(address: int, rows: int, columns: int, row_bytes: int, box_rows: int, device_index: int = 0) -> bytes:
    from samebits.jit.driver import runtime

    driver = runtime().driver
    size, step = driver.cuuint64_t, driver.cuuint32_t

    def encode() -> tuple[Any, Any]:
        status, encoded = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [size(columns), size(rows)],
            [size(row_bytes)],
            [step(BOX_COLUMNS), step(box_rows)],
            [step(1), step(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return status, encoded

    try:
        status, encoded = encode()
        if status.name == "CUDA_ERROR_INVALID_CONTEXT":  # a thread that made no CUDA call yet, as at a launch
            with torch.cuda.device(device_index):
                runtime().core.Device(device_index).set_current()
                status, encoded = encode()
    except AttributeError as error:
        raise CompileError(f"cuda-bindings cannot make tensor maps: {error}. Install version 12.8 or newer.") from error
    if status.value:
        raise LaunchError(
            kernel="tensor map", cause=f"{status.name} for {rows} x {columns}, {row_bytes} bytes a row", sticky=False
        )
    return ctypes.string_at(encoded.getPtr(), BYTES)
