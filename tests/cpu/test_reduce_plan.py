"""The planner against ``setReduceConfig``, branch by branch, and what happens where eager's order is another."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_summation import evaluate, pairwise

from samebits.ops import OPS, Op, _reduce_plan
from samebits.ops._reduce_plan import CURRENT, OLDER, layer_norm_tree, reduce_plan, reduce_tree, rules_of, why_no_plan

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FP32, BF16 = torch.float32, torch.bfloat16
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "native" / "cuda" / "Reduce.cuh"


@dataclass
class Config:
    """What ``setReduceConfig`` leaves in ``ReduceConfig`` for rows reduced along their contiguous dimension."""

    block_width: int
    block_height: int
    across_warps: bool
    vectorised: bool
    blocks_per_output: int


def last_pow2(n: int) -> int:
    for shift in (1, 2, 4, 8, 16):
        n |= n >> shift
    return max(1, n - (n >> 1))


def div_up(a: int, b: int) -> int:
    return -(-a // b)


def set_reduce_config(
    outputs: int, inputs: int, element_size: int, processors: int = 132, threads_per_processor: int = 2048
) -> Config:
    """``setReduceConfig`` line by line: each of its steps in its place, with its own names where they are clear."""
    input_vec_size = 8 if element_size == 2 else 4
    dim0, dim1 = inputs, outputs
    vectorised = dim0 >= 128
    if vectorised:
        dim0 //= input_vec_size
    # set_block_dimension
    max_threads = 512
    dim0_pow2 = last_pow2(dim0) if dim0 < max_threads else max_threads
    dim1_pow2 = last_pow2(dim1) if dim1 < max_threads else max_threads
    block_width = min(dim0_pow2, 32)
    block_height = min(dim1_pow2, max_threads // block_width)
    block_width = min(dim0_pow2, max_threads // block_height)
    threads = block_width * block_height

    step_input, step_output = block_width, 1
    across_warps = div_up(inputs, step_input) >= min(block_height * 16, 256)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    target_grid_size = processors * (threads_per_processor // threads)
    grid, blocks = div_up(outputs, step_output), 1
    per_thread = div_up(inputs, step_input)
    if across_warps and per_thread >= 256 and grid <= target_grid_size:
        blocks = max(min(div_up(target_grid_size, grid), div_up(per_thread, 16)), div_up(per_thread, 256))
    return Config(block_width, block_height, across_warps, vectorised, blocks)


def shapes() -> list[tuple[int, int, int]]:
    """Rows, width, bytes: both sides of everything that a branch asks about, and then any."""
    edges = {
        *(1 << power for power in range(19)),
        *(16 * 512, 240 * 32, 248 * 32, 252 * 32, 254 * 32, 255 * 32, 256 * 32, 256 * 512, 255 * 512),
        *(3072, 3584, 3840, 8200, 12288),
    }
    widths = sorted({width + step for width in edges for step in (-4, -1, 0, 1, 4) if width + step > 0})
    rows = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 511, 512, 513, 4096, 10**6)
    draw = random.Random(0)
    some = [(draw.randrange(1, 600), draw.randrange(1, 20000), draw.choice((2, 4))) for _ in range(4000)]
    return [(r, w, size) for r in rows for w in widths for size in (2, 4)] + some


def test_the_plan_is_what_set_reduce_config_says() -> None:
    seen = set()
    for rows, width, size in shapes():
        config, plan = set_reduce_config(rows, width, size), reduce_plan(rows, width, size)
        if plan is None:
            # Whether blocks do share a row then depends on the GPU: no GPU may share one where there is a plan.
            assert config.across_warps
            seen.add("several blocks" if config.blocks_per_output > 1 else "too many rows for several blocks")
            continue
        for processors in (1, 132, 10**6):
            assert set_reduce_config(rows, width, size, processors).blocks_per_output == 1, (rows, width, size)
        assert (plan.columns, plan.groups > 1 or config.block_height == 1) == (
            config.block_width,
            config.across_warps or config.block_height == 1,
        ), (rows, width, size)
        assert plan.groups == (config.block_height if config.across_warps else 1)
        assert plan.vector == ((8 if size == 2 else 4) if config.vectorised else 1)
        vector = "in vectors" if config.vectorised else "one by one"
        wide = "several warps" if config.block_width > 32 else "a warp" if config.block_width == 32 else "less"
        seen.add((vector, wide, config.across_warps))
    assert {"several blocks", "too many rows for several blocks"} <= seen
    widths, splits = ("several warps", "a warp", "less"), (True, False)
    every = {(vector, wide, split) for vector in ("in vectors", "one by one") for wide in widths for split in splits}
    # Rows too short for vectors are too short to be split.
    assert every - seen == {("one by one", wide, True) for wide in widths}


@pytest.mark.skipif(not HEADER.exists(), reason="this build of torch ships no CUDA headers")
@pytest.mark.parametrize(
    "line",
    [
        "if (reduction_on_fastest_striding_dimension && dim0 >= 128 && iter.num_reduce_dims() == 1) {",
        "dim0 /= input_vec_size;",
        "static constexpr int MAX_NUM_THREADS = 512;",
        "block_width = std::min(dim0_pow2, int(at::cuda::warp_size()));",
        "block_height = std::min(dim1_pow2, int(max_num_threads / block_width));",
        "block_width = std::min(dim0_pow2, int(max_num_threads / block_height));",
        "constexpr int min_values_per_thread = 16;",
        "constexpr int max_values_per_thread = 256;",
        "std::min<int>(block_height * 16, max_values_per_thread);",
        "bool split_across_warps = config.values_per_thread() >= warp_split_threshold;",
        "for (int offset = dim_x/2; offset >= C10_WARP_SIZE; offset >>= 1) {",
        "for (int offset = dim_x >> 1; offset > 0; offset >>= 1) {",
        "for (int offset = blockDim.y / 2; offset > 0; offset >>= 1) {",
        "while (idx * input_vec_size + input_vec_size - 1 < end) {",
        "while (idx + (vt0 - 1) * stride < end) {",
        "value_list[0] = ops.combine(value_list[0], value_list[i]);",
    ],
)
def test_the_installed_header_still_says_what_the_planner_mirrors(line: str) -> None:
    assert line in HEADER.read_text(), "Reduce.cuh has changed: read it again, then this line and the planner"


def test_a_wrong_planner_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reduce_plan, "_WARP", 64)
    with pytest.raises(AssertionError):
        test_the_plan_is_what_set_reduce_config_says()


@pytest.mark.parametrize(
    ("version", "rules"),
    [
        ("2.11.0+cu130", CURRENT),
        ("2.14.0a0+git1a2b", CURRENT),
        ("2.10.0", CURRENT),
        ("2.9.1", OLDER),
        ("3.0.0", CURRENT),
    ],
)
def test_versions_have_their_rules(version: str, rules: Any) -> None:
    assert rules_of(version) is rules


def test_older_versions_summed_in_another_order() -> None:
    for width, dtype in ((128, FP32), (3072, FP32), (3072, BF16)):
        plans = [(rules, reduce_plan(16, width, dtype.itemsize, rules)) for rules in (CURRENT, OLDER)]
        current, older = (reduce_tree(plan, width, rules=rules) for rules, plan in plans if plan is not None)
        assert current != older


def test_an_unaligned_row_has_another_tree() -> None:
    plan = reduce_plan(16, 3840, 4)
    assert plan is not None
    assert len({reduce_tree(plan, 3840, shift=shift).digest for shift in range(4)}) == 4


def test_rows_decide_the_tree_but_for_heads_of_128() -> None:
    def trees(width: int) -> int:
        plans = [reduce_plan(rows, width, 4) for rows in (1, 2, 4, 8, 16)]
        return len({reduce_tree(plan, width).digest for plan in plans if plan is not None})

    assert [trees(width) for width in (128, 256, 512, 3072, 8192)] == [1, 2, 3, 5, 5]


# --- versions that were never recorded --------------------------------------------------------------------------------


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU with a version of torch that nobody proved anything about; what it is asked is answered by the CPU."""

    class Quiet:
        capturing = False

        def here(self, device: Any = None) -> bool:
            return self.capturing

        anywhere = here

    quiet = Quiet()
    monkeypatch.setattr(_reduce_plan, "_found", {})
    monkeypatch.setattr(_reduce_plan, "_recorded", lambda device: False)
    monkeypatch.setattr(_reduce_plan.capture, "default_probe", lambda: quiet)
    monkeypatch.setattr(_reduce_plan.torch, "device", lambda *_: CPU)
    return monkeypatch


