"""Stored verdicts: what is believed, what is not, and that nothing on a disk is ever a crash."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from samebits.certificate import (
    Certificate,
    CertificateStore,
    StoredVerdict,
    digest,
    folder_in,
    inspect,
    record,
    remove,
)
from samebits.certificate import folder as files
from samebits.certificate.record import Unbelievable

ENVIRONMENT: dict[str, Any] = {"gpu": {"name": "Pretend 9", "mig": False}, "torch": {"version": "2.99"}, "flags": {}}
OTHER: dict[str, Any] = {**ENVIRONMENT, "torch": {"version": "2.98"}}


def verdict(signature: str = "x: bf16[1, 2, 3]", state: str = "verified", **fields: Any) -> StoredVerdict:
    fields = {
        "cause": "" if state == "verified" else "first difference at 7",
        "elements": 6,
        "basis": "a call",
        **fields,
    }
    return StoredVerdict("qk_norm", "0123456789abcdef", signature, state, **fields)  # type: ignore[arg-type]


def ask(store: CertificateStore, signature: str = "x: bf16[1, 2, 3]") -> StoredVerdict | None:
    return store.get("qk_norm", "0123456789abcdef", signature)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_in(tmp_path / "cache")


def path_in(folder: Path, environment: dict[str, Any] = ENVIRONMENT) -> Path:
    return folder / files.file_name(environment)


def stored(folder: Path, *verdicts: StoredVerdict, environment: dict[str, Any] = ENVIRONMENT) -> Path:
    """A certificate as the store writes it."""
    store = CertificateStore(folder, environment)
    for one in verdicts or (verdict(),):
        store.put(one)
    store.flush()
    path = path_in(folder, environment)
    assert path.is_file()
    return path


def sealed(content: Any) -> bytes:
    """An envelope with a right checksum round anything: JSON text as bytes, or a value."""
    inner = content if isinstance(content, bytes) else compact(content)
    head = compact({"format": record.FORMAT, "version": 1, "sha256": hashlib.sha256(inner).hexdigest()})
    return head[:-1] + b',"content":' + inner + b"}"


def compact(content: Any) -> bytes:
    """JSON as samebits spells it: without a space."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())["content"]
    return content


# What is stored comes back


def test_what_was_put_is_there_in_the_next_process(folder: Path) -> None:
    refused = verdict("y", "refused")
    stored(folder, verdict(), refused)
    later = CertificateStore(folder, ENVIRONMENT)
    assert ask(later) == verdict(when=ask(later).when)  # type: ignore[union-attr]
    assert ask(later, "y") == refused
    assert ask(later, "z") is None


def test_everything_that_is_known_can_be_listed(folder: Path) -> None:
    stored(folder, verdict("a"), verdict("b"))
    store = CertificateStore(folder, ENVIRONMENT)
    store.put(verdict("b", "refused"))
    store.put(verdict("c"))
    assert {one.signature: one.state for one in store.verdicts()} == {"a": "verified", "b": "refused", "c": "verified"}
    assert store.problem is None
    assert CertificateStore(folder, OTHER).verdicts() == []


def test_put_counts_at_once_and_is_on_the_disk_only_after_flush(folder: Path) -> None:
    store = CertificateStore(folder, ENVIRONMENT)
    assert ask(store) is None
    store.put(verdict())
    assert ask(store) is not None
    assert not folder.exists()
    store.flush()
    assert path_in(folder).is_file()


@pytest.mark.parametrize("field", ["op", "source", "signature"])
def test_every_part_of_the_key_counts(folder: Path, field: str) -> None:
    stored(folder)
    key = {"op": "qk_norm", "source": "0123456789abcdef", "signature": "x: bf16[1, 2, 3]"}
    store = CertificateStore(folder, ENVIRONMENT)
    assert store.get(**key) is not None
    assert store.get(**key | {field: key[field] + " "}) is None


def test_another_environment_has_another_file_and_sees_nothing_of_this_one(folder: Path) -> None:
    stored(folder)
    other = CertificateStore(folder, OTHER)
    assert ask(other) is None
    other.put(verdict("other"))
    other.flush()
    assert path_in(folder) != path_in(folder, OTHER)
    assert ask(CertificateStore(folder, ENVIRONMENT), "other") is None


