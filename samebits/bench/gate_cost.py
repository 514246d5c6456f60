"""What a verified call costs in Python beyond its launch: the real gate, arguments of every op, a stub for a launch.

    python -m samebits.bench.gate_cost [--json] [--calls N] [--repeats N]

Needs no GPU. The launch is a Python function that returns at once, so the difference between a call of the site
and a call of that function is what the gate adds. Loops are run in turns and the least disturbed one counts, because
on a busy machine every disturbance only ever adds time; the median is printed beside it. The last column is a call
that is looked up by its key, as the first calls of a site are, and those whose tensors are not aligned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from samebits.gate import Gate
from samebits.ops import OPS
from samebits.ops._library import attention_state, blas_state
from samebits.ops._op import Args, Launcher, Op, Outputs

BUDGET_US = 5.0
CALLS = 1_000
_SMALL_CASES = 24
REPEATS = 300


def calls() -> list[tuple[str, Op, Args]]:
    """The calls that are timed: name, op with a stub for a kernel, arguments as a pipeline makes them."""
    batch, tokens, width, heads = 2, 16, 64, 4
    x = torch.randn(batch, tokens, width)
    shift, scale, gate = torch.randn(batch, 3 * width).chunk(3, dim=1)
    text, *of_text = torch.randn(batch, 4, width), *torch.randn(batch, 3 * width).chunk(3, dim=1)
    index = torch.zeros(batch, tokens, dtype=torch.int64)
    rows = torch.randn(2 * batch, 3 * width).chunk(3, dim=1)
    q, k, v = torch.randn(batch, tokens, 3, heads, width // heads).unbind(2)
    weights = (Parameter(torch.ones(width // heads)), Parameter(torch.ones(width // heads)))
    linears = (Parameter(torch.randn(width, width)), Parameter(torch.randn(width, width)))
    projections = [(Parameter(torch.randn(width, width)), Parameter(torch.randn(width))) for _ in range(2)]
    by_hand: dict[str, list[tuple[str, Args]]] = {
        "layer_norm_modulate": [
            ("layer_norm_modulate", (x, scale, shift, 1e-6)),
            ("layer_norm_modulate, rows by index", (x, rows[1], rows[0], 1e-6, index)),
        ],
        "gated_residual_norm_modulate": [
            ("gated_residual_norm_modulate", (x, gate, x.clone(), scale, shift, 1e-6)),
            (
                "gated_residual_norm_modulate, rows by index",
                (x, rows[2], x.clone(), rows[1], rows[0], 1e-6, False, index),
            ),
            (
                "gated_residual_norm_modulate, two streams",
                (
                    x,
                    gate,
                    x.clone(),
                    scale,
                    shift,
                    1e-6,
                    False,
                    None,
                    None,
                    text,
                    of_text[0],
                    text.clone(),
                    *of_text[1:],
                ),
            ),
        ],
        "qk_norm": [("qk_norm", (q, k, *weights, 1e-6, "diffusers"))],
        # Their own cases are large: with few rows nobody needs them.
        "linear_gelu_tanh": [("linear_gelu_tanh", (x, linears[0], Parameter(torch.randn(width)), blas_state()))],
        "linear_swiglu": [("linear_swiglu", (x, *linears, blas_state()))],
        "joint_projection": [("joint_projection", (x, *projections[0], text, *projections[1], 1, blas_state()))],
        "attention": [("attention", (q, k, v, torch.ones(batch, 1, 1, tokens, dtype=torch.bool), attention_state()))],
    }
    return [(name, stub(op), args) for op in OPS for name, args in by_hand.get(op.name) or [(op.name, _largest(op))]]


def _largest(op: Op) -> Args:
    """The arguments of that case of the op which has the most tensors, all aligned, and of those the fewest rows."""
    cases = sorted(op.cases, key=lambda case: case.rows)[:_SMALL_CASES]
    built = [case.build(torch.device("cpu"), 0) for case in cases]
    tensors = [[arg for arg in args if isinstance(arg, Tensor)] for args in built]
    aligned = [number for number, found in enumerate(tensors) if all(t.data_ptr() % 16 == 0 for t in found)]
    return built[max(aligned, key=lambda number: len(tensors[number]))]


def stub(op: Op) -> Op:
    """Return ``op`` with a kernel that gives eager's bits when it is compared and does nothing when it is called."""

    def prepare(*args: Any) -> Launcher:
        outputs = op.allocate(*args)
        ready: Outputs = outputs[0] if isinstance(op.reference(*args), Tensor) else outputs

        def launch(*args: Any, out: tuple[Tensor, ...] | None = None) -> Outputs:
            if out is None:
                return ready
            results = op.reference(*args)
            for output, result in zip(out, (results,) if isinstance(results, Tensor) else results, strict=True):
                output.copy_(result)
            return out[0] if isinstance(results, Tensor) else out

        return launch

    return dataclasses.replace(op, prepare=prepare, unsupported=lambda *args: None)


