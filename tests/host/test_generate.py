"""``samebits generate --host``: whole pictures through the gate, with the kernels' own source on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from samebits import jit, tiny
from samebits.cli import main
from samebits.gate import COMPARED

MISSING = jit.unavailable(torch.device("cpu"), host=True)
QUICK = ["--steps", "2", "--size", "64x64", "--prove", "--json", "-o", "fox.png"]


PRODUCTS = ("linear_gelu_tanh", "linear_swiglu")


@pytest.mark.host
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("model", tiny.NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_picture_is_eagers_whatever_the_gate_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, dtype: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["generate", model, "--host", "--dtype", dtype, *QUICK])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["proof"] == {"equal": True, "void": False, "steps": 2, "first_difference": None}
    # Every site was called or says where its lines run, every call went through a kernel, and what eager answered has
    # its reason. A CPU joins no products: which of them the library computes alike is its own affair.
    for site in found["sites"]:
        if site["op"] in PRODUCTS:
            # A CPU's library sums up in an order of its own; calls that are not taken are the activation's.
            assert sum(site["reasons"].values()) >= site["eager"], site
            known = (COMPARED, "refused", "x must be bfloat16", "width and columns must be multiples")
            assert site["reasons"], site
            assert all(reason.startswith(known) for reason in site["reasons"]), site
            continue
        if site["fused"] + site["eager"] == 0:
            assert all("its lines run" in reason for reason in site["reasons"]), site
            continue
        assert sum(site["reasons"].values()) == site["eager"], site
        if site["op"] not in ("joint_projection", "attention"):
            assert all(reason == COMPARED or reason.startswith("refused") for reason in site["reasons"]), site
    assert {site["op"] for site in found["sites"]} >= {"rms_norm_scale", "qk_norm_rope"}


@pytest.mark.host
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_proof_that_could_not_fail_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["generate", "--host", *QUICK[:5], "-o", "fox.png"])
    assert done.exit_code == 0, done.output
    assert "With --host they must: every call is compared there, and eager's own tensors go on." in done.stdout


def test_without_a_compiler_every_site_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "OMP_NUM_THREADS": "1"}
    for name in ("CXX", "CC"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "samebits", "generate", "--host", *QUICK],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["proof"]["equal"]
    assert all(site["fused"] == 0 for site in found["sites"])
    told = [next(iter(site["reasons"])) for site in found["sites"]]
    assert all("compiler" in reason or "its lines run" in reason for reason in told)
    assert sum("compiler" in reason for reason in told) > 10
