"""A process that is forked while one of its threads compiles a kernel."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_runs import needs_compiler

from samebits import host, jit

pytestmark = [
    *needs_compiler,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SOURCE = 'extern "C" __global__ void seven(int* out) { out[0] = 7; }\n'


def test_a_child_is_not_stuck_behind_a_thread_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "seven.cu"
    source.write_text(SOURCE)
    compiling, go_on, build = threading.Event(), threading.Event(), host.build

    def wait_then_build(*args: Any) -> bytes:
        compiling.set()
        go_on.wait()
        return build(*args)

    def seven() -> int:
        out = torch.zeros(1, dtype=torch.int32)
        jit.compile(source, "seven", {}, out.device).bind((1, 1, 1), (1, 1, 1))(0, out.data_ptr())
        return int(out)

    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "build", wait_then_build)
    thread = threading.Thread(target=seven)
    thread.start()
    assert compiling.wait(60)
    with host.library._lock:  # As if another thread were loading a library.
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                host.build = build
                status = seven()
            finally:
                os._exit(status)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
