"""The fingerprint: everything about this machine and process that can change a bit of a result. A leaf.

It works without a GPU, without triton, without a driver: what is not there is ``None``. All of it is JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "peft",
    "numpy",
    "cuda-core",
    "cuda-bindings",
    "cuda-pathfinder",
    # The compiler of our kernels, and the headers that it reads.
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
)

_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    # attention
    "DIFFUSERS_ATTN_BACKEND",
    # the arithmetic of a CPU
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    # compilers of kernels
    "TRITON_INTERPRET",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_PTXAS_PATH",
    "TRITON_LIBDEVICE_PATH",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_HOME",
    "CUDA_PATH",
)
_PREFIXES = ("CUBLAS_", "CUBLASLT_", "CUDNN_", "PYTORCH_", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_")
"""Families of variables of which new releases bring new ones: every one that is set is kept."""
_HARMLESS = frozenset({"PYTORCH_KERNEL_CACHE_PATH", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTORCH_VERSION"})
"""Members of those families that decide no bit, and that libraries and container images set by themselves."""

_CPU_ALONE: dict[str, frozenset[str]] = {
    "cpu": frozenset({"capability", "threads"}),
    "flags": frozenset({"flush_denormal", "mkldnn_enabled"}),
    "variables": frozenset(
        {
            "ATEN_CPU_CAPABILITY",
            "MKL_CBWR",
            "MKL_NUM_THREADS",
            "OMP_NUM_THREADS",
            "ONEDNN_DEFAULT_FPMATH_MODE",
            "ONEDNN_MAX_CPU_ISA",
        }
    ),
}
"""What :func:`certified` leaves out."""

_NOT_JUDGING = frozenset(
    {
        "__init__.py",
        "__main__.py",
        "apply.py",
        "bench",
        "certificate",
        "checkpoint.py",
        "cli",
        "environment.py",
        "errors.py",
        "graphs",
        "host",
        "loading",
        "models",
        "ops",
        "patch.py",
        "proof",
        "quant",
        "settings.py",
        "tiny",
    }
)
"""What of this package does not decide how a kernel is compiled, launched and compared. An op's own files are not in
it either: each verdict names the hash of its own op's sources. What is new counts until it is named here."""


