"""A gated residual, ``h + gate * y``.

Two eager kernels, so two roundings to the element type, and with ``clip`` a clamp to +-65504.
"""

from __future__ import annotations

from typing import Any

import torch

from samebits import jit
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, aligned, gives_contiguous_output, in_order, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant

SOURCE = HERE / "gated_residual.cu"
MAX_WIDTH = 16384
_MAX_GRID_Y = 65535


def reference(
    h: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, clip: bool = False, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the chain in eager, as Qwen-Image's block spells it.

    Parameters
    ----------
    h, y : torch.Tensor
        ``(B, S, D)``: the residual stream and the branch that joins it.
    gate : torch.Tensor
        ``(B, D)``; with ``index`` ``(2 * B, D)``: first the rows for index 0, then those for every other index.
    clip : bool
        Clamp the result to +-65504, as Qwen-Image does in fp16 at the end of a block.
    index : torch.Tensor, optional
        ``(B, S)`` integers: which of its sample's two gate rows a token uses.

    Returns
    -------
    torch.Tensor
        ``(B, S, D)``, contiguous.
    """
    h = h + per_token(gate, index) * y
    return h.clip(-65504, 65504) if clip else h


def per_token(gate: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The gate as it multiplies the tokens: ``(B, 1, D)``, or chosen by the index ``(B, S, D)``."""
    if index is None:
        return gate.unsqueeze(1)
    batch = gate.size(0) // 2
    return torch.where(index.unsqueeze(-1) == 0, gate[:batch].unsqueeze(1), gate[batch:].unsqueeze(1))


def unsupported(
    h: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, clip: bool = False, index: torch.Tensor | None = None
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if h.dim() != 3 or h.numel() == 0:
        return f"h must be (batch, tokens, width) and not empty; it is {tuple(h.shape)}"
    batch, tokens, width = h.shape
    if h.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"h must be float32, float16 or bfloat16; it is {h.dtype}"
    if gate.dtype != h.dtype or y.dtype != h.dtype:
        return f"gate and y must have h's dtype {h.dtype}; they are {gate.dtype} and {y.dtype}"
    if tuple(y.shape) != tuple(h.shape):
        return f"y must be {tuple(h.shape)} like h; it is {tuple(y.shape)}"
    if width % 4 or width > MAX_WIDTH:
        return f"the width must be a multiple of 4 up to {MAX_WIDTH}; it is {width}"
    if batch > _MAX_GRID_Y:
        return f"the batch must be at most {_MAX_GRID_Y}; it is {batch}"
    rows = (2 * batch if index is not None else batch, width)
    if tuple(gate.shape) != rows:
        return f"gate must be {rows}; it is {tuple(gate.shape)}"
    if index is not None and (index.dtype not in (torch.int32, torch.int64) or tuple(index.shape) != (batch, tokens)):
        return f"index must be {(batch, tokens)} of int32 or int64; it is {tuple(index.shape)} of {index.dtype}"
    devices = {t.device for t in (h, gate, y, index) if t is not None}
    if len(devices) > 1:
        return f"all tensors must be on one device; they are on {', '.join(sorted(map(str, devices)))}"
    for name, t in (("h", h), ("gate", gate), ("y", y)):
        if t.stride(-1) != 1 or not aligned(t, 4):
            return f"the rows of {name} must be contiguous and aligned to four elements"
    if not gives_contiguous_output(h):
        return f"the dimensions of h must lie in memory in their order and apart; its strides are {h.stride()}"
    for name, t in (("gate", gate), ("y", y)):
        if not in_order(t):
            return f"the dimensions of {name} must lie in memory in their order; its strides are {t.stride()}"
    return None


def prepare(
    h: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, clip: bool = False, index: torch.Tensor | None = None
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = h.shape
    wide = 8 if h.element_size() == 2 and width % 8 == 0 and all(aligned(t, 8) for t in (h, gate, y)) else 4
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[h.dtype], "WIDTH": width, "WIDE": wide, "CLIP": int(clip)}
    if index is not None:
        constants["INDEX"] = CTYPES[index.dtype]
    bound = jit.compile(SOURCE, "gated_residual", constants, h.device).bind(
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
    device_index, empty_like = h.device.index or 0, torch.empty_like

    def launch(
        h: torch.Tensor,
        gate: torch.Tensor,
        y: torch.Tensor,
        clip: bool = False,
        index: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        result = empty_like(h, memory_format=CONTIGUOUS) if out is None else out[0]
        bound(
            device_index,
            h.data_ptr(),
            gate.data_ptr(),
            y.data_ptr(),
            0 if index is None else index.data_ptr(),
            result.data_ptr(),
        )
        return result

    return launch


def allocate(h: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, ``(B, S, D)`` contiguous."""
    return (torch.empty(h.shape, dtype=h.dtype, device=h.device),)


def bytes_moved(h: torch.Tensor, gate: torch.Tensor, *_: Any) -> int:
    """Return the bytes that one call must move: h, y and the gate in, the result out."""
    return (3 * h.numel() + gate.numel()) * h.element_size()


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
        gate = randn((2 * batch if indexed else batch, 3 * width), dtype, device, seed + 2).chunk(3, dim=-1)[2]
        if not indexed:
            return h, gate, y, clip
        generator = torch.Generator(device).manual_seed(seed + 3)
        index = torch.randint(0, 2, (batch, tokens), generator=generator, device=device, dtype=torch.int32)
        return h, gate, y, clip, index

    name = f"{batch}x{tokens}x{width}" + (" indexed" if indexed else "") + (" clip" if clip else "")
    return Case(name + (f" x{amplitude:g}" if amplitude != 1 else ""), dtype, batch * tokens, build)


CASES = (
    _case(4096, 3072, torch.bfloat16),
    _case(128, 3072, torch.bfloat16),
    *(_case(17, width, dtype) for width in (4, 516, 1000, 3844, 16384) for dtype in CTYPES if dtype.is_floating_point),
    _case(33, 3072, torch.float16, batch=2, clip=True, amplitude=30000.0),
    _case(5, 1540, torch.float32, batch=3, indexed=True),
    _case(64, 3072, torch.bfloat16, batch=2, indexed=True),
)

COMPILE_VARIANTS: tuple[Variant, ...] = (
    ("gated_residual", {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "WIDE": 8, "CLIP": 0}, False),
    ("gated_residual", {"ELEMENT": "__half", "WIDTH": 3076, "WIDE": 4, "CLIP": 1, "INDEX": "int"}, False),
    ("gated_residual", {"ELEMENT": "float", "WIDTH": 3072, "WIDE": 4, "CLIP": 0}, False),
)
"""Kernel, constants, and whether an FMA is owed (never here: product and sum are two eager kernels)."""

OP = Op(
    name="gated_residual",
    reference=reference,
    unsupported=unsupported,
    prepare=prepare,
    allocate=allocate,
    bytes_moved=bytes_moved,
    cases=CASES,
    sources=(
        SOURCE,
        HERE / "_numerics.cuh",
        HERE / "gated_residual.py",
        HERE / "_layout.py",
    ),
    headline=tuple(case.name for case in CASES[:2]),
)