def measure(repeats: int = REPEATS, loop: int = CALLS) -> list[dict[str, Any]]:
    """Time every call of :func:`calls`.

    Parameters
    ----------
    repeats : int
        How many loops are timed.
    loop : int
        How many calls a loop makes.

    Returns
    -------
    list of dict
        ``call``, ``tensors``, ``us_best`` and ``us_median`` (microseconds that the gate adds to a launch),
        ``us_launch`` (the stub itself), ``us_by_key`` (the best where the signature is not guessed),
        ``budget_us``, ``within_budget`` (of ``us_best``).

    Raises
    ------
    RuntimeError
        A call did not take the verified way, so its time would mean nothing.
    """
    rows = []
    with torch.no_grad():
        for name, op, args in calls():
            launcher = op.prepare(*args)
            gates = [Gate(unavailable=lambda device, host: None, guessing=guessing) for guessing in (True, False)]
            sites = [gate.site(name, op) for gate in gates]
            for site in sites:
                site(*args)
                site(*args)  # Looked up by its key; from now on one of the sites guesses.
            without: list[float] = []
            with_gate: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats):
                without.append(_loop_us(launcher, args, loop))
                for site, times in zip(sites, with_gate, strict=True):
                    times.append(_loop_us(site, args, loop))
            for site, gate in zip(sites, gates, strict=True):
                if site.counters.fused != repeats * loop + 1:
                    raise RuntimeError(
                        f"expected {repeats * loop + 1} verified calls, got {site.counters}: {gate.verdicts()}"
                    )
            best, by_key = (min(times) - min(without) for times in with_gate)
            rows.append(
                {
                    "call": name,
                    "tensors": sum(isinstance(arg, Tensor) for arg in args),
                    "us_best": round(best, 2),
                    "us_median": round(median(with_gate[0]) - median(without), 2),
                    "us_launch": round(min(without), 2),
                    "us_by_key": round(by_key, 2),
                    "budget_us": BUDGET_US,
                    "within_budget": best <= BUDGET_US,
                }
            )
    return rows


def _loop_us(function: Callable[..., object], args: Args, loop: int) -> float:
    start = time.perf_counter()
    for _ in range(loop):
        function(*args)
    return (time.perf_counter() - start) / loop * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with ``--json`` the rows. Returns 0; what is too slow is said, not failed on."""
    parser = argparse.ArgumentParser(prog="python -m samebits.bench.gate_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls in a timed loop (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed loops (default %(default)s)")
    options = parser.parse_args(argv)
    if options.calls < 1 or options.repeats < 1:
        parser.error("--calls and --repeats must be at least 1")
    rows = measure(options.repeats, options.calls)
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"Python cost of a verified call beyond its launch, microseconds (budget {BUDGET_US})")
    print(f"{'call':<36}{'tensors':>8}{'best':>8}{'median':>8}  {'budget':<10}{'by key':>8}")
    for row in rows:
        kept = "kept" if row["within_budget"] else "exceeded"
        times = f"{row['us_best']:>8.2f}{row['us_median']:>8.2f}  {kept:<10}{row['us_by_key']:>8.2f}"
        print(f"{row['call']:<36}{row['tensors']:>8}{times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
