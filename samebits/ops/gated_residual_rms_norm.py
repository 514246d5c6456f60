"""A gated residual of a normalised branch, and the next norm of the result: Z-Image's chain.

``x + gate * RMSNorm(y)``, then ``RMSNorm(x') * (1 + scale)``, and beside it the tanh of two gates, where the norm is
the first of the next block. Roundings to the element type: after ``y * r``, after y's weight, after the gate, after the
residual sum, and those of ``rms_norm_scale``. The means reproduce ATen's ``reduce_kernel``, see ``_row_sum.cuh``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from samebits import jit
from samebits.ops import rms_norm_scale
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, aligned, randn
from samebits.ops._op import Args, Case, Launcher, Op, Outputs, Variant
from samebits.ops._quantize import FP8, quantized, quantized_case
from samebits.ops._reduce_plan import reduce_plan
from samebits.ops.qk_norm import rms_norm

SOURCE = HERE / "gated_residual_rms_norm.cu"


def reference(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    y: torch.Tensor,
    y_weight: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    gate_msa: torch.Tensor | None = None,
    gate_mlp: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> Outputs:
    """Compute the chain in eager, as Z-Image's block spells it.

    Parameters
    ----------
    x, y : torch.Tensor
        ``(B, S, D)``: the residual stream and the branch that joins it.
    gate : torch.Tensor, optional
        ``(B, 1, D)`` or ``(B, S, D)``, after its tanh; ``None`` in a block without modulation.
    y_weight : torch.Tensor
        ``(D,)``: the weight of the branch's norm.
    weight : torch.Tensor, optional
        ``(D,)``: the weight of the next norm; ``None`` ends the chain at the residual stream.
    scale : torch.Tensor, optional
        ``(B, 1, D)`` or ``(B, S, D)``: the next norm is multiplied with ``1 + scale``.
    eps : float
        Added to both mean squares.
    gate_msa, gate_mlp : torch.Tensor, optional
        ``(B or 1, 1, D)``: the next block's gates before their tanh; both or none, and only with ``weight``.
    input_scale : torch.Tensor, optional
        fp32, ``()``: the next norm is quantised with it; only with ``weight``. See ``_quantize.py``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The new residual stream and, with ``weight``, its scaled norm, ``(B, S, D)``, contiguous; with the next block's
        gates also their tanh, contiguous. The norm is float8_e4m3fn where it is quantised.
    """
    branch = rms_norm(y, y_weight, eps, "diffusers")
    x = x + (branch if gate is None else gate * branch)
    if weight is None:
        return x
    normed = quantized(rms_norm_scale.scaled_norm(x, weight, scale, eps), input_scale)
    return (x, normed) if gate_msa is None or gate_mlp is None else (x, normed, gate_msa.tanh(), gate_mlp.tanh())


def unsupported(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    y: torch.Tensor,
    y_weight: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    gate_msa: torch.Tensor | None = None,
    gate_mlp: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if x.dim() != 3 or tuple(x.shape) != tuple(y.shape):
        return f"x and y must be (batch, tokens, width) alike; they are {tuple(x.shape)} and {tuple(y.shape)}"
    if x.dtype != y.dtype or x.device != y.device:
        return "x and y must have one dtype and lie on one device"
    if weight is None and scale is not None:
        return "a scale needs the weight of its norm"
    # The gate broadcasts as a scale does, and the residual stream is laid out as the next norm wants it.
    if reason := rms_norm_scale.unsupported(y, y_weight, gate, eps):
        return f"the branch: {reason.replace('scale', 'gate')}"
    if weight is None and (gate_msa is not None or gate_mlp is not None):
        return "the gates of a next block need the weight of its norm"
    if weight is None and input_scale is not None:
        return "there is nothing to quantise without the weight of a next norm"
    next_weight = y_weight if weight is None else weight
    if reason := rms_norm_scale.unsupported(x, next_weight, scale, eps, gate_msa, gate_mlp, input_scale):
        return f"the residual stream: {reason}"
    return None


def prepare(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    y: torch.Tensor,
    y_weight: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    gate_msa: torch.Tensor | None = None,
    gate_mlp: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = x.shape
    rows = batch * tokens
    plan = reduce_plan(rows, width, 4)
    if plan is None:
        raise ValueError("gated_residual_rms_norm has no plan for these arguments; ask `unsupported` first")
    tensors = [t for t in (x, gate, y, y_weight, weight, scale, gate_msa, gate_mlp) if t is not None]
    wide = 8 if x.element_size() == 2 and width % 8 == 0 and all(aligned(t, 8) for t in tensors) else 4
    constants: dict[str, int | str] = {
        "ELEMENT": CTYPES[x.dtype],
        "WIDTH": width,
        "COLUMNS": plan.columns,
        "GROUPS": plan.groups,
        "WIDE": wide,
        "HAS_GATE": int(gate is not None),
        "HAS_NEXT": int(weight is not None),
        "HAS_SCALE": int(scale is not None),
        "HAS_GATES": int(gate_msa is not None),
    }
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    gates = rms_norm_scale.gate_scalars(gate_msa, gate_mlp, wide, math.prod(plan.block))
    gate_strides, scale_strides = rms_norm_scale.broadcast_strides(gate), rms_norm_scale.broadcast_strides(scale)
    bound = jit.compile(SOURCE, "gated_residual_rms_norm", constants, x.device).bind(
        (gates["gate_blocks"] + rows, 1, 1),
        plan.block,
        width * x.element_size(),
        rows=rows,
        tokens=tokens,
        x_sample_stride=x.stride(0),
        x_token_stride=x.stride(1),
        y_sample_stride=y.stride(0),
        y_token_stride=y.stride(1),
        gate_sample_stride=gate_strides[0],
        gate_token_stride=gate_strides[1],
        scale_sample_stride=scale_strides[0],
        scale_token_stride=scale_strides[1],
        **gates,
        eps=float(eps),
    )
    device_index, empty_like = x.device.index or 0, torch.empty_like
    result = x.dtype if input_scale is None else FP8

    def launch(
        x: torch.Tensor,
        gate: torch.Tensor | None,
        y: torch.Tensor,
        y_weight: torch.Tensor,
        weight: torch.Tensor | None,
        scale: torch.Tensor | None,
        eps: float,
        gate_msa: torch.Tensor | None = None,
        gate_mlp: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> Outputs:
        if out is None:
            stream = empty_like(x, memory_format=CONTIGUOUS)
            if weight is None:
                out = (stream,)
            elif gate_msa is None or gate_mlp is None:
                out = (stream, empty_like(stream, dtype=result))
            else:
                opened = (empty_like(gate, memory_format=CONTIGUOUS) for gate in (gate_msa, gate_mlp))
                out = (stream, empty_like(stream, dtype=result), *opened)
        has_gates = len(out) == 4
        bound(
            device_index,
            x.data_ptr(),
            0 if gate is None else gate.data_ptr(),
            y.data_ptr(),
            y_weight.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if gate_msa is None else gate_msa.data_ptr(),
            0 if gate_mlp is None else gate_mlp.data_ptr(),
            0 if input_scale is None else input_scale.data_ptr(),
            out[0].data_ptr(),
            0 if weight is None else out[1].data_ptr(),
            out[2].data_ptr() if has_gates else 0,
            out[3].data_ptr() if has_gates else 0,
        )
        return out[0] if weight is None else out

    return launch


def allocate(
    x: torch.Tensor,
    gate: Any,
    y: torch.Tensor,
    y_weight: torch.Tensor,
    weight: Any,
    scale: Any,
    eps: float,
    gate_msa: torch.Tensor | None = None,
    gate_mlp: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised outputs, contiguous: one, or two with the next norm, and two of the gates' shape."""
    result = x.dtype if input_scale is None else FP8
    made = [(x, x.dtype), (None if weight is None else x, result), (gate_msa, x.dtype), (gate_mlp, x.dtype)]
    return tuple(torch.empty(like.shape, dtype=dtype, device=x.device) for like, dtype in made if like is not None)


