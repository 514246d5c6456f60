"""Linears whose results eager concatenates: of one input as one product, of two streams into one buffer.

Nothing is computed in another way: the kernels are torch's own matrix products, with the weights of several linears as
one matrix, and with rows of a joint buffer to write to. Whether such a product has the bits of the single ones is the
library's choice of kernel, so every signature is compared like that of any other op. The result is what ``cat`` would
make of the single products: columns of one input beside each other, rows of the text before those of the image.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samebits.ops._layout import HERE, randn
from samebits.ops._library import ALIGNMENT_BYTES, TUNABLE, blas_state
from samebits.ops._op import Args, Case, Launcher, Op, Outputs

Maybe = torch.Tensor | None


def _stream(x: torch.Tensor, weight: torch.Tensor, bias: Maybe, parts: int) -> torch.Tensor:
    biases = (None,) * parts if bias is None else bias.chunk(parts)
    products = [F.linear(x, w, b) for w, b in zip(weight.chunk(parts), biases, strict=True)]
    return products[0] if parts == 1 else torch.cat(products, dim=-1)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    text: Maybe,
    text_weight: Maybe,
    text_bias: Maybe,
    parts: int,
    state: str,
) -> torch.Tensor:
    """Compute the linears one by one and concatenate their results.

    Parameters
    ----------
    x : torch.Tensor
        ``(B, S, K)``.
    weight : torch.Tensor
        ``(parts * N, K)``: the weights of ``parts`` linears, one after the other.
    bias : torch.Tensor, optional
        ``(parts * N,)``.
    text, text_weight, text_bias : torch.Tensor, optional
        The same of a second stream, ``(B, T, K)``; all ``None`` where there is one stream.
    parts : int
        How many linears a weight holds: 3 for query, key and value, 1 where only streams are joined.
    state : str
        :func:`samebits.ops._library.blas_state` at this call.

    Returns
    -------
    torch.Tensor
        ``(B, S, parts * N)``, with a text ``(B, T + S, parts * N)``, text first.
    """
    image = _stream(x, weight, bias, parts)
    if text is None or text_weight is None:
        return image
    return torch.cat([_stream(text, text_weight, text_bias, parts), image], dim=1)


def _unsupported_stream(x: torch.Tensor, weight: torch.Tensor, bias: Maybe, parts: int, name: str) -> str | None:
    tensors = {"input": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    if x.dim() != 3 or weight.dim() != 2 or x.numel() == 0 or x.shape[2] != weight.shape[1]:
        return f"the {name} must be (batch, tokens, width) and its weight (columns, width)"
    if weight.shape[0] % parts or (bias is not None and tuple(bias.shape) != (weight.shape[0],)):
        return f"the {name}'s weight and bias must hold {parts} linears of one width"
    for what, tensor in tensors.items():
        if tensor.dtype != x.dtype or tensor.device != x.device:
            return f"the {name}'s {what} must have its input's dtype and device"
        if not tensor.is_contiguous():
            return f"the {name}'s {what} must be contiguous"
    if x.device.type != "cuda":
        return None
    # Where the linears' own parts begin, the library must see what it would see in eager.
    starts = [t.data_ptr() for t in tensors.values()]
    starts += [t.numel() // parts * t.element_size() for t in (weight, bias) if t is not None]
    if any(start % ALIGNMENT_BYTES for start in starts):
        return f"the {name}'s tensors and their parts must be aligned to {ALIGNMENT_BYTES} bytes"
    return None


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    text: Maybe,
    text_weight: Maybe,
    text_bias: Maybe,
    parts: int,
    state: str,
) -> str | None:
    """Say why the products are not joined for these arguments, or return ``None``. See :func:`reference`."""
    halves = (torch.bfloat16, torch.float16)
    if x.dtype not in (halves if x.device.type == "cuda" else (*halves, torch.float32)):
        return f"x must be bfloat16 or float16, whose products do not depend on TF32; it is {x.dtype}"
    if f"{TUNABLE}=True" in state:
        return "TunableOp is enabled, which chooses kernels by their time"
    reason = _unsupported_stream(x, weight, bias, parts, "image")
    if reason or (text is None and text_weight is None and text_bias is None):
        return reason
    if text is None or text_weight is None or (text_bias is None) != (bias is None):
        return "the text stream must be given whole or not at all"
    reason = _unsupported_stream(text, text_weight, text_bias, parts, "text")
    if reason:
        return reason
    if text.shape[0] != x.shape[0] or text_weight.shape[0] != weight.shape[0]:
        return "both streams must have one batch and one width"
    if text.dtype != x.dtype or text.device != x.device:
        return "both streams must have one dtype and lie on one device"
    if x.device.type == "cuda" and weight.shape[0] * x.element_size() % ALIGNMENT_BYTES:
        return f"the rows of the joint buffer must be aligned to {ALIGNMENT_BYTES} bytes"
    return None


def _product(x: torch.Tensor, weight: torch.Tensor, bias: Maybe, out: torch.Tensor) -> None:
    """``F.linear`` into rows of a buffer: the same call of the library, given where to write."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    text: Maybe,
    text_weight: Maybe,
    text_bias: Maybe,
    parts: int,
    state: str,
) -> Launcher:
    """Plan the products for these arguments' signature. There is nothing to compile."""
    (batch, tokens, width), columns, dtype, device = x.shape, weight.shape[0], x.dtype, x.device
    rows, empty = batch * tokens, torch.empty
    text_tokens = 0 if text is None else text.shape[1]

    def one(x: Any, weight: Any, bias: Any, *_: Any, out: tuple[torch.Tensor, ...] | None = None) -> Outputs:
        y = empty((batch, tokens, columns), dtype=dtype, device=device) if out is None else out[0]
        _product(x.view(rows, width), weight, bias, y.view(rows, columns))
        return y

    def joint(
        x: Any, weight: Any, bias: Any, text: Any, text_weight: Any, text_bias: Any, *_: Any, out: Any = None
    ) -> Outputs:
        y = empty((batch, text_tokens + tokens, columns), dtype=dtype, device=device) if out is None else out[0]
        for n in range(batch):  # the rows of one sample follow each other in the buffer, those of all do not
            _product(text[n], text_weight, text_bias, y[n, :text_tokens])
            _product(x[n], weight, bias, y[n, text_tokens:])
        return y

    return one if text is None else joint


