"""The benchmark of the gate: it measures verified calls, prints them, and the cost is of the right order."""

from __future__ import annotations

import json

import pytest

from samebits.bench import gate_cost
from samebits.ops import OPS


def test_it_prints_a_row_per_call_and_leaves_no_op_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate_cost.main(["--calls", "20", "--repeats", "10"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert "layer_norm_modulate, rows by index" in names
    assert [name for name in names if "," not in name] == [op.name for op in OPS]


def test_the_cost_is_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate_cost.main(["--json", "--calls", "100", "--repeats", "50"]) == 0
    rows = {row["call"]: row for row in json.loads(capsys.readouterr().out)}
    tensors = {name: row["tensors"] for name, row in rows.items()}
    assert (tensors["layer_norm_modulate"], tensors["qk_norm"]) == (3, 4)
    assert tensors["qk_norm_rope"] == 12
    for row in rows.values():
        assert row["budget_us"] == 5.0
        assert 0.3 < row["us_best"] < 4 * row["budget_us"]  # Loose, because test machines are shared.
        assert row["within_budget"] is (row["us_best"] <= 5.0)
    # A guess is worth more the more tensors there are; at twelve the difference shows on any machine.
    assert rows["qk_norm_rope"]["us_best"] < rows["qk_norm_rope"]["us_by_key"]


def test_a_call_that_is_not_verified_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_DISABLE", "1")
    with pytest.raises(RuntimeError, match="expected 3 verified calls, got Counters"):
        gate_cost.measure(repeats=2, loop=1)


@pytest.mark.parametrize("option", ["--calls", "--repeats"])
def test_a_loop_of_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gate_cost.main([option, "0"])
    assert caught.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err