def bytes_moved(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    y: torch.Tensor,
    y_weight: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    gate_msa: torch.Tensor | None = None,
    gate_mlp: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> int:
    """Return the bytes that one call must move: x, y, gates, weights and scale in, the results out."""
    elements = (3 if weight is None else 4) * x.numel()
    elements += 2 * sum(t.numel() for t in (gate_msa, gate_mlp) if t is not None)
    elements += sum(t.numel() for t in (gate, y_weight, weight, scale) if t is not None)
    return elements * x.element_size() - (0 if input_scale is None else x.numel() * (x.element_size() - 1))


def _case(
    tokens: int, width: int, dtype: torch.dtype, batch: int = 1, *, form: str = "", amplitude: float = 1.0
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((batch, tokens, width), dtype, device, seed, amplitude)
        y = randn((batch, tokens, width), dtype, device, seed + 1, amplitude)
        weights = (1 + randn((2, width), torch.float32, device, seed + 2, 0.1)).to(dtype)
        rows = tokens if form == "per-token" else 1
        gate, scale = randn((batch, rows, 2 * width), dtype, device, seed + 3).chunk(2, dim=-1)
        # the next block's projection, chunked
        next_scale, gate_msa, _, gate_mlp = randn((batch, 1, 4 * width), dtype, device, seed + 4).chunk(4, dim=-1)
        if form == "no-modulation":
            return x, None, y, weights[0].clone(), weights[1].clone(), None, 1e-5
        if form == "last":
            return x, gate.tanh(), y, weights[0].clone(), None, None, 1e-5
        args = x, gate.tanh(), y, weights[0].clone(), weights[1].clone()
        return (*args, next_scale, 1e-5, gate_msa, gate_mlp) if form == "next-block" else (*args, scale, 1e-5)

    name = f"{batch}x{tokens}x{width}" + (f" {form}" if form else "") + (f" x{amplitude:g}" if amplitude != 1 else "")
    return Case(name, dtype, 2 * batch * tokens, build)


_BF16 = torch.bfloat16
CASES = (
    _case(4224, 3840, _BF16),
    _case(4224, 3840, _BF16, form="last"),
    _case(4224, 3840, _BF16, form="next-block"),
    _case(128, 3840, _BF16, form="no-modulation"),
    *(_case(rows, 3840, _BF16) for rows in (1, 2, 4, 8, 15, 17)),
    *(_case(5, 1000, dtype, batch=2, form="next-block") for dtype in CTYPES if dtype.is_floating_point),
    *(
        _case(rows, width, dtype, batch=2)
        for rows in (1, 5, 9)
        for width in (128, 1000, 8200)
        for dtype in CTYPES
        if dtype.is_floating_point
    ),
    _case(64, 3840, _BF16, batch=2, form="per-token"),
    *(_case(64, 3840, _BF16, amplitude=amplitude) for amplitude in (1e-3, 40.0, 200.0)),
    quantized_case(_case(4224, 3840, _BF16, form="next-block"), 9),
    quantized_case(_case(17, 1000, torch.float16, batch=2), 9),
    quantized_case(_case(9, 8200, torch.float32, batch=2), 9),
)


def _variant(element: str, width: int, columns: int, groups: int, **has: int) -> Variant:
    constants: dict[str, int | str] = {"ELEMENT": element, "WIDTH": width, "COLUMNS": columns, "GROUPS": groups}
    constants |= {"WIDE": 4 if element == "float" else 8, "HAS_GATE": 1, "HAS_NEXT": 1, "HAS_SCALE": 1}
    constants["HAS_GATES"] = 1
    return "gated_residual_rms_norm", constants | has, False


COMPILE_VARIANTS: tuple[Variant, ...] = (
    _variant("__nv_bfloat16", 3840, 32, 1, QUANTIZED=1),
    _variant("__nv_bfloat16", 3840, 32, 1),
    _variant("__half", 3840, 256, 1, HAS_SCALE=0),
    _variant("float", 8192, 32, 16, HAS_GATE=0),
)
"""Kernel, constants, and whether an FMA is owed (never here)."""
CUDA_FUNCTION = "tanhf"
"""CUDA's own function that the kernel calls; the approximate instructions inside it are ATen's as well."""

OP = Op(
    name="gated_residual_rms_norm",
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
        HERE / "_gates.cuh",
        HERE / "_row_sum.cuh",
        HERE / "gated_residual_rms_norm.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
        HERE / "_reduce_plan.py",
        HERE / "qk_norm.py",
        HERE / "rms_norm_scale.py",
    ),
    headline=tuple(case.name for case in CASES[:4]),
)
