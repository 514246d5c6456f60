"""Measure every op on this GPU: first its bits over many inputs, then, only where they are equal, its time.

Cases come from the ops' own records. One call of :func:`record` writes ``ops.json`` and ``host.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from samebits.bench import evidence
from samebits.bench.comparing import Bench, compare_case, describe, said, sweep, sweep_cases
from samebits.bench.inputs import clone_args, storage_bytes
from samebits.bench.timing import copy_gb_per_s, device_us, host_us, sets_needed
from samebits.ops._op import Case, Op


def time_case(op: Op, case: Case, bench: Bench, copy_gb_s: float) -> dict[str, float | None]:
    """Device time of eager and of the kernel for one case, and the kernel's share of the copy bandwidth."""
    first = case.build(bench.device, 0)
    per_set = storage_bytes(first) + storage_bytes(op.allocate(*first))
    sets = sets_needed(per_set, bench.l2_bytes)
    inputs = [first, *(clone_args(first) for _ in range(sets - 1))]
    outputs = [op.allocate(*args) for args in inputs]
    launcher = op.prepare(*first)
    taken = device_us(
        {
            "eager": lambda i: op.reference(*inputs[i]),
            "fused": lambda i: launcher(*inputs[i], out=outputs[i]),
        },
        sets,
        bench.stopwatch,
    )
    share = op.bytes_moved(*first) / taken["fused"] / 1e3 / copy_gb_s
    return {
        "us_eager": round(taken["eager"], 3),
        "us_fused": round(taken["fused"], 3),
        # A product or attention is bound by arithmetic: how many bytes it moves says nothing about it.
        "copy_share": round(share, 4) if op.moves_bytes else None,
        "copy_gb_per_s": round(copy_gb_s, 1),
    }


def row_of(op: Op, case: Case, bench: Bench, copy_gb_s: float | None) -> evidence.Row:
    """One row of ``ops.json``. ``copy_gb_s`` None: the bits only, no time.

    An error of one case becomes its row, so that a run on a rented GPU never loses the other cases.
    """
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
        reason = op.unsupported(*args)
        if reason is not None:
            return {**row, "error": f"declined: {reason}"}
        row["rows_compared"], found = compare_case(op, case, bench.device)
        if found is not None:
            return {**row, "error": found}
        row["bits_equal"] = True
    except Exception as error:  # a row that says so, then the next case
        return {**row, "bits_equal": False, "error": said(error)}
    if copy_gb_s is not None:
        try:
            row |= time_case(op, case, bench, copy_gb_s)
        except Exception as error:
            row["error"] = f"not timed: {said(error)}"
    return row


def host_row(op: Op, case: Case, bench: Bench) -> evidence.Row:
    """Host time of one call: bound launch, launch with fresh outputs, the gated site, the eager chain."""
    from samebits.gate import Gate

    row: evidence.Row = {
        "op": op.name,
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "us_host_launch": None,
        "us_host_call": None,
        "us_host_site": None,
        "us_host_eager": None,
        "us_host_gate": None,
        "bits_equal": False,
    }
    try:
        args = case.build(bench.device, 0)
        launcher, out = op.prepare(*args), op.allocate(*args)
        site = Gate().site(f"bench.{op.name}", op)
        for _ in range(3):
            site(*args)
        if site.counters.fused == 0:
            return {**row, "error": f"the gate did not open: {dict(site.counters.reasons)}"}
        row["bits_equal"] = True

        def wait() -> None:
            bench.stopwatch.synchronize()

        row["us_host_launch"] = round(host_us(lambda: launcher(*args, out=out), wait), 3)
        row["us_host_call"] = round(host_us(lambda: launcher(*args), wait), 3)
        row["us_host_site"] = round(host_us(lambda: site(*args), wait), 3)
        row["us_host_eager"] = round(host_us(lambda: op.reference(*args), wait), 3)
        row["us_host_gate"] = round(row["us_host_site"] - row["us_host_call"], 3)
    except Exception as error:
        row = {**evidence.without_speeds(row), "bits_equal": False, "error": said(error)}
    return row


def record(
    folder: Path,
    bench: Bench,
    ops: Sequence[Op],
    *,
    command: str,
    environment: dict[str, Any],
    commit: str | None = None,
    sweeps: bool = True,
) -> tuple[list[evidence.Row], list[evidence.Row]]:
    """Measure ``ops`` and write ``ops.json`` and ``host.json`` into ``folder``; returns their rows.

    The files are written again after each op, so that a run that is cut short leaves what it had.
    """
    rows: list[evidence.Row] = []
    host: list[evidence.Row] = []
    source = evidence.source_of(ops, commit)
    with torch.no_grad():
        for op in ops:
            if not op.is_for(bench.device):
                bench.say(f"{op.name}: written for {', '.join(op.architectures)}, so not measured here")
                continue
            copy_gb_s = copy_gb_per_s(bench.device, bench.stopwatch)
            bench.say(f"{op.name}: copy bandwidth {copy_gb_s:.0f} GB/s")
            for case in op.cases:
                timed = not op.headline or case.name in op.headline
                rows.append(row_of(op, case, bench, copy_gb_s if timed else None))
            if sweeps:
                rows.extend(sweep(op, case, bench) for case in sweep_cases(op, bench.device))
            host.append(host_row(op, smallest(op), bench))
            evidence.Record("ops", command, environment, source, rows).write(folder)
            evidence.Record("host", command, environment, source, host).write(folder)
    return rows, host


def smallest(op: Op) -> Case:
    """The timed bf16 case with the fewest rows: the host's time must not wait for the device."""
    cases = [case for case in op.cases if case.name in op.headline] or list(op.cases)
    return min(cases, key=lambda case: (case.dtype is not torch.bfloat16, case.rows))
