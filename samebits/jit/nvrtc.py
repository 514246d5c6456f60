"""CUDA C++ to PTX and cubin through NVRTC. Needs no driver, no GPU and no nvcc.

The flags are part of every result's bits: no contraction that the source does not spell as ``__fmaf_rn``, IEEE
division and square root, subnormals kept. They are ATen's own, except that nvcc contracts within one of ATen's
kernels; where it does, our source says so.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from samebits.errors import CompileError
from samebits.jit.source import Source, define_options

FLAGS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--no-source-include")
HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp")
"""The toolkit's headers that kernels include; their text decides bits as much as ours."""
_WHEEL_FOLDERS = ("nvidia/cu13/include", "nvidia/cuda_runtime/include")
_SYSTEM_TOOLKIT = "/usr/local/cuda"
_INSTALL = (
    "CUDA builds of torch bring it; elsewhere `pip install 'samebits[cu13]'` or `[cu12]` does "
    "(nvidia-cuda-nvrtc and nvidia-cuda-runtime of the CUDA major version that cuda-bindings has)."
)


@cache
def bindings() -> Any:
    """The module ``cuda.bindings.nvrtc``, with NVRTC loaded.

    Raises
    ------
    CompileError
        cuda-bindings or NVRTC is not installed, or not usable.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        # cuda-pathfinder, the dynamic loader and Python's import machinery each raise their own class.
        cause = " ".join(str(error).split())
        raise CompileError(f"NVRTC, the CUDA run-time compiler, cannot be loaded: {cause}. {_INSTALL}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not answer: {status!r} for its version. {_INSTALL}")
    if (major, minor) < (12, 8):
        raise CompileError(f"NVRTC {major}.{minor} is too old: expected 12.8 or newer. {_INSTALL}")
    return nvrtc


@cache
def version() -> str:
    """NVRTC's version, for example ``13.0``."""
    _, major, minor = bindings().nvrtcVersion()
    return f"{major}.{minor}"


@cache
def supported_architectures() -> tuple[int, ...]:
    """The compute capabilities that NVRTC compiles for, as ``10 * major + minor``, ascending."""
    _, architectures = bindings().nvrtcGetSupportedArchs()
    return tuple(sorted(architectures))


def architecture_for(major: int, minor: int) -> str:
    """The ``sm_XX`` whose machine code runs on this compute capability: itself, or an older one of its major.

    Raises
    ------
    CompileError
        NVRTC knows none.
    """
    fitting = [number for number in supported_architectures() if number // 10 == major and number % 10 <= minor]
    if not fitting:
        known = ", ".join(f"{number // 10}.{number % 10}" for number in supported_architectures())
        raise CompileError(
            f"NVRTC {version()} cannot compile for compute capability {major}.{minor}: it knows {known}. "
            "Install a newer CUDA build of torch."
        )
    return f"sm_{fitting[-1]}"


@cache
def include_folder() -> Path:
    """The folder of ``cuda_bf16.h``: where cuda-pathfinder, the wheels or ``CUDA_HOME`` have it.

    Raises
    ------
    CompileError
        It is nowhere.
    """
    candidates: list[Path] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
        if found:
            candidates.append(Path(found))
    except Exception:  # an old cuda-pathfinder lacks the function, a broken toolkit makes it raise
        candidates.clear()
    for scheme in ("purelib", "platlib"):
        # The wheel of NVRTC's own major version first: headers of another one may use what it does not know.
        folders = _WHEEL_FOLDERS if int(version().split(".")[0]) >= 13 else _WHEEL_FOLDERS[::-1]
        candidates.extend(Path(sysconfig.get_path(scheme)) / folder for folder in folders)
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _SYSTEM_TOOLKIT):
        if toolkit:
            candidates.append(Path(toolkit) / "include")
    for candidate in candidates:
        if all((candidate / name).is_file() for name in HEADERS):
            return candidate
    looked = ", ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    raise CompileError(f"the CUDA headers ({', '.join(HEADERS)}) were not found. Looked in: {looked}. {_INSTALL}")


@cache
def toolchain_identity() -> str:
    """NVRTC's version and a digest of the toolkit's headers: what a cached cubin depends on besides our source."""
    hasher = hashlib.sha256()
    for name in HEADERS:
        hasher.update((include_folder() / name).read_bytes())
    return f"nvrtc {version()} headers {hasher.hexdigest()[:16]}"


def compile_source(
    source: Source, name: str, constants: Mapping[str, int | str], architecture: str, flags: tuple[str, ...] = FLAGS
) -> tuple[bytes, str]:
    """Compile one source for one architecture.

    Parameters
    ----------
    source : Source
    name : str
        The kernel, for the message of an error; every kernel of the file is compiled.
    constants : mapping of str to int or str
        Become ``-DNAME=VALUE``.
    architecture : str
        A real one: ``sm_90``.
    flags : tuple of str
        Only a negative control passes others.

    Returns
    -------
    cubin : bytes
    ptx : str
        What the cubin was assembled from.

    Raises
    ------
    CompileError
        NVRTC or the headers are missing, or the source does not compile; the log is in the message.
    """
    nvrtc = bindings()
    options = [
        f"--gpu-architecture={architecture}",
        *flags,
        f"--include-path={include_folder()}",
        *define_options(constants),
    ]
    texts = [text.encode() for text in source.headers.values()]
    names = [header.encode() for header in source.headers]

    def check(status: Any, step: str) -> None:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(kernel=name, target=architecture, log=f"{step}: {status.name}\n{log()}")

    def log() -> str:
        return fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace").rstrip("\0\n ")

    def fetch(size_of: Any, read: Any) -> bytes:
        status, size = size_of(program)
        buffer = bytearray(size)  # never bytes: NVRTC writes into it, and Python shares equal short bytes
        (outcome,) = read(program, buffer) if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else (status,)
        if outcome != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(kernel=name, target=architecture, log=f"no result: {outcome.name}")
        return bytes(buffer)

    status, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(), source.path.name.encode(), len(texts), texts, names
    )
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(kernel=name, target=architecture, log=f"nvrtcCreateProgram: {status.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        check(status, "nvrtcCompileProgram")
        cubin = fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        ptx = fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, ptx
