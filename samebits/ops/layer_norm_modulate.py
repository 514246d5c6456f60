"""LayerNorm without weight or bias, times ``1 + scale``, plus ``shift``.

The eager chain is six kernels: LayerNorm, ``1 + scale``, a product, a sum, and for a token-dependent choice two
``where``. Roundings to the element type: after LayerNorm, after ``1 + scale``, after the product, after the sum.
The kernel reproduces ATen's ``vectorized_layer_norm_kernel``, see ``layer_norm_modulate.cu``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samebits import jit
from samebits.ops._layout import CONTIGUOUS, CTYPES, HERE, aligned, in_order, multiprocessors, randn
from samebits.ops._op import Args, Case, Launcher, Op, Variant
from samebits.ops._quantize import FP8, quantized, quantized_case, why_not_scale

SOURCE = HERE / "layer_norm_modulate.cu"
MAX_WIDTH = 16384
_MAX_GRID_Y = 65535
_SPAN = 512  # elements that ATen's 128 threads take in one step
_BLOCKS, _MOST_SHARE_BYTES = 8, 64  # blocks of a multiprocessor that take one row after another; as measured on an H200


def reference(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the chain in eager, as diffusers' ``AdaLayerNormContinuous`` and ``_modulate`` spell it.

    Parameters
    ----------
    x : torch.Tensor
        ``(B, S, D)``.
    scale, shift : torch.Tensor
        ``(B, D)``; with ``index`` ``(2 * B, D)``: first the rows for index 0, then those for every other index.
    eps : float
        Added to the variance.
    index : torch.Tensor, optional
        ``(B, S)`` integers: which of its sample's two modulation rows a token uses.
    input_scale : torch.Tensor, optional
        fp32, ``()``: the result is quantised with it, see ``_quantize.py``.

    Returns
    -------
    torch.Tensor
        ``(B, S, D)``, contiguous; float8_e4m3fn where it is quantised.
    """
    if index is None:
        scale, shift = scale[:, None, :], shift[:, None, :]
    else:
        batch = scale.size(0) // 2
        first = index.unsqueeze(-1) == 0
        scale = torch.where(first, scale[:batch].unsqueeze(1), scale[batch:].unsqueeze(1))
        shift = torch.where(first, shift[:batch].unsqueeze(1), shift[batch:].unsqueeze(1))
    return quantized(F.layer_norm(x, (x.shape[-1],), None, None, eps) * (1 + scale) + shift, input_scale)