def allocate(x: torch.Tensor, weight: torch.Tensor, bias: Maybe, text: Maybe, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised result, contiguous."""
    batch, tokens = x.shape[:2]
    tokens += 0 if text is None else text.shape[1]
    return (torch.empty((batch, tokens, weight.shape[0]), dtype=x.dtype, device=x.device),)


def bytes_moved(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    """Return the bytes that one call must move: inputs, weights and biases in, the results out."""
    tensors = [t for t in (x, weight, *rest) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in (*tensors, *allocate(x, weight, *rest)))


def _case(
    tokens: int,
    text_tokens: int,
    width: int,
    dtype: torch.dtype,
    parts: int = 3,
    batch: int = 1,
    *,
    bias: bool = True,
) -> Case:
    def stream(device: torch.device, seed: int, tokens: int) -> tuple[Maybe, ...]:
        x = randn((batch, tokens, width), dtype, device, seed)
        weight = randn((parts * width, width), dtype, device, seed + 1, width**-0.5)
        return x, weight, randn((parts * width,), dtype, device, seed + 2) if bias else None

    def build(device: torch.device, seed: int) -> Args:
        text = stream(device, seed + 10, text_tokens) if text_tokens else (None,) * 3
        return (*stream(device, seed, tokens), *text, parts, blas_state())

    name = f"{batch}x{text_tokens}+{tokens}x{width}, {parts} linears" + ("" if bias else ", no bias")
    return Case(name, dtype, batch * (tokens + text_tokens), build)


_BF16, _FP16 = torch.bfloat16, torch.float16
CASES = (
    _case(4096, 128, 3072, _BF16, 1),
    _case(4224, 0, 3840, _BF16, bias=False),
    _case(4128, 0, 3840, _BF16, bias=False),
    _case(4096, 17, 3072, _BF16, 1),
    _case(4096, 17, 3072, _FP16, 1),
    _case(4096, 128, 3072, _BF16),
    _case(1024, 128, 3072, _BF16, 1, 2),
    _case(1056, 0, 3840, _BF16, batch=2, bias=False),
    _case(64, 0, 128, _BF16, batch=2),
    _case(64, 5, 128, _FP16),
)

OP = Op(
    name="joint_projection",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(HERE / "joint_projection.py", HERE / "_library.py", HERE / "_layout.py"),
    headline=tuple(case.name for case in CASES[:3]),
    library="gemm",
)
