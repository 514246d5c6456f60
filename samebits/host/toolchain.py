"""A kernel's own source to a shared library for this machine's processor, with the user's C++ compiler.

Contraction is off and the shim spells every rounding, so the library's arithmetic is the GPU's.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from samebits.errors import CompileError

SHIM = Path(__file__).with_name("shim")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",  # one rounding for each operation that the source spells
    "-fno-strict-aliasing",  # kernels read halves through wider types
    "-fPIC",
    "-fvisibility=hidden",  # two libraries in one process must not share the shim's state
    "-w",
)
_LINK = ("-shared", "-pthread", "-Wl,-z,defs")
MAX_SHARED_BYTES = 227 << 10
"""The most dynamic shared memory that any supported GPU gives a block."""
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 300
_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:alignas|__align__)\s*\(\s*\w+\s*\)\s*)?([\w:]+(?:\s+[\w:]+)*)\s+(\w+)\s*\[\s*\]"
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this machine.

    Attributes
    ----------
    path : str
    identity : str
        The first line of ``--version`` and the machine's processor family: part of every cache key.
    """

    path: str
    identity: str


def unavailable() -> str | None:
    """Why kernels cannot be compiled for the CPU here, as a sentence, or ``None``. Starts no compiler."""
    if platform.system() != "Linux":
        return f"the host toolchain needs Linux, and this is {platform.system()}"
    wanted = os.environ.get("CXX")
    if _which() is not None:
        return None
    if wanted:
        return f"the C++ compiler that CXX names, {wanted!r}, is not on the PATH"
    return (
        f"no C++ compiler was found (looked for {', '.join(_COMPILERS)}); "
        "install one, for example with `apt-get install g++`, or set CXX"
    )


def find_compiler() -> Compiler:
    """The compiler that ``CXX`` names, else the first of g++, clang++ and c++ on the PATH.

    Raises
    ------
    CompileError
        There is none, or it does not run.
    """
    path = _which()
    if path is None:
        raise CompileError(f"{unavailable()}.")
    return _ask(path)


def _which() -> str | None:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def _ask(path: str) -> Compiler:
    version = _run([path, "--version"], "its version").stdout.partition("\n")[0].strip()
    return Compiler(path, f"{version} for {platform.system()} {platform.machine()}")


@cache
def shim_text() -> str:
    """All of the shim's text, for cache keys."""
    files = sorted(path for path in SHIM.iterdir() if path.suffix in (".h", ".cpp"))
    return "".join(f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in files)


@cache
def _runtime(compiler: Compiler, flags: tuple[str, ...]) -> bytes:
    """The part of the shim that no kernel changes, as an object file. Compiled once per process."""
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        compiled = Path(folder, "runtime.o")
        command = [compiler.path, *flags, "-c", f"-I{SHIM}", str(SHIM / "runtime.cpp"), "-o", str(compiled)]
        _run(command, "the shim's runtime")
        return compiled.read_bytes()


def build(
    kernels: Sequence[str], main: str, texts: Mapping[str, str], defines: Sequence[str], flags: Sequence[str] = FLAGS
) -> bytes:
    """Compile all kernels of one source.

    Parameters
    ----------
    kernels : sequence of str
        Their names.
    main : str
        Which of ``texts`` holds them.
    texts : mapping of str to str
        Every file of the source, by the name that ``#include "..."`` uses.
    defines : sequence of str
        ``NAME=VALUE`` each.
    flags : sequence of str
        Only a negative control passes others.

    Returns
    -------
    bytes
        A shared library; see :class:`samebits.host.library.Library`.

    Raises
    ------
    CompileError
        There is no compiler, or the source does not compile; its output is in the message.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        for file_name, text in texts.items():
            Path(folder, file_name).write_text(text, encoding="utf-8")
        wrapper = Path(folder, "samebits_wrapper.cpp")
        wrapper.write_text(_wrapper(kernels, main, texts, defines), encoding="utf-8")
        runtime = Path(folder, "samebits_runtime.o")
        runtime.write_bytes(_runtime(compiler, tuple(flags)))
        library = Path(folder, "samebits_kernels.so")
        includes = [f"-I{SHIM}", f"-I{folder}"]
        command = [compiler.path, *flags, *_LINK, *includes, str(wrapper), str(runtime), "-o", str(library)]
        _run(command, main, ", ".join(kernels))
        return library.read_bytes()


def _run(command: list[str], what: str, kernel: str = "") -> subprocess.CompletedProcess[str]:
    # Messages are matched and printed: they should not depend on the user's language.
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the C++ compiler {command[0]} could not be run for {what}: {error}.") from error
    if result.returncode:
        log = (result.stderr or result.stdout).strip() or f"nothing; its exit status was {result.returncode}"
        raise CompileError(kernel=kernel or what, target=f"this CPU with {command[0]}", log=log[-8000:])
    return result


def _wrapper(kernels: Sequence[str], main: str, texts: Mapping[str, str], defines: Sequence[str]) -> str:
    """The translation unit: the shim, the constants, the unchanged source, the typed entry points."""
    found = {match[1]: match[0] for text in texts.values() for match in _SHARED.findall(text)}
    if len(found) > 1:
        raise CompileError(
            f"{main} names its dynamic shared memory {' and '.join(sorted(found))}; the host "
            "toolchain knows one name for it."
        )
    lines = ['#include "prelude.h"']
    lines += [f"#define {define.replace('=', ' ', 1)}" for define in defines]
    # A kernel may stand under an #if. Where it is not compiled, its name means the outer scope's.
    lines.append("namespace samebits_unit {")
    lines += [f"constexpr samebits::Absent {kernel};" for kernel in kernels]
    lines += ["namespace kernels {", f'#include "{main}"']
    memory = "nullptr, 0"
    for shared, element in found.items():
        room = f"({MAX_SHARED_BYTES} + samebits::shared_guard_bytes) / sizeof({element}) + 1"
        lines.append(f"alignas(128) thread_local {element} {shared}[{room}];")
        memory = f"reinterpret_cast<unsigned char*>({shared}), sizeof {shared}"
    lines.append(f"static samebits::DynamicShared samebits_shared() {{ return {{{memory}}}; }}")
    lines += [_ENTRY.replace("KERNEL", kernel) for kernel in kernels]
    lines.append("}}")
    return "\n".join(lines) + "\n"


_ENTRY = """\
extern "C" __attribute__((visibility("default"))) const char* samebits_parameters_KERNEL() {
  return samebits::describe_parameters(KERNEL);
}

extern "C" __attribute__((visibility("default"))) int samebits_launch_KERNEL(
    const uint32_t* sizes, uint32_t shared_bytes, const uint64_t* slots, uint32_t workers, uint64_t order,
    char* message, uint64_t message_bytes) {
  const samebits::Launch launch{{sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, shared_bytes, workers,
                                order, samebits_shared, nullptr, nullptr};
  return samebits::launch_typed(KERNEL, launch, slots, message, message_bytes);
}
"""
