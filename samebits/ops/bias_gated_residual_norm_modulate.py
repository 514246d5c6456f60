"""A gated residual that takes in the bias of the linear before it, then a modulated LayerNorm; both results.

``h' = h + gate * (y + bias)``, rounded as in ``bias_gated_residual``; ``LayerNorm(h') * (1 + scale) + shift``, rounded
as in ``layer_norm_modulate``, and with ``input_scale`` quantised to FP8 as in ``_quantize.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops import bias_gated_residual, layer_norm_modulate
from samebits.ops._layout import CTYPES, HERE, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantized, why_not_scale

SOURCE = HERE / "bias_gated_residual_norm_modulate.cu"


def reference(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the unfused chain in eager.

    Parameters
    ----------
    h, y : torch.Tensor
        ``(B, S, D)``: the residual stream and the branch that joins it, a linear's output without its bias.
    bias : torch.Tensor
        ``(D,)``.
    gate, scale, shift : torch.Tensor
        ``(B, D)``; with ``index`` ``(2 * B, D)``: first the rows for index 0, then those for every other index.
    eps : float
        Added to the variance.
    native_fma : bool
        Round ``gate * (y + bias) + h`` once, in the element type, instead of after the product and after the sum.
    clip : bool
        Clamp the new residual stream to +-65504, as Qwen-Image does in fp16 at the end of a block.
    index : torch.Tensor, optional
        ``(B, S)`` integers: which of its sample's two modulation rows a token uses.
    input_scale : torch.Tensor, optional
        fp32, ``()``: the modulated norm is quantised with it.

    Returns
    -------
    tuple of torch.Tensor
        The new residual stream and its modulated norm, the latter float8_e4m3fn where it is quantised; both
        ``(B, S, D)``, contiguous.
    """
    h = bias_gated_residual.reference(h, gate, y, bias, native_fma, clip, index)
    return h, quantized(layer_norm_modulate.reference(h, scale, shift, eps, index), input_scale)


def unsupported(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if reason := layer_norm_modulate.unsupported(h, scale, shift, eps, index):
        return reason.replace("x ", "h ", 1) if reason.startswith("x ") else reason
    return bias_gated_residual.unsupported(h, gate, y, bias, native_fma, clip, index) or why_not_scale(
        input_scale, h.device
    )


def prepare(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = h.shape
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[h.dtype], "WIDTH": width}
    constants |= {"NATIVE_FMA": int(native_fma), "CLIP": int(clip)}
    if index is not None:
        constants["INDEX"] = CTYPES[index.dtype]
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    bound = jit.compile(SOURCE, "bias_gated_residual_norm_modulate", constants, h.device).bind(
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
    shape, dtype, device, device_index = h.shape, h.dtype, h.device, h.device.index or 0
    empty, dtype_out = torch.empty, dtype if input_scale is None else FP8

    def launch(
        h: torch.Tensor,
        gate: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        native_fma: bool = False,
        clip: bool = False,
        index: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if out is None:
            out = (empty(shape, dtype=dtype, device=device), empty(shape, dtype=dtype_out, device=device))
        bound(
            device_index,
            h.data_ptr(),
            gate.data_ptr(),
            y.data_ptr(),
            bias.data_ptr(),
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
    bias: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    native_fma: bool = False,
    clip: bool = False,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the two uninitialised outputs, ``(B, S, D)`` contiguous; the second is float8_e4m3fn where quantised."""
    dtype = h.dtype if input_scale is None else FP8
    return torch.empty(h.shape, dtype=h.dtype, device=h.device), torch.empty(h.shape, dtype=dtype, device=h.device)


def bytes_moved(*args: Any) -> int:
    """Return the bytes that one call must move: h, y, the bias and the modulation in, both results out."""
    h, _, _, bias, scale, *_ = args
    came_in: int = (2 * h.numel() + bias.numel() + 3 * scale.numel()) * h.element_size()
    return came_in + sum(output.numel() * output.element_size() for output in allocate(*args))


def _case(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    batch: int = 1,
    *,
    native_fma: bool = False,
    clip: bool = False,
    indexed: bool = False,
    quantized: bool = False,
    amplitude: float = 1.0,
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        h = randn((batch, tokens, width), dtype, device, seed, amplitude)
        y = randn((batch, tokens, width), dtype, device, seed + 1, amplitude)
        rows = 2 * batch if indexed else batch
        shift, scale, gate = randn((rows, 3 * width), dtype, device, seed + 2).chunk(3, dim=-1)
        bias = randn((width,), dtype, device, seed + 3, 0.1)
        index = None
        if indexed:
            generator = torch.Generator(device).manual_seed(seed + 4)
            index = torch.randint(0, 2, (batch, tokens), generator=generator, device=device, dtype=torch.int32)
        input_scale = torch.tensor(0.01 if seed % 2 else 0.0113, device=device) if quantized else None
        return h, gate, y, bias, scale, shift, 1e-6, native_fma, clip, index, input_scale

    parts = ["indexed"] * indexed + ["clip"] * clip + ["fma"] * native_fma + ["fp8"] * quantized
    name = " ".join([f"{batch}x{tokens}x{width}", *parts])
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, batch * tokens, build)


_BF16 = torch.bfloat16
CASES = (
    _case(4096, 3072, _BF16),
    _case(4096, 3072, _BF16, quantized=True),
    _case(4096, 3072, _BF16, native_fma=True, quantized=True),
    _case(128, 3072, _BF16, quantized=True),
    *(
        _case(17, width, dtype, native_fma=quantized, quantized=quantized)
        for quantized in (False, True)
        for width in (4, 516, 1000, 16384)
        for dtype in (torch.float32, torch.float16, _BF16)
    ),
    _case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0),
    _case(33, 3072, torch.float16, batch=2, clip=True, native_fma=True, quantized=True, amplitude=20000.0),
    _case(5, 1540, torch.float32, batch=3, indexed=True),
    _case(64, 3072, _BF16, batch=2, indexed=True, quantized=True),
    *(_case(64, 3072, _BF16, quantized=True, amplitude=amplitude) for amplitude in (1e-3, 40.0, 200.0)),
)

_BF16_KERNEL: dict[str, int | str] = {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "NATIVE_FMA": 0, "CLIP": 0}
COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("bias_gated_residual_norm_modulate", _BF16_KERNEL, True),
    ("bias_gated_residual_norm_modulate", _BF16_KERNEL | {"NATIVE_FMA": 1, "QUANTIZED": 1}, True),
    (
        "bias_gated_residual_norm_modulate",
        {"ELEMENT": "__half", "WIDTH": 3072, "NATIVE_FMA": 1, "CLIP": 1, "INDEX": "int", "QUANTIZED": 1},
        True,
    ),
    ("bias_gated_residual_norm_modulate", {"ELEMENT": "float", "WIDTH": 1540, "NATIVE_FMA": 0, "CLIP": 0}, True),
)
"""Kernel, constants, and whether an FMA of fp32 is owed (Welford's updates are FMAs in ATen's own machine code)."""

OP = Op(
    name="bias_gated_residual_norm_modulate",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_bias.cuh",
        HERE / "_layer_norm.cuh",
        HERE / "_numerics.cuh",
        HERE / "_quantize.cuh",
        HERE / "bias_gated_residual_norm_modulate.py",
        HERE / "_layout.py",
        HERE / "_fma.py",
        HERE / "_quantize.py",
        HERE / "bias_gated_residual.py",
        HERE / "gated_residual.py",
        HERE / "layer_norm_modulate.py",
    ),
    headline=tuple(case.name for case in CASES[:4]),
)
