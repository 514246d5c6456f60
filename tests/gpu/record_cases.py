"""What ``record.py`` records: small inputs of every op, in which trees, roundings and special values show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from aten_emulator import aten_mean_fp32
from binary32 import rsqrt
from kernel_inputs import randn, rows_that_show_moments, rows_with_means_near_ties, telling_rows

Repeats = dict[int, list[int]]
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
ROWS = (1, 2, 5, 17)
TREE_ROWS = (1, 2, 5, 8, 17)
"""One number of rows from every class that has its own tree, for wide rows."""
EPS = 1e-6


def short(dtype: torch.dtype) -> str:
    """``bf16``, ``fp16`` or ``fp32``, for the names of cases."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def randn_rows(
    lead: tuple[int, ...], rows: int, width: int, dtype: torch.dtype, seed: int, amplitude: float
) -> tuple[torch.Tensor, Repeats]:
    """``(*lead, rows, width)`` normal numbers with their repeats; many rows are one row, many times."""
    if rows <= 5:
        return randn((*lead, rows, width), dtype, seed, amplitude), {}
    repeats = [*(1 for _ in lead), rows, 1]
    return randn((*lead, 1, width), dtype, seed, amplitude).repeat(*repeats), {0: repeats}


def row_of_tree(width: int, rows: int) -> torch.Tensor:
    """``(1, 1, width)`` fp32 numbers whose norm among ``rows`` rows has other bits by every other tree."""
    for seed in range(1000):
        row = telling_rows(1, width, torch.float32, seed)
        squares = row.square().numpy()
        roots = [float(rsqrt(aten_mean_fp32(squares, other) + np.float32(EPS))[0]) for other in TREE_ROWS]
        if roots.count(roots[TREE_ROWS.index(rows)]) == 1:
            return row[None]
    raise RuntimeError(f"no row of width {width} tells the tree of {rows} rows from the others")


