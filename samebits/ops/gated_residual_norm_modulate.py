"""A gated residual followed by LayerNorm without weight or bias, times ``1 + scale``, plus ``shift``; both results.

Roundings to the element type: after ``gate * y``, after the residual sum (then clamped where ``clip``), and those of
``layer_norm_modulate``. The statistics reproduce ATen's ``vectorized_layer_norm_kernel``, see ``_layer_norm.cuh``.

A text stream of other tokens may come along, as in a block of Qwen-Image: one launch then serves both, and the few rows
of the text cost no launch of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops import gated_residual, layer_norm_modulate
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, MAX_ROWS, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantized_case

SOURCE = HERE / "gated_residual_norm_modulate.cu"
Maybe = torch.Tensor | None


def reference(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: Maybe = None,
    input_scale: Maybe = None,
    text_h: Maybe = None,
    text_gate: Maybe = None,
    text_y: Maybe = None,
    text_scale: Maybe = None,
    text_shift: Maybe = None,
    text_input_scale: Maybe = None,
) -> tuple[torch.Tensor, ...]:
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
    text_h, text_gate, text_y, text_scale, text_shift : torch.Tensor, optional
        The same of a text stream ``(B, T, D)``, whose modulation is always ``(B, D)``: all of them, or none.
    text_input_scale : torch.Tensor, optional
        The text's scale; both streams have one or neither.

    Returns
    -------
    tuple of torch.Tensor
        The new residual stream and its modulated norm, the latter float8_e4m3fn where it is quantised; both
        ``(B, S, D)``, contiguous. With a text stream then the same two of it, ``(B, T, D)``.
    """
    h = gated_residual.reference(h, gate, y, clip, index)
    results = h, layer_norm_modulate.reference(h, scale, shift, eps, index, input_scale)
    if text_h is None or text_gate is None or text_y is None or text_scale is None or text_shift is None:
        return results
    text_h = gated_residual.reference(text_h, text_gate, text_y, clip)
    return *results, text_h, layer_norm_modulate.reference(text_h, text_scale, text_shift, eps, None, text_input_scale)


def _unsupported_stream(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool,
    index: Maybe,
    input_scale: Maybe,
) -> str | None:
    if reason := layer_norm_modulate.unsupported(h, scale, shift, eps, index, input_scale):
        return reason.replace("x ", "h ", 1) if reason.startswith("x ") else reason
    return gated_residual.unsupported(h, gate, y, clip, index)


