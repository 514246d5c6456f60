"""``samebits certificates``: list, show, clear, and one line with exit code 2 for what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from samebits.certificate import CertificateStore, StoredVerdict, folder_in, name_of
from samebits.cli import main
from samebits.environment import certified

OTHER: dict[str, Any] = {"gpu": {"name": "NVIDIA Pretend 9"}, "torch": {"version": "2.99.0"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return folder_in(tmp_path)


def verdict(signature: str, state: str = "verified", op: str = "qk_norm") -> StoredVerdict:
    cause = "" if state == "verified" else "first difference at [7]"
    return StoredVerdict(op, "0123456789abcdef", signature, state, cause, 1000, "a call")  # type: ignore[arg-type]


@pytest.fixture
def stored(folder: Path) -> Path:
    """One certificate of this environment, one of another, and a file that is none."""
    here = CertificateStore(folder, certified())
    for one in (verdict("a"), verdict("b", "refused"), verdict("c", op="swiglu")):
        here.put(one)
    here.flush()
    other = CertificateStore(folder, OTHER)
    other.put(verdict("a"))
    other.flush()
    bad = folder / f"v1-{'0' * 32}.json"
    bad.write_text("{}")
    bad.chmod(0o600)
    for age, path in enumerate((folder / f"{name_of(certified())}.json", folder / f"{name_of(OTHER)}.json", bad)):
        os.utime(path, (1000 - age, 1000 - age))
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["certificates", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_empty_folder_is_no_error(folder: Path) -> None:
    assert document("list") == {"folder": str(folder), "here": name_of(certified()), "certificates": []}
    assert run("list").stdout == f"no certificates in {folder}\n"
    assert document("clear", "--yes") == {"folder": str(folder), "removed": []}
    assert run("clear", "--yes").stdout == f"nothing to remove in {folder}\n"
    assert not folder.exists(), "looking makes nothing"


def test_list(stored: Path) -> None:
    rows = document("list")["certificates"]
    assert [row["name"] for row in rows] == [name_of(certified()), name_of(OTHER), f"v1-{'0' * 32}"]
    assert [(row["here"], row["verified"], row["refused"]) for row in rows] == [
        (True, 2, 1),
        (False, 1, 0),
        (False, 0, 0),
    ]
    assert [row["gpu"] for row in rows[1:]] == ["NVIDIA Pretend 9", None]
    assert rows[0]["problem"] is None
    assert "cut off or of another kind" in rows[2]["problem"]
    done = run("list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert name_of(certified())[:15] in lines[1]
    assert " here " in lines[1]
    assert "NVIDIA Pretend 9" in lines[2]
    assert "here" not in lines[2]
    assert "is not used: it is cut off" in done.stdout
    assert lines[-1] == f"3 in {stored}"


def test_show_is_this_environments_by_default(stored: Path) -> None:
    found = document("show")
    assert found["name"] == name_of(certified())
    assert found["differences"] == []
    assert found["environment"] == certified()
    assert {row["signature"]: row["state"] for row in found["verdicts"]} == {
        "a": "verified",
        "b": "refused",
        "c": "verified",
    }
    assert found["path"] == str(stored / f"{name_of(certified())}.json")
    assert document("show", "here") == found
    text = run("show").stdout
    assert "\nthis environment\n" in text
    assert "qk_norm" in text
    assert "2,000" in text, "elements compared"


def test_show_picks_verdicts(stored: Path) -> None:
    assert [row["signature"] for row in document("show", "--op", "swiglu")["verdicts"]] == ["c"]
    assert [row["signature"] for row in document("show", "--refused")["verdicts"]] == ["b"]
    text = run("show", "--refused", "--signatures").stdout
    assert "refused qk_norm (1,000 elements, a call): first difference at [7]\n  b\n" in text
    assert "swiglu" not in text


def test_show_says_how_another_environment_differs(stored: Path) -> None:
    name = name_of(OTHER)
    for spelling in (name, name[:9], name.removeprefix("v1-")[:8]):
        assert document("show", spelling)["name"] == name
    apart = document("show", name)["differences"]
    assert f"torch.version was '2.99.0' and is '{certified()['torch']['version']}'" in apart
    assert "flags is only in this process" in apart
    text = run("show", name).stdout
    assert "NVIDIA Pretend 9, torch 2.99.0" in text
    assert "another environment than this one" in text


def test_show_of_a_bad_file_says_why(stored: Path) -> None:
    assert "not used: it is cut off or of another kind" in run("show", "0000").stdout
    assert document("show", "0000")["verdicts"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "nothing"],
        ["show", ""],
        ["show", "v1-"],
        ["clear"],
        ["clear", "nothing"],
        ["clear", "here", "--yes"],
        ["clear", "v1"],
        ["clear", "../v1-0"],
        ["list", "more"],
        ["burn"],
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_is_one_line_and_removes_nothing(stored: Path, arguments: list[str], as_json: bool) -> None:
    before = sorted(stored.iterdir())
    done = run(*arguments, *(["--json"] if as_json else []))
    assert done.exit_code == 2
    assert (done.stdout if as_json else done.stderr).count("\n") == 1
    assert sorted(stored.iterdir()) == before
    if as_json:
        assert set(json.loads(done.stdout)) == {"error"}


def test_nothing_stored_for_here(folder: Path) -> None:
    done = run("show")
    assert done.exit_code == 2
    assert "nothing is stored for this environment" in done.stderr


def test_clear_one(stored: Path) -> None:
    done = run("clear", "here")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"removed {name_of(certified())}: 3 verdicts of ")
    assert not (stored / f"{name_of(certified())}.json").exists()
    assert document("clear", name_of(OTHER)[:12], "0000")["removed"] == [name_of(OTHER), f"v1-{'0' * 32}"]
    assert [path.name for path in stored.iterdir()] == ["lock"]


def test_clear_all_removes_certificates_and_nothing_else(stored: Path) -> None:
    (stored / "notes.txt").write_text("mine")
    (stored / "v2-0.json").write_text("of a later version")
    assert len(document("clear", "--yes")["removed"]) == 3
    assert sorted(path.name for path in stored.iterdir()) == ["lock", "notes.txt", "v2-0.json"]


@pytest.mark.parametrize("arguments", [["list"], ["show"], ["clear", "--yes"]])
def test_a_folder_that_would_not_be_used_is_said_to_be(stored: Path, arguments: list[str]) -> None:
    stored.chmod(0o777)
    done = run(*arguments)
    assert done.exit_code == 2
    assert "the folder may be written by others (mode 0777)" in done.stderr
    assert done.stderr.count("\n") == 1
    stored.chmod(0o700)
    assert len(list(stored.iterdir())) == 4


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "file"))
    done = run("list")
    assert done.exit_code == 2
    assert "cannot be used" in done.stderr
