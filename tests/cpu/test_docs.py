"""The documents against the code: every op and family has its page, every link leads somewhere, every command exists,
and no figure stands in the README that the tool did not write there from evidence."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from samebits.bench import evidence, tables
from samebits.errors import EvidenceError
from samebits.models import FAMILIES
from samebits.ops import OPS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIGURE = re.compile(r"\d[\d.,]*\s?(?:x\b|\u00d7|%|[nu\u00b5m]s\b|[kMGT]B/s\b|TFLOP|times\b|seconds\b|minutes\b)")


def test_every_op_has_its_page_with_a_measured_block() -> None:
    for op in OPS:
        page = (ROOT / "docs" / "ops" / f"{op.name}.md").read_text()
        assert page.startswith(f"# {op.name}\n")
        assert f"<!-- measured: {op.name} -->" in page
    assert {page.stem for page in (ROOT / "docs" / "ops").glob("*.md")} == {op.name for op in OPS}


def test_every_family_has_its_page() -> None:
    names = {family.name.replace("-", "_") for family in FAMILIES}
    assert {page.stem for page in (ROOT / "docs" / "families").glob("*.md")} == names


def test_the_readme_sets_up_with_exactly_two_commands() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Set up\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    assert block.split() == ["scripts/demo", "scripts/test"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_script_that_a_page_names_can_be_run(page: Path) -> None:
    for name in set(re.findall(r"(?<![\w/])scripts/(\w+)(?![\w.-])", page.read_text())):
        assert os.access(ROOT / "scripts" / name, os.X_OK), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            # A heading's anchor, as code hosts make it.
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, target


def test_the_readme_holds_no_figure_that_the_tool_did_not_write() -> None:
    by_hand = tables.BLOCK.sub("", (ROOT / "README.md").read_text())
    assert not FIGURE.findall(by_hand)


@pytest.mark.parametrize("text", ["5.3x faster", "16 us a call", "76 % of copy", "4.2 TB/s", "ten, or 10 times"])
def test_a_figure_would_be_found(text: str) -> None:
    assert FIGURE.search(text)


def test_the_measured_blocks_say_what_the_evidence_says() -> None:
    outdated = [page.relative_to(ROOT).as_posix() for page in tables.update(write=False)]
    assert not outdated, f"run python -m samebits.bench.tables, which rewrites {outdated}"


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A checkout's documents with evidence of one machine, as the tool writes it."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs" / "ops", tmp_path / "docs" / "ops")
    environment = {"gpu": {"name": "NVIDIA Pretend 9"}, "torch": {"version": "2.99.0"}}
    source = {"ops": {op.name: op.source_hash for op in OPS}}
    row = {
        "op": "qk_norm",
        "case": "1x2x3x4",
        "dtype": "bfloat16",
        "us_eager": 812.25,
        "us_fused": 50.75,
        "copy_share": 0.625,
        "rows_compared": 1234567,
        "bits_equal": True,
    }
    untimed = {"us_eager": None, "us_fused": None, "copy_share": None}
    differs = row | untimed | {"case": "odd", "bits_equal": False, "rows_compared": 3, "error": "a|b"}
    small = row | untimed | {"case": "1x1", "rows_compared": 20}
    rows = [row, differs, small, small | {"dtype": "float32"}]
    evidence.Record("ops", "scripts/gpu", environment, source, rows).write(tmp_path / "evidence" / "pretend")
    denoiser = {
        "model": "pretend-image",
        "ms_eager": 172.0,
        "ms_ours": 131.0,
        "launches_eager": 5855,
        "launches_ours": 4321,
        "output_equal": True,
        "blocks_equal": "60/60",
        "steps_equal": "4/4",
    }
    evidence.Record("denoisers", "scripts/gpu", environment, source, [denoiser]).write(
        tmp_path / "evidence" / "pretend"
    )
    return tmp_path


def test_evidence_becomes_tables(measured: Path) -> None:
    written = tables.update(measured)
    readme, page = ((measured / name).read_text() for name in ("README.md", "docs/ops/qk_norm.md"))
    assert measured / "README.md" in written
    assert (
        "| `qk_norm` 1x2x3x4 bf16 | NVIDIA Pretend 9, torch 2.99.0 | equal, 1,234,567 rows "
        "| 812.2 us | 50.8 us | 16.00x | 62% |\n"
    ) in readme
    assert "equal in 3 of 4 cases, 1,234,607 rows" in readme
    assert "5,855 launches | 131.0 ms, 4,321 launches | 1.31x" in readme
    assert "`rms_norm_scale` |  | not yet measured" in readme
    assert "| odd | bf16 | DIFFERENT (a\\|b) | 3 |  |  |  |  |\n" in page
    assert "2 cases and 40 rows, every bit equal: 1x1 (bf16, fp32).\n" in page
    assert tables.update(measured) == []


def test_a_changed_kernel_loses_its_figures(measured: Path) -> None:
    for path in (measured / "evidence" / "pretend").glob("*.json"):
        data = json.loads(path.read_text())
        data["source"]["ops"]["qk_norm"] = "another source"
        path.write_text(json.dumps(data))
    tables.update(measured)
    readme = (measured / "README.md").read_text()
    assert "812" not in readme
    assert "`qk_norm` |  | not yet measured with this source" in readme
    assert "4,321" not in readme, "a denoiser was measured with the kernels of then"


def test_a_file_that_the_tool_did_not_write_is_no_evidence(measured: Path) -> None:
    path = measured / "evidence" / "pretend" / "ops.json"
    data = json.loads(path.read_text())
    data["rows"][1]["us_fused"] = 1.0
    path.write_text(json.dumps(data))
    with pytest.raises(EvidenceError, match="bits differ"):
        tables.update(measured)


def test_a_block_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        tables.render("<!-- measured: nothing -->\n<!-- /measured -->", {})


def test_check_writes_nothing(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "ROOT", measured)
    before = (measured / "README.md").read_text()
    assert tables.main(["--check"]) == 1
    assert "README.md: out of date" in capsys.readouterr().out
    assert (measured / "README.md").read_text() == before
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
