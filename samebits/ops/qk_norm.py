"""Per-head RMSNorm of query and key in one launch, for the three references in use.

Kinds and where they round (details in ``_head_norm.cuh``):

- ``diffusers``: ``diffusers.models.normalization.RMSNorm``; fp32 until the cast before the weight. An fp32 weight
  gives an fp32 result.
- ``native``: the same chain with every step in half precision, as other engines' Z-Image has it.
- ``torch``: ``F.rms_norm``; one rounding at the end.

The sums follow ATen's ``reduce_kernel`` (``diffusers``, ``native``) and ``vectorized_layer_norm_kernel`` (``torch``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samebits import jit
from samebits.ops._layout import (
    CONTIGUOUS,
    CTYPES,
    HERE,
    MAX_ROWS,
    RowLayout,
    aligned,
    gives_contiguous_output,
    no_overlap,
    randn,
)
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._reduce_plan import ReducePlan, reduce_plan, why_no_plan, why_no_rms_norm_plan

SOURCE = HERE / "qk_norm.cu"
KINDS = {"diffusers": 0, "native": 1, "torch": 2}
_WARPS = 8
_ROWS_PER_WARP = 8  # heads_of_128: two half warps with four rows each
_HALF = (torch.float16, torch.bfloat16)
# The LayerNorm kernel's threads 0 to 63; heads of 256 leave its other 64 without a value.
_LAYER_NORM_PLAN = ReducePlan(columns=64, groups=1, vector=4)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    """Compute one head norm in eager: ``x`` is ``(..., head_dim)``, ``weight`` ``(head_dim,)``."""
    if kind == "torch":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    if kind == "native":
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + eps) * weight
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    if weight.dtype in _HALF:
        x = x.to(weight.dtype)
    return x * weight


def reference(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both norms in eager.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(B, S, H, head_dim)``; the numbers of heads and of tokens may differ. Any strides, the last contiguous.
    q_weight, k_weight : torch.Tensor
        ``(head_dim,)``.
    eps : float
        Added to the mean square.
    kind : {"diffusers", "native", "torch"}
        Which reference.

    Returns
    -------
    tuple of torch.Tensor
        The normalised q and k, contiguous, in the weight's dtype (which is the input's unless it is fp32).
    """
    return rms_norm(q, q_weight, eps, kind), rms_norm(k, k_weight, eps, kind)