def unsupported(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> str | None:
    """Say why the kernel does not take these arguments, or return ``None``. See :func:`reference` for the shapes."""
    if x.dim() != 3:
        return f"x must be (batch, tokens, width); it has {x.dim()} dimensions"
    batch, tokens, width = x.shape
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x must be float32, float16 or bfloat16; it is {x.dtype}"
    if scale.dtype != x.dtype or shift.dtype != x.dtype:
        return f"scale and shift must have x's dtype {x.dtype}; they are {scale.dtype} and {shift.dtype}"
    if x.numel() == 0:
        return "x is empty"
    if width % 4 or width > MAX_WIDTH:
        return f"the width must be a multiple of 4 up to {MAX_WIDTH}; it is {width}"
    if batch > _MAX_GRID_Y:
        return f"the batch must be at most {_MAX_GRID_Y}; it is {batch}"
    rows = (2 * batch if index is not None else batch, width)
    if tuple(scale.shape) != rows or tuple(shift.shape) != rows:
        return f"scale and shift must be {rows}; they are {tuple(scale.shape)} and {tuple(shift.shape)}"
    if index is not None:
        if index.dtype not in (torch.int32, torch.int64):
            return f"index must be int32 or int64; it is {index.dtype}"
        if tuple(index.shape) != (batch, tokens):
            return f"index must be {(batch, tokens)}; it is {tuple(index.shape)}"
    devices = {t.device for t in (x, scale, shift, index) if t is not None}
    if len(devices) > 1:
        return f"all tensors must be on one device; they are on {', '.join(sorted(map(str, devices)))}"
    for name, t in (("x", x), ("scale", scale), ("shift", shift)):
        if t.stride(-1) != 1:
            return f"the last dimension of {name} must be contiguous; its stride is {t.stride(-1)}"
        if not aligned(t, 4):
            return f"{name} is not aligned to four elements, where ATen's LayerNorm takes another order"
    for name, t in (("scale", scale), ("shift", shift)):
        if not in_order(t):
            return f"the rows of {name} must lie apart or be one row; they overlap, its strides are {t.stride()}"
    return why_not_scale(input_scale, x.device)


def prepare(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> Launcher:
    """Compile the kernel for these arguments' signature and plan its launch."""
    batch, tokens, width = x.shape
    # Two rows of a thread's share fit its registers while one has at most so many bytes.
    keeps_two = -(-width // _SPAN) * 4 * x.element_size() <= _MOST_SHARE_BYTES
    blocks = max(1, _BLOCKS * multiprocessors(x.device) // batch) if keeps_two else tokens
    constants: dict[str, int | str] = {"ELEMENT": CTYPES[x.dtype], "WIDTH": width}
    constants |= {"AHEAD": int(keeps_two), "BLOCKS": _BLOCKS if keeps_two else 1}
    if index is not None:
        constants["INDEX"] = CTYPES[index.dtype]
    if input_scale is not None:
        constants["QUANTIZED"] = 1
    bound = jit.compile(SOURCE, "layer_norm_modulate", constants, x.device).bind(
        (min(tokens, blocks), batch, 1),
        (32, 4, 1),
        0,
        tokens=tokens,
        x_batch_stride=x.stride(0),
        x_token_stride=x.stride(1),
        scale_stride=scale.stride(0),
        shift_stride=shift.stride(0),
        index_batch_stride=index.stride(0) if index is not None else 0,
        index_token_stride=index.stride(1) if index is not None else 0,
        eps=float(eps),
    )
    device_index, empty_like = x.device.index or 0, torch.empty_like
    result = x.dtype if input_scale is None else FP8

    def launch(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        index: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        y = empty_like(x, dtype=result, memory_format=CONTIGUOUS) if out is None else out[0]
        bound(
            device_index,
            x.data_ptr(),
            scale.data_ptr(),
            shift.data_ptr(),
            0 if index is None else index.data_ptr(),
            0 if input_scale is None else input_scale.data_ptr(),
            y.data_ptr(),
        )
        return y

    return launch


def allocate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the uninitialised output, ``(B, S, D)`` contiguous; float8_e4m3fn where it is quantised."""
    return (torch.empty(x.shape, dtype=x.dtype if input_scale is None else FP8, device=x.device),)


def bytes_moved(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> int:
    """Return the bytes that one call must move: x and the modulation in, the result out."""
    extra = 0 if index is None else index.numel() * index.element_size()
    out = x.numel() * (x.element_size() if input_scale is None else 1)
    return (x.numel() + scale.numel() + shift.numel()) * x.element_size() + out + extra


def _case(
    tokens: int, width: int, dtype: torch.dtype, batch: int = 1, *, indexed: bool = False, amplitude: float = 1.0
) -> Case:
    def build(device: torch.device, seed: int) -> Args:
        x = randn((batch, tokens, width), dtype, device, seed, amplitude)
        rows = 2 * batch if indexed else batch
        # one projection, chunked: the rows are strided views, as in the models
        scale, shift = randn((rows, 2 * width), dtype, device, seed + 1).chunk(2, dim=-1)
        if not indexed:
            return x, scale, shift, 1e-6
        generator = torch.Generator(device).manual_seed(seed + 2)
        index = torch.randint(0, 2, (batch, tokens), generator=generator, device=device, dtype=torch.int32)
        return x, scale, shift, 1e-6, index

    name = (
        f"{batch}x{tokens}x{width}" + (" indexed" if indexed else "") + (f" x{amplitude:g}" if amplitude != 1 else "")
    )
    return Case(name, dtype, batch * tokens, build)


_HALF = torch.bfloat16
CASES = (
    *(_case(tokens, 3072, _HALF) for tokens in (128, 512, 2048, 4096, 4608)),
    _case(4096, 4096, _HALF),
    _case(4096, 3072, _HALF, indexed=True),
    _case(1024, 3072, _HALF, batch=2),
    _case(37, 3072, torch.float16, batch=3),
    _case(64, 3072, torch.float32, batch=2),
    *(
        _case(17, width, dtype)
        for width in (4, 128, 516, 1000, 3844, 3840, 8192, 16384)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
    _case(5, 1536, torch.float16, batch=2, indexed=True),
    _case(5, 1540, torch.float32, batch=2, indexed=True),
    *(_case(64, 3072, _HALF, amplitude=amplitude) for amplitude in (1e-3, 40.0, 200.0)),
    quantized_case(_case(4096, 3072, _HALF), 5),
    quantized_case(_case(128, 3072, _HALF, batch=2, indexed=True), 5),
    quantized_case(_case(17, 516, torch.float16), 5),
    quantized_case(_case(17, 1000, torch.float32), 5),
)


def _variant(element: str, width: int, ahead: int, **index: str) -> Variant:
    constants: dict[str, int | str] = {"ELEMENT": element, "WIDTH": width, "AHEAD": ahead}
    return "layer_norm_modulate", constants | {"BLOCKS": _BLOCKS if ahead else 1} | index, True


COMPILE_VARIANTS: tuple[Variant, ...] = (
    (
        "layer_norm_modulate",
        {"ELEMENT": "__nv_bfloat16", "WIDTH": 3072, "AHEAD": 1, "BLOCKS": _BLOCKS, "QUANTIZED": 1},
        True,
    ),
    _variant("__nv_bfloat16", 3072, 1),
    _variant("__half", 4096, 1, INDEX="int"),
    _variant("float", 16384, 0),
    _variant("__nv_bfloat16", 3844, 1, INDEX="long long"),
)
"""Kernel, constants, and whether an FMA is owed (Welford's updates are FMAs in ATen's own machine code)."""

OP = Op(
    name="layer_norm_modulate",
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
        HERE / "layer_norm_modulate.py",
        HERE / "_layout.py",
        HERE / "_quantize.py",
    ),
    headline=(
        *(f"1x{tokens}x3072" for tokens in (128, 512, 2048, 4096, 4608)),
        "1x4096x4096",
        "1x4096x3072 indexed",
        "1x4096x3072 fp8",
    ),
)
