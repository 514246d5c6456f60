"""Per-head RMSNorm of query and key, complex RoPE, and the joint attention buffers of one or two streams.

The norms are those of ``qk_norm``. RoPE is diffusers' complex form: widen to fp32, multiply neighbours as complex
numbers with the table, one rounding back to the normed type. For two streams eager then concatenates text and image
along the tokens; here every result is written where the concatenation would put it, so that no ``cat`` remains.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops import qk_norm
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, aligned, randn
from samebits.ops._op import Args, Case, Launcher, Op, Outputs, Variant

SOURCE = HERE / "qk_norm_rope.cu"
_WARPS = 8
_HALF = (torch.float16, torch.bfloat16)
Maybe = torch.Tensor | None


def rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` ``(B, S, H, D)`` by a complex64 table ``(S, D / 2)`` or ``(B, S, D / 2)``, as diffusers does."""
    rotated = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table.unsqueeze(-2)
    return torch.view_as_real(rotated).flatten(3).type_as(x)


def _stream(
    q: torch.Tensor, k: Any, v: Maybe, q_weight: Any, k_weight: Any, table: Any, eps: float, kind: str
) -> list[torch.Tensor]:
    rotated = [rope(qk_norm.rms_norm(x, weight, eps, kind), table) for x, weight in ((q, q_weight), (k, k_weight))]
    return rotated if v is None else [*rotated, v]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Maybe,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    table: torch.Tensor,
    text_q: Maybe,
    text_k: Maybe,
    text_v: Maybe,
    text_q_weight: Maybe,
    text_k_weight: Maybe,
    text_table: Maybe,
    eps: float,
    kind: str,
) -> tuple[torch.Tensor, ...]:
    """Compute the chain in eager, as the attention processors of Qwen-Image (two streams) and Z-Image (one) spell it.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(B, S, H, head_dim)``; ``v`` may be ``None``, then there is no joint value. One stream has none to join.
    q_weight, k_weight : torch.Tensor
        ``(head_dim,)``.
    table : torch.Tensor
        complex64, ``(S, head_dim / 2)`` for every sample or ``(B, S, head_dim / 2)``.
    text_q, text_k, text_v, text_q_weight, text_k_weight, text_table : torch.Tensor, optional
        The same of the text stream with ``(B, T, H, head_dim)``; all ``None`` where there is one stream.
    eps : float
        Added to the mean squares.
    kind : {"diffusers", "native", "torch"}
        Which RMSNorm, see :mod:`samebits.ops.qk_norm`.

    Returns
    -------
    tuple of torch.Tensor
        Joint query, key and, with ``v``, value: ``(B, T + S, H, head_dim)``, text first, contiguous.
    """
    joint = _stream(q, k, v, q_weight, k_weight, table, eps, kind)
    if text_q is not None:
        text = _stream(text_q, text_k, text_v, text_q_weight, text_k_weight, text_table, eps, kind)
        joint = [torch.cat(pair, dim=1) for pair in zip(text, joint, strict=True)]
    return tuple(joint)


