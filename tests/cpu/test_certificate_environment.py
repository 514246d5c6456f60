"""What voids a certificate: every field of the fingerprint, and everything on the machine that a field stands for."""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import json
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits import environment
from samebits.certificate import CertificateStore, StoredVerdict, inspect
from samebits.certificate import folder as files
from samebits.environment import certified, digest, fingerprint

KEPT = ("_driver", "_cpu_model", "_triton", "_nvrtc", "_version", "_build", "_verifier")
"""What the process is asked only once."""


def forget() -> None:
    for name in KEPT:
        getattr(environment, name).cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Two pretended GPUs."""
    found = [
        SimpleNamespace(
            name="NVIDIA Pretend 9",
            uuid=f"0000000{number}-aaaa",
            major=9,
            minor=0,
            multi_processor_count=132,
            total_memory=1 << 37,
        )
        for number in range(2)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_000)
    forget()
    yield found
    monkeypatch.undo()
    forget()


FULL: dict[str, Any] = {
    **fingerprint(),
    "gpu": {
        "name": "NVIDIA Pretend 9",
        "uuid": "00000000-aaaa",
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_bytes": 1 << 37,
        "mig": False,
    },
    "gpus": ["NVIDIA Pretend 9 00000000-aaaa", "NVIDIA Pretend 9 00000001-aaaa"],
    "driver": "580.95.05",
    "triton": {"version": "3.6.0", "ptxas": "12.8.93", "libdevice_sha256": "ab" * 32},
    "nvrtc": {"version": "13.0", "library_sha256": "cd" * 32, "builtins_sha256": ["ef" * 32]},
    "variables": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}
"""A fingerprint in which every field says something, whatever this machine has."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every leaf."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path
    else:
        for name, part in inner:
            yield from paths(part, (*path, name))


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return "another" if value is None else f"{value}0"


