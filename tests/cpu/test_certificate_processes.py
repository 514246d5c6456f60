"""Certificates between processes: many writers of one file, and SIGKILL at every moment of a write.

The drivers below run in interpreters of their own that load no torch, so that they may fork by the dozen.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from samebits.certificate import CertificateStore, StoredVerdict, folder_in, inspect, record
from samebits.certificate import folder as files

ENVIRONMENT: dict[str, Any] = {"gpu": {"name": "Pretend 9"}}

HEAD = """
import os, signal, sys, time
from pathlib import Path
from samebits.certificate import CertificateStore, StoredVerdict
from samebits.certificate import folder as files

FOLDER, ENVIRONMENT = Path(sys.argv[1]), {"gpu": {"name": "Pretend 9"}}

def verdict(signature, elements=1):
    return StoredVerdict("qk_norm", "0123456789abcdef", signature, "verified", "", elements)
"""


def start(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(code), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> str:
    out, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, errors
    assert errors == ""
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_in(tmp_path)


def path_in(folder: Path) -> Path:
    return folder / files.file_name(ENVIRONMENT)


def signatures(folder: Path) -> set[str]:
    """What the file says; it must be whole."""
    content = record.decode(path_in(folder).read_bytes(), ENVIRONMENT)
    return {verdict.signature for verdict in content.verdicts}


def test_64_processes_write_one_key_and_one_each_of_their_own(folder: Path) -> None:
    out = finish(
        start(
            """
            gate_read, gate_write = os.pipe()
            children = []
            for number in range(64):
                child = os.fork()
                if child == 0:
                    os.close(gate_write)
                    os.read(gate_read, 1)  # all begin when the parent closes its end
                    store = CertificateStore(FOLDER, ENVIRONMENT)
                    store.put(verdict("everybody's", number))
                    store.put(verdict(f"of {number}", number))
                    store.flush()
                    os._exit(0 if store.get("qk_norm", "0123456789abcdef", f"of {number}") else 1)
                children.append(child)
            os.close(gate_read)
            os.close(gate_write)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            print(codes.count(0))
            """,
            folder,
        )
    )
    assert out.strip() == "64"
    assert signatures(folder) == {"everybody's", *(f"of {number}" for number in range(64))}
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(["lock", path_in(folder).name])


def test_without_the_lock_writers_would_lose_verdicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: two writers, of whom one reads before and writes after the other."""
    import contextlib

    monkeypatch.setattr(files, "locked", lambda folder: contextlib.nullcontext())
    one, two = (CertificateStore(folder, ENVIRONMENT) for _ in range(2))
    one.put(StoredVerdict("qk_norm", "0", "one", "verified"))
    two.put(StoredVerdict("qk_norm", "0", "two", "verified"))
    real = files.write
    between = [two.flush]

    def late(descriptor: int, name: str, data: bytes) -> None:
        if between:
            between.pop()()
        real(descriptor, name, data)

    monkeypatch.setattr(files, "write", late)
    one.flush()
    assert signatures(folder) == {"one"}


def test_a_process_that_ends_without_flushing_has_flushed(folder: Path) -> None:
    finish(start("CertificateStore(FOLDER, ENVIRONMENT).put(verdict('dropped')); print(end='')", folder))
    assert signatures(folder) == {"dropped"}, "nobody held that store any more"
    finish(start("store = CertificateStore(FOLDER, ENVIRONMENT); store.put(verdict('held'))", folder))
    assert signatures(folder) == {"dropped", "held"}


KILL_AT_EVERY_STEP = """
    # Every call by which a flush touches the disk or the lock, before and after it.
    import fcntl
    names = [(os, n) for n in ("open", "write", "fsync", "rename", "close", "unlink", "fstat", "read", "utime")]
    names += [(fcntl, "flock")]
    step = 0

    def counted(real, stop_at):
        def call(*args, **more):
            global step
            step += 1
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **more)
            step += 1
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call

    def run(stop_at):
        child = os.fork()
        if child == 0:
            store = CertificateStore(FOLDER, ENVIRONMENT)
            for number in range(200):
                store.put(verdict(f"{stop_at} {number}"))
            for module, name in names:
                setattr(module, name, counted(getattr(module, name), stop_at))
            store.flush()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    first = CertificateStore(FOLDER, ENVIRONMENT)
    first.put(verdict("the first"))
    first.flush()
    seen, stop_at = [], 1
    while True:
        before = time.monotonic()
        code = run(stop_at)
        later = CertificateStore(FOLDER, ENVIRONMENT)
        believed = later.get("qk_norm", "0123456789abcdef", "the first") is not None
        new = [later.get("qk_norm", "0123456789abcdef", f"{stop_at} {n}") is not None for n in range(200)]
        later.put(verdict("after", stop_at))
        later.flush()  # nothing blocks it
        waited = time.monotonic() - before
        seen.append([code, believed, all(new), any(new), waited])
        if code == 0:
            break
        stop_at += 1
    import json
    print(json.dumps(seen))
"""


