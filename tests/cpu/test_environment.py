"""The fingerprint: JSON, stable, sensitive to every switch that changes numerics, and useful without a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import samebits
from samebits import environment
from samebits.environment import digest, fingerprint


def test_it_is_json_and_names_what_decides_bits() -> None:
    found = fingerprint()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {
        *("verifier", "gpu", "gpus", "driver", "cpu", "python", "platform", "torch", "triton", "nvrtc", "packages"),
        *("flags", "variables"),
    }
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["git"] == torch.version.git_version
    assert found["packages"]["diffusers"]
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert samebits.fingerprint is fingerprint


def test_the_same_state_gives_the_same_digest() -> None:
    assert digest(fingerprint()) == digest(fingerprint())
    assert len(digest(fingerprint())) == 64


@pytest.mark.parametrize(
    ("switches", "flag"),
    [
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    ],
)
def test_a_changed_flag_changes_the_digest(switches: Any, flag: str) -> None:
    before, was = digest(fingerprint()), getattr(switches, flag)
    try:
        setattr(switches, flag, not was)
        assert digest(fingerprint()) != before
    finally:
        setattr(switches, flag, was)
    assert digest(fingerprint()) == before


def test_matmul_precision_sdp_denormals_and_threads_are_seen() -> None:
    before = fingerprint()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.enable_flash_sdp(False)
        torch.set_num_threads(threads + 1)
        torch.set_flush_denormal(True)
        changed = fingerprint()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    assert changed["flags"]["float32_matmul_precision"] == "medium"
    assert changed["flags"]["sdp_flash"] is False
    assert changed["flags"]["flush_denormal"] is True
    assert before["flags"]["flush_denormal"] is False
    assert changed["cpu"]["threads"] == threads + 1
    assert fingerprint() == before


def test_only_variables_that_change_numerics_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("A_SECRET_TOKEN", "hunter2")
    found = fingerprint()
    assert found["variables"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "hunter2" not in json.dumps(found)


def test_without_cuda_there_is_no_gpu_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = fingerprint()
    assert found["gpu"] is None
    assert found["driver"] is None


@pytest.mark.parametrize(("name", "mig"), [("NVIDIA H200", False), ("NVIDIA H200 MIG 1g.18gb", True)])
def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, name: str, mig: bool) -> None:
    properties = SimpleNamespace(
        name=name, uuid="12345678-aaaa", major=9, minor=0, multi_processor_count=132, total_memory=150_754_820_096
    )
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or properties)
    assert environment._gpu(None) == {
        "name": name,
        "uuid": "12345678-aaaa",
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_bytes": 150_754_820_096,
        "mig": mig,
    }
    environment._gpu(0)
    assert asked == [1, 0]


def test_a_flag_this_torch_does_not_have_is_none() -> None:
    def missing() -> None:
        raise AttributeError("Unknown attribute fp4")

    assert environment._ask(missing) is None
    assert environment._ask(lambda: False) is False


def test_no_driver_and_no_ptxas_are_none_instead_of_errors(tmp_path) -> None:
    assert environment._ptxas(tmp_path / "ptxas") is None
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    fake.chmod(0o755)
    assert environment._ptxas(fake) == "12.8.93"
    assert environment._version("a-package-that-nobody-has") is None


def test_a_digest_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest({"x": math.nan})


def test_it_imports_neither_diffusers_nor_triton() -> None:
    script = (
        "import sys; from samebits.environment import fingerprint; fingerprint(); "
        "print([m for m in ('diffusers', 'transformers', 'triton', 'accelerate') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
