"""Compare an op's kernel with eager: one call, one case over many seeds, a sweep over amplitudes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from samebits import bits
from samebits.bench import evidence
from samebits.bench.inputs import poison, refill
from samebits.bench.timing import CudaStopwatch, Stopwatch
from samebits.ops._op import Args, Case, Launcher, Op, Outputs

AMPLITUDES = (0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0, 80.0, 200.0)
ROWS_PER_CASE = 200_000
ROWS_PER_SWEEP = 9_200_000
MOST_SEEDS = 24
MOST_SWEEP_CALLS = 1_200


@dataclass(frozen=True)
class Bench:
    """The device that a run measures on, and what it measures with."""

    device: torch.device
    stopwatch: Stopwatch
    l2_bytes: int
    say: Callable[[str], object] = print

    @classmethod
    def on(cls, device: torch.device, say: Callable[[str], object] = print) -> Bench:
        """A bench on a GPU, which becomes the current device."""
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        return cls(device, CudaStopwatch(device), int(properties.L2_cache_size), say)


def as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def difference_of(op: Op, launcher: Launcher, args: Args, control: bool = False) -> str | None:
    """Run reference and kernel on the same inputs, the kernel into poisoned memory, and compare their bits.

    Parameters
    ----------
    op : Op
    launcher : Launcher
        What ``op.prepare`` returned for the signature of ``args``.
    args : tuple
    control : bool
        Also change the lowest bit of one element of the kernel's result and require that the comparison sees it.

    Returns
    -------
    str or None
        What differs first, or ``None`` where every bit is equal.
    """
    expected = as_tuple(op.reference(*args))
    out = op.allocate(*args)
    poison(out)
    actual = as_tuple(launcher(*args, out=out))
    found = bits.compare(actual, expected)
    if found is not None:
        return str(found)
    if control:
        for number, tensor in enumerate(actual):
            bits.integer_view(tensor).view(-1)[-1:].bitwise_xor_(1)
            if bits.compare(actual, expected) is None:
                return f"output {number}: the comparison did not see one bit that was changed on purpose"
    return None


def compare_case(op: Op, case: Case, device: torch.device) -> tuple[int, str | None]:
    """Compare one case over many seeds; returns rows compared and the first difference."""
    seeds = max(4, min(MOST_SEEDS, -(-ROWS_PER_CASE // case.rows)))
    launcher = None
    for seed in range(seeds):
        args = case.build(device, seed)
        launcher = launcher or op.prepare(*args)
        found = difference_of(op, launcher, args, control=seed == 0)
        if found is not None:
            return (seed + 1) * case.rows, f"seed {seed}, {found}"
    return seeds * case.rows, None


def describe(args: Args) -> dict[str, Any]:
    """What tells this input from others of the same op: shape of the first tensor, layout, texts among the scalars."""
    first = next(value for value in args if isinstance(value, torch.Tensor))
    texts = [value for value in args if isinstance(value, str)]
    return {"shape": list(first.shape), "strided": not first.is_contiguous(), "variant": " ".join(texts) or None}


def said(error: Exception) -> str:
    """An error in one line for a row."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def leading_inputs(args: Args) -> int:
    """How many arguments from the first on are tensors of the first one's rank: x, or q and k."""
    count = 0
    for value in args:
        if not (isinstance(value, torch.Tensor) and value.dim() == args[0].dim()):
            break
        count += 1
    return count


def sweep(op: Op, case: Case, bench: Bench, rows: int = ROWS_PER_SWEEP) -> evidence.Row:
    """Compare at least ``rows`` rows of one case over amplitudes from 0.005 to 200 (fewer only at the call limit)."""
    row: evidence.Row = {
        "op": op.name,
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "us_eager": None,
        "us_fused": None,
        "copy_share": None,
        "bits_equal": False,
        "rows_compared": 0,
    }
    try:
        args = case.build(bench.device, 0)
        row |= describe(args)
        row["case"] = sweep_name(row)
        launcher = op.prepare(*args)
        inputs = leading_inputs(args)
        seeds = min(-(-rows // (case.rows * len(AMPLITUDES))), MOST_SWEEP_CALLS // len(AMPLITUDES))
        for number in range(seeds * len(AMPLITUDES)):
            amplitude = AMPLITUDES[number % len(AMPLITUDES)]
            refill(args, 1_000 + number, amplitude, inputs)
            found = difference_of(op, launcher, args, control=number == 0)
            row["rows_compared"] += case.rows
            if found is not None:
                return {**row, "error": f"amplitude {amplitude:g}, seed {1_000 + number}, {found}"}
        row["bits_equal"] = True
    except Exception as error:
        row = {**row, "bits_equal": False, "error": said(error)}
    return row


def sweep_name(row: evidence.Row) -> str:
    """``"1x4224x30x128 diffusers, amplitudes 0.005 to 200"``."""
    shape = "x".join(map(str, row["shape"]))
    variant = f" {row['variant']}" if row["variant"] else ""
    return f"{shape}{variant}, amplitudes {AMPLITUDES[0]:g} to {AMPLITUDES[-1]:g}"


def sweep_cases(op: Op, device: torch.device) -> list[Case]:
    """The largest case of each element type and each text among the scalars (each reference of an op)."""
    largest: dict[tuple[Any, ...], Case] = {}
    for case in op.cases:
        args = case.build(device, 0)
        if op.unsupported(*args) is not None:
            continue
        key = (case.dtype, describe(args)["variant"])
        if key not in largest or case.rows > largest[key].rows:
            largest[key] = case
    return list(largest.values())
