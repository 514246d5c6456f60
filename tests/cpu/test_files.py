"""A file is the old one or the new one, whole; nothing is left beside it; its permissions and durability are chosen."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samebits.bench import evidence
from samebits.files import PART, write_whole
from samebits.jit.store import Cache
from samebits.proof import record as proof_record

OLD, NEW = b"old" * 1000, b"new" * 2000


@pytest.fixture(params=[0o000, 0o077], ids=["umask 000", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (OLD, NEW, b""):
        write_whole(path, data)
        assert path.read_bytes() == data
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("wanted", [0o600, 0o644])
def test_the_mode_is_the_one_asked_for(tmp_path: Path, umask: int, wanted: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(0o666)
    write_whole(path, NEW, mode=wanted)
    assert mode(path) == wanted


@pytest.mark.parametrize("step", ["fchmod", "fsync", "replace"])
def test_what_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_whole(path, OLD)

    def full(*_: Any) -> None:
        assert [name.endswith(PART) and name.startswith(".") for name in os.listdir(tmp_path) if name != "file"] == [
            True
        ]
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, NEW, durable=True)
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_an_interruption_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", NEW)
    assert os.listdir(tmp_path) == []


def test_durable_waits_for_the_disk_before_the_old_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        # What is still in a buffer of Python's would not be on the disk.
        steps.append(f"fsync of {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def move(*names: Any) -> None:
        steps.append("replace")
        replace(*names)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", move)
    write_whole(tmp_path / "file", NEW)
    assert steps == ["replace"]
    write_whole(tmp_path / "file", NEW, durable=True)
    assert steps[1:] == [f"fsync of {len(NEW)}", "replace"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    aim, link = tmp_path / "aim", tmp_path / "link"
    aim.write_bytes(OLD)
    link.symlink_to(aim)
    write_whole(link, NEW)
    assert (aim.read_bytes(), link.read_bytes(), link.is_symlink()) == (OLD, NEW, False)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "file", NEW)


def test_evidence_is_for_everybody_and_cached_kernels_are_private(tmp_path: Path, umask: int) -> None:
    table = evidence.Record("ops", "c", {}, {}, []).write(tmp_path)
    assert mode(table) == 0o644
    assert mode(proof_record.put(tmp_path / "prove.html", "a page")) == 0o644
    assert Cache(tmp_path / "kernels").put("entry", NEW)
    assert mode(tmp_path / "kernels" / "entry") == 0o600