def with_change(path: tuple[Any, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
    other = copy.deepcopy(FULL)
    place = other
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = change(place[path[-1]])
    return other


VERDICT = StoredVerdict("qk_norm", "0123456789abcdef", "x", "verified")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "certificates"
    store = CertificateStore(folder, FULL)
    store.put(VERDICT)
    store.flush()
    return folder


def believed(folder: Path, environment: dict[str, Any]) -> bool:
    return CertificateStore(folder, environment).get(VERDICT.op, VERDICT.source, VERDICT.signature) is not None


def test_the_same_environment_believes_it(stored: Path) -> None:
    """The control of all that follows."""
    assert believed(stored, copy.deepcopy(FULL))
    assert believed(stored, json.loads(json.dumps(FULL)))


@pytest.mark.parametrize("path", list(paths(FULL)), ids=lambda path: ".".join(map(str, path)))
def test_every_field_that_changes_leads_to_another_certificate(stored: Path, tmp_path: Path, path: Any) -> None:
    other = with_change(path, changed)
    assert files.file_name(other) != files.file_name(FULL)
    assert not believed(stored, other)
    # Put under the other's name, as by a collision or by hand: the fields themselves are compared.
    fake = tmp_path / "certificates"
    shutil.copytree(stored, fake)
    (fake / files.file_name(FULL)).rename(fake / files.file_name(other))
    assert not believed(fake, other)
    (found,) = inspect(fake)
    assert found.problem == "is for another environment than its name says"


@pytest.mark.parametrize("name", list(FULL))
def test_a_field_that_is_gone_leads_to_another_certificate(stored: Path, name: str) -> None:
    assert not believed(stored, {key: value for key, value in FULL.items() if key != name})


# From the machine to the fingerprint

GPU_FIELDS = {
    "name": "NVIDIA Other 9",
    "uuid": "0000000f-aaaa",
    "major": 10,
    "minor": 3,
    "multi_processor_count": 131,
    "total_memory": 1 << 36,
}


@pytest.mark.parametrize("field", list(GPU_FIELDS))
def test_another_gpu_changes_it(gpu: list[SimpleNamespace], field: str) -> None:
    before = digest(fingerprint())
    assert digest(fingerprint()) == before
    setattr(gpu[0], field, GPU_FIELDS[field])
    assert digest(fingerprint()) != before


def test_a_slice_of_a_gpu_is_another_gpu(gpu: list[SimpleNamespace]) -> None:
    gpu[0].name = "NVIDIA Pretend 9 MIG 1g.18gb"
    assert fingerprint()["gpu"]["mig"] is True


def test_another_order_of_the_gpus_changes_it(gpu: list[SimpleNamespace]) -> None:
    """``cuda:1`` stands in signatures; behind another CUDA_VISIBLE_DEVICES it is another GPU."""
    before = fingerprint()
    assert before["gpus"] == ["NVIDIA Pretend 9 00000000-aaaa", "NVIDIA Pretend 9 00000001-aaaa"]
    gpu[1].uuid = "00000002-aaaa"
    assert digest(fingerprint()) != digest(before)
    assert fingerprint()["gpu"] == before["gpu"]


def switch(owner: Any, name: str) -> Any:
    return pytest.param(owner, name, id=name)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        switch(torch.backends.cuda.matmul, "allow_tf32"),
        switch(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        switch(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        switch(torch.backends.cuda.matmul, "allow_fp16_accumulation"),
        switch(torch.backends.cudnn, "allow_tf32"),
        switch(torch.backends.cudnn, "benchmark"),
        switch(torch.backends.cudnn, "deterministic"),
        switch(torch.backends.cudnn, "enabled"),
        switch(torch.utils.deterministic, "fill_uninitialized_memory"),
    ],
)
def test_a_switch_changes_it(owner: Any, name: str) -> None:
    before, was = fingerprint(), getattr(owner, name)
    try:
        setattr(owner, name, not was)
        assert digest(fingerprint()) != digest(before)
    finally:
        setattr(owner, name, was)
    assert fingerprint() == before


@pytest.mark.parametrize(
    ("get", "put", "other"),
    [
        pytest.param(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high", id="precision"),
        pytest.param(torch.get_default_dtype, torch.set_default_dtype, torch.float64, id="default dtype"),
        pytest.param(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False, id="flash"),
        pytest.param(
            torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False, id="eff"
        ),
        pytest.param(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False, id="math"),
        pytest.param(
            torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False, id="cudnn sdp"
        ),
        pytest.param(
            torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
            True,
            id="sdp reduction",
        ),
        pytest.param(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True, id="deterministic"
        ),
    ],
)
def test_a_flag_changes_it(get: Callable[[], Any], put: Callable[[Any], Any], other: Any) -> None:
    before, was = fingerprint(), get()
    assert was != other
    try:
        put(other)
        assert digest(fingerprint()) != digest(before)
    finally:
        put(was)
    assert fingerprint() == before


def test_a_precision_that_the_old_switches_do_not_know_changes_it() -> None:
    before, matmul, conv = fingerprint(), torch.backends.cuda.matmul, torch.backends.cudnn.conv
    was = matmul.fp32_precision, conv.fp32_precision
    try:
        conv.fp32_precision = "ieee"
        assert fingerprint()["flags"]["cudnn_conv_fp32_precision"] == "ieee"
        assert digest(fingerprint()) != digest(before)
        conv.fp32_precision = was[1]
        matmul.fp32_precision = "tf32"
        assert fingerprint()["flags"]["matmul_fp32_precision"] == "tf32"
    finally:
        matmul.fp32_precision, conv.fp32_precision = was
    assert fingerprint() == before


def test_deterministic_with_warnings_only_is_another_state() -> None:
    try:
        torch.use_deterministic_algorithms(True)
        hard = digest(fingerprint())
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert digest(fingerprint()) != hard
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "variable",
    [
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "CUDNN_CONV_WSCAP_DBG",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_MATMUL_SOMETHING_NEW",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TORCH_BLAS_SOMETHING_NEW",
        "TORCH_CUDNN_V8_API_DISABLED",
        "TORCH_LINALG_PREFER_CUSOLVER",
        "DIFFUSERS_ATTN_BACKEND",
        "CUDA_FORCE_PTX_JIT",
        "CUDA_HOME",
        "OMP_NUM_THREADS",
    ],
)
def test_a_variable_changes_it(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    seen = [digest(fingerprint())]
    for value in ("0", "1"):
        monkeypatch.setenv(variable, value)
        seen.append(digest(fingerprint()))
    assert len(set(seen)) == 3


@pytest.mark.parametrize("variable", ["PYTORCH_NVML_BASED_CUDA_CHECK", "HOME", "A_SECRET_TOKEN", "HF_TOKEN", "PATH"])
def test_a_variable_that_decides_no_bit_changes_nothing(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    monkeypatch.setenv(variable, "hunter2")
    assert fingerprint() == before


@pytest.mark.parametrize("package", environment._PACKAGES)
def test_another_release_of_a_package_changes_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    before = digest(fingerprint())
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.9" if name == package else real(name))
    forget()
    try:
        assert digest(fingerprint()) != before
    finally:
        monkeypatch.undo()
        forget()
    assert digest(fingerprint()) == before


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        pytest.param(torch, "__version__", "2.99.0", id="torch"),
        pytest.param(torch.version, "git_version", "0" * 40, id="torch git"),
        pytest.param(torch.version, "cuda", "99.9", id="CUDA"),
        pytest.param(torch.version, "hip", "9.9", id="HIP"),
        pytest.param(torch.__config__, "show", lambda: "built otherwise", id="torch build"),
        pytest.param(torch.backends.cpu, "get_cpu_capability", lambda: "SSE2", id="cpu capability"),
        pytest.param(platform, "python_version", lambda: "3.99", id="python"),
        pytest.param(platform, "machine", lambda: "abacus", id="machine"),
    ],
)
def test_another_build_changes_it(owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    before = digest(fingerprint())
    monkeypatch.setattr(owner, name, value)
    forget()
    try:
        assert digest(fingerprint()) != before
    finally:
        monkeypatch.undo()
        forget()
    assert digest(fingerprint()) == before


def test_the_driver_and_cudnn_change_it(gpu: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for driver, cudnn in itertools.product(("580.95.05", "580.95.06"), (91_000, 91_001)):
        monkeypatch.setattr(environment, "_driver", lambda driver=driver: driver)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda cudnn=cudnn: cudnn)
        seen.append(digest(fingerprint()))
    monkeypatch.undo()
    assert len(set(seen)) == 4


@pytest.mark.parametrize(
    "variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"]
)
def test_what_decides_on_a_cpu_alone_voids_no_certificate(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, whole, threads = certified(), fingerprint(), torch.get_num_threads()
    monkeypatch.setenv(variable, "1")
    try:
        torch.set_num_threads(threads + 1)
        torch.set_flush_denormal(True)
        assert certified() == before
        assert fingerprint() != whole
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def test_a_certificate_rests_on_everything_else() -> None:
    assert certified().keys() == fingerprint().keys()
    for name, value in fingerprint().items():
        if name not in environment._CPU_ALONE:
            assert certified()[name] == value
    assert set(fingerprint()["flags"]) - set(certified()["flags"]) == {"flush_denormal", "mkldnn_enabled"}
    assert set(fingerprint()["cpu"]) - set(certified()["cpu"]) == {"capability", "threads"}


def test_flags_and_variables_of_a_gpu_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(certified())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    changed = digest(certified())
    assert changed != before
    torch.use_deterministic_algorithms(True)
    try:
        assert digest(certified()) not in (before, changed)
    finally:
        torch.use_deterministic_algorithms(False)


def test_triton_is_told_by_its_version_its_assembler_and_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = tmp_path / "triton" / "backends" / "nvidia"
    (vendor / "bin").mkdir(parents=True)
    (vendor / "lib").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    state = {"version": "3.6.0", "ptxas": "12.8.93", "library": b"one"}

    def seen() -> Any:
        program = vendor / "bin" / "ptxas"
        program.unlink(missing_ok=True)
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V{state['ptxas']}'\n")
        program.chmod(0o755)
        (vendor / "lib" / "libdevice.10.bc").write_bytes(state["library"])  # type: ignore[arg-type]
        monkeypatch.setattr(environment, "_version", lambda name: state["version"])
        environment._triton.cache_clear()
        return environment._triton()

    try:
        before = seen()
        assert before["version"] == "3.6.0"
        assert before["ptxas"] == "12.8.93"
        for name, value in (("version", "3.6.1"), ("ptxas", "12.8.94"), ("library", b"two")):
            was, state[name] = state[name], value
            assert seen() != before
            state[name] = was
        assert seen() == before
        (vendor / "lib" / "libdevice.10.bc").unlink()
        environment._triton.cache_clear()
        assert environment._triton()["libdevice_sha256"] is None
    finally:
        monkeypatch.undo()
        forget()


def test_nvrtc_is_told_by_its_version_its_library_and_its_builtins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    pathfinder = pytest.importorskip("cuda.pathfinder")
    library, builtins = tmp_path / "libnvrtc.so.13", tmp_path / "libnvrtc-builtins.so.13.0"
    state: dict[str, Any] = {"version": (0, 13, 0), "library": b"one", "builtins": b"one"}
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: state["version"])
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(library)))

    def seen() -> Any:
        library.write_bytes(state["library"])
        builtins.write_bytes(state["builtins"])
        environment._nvrtc.cache_clear()
        return environment._nvrtc()

    try:
        before = seen()
        assert before["version"] == "13.0"
        assert len(before["builtins_sha256"]) == 1
        for name, value in (("version", (0, 13, 1)), ("library", b"two"), ("builtins", b"two")):
            was, state[name] = state[name], value
            assert seen() != before
            state[name] = was
        assert seen() == before
        state["version"] = (7, 0, 0)
        assert seen() is None
    finally:
        monkeypatch.undo()
        forget()


def test_a_changed_verifier_changes_it_and_a_changed_command_does_not(tmp_path: Path) -> None:
    package = tmp_path / "samebits"
    shutil.copytree(
        Path(environment.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh")
    )

    def seen() -> str:
        environment._verifier.cache_clear()
        return environment._verifier(package)

    try:
        before = seen()
        for name in ("verify.py", "bits.py", "gate.py", "signature.py", "jit/nvrtc.py", "jit/cuda.py", "ops/_op.py"):
            text = (package / name).read_text()
            (package / name).write_text(text + "\n# changed\n")
            assert seen() != before, name
            (package / name).write_text(text)
        for name in ("cli/env.py", "bench/ops.py", "models/z_image.py", "ops/qk_norm.py", "errors.py"):
            assert (package / name).is_file()
            (package / name).write_text("# changed\n")
        assert seen() == before
        (package / "judge.py").write_text("")
        assert seen() != before, "a new file counts until somebody says that it judges nothing"
    finally:
        environment._verifier.cache_clear()


def test_what_judges_nothing_is_there() -> None:
    package = Path(environment.__file__).parent
    gone = [name for name in environment._NOT_JUDGING if not (package / name).exists()]
    assert set(gone) <= {"quant"}
