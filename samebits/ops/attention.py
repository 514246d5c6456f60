"""Attention whose values lie in the rows of a wider buffer, where a joint projection wrote them.

The kernel is torch's own ``scaled_dot_product_attention`` for both: eager hands it contiguous values, here it reads
them where they are. Which kernel it runs then, and with which bits and strides of the result, is compared for every
signature.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samebits.ops._layout import HERE, randn
from samebits.ops._library import attention_state
from samebits.ops._op import Args, Case, Launcher, Op

Maybe = torch.Tensor | None


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Maybe) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3), mask, dropout_p=0.0, is_causal=False
    )
    return out.permute(0, 2, 1, 3)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Maybe, state: str) -> torch.Tensor:
    """Compute attention as the native back-end of diffusers does, on contiguous values.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(B, S, H, head_dim)``, one shape.
    mask : torch.Tensor, optional
        Broadcasts to ``(B, H, S, S)``.
    state : str
        :func:`samebits.ops._library.attention_state` at this call.

    Returns
    -------
    torch.Tensor
        ``(B, S, H, head_dim)``.
    """
    return _attend(q, k, v.contiguous(), mask)


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Maybe, state: str) -> str | None:
    """Say why the values are not read where they are, or return ``None``. See :func:`reference` for the shapes."""
    if q.dim() != 4 or q.numel() == 0 or tuple(k.shape) != tuple(q.shape) or tuple(v.shape) != tuple(q.shape):
        return "query, key and value must be (batch, tokens, heads, head_dim) and of one shape"
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        return "query, key and value must have one dtype and device"
    halves = (torch.bfloat16, torch.float16)
    if q.dtype not in (halves if q.device.type == "cuda" else (*halves, torch.float32)):
        return f"query, key and value must be bfloat16 or float16; they are {q.dtype}"
    tokens, heads, head_dim = q.shape[1:]
    dense = (tokens * heads * head_dim, heads * head_dim, head_dim, 1)  # also where a dimension takes no step
    if q.stride() != dense or k.stride() != dense:
        return "query and key must be contiguous"
    if v.is_contiguous():
        return "the values are contiguous, so there is no copy to save"
    if v.stride(3) != 1 or (heads > 1 and v.stride(2) != head_dim) or min(v.stride()[:2]) < heads * head_dim:
        return f"the heads of the values must be packed and their tokens apart; the strides are {v.stride()}"
    if mask is not None and (mask.dim() != 4 or mask.device != q.device):
        return "the mask must have four dimensions and lie on the queries' device"
    return None


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Maybe, state: str) -> Launcher:
    """Plan the call for these arguments' signature. There is nothing to compile."""

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Maybe,
        state: str,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        result = _attend(q, k, v, mask)
        if out is None:
            return result
        if result.stride() != out[0].stride():  # a copy into the given memory would hide it
            raise ValueError(f"the result has strides {result.stride()}, eager's should have {out[0].stride()}")
        return out[0].copy_(result)

    return launch


def allocate(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised result, contiguous, as the fused kernels of torch lay it out."""
    return (torch.empty(q.shape, dtype=q.dtype, device=q.device),)


def bytes_moved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Maybe, state: str) -> int:
    """Return the bytes that one call must move: query, key, value and mask in, the result out."""
    return 4 * q.numel() * q.element_size() + (0 if mask is None else mask.numel() * mask.element_size())


def _case(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, batch: int = 1, *, masked: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        shape, width = (batch, tokens, heads, head_dim), heads * head_dim
        q, k = (randn(shape, dtype, device, seed + i) for i in range(2))
        packed = randn((batch, tokens, 3 * width), dtype, device, seed + 2)
        mask = None
        if masked:
            mask = torch.ones((batch, 1, 1, tokens), dtype=torch.bool, device=device)
            mask[-1, :, :, : tokens // 3] = False
        v = torch.unflatten(packed[..., 2 * width :], -1, (heads, head_dim))
        return q, k, v, mask, attention_state()

    name = f"{batch}x{tokens}x{heads}x{head_dim}" + (" masked" if masked else "")
    return Case(name, dtype, batch * tokens * heads, build)


_BF16, _FP16 = torch.bfloat16, torch.float16
CASES = (
    _case(4224, 24, 128, _BF16),
    _case(4224, 30, 128, _BF16),
    _case(4113, 24, 128, _BF16),
    _case(1024, 30, 128, _BF16, 2),
    _case(1024, 30, 128, _BF16, 2, masked=True),
    _case(261, 24, 128, _FP16),
    _case(69, 2, 64, _BF16),
    _case(69, 2, 64, _FP16, 2, masked=True),
)

OP = Op(
    name="attention",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(HERE / "attention.py", HERE / "_library.py", HERE / "_layout.py"),
    headline=tuple(case.name for case in CASES[:2]),
    library="attention",
)
