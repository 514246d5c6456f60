"""Evidence files: four keys, validated rows, no speed where bits differ, written in one step."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samebits.bench import evidence
from samebits.bench.evidence import DENOISERS, HOST, OPS, Record
from samebits.errors import EvidenceError
from samebits.ops import OPS as REAL_OPS

OPS_ROW: dict[str, Any] = {
    "op": "layer_norm_modulate",
    "case": "1x4096x3072",
    "dtype": "bfloat16",
    "us_eager": 85.2,
    "us_fused": 16,
    "copy_share": 0.76,
    "bits_equal": True,
    "rows_compared": 100_000,
}
DENOISERS_ROW: dict[str, Any] = {
    "model": "qwen-image",
    "blocks_equal": "60/60",
    "output_equal": True,
    "steps_equal": "4/4",
    "launches_eager": 5855,
    "launches_ours": 2000,
    "ms_eager": 172.0,
    "ms_ours": 125.0,
}
HOST_ROW: dict[str, Any] = {
    "op": "qk_norm",
    "case": "1x128x24x128 diffusers",
    "dtype": "bfloat16",
    "us_host_launch": 5.0,
    "us_host_call": 8.0,
    "us_host_site": 11.0,
    "bits_equal": True,
}


def record_of(kind: str, *rows: dict[str, Any]) -> Record:
    return Record(kind, f"samebits bench {kind}", {"gpu": {"name": "NVIDIA H200"}}, {"ops": {}}, rows)


@pytest.mark.parametrize(("kind", "row"), [("ops", OPS_ROW), ("denoisers", DENOISERS_ROW), ("host", HOST_ROW)])
def test_what_is_written_is_what_is_read(kind: str, row: dict[str, Any], tmp_path: Path) -> None:
    record = record_of(kind, row, {**row, "note": "a further column"})
    path = record.write(tmp_path / "evidence" / "h200")
    data = json.loads(path.read_text())
    assert list(data) == ["command", "environment", "source", "rows"]
    assert data["rows"] == list(record.rows)
    read = evidence.read(path)
    assert (read.kind, read.command, list(read.rows)) == (kind, record.command, list(record.rows))
    assert sum(line.startswith('    {"') for line in path.read_text().splitlines()) == 2, "a row has a line of its own"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in path.parent.iterdir()] == [f"{kind}.json"], "nothing temporary is left"


def test_an_empty_record_is_still_a_record(tmp_path: Path) -> None:
    assert list(evidence.read(record_of("ops").write(tmp_path)).rows) == []


@pytest.mark.parametrize("column", ["us_eager", "us_fused", "copy_share", "us_whatever", "speedup"])
def test_no_speed_where_bits_differ(column: str) -> None:
    row = {**evidence.without_speeds(OPS_ROW), "bits_equal": False}
    assert OPS.problem(row) is None
    problem = OPS.problem({**row, column: 16.0})
    assert problem is not None
    assert column in problem


@pytest.mark.parametrize(
    "changed", [{"blocks_equal": "59/60"}, {"output_equal": False}, {"steps_equal": "3/4"}], ids=str
)
def test_no_speed_where_any_part_of_a_denoiser_differs(changed: dict[str, Any]) -> None:
    problem = DENOISERS.problem({**DENOISERS_ROW, **changed})
    assert problem is not None
    assert "ms_eager" in problem
    assert DENOISERS.problem({**DENOISERS_ROW, **changed, "ms_eager": None, "ms_ours": None}) is None


@pytest.mark.parametrize(
    ("schema", "row", "column", "value"),
    [
        (OPS, OPS_ROW, "us_fused", 0),
        (OPS, OPS_ROW, "us_fused", -1.0),
        (OPS, OPS_ROW, "us_fused", float("nan")),
        (OPS, OPS_ROW, "us_fused", float("inf")),
        (OPS, OPS_ROW, "us_fused", "16"),
        (OPS, OPS_ROW, "us_fused", True),
        (OPS, OPS_ROW, "rows_compared", True),
        (OPS, OPS_ROW, "rows_compared", 1.5),
        (OPS, OPS_ROW, "rows_compared", -1),
        (OPS, OPS_ROW, "bits_equal", 1),
        (OPS, OPS_ROW, "bits_equal", None),
        (OPS, OPS_ROW, "op", ""),
        (OPS, OPS_ROW, "dtype", None),
        (DENOISERS, DENOISERS_ROW, "blocks_equal", "all"),
        (DENOISERS, DENOISERS_ROW, "blocks_equal", "0/0"),
        (DENOISERS, DENOISERS_ROW, "steps_equal", 4),
        (DENOISERS, DENOISERS_ROW, "launches_ours", None),
        (HOST, HOST_ROW, "us_host_launch", 0.0),
    ],
)
def test_rows_that_are_not_what_they_must_be(
    schema: evidence.Schema, row: dict[str, Any], column: str, value: Any, tmp_path: Path
) -> None:
    assert schema.problem(row) is None
    problem = schema.problem({**row, column: value})
    assert problem is not None
    assert column in problem
    with pytest.raises(EvidenceError, match=column):
        record_of(schema.kind, row, {**row, column: value}).write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("column", sorted({*OPS_ROW}))
def test_every_column_of_the_format_is_required(column: str) -> None:
    row = {name: value for name, value in OPS_ROW.items() if name != column}
    assert OPS.problem(row) == f"column {column!r} is missing"


def test_a_bad_row_leaves_the_older_file_as_it_was(tmp_path: Path) -> None:
    path = record_of("ops", OPS_ROW).write(tmp_path)
    before = path.read_bytes()
    with pytest.raises(EvidenceError):
        record_of("ops", {**OPS_ROW, "bits_equal": False}).write(tmp_path)
    assert path.read_bytes() == before


def test_a_value_that_json_cannot_hold_leaves_the_older_file_as_it_was(tmp_path: Path) -> None:
    path = record_of("ops", OPS_ROW).write(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        record_of("ops", {**OPS_ROW, "note": float("nan")}).write(tmp_path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"command": "x", "environment": {}, "source": {}}',
        '{"command": "x", "environment": {}, "source": {}, "rows": [], "more": 1}',
        '{"command": 1, "environment": {}, "source": {}, "rows": []}',
        '{"command": "x", "environment": [], "source": {}, "rows": []}',
        '{"command": "x", "environment": {}, "source": {}, "rows": [1]}',
        '{"command": "x", "environment": {}, "source": {}, "rows": [{"op": "x"}]}',
        "[" * 100_000,
    ],
    ids=range(11),
)
def test_files_that_the_tool_did_not_write(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text(text)
    with pytest.raises(EvidenceError):
        evidence.read(path)


def test_a_file_of_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="denoisers"):
        evidence.read(tmp_path / "speed.json")


def test_a_changed_kernel_voids_its_claim_and_no_other() -> None:
    ops = [SimpleNamespace(name="a", source_hash="1"), SimpleNamespace(name="b", source_hash="2")]
    record = Record("ops", "c", {}, {"ops": {"a": "1", "b": "1"}}, [])
    assert evidence.stale(record, ops) == ["b"]
    assert evidence.stale(record, [SimpleNamespace(name="new", source_hash="3")]) == ["new"]


def test_source_names_the_commit_the_package_and_every_op() -> None:
    source = evidence.source_of(REAL_OPS, commit="abc")
    assert set(source) == {"commit", "dirty", "package", "ops"}
    assert source["ops"] == {op.name: op.source_hash for op in REAL_OPS}
    assert len(source["package"]) == 16


def test_source_of_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_run_git", lambda *_: None)
    assert evidence.source_of([], commit="abc")["commit"] == "abc"
    assert evidence.source_of([])["commit"] == "unknown"
    assert evidence.source_of([])["dirty"] is None


def test_source_inside_somebody_elses_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_run_git", lambda _, *args: "vendor/" if "--show-prefix" in args else "theirs")
    assert evidence.source_of([])["commit"] == "unknown"


def test_package_hash_reads_every_source_file(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.cu").write_text("x")
    first = evidence.package_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert evidence.package_hash(tmp_path) == first
    (tmp_path / "ops" / "a.cu").write_text("y")
    assert evidence.package_hash(tmp_path) != first


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("../../NVIDIA  H100 PCIe!", "h100-pcie"),
    ],
)
def test_folder_of_a_gpu(gpu: str, folder: str) -> None:
    assert evidence.folder_name(gpu) == folder


def test_folder_of_nothing() -> None:
    with pytest.raises(ValueError, match="folder"):
        evidence.folder_name("///")