def sums_as(monkeypatch: pytest.MonkeyPatch, rules: Any) -> list[tuple[int, ...]]:
    """Have eager's mean follow some rules; the shapes it is asked for are listed."""
    calls = []

    def mean(x: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x.shape))
        if rules is None:
            return evaluate(pairwise(x.shape[1]), x) / x.shape[1]
        plan = reduce_plan(*x.shape, x.element_size(), rules)
        assert plan is not None
        return (evaluate(reduce_tree(plan, x.shape[1], rules=rules), x) / x.shape[1]).to(x.dtype)

    monkeypatch.setattr(_reduce_plan, "mean", mean)
    return calls


@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 128), (4000, 256), (16, 64)])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_a_known_order_is_found_again(unrecorded: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    calls = sums_as(unrecorded, CURRENT)
    assert why_no_plan(rows, width, dtype, GPU) is None
    assert set(calls) == {(min(1 << rows.bit_length() - 1, 512), width)}
    asked = len(calls)
    assert why_no_plan(rows, width, dtype, GPU) is None
    assert len(calls) == asked, "asked twice"


def test_the_order_of_older_versions_is_named(unrecorded: Any) -> None:
    sums_as(unrecorded, OLDER)
    assert "in the order of torch 2.9 and earlier, which no kernel has" in str(why_no_plan(16, 256, FP32, GPU))


def test_an_unknown_order_is_refused_with_what_was_seen(unrecorded: Any) -> None:
    sums_as(unrecorded, None)
    reason = str(why_no_plan(16, 256, FP32, GPU))
    assert "sums 16 rows of 256 float32 elements in an order that no kernel has: leaves" in reason


def test_the_cpus_own_order_is_refused(unrecorded: Any) -> None:
    """No made-up answer here: torch's own mean is asked."""
    assert "in an order that no kernel has" in str(why_no_plan(16, 256, FP32, GPU))


def test_nothing_is_asked_in_a_capture_and_nothing_remembered(unrecorded: Any) -> None:
    calls = sums_as(unrecorded, CURRENT)
    probe = _reduce_plan.capture.default_probe()
    probe.capturing = True  # type: ignore[attr-defined]
    assert "a graph is being captured" in str(why_no_plan(16, 256, FP32, GPU))
    assert not calls
    probe.capturing = False  # type: ignore[attr-defined]
    assert why_no_plan(16, 256, FP32, GPU) is None


def test_only_recorded_versions_go_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for version, recorded in (("2.11.0+cu130", True), ("2.11.0", True), ("2.11.1", False), ("2.12.0+cu130", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert _reduce_plan._recorded(GPU) is recorded
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not _reduce_plan._recorded(GPU)


def test_what_is_recorded_was_seen_on_a_gpu() -> None:
    """Each recorded version has records from such a GPU; where a proof is among them, no order in it differs."""
    seen = set()
    for path in (Path(__file__).parents[2] / "evidence").glob("*/*.json"):
        record = json.loads(path.read_text())
        environment = record.get("environment", {}) if isinstance(record, dict) else {}
        if not environment:
            continue
        version = environment["torch"]["version"].partition("+")[0]
        where = (version, int(environment["gpu"]["compute_capability"].partition(".")[0]))
        seen.add(where)
        if path.name == "prove.json" and where in _reduce_plan.RECORDED:
            orders = [row for row in record["ops"] if "order of summation" in row["step"]]
            assert orders
            assert [row for row in orders if row["differ"] or "error" in row] == []
    assert seen >= _reduce_plan.RECORDED


def test_long_rows_have_no_plan_anywhere() -> None:
    assert "splits one across blocks" in str(why_no_plan(16, 512 * 256, FP32, CPU))
    assert why_no_plan(16, 512 * 255, FP32, CPU) is None


SUMMING = [op for op in OPS if any(path.name == "_reduce_plan.py" for path in op.sources)]


@pytest.mark.parametrize("op", SUMMING, ids=lambda op: op.name)
def test_every_op_that_sums_asks(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the ones to come: an op with a reduction plan runs nowhere where the order of eager's sums is unknown."""
    small = [case for case in op.cases if case.rows <= 200][:12]
    assert small
    arguments = [case.build(CPU, 0) for case in small]
    assert {op.unsupported(*args) for args in arguments} == {None}
    monkeypatch.setattr(_reduce_plan, "_asked_once", lambda *_: "an order of its own")
    for case, args in zip(small, arguments, strict=True):
        assert "an order of its own" in str(op.unsupported(*args)), case.name


def test_the_layer_norm_kernels_tree_does_not_fit_a_mean() -> None:
    plan = reduce_plan(1, 256, 4)
    assert plan is not None
    assert layer_norm_tree(256) != reduce_tree(plan, 256)
    assert layer_norm_tree(128).leaves == 128