def unsupported(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, kind: str
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if kind not in KINDS:
        return f"kind must be one of {', '.join(KINDS)}; it is {kind!r}"
    if q.dtype != k.dtype or q_weight.dtype != k_weight.dtype:
        return "q and k, and their weights, must each share a dtype"
    if q.dtype not in (torch.float32, *_HALF):
        return f"q and k must be float32, float16 or bfloat16; they are {q.dtype}"
    if q_weight.dtype != q.dtype and not (kind == "diffusers" and q_weight.dtype == torch.float32):
        return f"the weight must be {q.dtype}, or float32 for the diffusers kind; it is {q_weight.dtype}"
    if kind == "native" and q.dtype not in _HALF:
        return "the native kind is for half precision; in float32 it is the diffusers kind"
    if len({t.device for t in (q, k, q_weight, k_weight)}) > 1:
        return "q, k and their weights must be on one device"
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        if x.dim() != 4:
            return f"{name} must be (batch, tokens, heads, head_dim); it has {x.dim()} dimensions"
        head_dim = x.shape[-1]
        if not 32 <= head_dim <= 256 or head_dim % 8:
            return f"head_dim must be a multiple of 8 from 32 to 256; it is {head_dim}"
        if tuple(weight.shape) != (head_dim,) or head_dim != q.shape[-1]:
            return f"the weight of {name} must be ({head_dim},), one head_dim for both; it is {tuple(weight.shape)}"
        if not 0 < x.numel() // head_dim <= MAX_ROWS:
            return f"{name} must have between 1 and {MAX_ROWS} heads in all; it has {x.numel() // head_dim}"
        if x.stride(-1) != 1 or not weight.is_contiguous():
            return f"the last dimension of {name} and its weight must be contiguous"
        if not gives_contiguous_output(x) or not no_overlap(x):
            return f"{name}'s dimensions must lie in memory in their order and apart; the strides are {x.stride()}"
        if not aligned(weight, 4) or (kind == "torch" and not aligned(x, 4)):
            return f"{name} or its weight is not aligned to four elements"
        if reason := _why_no_order(x, kind):
            return f"{name}: {reason}"
    return None


def _why_no_order(x: torch.Tensor, kind: str) -> str | None:
    if kind == "torch":
        return why_no_rms_norm_plan(x.shape[-1], x.dtype, x.device)
    return why_no_plan(_rows(x), x.shape[-1], x.dtype if kind == "native" else torch.float32, x.device)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def head_plan(x: torch.Tensor, kind: str) -> ReducePlan | None:
    """Return the geometry in which ATen sums x's heads, ``(B, S, H, head_dim)``, or ``None`` where none is known."""
    if kind == "torch":
        return _LAYER_NORM_PLAN
    return reduce_plan(_rows(x), x.shape[-1], 2 if kind == "native" else 4)


def _tokens(x: torch.Tensor) -> RowLayout:
    batch, tokens = x.shape[:2]
    return RowLayout(batch, tokens, x.stride(0), x.stride(1))


def prepare(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, kind: str
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    head_dim = q.shape[-1]
    plan, k_plan = head_plan(q, kind), head_plan(k, kind)
    if plan is None or k_plan is None:
        raise ValueError("qk_norm has no plan for these arguments; ask `unsupported` first")
    constants: dict[str, int | str] = {
        "ELEMENT": CTYPES[q.dtype],
        "WEIGHT": CTYPES[q_weight.dtype],
        "HEAD_DIM": head_dim,
        "Q_HEADS": q.shape[2],
        "K_HEADS": k.shape[2],
        "REFERENCE": KINDS[kind],
    }
    # Heads of 128 have one tree for every number of rows.
    if head_dim == 128 and q.dtype in _HALF and all(aligned(t, 8) for t in (q, k)):
        name, rows_per_block = "heads_of_128", _WARPS * _ROWS_PER_WARP
    else:
        name, rows_per_block = "any_head_dim", _WARPS
        constants |= {"Q_COLUMNS": plan.columns, "K_COLUMNS": k_plan.columns, "VECTOR": plan.vector}
    rows = (_rows(q), _rows(k))
    bound = jit.compile(SOURCE, name, constants, q.device).bind(
        (-(-max(rows) // rows_per_block), 2, 1),
        (32, _WARPS, 1),
        q_rows=rows[0],
        k_rows=rows[1],
        q_tokens=q.shape[1],
        k_tokens=k.shape[1],
        q_sample_stride=q.stride(0),
        q_token_stride=q.stride(1),
        q_head_stride=q.stride(2),
        k_sample_stride=k.stride(0),
        k_token_stride=k.stride(1),
        k_head_stride=k.stride(2),
        eps=float(eps),
    )
    dtype, device_index, empty_like = q_weight.dtype, q.device.index or 0, torch.empty_like
    keeps_dtype = dtype == q.dtype

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        kind: str,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if out is None:
            if keeps_dtype:
                out = (empty_like(q, memory_format=CONTIGUOUS), empty_like(k, memory_format=CONTIGUOUS))
            else:
                out = (
                    empty_like(q, dtype=dtype, memory_format=CONTIGUOUS),
                    empty_like(k, dtype=dtype, memory_format=CONTIGUOUS),
                )
        bound(
            device_index,
            q.data_ptr(),
            k.data_ptr(),
            q_weight.data_ptr(),
            k_weight.data_ptr(),
            out[0].data_ptr(),
            out[1].data_ptr(),
        )
        return out

    return launch


def allocate(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the two uninitialised outputs, contiguous, in the weight's dtype."""
    return tuple(torch.empty(x.shape, dtype=q_weight.dtype, device=x.device) for x in (q, k))


def bytes_moved(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, kind: str
) -> int:
    """Return the bytes that one call must move: q, k and the weights in, both results out."""
    elements = q.numel() + k.numel()
    return elements * (q.element_size() + q_weight.element_size()) + 2 * q_weight.numel() * q_weight.element_size()


def _case(
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kind: str,
    batch: int = 1,
    *,
    fused: bool = False,
    weight_dtype: torch.dtype | None = None,
    amplitude: float = 1.0,
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        width = heads * head_dim
        if fused:  # slices of one fused QKV projection
            q, k, _ = randn((batch, tokens, 3 * width), dtype, device, seed, amplitude).chunk(3, dim=-1)
        else:
            q = randn((batch, tokens, width), dtype, device, seed, amplitude)
            k = randn((batch, tokens, width), dtype, device, seed + 1, amplitude)
        q, k = torch.unflatten(q, -1, (heads, head_dim)), torch.unflatten(k, -1, (heads, head_dim))
        weights = (1 + randn((2, head_dim), torch.float32, device, seed + 2, 0.1)).to(weight_dtype or dtype)
        return q, k, weights[0].clone(), weights[1].clone(), 1e-6, kind

    name = f"{batch}x{tokens}x{heads}x{head_dim} {kind}" + (" fused-qkv" if fused else "")
    name += " fp32-weight" if weight_dtype == torch.float32 else ""
    name += f" x{amplitude:g}" if amplitude != 1 else ""
    return Case(name, dtype, 2 * batch * tokens * heads, build)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    _case(4224, 30, 128, _BF16, "diffusers", fused=True),
    _case(4096, 24, 128, _BF16, "diffusers"),
    _case(128, 24, 128, _BF16, "diffusers"),
    _case(4224, 30, 128, _BF16, "native", fused=True),
    _case(4224, 30, 128, _BF16, "torch", fused=True),
    _case(1024, 24, 128, _BF16, "diffusers", weight_dtype=_FP32),
    *(
        _case(37, heads, head_dim, dtype, kind, batch=2, fused=True)
        for heads, head_dim in ((3, 32), (3, 40), (2, 64), (3, 72), (2, 120), (5, 128), (3, 136), (2, 248), (3, 256))
        for dtype in (_BF16, _FP16, _FP32)
        for kind in KINDS
        if not (kind == "native" and dtype == _FP32)
    ),
    # few rows: heads of 64 to 127 and of 256 have another tree below 16 rows
    *(
        _case(tokens, 1, head_dim, _BF16, kind)
        for tokens in (1, 2, 4, 8, 15, 16)
        for head_dim in (64, 128, 256)
        for kind in KINDS
    ),
    *(_case(64, 4, head_dim, _BF16, "diffusers", weight_dtype=_FP32) for head_dim in (64, 128)),
    *(
        _case(512, 24, 128, dtype, kind, amplitude=amplitude)
        for dtype in _HALF
        for kind in KINDS
        for amplitude in (0.005, 40.0, 200.0)
    ),
)


def _variant(name: str, element: str, weight: str, head_dim: int, kind: str, **geometry: int) -> Variant:
    constants: dict[str, int | str] = {"ELEMENT": element, "WEIGHT": weight, "HEAD_DIM": head_dim}
    return name, constants | {"Q_HEADS": 24, "K_HEADS": 24, "REFERENCE": KINDS[kind]} | geometry, kind == "torch"


COMPILE_VARIANTS: tuple[Variant, ...] = (
    _variant("heads_of_128", "__nv_bfloat16", "__nv_bfloat16", 128, "diffusers"),
    _variant("heads_of_128", "__nv_bfloat16", "float", 128, "diffusers"),
    _variant("heads_of_128", "__half", "__half", 128, "native"),
    _variant("heads_of_128", "__nv_bfloat16", "__nv_bfloat16", 128, "torch"),
    _variant("any_head_dim", "float", "float", 72, "diffusers", Q_COLUMNS=32, K_COLUMNS=64, VECTOR=1),
    _variant("any_head_dim", "__half", "__half", 256, "native", Q_COLUMNS=32, K_COLUMNS=32, VECTOR=8),
    _variant("any_head_dim", "__nv_bfloat16", "__nv_bfloat16", 40, "torch", Q_COLUMNS=64, K_COLUMNS=64, VECTOR=4),
)
"""Kernel, constants, and whether an FMA is owed (torch's fused kernel sums its squares with one)."""

OP = Op(
    name="qk_norm",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_head_norm.cuh",
        HERE / "_numerics.cuh",
        HERE / "qk_norm.py",
        HERE / "_reduce_plan.py",
        HERE / "_layout.py",
    ),
    headline=tuple(case.name for case in CASES[:6]),
)