def unsupported(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: Maybe = None,
    input_scale: Maybe = None,
    text_h: Maybe = None,
    text_gate: Maybe = None,
    text_y: Maybe = None,
    text_scale: Maybe = None,
    text_shift: Maybe = None,
    text_input_scale: Maybe = None,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    reason = _unsupported_stream(h, gate, y, scale, shift, eps, clip, index, input_scale)
    text = (text_h, text_gate, text_y, text_scale, text_shift)
    if reason or all(part is None for part in (*text, text_input_scale)):
        return reason
    if text_h is None or text_gate is None or text_y is None or text_scale is None or text_shift is None:
        return "the text stream must be given whole or not at all"
    if (input_scale is None) != (text_input_scale is None):
        return "either both streams are quantised or neither"
    reason = _unsupported_stream(text_h, text_gate, text_y, text_scale, text_shift, eps, clip, None, text_input_scale)
    if reason:
        return f"the text stream: {reason}"
    if (text_h.shape[0], text_h.shape[2]) != (h.shape[0], h.shape[2]):
        return f"both streams must have one batch and width; they are {tuple(h.shape)} and {tuple(text_h.shape)}"
    if text_h.dtype != h.dtype or text_h.device != h.device:
        return "both streams must have one dtype and lie on one device"
    if h.shape[1] + text_h.shape[1] > MAX_ROWS:
        return f"the streams may have {MAX_ROWS} tokens together; they have {h.shape[1]} and {text_h.shape[1]}"
    return None


def prepare(
    h: torch.Tensor,
    gate: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    clip: bool = False,
    index: Maybe = None,
    input_scale: Maybe = None,
    text_h: Maybe = None,
    text_gate: Maybe = None,
    text_y: Maybe = None,
    text_scale: Maybe = None,
    text_shift: Maybe = None,
    text_input_scale: Maybe = None,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = h.shape
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[h.dtype], "WIDTH": width, "CLIP": int(clip)}
    if index is not None:
        constants["INDEX"] = CTYPES[index.dtype]
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    scalars: dict[str, int | float] = {
        "tokens": tokens,
        "h_batch_stride": h.stride(0),
        "h_token_stride": h.stride(1),
        "y_batch_stride": y.stride(0),
        "y_token_stride": y.stride(1),
        "gate_stride": gate.stride(0),
        "scale_stride": scale.stride(0),
        "shift_stride": shift.stride(0),
        "index_batch_stride": index.stride(0) if index is not None else 0,
        "index_token_stride": index.stride(1) if index is not None else 0,
        "eps": float(eps),
    }
    device_index, empty_like = h.device.index or 0, torch.empty_like
    result = h.dtype if input_scale is None else FP8
    if text_h is not None and text_gate is not None and text_y is not None and text_scale is not None:
        if text_shift is None:
            raise ValueError("gated_residual_norm_modulate takes a whole text stream or none; ask `unsupported` first")
        return _prepare_both(h, constants, scalars, result, text_h, text_gate, text_y, text_scale, text_shift)
    bound = jit.compile(SOURCE, "gated_residual_norm_modulate", constants, h.device).bind(
        (tokens, batch, 1), (32, 4, 1), 0, **scalars
    )

    def launch(
        h: torch.Tensor,
        gate: torch.Tensor,
        y: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        clip: bool = False,
        index: Maybe = None,
        input_scale: Maybe = None,
        *_: None,
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


def _prepare_both(
    h: torch.Tensor,
    constants: dict[str, int | str],
    scalars: dict[str, int | float],
    result: torch.dtype,
    text_h: torch.Tensor,
    text_gate: torch.Tensor,
    text_y: torch.Tensor,
    text_scale: torch.Tensor,
    text_shift: torch.Tensor,
) -> Launcher:
    """The same for two streams: their rows in one grid, the text's first."""
    batch, tokens, _ = h.shape
    text_tokens = text_h.shape[1]
    bound = jit.compile(SOURCE, "gated_residual_norm_modulate_both", constants | {"TEXT": 1}, h.device).bind(
        (text_tokens + tokens, batch, 1),
        (32, 4, 1),
        0,
        text_tokens=text_tokens,
        text_h_batch_stride=text_h.stride(0),
        text_h_token_stride=text_h.stride(1),
        text_y_batch_stride=text_y.stride(0),
        text_y_token_stride=text_y.stride(1),
        text_gate_stride=text_gate.stride(0),
        text_scale_stride=text_scale.stride(0),
        text_shift_stride=text_shift.stride(0),
        **scalars,
    )
    device_index, empty_like = h.device.index or 0, torch.empty_like

    def launch(
        h: torch.Tensor,
        gate: torch.Tensor,
        y: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        clip: bool,
        index: Maybe,
        input_scale: Maybe,
        text_h: torch.Tensor,
        text_gate: torch.Tensor,
        text_y: torch.Tensor,
        text_scale: torch.Tensor,
        text_shift: torch.Tensor,
        text_input_scale: Maybe = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if out is None:
            stream = empty_like(h, memory_format=CONTIGUOUS)
            text_stream = empty_like(text_h, memory_format=CONTIGUOUS)
            out = stream, empty_like(stream, dtype=result), text_stream, empty_like(text_stream, dtype=result)
        bound(
            device_index,
            h.data_ptr(),
            gate.data_ptr(),
            y.data_ptr(),
            scale.data_ptr(),
            shift.data_ptr(),
            0 if index is None else index.data_ptr(),
            0 if input_scale is None else input_scale.data_ptr(),
            text_h.data_ptr(),
            text_gate.data_ptr(),
            text_y.data_ptr(),
            text_scale.data_ptr(),
            text_shift.data_ptr(),
            0 if text_input_scale is None else text_input_scale.data_ptr(),
            out[0].data_ptr(),
            out[1].data_ptr(),
            out[2].data_ptr(),
            out[3].data_ptr(),
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
    index: Maybe = None,
    input_scale: Maybe = None,
    text_h: Maybe = None,
    text_gate: Maybe = None,
    text_y: Maybe = None,
    text_scale: Maybe = None,
    text_shift: Maybe = None,
    text_input_scale: Maybe = None,
) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised outputs, contiguous: two of each stream, the second float8_e4m3fn where quantised."""
    dtypes = h.dtype, h.dtype if input_scale is None else FP8
    streams = (h,) if text_h is None else (h, text_h)
    return tuple(torch.empty(x.shape, dtype=dtype, device=h.device) for x in streams for dtype in dtypes)


def bytes_moved(*args: Any) -> int:
    """Return the bytes that one call must move: h, y and the modulation of each stream in, both results out."""
    streams = [args[:5], args[9:14]] if len(args) > 9 and args[9] is not None else [args[:5]]
    came_in: int = sum((2 * h.numel() + 3 * scale.numel()) * h.element_size() for h, _, _, scale, _ in streams)
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


def _both(image: Case, text_tokens: int, *, amplitude: float = 1.0, strided: bool = False, fp8: bool = False) -> Case:
    """The case with a text stream of so many tokens beside it, ``strided`` as a part of more tokens."""

    def build(device: torch.device, seed: int) -> Args:
        args = image.build(device, seed)
        h = args[0]
        batch, tokens, width = h.shape
        of_text = (batch, (tokens if strided else 0) + text_tokens, width)
        text_h, text_y = (randn(of_text, h.dtype, device, seed + part, amplitude)[:, :text_tokens] for part in (5, 6))
        shift, scale, gate = randn((batch, 3 * width), h.dtype, device, seed + 7).chunk(3, dim=-1)
        text = (text_h, gate, text_y, scale, shift)
        args = (*args, *(None,) * (9 - len(args)), *text)
        return (*args, torch.tensor(0.0107, device=device)) if fp8 else args

    name = image.name.replace("x", f"x{text_tokens}+", 1) + (" strided" if strided else "")
    batch = int(image.name.split("x")[0])
    return Case(name, image.dtype, image.rows + batch * text_tokens, build)


_IMAGE = _case(4096, 3072, torch.bfloat16)
CASES = (
    _IMAGE,
    _case(128, 3072, torch.bfloat16),
    _case(4096, 3072, torch.bfloat16, indexed=True),
    _both(_IMAGE, 128),
    *(_case(17, width, dtype) for width in (4, 516, 1000, 3844, 16384) for dtype in CTYPES if dtype.is_floating_point),
    _case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0),
    _case(5, 1540, torch.float32, batch=3, indexed=True),
    *(_case(64, 3072, torch.bfloat16, amplitude=amplitude) for amplitude in (1e-3, 40.0, 200.0)),
    quantized_case(_case(4096, 3072, torch.bfloat16), 8),
    quantized_case(_case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0), 8),
    quantized_case(_case(5, 1540, torch.float32, batch=3, indexed=True), 8),
    _both(_case(4096, 3072, torch.bfloat16, indexed=True), 128),
    _both(_case(64, 3072, torch.bfloat16, batch=2), 17, strided=True),
    *(
        _both(_case(17, width, dtype), 5)
        for width in (4, 516, 1000, 16384)
        for dtype in CTYPES
        if dtype.is_floating_point
    ),
    _both(_case(1, 3844, torch.bfloat16), 33),
    _both(_case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0), 7, amplitude=2e4),
    _both(_case(5, 1540, torch.float32, batch=3, indexed=True), 2),
    _both(quantized_case(_IMAGE, 8), 128, fp8=True),
    _both(
        quantized_case(_case(33, 3072, torch.float16, batch=2, clip=True, amplitude=20000.0), 8),
        7,
        amplitude=2e4,
        fp8=True,
    ),
    _both(quantized_case(_case(5, 1540, torch.float32, batch=3, indexed=True), 8), 2, strided=True, fp8=True),
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
    ("gated_residual_norm_modulate_both", {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "CLIP": 0, "TEXT": 1}, True),
    (
        "gated_residual_norm_modulate_both",
        {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "CLIP": 0, "QUANTIZED": 1, "TEXT": 1},
        True,
    ),
    (
        "gated_residual_norm_modulate_both",
        {"ELEMENT": "__half", "WIDTH": 3072, "CLIP": 1, "INDEX": "int", "TEXT": 1},
        True,
    ),
    ("gated_residual_norm_modulate_both", {"ELEMENT": "float", "WIDTH": 1540, "CLIP": 0, "TEXT": 1}, True),
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
    headline=(*(case.name for case in CASES[:4]), "1x4096x3072 fp8", "1x128+4096x3072 fp8"),
)
