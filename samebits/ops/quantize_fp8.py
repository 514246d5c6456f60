"""The FP8 quantisation of an activation, where no kernel before it could do it on its way out.

Four eager kernels, which move fp32 between them, in one: widen, multiply, clamp, round. See ``_quantize.py``.
"""

from __future__ import annotations

import torch

from samebits import jit
from samebits.ops._layout import CTYPES, HERE, MAX_ROWS, aligned, randn, row_layout
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantize_fp8, why_not_scale

SOURCE = HERE / "quantize_fp8.cu"
_THREADS = 256


def reference(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """Quantise in eager.

    Parameters
    ----------
    x : torch.Tensor
        ``(..., D)``.
    input_scale : torch.Tensor
        fp32, ``()``.

    Returns
    -------
    torch.Tensor
        Of x's shape, float8_e4m3fn, contiguous.
    """
    return quantize_fp8(x, input_scale)


def unsupported(x: torch.Tensor, input_scale: torch.Tensor) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x must be float32, float16 or bfloat16; it is {x.dtype}"
    if x.dim() < 1 or x.numel() == 0:
        return f"x must have at least one row; its shape is {tuple(x.shape)}"
    width = x.shape[-1]
    if width % 4 or x.numel() // width > MAX_ROWS:
        return f"the width must be a multiple of 4 and the rows at most {MAX_ROWS}; x is {tuple(x.shape)}"
    if x.stride(-1) != 1 or row_layout(x.shape, x.stride()) is None:
        return f"the rows of x must be contiguous and reachable by two strides; the strides are {x.stride()}"
    if not aligned(x, 4):
        return "x is not aligned to four elements"
    return why_not_scale(input_scale, x.device)


def prepare(x: torch.Tensor, input_scale: torch.Tensor) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    width, layout = x.shape[-1], row_layout(x.shape, x.stride())
    if layout is None:
        raise ValueError("quantize_fp8 has no plan for these arguments; ask `unsupported` first")
    wide = 8 if x.element_size() == 2 and width % 8 == 0 and aligned(x, 8) else 4
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[x.dtype], "WIDTH": width, "WIDE": wide, "QUANTIZED": 1}
    bound = jit.compile(SOURCE, "quantize_fp8", constants, x.device).bind(
        (-(-layout.rows * (width // wide) // _THREADS), 1, 1),
        (_THREADS, 1, 1),
        0,
        rows=layout.rows,
        tokens=layout.tokens,
        sample_stride=layout.sample_stride,
        token_stride=layout.token_stride,
    )
    shape, device, device_index, empty = x.shape, x.device, x.device.index or 0, torch.empty

    def launch(
        x: torch.Tensor, input_scale: torch.Tensor, *, out: tuple[torch.Tensor, ...] | None = None
    ) -> torch.Tensor:
        y = empty(shape, dtype=FP8, device=device) if out is None else out[0]
        bound(device_index, x.data_ptr(), input_scale.data_ptr(), y.data_ptr())
        return y

    return launch


def allocate(x: torch.Tensor, input_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, of x's shape, contiguous."""
    return (torch.empty(x.shape, dtype=FP8, device=x.device),)


def bytes_moved(x: torch.Tensor, input_scale: torch.Tensor) -> int:
    """Return the bytes that one call must move: x in, one byte an element out."""
    return x.numel() * (x.element_size() + 1)


def _case(tokens: int, width: int, dtype: torch.dtype, *, part: bool = False, amplitude: float = 1.0) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((2 if part else 1, tokens + (8 if part else 0), width), dtype, device, seed, amplitude)
        return (x[:, 8:] if part else x), torch.tensor(0.01 if seed % 2 else 0.0113, device=device)

    name = f"1x{tokens}x{width}" if not part else f"2x{tokens}x{width} part"
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, tokens, build)


def _every_value(dtype: torch.dtype) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        values = torch.arange(65536, device=device, dtype=torch.int32).to(torch.int16).view(dtype)
        return values, torch.tensor(0.01 + seed, device=device)

    return Case("every value", dtype, 1, build)


CASES = (
    _case(4096, 3072, torch.bfloat16),
    _case(128, 3072, torch.bfloat16),
    _case(4096, 3072, torch.bfloat16, part=True),
    _every_value(torch.bfloat16),
    _every_value(torch.float16),
    *(_case(17, width, dtype) for width in (4, 516, 1000) for dtype in CTYPES if dtype.is_floating_point),
    *(_case(64, 1024, torch.float32, amplitude=amplitude) for amplitude in (1e-3, 4.0, 400.0)),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("quantize_fp8", {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "WIDE": 8, "QUANTIZED": 1}, False),
    ("quantize_fp8", {"ELEMENT": "__half", "WIDTH": 3076, "WIDE": 4, "QUANTIZED": 1}, False),
    ("quantize_fp8", {"ELEMENT": "float", "WIDTH": 3072, "WIDE": 4, "QUANTIZED": 1}, False),
)
"""Kernel, constants, and whether an FMA is owed (never here)."""

OP = Op(
    name="quantize_fp8",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_numerics.cuh",
        HERE / "_quantize.cuh",
        HERE / "quantize_fp8.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
    ),
    headline=tuple(case.name for case in CASES[:2]),
)
