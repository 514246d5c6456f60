"""The on-disk cache of compiled kernels: whatever is wrong with it, nothing crashes and nothing false is loaded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.jit import store
from samebits.jit.store import Cache, key

CONTENT = random.Random(1).randbytes(50_000)
AS_ROOT = os.geteuid() == 0


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache" / "kernels")


def entry(cache: Cache) -> Path:
    assert cache.folder is not None
    return cache.folder / "entry"


def test_what_was_put_is_got(cache: Cache) -> None:
    assert cache.get("entry") is None
    assert cache.put("entry", CONTENT)
    assert cache.get("entry") == CONTENT
    assert cache.put("entry", b"")
    assert cache.get("entry") == b""
    assert cache.folder is not None
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.folder.iterdir()] == ["entry"]


def test_keys_differ_wherever_a_part_differs() -> None:
    keys = {key("a", "b"), key("ab"), key("a", "b", ""), key("b", "a"), key("a", "c"), key("", "ab")}
    assert len(keys) == 6
    assert key("a", "b") == key("a", "b")


DAMAGE = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[:20],
    "cut in the digest": lambda data: data[:50],
    "header only": lambda data: data[: store._HEADER_BYTES],
    "cut at the end": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "one bit of the content": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "one bit of the digest": lambda data: data[:30] + bytes([data[30] ^ 128]) + data[31:],
    "another format": lambda data: data.replace(b"format 1", b"format 2"),
    "random bytes": lambda data: random.Random(2).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "a bare cubin": lambda data: b"\x7fELF" + data,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_is_replaced(cache: Cache, damage: str) -> None:
    cache.put("entry", CONTENT)
    good = entry(cache).read_bytes()
    entry(cache).write_bytes(DAMAGE[damage](good))
    assert cache.get("entry") is None
    assert cache.put("entry", CONTENT)
    assert cache.get("entry") == CONTENT
    assert entry(cache).read_bytes() == good


def test_cut_anywhere_is_a_miss(cache: Cache) -> None:
    cache.put("entry", CONTENT[:100])
    good = entry(cache).read_bytes()
    for size in range(len(good)):
        entry(cache).write_bytes(good[:size])
        assert cache.get("entry") is None


def test_a_file_too_large_to_be_ours_is_not_read(cache: Cache) -> None:
    cache.put("entry", CONTENT)
    with entry(cache).open("r+b") as file:
        file.truncate(store.MAX_ENTRY_BYTES + 1)
    assert cache.get("entry") is None


def test_a_folder_in_an_entrys_place(cache: Cache) -> None:
    cache.put("other", CONTENT)
    entry(cache).mkdir()
    assert cache.get("entry") is None
    assert not cache.put("entry", CONTENT)
    assert sorted(path.name for path in entry(cache).parent.iterdir()) == ["entry", "other"]


def test_a_symlink_is_not_followed(cache: Cache, tmp_path: Path) -> None:
    cache.put("entry", CONTENT)
    moved = tmp_path / "elsewhere"
    entry(cache).rename(moved)
    entry(cache).symlink_to(moved)
    assert cache.get("entry") is None
    assert cache.put("entry", CONTENT[:10])
    assert not entry(cache).is_symlink()
    assert Cache(tmp_path).get("elsewhere") == CONTENT, "the link's target was written"


def test_a_pipe_does_not_block(cache: Cache) -> None:
    cache.put("other", CONTENT)
    os.mkfifo(entry(cache))
    assert cache.get("entry") is None


def test_without_a_folder_nothing_is_cached() -> None:
    assert not Cache(None).put("entry", CONTENT)
    assert Cache(None).get("entry") is None


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("not a folder")
    cache = Cache(tmp_path / "kernels")
    assert not cache.put("entry", CONTENT)
    assert cache.get("entry") is None
    assert not Cache(tmp_path / "kernels" / "deeper").put("entry", CONTENT)


def test_a_folder_that_cannot_be_written() -> None:
    # Not even root writes there.
    cache = Cache(Path("/proc/self/kernels"))
    assert not cache.put("entry", CONTENT)
    assert cache.get("entry") is None


@pytest.mark.skipif(AS_ROOT, reason="root writes to read-only folders")
def test_a_read_only_folder(cache: Cache) -> None:
    cache.put("entry", CONTENT)
    entry(cache).parent.chmod(0o500)
    assert not cache.put("other", CONTENT)
    assert cache.get("entry") == CONTENT


def test_a_folder_that_others_write_is_not_trusted(cache: Cache) -> None:
    cache.put("entry", CONTENT)
    entry(cache).parent.chmod(0o777)
    assert cache.get("entry") is None
    assert not cache.put("entry", CONTENT)
    entry(cache).parent.chmod(0o700)
    assert cache.get("entry") == CONTENT


@pytest.mark.skipif(not AS_ROOT, reason="only root gives files away")
def test_a_folder_of_another_user_is_not_trusted(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("entry", CONTENT)
    os.chown(entry(cache).parent, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4243)
    assert cache.get("entry") is None
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert cache.get("entry") == CONTENT


def test_a_full_disk_is_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("other", CONTENT)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not cache.put("entry", CONTENT)
    monkeypatch.undo()
    assert [path.name for path in entry(cache).parent.iterdir()] == ["other"], "the private file was left behind"


def test_the_oldest_go_when_the_folder_is_full(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FOLDER_FILES", 3)
    for age, name in enumerate("abc"):
        cache.put(name, CONTENT)
        os.utime(entry(cache).with_name(name), (1000 + age, 1000 + age))
    assert cache.get("a") == CONTENT, "reading makes it the youngest"
    cache.put("d", CONTENT)
    assert sorted(path.name for path in entry(cache).parent.iterdir()) == ["a", "c", "d"]
    monkeypatch.setattr(store, "MAX_FOLDER_BYTES", 2 * len(CONTENT))
    cache.put("e", CONTENT)
    assert [path.name for path in entry(cache).parent.iterdir()] == ["e"]


def test_what_a_killed_writer_left_goes_after_a_while(cache: Cache) -> None:
    cache.put("entry", CONTENT)
    abandoned, fresh = (entry(cache).with_name(name) for name in (".old.part", ".new.part"))
    abandoned.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(abandoned, (1000, 1000))
    cache.put("other", CONTENT)
    assert not abandoned.exists()
    assert fresh.exists(), "somebody may be writing it"


# ---- several processes -----------------------------------------------------------------------------------------------

# The module alone, by its path: importing samebits.jit brings torch, sixty-four times.
WORKER = """
import importlib.util, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parents[2]))
spec = importlib.util.spec_from_file_location("store", sys.argv[1])
store = importlib.util.module_from_spec(spec)
sys.modules["store"] = store
spec.loader.exec_module(store)
cache = store.Cache(Path(sys.argv[2]))
"""

PUT_AND_GET = """
number = int(sys.argv[3])
contents = [bytes([which]) * 100_000 for which in range(4)]
for turn in range(25):
    cache.put("entry", contents[(number + turn) % 4])
    assert cache.get("entry") in contents
"""

PUT_FOR_EVER = """
content = b"n" * 400_000
print("ready", flush=True)
while True:
    cache.put("entry", content)
"""


def worker(body: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-c", WORKER + body, store.__file__, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_64_processes_write_one_entry(tmp_path: Path) -> None:
    workers = [worker(PUT_AND_GET, tmp_path / "kernels", str(number)) for number in range(64)]
    for process in workers:
        process.communicate()
    assert [process.returncode for process in workers] == [0] * 64
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["entry"]


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "kernels")
    old, new = b"o" * 400_000, b"n" * 400_000
    seen = set()
    moments = random.Random(3)
    for _ in range(20):
        cache.put("entry", old)
        process = worker(PUT_FOR_EVER, tmp_path / "kernels")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.random() * 0.01)
        process.kill()
        process.communicate()
        got = cache.get("entry")
        assert got in (old, new)
        seen.add(got)
    assert new in seen, "no writer got as far as writing"
