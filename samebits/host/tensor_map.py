"""A matrix as the shim's box copies take it: what the driver's encoder is on a GPU."""

from __future__ import annotations

import struct

_LAYOUT = struct.Struct("=Q4q88x")
"""Address, rows, columns, bytes from a row to the next, rows of a box; see ``TensorMap`` in ``shim/hopper.h``."""


def encode_on_cpu(address: int, rows: int, columns: int, row_stride_bytes: int, box_rows: int) -> bytes:
    """The 128 bytes of a ``TensorMap`` for kernels that the host toolchain compiled.

    Parameters
    ----------
    address : int
        Of the first element; elements have 16 bits.
    rows, columns : int
        Of the matrix ``(rows, columns)``. What a box has outside of it is read as zero and not written.
    row_stride_bytes : int
        From a row to the next one.
    box_rows : int
        Rows of a box; its columns are always 64.
    """
    return _LAYOUT.pack(address, rows, columns, row_stride_bytes, box_rows)
