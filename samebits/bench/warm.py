"""Compile the kernels of every case ahead of a run, several processes at a time, into the on-disk cache.

A first run on a fresh machine compiles some two hundred kernels, each well under a second: in one process that is
minutes of a rented GPU doing nothing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from samebits.ops import Op, by_name


def default_jobs() -> int:
    """Processes to compile with: half the cores, at most eight, at least one."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def prepare_case(op_name: str, index: int, device_name: str) -> str | None:
    """Prepare one case in this process; the cubin ends up in the cache. Returns what went wrong, if anything."""
    import torch

    device = torch.device(device_name)
    op = by_name(op_name)
    args = op.cases[index].build(device, 0)
    if op.unsupported(*args) is None:
        try:
            op.prepare(*args)
        except Exception as error:  # the measuring run meets it again and writes it into the case's row
            return f"{op_name} {op.cases[index].name}: {type(error).__name__}: {error}"
    return None


def warm(ops: Sequence[Op], jobs: int, device_name: str = "cuda") -> list[str]:
    """Prepare every case of ``ops`` in ``jobs`` processes; returns the sentences of those that failed.

    A process that dies takes nothing down with it: what it did not compile is compiled later, one at a time.
    """
    wanted = [(op.name, index) for op in ops for index in range(len(op.cases))]
    failed = []
    # spawn: a forked process cannot use CUDA once its parent did
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(prepare_case, name, index, device_name) for name, index in wanted]
        for future in as_completed(futures):
            error = future.exception()
            told = f"{type(error).__name__}: {error}" if error is not None else future.result()
            if told is not None:
                failed.append(told)
    return failed
