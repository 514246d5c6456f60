"""Record what eager computes on this GPU for small inputs of every op, for the tests that have no GPU.

    python tests/gpu/record.py [FILE]

Writes ``tests/host/recorded/h200_ops.safetensors`` (a few hundred KB): inputs, eager outputs and the GPU's ``rsqrt``
at the values that the emulated chains take the root of. Nothing is written if eager differs from itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "host")]

import aten_chains  # noqa: E402
from aten_emulator import aten_mean_fp32  # noqa: E402
from binary32 import F32, rsqrt  # noqa: E402
from kernel_inputs import randn, rows_that_show_moments, rows_with_means_near_ties, telling_rows  # noqa: E402
from recording import FILE, RecordedCase, RsqrtTable, same_bits, save  # noqa: E402

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
    x, weight = randn((1, 1, 3840), torch.bfloat16, 309).repeat(1, 5, 1), randn((3840,), torch.bfloat16, 307, 0.3) + 1
    yield "5x3840 bf16", (x, weight, None, EPS), {0: [1, 5, 1]}
    weight = randn((2048,), torch.float32, 308, 0.3) + 1
    for rows in TREE_ROWS:
        x = row_of_tree(2048, rows).repeat(1, rows, 1)
        yield f"tree of {rows} rows", (x, weight, None, EPS), {0: [1, rows, 1]}


CASES = {
    "layer_norm_modulate": layer_norm_modulate_cases,
    "qk_norm": qk_norm_cases,
    "rms_norm_scale": rms_norm_scale_cases,
}


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """One tensor or several, always as a tuple."""
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def main(
    path: Path,
    device: torch.device,
    references: Mapping[str, Callable[..., Any]],
    environment: Mapping[str, Any],
) -> int:
    """Record every case of every reference on ``device`` into ``path``; returns the exit code.

    The file is written even if the emulator differs from eager somewhere (exit code 1): that is worth having.
    """
    pairs: dict[int, int] = {}

    def recording_rsqrt(x: F32) -> F32:
        # NaN is asked for in one form only, which is how the table is read too.
        x = np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), x).astype(np.float32)
        y = torch.rsqrt(torch.from_numpy(x).to(device)).cpu().numpy()
        pairs.update(zip(x.view(np.uint32).tolist(), y.view(np.uint32).tolist(), strict=True))
        return y

    recorded, emulated_wrongly = [], 0
    for op_name, reference in references.items():
        for name, args, repeats in CASES[op_name]():
            on_device = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
            outputs, again = (tuple(t.cpu() for t in as_tuple(reference(*on_device))) for _ in range(2))
            if not all(map(same_bits, outputs, again)):
                print(f"{op_name} {name}: eager differs from itself; nothing was written", file=sys.stderr)
                return 1
            emulated = as_tuple(getattr(aten_chains, op_name)(*args, rsqrt=recording_rsqrt))
            if not all(map(same_bits, emulated, outputs)):
                emulated_wrongly += 1
                print(f"{op_name} {name}: the emulator differs from eager", file=sys.stderr)
            case = RecordedCase(f"{op_name} {name}", op_name, args, outputs)
            recorded.append((case, repeats, {0: repeats[0]} if repeats else {}))
    inputs, roots = (np.array(list(part), np.uint32).view(np.float32) for part in (pairs.keys(), pairs.values()))
    save(path, recorded, RsqrtTable(inputs, roots), environment)
    size_kib = path.stat().st_size / 1024
    print(f"{path}: {len(recorded)} cases, {size_kib:.0f} KiB; the emulator differs in {emulated_wrongly}")
    return 1 if emulated_wrongly else 0


def run() -> int:
    """The command line: one optional argument, the file."""
    if not torch.cuda.is_available():
        print("recording needs an NVIDIA GPU; torch sees none", file=sys.stderr)
        return 2
    from samebits.environment import fingerprint
    from samebits.ops import by_name

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    with torch.inference_mode():
        return main(path, torch.device("cuda"), {name: by_name(name).reference for name in CASES}, fingerprint())


if __name__ == "__main__":
    sys.exit(run())
