"""The benchmark of the gate: it measures verified calls, prints them, and the cost is of the right order."""

from __future__ import annotations

import json

import pytest

from samebits.bench import gate_cost


def test_it_prints_a_row_per_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate_cost.main(["--calls", "200", "--repeats", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "layer_norm_modulate",
        "layer_norm_modulate, rows by index",
        "qk_norm",
    ]


def test_the_cost_is_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate_cost.main(["--json", "--calls", "200", "--repeats", "100"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["tensors"] for row in rows] == [3, 4, 4]
    for row in rows:
        assert row["budget_us"] == 5.0
        assert 0.5 < row["us_best"] < 4 * row["budget_us"]  # Loose, because test machines are shared.
        assert row["within_budget"] is (row["us_best"] <= 5.0)


def test_a_call_that_is_not_verified_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_DISABLE", "1")
    with pytest.raises(RuntimeError, match="expected 2 verified calls, got Counters"):
        gate_cost.measure(repeats=2, loop=1)


@pytest.mark.parametrize("option", ["--calls", "--repeats"])
def test_a_loop_of_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gate_cost.main([option, "0"])
    assert caught.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err
