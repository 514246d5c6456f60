"""A gated residual followed by LayerNorm without weight or bias, times ``1 + scale``, plus ``shift``; both results.

Roundings to the element type: after ``gate * y``, after the residual sum (then clamped where ``clip``), and those of
``layer_norm_modulate``. The statistics reproduce ATen's ``vectorized_layer_norm_kernel``, see ``_layer_norm.cuh``.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops import gated_residual, layer_norm_modulate
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantized_case

SOURCE = HERE / "gated_residual_norm_modulate.cu"


def reference(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the chain in eager, as Qwen-Image's block spells it.

    Parameters
    ----------
    h, y : torch.Tensor
        ``(B, S, D)``: the residual stream and the branch that joins it.
    gate, scale, shift : torch.Tensor
        ``(B, D)``; with ``index`` ``(2 * B, D)``: first the rows for index 0, then those for every other index.
    eps : float
        Added to the variance.
    clip : bool
        Clamp the new residual stream to +-65504, as Qwen-Image does in fp16 at the end of a block.
    index : torch.Tensor, optional
        ``(B, S)`` integers: which of its sample's two modulation rows a token uses.
    input_scale : torch.Tensor, optional
        fp32, ``()``: the modulated norm is quantised with it, see ``_quantize.py``.

    Returns
    -------
    tuple of torch.Tensor
        The new residual stream and its modulated norm, the latter float8_e4m3fn where it is quantised; both
        ``(B, S, D)``, contiguous.
    """
    h = gated_residual.reference(h, gate, y, clip, index)
    return h, layer_norm_modulate.reference(h, scale, shift, eps, index, input_scale)


def unsupported(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if reason := layer_norm_modulate.unsupported(h, scale, shift, eps, index, input_scale):
        return reason.replace("x ", "h ", 1) if reason.startswith("x ") else reason
    return gated_residual.unsupported(h, gate, y, clip, index)


def prepare(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = h.shape
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[h.dtype], "WIDTH": width, "CLIP": int(clip)}
    if index is not None:
        constants["INDEX"] = CTYPES[index.dtype]
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    bound = jit.compile(SOURCE, "gated_residual_norm_modulate", constants, h.device).bind(
        (tokens, batch, 1),
        (32, 4, 1),
        0,
        tokens=tokens,
        h_batch_stride=h.stride(0),
        h_token_stride=h.stride(1),
        y_batch_stride=y.stride(0),
        y_token_stride=y.stride(1),
        gate_stride=gate.stride(0),
        scale_stride=scale.stride(0),
        shift_stride=shift.stride(0),
        index_batch_stride=index.stride(0) if index is not None else 0,
        index_token_stride=index.stride(1) if index is not None else 0,
        eps=float(eps),
    )
    device_index, empty_like = h.device.index or 0, torch.empty_like
    result = h.dtype if input_scale is None else FP8

    def launch(
        h: torch.Tensor,
        gate: torch.Tensor,
        y: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        clip: bool = False,
        index: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if out is None:
            stream = empty_like(h, memory_format=CONTIGUOUS)
            out = (stream, empty_like(stream, dtype=result))
        bound(
            device_index,
            h.data_ptr(),
            gate.data_ptr(),
            y.data_ptr(),
            scale.data_ptr(),
            shift.data_ptr(),
            0 if index is None else index.data_ptr(),
            0 if input_scale is None else input_scale.data_ptr(),
            out[0].data_ptr(),
            out[1].data_ptr(),
        )
        return out

    return launch


def allocate(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the two uninitialised outputs, ``(B, S, D)`` contiguous; the second is float8_e4m3fn where quantised."""
    dtype = h.dtype if input_scale is None else FP8
    return torch.empty(h.shape, dtype=h.dtype, device=h.device), torch.empty(h.shape, dtype=dtype, device=h.device)


def bytes_moved(*args: Any) -> int:
    """Return the bytes that one call must move: h, y and the modulation in, both results out."""
    h, _, _, scale, *_ = args
    came_in: int = (2 * h.numel() + 3 * scale.numel()) * h.element_size()
    return came_in + sum(output.numel() * output.element_size() for output in allocate(*args))


def _case(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    batch: int = 1,
    *,
    clip: bool = False,
    indexed: bool = False,
    amplitude: float = 1.0,
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        h = randn((batch, tokens, width), dtype, device, seed, amplitude)
        y = randn((batch, tokens, width), dtype, device, seed + 1, amplitude)
        rows = 2 * batch if indexed else batch
        shift, scale, gate = randn((rows, 3 * width), dtype, device, seed + 2).chunk(3, dim=-1)
        if not indexed:
            return h, gate, y, scale, shift, 1e-6, clip
        generator = torch.Generator(device).manual_seed(seed + 3)
        index = torch.randint(0, 2, (batch, tokens), generator=generator, device=device, dtype=torch.int32)
        return h, gate, y, scale, shift, 1e-6, clip, index

    name = f"{batch}x{tokens}x{width}" + (" indexed" if indexed else "") + (" clip" if clip else "")
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, batch * tokens, build)


CASES = (
    _case(4096, 3072, torch.bfloat16),
    _case(128, 3072, torch.bfloat16),
    _case(4096, 3072, torch.bfloat16, indexed=True),
    *(_case(17, width, dtype) for width in (4, 516, 1000, 3844, 16384) for dtype in CTYPES if dtype.is_floating_point),
    _case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0),
    _case(5, 1540, torch.float32, batch=3, indexed=True),
    *(_case(64, 3072, torch.bfloat16, amplitude=amplitude) for amplitude in (1e-3, 40.0, 200.0)),
    quantized_case(_case(4096, 3072, torch.bfloat16), 8),
    quantized_case(_case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0), 8),
    quantized_case(_case(5, 1540, torch.float32, batch=3, indexed=True), 8),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    (
        "gated_residual_norm_modulate",
        {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "CLIP": 0, "QUANTIZED": 1},
        True,
    ),
    ("gated_residual_norm_modulate", {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "CLIP": 0}, True),
    ("gated_residual_norm_modulate", {"ELEMENT": "__half", "WIDTH": 3072, "CLIP": 1, "INDEX": "int"}, True),
    ("gated_residual_norm_modulate", {"ELEMENT": "float", "WIDTH": 1540, "CLIP": 0}, True),
)
"""Kernel, constants, and whether an FMA is owed (Welford's updates are FMAs in ATen's own machine code)."""

OP = Op(
    name="gated_residual_norm_modulate",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_layer_norm.cuh",
        HERE / "_numerics.cuh",
        HERE / "_quantize.cuh",
        HERE / "gated_residual_norm_modulate.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
        HERE / "gated_residual.py",
        HERE / "layer_norm_modulate.py",
    ),
    headline=(*(case.name for case in CASES[:3]), "1x4096x3072 fp8"),
)