def _unsupported_stream(q: torch.Tensor, k: torch.Tensor, v: Maybe, table: torch.Tensor, name: str) -> str | None:
    """Say what this op asks of a stream beyond what ``qk_norm`` does."""
    batch, tokens, heads, head_dim = q.shape
    if tuple(k.shape) != tuple(q.shape) or (v is not None and tuple(v.shape) != tuple(q.shape)):
        return f"query, key and value of the {name} must have one shape"
    for what, x in (("query", q), ("key", k), ("value", v)):
        if x is None:
            continue
        if x.stride(3) != 1 or (heads > 1 and x.stride(2) != head_dim):
            return f"the heads of the {name}'s {what} must be packed; its strides are {x.stride()}"
        if x.dtype != q.dtype or x.device != q.device:
            return f"the {name}'s {what} must have its query's dtype and device"
    if table.dtype != torch.complex64:
        return f"the table of the {name} must be complex64; it is {table.dtype}"
    if tuple(table.shape) not in ((tokens, head_dim // 2), (batch, tokens, head_dim // 2)):
        return f"the table of the {name} must be ([{batch},] {tokens}, {head_dim // 2}); it is {tuple(table.shape)}"
    if table.device != q.device or table.stride(-1) != 1 or table.stride(-2) != head_dim // 2:
        return f"the rows of the {name}'s table must be contiguous and on {q.device}"
    if table.data_ptr() % 16 or (table.dim() == 3 and table.stride(0) % 2):
        return f"the table of the {name} is not aligned to 16 bytes"
    return None


def unsupported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Maybe,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    table: torch.Tensor,
    text_q: Maybe,
    text_k: Maybe,
    text_v: Maybe,
    text_q_weight: Maybe,
    text_k_weight: Maybe,
    text_table: Maybe,
    eps: float,
    kind: str,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    reason = qk_norm.unsupported(q, k, q_weight, k_weight, eps, kind)
    reason = reason or _unsupported_stream(q, k, v, table, "image")
    if reason:
        return reason
    if v is not None and q_weight.dtype != q.dtype:
        return "with values the weights must have the query's dtype"
    text = (text_q, text_k, text_q_weight, text_k_weight, text_table)
    if all(t is None for t in (*text, text_v)):
        return None if v is None else "the values of one stream stay where they are; pass none"
    if text_q is None or text_k is None or text_q_weight is None or text_k_weight is None or text_table is None:
        return "the text stream must be given whole or not at all"
    if (v is None) != (text_v is None):
        return "either both streams have values or none"
    reason = qk_norm.unsupported(text_q, text_k, text_q_weight, text_k_weight, eps, kind)
    reason = reason or _unsupported_stream(text_q, text_k, text_v, text_table, "text")
    if reason:
        return f"the text stream: {reason}"
    if (text_q.shape[0], *text_q.shape[2:]) != (q.shape[0], *q.shape[2:]):
        return f"both streams must have one batch, heads and head_dim; they are {tuple(q.shape)}, {tuple(text_q.shape)}"
    if text_q.dtype != q.dtype or text_q_weight.dtype != q_weight.dtype or text_q.device != q.device:
        return "both streams must have one dtype and lie on one device"
    return None


def _heads_ahead(heads: int) -> int:
    """How many neighbouring heads a half warp takes: a divisor of their number, six at best."""
    return next(count for count in (6, 4, 5, 3, 2, 1) if heads % count == 0)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Maybe,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    table: torch.Tensor,
    text_q: Maybe,
    text_k: Maybe,
    text_v: Maybe,
    text_q_weight: Maybe,
    text_k_weight: Maybe,
    text_table: Maybe,
    eps: float,
    kind: str,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, heads, head_dim = q.shape
    text_tokens = 0 if text_q is None else text_q.shape[1]
    rows, text_rows = batch * tokens * heads, batch * text_tokens * heads
    constants: dict[str, int | str] = {
        "ELEMENT": CTYPES[q.dtype],
        "WEIGHT": CTYPES[q_weight.dtype],
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "REFERENCE": qk_norm.KINDS[kind],
    }
    streams = [t for t in (q, k, v, text_q, text_k, text_v) if t is not None]
    if head_dim == 128 and q.dtype in _HALF and all(aligned(t, 8) for t in streams):
        heads_ahead = _heads_ahead(heads)
        constants["HEADS_AHEAD"] = heads_ahead
        rows_per_block = _WARPS * 2 * heads_ahead
    else:
        rows_per_block = _WARPS
        plan, text_plan = qk_norm.head_plan(q, kind), qk_norm.head_plan(q if text_q is None else text_q, kind)
        if plan is None or text_plan is None:
            raise ValueError("qk_norm_rope has no plan for these arguments; ask `unsupported` first")
        constants |= {"IMAGE_COLUMNS": plan.columns, "TEXT_COLUMNS": text_plan.columns, "VECTOR": plan.vector}
    tensors = 2 if v is None else 3
    constants["TENSORS"] = tensors
    blocks = tensors * (-(-rows // rows_per_block) + -(-text_rows // rows_per_block))
    strides: dict[str, int] = {}
    for name, t in (("q", q), ("k", k), ("v", v), ("text_q", text_q), ("text_k", text_k), ("text_v", text_v)):
        strides[f"{name}_sample_stride"] = 0 if t is None else t.stride(0)
        strides[f"{name}_token_stride"] = 0 if t is None else t.stride(1)
    bound = jit.compile(SOURCE, "qk_norm_rope", constants, q.device).bind(
        (blocks, 1, 1),
        (32, _WARPS, 1),
        0,
        rows=rows,
        tokens=tokens,
        text_rows=text_rows,
        text_tokens=text_tokens,
        table_sample_stride=table.stride(0) if table.dim() == 3 else 0,
        text_table_sample_stride=text_table.stride(0) if text_table is not None and text_table.dim() == 3 else 0,
        eps=float(eps),
        **strides,
    )
    shape, dtype, device = (batch, text_tokens + tokens, heads, head_dim), q_weight.dtype, q.device
    device_index, is_like_q = device.index or 0, text_q is None and dtype == q.dtype
    empty, empty_like = torch.empty, torch.empty_like

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: Maybe,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        table: torch.Tensor,
        text_q: Maybe,
        text_k: Maybe,
        text_v: Maybe,
        text_q_weight: Maybe,
        text_k_weight: Maybe,
        text_table: Maybe,
        eps: float,
        kind: str,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> Outputs:
        if out is None:
            first = empty_like(q, memory_format=CONTIGUOUS) if is_like_q else empty(shape, dtype=dtype, device=device)
            out = (first, empty_like(first)) if v is None else (first, empty_like(first), empty_like(first))
        bound(
            device_index,
            q.data_ptr(),
            k.data_ptr(),
            0 if v is None else v.data_ptr(),
            q_weight.data_ptr(),
            k_weight.data_ptr(),
            table.data_ptr(),
            0 if text_q is None else text_q.data_ptr(),
            0 if text_k is None else text_k.data_ptr(),
            0 if text_v is None else text_v.data_ptr(),
            0 if text_q_weight is None else text_q_weight.data_ptr(),
            0 if text_k_weight is None else text_k_weight.data_ptr(),
            0 if text_table is None else text_table.data_ptr(),
            out[0].data_ptr(),
            out[1].data_ptr(),
            0 if v is None else out[2].data_ptr(),
        )
        return out

    return launch


def allocate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Maybe,
    q_weight: torch.Tensor,
    k_weight: Any,
    table: Any,
    text_q: Maybe,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised joint buffers, contiguous."""
    tokens = q.shape[1] + (0 if text_q is None else text_q.shape[1])
    shape = (q.shape[0], tokens, *q.shape[2:])
    return tuple(torch.empty(shape, dtype=q_weight.dtype, device=q.device) for _ in range(2 if v is None else 3))


def bytes_moved(q: torch.Tensor, k: torch.Tensor, v: Maybe, *rest: Any) -> int:
    """Return the bytes that one call must move: both streams and their tables in, the joint buffers out."""
    q_weight, _, table, text_q, _, _, _, _, text_table = rest[:9]
    elements = (2 if v is None else 3) * (q.numel() + (0 if text_q is None else text_q.numel()))
    tables = sum(8 * t.numel() for t in (table, text_table) if t is not None)
    return int(elements * (q.element_size() + q_weight.element_size()) + tables)


def _case(
    tokens: int,
    text_tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kind: str = "diffusers",
    batch: int = 1,
    *,
    form: str = "",
    weight_dtype: torch.dtype | None = None,
) -> Case:
    def stream(device: torch.device, seed: int, tokens: int) -> tuple[torch.Tensor | None, ...]:
        width = heads * head_dim
        if form == "fused-qkv":
            projections = randn((batch, tokens, 3 * width), dtype, device, seed).chunk(3, dim=-1)
        else:
            projections = tuple(randn((batch, tokens, width), dtype, device, seed + i) for i in range(3))
        q, k, v = (torch.unflatten(t, -1, (heads, head_dim)) for t in projections)
        weights = (1 + randn((2, head_dim), torch.float32, device, seed + 3, 0.1)).to(weight_dtype or dtype)
        shape = (batch, tokens, head_dim // 2) if form == "per-sample" else (tokens, head_dim // 2)
        angles = randn(shape, torch.float32, device, seed + 4, 3.0)
        table = torch.polar(torch.ones_like(angles), angles)
        return q, k, v if text_tokens and form != "no-values" else None, weights[0].clone(), weights[1].clone(), table

    def build(device: torch.device, seed: int) -> Args:
        text = stream(device, seed + 10, text_tokens) if text_tokens else (None,) * 6
        return (*stream(device, seed, tokens), *text, 1e-6, kind)

    name = f"{batch}x{text_tokens}+{tokens}x{heads}x{head_dim} {kind}" + (f" {form}" if form else "")
    name += " fp32-weight" if weight_dtype == torch.float32 else ""
    return Case(name, dtype, 2 * batch * (tokens + text_tokens) * heads, build)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    _case(4096, 128, 24, 128, _BF16),
    _case(4224, 0, 30, 128, _BF16, form="per-sample"),
    _case(4096, 128, 24, 128, _BF16, form="no-values"),
    _case(256, 17, 24, 128, _BF16, "native", 2, form="fused-qkv"),
    _case(256, 31, 24, 128, _FP16, "torch", 2, form="fused-qkv"),
    _case(64, 5, 4, 128, _BF16, form="no-values", weight_dtype=_FP32),
    *(
        _case(37, text, heads, head_dim, dtype, kind, 2, form="per-sample")
        for heads, head_dim in ((3, 32), (2, 64), (3, 72), (5, 128), (3, 256))
        for dtype in (_BF16, _FP16, _FP32)
        for kind in qk_norm.KINDS
        for text in (0, 5)
        if not (kind == "native" and dtype == _FP32)
    ),
    *(_case(tokens, 1, 1, head_dim, _BF16) for tokens in (1, 3, 20) for head_dim in (64, 128, 256)),
)


def _variant(element: str, weight: str, head_dim: int, kind: str, **geometry: int) -> Variant:
    constants: dict[str, int | str] = {"ELEMENT": element, "WEIGHT": weight, "HEAD_DIM": head_dim, "HEADS": 24}
    return "qk_norm_rope", constants | {"REFERENCE": qk_norm.KINDS[kind], "TENSORS": 3} | geometry, True


COMPILE_VARIANTS: tuple[Variant, ...] = (
    _variant("__nv_bfloat16", "__nv_bfloat16", 128, "diffusers", HEADS_AHEAD=6),
    _variant("__half", "__half", 128, "native", HEADS_AHEAD=4),
    _variant("__nv_bfloat16", "float", 128, "diffusers", HEADS_AHEAD=1, TENSORS=2),
    _variant("float", "float", 72, "diffusers", IMAGE_COLUMNS=32, TEXT_COLUMNS=64, VECTOR=1),
    _variant("__nv_bfloat16", "__nv_bfloat16", 64, "torch", IMAGE_COLUMNS=64, TEXT_COLUMNS=64, VECTOR=4),
)
"""Kernel, constants, and whether an FMA is owed (the complex product of ATen is made of them)."""

OP = Op(
    name="qk_norm_rope",
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
        HERE / "qk_norm_rope.py",
        HERE / "qk_norm.py",
        HERE / "_reduce_plan.py",
        HERE / "_layout.py",
    ),
    headline=tuple(case.name for case in CASES[:3]),
)