def test_an_environment_that_changes_in_the_process_leads_to_another_file(folder: Path) -> None:
    now = [ENVIRONMENT]
    store = CertificateStore(folder, lambda: now[0])
    store.put(verdict())
    now[0] = OTHER
    assert ask(store) is None
    store.put(verdict("in the other"))
    store.flush()
    assert [v["signature"] for v in content_of(path_in(folder, OTHER))["verdicts"]] == ["in the other"]
    now[0] = ENVIRONMENT
    assert ask(store) is not None
    assert ask(store, "in the other") is None


def test_two_stores_lose_nothing_of_one_another(folder: Path) -> None:
    one, two = (CertificateStore(folder, ENVIRONMENT) for _ in range(2))
    assert ask(two) is None  # it has read the empty folder
    one.put(verdict("one"))
    one.flush()
    two.put(verdict("two"))
    two.flush()
    later = CertificateStore(folder, ENVIRONMENT)
    assert ask(later, "one") is not None
    assert ask(later, "two") is not None
    assert ask(two, "one") is not None, "a flush brings what others wrote"


def test_what_was_cleared_is_not_written_again(folder: Path) -> None:
    path = stored(folder)
    store = CertificateStore(folder, ENVIRONMENT)
    assert ask(store) is not None
    assert remove(folder, [path.stem]) == [path.stem]
    store.put(verdict("new"))
    store.flush()
    assert [v["signature"] for v in content_of(path)["verdicts"]] == ["new"]
    assert ask(store) is not None, "this process has found it out, or read it, already"


@pytest.mark.parametrize("order", ["refused first", "verified first", "at once"])
def test_once_refused_stays_refused(folder: Path, order: str) -> None:
    early, late = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    refused_at = {"refused first": early, "verified first": late, "at once": early}[order]
    verified_at = {"refused first": late, "verified first": early, "at once": early}[order]
    pair = [verdict(state="refused", when=refused_at), verdict(when=verified_at)]
    for one in pair if order == "refused first" else reversed(pair):
        stored(folder, one)
    assert ask(CertificateStore(folder, ENVIRONMENT)).state == "refused"  # type: ignore[union-attr]
    store = CertificateStore(folder, ENVIRONMENT)
    store.put(verdict())
    assert ask(store).state == "refused"  # type: ignore[union-attr]


def test_of_two_alike_the_later_one_is_kept(folder: Path) -> None:
    stored(folder, verdict(when="2026-01-02T00:00:00Z", elements=2), verdict(when="2026-01-01T00:00:00Z", elements=1))
    assert ask(CertificateStore(folder, ENVIRONMENT)).elements == 2  # type: ignore[union-attr]


def test_nothing_new_writes_nothing(folder: Path) -> None:
    path = stored(folder, verdict(when="2026-01-01T00:00:00Z"))
    before = path.stat().st_ino
    store = CertificateStore(folder, ENVIRONMENT)
    store.put(verdict(when="2026-01-01T00:00:00Z"))
    store.flush()
    store.flush()
    assert path.stat().st_ino == before


