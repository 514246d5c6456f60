"""GELU in its tanh form, one eager kernel: fp32 inside, one rounding to the element type at the end.

Nothing is fused; eager's kernel is replaced by one that moves memory in wider steps and, for many bf16 elements, looks
the tanh up in a table of every bf16 value for which it matters. See ``gelu_tanh.cu``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samebits import jit
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, multiprocessors, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantized, quantized_case, why_not_scale

SOURCE = HERE / "gelu_tanh.cu"
_THREADS = 128
_TABLE_THREADS, _TABLE_BLOCKS = 1024, 2  # in a block, and as many blocks as a multiprocessor holds
TABLE_FROM = 5 << 20
"""From how many bf16 elements on filling a table in every block costs less than it saves: measured on an H200, where
eager, the formula and the table take 3.5, 3.6 and 4.8 us for 1.6 million elements, 8.8, 9.2 and 8.6 us for 6.3 million,
and 68.6, 67.9 and 51.3 us for 50 million between two GEMMs."""


def reference(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``F.gelu(x, approximate="tanh")`` in eager; x is of any shape.

    With ``input_scale``, fp32 of shape ``()``, the result is quantised with it, see ``_quantize.py``.
    """
    return quantized(F.gelu(x, approximate="tanh"), input_scale)


def unsupported(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> str | None:
    """Say why the kernel does not take x, or return ``None``."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x must be float32, float16 or bfloat16; it is {x.dtype}"
    if x.numel() == 0 or not x.is_contiguous():
        return f"x must be contiguous and not empty; its shape is {tuple(x.shape)}, its strides {x.stride()}"
    if x.data_ptr() % 16:
        return "x is not aligned to 16 bytes"
    if input_scale is not None and x.numel() % 8:
        return f"to be quantised x must have a multiple of eight elements; it has {x.numel()}"
    return why_not_scale(input_scale, x.device)


def prepare(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> Launcher:
    """Compile the kernel for x's signature and plan its launch."""
    elements, wide = x.numel(), 16 // x.element_size()
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[x.dtype]}
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    if x.dtype == torch.bfloat16 and elements >= TABLE_FROM:
        # Blocks that stay, one vector after another: each fills the table once.
        blocks = min(_TABLE_BLOCKS * multiprocessors(x.device), -(-elements // (wide * _TABLE_THREADS)))
        kernel = jit.compile(SOURCE, "gelu_tanh_by_table", constants, x.device)
        bound = kernel.bind((blocks, 1, 1), (_TABLE_THREADS, 1, 1), 0, elements=elements)
    else:
        kernel = jit.compile(SOURCE, "gelu_tanh_direct", constants | {"WIDE": wide}, x.device)
        bound = kernel.bind((-(-elements // (wide * _THREADS)), 1, 1), (_THREADS, 1, 1), 0, elements=elements)
    device_index, empty_like = x.device.index or 0, torch.empty_like
    result = x.dtype if input_scale is None else FP8

    def launch(
        x: torch.Tensor, input_scale: torch.Tensor | None = None, *, out: tuple[torch.Tensor, ...] | None = None
    ) -> torch.Tensor:
        y = empty_like(x, dtype=result, memory_format=CONTIGUOUS) if out is None else out[0]
        bound(device_index, x.data_ptr(), 0 if input_scale is None else input_scale.data_ptr(), y.data_ptr())
        return y

    return launch


def allocate(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, of x's shape, contiguous; float8_e4m3fn where it is quantised."""
    return (torch.empty(x.shape, dtype=x.dtype if input_scale is None else FP8, device=x.device),)


def bytes_moved(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> int:
    """Return the bytes that one call must move: x in, the result out."""
    return x.numel() * (x.element_size() + (x.element_size() if input_scale is None else 1))


def _case(shape: tuple[int, ...], dtype: torch.dtype, amplitude: float = 1.0) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        return (randn(shape, dtype, device, seed, amplitude),)

    name = "x".join(map(str, shape)) + (f" x{amplitude:g}" if amplitude != 1 else "")
    return Case(name, dtype, shape[0] * shape[1], build)


def _every_value(dtype: torch.dtype, times: int = 1, more: int = 0) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        values = torch.arange(times * 65536 + more, device=device, dtype=torch.int32).to(torch.int16).view(dtype)
        return (values,)

    name = "every value" + (f" {times} times and {more} more" if times > 1 else "")
    return Case(name, dtype, 1, build)


CASES = (
    _case((1, 4096, 12288), torch.bfloat16),
    _case((1, 128, 12288), torch.bfloat16),
    _every_value(torch.bfloat16),
    _every_value(torch.bfloat16, TABLE_FROM // 65536, more=5),
    _every_value(torch.float16),
    *(_case((1, 17, width), dtype) for width in (1, 5, 1000) for dtype in CTYPES if dtype.is_floating_point),
    *(_case((1, 64, 1024), torch.float32, amplitude) for amplitude in (1e-3, 4.0, 40.0)),
    quantized_case(_case((1, 4096, 12288), torch.bfloat16), 1),
    quantized_case(_case((1, 128, 12288), torch.bfloat16), 1),
    quantized_case(_every_value(torch.bfloat16), 1),
    quantized_case(_every_value(torch.float16), 1),
    quantized_case(_case((1, 17, 1000), torch.float32), 1),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("gelu_tanh_direct", {"ELEMENT": "__nv_bfloat16", "WIDE": 8, "QUANTIZED": 1}, True),
    ("gelu_tanh_by_table", {"ELEMENT": "__nv_bfloat16", "QUANTIZED": 1}, True),
    ("gelu_tanh_direct", {"ELEMENT": "__nv_bfloat16", "WIDE": 8}, True),
    ("gelu_tanh_direct", {"ELEMENT": "__half", "WIDE": 8}, True),
    ("gelu_tanh_direct", {"ELEMENT": "float", "WIDE": 4}, True),
    ("gelu_tanh_by_table", {"ELEMENT": "__nv_bfloat16"}, True),
)
"""Kernel, constants, and whether an FMA is owed (ATen's inner sum is one)."""
CUDA_FUNCTION = "tanhf"
"""CUDA's own function that the kernels call; the approximate instructions inside it are ATen's as well."""

OP = Op(
    name="gelu_tanh",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_gelu_table.cuh",
        HERE / "_numerics.cuh",
        HERE / "_quantize.cuh",
        HERE / "gelu_tanh.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
    ),
    headline=(*(case.name for case in CASES[:2]), "1x4096x12288 fp8"),
)
