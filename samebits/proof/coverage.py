"""Which device functions of the ops' sources the proof reaches, and by what; a test fails where nothing does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from samebits.jit.signature import strip_comments
from samebits.ops import Op
from samebits.proof.chains import STEPS

ELSEWHERE: dict[str, str] = {
    # moves values and computes none: every whole call shows it
    **dict.fromkeys(
        (
            "load",
            "load_last",
            "load_row",
            "begin_row",
            "await_row",
            "open_gates",
            "forget_widened",
            "store",
            "store_shared",
            "copy_async",
            "wait_for_copies",
            "words",
            "thread_of_row",
            "has_vector",
            "element_of",
            "steps",
            "fetch_row",
            "modulation_row",
            "store_eight",
            "store_quantized",
            "store_result",
            "row",
            "place_of",
            "tensor_of",
        ),
        "rows",
    ),
    # sums over threads: their order is the tree, their values are whole rows
    **dict.fromkeys(
        (
            "accumulate",
            "fold_accumulators",
            "fold_lanes",
            "fold_row",
            "sum_of_squares",
            "reciprocal_root_mean_square",
            "row_reciprocal_root",
            "normalize",
            "welford_push",
            "shuffle_down",
            "layer_norm_statistics",
            "take_row",
        ),
        "trees and rows",
    ),
    # products: their sums are the library's, of which there is no step
    **dict.fromkeys(
        (
            "shared_address",
            "rank_in_cluster",
            "cluster_sync",
            "group_sync",
            "give_registers",
            "take_registers",
            "barrier_init",
            "barriers_are_made",
            "barrier_arrive",
            "barrier_arrive_in",
            "barrier_expect",
            "barrier_wait",
            "load_box",
            "load_box_to_both",
            "store_box",
            "stores_begin",
            "stores_have_read",
            "stores_are_done",
            "show_to_copies",
            "view_of",
            "columns_from",
            "products_begin",
            "products_end",
            "products_wait",
            "multiply_add",
            "shared_memory",
            "count",
            "tile_at",
            "tiles_of",
            "next",
            "load_tiles",
            "release",
            "multiply_tiles",
            "finish_tiles",
            "finish",
            "multiply_matrices",
        ),
        "calls beside the library's product",
    ),
    # parts of one kernel that every value passes through
    **dict.fromkeys(("fill_gates", "gate", "gelu_by_table"), "every value, through the kernel"),
}
"""Device functions that no step calls, and the part of the proof that reaches them."""

_FUNCTION = re.compile(
    r"__device__\s+(?:constexpr\s+|__forceinline__\s+)*[\w:<>&*,\s]*?[\s&*>](\w+)(?:<[^>()]*>)?\s*\([^;{]*\)\s*(?:const\s*)?\{"
)
_CALL = re.compile(r"\b(\w+)\s*(?:<[\w\s,:*]*>)?\s*\(")


def device_functions(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Every device function of these files, and the names that its bodies call."""
    found: dict[str, set[str]] = {}
    for path in paths:
        text = strip_comments(path.read_text(encoding="utf-8"))
        for match in _FUNCTION.finditer(text):
            body = _body(text, match.end())
            found.setdefault(match[1], set()).update(_CALL.findall(body))
    return found


def _body(text: str, start: int) -> str:
    """The text up to the brace that closes the one before ``start``."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return text[start:]


def sources_of(ops: Iterable[Op]) -> list[Path]:
    """The CUDA files of these ops, each once."""
    return sorted({path for op in ops for path in op.sources if path.suffix in (".cu", ".cuh")})


def by_steps(ops: Iterable[Op], functions: dict[str, set[str]]) -> set[str]:
    """The functions that the steps of these ops call, and what those call."""
    waiting = {name for op in ops for step in STEPS.get(op.name, ()) for name in _CALL.findall(step.code)}
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in functions and name not in reached:
            reached.add(name)
            waiting |= functions[name]
    return reached


def uncovered(ops: Iterable[Op]) -> set[str]:
    """Device functions that no step reaches and ``ELSEWHERE`` does not name."""
    ops = list(ops)
    functions = device_functions(sources_of(ops))
    return set(functions) - by_steps(ops, functions) - set(ELSEWHERE)