def test_sigkill_at_every_step_of_a_flush_leaves_the_old_file_or_the_new_one(folder: Path) -> None:
    seen = json.loads(finish(start(KILL_AT_EVERY_STEP, folder)))
    killed, (last, *_) = seen[:-1], seen[-1:]
    assert len(killed) > 20, "the steps were not counted"
    assert all(code == -signal.SIGKILL for code, *_ in killed)
    assert last[0] == 0
    assert all(believed for _, believed, *_ in seen), "the old verdict was lost"
    assert all(whole == some for _, _, whole, some, _ in seen), "half of a write was seen"
    outcomes = [whole for _, _, whole, _, _ in killed]
    assert outcomes == sorted(outcomes), "once the new file is there it stays"
    assert set(outcomes) == {False, True}, "some were killed before the rename and some after it"
    assert max(waited for *_, waited in seen) < files.LOCK_TIMEOUT_S / 2, "a lock was left behind"


WRITES_FOR_EVER = """
    number = 0
    while True:
        store = CertificateStore(FOLDER, ENVIRONMENT)
        for _ in range(20):
            store.put(verdict(f"{sys.argv[2]} {number}"))
            number += 1
        store.flush()
        print(number, flush=True)
"""


def test_sigkill_at_random_moments_while_three_write(folder: Path) -> None:
    draw = random.Random(0)
    known: set[str] = set()
    for turn in range(6):
        writers = [start(WRITES_FOR_EVER, folder, f"{turn}.{number}") for number in range(3)]
        try:
            for writer in writers:
                assert writer.stdout is not None
                writer.stdout.readline()  # its first flush is done
            time.sleep(draw.uniform(0.0, 0.05))
        finally:
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
            for writer in writers:
                _, errors = writer.communicate()
                assert errors == ""
        now = signatures(folder)
        assert known < now, "verdicts that were written are gone"
        for number in range(3):
            mine = [signature for signature in now if signature.startswith(f"{turn}.{number} ")]
            assert mine
            assert len(mine) % 20 == 0, "a write was seen by half"
        known = now
        store = CertificateStore(folder, ENVIRONMENT)
        store.put(StoredVerdict("qk_norm", "0", f"after {turn}", "verified"))
        begun = time.monotonic()
        store.flush()
        assert time.monotonic() - begun < files.LOCK_TIMEOUT_S / 2, "a lock was left behind"
        assert f"after {turn}" in signatures(folder)
    assert [one.problem for one in inspect(folder)] == [None]


def test_a_lock_that_is_held_is_waited_for_and_then_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = start(
        """
        with files.opened(FOLDER, create=True), files.locked(FOLDER):
            print("held", flush=True)
            time.sleep(100)
        """,
        folder,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.2)
        store = CertificateStore(folder, ENVIRONMENT)
        store.put(StoredVerdict("qk_norm", "0", "x", "verified"))
        store.flush()
        assert len(caplog.records) == 1
        assert "could not be acquired" in caplog.text
        assert not path_in(folder).exists()
    finally:
        holder.kill()
        holder.communicate()
    store.flush()
    assert signatures(folder) == {"x"}


def test_a_forked_child_works_while_its_parent_holds_every_lock(folder: Path) -> None:
    out = finish(
        start(
            """
            import threading
            store = CertificateStore(FOLDER, ENVIRONMENT)
            store.put(verdict("the parent's"))
            held, go = threading.Event(), threading.Event()

            def hold():
                with store._lock, store._writing:
                    held.set()
                    go.wait()

            thread = threading.Thread(target=hold)
            thread.start()
            held.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                store.put(verdict("the child's"))
                store.flush()
                os._exit(0 if store.get("qk_norm", "0123456789abcdef", "the parent's") else 1)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            go.set()
            thread.join()
            print(code)
            """,
            folder,
        )
    )
    assert out.strip() == "0"
    assert signatures(folder) == {"the child's", "the parent's"}


def test_a_signal_handler_that_flushes_in_the_middle_of_a_flush_waits_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CertificateStore(folder, ENVIRONMENT)
    store.put(StoredVerdict("qk_norm", "0", "x", "verified"))
    real = files.write

    def interrupted(descriptor: int, name: str, data: bytes) -> None:
        signal.raise_signal(signal.SIGUSR1)
        real(descriptor, name, data)

    def handler(number: int, frame: Any) -> None:
        store.put(StoredVerdict("qk_norm", "0", "y", "verified"))
        store.flush()

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(files, "write", interrupted)
    begun = time.monotonic()
    try:
        store.flush()
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
    assert time.monotonic() - begun < files.LOCK_TIMEOUT_S / 2
    assert not caplog.records
    assert signatures(folder) == {"x"}
    store.flush()
    assert signatures(folder) == {"x", "y"}


@pytest.mark.parametrize("threads", [8])
def test_many_threads_share_a_store(folder: Path, threads: int) -> None:
    import threading

    store = CertificateStore(folder, ENVIRONMENT)
    start_together = threading.Barrier(threads)

    def work(number: int) -> None:
        start_together.wait()
        for n in range(50):
            store.put(StoredVerdict("qk_norm", "0", f"{number} {n}", "verified"))
            assert store.get("qk_norm", "0", f"{number} {n}") is not None
            if n % 10 == 0:
                store.flush()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.flush()
    assert signatures(folder) == {f"{number} {n}" for number in range(threads) for n in range(50)}
