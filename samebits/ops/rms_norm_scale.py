"""Full-width RMSNorm as diffusers spells it, times ``1 + scale``; and the tanh of two gates beside it.

The eager chain is ten kernels: cast, square, mean, sum with eps, rsqrt, product, cast, product with the weight,
``1 + scale``, product with that. Roundings to the element type: after ``x * r``, after the weight, after ``1 + scale``,
after the product with it. The mean follows ATen's ``reduce_kernel``, whose order changes with the number of rows; see
``rms_norm_scale.cu``. The gates are two more eager kernels, on one row a sample.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from samebits import jit
from samebits.ops._layout import (
    CONTIGUOUS,
    CTYPES,
    HERE,
    MAX_ROWS,
    aligned,
    gives_contiguous_output,
    in_order,
    multiprocessors,
    no_overlap,
    randn,
    row_layout,
)
from samebits.ops._op import Args, Case, Launcher, Op, Outputs, Variant
from samebits.ops._quantize import FP8, quantized, quantized_case, why_not_scale
from samebits.ops._reduce_plan import reduce_plan, why_no_plan
from samebits.ops.qk_norm import rms_norm

SOURCE = HERE / "rms_norm_scale.cu"
MIN_WIDTH, MAX_WIDTH = 128, 16384
_BLOCKS = 10  # of a multiprocessor that take one row after another; as measured on an H200
_MOST_SHARED_BYTES = 200 << 10  # of a multiprocessor, for two rows of each of these blocks


Maybe = torch.Tensor | None


def scaled_norm(x: torch.Tensor, weight: torch.Tensor, scale: Maybe, eps: float) -> torch.Tensor:
    """Compute the norm and its scale in eager; see :func:`reference`."""
    y = rms_norm(x, weight, eps, "diffusers")
    return y if scale is None else y * (1.0 + scale)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: Maybe,
    eps: float,
    gate_msa: Maybe = None,
    gate_mlp: Maybe = None,
    input_scale: Maybe = None,
) -> Outputs:
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
    gate_msa, gate_mlp : torch.Tensor, optional
        ``(B or 1, 1, D)``: what the block multiplies its two branches with once it has their tanh; both or none.
    input_scale : torch.Tensor, optional
        fp32, ``()``: the scaled norm is quantised with it, see ``_quantize.py``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The scaled norm, of x's shape and dtype, or float8_e4m3fn where it is quantised, contiguous; with gates also
        their tanh, contiguous.
    """
    y = quantized(scaled_norm(x, weight, scale, eps), input_scale)
    return y if gate_msa is None or gate_mlp is None else (y, gate_msa.tanh(), gate_mlp.tanh())


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: Maybe,
    eps: float,
    gate_msa: Maybe = None,
    gate_mlp: Maybe = None,
    input_scale: Maybe = None,
) -> str | None:
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
    if reason := unsupported_gates(x, gate_msa, gate_mlp) or why_not_scale(input_scale, x.device):
        return reason
    for name, t in (("x", x), ("weight", weight), ("scale", scale), ("gate_msa", gate_msa), ("gate_mlp", gate_mlp)):
        if t is not None and not aligned(t, 4):
            return f"{name} is not aligned to four elements"
    return why_no_plan(x.numel() // width, width, torch.float32, x.device)


def unsupported_gates(x: torch.Tensor, gate_msa: Maybe, gate_mlp: Maybe) -> str | None:
    """Say why a kernel beside whose rows two gates get their tanh does not take them, or return ``None``."""
    if gate_msa is None and gate_mlp is None:
        return None
    if gate_msa is None or gate_mlp is None:
        return "either both gates must be given or none"
    if any(t.dtype != x.dtype or t.device != x.device for t in (gate_msa, gate_mlp)):
        return f"both gates must have x's dtype {x.dtype} and lie on its device"
    if gate_msa.dim() != 3 or gate_msa.shape[1:] != (1, x.shape[-1]) or gate_mlp.shape != gate_msa.shape:
        shapes = f"{tuple(gate_msa.shape)} and {tuple(gate_mlp.shape)}"
        return f"both gates must be (batch, 1, {x.shape[-1]}), one row a sample; they are {shapes}"
    if gate_msa.shape[0] == 0:
        return "the gates must have at least one row"
    for name, t in (("gate_msa", gate_msa), ("gate_mlp", gate_mlp)):
        if t.stride(-1) != 1 or not gives_contiguous_output(t):
            return f"the rows of {name} must be contiguous and lie in their order; the strides are {t.stride()}"
    return None


def gate_scalars(gate_msa: Maybe, gate_mlp: Maybe, wide: int, threads: int) -> dict[str, int]:
    """Return what a kernel must know of its gates besides their addresses; its blocks take a vector a thread."""
    return {
        "gate_blocks": 0 if gate_msa is None else -(-2 * gate_msa.numel() // (wide * threads)),
        "gate_rows": 0 if gate_msa is None else gate_msa.shape[0],
        "gate_msa_stride": 0 if gate_msa is None else gate_msa.stride(0),
        "gate_mlp_stride": 0 if gate_mlp is None else gate_mlp.stride(0),
    }


def broadcast_strides(scale: torch.Tensor | None) -> tuple[int, int]:
    """Return by how many elements a scale ``(B or 1, S or 1, D)`` moves from sample to sample and token to token."""
    if scale is None:
        return 0, 0
    return scale.stride(0) if scale.shape[0] > 1 else 0, scale.stride(1) if scale.shape[1] > 1 else 0


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: Maybe,
    eps: float,
    gate_msa: Maybe = None,
    gate_mlp: Maybe = None,
    input_scale: Maybe = None,
) -> Launcher:
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
    tensors = (x, weight, scale, gate_msa, gate_mlp)
    wide = 8 if x.element_size() == 2 and width % 8 == 0 and all(t is None or aligned(t, 8) for t in tensors) else 4
    constants: dict[str, int | str] = {
        "ELEMENT": CTYPES[x.dtype],
        "WIDTH": width,
        "COLUMNS": plan.columns,
        "GROUPS": plan.groups,
        "WIDE": wide,
        "HAS_SCALE": int(scale is not None),
        "HAS_GATES": int(gate_msa is not None),
    }
    scale_strides = broadcast_strides(scale)
    # Blocks that stay only where the rows are short enough for all of them and there are more rows than blocks.
    row_bytes, blocks = width * x.element_size(), _BLOCKS * multiprocessors(x.device)
    stays = plan.columns * plan.groups == 32 and 2 * _BLOCKS * row_bytes <= _MOST_SHARED_BYTES and rows > blocks
    gates = gate_scalars(gate_msa, gate_mlp, wide, math.prod(plan.block))
    constants["AHEAD"] = _BLOCKS if stays else 0
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    bound = jit.compile(SOURCE, "rms_norm_scale", constants, x.device).bind(
        (gates["gate_blocks"] + (blocks if stays else rows), 1, 1),
        plan.block,
        2 * row_bytes if stays else row_bytes,
        rows=rows,
        tokens=tokens,
        x_sample_stride=sample_stride,
        x_token_stride=token_stride,
        scale_sample_stride=scale_strides[0],
        scale_token_stride=scale_strides[1],
        **gates,
        eps=float(eps),
    )
    device_index, empty_like = x.device.index or 0, torch.empty_like
    result = x.dtype if input_scale is None else FP8

    def launch(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: Maybe,
        eps: float,
        gate_msa: Maybe = None,
        gate_mlp: Maybe = None,
        input_scale: Maybe = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> Outputs:
        scale_at = 0 if scale is None else scale.data_ptr()
        input_scale_at = 0 if input_scale is None else input_scale.data_ptr()
        if gate_msa is None or gate_mlp is None:
            y = empty_like(x, dtype=result, memory_format=CONTIGUOUS) if out is None else out[0]
            bound(device_index, x.data_ptr(), weight.data_ptr(), scale_at, 0, 0, input_scale_at, y.data_ptr(), 0, 0)
            return y
        if out is None:
            out = (
                empty_like(x, dtype=result, memory_format=CONTIGUOUS),
                empty_like(gate_msa, memory_format=CONTIGUOUS),
                empty_like(gate_mlp, memory_format=CONTIGUOUS),
            )
        bound(
            device_index,
            x.data_ptr(),
            weight.data_ptr(),
            scale_at,
            gate_msa.data_ptr(),
            gate_mlp.data_ptr(),
            input_scale_at,
            out[0].data_ptr(),
            out[1].data_ptr(),
            out[2].data_ptr(),
        )
        return out

    return launch


def allocate(
    x: torch.Tensor,
    weight: Any,
    scale: Any,
    eps: float,
    gate_msa: Maybe = None,
    gate_mlp: Maybe = None,
    input_scale: Maybe = None,
) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised outputs, contiguous: of x's shape, and with gates two of theirs."""
    gates = [t for t in (gate_msa, gate_mlp) if t is not None]
    y = torch.empty(x.shape, dtype=x.dtype if input_scale is None else FP8, device=x.device)
    return y, *(torch.empty(gate.shape, dtype=x.dtype, device=x.device) for gate in gates)


def bytes_moved(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: Maybe,
    eps: float,
    gate_msa: Maybe = None,
    gate_mlp: Maybe = None,
    input_scale: Maybe = None,
) -> int:
    """Return the bytes that one call must move: x, weight, scale and gates in; the results, gates again, out."""
    once, twice = ([t for t in group if t is not None] for group in ((weight, scale), (x, gate_msa, gate_mlp)))
    moved = (sum(t.numel() for t in once) + 2 * sum(t.numel() for t in twice)) * x.element_size()
    return moved if input_scale is None else moved - x.numel() * (x.element_size() - 1)


def _case(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    batch: int = 1,
    *,
    form: str = "",
    amplitude: float = 1.0,
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((batch, tokens, width), dtype, device, seed, amplitude)
        weight = (1 + randn((width,), torch.float32, device, seed + 1, 0.1)).to(dtype)
        if form == "no-scale":
            return x, weight, None, 1e-5
        if form == "token-scale":
            return x, weight, randn((batch, tokens, width), dtype, device, seed + 2), 1e-5
        # one projection, chunked: the rows are strided views, as in the model
        scale, gate_msa, _, gate_mlp = randn((batch, 1, 4 * width), dtype, device, seed + 2).chunk(4, dim=-1)
        return x, weight, scale, 1e-5, gate_msa, gate_mlp

    name = f"{batch}x{tokens}x{width}" + (f" {form}" if form else "")
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, batch * tokens, build)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    _case(4224, 3840, _BF16),
    _case(4224, 3840, _BF16, form="no-scale"),
    _case(128, 3840, _BF16, form="no-scale"),
    *(
        _case(rows, width, _BF16, form="no-scale")
        for rows in (1, 2, 3, 4, 7, 8, 15, 16, 17, 4096)
        for width in (128, 256, 2560, 3072, 3584, 3840, 5120, 8192, 8200, 12288)
    ),
    *(
        _case(rows, width, dtype, batch=2)
        for rows in (1, 2, 5, 9)
        for width in (132, 1000, 3840, 16384)
        for dtype in (_BF16, _FP16, _FP32)
    ),
    _case(64, 3840, _BF16, batch=2, form="token-scale"),
    *(_case(64, 3840, dtype, amplitude=a) for dtype in (_BF16, _FP16) for a in (1e-3, 40.0, 200.0)),
    quantized_case(_case(4224, 3840, _BF16), 6),
    quantized_case(_case(17, 3840, _FP16, batch=2), 6),
    quantized_case(_case(9, 1000, _FP32, batch=2), 6),
    quantized_case(_case(5, 16384, _BF16, form="no-scale"), 6),
)


def _variant(element: str, width: int, columns: int, groups: int, has_scale: int, **more: int) -> Variant:
    constants: dict[str, int | str] = {"ELEMENT": element, "WIDTH": width, "COLUMNS": columns, "GROUPS": groups}
    constants |= {"WIDE": 4 if element == "float" else 8, "HAS_SCALE": has_scale, "HAS_GATES": 1}
    return "rms_norm_scale", constants | {"AHEAD": _BLOCKS if columns * groups == 32 else 0} | more, False


COMPILE_VARIANTS: tuple[Variant, ...] = (
    _variant("__nv_bfloat16", 3840, 32, 1, 1, QUANTIZED=1),
    _variant("__nv_bfloat16", 3840, 32, 1, 1),
    _variant("__half", 3840, 256, 1, 0),
    _variant("float", 8192, 32, 16, 1),
    _variant("float", 5120, 32, 1, 0),
)
"""Kernel, constants, and whether an FMA is owed (never here)."""
CUDA_FUNCTION = "tanhf"
"""CUDA's own function that the kernel calls; the approximate instructions inside it are ATen's as well."""

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
        HERE / "_quantize.cuh",
        HERE / "_gates.cuh",
        HERE / "_row_sum.cuh",
        HERE / "rms_norm_scale.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
        HERE / "_reduce_plan.py",
        HERE / "qk_norm.py",
    ),
    headline=(*(case.name for case in CASES[:3]), "1x4224x3840 fp8"),
)
