"""Measuring an op: bits before time, errors as rows, sweeps, targets. With fake ops on the CPU and a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_timing import FakeStopwatch

from samebits import bits
from samebits.bench import comparing, evidence, ops, targets
from samebits.bench.comparing import Bench
from samebits.ops import OPS, Case, Op

CPU = torch.device("cpu")


def case(rows: int, dtype: torch.dtype = torch.bfloat16, kind: str = "plain") -> Case:
    def build(device: torch.device, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        wide = torch.randn(1, rows, 16, generator=generator, device=device).to(dtype)
        return wide[..., :8], torch.ones(8, dtype=dtype, device=device), 2.0, kind

    return Case(f"{rows}x8 {kind}", dtype, rows, build)


def exact(x: torch.Tensor, weight: torch.Tensor, factor: float, kind: str, out: Any = None) -> torch.Tensor:
    out = (torch.empty(x.shape, dtype=x.dtype),) if out is None else out
    out[0].copy_(x * factor)
    return out[0]


def one_ulp_off(*args: Any, out: Any = None) -> torch.Tensor:
    result = exact(*args, out=out)
    bits.integer_view(result).view(-1)[3] += 1
    return result


def forgets_one(*args: Any, out: Any = None) -> torch.Tensor:
    result = exact(*args, out=out)
    flat = bits.integer_view(result).view(-1)
    flat[5] = bits.integer_view(torch.full((1,), float("nan"), dtype=result.dtype))[0]
    return result


def large_values_only(x: torch.Tensor, *rest: Any, out: Any = None) -> torch.Tensor:
    result = exact(x, *rest, out=out)
    if float(x.abs().max()) > 100:
        bits.integer_view(result).view(-1)[0] ^= 1
    return result


def raises(*_: Any, out: Any = None) -> torch.Tensor:
    raise RuntimeError("no kernel\nimage")


def fake_op(launcher: Callable[..., Any] = exact, **changes: Any) -> Op:
    made = Op(
        name="double",
        reference=lambda x, weight, factor, kind: (x * factor).contiguous(),
        unsupported=lambda x, weight, factor, kind: "the kind is odd today" if kind == "odd" else None,
        prepare=lambda *_: launcher,
        allocate=lambda x, *_: (torch.empty(x.shape, dtype=x.dtype),),
        bytes_moved=lambda x, *_: 2 * x.numel() * x.element_size(),
        cases=(case(4), case(64), case(64, torch.float32), case(9, kind="other")),
        sources=(Path(__file__),),
        headline=("64x8 plain",),
    )
    return replace(made, **changes)


@pytest.fixture
def bench() -> Bench:
    """A device on which every call takes 4 microseconds, whoever makes it."""
    watch = FakeStopwatch()
    told: list[str] = []

    class Ticking(FakeStopwatch):
        def elapsed_ms(self, body: Callable[[], object]) -> float:
            body()
            return 60 * 4e-3

    watch = Ticking()
    return Bench(CPU, watch, 1024, told.append)


def test_a_row_of_equal_bits_carries_times(bench: Bench) -> None:
    row = ops.row_of(fake_op(), case(64), bench, 1.0)
    assert evidence.OPS.problem(row) is None
    assert (row["op"], row["case"], row["dtype"]) == ("double", "64x8 plain", "bfloat16")
    assert row["bits_equal"]
    assert row["rows_compared"] == 64 * comparing.MOST_SEEDS
    assert row["us_eager"] == row["us_fused"] == pytest.approx(4.0)
    # 2 * 64 * 8 * 2 bytes in 4 us = 0.512 GB/s of 1 GB/s
    assert row["copy_share"] == pytest.approx(0.512)
    assert (row["shape"], row["strided"], row["variant"]) == ([1, 64, 8], True, "plain")


def test_a_row_that_is_not_timed_has_no_times(bench: Bench) -> None:
    row = ops.row_of(fake_op(), case(64), bench, None)
    assert row["bits_equal"]
    assert row["us_eager"] is row["us_fused"] is row["copy_share"] is None


@pytest.mark.parametrize("launcher", [one_ulp_off, forgets_one], ids=lambda f: f.__name__)
def test_no_speed_when_bits_differ(launcher: Callable[..., Any], bench: Bench) -> None:
    row = ops.row_of(fake_op(launcher), case(64), bench, 1.0)
    assert row["bits_equal"] is False
    assert row["us_eager"] is row["us_fused"] is row["copy_share"] is None
    assert "seed 0" in row["error"]
    assert "1 of 512 elements differ" in row["error"]
    assert row["rows_compared"] == 64
    assert evidence.OPS.problem(row) is None


def test_an_output_that_nobody_wrote_is_seen(bench: Bench) -> None:
    def writes_nothing(*_: Any, out: Any = None) -> torch.Tensor:
        return out[0]

    row = ops.row_of(fake_op(writes_nothing), case(4), bench, 1.0)
    assert row["bits_equal"] is False
    assert "32 of 32 elements differ" in row["error"]


def test_an_error_of_one_case_is_its_row(bench: Bench) -> None:
    row = ops.row_of(fake_op(raises), case(64), bench, 1.0)
    assert row["bits_equal"] is False
    assert row["error"] == "RuntimeError: no kernel image"
    assert evidence.OPS.problem(row) is None


def test_a_declined_case_says_why(bench: Bench) -> None:
    row = ops.row_of(fake_op(), case(64, kind="odd"), bench, 1.0)
    assert row["error"] == "declined: the kind is odd today"
    assert row["bits_equal"] is False
    assert row["rows_compared"] == 0


def test_an_error_while_timing_does_not_unsay_the_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> dict[str, float]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ops, "time_case", fails)
    row = ops.row_of(fake_op(), case(64), bench, 1.0)
    assert row["bits_equal"]
    assert row["us_fused"] is None
    assert row["error"] == "not timed: RuntimeError: out of memory"


def test_a_comparison_that_sees_nothing_is_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "compare", lambda *_: None)
    row = ops.row_of(fake_op(one_ulp_off), case(64), bench, 1.0)
    assert row["bits_equal"] is False
    assert "did not see one bit" in row["error"]


def test_a_sweep_counts_its_rows_and_goes_through_the_amplitudes(bench: Bench) -> None:
    seen: set[str] = set()

    def watches(x: torch.Tensor, *rest: Any, out: Any = None) -> torch.Tensor:
        seen.add(f"{float(x.float().std()):.0g}")
        return exact(x, *rest, out=out)

    row = comparing.sweep(fake_op(watches), case(64), bench, rows=2_000)
    assert row["bits_equal"]
    assert row["rows_compared"] == 64 * 9 * 4 >= 2_000
    assert row["case"] == "1x64x8 plain, amplitudes 0.005 to 200"
    assert row["us_fused"] is None
    assert {"0.005", "0.02", "0.1", "0.5", "1", "5"} <= seen
    assert max(map(float, seen)) > 100
    assert evidence.OPS.problem(row) is None


def test_a_sweep_finds_what_only_large_values_show(bench: Bench) -> None:
    assert ops.row_of(fake_op(large_values_only), case(64), bench, None)["bits_equal"]
    row = comparing.sweep(fake_op(large_values_only), case(64), bench, rows=2_000)
    assert row["bits_equal"] is False
    assert row["error"].startswith("amplitude 80") or row["error"].startswith("amplitude 200")


def test_sweeps_take_the_largest_case_of_each_type_and_reference() -> None:
    chosen = comparing.sweep_cases(
        fake_op(cases=(case(4), case(64), case(64, torch.float32), case(9, kind="other"))), CPU
    )
    assert [(c.name, c.dtype) for c in chosen] == [
        ("64x8 plain", torch.bfloat16),
        ("64x8 plain", torch.float32),
        ("9x8 other", torch.bfloat16),
    ]
    assert comparing.sweep_cases(fake_op(cases=(case(4, kind="odd"),)), CPU) == []


VARIED = {"attention": 3, "qk_norm": 2, "qk_norm_rope": 3, "swiglu": 2, "gated_residual_rms_norm": 3}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_sweeps_vary_x_or_q_and_k_and_nothing_else(op: Op) -> None:
    """Or query, key and value, both halves, or stream, gate and branch."""
    args = min(op.cases, key=lambda c: c.rows).build(CPU, 0)
    assert comparing.leading_inputs(args) == VARIED.get(op.name, 1)


def test_every_reference_of_qk_norm_is_swept_in_bf16() -> None:
    (qk,) = [op for op in OPS if op.name == "qk_norm"]
    small = replace(qk, cases=tuple(c for c in qk.cases if c.rows < 1_000))
    swept = {(str(c.dtype), comparing.describe(c.build(CPU, 0))["variant"]) for c in comparing.sweep_cases(small, CPU)}
    assert {("torch.bfloat16", kind) for kind in targets.QK_REFERENCES} <= swept


def test_host_time_goes_through_an_open_gate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits import gate

    monkeypatch.setattr(gate, "_jit_unavailable", lambda device, host: None)
    row = ops.host_row(fake_op(), case(4), bench)
    assert row.get("error") is None
    assert row["bits_equal"]
    assert min(row["us_host_launch"], row["us_host_call"], row["us_host_site"], row["us_host_eager"]) > 0
    assert row["us_host_gate"] == pytest.approx(row["us_host_site"] - row["us_host_call"], abs=1e-6)
    assert evidence.HOST.problem(row) is None


def test_no_host_time_where_the_gate_stays_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits import gate

    monkeypatch.setattr(gate, "_jit_unavailable", lambda device, host: None)
    row = ops.host_row(fake_op(one_ulp_off), case(4), bench)
    assert row["bits_equal"] is False
    assert row["us_host_site"] is None
    assert "the gate did not open" in row["error"]
    assert evidence.HOST.problem(row) is None


def test_host_time_is_taken_on_the_smallest_timed_case() -> None:
    assert ops.smallest(fake_op()).name == "64x8 plain"
    assert ops.smallest(fake_op(headline=())).name == "4x8 plain"
    assert ops.smallest(fake_op()).dtype is torch.bfloat16


def test_a_run_writes_both_files_and_times_only_the_headline(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "copy_gb_per_s", lambda *_: 1.0)
    monkeypatch.setattr(ops, "sweep", partial(comparing.sweep, rows=100))
    rows, host = ops.record(
        tmp_path, bench, [fake_op(), fake_op(one_ulp_off)], command="samebits bench ops", environment={"gpu": None}
    )
    written = evidence.read(tmp_path / "ops.json")
    assert list(written.rows) == rows
    assert list(evidence.read(tmp_path / "host.json").rows) == host
    assert written.command == "samebits bench ops"
    assert set(written.source["ops"]) == {"double"}
    timed = {(row["case"], row["dtype"]) for row in rows if row["us_fused"] is not None}
    assert timed == {("64x8 plain", "bfloat16"), ("64x8 plain", "float32")}
    half = len(rows) // 2
    assert all(row["bits_equal"] for row in rows[:half])
    assert not any(row["bits_equal"] for row in rows[half:])


def modulate_row(tokens: int, **changes: Any) -> dict[str, Any]:
    return {
        "op": "layer_norm_modulate",
        "case": f"1x{tokens}x3072",
        "dtype": "bfloat16",
        "us_eager": 85.0,
        "us_fused": 16.0,
        "copy_share": 0.76,
        "bits_equal": True,
        "rows_compared": 1,
        "shape": [1, tokens, 3072],
        **changes,
    }


def test_targets_of_layer_norm_modulate() -> None:
    rows = [modulate_row(tokens) for tokens in (128, 512, 2048, 4096, 4608)]
    assert [target.reached for target in targets.modulate_targets(rows)] == [True, True, True]
    slow = [row if row["shape"][1] != 4096 else modulate_row(4096, us_fused=18.0, copy_share=0.7) for row in rows]
    assert [target.reached for target in targets.modulate_targets(slow)] == [True, False, False]
    wrong = [*rows[:-1], modulate_row(4608, bits_equal=False)]
    assert targets.modulate_targets(wrong)[0].got == "DIFFERENT"
    assert [target.reached for target in targets.modulate_targets(rows[:3])] == [False, False, False]
    indexed = modulate_row(4096, case="1x4096x3072 indexed", us_fused=90.0)
    assert targets.modulate_targets([*rows, indexed])[1].got == "5.31x"


def qk_row(variant: str, **changes: Any) -> dict[str, Any]:
    return {
        "op": "qk_norm",
        "case": f"1x4224x30x128 {variant}, amplitudes 0.005 to 200",
        "dtype": "bfloat16",
        "us_eager": None,
        "us_fused": None,
        "copy_share": None,
        "bits_equal": True,
        "rows_compared": 9_123_840,
        "shape": [1, 4224, 30, 128],
        "strided": True,
        "variant": variant,
        **changes,
    }


def test_targets_of_qk_norm() -> None:
    swept = [qk_row(kind) for kind in targets.QK_REFERENCES]
    timed = [
        qk_row(kind, case=f"1x4224x30x128 {kind} fused-qkv", copy_share=share)
        for kind, share in (("diffusers", 0.80), ("torch", 0.76))
    ]
    assert all(target.reached for target in targets.qk_targets([*swept, *timed]))
    assert targets.qk_targets([*swept, *timed])[-1].got == "76.0%"
    assert not targets.qk_targets(swept)[-1].reached
    few = [*swept[:2], qk_row("torch", rows_compared=8_999_999), *timed]
    assert [target.reached for target in targets.qk_targets(few)] == [True, True, False, True]
    wrong = [*swept[:2], qk_row("torch", bits_equal=False), *timed]
    assert "DIFFERENT" in targets.qk_targets(wrong)[2].got
    assert not targets.qk_targets(wrong)[2].reached


def test_targets_of_host_time() -> None:
    for us, reached in ((7.9, True), (8.1, False), (None, False)):
        (target,) = targets.host_targets([{"op": "qk_norm", "us_host_launch": us}])
        assert (target.name, target.reached) == ("qk_norm, host time of a launch", reached)


def test_tables_are_plain_text_and_tell_what_is_wrong() -> None:
    rows = [modulate_row(4096), modulate_row(512, bits_equal=False, us_fused=None, copy_share=None, error="because")]
    lines = targets.ops_table(rows).splitlines()
    assert " ".join(lines[1].split()) == "layer_norm_modulate 1x4096x3072 bfloat16 85.0 16.0 5.31x 76% equal 1"
    assert "DIFFERENT" in lines[2]
    assert lines[3] == "layer_norm_modulate 1x512x3072: because"
    told = targets.targets_table(targets.modulate_targets(rows))
    assert "NO" in told
    assert "2 of 5 sizes measured" in told
