"""GELU in its tanh form of a linear: the feed-forward's first half as one kernel, for compute capability 9.0.

The product is a kernel of ours with the bits of the library's, rounded to bfloat16 after the bias as the library's is;
the GELU is taken of that rounded value before it leaves the chip. See ``_product.cuh``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samebits import jit
from samebits.ops._layout import HERE, randn
from samebits.ops._library import blas_state
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._product import (
    ARCHITECTURES,
    SOURCES,
    THREADS,
    maps_of_w,
    maps_of_x,
    plan_of,
    shared_bytes,
    why_not_product,
)

SOURCE = HERE / "linear_gelu_tanh.cu"
_LEAST_WIDTH = 1024
"""Columns of x: with fewer, a tile is multiplied sooner than the one before it is finished."""
_TABLE_BYTES = 2 * 1666 * 4
"""The gates of ``_gelu_table.cuh``."""


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: str) -> torch.Tensor:
    """Compute ``F.gelu(F.linear(x, weight, bias), approximate="tanh")`` in eager.

    Parameters
    ----------
    x : torch.Tensor
        ``(B, S, K)``.
    weight, bias : torch.Tensor
        ``(N, K)`` and ``(N,)``.
    state : str
        :func:`samebits.ops._library.blas_state` at this call: what the library chooses its kernel by.

    Returns
    -------
    torch.Tensor
        ``(B, S, N)``, contiguous.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def unsupported(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: str) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`why_not_product`."""
    return why_not_product(x, (weight,), bias, state, _LEAST_WIDTH)


def prepare(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: str) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    (batch, tokens, width), columns = x.shape, weight.shape[0]
    rows = batch * tokens
    plan = plan_of(rows, columns, 1, x.device)
    kernel = jit.compile(SOURCE, "linear_gelu_tanh", plan.constants, x.device, specific=True)
    bound = kernel.bind(plan.grid, (THREADS, 1, 1), shared_bytes(_TABLE_BYTES), rows=rows, columns=columns, width=width)
    map_x, map_weight, map_y = maps_of_x(rows, width), maps_of_w(columns, width), maps_of_x(rows, columns)
    device_index, empty, shape, dtype, device = (
        x.device.index or 0,
        torch.empty,
        (batch, tokens, columns),
        x.dtype,
        x.device,
    )

    def launch(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        state: str,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        y = empty(shape, dtype=dtype, device=device) if out is None else out[0]
        maps = map_x(x), map_weight(weight), map_y(y)
        bound(device_index, *[m.address for m in maps], bias.data_ptr())
        return y

    return launch


def allocate(x: torch.Tensor, weight: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, ``(B, S, N)`` contiguous."""
    return (torch.empty((*x.shape[:2], weight.shape[0]), dtype=x.dtype, device=x.device),)


def bytes_moved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: str) -> int:
    """Return the bytes that one call must move: x, weight and bias in, the result out."""
    elements = x.numel() + weight.numel() + bias.numel() + x.shape[0] * x.shape[1] * weight.shape[0]
    return elements * x.element_size()


def _case(tokens: int, width: int, columns: int, batch: int = 1, amplitude: float = 1.0) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((batch, tokens, width), torch.bfloat16, device, seed, amplitude)
        weight = randn((columns, width), torch.bfloat16, device, seed + 1, width**-0.5)
        return x, weight, randn((columns,), torch.bfloat16, device, seed + 2, amplitude), blas_state()

    name = f"{batch}x{tokens}x{width} to {columns}" + (f" x{amplitude:g}" if amplitude != 1 else "")
    return Case(name, torch.bfloat16, batch * tokens, build)


CASES = (
    _case(4096, 3072, 12288),
    _case(1024, 3072, 12288),
    _case(6889, 3072, 12288),
    _case(1100, 1024, 12288, batch=2),
    _case(4173, 1088, 8256),
    *(_case(1024, 1024, 12288, amplitude=amplitude) for amplitude in (1e-3, 8.0, 200.0)),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("linear_gelu_tanh", {"CLUSTER": 2, "SIDE_BY_SIDE": 0, "GROUP": 8}, True),
    ("linear_gelu_tanh", {"CLUSTER": 2, "SIDE_BY_SIDE": 1, "GROUP": 17}, True),
)
"""Kernel, constants, and whether an FMA is owed (ATen's inner sum is one)."""
CUDA_FUNCTION = "tanhf"
"""CUDA's own function that the kernel calls; the approximate instructions inside it are ATen's as well."""

OP = Op(
    name="linear_gelu_tanh",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(SOURCE, HERE / "_gelu_table.cuh", HERE / "linear_gelu_tanh.py", *SOURCES),
    headline=tuple(case.name for case in CASES[:2]),
    architectures=ARCHITECTURES,
    is_product=True,
)
