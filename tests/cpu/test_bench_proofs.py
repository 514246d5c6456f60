"""The record of a proof, read back: refused where the tool did not write it, and summed up for the documents."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.bench import proofs, tables
from samebits.errors import EvidenceError
from samebits.ops import OPS, by_name
from samebits.proof import record
from samebits.proof.controls import Verdict
from samebits.proof.probe import Outcome
from samebits.proof.record import Proof

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16


def found(**changes: Any) -> Proof:
    rows = [
        record.row("swiglu", BF16, "round(a * b)", "all 2^32 pairs", "exhaustive", Outcome(1 << 32, 0)),
        record.row("swiglu", BF16, "e4m3(a * s), fp32 s", "draws", "sampled", Outcome(1 << 30, 0)),
        record.row("swiglu", BF16, "random rows", "4224x10240", "random", Outcome(30_000_000, 0)),
        record.row("swiglu", BF16, "random rows", "65536x128", "random", Outcome(70_000_000, 0)),
    ]
    proof = Proof(rows, [Verdict("a", True, "seen"), Verdict("b", None, "no GPU")], [], 12.3, True, False, 1)
    return replace(proof, **changes)


def document(proof: Proof) -> dict[str, Any]:
    environment = {"gpu": {"name": "NVIDIA Pretend 9"}, "torch": {"version": "2.99.0"}}
    source = {"commit": "abc", "dirty": False, "ops": {op.name: op.source_hash for op in OPS}}
    return proof.document("samebits prove", environment, source)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    data = document(found())
    path = record.write(data, tmp_path)
    assert proofs.read(path) == data
    assert path.stat().st_mode & 0o777 == 0o644
    assert len(path.read_text().splitlines()) < 60, "one row a line"
    assert data["controls"]["planted"] == 1


def test_an_unfinished_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = record.write(document(found()), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        record.write(document(found()) | {"seconds": float("nan")}, tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"controls": {"caught": 3, "planted": 2}}, "caught of planted"),
        ({"controls": {"caught": True, "planted": 2}}, "caught of planted"),
        ({"ops": [{"op": "swiglu"}]}, "column 'dtype'"),
        ({"ops": ["no row"]}, "must be an object"),
        ({"seconds": "fast"}, "'seconds' is a str"),
        ({"more": 1}, "the keys must be exactly"),
    ],
)
def test_a_file_that_the_tool_did_not_write_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "prove.json"
    path.write_text(json.dumps(document(found()) | change))
    with pytest.raises(EvidenceError, match=told):
        proofs.read(path)
    path.write_text("{")
    with pytest.raises(EvidenceError, match="not JSON"):
        proofs.read(path)


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"rows": []}, False),
        ({"rows": [record.row("swiglu", BF16, "s", "d", "exhaustive", Outcome(5, 1, "x"))]}, False),
        ({"rows": [record.row("swiglu", BF16, "s", "d", "exhaustive", Outcome(0, 0))]}, False),
        ({"rows": [record.failed("swiglu", BF16, "s", "d", "exhaustive", ValueError("no"))]}, False),
        ({"controls": [Verdict("a", True, ""), Verdict("b", False, "")]}, False),
        ({"controls": [Verdict("a", None, "")]}, False),
    ],
)
def test_only_a_clean_proof_with_every_control_caught_is_good(changes: dict[str, Any], good: bool) -> None:
    assert found(**changes).good is good


def test_the_table_counts_and_names(tmp_path: Path) -> None:
    (line,) = proofs.table_lines(document(found()), OPS)
    assert line == ("`swiglu`", "bfloat16", "1", "1", "0", "100,000,000", "none")
    wrong = [record.row("swiglu", BF16, "round(a)", "all", "exhaustive", Outcome(9, 2, "first"))]
    assert proofs.table_lines(document(found(rows=wrong)), OPS)[0][-1] == "round(a), all"
    (sampled,) = proofs.sampled_lines(document(found()), OPS)
    assert sampled == ("e4m3(a * s), fp32 s", "bfloat16", "draws", "1,073,741,824")


def test_a_changed_kernel_loses_its_proof() -> None:
    data = document(found())
    data["source"]["ops"]["swiglu"] = "another source"
    assert proofs.table_lines(data, OPS) == []


def test_the_page_is_written_from_the_record(tmp_path: Path) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "docs" / "ops", tmp_path / "docs" / "ops")
    shutil.copy(ROOT / "docs" / "prove.md", tmp_path / "docs")
    record.write(document(found()), tmp_path / "evidence" / "pretend")
    tables.update(tmp_path)
    page = (tmp_path / "docs" / "prove.md").read_text()
    assert "NVIDIA Pretend 9, torch 2.99.0, by `samebits prove` in 12 s; wrong kernels caught: 1 of 1." in page
    assert "| `swiglu` | bfloat16 | 1 | 1 | 0 | 100,000,000 | none |\n" in page
    assert tables.update(tmp_path) == []
    assert by_name("swiglu").name in page
