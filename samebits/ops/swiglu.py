"""SwiGLU's elementwise part, ``silu(a) * b``.

Two eager kernels, so two roundings to the element type: after ``silu``, which is a true division in fp32, and after the
product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samebits import jit
from samebits.ops._layout import (
    CONTIGUOUS,
    CTYPES,
    HERE,
    MAX_ROWS,
    aligned,
    gives_contiguous_output,
    randn,
    row_layout,
)
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantized, quantized_case, why_not_scale

SOURCE = HERE / "swiglu.cu"
_THREADS = 256


def reference(a: torch.Tensor, b: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``F.silu(a) * b`` in eager.

    Parameters
    ----------
    a, b : torch.Tensor
        ``(..., D)``, of one shape and dtype; two tensors, or the two halves of a packed projection.
    input_scale : torch.Tensor, optional
        fp32, ``()``: the result is quantised with it, see ``_quantize.py``.

    Returns
    -------
    torch.Tensor
        Of a's shape, contiguous; float8_e4m3fn where it is quantised.
    """
    return quantized(F.silu(a) * b, input_scale)


def unsupported(a: torch.Tensor, b: torch.Tensor, input_scale: torch.Tensor | None = None) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if a.dtype not in (torch.float32, torch.float16, torch.bfloat16) or b.dtype != a.dtype:
        return f"a and b must both be float32, float16 or bfloat16; they are {a.dtype} and {b.dtype}"
    if tuple(a.shape) != tuple(b.shape) or a.dim() < 1 or a.numel() == 0:
        return f"a and b must have one shape and not be empty; they are {tuple(a.shape)} and {tuple(b.shape)}"
    if a.device != b.device:
        return f"a and b must be on one device; they are on {a.device} and {b.device}"
    width = a.shape[-1]
    if width % 4 or a.numel() // width > MAX_ROWS:
        return f"the width must be a multiple of 4 and the rows at most {MAX_ROWS}; a is {tuple(a.shape)}"
    for name, t in (("a", a), ("b", b)):
        layout = row_layout(t.shape, t.stride())
        if t.stride(-1) != 1 or layout is None or layout.samples != 1:
            return f"the rows of {name} must be contiguous and lie at one distance; the strides are {t.stride()}"
        if not aligned(t, 4):
            return f"{name} is not aligned to four elements"
        if not gives_contiguous_output(t):
            return f"the rows of {name} must lie in memory in their order and apart; the strides are {t.stride()}"
    return why_not_scale(input_scale, a.device)


def _row_stride(t: torch.Tensor) -> int:
    layout = row_layout(t.shape, t.stride())
    if layout is None:
        raise ValueError("swiglu has no plan for these arguments; ask `unsupported` first")
    return layout.token_stride


def prepare(a: torch.Tensor, b: torch.Tensor, input_scale: torch.Tensor | None = None) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    width = a.shape[-1]
    rows = a.numel() // width
    wide = 8 if a.element_size() == 2 and width % 8 == 0 and all(aligned(t, 8) for t in (a, b)) else 4
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[a.dtype], "WIDTH": width, "WIDE": wide}
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    bound = jit.compile(SOURCE, "swiglu", constants, a.device).bind(
        (-(-rows * (width // wide) // _THREADS), 1, 1),
        (_THREADS, 1, 1),
        0,
        rows=rows,
        a_stride=_row_stride(a),
        b_stride=_row_stride(b),
    )
    device_index, empty_like = a.device.index or 0, torch.empty_like
    result = a.dtype if input_scale is None else FP8

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        y = empty_like(a, dtype=result, memory_format=CONTIGUOUS) if out is None else out[0]
        scale_at = 0 if input_scale is None else input_scale.data_ptr()
        bound(device_index, a.data_ptr(), b.data_ptr(), scale_at, y.data_ptr())
        return y

    return launch


def allocate(a: torch.Tensor, b: torch.Tensor, input_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, of a's shape, contiguous; float8_e4m3fn where it is quantised."""
    return (torch.empty(a.shape, dtype=a.dtype if input_scale is None else FP8, device=a.device),)


def bytes_moved(a: torch.Tensor, b: torch.Tensor, input_scale: torch.Tensor | None = None) -> int:
    """Return the bytes that one call must move: both halves in, the result out."""
    return a.numel() * (2 * a.element_size() + (a.element_size() if input_scale is None else 1))


def _case(tokens: int, width: int, dtype: torch.dtype, *, packed: bool = False, amplitude: float = 1.0) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        if packed:
            return randn((1, tokens, 2 * width), dtype, device, seed, amplitude).chunk(2, dim=-1)
        return tuple(randn((1, tokens, width), dtype, device, seed + i, amplitude) for i in range(2))

    name = f"1x{tokens}x{width}" + (" packed" if packed else "") + (f" x{amplitude:g}" if amplitude != 1 else "")
    return Case(name, dtype, tokens, build)


CASES = (
    _case(4224, 10240, torch.bfloat16),
    _case(4224, 10240, torch.bfloat16, packed=True),
    _case(128, 10240, torch.bfloat16),
    *(_case(17, width, dtype) for width in (4, 516, 1000) for dtype in CTYPES if dtype.is_floating_point),
    *(_case(64, 1024, dtype, amplitude=a) for dtype in (torch.bfloat16, torch.float16) for a in (1e-3, 40.0, 300.0)),
    quantized_case(_case(4224, 10240, torch.bfloat16), 2),
    quantized_case(_case(17, 1000, torch.float16), 2),
    quantized_case(_case(17, 516, torch.float32), 2),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("swiglu", {"ELEMENT": "__nv_bfloat16", "WIDTH": 10240, "WIDE": 8, "QUANTIZED": 1}, False),
    ("swiglu", {"ELEMENT": "__nv_bfloat16", "WIDTH": 10240, "WIDE": 8}, False),
    ("swiglu", {"ELEMENT": "__half", "WIDTH": 10240, "WIDE": 4}, False),
    ("swiglu", {"ELEMENT": "float", "WIDTH": 10240, "WIDE": 4}, False),
)
"""Kernel, constants, and whether an FMA is owed (never here: a division, and a product in its own kernel)."""
CUDA_FUNCTION = "expf"
"""CUDA's own function that the kernel calls; the approximate instructions inside it are ATen's as well."""

OP = Op(
    name="swiglu",
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
        HERE / "swiglu.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
    ),
    headline=(*(case.name for case in CASES[:3]), "1x4224x10240 fp8"),
)
