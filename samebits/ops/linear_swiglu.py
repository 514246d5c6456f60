"""SwiGLU of two linears of one input: the feed-forward's first half as one kernel, for compute capability 9.0.

Both products are of a kernel of ours with the bits of the library's, each rounded to bfloat16; ``silu(a) * b`` is taken
of the rounded values before anything leaves the chip. See ``_product.cuh``.
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

SOURCE = HERE / "linear_swiglu.cu"
_LEAST_WIDTH = 2048
"""Columns of x: with fewer, a tile is multiplied sooner than the one before it is finished."""


def reference(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, state: str) -> torch.Tensor:
    """Compute ``F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)`` in eager.

    Parameters
    ----------
    x : torch.Tensor
        ``(B, S, K)``.
    gate_weight, up_weight : torch.Tensor
        ``(N, K)`` each.
    state : str
        :func:`samebits.ops._library.blas_state` at this call: what the library chooses its kernels by.

    Returns
    -------
    torch.Tensor
        ``(B, S, N)``, contiguous.
    """
    return F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)


def unsupported(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, state: str) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`why_not_product`."""
    return why_not_product(x, (gate_weight, up_weight), None, state, _LEAST_WIDTH)


def prepare(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, state: str) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    (batch, tokens, width), columns = x.shape, gate_weight.shape[0]
    rows = batch * tokens
    plan = plan_of(rows, columns, 2, x.device)
    kernel = jit.compile(SOURCE, "linear_swiglu", plan.constants, x.device, specific=True)
    bound = kernel.bind(plan.grid, (THREADS, 1, 1), shared_bytes(), rows=rows, columns=columns, width=width)
    map_x, map_y = maps_of_x(rows, width), maps_of_x(rows, columns)
    map_gate, map_up = maps_of_w(columns, width), maps_of_w(columns, width)
    device_index, empty, shape, dtype, device = (
        x.device.index or 0,
        torch.empty,
        (batch, tokens, columns),
        x.dtype,
        x.device,
    )

    def launch(
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        state: str,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        y = empty(shape, dtype=dtype, device=device) if out is None else out[0]
        maps = map_x(x), map_gate(gate_weight), map_up(up_weight), map_y(y)
        bound(device_index, *[m.address for m in maps])
        return y

    return launch


def allocate(x: torch.Tensor, gate_weight: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, ``(B, S, N)`` contiguous."""
    return (torch.empty((*x.shape[:2], gate_weight.shape[0]), dtype=x.dtype, device=x.device),)


def bytes_moved(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, state: str) -> int:
    """Return the bytes that one call must move: x and both weights in, the result out."""
    elements = x.numel() + gate_weight.numel() + up_weight.numel() + x.shape[0] * x.shape[1] * gate_weight.shape[0]
    return elements * x.element_size()


def _case(tokens: int, width: int, columns: int, batch: int = 1, amplitude: float = 1.0) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((batch, tokens, width), torch.bfloat16, device, seed, amplitude)
        gate_weight, up_weight = randn((2, columns, width), torch.bfloat16, device, seed + 1, width**-0.5)
        return x, gate_weight, up_weight, blas_state()

    name = f"{batch}x{tokens}x{width} to {columns}" + (f" x{amplitude:g}" if amplitude != 1 else "")
    return Case(name, torch.bfloat16, batch * tokens, build)


CASES = (
    _case(4224, 3840, 10240),
    _case(4128, 3840, 10240),
    _case(1056, 3840, 10240, batch=2),
    _case(1152, 3840, 10240),
    _case(4173, 2112, 8256),
    *(_case(1152, 3840, 10240, amplitude=amplitude) for amplitude in (1e-3, 8.0, 200.0)),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("linear_swiglu", {"CLUSTER": 2, "SIDE_BY_SIDE": 1, "GROUP": 17}, False),
    ("linear_swiglu", {"CLUSTER": 2, "SIDE_BY_SIDE": 0, "GROUP": 8}, False),
)
"""Kernel, constants, and whether an FMA is owed."""
CUDA_FUNCTION = "expf"
"""CUDA's own function that the kernel calls; the approximate instructions inside it are ATen's as well."""

OP = Op(
    name="linear_swiglu",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(SOURCE, HERE / "linear_swiglu.py", *SOURCES),
    headline=tuple(case.name for case in CASES[:2]),
    architectures=ARCHITECTURES,
    is_product=True,
)
