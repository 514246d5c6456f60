"""Full-width RMSNorm as diffusers spells it, times ``scale``.

The eager chain is nine kernels: cast, square, mean, sum with eps, rsqrt, product, cast, product with the weight,
product with the scale. Roundings to the element type: after ``x * r``, after the weight, after the scale. The mean
follows ATen's ``reduce_kernel``, whose order changes with the number of rows; see
``rms_norm_scale.cu``.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops._layout import (
    CTYPES,
    HERE,
    MAX_ROWS,
    aligned,
    gives_contiguous_output,
    in_order,
    no_overlap,
    randn,
    row_layout,
)
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._reduce_plan import reduce_plan, why_no_plan
from samebits.ops.qk_norm import rms_norm

SOURCE = HERE / "rms_norm_scale.cu"
MIN_WIDTH, MAX_WIDTH = 128, 16384


def reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute the chain in eager, as diffusers' ``RMSNorm`` and Z-Image's block spell it.

    Parameters
    ----------
    x : torch.Tensor
        ``(..., D)``.
    weight : torch.Tensor
        ``(D,)``, of x's dtype.
    scale : torch.Tensor, optional
        Broadcasts against x: ``(B, 1, D)`` for one row per sample, ``(B, S, D)`` for one per token.
    eps : float
        Added to the mean square.

    Returns
    -------
    torch.Tensor
        Of x's shape and dtype, contiguous.
    """
    y = rms_norm(x, weight, eps, "diffusers")
    return y if scale is None else y * scale