def fingerprint(device: int | None = None) -> dict[str, Any]:
    """Describe the machine and the process as far as they decide bits.

    Parameters
    ----------
    device
        Index of the CUDA device to describe; ``None`` is the current one. Without CUDA it is not looked at.

    Returns
    -------
    dict
        ``verifier`` (those parts of samebits that judge a kernel), ``gpu`` (``None`` without one), ``gpus`` (name and
        uuid of every GPU that this process sees, in order: without it ``cuda:1`` means nothing), ``driver``, ``cpu``,
        ``python``, ``platform``, ``torch``, ``triton`` (``None`` if not installed), ``nvrtc`` (likewise), ``packages``,
        ``flags`` (switches of torch that change numerics) and ``variables`` (those environment variables that do, as
        far as they are set). The same process in the same state gives the same dictionary.

    Notes
    -----
    The first call takes some tenths of a second, because it hashes NVRTC's library; later ones take 0.1 ms.
    """
    cudnn: Any = torch.backends.cudnn
    return {
        "verifier": {"version": _version("samebits"), "sha256": _verifier()},
        "gpu": _gpu(device),
        "gpus": _gpus(),
        "driver": _driver() if torch.cuda.is_available() else None,
        "cpu": {
            "machine": platform.machine(),
            "model": _cpu_model(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": str(torch.__version__),
            "git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "build_sha256": _build(),
            "cudnn": cudnn.version() if torch.cuda.is_available() else None,
        },
        "triton": _triton(),
        "nvrtc": _nvrtc(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "flags": _flags(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _decides(name)},
    }


def certified(device: int | None = None) -> dict[str, Any]:
    """Return the fingerprint without what decides results of a CPU alone: what a verdict about a GPU's kernel rests on.

    A launcher of several processes sets the number of CPU threads, for one; a server started by it would not find what
    was verified before. Arguments are those of :func:`fingerprint`.
    """
    found = fingerprint(device)
    for group, names in _CPU_ALONE.items():
        found[group] = {name: value for name, value in found[group].items() if name not in names}
    return found


def digest(environment: dict[str, Any]) -> str:
    """Return the SHA-256 of a fingerprint's canonical JSON, in hexadecimal.

    Raises
    ------
    ValueError
        A number in it is NaN or infinite: JSON has no word for those.
    """
    text = json.dumps(environment, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _gpu(device: int | None) -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        # A slice of a GPU has fewer SMs, so other trees in long reductions; CUDA says it in the name.
        "mig": " MIG " in properties.name,
    }


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{properties.name} {getattr(properties, 'uuid', '')}".rstrip() for properties in found]


def _decides(variable: str) -> bool:
    return variable in _VARIABLES or (variable.startswith(_PREFIXES) and variable not in _HARMLESS)


@lru_cache(maxsize=1)
def _build() -> str:
    """Return a hash of what torch says about how it was built: compilers, architectures, libraries, options."""
    return hashlib.sha256(torch.__config__.show().encode()).hexdigest()


@lru_cache(maxsize=1)
def _verifier(package: Path = Path(__file__).parent) -> str:
    """Return a hash over the files of this package that decide how a kernel is compiled, launched and compared."""
    hasher = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.h")]):
        name = path.relative_to(package).as_posix()
        if name.split("/")[0] not in _NOT_JUDGING or name == "ops/_op.py":
            text = path.read_bytes()
            hasher.update(f"{name} {len(text)}\n".encode() + text)
    return hasher.hexdigest()


@lru_cache(maxsize=1)
def _driver() -> str | None:
    """Return the version of the NVIDIA driver, such as ``580.95.05``: from NVML, else from the kernel module."""
    for library in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            nvml = ctypes.CDLL(library)
            text = ctypes.create_string_buffer(96)
            if nvml.nvmlInit_v2() == 0:
                status = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
                nvml.nvmlShutdown()
                if status == 0:
                    return text.value.decode()
        except (OSError, AttributeError):
            continue
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", line)
    return found.group() if found else None


@lru_cache(maxsize=1)
def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


@lru_cache(maxsize=1)
def _triton() -> dict[str, Any] | None:
    """Describe triton without importing it: its version, its assembler and its math library decide bits."""
    version = _version("triton")
    spec = importlib.util.find_spec("triton") if version else None
    if spec is None or not spec.submodule_search_locations:
        return None
    vendor = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia"
    return {
        "version": version,
        "ptxas": _ptxas(vendor / "bin" / "ptxas"),
        "libdevice_sha256": _hash(vendor / "lib" / "libdevice.10.bc"),
    }


def _hash(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _ptxas(program: Path) -> str | None:
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


@lru_cache(maxsize=1)
def _nvrtc() -> dict[str, Any] | None:
    """Describe the compiler of our kernels: its version, its library and the built-in functions that it links in."""
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib

        status, major, minor = nvrtc.nvrtcVersion()
        if int(status) != 0:
            return None
        path = Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    except Exception:
        # Not installed, or installed without its library: cuda.bindings raises several unrelated classes for that.
        return None
    builtins = sorted({found.resolve() for found in path.parent.glob("*nvrtc-builtins*") if found.is_file()})
    return {
        "version": f"{major}.{minor}",
        "library_sha256": _hash(path),
        "builtins_sha256": [_hash(found) for found in builtins],
    }


@lru_cache(maxsize=64)
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flags() -> dict[str, Any]:
    # Through Any: torch types these switches in part only.
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": _ask(torch.get_float32_matmul_precision),
        "matmul_allow_tf32": _ask(lambda: cuda.matmul.allow_tf32),
        "matmul_fp16_reduced_precision": _ask(lambda: cuda.matmul.allow_fp16_reduced_precision_reduction),
        "matmul_bf16_reduced_precision": _ask(lambda: cuda.matmul.allow_bf16_reduced_precision_reduction),
        "matmul_fp16_accumulation": _ask(lambda: cuda.matmul.allow_fp16_accumulation),
        "matmul_fp32_precision": _ask(lambda: _in_force(cuda.matmul, backends)),
        "blas": _ask(lambda: cuda.preferred_blas_library().name),
        "linalg": _ask(lambda: cuda.preferred_linalg_library().name),
        "cudnn_enabled": cudnn.enabled,
        "cudnn_allow_tf32": _ask(lambda: cudnn.allow_tf32),
        "cudnn_conv_fp32_precision": _ask(lambda: _in_force(cudnn.conv, cudnn, backends)),
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "deterministic_fill": _ask(lambda: deterministic.fill_uninitialized_memory),
        "sdp_reduced_precision": _ask(lambda: cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "sdp_flash": cuda.flash_sdp_enabled(),
        "sdp_mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "sdp_math": cuda.math_sdp_enabled(),
        "sdp_cudnn": cuda.cudnn_sdp_enabled(),
        "mkldnn_enabled": torch.backends.mkldnn.enabled,
        # There is no getter for it: the smallest normal number, divided, shows it.
        "flush_denormal": (torch.tensor(1e-38, dtype=torch.float32, device="cpu") * 0.1).item() == 0.0,
    }


def _in_force(*switches: Any) -> str:
    """Return the first precision that is set, from the particular to the general: TF32 is off where none is."""
    found = (switch.fp32_precision for switch in switches)
    return next((str(precision) for precision in found if precision != "none"), "ieee")


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer, or ``None`` where this torch has no such flag or two of its flags contradict each other."""
    try:
        return question()
    except (AttributeError, RuntimeError):
        return None