def test_files_are_for_their_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = stored(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(["lock", path.name]), (
        "nothing is left half-written"
    )


@pytest.mark.parametrize(
    "bad",
    [
        verdict(state="maybe"),
        verdict(signature=""),
        verdict(signature="x" * 40_000),
        verdict(signature="\ud800"),
        verdict(elements=-1),
        verdict(elements=float("nan")),
        verdict(elements=2**64),
        verdict(when="yesterday"),
        verdict(basis=None),
        None,
    ],
    ids=["state", "empty", "long", "surrogate", "negative", "nan", "huge", "when", "basis", "none"],
)
def test_what_could_not_be_read_back_is_not_kept(folder: Path, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = CertificateStore(folder, ENVIRONMENT)
    store.put(bad)
    store.put(bad)
    store.put(verdict("good"))
    store.flush()
    assert [v["signature"] for v in content_of(path_in(folder))["verdicts"]] == ["good"]
    assert len(caplog.records) == 1
    assert "a verdict is not kept" in caplog.text


def test_a_long_cause_is_cut(folder: Path) -> None:
    stored(folder, verdict(state="refused", cause="y" * 9000))
    cause = ask(CertificateStore(folder, ENVIRONMENT)).cause  # type: ignore[union-attr]
    assert len(cause) == record.CAUSE_LIMIT
    assert cause.endswith("y...")


def test_past_its_size_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_BYTES", 20_000)
    many = [verdict(f"{n}", when=f"2026-01-01T00:00:00.{n:06}Z") for n in range(200)]
    path = stored(folder, *many)
    assert path.stat().st_size <= 20_000
    kept = [int(v["signature"]) for v in content_of(path)["verdicts"]]
    assert len(kept) > 80
    assert sorted(kept) == list(range(200 - len(kept), 200))


def test_no_more_verdicts_than_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_VERDICTS", 3)
    path = stored(folder, *(verdict(f"{n}", when=f"2026-01-0{n}T00:00:00Z") for n in range(1, 9)))
    assert sorted(v["signature"] for v in content_of(path)["verdicts"]) == ["6", "7", "8"]
    crowd = [msgspec.to_builtins(verdict(f"{n}")) for n in range(16_385)]
    with pytest.raises(Unbelievable, match="16384"):
        record.decode(sealed({"environment": ENVIRONMENT, "verdicts": crowd}))


def test_environments_unused_for_longest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    paths = []
    for number in range(3):
        environment = {**ENVIRONMENT, "n": number}
        paths.append(stored(folder, environment=environment))
        os.utime(paths[-1], (number, number))
    ask(CertificateStore(folder, {**ENVIRONMENT, "n": 1}))  # in use again
    stored(folder, environment={**ENVIRONMENT, "n": 3})
    assert [path.exists() for path in paths] == [False, True, False]


def test_what_a_killed_writer_left_is_removed_when_it_is_old(folder: Path) -> None:
    stored(folder)
    old, fresh, foreign = folder / f".{'a' * 16}.part", folder / f".{'b' * 16}.part", folder / "notes.txt"
    for path in (old, fresh, foreign):
        path.write_text("half")
    os.utime(old, (1, 1))
    os.utime(foreign, (1, 1))
    stored(folder, verdict("another"))
    assert (old.exists(), fresh.exists(), foreign.exists()) == (False, True, True)


# What is off is not believed (CASES.md 39)

GOOD = {"environment": ENVIRONMENT, "verdicts": [msgspec.to_builtins(verdict())]}


def good_with(**changes: Any) -> dict[str, Any]:
    return {"environment": ENVIRONMENT, "verdicts": [{**msgspec.to_builtins(verdict()), **changes}]}


def raw_elements(number: bytes) -> bytes:
    return sealed(compact(GOOD).replace(b'"elements":6', b'"elements":' + number))


BAD: dict[str, bytes] = {
    "empty": b"",
    "random bytes": hashlib.shake_256(b"seed").digest(4096),
    "zeros": bytes(4096),
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "another schema": b'{"name": "package", "version": 1}',
    "a list": b"[1, 2]",
    "a future version": sealed(GOOD).replace(b'"version":1', b'"version":2'),
    "version 0": sealed(GOOD).replace(b'"version":1', b'"version":0'),
    "version 1.0": sealed(GOOD).replace(b'"version":1', b'"version":1.5'),
    "version true": sealed(GOOD).replace(b'"version":1', b'"version":true'),
    "another format": sealed(GOOD).replace(b"samebits certificate", b"samebits evidence"),
    "one more field": sealed(GOOD)[:-1] + b',"more":1}',
    "no checksum": sealed(GOOD).replace(b'"sha256"', b'"sha257"'),
    "a wrong checksum": sealed(GOOD).replace(b'"elements":6', b'"elements":7'),
    "refused made verified": sealed(good_with(state="refused")).replace(b'"refused"', b'"verified"'),
    "two documents": sealed(GOOD) + sealed(GOOD),
    "text after it": sealed(GOOD) + b"x",
    "NaN": raw_elements(b"NaN"),
    "1e999": raw_elements(b"1e999"),
    "-1": raw_elements(b"-1"),
    "6.5": raw_elements(b"6.5"),
    "2**64": raw_elements(str(2**64).encode()),
    "a number as text": raw_elements(b'"6"'),
    "a NaN in the environment": sealed(compact(GOOD).replace(b'"2.99"', b"NaN")),
    "a 1e999 in the environment": sealed(compact(GOOD).replace(b'"2.99"', b"1e999")),
    "a depth bomb": b"[" * 1_000_000,
    "a depth bomb for content": sealed(b"[" * 200_000 + b"]" * 200_000),
    "a depth bomb as environment": sealed(
        b'{"environment": {"a": ' + b"[" * 200_000 + b"]" * 200_000 + b'}, "verdicts": []}'
    ),
    "an unknown state": sealed(good_with(state="trusted")),
    "a state of null": sealed(good_with(state=None)),
    "an unknown field": sealed(good_with(trust=True)),
    "a signature that is a list": sealed(good_with(signature=["x"])),
    "a time that is none": sealed(good_with(when="tomorrow")),
    "a month 99": sealed(good_with(when="2026-99-01T00:00:00Z")),
    "a line end after a time": sealed(good_with(when=f"{GOOD['verdicts'][0]['when']}\n")),
    "a checksum twice": sealed(GOOD).replace(b'"sha256":', b'"sha256":"","sha256":'),
    "a state twice": sealed(compact(good_with()).replace(b'"state":', b'"state":"refused","state":')),
    "a space between": sealed(GOOD).replace(b":1,", b": 1,", 1),
    "another order": sealed({key: GOOD[key] for key in reversed(GOOD)}),
    "no verdicts": sealed({"environment": ENVIRONMENT}),
    "verdicts that are no list": sealed({"environment": ENVIRONMENT, "verdicts": {}}),
    "no environment": sealed({"verdicts": []}),
    "another environment (a hash collision)": sealed({**GOOD, "environment": OTHER}),
    "a field less": sealed({**GOOD, "environment": {k: v for k, v in ENVIRONMENT.items() if k != "flags"}}),
    "a field more": sealed({**GOOD, "environment": {**ENVIRONMENT, "more": None}}),
    "false that was 0": sealed({**GOOD, "environment": {**ENVIRONMENT, "gpu": {"name": "Pretend 9", "mig": 0}}}),
}


def put_in_place(folder: Path, data: bytes) -> Path:
    folder.mkdir(parents=True, mode=0o700)
    path = path_in(folder)
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_the_good_one_is_believed(folder: Path) -> None:
    """The control of all that follows: the same bytes with nothing wrong open the signature."""
    put_in_place(folder, sealed(GOOD))
    assert ask(CertificateStore(folder, ENVIRONMENT)) is not None


def assert_ignored_with_one_line(folder: Path, caplog: pytest.LogCaptureFixture, line: str = "is ignored") -> None:
    """Nothing is trusted, one line is said, and a new verdict can be put and counts in this process."""
    caplog.clear()
    store = CertificateStore(folder, ENVIRONMENT)
    assert ask(store) is None
    assert ask(store, "another") is None
    store.put(verdict("new"))
    assert ask(store, "new") is not None
    assert [one.signature for one in store.verdicts()] == ["new"]
    store.flush()
    store.flush()
    assert store.problem is not None
    assert line in store.problem
    warned = [message.getMessage() for message in caplog.records if message.levelno >= logging.WARNING]
    assert len(warned) == 1, warned
    assert line in warned[0]
    assert "\n" not in warned[0]
    assert len(warned[0]) < 600


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_ignored_with_one_line_and_replaced(
    folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = put_in_place(folder, BAD[what])
    assert_ignored_with_one_line(folder, caplog, f"the certificate {path} is ignored: it ")
    later = CertificateStore(folder, ENVIRONMENT)
    assert ask(later) is None
    assert ask(later, "new") is not None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.99, 0.999])
def test_a_truncated_file_is_ignored(folder: Path, share: float, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(folder)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert_ignored_with_one_line(folder, caplog)


def test_every_cut_and_every_flipped_bit_is_noticed(folder: Path) -> None:
    data = stored(folder).read_bytes()
    before = record.decode(data, ENVIRONMENT)
    for end in range(len(data)):
        with pytest.raises(Unbelievable):
            record.decode(data[:end], ENVIRONMENT)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(Unbelievable):
                record.decode(bytes(flipped), ENVIRONMENT)
    assert record.decode(data, ENVIRONMENT) == before


def test_a_file_of_100_mb_is_not_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put_in_place(folder, sealed(GOOD))
    os.truncate(path, 100 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_ignored_with_one_line(folder, caplog, "larger than 8 MiB")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"


def test_a_large_file_that_is_not_too_large_is_read(folder: Path) -> None:
    crowd = [verdict(f"{n} " + "x" * 400) for n in range(10_000)]
    path = stored(folder, *crowd)
    assert path.stat().st_size > 4 << 20
    assert ask(CertificateStore(folder, ENVIRONMENT), crowd[0].signature) is not None


def test_a_symlink_is_not_followed_and_its_target_not_touched(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(folder)
    target = folder.parent / "elsewhere.json"
    path.rename(target)
    data = target.read_bytes()
    path.symlink_to(target)
    assert_ignored_with_one_line(folder, caplog, "is a symbolic link")
    assert target.read_bytes() == data
    assert not path.is_symlink()
    assert ask(CertificateStore(folder, ENVIRONMENT), "new") is not None


def test_a_folder_in_its_place_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True, mode=0o700)
    path_in(folder).mkdir()
    (path_in(folder) / "mine").write_text("keep")
    assert_ignored_with_one_line(folder, caplog, "is a folder")
    assert (path_in(folder) / "mine").read_text() == "keep"


@pytest.mark.timeout(60)
def test_a_pipe_in_its_place_is_not_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(path_in(folder))
    assert_ignored_with_one_line(folder, caplog, "is no plain file")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_ignored(folder: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    stored(folder).chmod(mode)
    assert_ignored_with_one_line(folder, caplog, "may be written by others")


def test_a_file_of_another_owner_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(folder)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert_ignored_with_one_line(folder, caplog, "belongs to user 65534")
    else:
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        store = CertificateStore(folder, ENVIRONMENT)
        assert ask(store) is None
        assert "belongs to user" in caplog.text


def test_a_folder_that_others_may_write_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(folder)
    before = path.read_bytes()
    folder.chmod(0o777)
    assert_ignored_with_one_line(folder, caplog, "may be written by others")
    assert path.read_bytes() == before


def test_a_folder_behind_a_symlink_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(folder)
    folder.rename(folder.parent / "real")
    folder.symlink_to(folder.parent / "real")
    before = path.read_bytes()
    assert_ignored_with_one_line(folder, caplog, "is a symbolic link")
    assert path.read_bytes() == before


def test_a_file_in_place_of_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert_ignored_with_one_line(folder, caplog, "is no folder")
    assert folder.read_text() == "a file"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which even root can make nothing: /proc")
def test_where_nothing_can_be_made_everything_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    assert_ignored_with_one_line(Path("/proc/samebits/certificates"), caplog, "could not be kept")


def test_a_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(folder)
    before = path.read_bytes()
    real = os.open

    def read_only(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    store = CertificateStore(folder, ENVIRONMENT)
    assert ask(store) is not None, "what is there can still be used"
    store.put(verdict("new"))
    store.flush()
    store.flush()
    warned = [message.getMessage() for message in caplog.records if message.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "Read-only file system" in warned[0]
    monkeypatch.undo()
    assert path.read_bytes() == before
    store.flush()
    assert ask(CertificateStore(folder, ENVIRONMENT), "new") is not None, "it is kept for a better time"


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_the_old_file(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(folder)
    before = path.read_bytes()

    def full(*args: Any, **more: Any) -> int:
        raise OSError(28, "No space left on device")

    store = CertificateStore(folder, ENVIRONMENT)
    store.put(verdict("new"))
    monkeypatch.setattr(os, call, full)
    store.flush()
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert path.read_bytes() == before
    assert not list(folder.glob(".*.part"))


def test_a_disk_that_is_really_full(folder: Path) -> None:
    """A limit on the size of files is what a full disk looks like that a test may make by itself."""
    path = stored(folder)
    before = path.read_bytes()
    script = f"""
import resource
from pathlib import Path
from samebits.certificate import CertificateStore, StoredVerdict
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
store = CertificateStore(Path({str(folder)!r}), {ENVIRONMENT!r})
for n in range(50):
    store.put(StoredVerdict("qk_norm", "0123456789abcdef", str(n) + "x" * 100, "verified"))
store.flush()
print(store.get("qk_norm", "0123456789abcdef", "x: bf16[1, 2, 3]").state)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "verified"
    assert done.stderr.count("could not be kept") == 1
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("environ", [{}, {"HOME": "/proc/home"}, {"SAMEBITS_CACHE_DIR": "/dev/null"}])
def test_without_a_home_nothing_breaks(environ: dict[str, str], tmp_path: Path) -> None:
    script = """
from samebits.certificate import CertificateStore, StoredVerdict, folder_in
from samebits.settings import settings
store = CertificateStore(folder_in(settings().cache_dir), {"a": 1})
store.put(StoredVerdict("qk_norm", "0123456789abcdef", "x", "verified"))
store.flush()
print(store.get("qk_norm", "0123456789abcdef", "x").state)
"""
    known = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    known |= {"XDG_CACHE_HOME": str(tmp_path / "xdg")} if not environ else {}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=known | environ, check=True
    )
    assert done.stdout.strip() == "verified"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (0 if not environ else 1), done.stderr


def test_an_environment_that_cannot_be_told_stores_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no driver")

    for environment in ({"n": float("nan")}, {"n": object()}, broken):
        caplog.clear()
        store = CertificateStore(folder, environment)  # type: ignore[arg-type]
        assert ask(store) is None
        store.put(verdict())
        store.flush()
        assert not folder.exists()
        assert len(caplog.records) == 1


# Looking and clearing


def test_inspect_tells_everything_and_trusts_nothing(folder: Path) -> None:
    assert inspect(folder) == []
    path = stored(folder, verdict("a"), verdict("b", "refused"))
    other = stored(folder, environment=OTHER)
    os.utime(other, (1, 1))
    bad = folder / f"v1-{'0' * 32}.json"
    bad.write_bytes(path.read_bytes())
    bad.chmod(0o600)
    os.utime(bad, (0, 0))
    (folder / "notes.txt").write_text("not ours")
    found = inspect(folder)
    assert [one.name for one in found] == [path.stem, other.stem, bad.stem]
    assert found[0].environment == ENVIRONMENT
    assert {v.signature: v.state for v in found[0].verdicts} == {"a": "verified", "b": "refused"}
    assert found[0].size_bytes == path.stat().st_size
    assert found[1].problem is None
    assert found[2] == Certificate(
        bad.stem, path.stat().st_size, problem="is for another environment than its name says"
    )
    assert other.stat().st_mtime == 1, "looking is not using"
    assert path.stem == f"v1-{digest(ENVIRONMENT)[:32]}"


@pytest.mark.parametrize(
    "what", [name for name, data in BAD.items() if "environment" not in name and "field less" not in name]
)
def test_inspect_survives_every_bad_file(folder: Path, what: str) -> None:
    put_in_place(folder, BAD[what])
    (found,) = inspect(folder)
    if what not in ("a field more", "false that was 0"):
        assert found.problem
        assert not found.verdicts


def test_remove_removes_what_is_named_and_nothing_else(folder: Path) -> None:
    path, other = stored(folder), stored(folder, environment=OTHER)
    outside = folder.parent / "v1-x.json"
    outside.write_text("mine")
    assert remove(folder, [path.stem, "../v1-x", "lock", "v1-" + "0" * 32]) == [path.stem]
    assert not path.exists()
    assert other.exists()
    assert outside.exists()
    assert (folder / "lock").exists()
    assert remove(folder.parent / "nowhere", [path.stem]) == []


def test_the_folder_is_below_the_cache(tmp_path: Path) -> None:
    assert folder_in(tmp_path) == tmp_path / "certificates"


@pytest.mark.parametrize(
    ("then", "here", "said"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b was 1 and is 2"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a[1] was 2 and is 3"),
        ({"a": [1]}, {"a": [1, 2]}, "a was [1] and is [1, 2]"),
        ({"a": 1}, {}, "a is only in the file"),
        ({}, {"a": 1}, "a is only in this process"),
        ({"a": True}, {"a": 1}, "a was True and is 1"),
        ({"a": 1}, {"a": 1.0}, "a was 1 and is 1.0"),
        ({"a": {}}, {"a": None}, "a was {} and is None"),
    ],
)
def test_a_difference_of_two_environments_is_named(then: Any, here: Any, said: str) -> None:
    assert list(record.differences(then, here)) == [said]
    assert list(record.differences(then, then)) == []


def test_every_difference_of_two_environments_is_named() -> None:
    then, here = {"a": 1, "b": {"c": [1, 2]}, "d": None}, {"a": 2, "b": {"c": [1, 3]}, "e": None}
    assert list(record.differences(then, here)) == [
        "a was 1 and is 2",
        "b.c[1] was 2 and is 3",
        "d is only in the file",
        "e is only in this process",
    ]


def test_it_loads_no_torch() -> None:
    script = "import sys, samebits.certificate; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_digest_is_that_of_the_environment() -> None:
    from samebits import environment

    found = environment.fingerprint()
    assert digest(found) == environment.digest(found)