def special_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """``(8, width)``: zeros, -0, one value, an outlier, NaN, infinity, subnormals, the largest finite number."""
    rows = randn((8, width), torch.float32, 77)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] = 0.7
    rows[3, width // 3] = 30000
    rows[4, 5] = torch.nan
    rows[5, 6] = torch.inf
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    rows[6] = rows[6].double().mul(tiny / 4).float()
    rows[7] = largest
    rows[7, ::2] = -largest
    return rows.to(dtype)


def layer_norm_modulate_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Plain and indexed, tails of every kind, both ways in which a kernel may go over a row."""
    sizes = [(64, 5), (132, 1), (132, 9), (1024, 2)]
    for seed, (width, rows) in enumerate(sizes):
        for dtype in DTYPES if width < 1024 else HALVES:
            modulation = randn((2, 1, width), dtype, seed + 100)
            x = randn((1, rows, width), dtype, seed, (1.0, 40.0, 1e-3)[seed % 3])
            yield f"{rows}x{width} {short(dtype)}", (x, modulation[0], modulation[1], EPS), {}
    for dtype in DTYPES:
        x, modulation = special_rows(64, dtype)[None], randn((2, 1, 64), dtype, 200)
        modulation[0, 0, ::3] = -2  # 1 + scale is -1: zeros become -0
        yield f"special {short(dtype)}", (x, modulation[0], modulation[1], EPS), {}
        index = torch.tensor([[0, 1, 2], [1, 0, 0]], dtype=torch.int32)
        x, modulation = randn((2, 3, 136), dtype, 201), randn((2, 4, 136), dtype, 202)
        yield f"indexed 2x3x136 {short(dtype)}", (x, modulation[0], modulation[1], EPS, index), {}
    for kind in ("far from zero", "threads differ", "warps differ"):
        x, modulation = rows_that_show_moments(3, 516, kind)[None], torch.zeros(1, 516)
        yield f"{kind} 3x516 fp32", (x, modulation, modulation, EPS), {}
    modulation = randn((2, 1, 3072), torch.bfloat16, 203)
    yield "2x3072 bf16", (randn((1, 2, 3072), torch.bfloat16, 204, 3.0), modulation[0], modulation[1], EPS), {}


def qk_norm_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Every kind with every pair of element types it has; q of 1 to 17 rows, k of fewer."""
    kinds = [("diffusers", dtype, dtype) for dtype in DTYPES] + [
        ("diffusers", dtype, torch.float32) for dtype in HALVES
    ]
    kinds += [("native", dtype, dtype) for dtype in HALVES] + [("torch", dtype, dtype) for dtype in DTYPES]
    for turn, (kind, dtype, weight_dtype) in enumerate(kinds):
        # One head, so that few kernels are compiled where this is read; widths and rows of every class of trees.
        sizes = [
            (64, 1, 3),
            (64, 5, 1),
            (64, 17, 1),
            (128, 17, 3),
            ((40, 256)[turn % 2], 5, 2),
            (96, 2, 1),
            (96, 17, 4),
        ]
        for seed, (width, rows, k_rows) in enumerate(sizes):
            amplitude = (1.0, 0.005, 200.0)[seed % 3]
            q, repeats = randn_rows((1,), rows, width, dtype, seed, amplitude)
            k = randn((1, k_rows, 1, width), dtype, seed + 50)
            weights = randn((2, width), weight_dtype, seed + 99, 0.3) + 1
            name = f"{kind} {rows}+{k_rows}x{width} {short(dtype)} weight {short(weight_dtype)}"
            repeats = {0: [1, rows, 1, 1]} if repeats else {}
            yield name, (q.unsqueeze(2), k, weights[0], weights[1], EPS, kind), repeats
        # Each of these shows in which order it was summed.
        near = kind == "native"
        q = rows_with_means_near_ties(9, 128, dtype) if near else telling_rows(9, 128, dtype)
        weights = randn((2, 128), weight_dtype, 97, 0.3) + 1
        name = f"{kind} telling 9+1x128 {short(dtype)} weight {short(weight_dtype)}"
        yield name, (q[None, :, None], q[None, :1, None].clone(), weights[0], weights[1], EPS, kind), {}
        q = special_rows(64, dtype)[None, :, None]
        weights = randn((2, 64), weight_dtype, 98, 0.3) + 1
        name = f"{kind} special {short(dtype)} weight {short(weight_dtype)}"
        yield name, (q, q.flip(-1).contiguous(), weights[0], weights[1], EPS, kind), {}


def rms_norm_scale_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Row counts of every class of summation trees; wide inputs are one row, repeated."""
    for seed, rows in enumerate(ROWS):
        for dtype in DTYPES:
            x, repeats = randn_rows((1,), rows, 256, dtype, seed, 3.0)
            weight, scale = randn((256,), dtype, 300, 0.3) + 1, randn((1, 1, 256), dtype, 301)
            yield f"{rows}x256 {short(dtype)}", (x, weight, scale if rows > 1 else None, EPS), repeats
    for dtype in HALVES:
        x, weight = randn((2, 3, 136), dtype, 302), randn((136,), dtype, 303, 0.3) + 1
        yield f"2x3x136 {short(dtype)}", (x, weight, randn((2, 1, 136), dtype, 304), EPS), {}
        x, weight = special_rows(128, dtype)[None], randn((128,), dtype, 305, 0.3) + 1
        yield f"special {short(dtype)}", (x, weight, randn((1, 1, 128), dtype, 306), EPS), {}
    for dtype in DTYPES:
        x, weight, scale = (randn(shape, dtype, 310, 0.3) for shape in ((1, 1, 128), (128,), (1, 1, 128)))
        powers = torch.arange(-12, 4).exp2()  # from where tanh is its argument to where it is one
        gate_msa = (powers[:, None] * randn((16, 8), torch.float32, 311)).to(dtype).view(1, 1, 128)
        gate_mlp = gate_msa.flip(-1)
        gate_mlp[0, 0, :16] = special_rows(16, dtype)[:, 5:7].flatten()
        yield f"gates 1x128 {short(dtype)}", (x, weight, scale, EPS, gate_msa, gate_mlp), {}
    x, weight = randn((1, 1, 3840), torch.bfloat16, 309).repeat(1, 5, 1), randn((3840,), torch.bfloat16, 307, 0.3) + 1
    yield "5x3840 bf16", (x, weight, None, EPS), {0: [1, 5, 1]}
    weight = randn((2048,), torch.float32, 308, 0.3) + 1
    for rows in TREE_ROWS:
        x = row_of_tree(2048, rows).repeat(1, rows, 1)
        yield f"tree of {rows} rows", (x, weight, None, EPS), {0: [1, rows, 1]}


def gated_residual_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Plain, indexed and clipped, and rows in which something is special."""
    for dtype in DTYPES:
        h, y, gate = randn((1, 2, 68), dtype, 400, 3.0), randn((1, 2, 68), dtype, 401), randn((1, 68), dtype, 402)
        yield f"2x68 {short(dtype)}", (h, gate, y, False, None), {}
        h, y, gate = randn((2, 2, 36), dtype, 403, 5e4), randn((2, 2, 36), dtype, 404, 1e4), randn((4, 36), dtype, 405)
        index = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
        yield f"indexed 2x2x36 {short(dtype)}", (h, gate, y, True, index), {}
        h, y = special_rows(36, dtype)[None], special_rows(36, dtype).flip(0)[None]
        yield f"special {short(dtype)}", (h, randn((1, 36), dtype, 406), y, True, None), {}


def gated_residual_norm_modulate_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """The same with the norm, whose own cases are those of ``layer_norm_modulate``."""
    for dtype in DTYPES:
        h, y, modulation = (
            randn((1, 2, 68), dtype, 410),
            randn((1, 2, 68), dtype, 411),
            randn((3, 1, 68), dtype, 412),
        )
        yield f"2x68 {short(dtype)}", (h, modulation[0], y, *modulation[1:], EPS, False, None), {}
        h, y, modulation = randn((2, 2, 36), dtype, 413), randn((2, 2, 36), dtype, 414), randn((3, 4, 36), dtype, 415)
        index = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
        yield f"indexed 2x2x36 {short(dtype)}", (h, modulation[0], y, *modulation[1:], EPS, True, index), {}


def gated_residual_rms_norm_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Every form; 256 elements are the fewest whose tree depends on the number of rows."""
    for seed, dtype in enumerate(DTYPES):
        for rows, form in ((1, "last"), (2, "modulated"), (3, "per token")):
            if form == "per token" and dtype != torch.bfloat16:
                continue
            x, y = (randn((1, rows, 256), dtype, 430 + 10 * seed + part, 3.0) for part in (0, 1))
            gate, scale = randn((2, 1, rows if form == "per token" else 1, 256), dtype, 440 + seed)
            weights = randn((2, 256), dtype, 450 + seed, 0.3) + 1
            rest = (None, None) if form == "last" else (weights[1], scale)
            yield f"{form} {rows}x256 {short(dtype)}", (x, gate, y, weights[0], *rest, EPS), {}
    x, y = special_rows(128, torch.bfloat16)[None], special_rows(128, torch.bfloat16).flip(0)[None]
    gates = randn((2, 1, 1, 128), torch.bfloat16, 461)
    weights = randn((2, 128), torch.bfloat16, 460, 0.3) + 1
    yield "special bf16", (x, None, y, *weights, None, EPS, *gates), {}


def rope_stream(tokens: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """One head a token: query, key, value, both weights and a table."""
    q, k, v = (randn((1, tokens, 1, width), dtype, seed + part, 2.0) for part in range(3))
    weights = randn((2, width), weight_dtype, seed + 3, 0.3) + 1
    angle = randn((tokens, width // 2), torch.float32, seed + 4, 3.0)
    return q, k, v if dtype == weight_dtype else None, weights[0], weights[1], torch.complex(angle.cos(), angle.sin())


def qk_norm_rope_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Two streams and one, few rows of one stream beside many of the other. What the norms give is in ``qk_norm``."""
    kinds = [("diffusers", dtype, dtype) for dtype in DTYPES] + [("diffusers", torch.bfloat16, torch.float32)]
    kinds += [("native", torch.bfloat16, torch.bfloat16), ("torch", torch.float16, torch.float16)]
    for seed, (kind, dtype, weight_dtype) in enumerate(kinds):
        for width, tokens, text_tokens in ((128, 2, 1), (64, 2, 17), (40, 2, 0)):
            if width == 64 and (kind == "torch" or torch.bfloat16 != dtype):
                continue  # the tree of torch's kind does not depend on the number of rows
            image = rope_stream(tokens, width, dtype, weight_dtype, 500 + 20 * seed)
            text: tuple[Any, ...] = (None,) * 6
            if text_tokens:
                text = rope_stream(text_tokens, width, dtype, weight_dtype, 510 + 20 * seed)
            if width != 128:
                image, text = (*image[:2], None, *image[3:]), (*text[:2], None, *text[3:])
            name = f"{kind} {text_tokens}+{tokens}x{width} {short(dtype)} weight {short(weight_dtype)}"
            yield name, (*image, *text, EPS, kind), {}


def gelu_tanh_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Ordinary numbers, some from every binade, and special rows."""
    for dtype in DTYPES:
        yield f"256 {short(dtype)}", (randn((2, 128), dtype, 600, 2.0),), {}
        powers = torch.arange(-14, 10).exp2()
        yield f"binades {short(dtype)}", ((powers[:, None] * randn((24, 8), torch.float32, 601)).to(dtype),), {}
        yield f"special {short(dtype)}", (special_rows(16, dtype),), {}


def swiglu_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """The same, times ordinary numbers."""
    for name, (a,), _ in gelu_tanh_cases():
        yield name, (a, randn(tuple(a.shape), a.dtype, 610, 2.0)), {}


def quantize_fp8_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Every binade that e4m3 has and those around it, and special rows."""
    for dtype in DTYPES:
        powers = torch.arange(-14, 12).exp2()
        values = (powers[:, None] * randn((26, 8), torch.float32, 620)).to(dtype)
        yield f"binades {short(dtype)}", (values, torch.tensor(0.75)), {}
        yield f"special {short(dtype)}", (special_rows(16, dtype), torch.tensor(0.01)), {}


def bias_gated_residual_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """Both roundings of what is recorded for the residual without a bias, and the case in which they part."""
    for name, (h, gate, y, clip, index), _ in gated_residual_cases():
        bias = randn((h.shape[-1],), h.dtype, 630, 3.0)
        for native_fma in (False, True):
            yield f"{name}{' fma' if native_fma else ''}", (h, gate, y, bias, native_fma, clip, index), {}
    guard = (-0.2080078125, 206.0, -24576.0, -0.01055908203125)
    h, gate, y, bias = (torch.full((1, 1, 4), value, dtype=torch.bfloat16) for value in guard)
    for native_fma in (False, True):
        yield f"tie guard {native_fma}", (h, gate[0], y, bias[0, 0], native_fma, False, None), {}


def bias_gated_residual_norm_modulate_cases() -> Iterator[tuple[str, tuple[Any, ...], Repeats]]:
    """The same with the norm, quantised or not."""
    for name, (h, gate, y, scale, shift, eps, clip, index), _ in gated_residual_norm_modulate_cases():
        bias = randn((h.shape[-1],), h.dtype, 640, 3.0)
        for native_fma in (False, True):
            rest = (native_fma, clip, index, torch.tensor(0.02) if native_fma else None)
            yield f"{name}{' fma fp8' if native_fma else ''}", (h, gate, y, bias, scale, shift, eps, *rest), {}


CASES = {
    "layer_norm_modulate": layer_norm_modulate_cases,
    "qk_norm": qk_norm_cases,
    "rms_norm_scale": rms_norm_scale_cases,
    "gated_residual": gated_residual_cases,
    "gated_residual_norm_modulate": gated_residual_norm_modulate_cases,
    "gated_residual_rms_norm": gated_residual_rms_norm_cases,
    "qk_norm_rope": qk_norm_rope_cases,
    "gelu_tanh": gelu_tanh_cases,
    "swiglu": swiglu_cases,
    "quantize_fp8": quantize_fp8_cases,
    "bias_gated_residual": bias_gated_residual_cases,
    "bias_gated_residual_norm_modulate": bias_gated_residual_norm_modulate_cases,
}
