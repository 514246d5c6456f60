"""The CPU ring computes on one thread: two of them on a busy machine spend their time waiting for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ModelOpt exports, one for each model and recipe: see write_exports.py."""
    folder = tmp_path_factory.mktemp("exports")
    script = Path(__file__).with_name("write_exports.py")
    root = os.pathsep.join(filter(None, (str(script.parents[2]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, script, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder
