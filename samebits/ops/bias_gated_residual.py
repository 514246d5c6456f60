"""A gated residual that takes in the bias of the linear before it: ``h + gate * (y + bias)``.

The linear leaves its bias out of its GEMM and the residual, which must run anyway, adds it: one read of the activation
less. Rounded to the element type after the bias and then as asked: eager's way after the product and after the sum, or
once, by a multiply-add in the element type itself. Either is exact against its own unfused chain; what moves against a
GEMM that adds its bias in fp32 is for the contract ``measured`` to allow.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops import gated_residual
from samebits.ops._fma import fused_multiply_add
from samebits.ops._layout import CTYPES, HERE, aligned, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant

SOURCE = HERE / "bias_gated_residual.cu"


def reference(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the unfused chain in eager.

    Parameters
    ----------
    h, y : torch.Tensor
        ``(B, S, D)``: the residual stream and the branch that joins it, a linear's output without its bias.
    gate : torch.Tensor
        ``(B, D)``; with ``index`` ``(2 * B, D)``: first the rows for index 0, then those for every other index.
    bias : torch.Tensor
        ``(D,)``.
    native_fma : bool
        Round ``gate * (y + bias) + h`` once, in the element type, instead of after the product and after the sum.
    clip : bool
        Clamp the result to +-65504, as Qwen-Image does in fp16 at the end of a block.
    index : torch.Tensor, optional
        ``(B, S)`` integers: which of its sample's two gate rows a token uses.

    Returns
    -------
    torch.Tensor
        ``(B, S, D)``, contiguous.
    """
    y = y + bias
    if not native_fma:
        return gated_residual.reference(h, gate, y, clip, index)
    h = fused_multiply_add(gated_residual.per_token(gate, index), y, h)
    return h.clip(-65504, 65504) if clip else h


def unsupported(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    return gated_residual.unsupported(h, gate, y, clip, index) or why_not_bias(bias, h)


def why_not_bias(bias: torch.Tensor, h: torch.Tensor) -> str | None:
    """Say why the kernels do not take this bias for this residual stream, or return ``None``."""
    if bias.dtype != h.dtype or tuple(bias.shape) != (h.shape[-1],):
        return f"bias must be ({h.shape[-1]},) of {h.dtype}; it is {tuple(bias.shape)} of {bias.dtype}"
    if bias.device != h.device:
        return f"all tensors must be on one device; bias is on {bias.device}, h on {h.device}"
    if bias.stride(0) != 1 or not aligned(bias, 4):
        return "bias must be contiguous and aligned to four elements"
    return None


def prepare(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = h.shape
    wide = 8 if h.element_size() == 2 and width % 8 == 0 and all(aligned(t, 8) for t in (h, gate, y, bias)) else 4
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[h.dtype], "WIDTH": width, "WIDE": wide}
    constants |= {"NATIVE_FMA": int(native_fma), "CLIP": int(clip)}
    if index is not None:
        constants["INDEX"] = CTYPES[index.dtype]
    bound = jit.compile(SOURCE, "bias_gated_residual", constants, h.device).bind(
        (tokens, batch, 1),
        (128, 1, 1),
        0,
        tokens=tokens,
        h_batch_stride=h.stride(0),
        h_token_stride=h.stride(1),
        y_batch_stride=y.stride(0),
        y_token_stride=y.stride(1),
        gate_stride=gate.stride(0),
        index_batch_stride=index.stride(0) if index is not None else 0,
        index_token_stride=index.stride(1) if index is not None else 0,
    )
    shape, dtype, device, device_index = h.shape, h.dtype, h.device, h.device.index or 0
    empty = torch.empty

    def launch(
        h: torch.Tensor,
        gate: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor,
        native_fma: bool = False,
        clip: bool = False,
        index: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        result = empty(shape, dtype=dtype, device=device) if out is None else out[0]
        bound(
            device_index,
            h.data_ptr(),
            gate.data_ptr(),
            y.data_ptr(),
            bias.data_ptr(),
            0 if index is None else index.data_ptr(),
            result.data_ptr(),
        )
        return result

    return launch


def allocate(h: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, ``(B, S, D)`` contiguous."""
    return (torch.empty(h.shape, dtype=h.dtype, device=h.device),)


def bytes_moved(h: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, bias: torch.Tensor, *_: Any) -> int:
    """Return the bytes that one call must move: h, y, the gate and the bias in, the result out."""
    return (3 * h.numel() + gate.numel() + bias.numel()) * h.element_size()


def _case(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    batch: int = 1,
    *,
    native_fma: bool = False,
    clip: bool = False,
    indexed: bool = False,
    amplitude: float = 1.0,
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        h = randn((batch, tokens, width), dtype, device, seed, amplitude)
        y = randn((batch, tokens, width), dtype, device, seed + 1, amplitude)
        gate = randn((2 * batch if indexed else batch, 3 * width), dtype, device, seed + 2).chunk(3, dim=-1)[2]
        bias = randn((width,), dtype, device, seed + 3, 0.1)
        if not indexed:
            return h, gate, y, bias, native_fma, clip
        generator = torch.Generator(device).manual_seed(seed + 4)
        index = torch.randint(0, 2, (batch, tokens), generator=generator, device=device, dtype=torch.int32)
        return h, gate, y, bias, native_fma, clip, index

    parts = ["indexed"] * indexed + ["clip"] * clip + ["fma"] * native_fma
    name = " ".join([f"{batch}x{tokens}x{width}", *parts])
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, batch * tokens, build)


_BF16 = torch.bfloat16
CASES = (
    _case(4096, 3072, _BF16),
    _case(4096, 3072, _BF16, native_fma=True),
    _case(128, 3072, _BF16),
    *(
        _case(17, width, dtype, native_fma=native_fma)
        for native_fma in (False, True)
        for width in (4, 516, 1000, 16384)
        for dtype in (torch.float32, torch.float16, _BF16)
    ),
    _case(33, 3072, torch.float16, batch=2, clip=True, amplitude=30000.0),
    _case(33, 3072, torch.float16, batch=2, clip=True, native_fma=True, amplitude=30000.0),
    _case(64, 3072, _BF16, batch=2, indexed=True),
    *(_case(64, 3072, _BF16, native_fma=True, amplitude=amplitude) for amplitude in (1e-3, 40.0, 2e4)),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("bias_gated_residual", {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "WIDE": 8, "NATIVE_FMA": 0, "CLIP": 0}, False),
    ("bias_gated_residual", {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "WIDE": 8, "NATIVE_FMA": 1, "CLIP": 0}, False),
    (
        "bias_gated_residual",
        {"ELEMENT": "__half", "WIDTH": 3076, "WIDE": 4, "NATIVE_FMA": 1, "CLIP": 1, "INDEX": "int"},
        False,
    ),
    ("bias_gated_residual", {"ELEMENT": "float", "WIDTH": 3072, "WIDE": 4, "NATIVE_FMA": 0, "CLIP": 0}, False),
    ("bias_gated_residual", {"ELEMENT": "float", "WIDTH": 3072, "WIDE": 4, "NATIVE_FMA": 1, "CLIP": 0}, True),
)
"""Kernel, constants, and whether an FMA of fp32 is owed. With NATIVE_FMA one of the element type is."""

OP = Op(
    name="bias_gated_residual",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_bias.cuh",
        HERE / "_numerics.cuh",
        HERE / "bias_gated_residual.py",
        HERE / "_layout.py",
        HERE / "_fma.py",
        HERE / "gated_residual.py",
    ),
    headline=tuple(case.name for case in CASES[:3]),
)