def unsupported(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, eps: float) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x must be float32, float16 or bfloat16; it is {x.dtype}"
    if any(t is not None and t.dtype != x.dtype for t in (weight, scale)):
        return f"weight and scale must have x's dtype {x.dtype}"
    if any(t is not None and t.device != x.device for t in (weight, scale)):
        return "x, weight and scale must be on one device"
    if x.dim() < 1 or x.numel() == 0:
        return f"x must have at least one row; its shape is {tuple(x.shape)}"
    width = x.shape[-1]
    if not MIN_WIDTH <= width <= MAX_WIDTH or width % 4:
        return f"the width must be a multiple of 4 from {MIN_WIDTH} to {MAX_WIDTH}; it is {width}"
    if tuple(weight.shape) != (width,) or not weight.is_contiguous():
        return f"weight must be ({width},) and contiguous; it is {tuple(weight.shape)}"
    if x.stride(-1) != 1 or not gives_contiguous_output(x) or not no_overlap(x):
        return f"x's dimensions must lie in memory in their order, the last contiguous; the strides are {x.stride()}"
    if row_layout(x.shape, x.stride()) is None:
        return f"the rows of x must be reachable by two strides; the strides are {x.stride()}"
    if x.numel() // width > MAX_ROWS:
        return f"x must have at most {MAX_ROWS} rows; it has {x.numel() // width}"
    if scale is not None:
        if x.dim() != 3 or scale.dim() != 3 or scale.shape[-1] != width or scale.stride(-1) != 1:
            shapes = f"{tuple(x.shape)} and {tuple(scale.shape)}"
            return f"x and its scale must be (batch, tokens, {width}); they are {shapes}"
        if scale.shape[0] not in (1, x.shape[0]) or scale.shape[1] not in (1, x.shape[1]):
            return f"scale must broadcast against x {tuple(x.shape)}; it is {tuple(scale.shape)}"
        if not in_order(scale):
            return f"the dimensions of scale must lie in memory in their order; its strides are {scale.stride()}"
    for name, t in (("x", x), ("weight", weight), ("scale", scale)):
        if t is not None and not aligned(t, 4):
            return f"{name} is not aligned to four elements"
    return why_no_plan(x.numel() // width, width, torch.float32, x.device)


def broadcast_strides(scale: torch.Tensor | None) -> tuple[int, int]:
    """Return by how many elements a scale ``(B or 1, S or 1, D)`` moves from sample to sample and token to token."""
    if scale is None:
        return 0, 0
    return scale.stride(0) if scale.shape[0] > 1 else 0, scale.stride(1) if scale.shape[1] > 1 else 0


def prepare(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, eps: float) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    width = x.shape[-1]
    rows = x.numel() // width
    plan, layout = reduce_plan(rows, width, 4), row_layout(x.shape, x.stride())
    if plan is None or layout is None:
        raise ValueError("rms_norm_scale has no plan for these arguments; ask `unsupported` first")
    tokens, sample_stride, token_stride = layout.tokens, layout.sample_stride, layout.token_stride
    if scale is not None:
        tokens = x.shape[1]
        sample_stride, token_stride = x.stride(0), x.stride(1)
    wide = 8 if x.element_size() == 2 and all(t is None or aligned(t, 8) for t in (x, weight, scale)) else 4
    constants: dict[str, int | str] = {
        "ELEMENT": CTYPES[x.dtype],
        "WIDTH": width,
        "COLUMNS": plan.columns,
        "GROUPS": plan.groups,
        "WIDE": wide if width % wide == 0 else 4,
        "HAS_SCALE": int(scale is not None),
    }
    scale_strides = broadcast_strides(scale)
    bound = jit.compile(SOURCE, "rms_norm_scale", constants, x.device).bind(
        (rows, 1, 1),
        plan.block,
        width * x.element_size(),
        tokens=tokens,
        x_sample_stride=sample_stride,
        x_token_stride=token_stride,
        scale_sample_stride=scale_strides[0],
        scale_token_stride=scale_strides[1],
        eps=float(eps),
    )
    shape, dtype, device, device_index, empty = x.shape, x.dtype, x.device, x.device.index or 0, torch.empty

    def launch(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        eps: float,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        y = empty(shape, dtype=dtype, device=device) if out is None else out[0]
        bound(device_index, x.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), y.data_ptr())
        return y

    return launch


def allocate(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, of x's shape, contiguous."""
    return (torch.empty(x.shape, dtype=x.dtype, device=x.device),)


def bytes_moved(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, eps: float) -> int:
    """Return the bytes that one call must move: x, the weight and the scale in, the result out."""
    return (2 * x.numel() + weight.numel() + (0 if scale is None else scale.numel())) * x.element_size()


def _case(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    batch: int = 1,
    *,
    scale: str | None = "sample",
    amplitude: float = 1.0,
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((batch, tokens, width), dtype, device, seed, amplitude)
        weight = (1 + randn((width,), torch.float32, device, seed + 1, 0.1)).to(dtype)
        if scale is None:
            return x, weight, None, 1e-5
        modulation = randn((batch, 1 if scale == "sample" else tokens, width), dtype, device, seed + 2)
        return x, weight, 1.0 + modulation, 1e-5

    name = f"{batch}x{tokens}x{width}" + {None: " no-scale", "sample": "", "token": " token-scale"}[scale]
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, batch * tokens, build)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    _case(4224, 3840, _BF16),
    _case(4224, 3840, _BF16, scale=None),
    _case(128, 3840, _BF16),
    *(
        _case(rows, width, _BF16, scale=None)
        for rows in (1, 2, 3, 4, 7, 8, 15, 16, 17, 4096)
        for width in (128, 256, 2560, 3072, 3584, 3840, 5120, 8192, 8200, 12288)
    ),
    *(
        _case(rows, width, dtype, batch=2)
        for rows in (1, 2, 5, 9)
        for width in (132, 1000, 3840, 16384)
        for dtype in (_BF16, _FP16, _FP32)
    ),
    _case(64, 3840, _BF16, batch=2, scale="token"),
    *(_case(64, 3840, dtype, amplitude=a) for dtype in (_BF16, _FP16) for a in (1e-3, 40.0, 200.0)),
)


def _variant(element: str, width: int, columns: int, groups: int, has_scale: int) -> Variant:
    constants: dict[str, int | str] = {"ELEMENT": element, "WIDTH": width, "COLUMNS": columns, "GROUPS": groups}
    wide = 4 if element == "float" else 8
    return "rms_norm_scale", constants | {"WIDE": wide, "HAS_SCALE": has_scale}, False


COMPILE_VARIANTS: tuple[Variant, ...] = (
    _variant("__nv_bfloat16", 3840, 32, 1, 1),
    _variant("__half", 3840, 256, 1, 0),
    _variant("float", 8192, 32, 16, 1),
    _variant("float", 5120, 32, 1, 0),
)
"""Kernel, constants, and whether an FMA is owed (never here)."""

OP = Op(
    name="rms_norm_scale",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_numerics.cuh",
        HERE / "_row_sum.cuh",
        HERE / "rms_norm_scale.py",
        HERE / "_layout.py",
        HERE / "_reduce_plan.py",
        HERE / "qk_norm.py",
    ),
    headline=tuple(case.name for case in CASES[:3]),
)
