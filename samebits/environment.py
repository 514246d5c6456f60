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

_PACKAGES = ("diffusers", "transformers", "accelerate", "safetensors", "peft", "numpy", "cuda-core", "cuda-bindings")

_VARIABLES = (
    # matrix products and convolutions
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_LINALG_PREFER_CUSOLVER",
    "TORCH_CUDNN_V8_API_DISABLED",
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
)


def fingerprint(device: int | None = None) -> dict[str, Any]:
    """Describe the machine and the process as far as they decide bits.

    Parameters
    ----------
    device
        Index of the CUDA device to describe; ``None`` is the current one. Without CUDA it is not looked at.

    Returns
    -------
    dict
        ``gpu`` (``None`` without one), ``driver``, ``cpu``, ``python``, ``platform``, ``torch``, ``triton`` (``None``
        if not installed), ``nvrtc``, ``packages``, ``flags`` (switches of torch that change numerics) and ``variables``
        (those environment variables, of a fixed list, that are set). The same process in the same state gives the
        same dictionary.
    """
    cudnn: Any = torch.backends.cudnn
    return {
        "gpu": _gpu(device),
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
            "cudnn": cudnn.version() if torch.cuda.is_available() else None,
        },
        "triton": _triton(),
        "nvrtc": _nvrtc(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "flags": _flags(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


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
    libdevice = vendor / "lib" / "libdevice.10.bc"
    try:
        library = hashlib.sha256(libdevice.read_bytes()).hexdigest()
    except OSError:
        library = None
    return {"version": version, "ptxas": _ptxas(vendor / "bin" / "ptxas"), "libdevice_sha256": library}


def _ptxas(program: Path) -> str | None:
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


@lru_cache(maxsize=1)
def _nvrtc() -> str | None:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception:
        # Not installed, or installed without its library: cuda.bindings raises several unrelated classes for that.
        return None
    return f"{major}.{minor}" if int(status) == 0 else None


@lru_cache(maxsize=32)
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flags() -> dict[str, Any]:
    # Through Any: torch types these switches in part only.
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_allow_tf32": _ask(lambda: cuda.matmul.allow_tf32),
        "matmul_fp16_reduced_precision": _ask(lambda: cuda.matmul.allow_fp16_reduced_precision_reduction),
        "matmul_bf16_reduced_precision": _ask(lambda: cuda.matmul.allow_bf16_reduced_precision_reduction),
        "matmul_fp16_accumulation": _ask(lambda: cuda.matmul.allow_fp16_accumulation),
        "blas": _ask(lambda: cuda.preferred_blas_library().name),
        "cudnn_enabled": cudnn.enabled,
        "cudnn_allow_tf32": _ask(lambda: cudnn.allow_tf32),
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "sdp_flash": cuda.flash_sdp_enabled(),
        "sdp_mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "sdp_math": cuda.math_sdp_enabled(),
        "sdp_cudnn": cuda.cudnn_sdp_enabled(),
        "mkldnn_enabled": torch.backends.mkldnn.enabled,
        # There is no getter for it: the smallest normal number, divided, shows it.
        "flush_denormal": (torch.tensor(1e-38, dtype=torch.float32, device="cpu") * 0.1).item() == 0.0,
    }


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer, or ``None`` where this torch has no such flag or two of its flags contradict each other."""
    try:
        return question()
    except (AttributeError, RuntimeError):
        return None
