"""The CUDA side of the jit against an imagined machine: NVRTC is real, the driver is not."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_driver
import pytest
import torch

from samebits import jit
from samebits.errors import CompileError, CompileInCaptureError, KernelArgumentError, LaunchError
from samebits.jit import driver, nvrtc

CUDA = torch.device("cuda", 0)
KERNEL = """
#include "factor.cuh"
extern "C" __global__ void scale(const float* __restrict__ x, float* y, int n, float by) {
  extern __shared__ float shared[];
  if (threadIdx.x < n) y[threadIdx.x] = __fmul_rn(__fmul_rn(x[threadIdx.x], by), FACTOR * WIDTH);
}
extern "C" __global__ void other(float* y) { y[0] = WIDTH; }
"""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    yield fake_driver.install(monkeypatch)
    jit.clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "factor.cuh").write_text("#define FACTOR 2.0f\n")
    (tmp_path / "scale.cu").write_text(KERNEL)
    return tmp_path / "scale.cu"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that NVRTC was asked for, in order."""
    asked: list[str] = []
    compile_source = nvrtc.compile_source

    def recorded(source: Any, name: str, constants: Any, architecture: str, *rest: Any) -> tuple[bytes, str]:
        asked.append(architecture)
        return compile_source(source, name, constants, architecture, *rest)

    monkeypatch.setattr(nvrtc, "compile_source", recorded)
    return asked


def bind(source: Path, device: torch.device = CUDA, shared_bytes: int = 0) -> jit.BoundKernel:
    return jit.compile(source, "scale", {"WIDTH": 4}, device).bind((2, 1, 1), (64, 1, 1), shared_bytes, n=3, by=0.5)


# ---- launching -------------------------------------------------------------------------------------------------------


def test_a_launch_hands_over_stream_configuration_and_slots(cuda: Any, source: Path) -> None:
    bound = bind(source, shared_bytes=256)
    bound(0, 1000, 2000)
    assert cuda.launches == [(0, "legacy", (2, 1, 1), (64, 1, 1), 256, (1000, 2000, 3, 0x3F000000))]


@pytest.mark.parametrize(
    ("handle", "stream"), [(0, "legacy"), (1, "legacy"), (2, "per thread"), (0x7F00, f"stream {0x7F00}")]
)
def test_the_stream_is_torchs_current_one(cuda: Any, source: Path, handle: int, stream: str) -> None:
    bound = bind(source)
    cuda.streams[0] = handle
    bound(0, 1000, 2000)
    bound(0, 1000, 2000)
    assert [launch[1] for launch in cuda.launches] == [stream, stream]
    assert len(cuda.wrapped) == (handle > 2), "a stream is wrapped once"


def test_streams_without_end_do_not_fill_the_memory(cuda: Any, source: Path) -> None:
    bound = bind(source)
    handles = range(3, 3 * driver._MAX_STREAMS)
    for handle in handles:
        cuda.streams[0] = handle
        bound(0, 1000, 2000)
    assert len(driver.runtime()._streams) <= driver._MAX_STREAMS + 2
    assert [launch[1] for launch in cuda.launches] == [
        f"stream {handle}" for handle in range(3, 3 * driver._MAX_STREAMS)
    ]


def test_the_tensors_device_is_current_during_the_launch_only(cuda: Any, source: Path) -> None:
    bound = bind(source, torch.device("cuda", 1))
    cuda.streams[1] = 0x1100
    bound(1, 1000, 2000)
    assert cuda.launches[0][:2] == (1, f"stream {0x1100}")
    assert cuda.device == 0


def test_a_kernel_serves_another_device_of_its_architecture(cuda: Any, source: Path, compiles: list[str]) -> None:
    bound = bind(source)
    bound(1, 1000, 2000)
    assert (cuda.launches[0][0], cuda.loads) == (1, [0, 1])
    with pytest.raises(KernelArgumentError, match="a device of sm_90, got cuda:2, which is sm_80"):
        bound(2, 1000, 2000)
    assert jit.compile(source, "scale", {"WIDTH": 4}, torch.device("cuda", 1)) is bound._kernel  # type: ignore[attr-defined]
    jit.compile(source, "scale", {"WIDTH": 4}, torch.device("cuda", 2))
    assert compiles == ["sm_90", "sm_80"]


def test_without_an_index_the_current_device_is_meant(cuda: Any, source: Path, compiles: list[str]) -> None:
    cuda.device = 2
    jit.compile(source, "scale", {"WIDTH": 4}, torch.device("cuda"))
    assert (compiles, cuda.loads) == (["sm_80"], [2])


def test_a_thread_without_a_context_gets_one(cuda: Any, source: Path) -> None:
    bound = bind(source)
    cuda.has_context = False
    bound(0, 1000, 2000)
    assert cuda.has_context
    assert len(cuda.launches) == 1


# ---- tensor maps, and what only one architecture has -----------------------------------------------------------------

WITH_MAPS = """
struct alignas(64) TensorMap { unsigned long long words[16]; };
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1)
copy(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, float* y, int n, float by) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");  // sm_90a alone has it
  if (threadIdx.x < n) y[threadIdx.x] = __fmul_rn(by, from.words[0] + to.words[0]);
}
"""


@pytest.fixture
def with_maps(tmp_path: Path) -> Path:
    (tmp_path / "copy.cu").write_text(WITH_MAPS)
    return tmp_path / "copy.cu"


def bind_with_maps(source: Path) -> jit.BoundKernel:
    kernel = jit.compile(source, "copy", {}, CUDA, specific=True)
    return kernel.bind((4, 1, 1), (128, 1, 1), 512, n=3, by=0.5)


def test_maps_travel_by_value_beside_pointers_and_scalars(cuda: Any, with_maps: Path, compiles: list[str]) -> None:
    cuda.parameter_sizes = [128, 128, 8, 4, 4]
    bound = bind_with_maps(with_maps)
    maps = [jit.TensorMap(bytes([number]) * 128) for number in (7, 9)]
    assert all(m.address % 64 == 0 for m in maps)
    bound(0, maps[0].address, maps[1].address, 0x7F00)
    ((device, stream, grid, block, shared, arguments),) = cuda.launches
    assert (device, stream, grid, block, shared) == (0, "legacy", (4, 1, 1), (128, 1, 1), 512)
    assert arguments == (
        b"\x07" * 128,
        b"\x09" * 128,
        (0x7F00).to_bytes(8, "little"),
        (3).to_bytes(4, "little"),
        (0x3F000000).to_bytes(4, "little"),
    )
    assert compiles == ["sm_90a"]
    with pytest.raises(KernelArgumentError, match="must be 3 addresses"):
        bound(0, maps[0].address, 0x7F00)


def test_a_launch_with_maps_fails_like_any_other(cuda: Any, with_maps: Path) -> None:
    cuda.parameter_sizes = [128, 128, 8, 4, 4]
    bound, tensor_map = bind_with_maps(with_maps), jit.TensorMap(bytes(128))
    for name in ("CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_INVALID_VALUE"):
        cuda.failures = [name]
        with pytest.raises(LaunchError, match=name) as caught:
            bound(0, tensor_map.address, tensor_map.address, 8)
        assert caught.value.sticky == (name == "CUDA_ERROR_LAUNCH_FAILED")
    cuda.has_context = False
    bound(0, tensor_map.address, tensor_map.address, 8)
    assert len(cuda.launches) == 1


def test_what_only_one_architecture_has_is_compiled_for_it_alone(cuda: Any, with_maps: Path) -> None:
    with pytest.raises(CompileError, match="setmaxnreg"):
        jit.compile(with_maps, "copy", {}, CUDA)


def test_a_map_says_where_a_matrix_lies(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.jit import maps

    matrix = torch.zeros(40, 192, dtype=torch.bfloat16)[:, :128]
    content = maps._encode(matrix.data_ptr(), *matrix.shape, 384, 32)
    words = struct.unpack("<16Q", content)
    assert words[:6] == (matrix.data_ptr(), 128, 40, 384, 64, 32)
    cuda.has_context = False  # a thread whose first work for CUDA this is
    assert maps._encode(matrix.data_ptr(), *matrix.shape, 384, 32) == content
    assert cuda.has_context
    for wrong in (matrix.float(), matrix.t(), matrix[0]):
        with pytest.raises(ValueError, match="expected rows of bfloat16"):
            jit.tensor_map(wrong, 32)
    with pytest.raises(ValueError, match="128 bytes"):
        jit.TensorMap(b"short")
    monkeypatch.setattr(
        driver.runtime().driver, "cuTensorMapEncodeTiled", lambda *_: (cuda.status("CUDA_ERROR_INVALID_VALUE"), None)
    )
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE for 40 x 128"):
        maps._encode(matrix.data_ptr(), *matrix.shape, 384, 32)


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_much_shared_memory_is_allowed_before_the_launch_and_never_less_later(cuda: Any, source: Path) -> None:
    cuda.static_shared = 1024
    bind(source, shared_bytes=(48 << 10) - 1024)
    assert cuda.allowed == []
    bind(source, shared_bytes=100_000)
    bind(source, shared_bytes=60_000)
    bind(source, shared_bytes=200_000)
    assert cuda.allowed == [100_000, 200_000]


def test_too_much_shared_memory_is_a_launch_error_that_can_be_avoided(cuda: Any, source: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"CUDA_ERROR_INVALID_VALUE \(240000 bytes of dynamic shared memory"
    ) as caught:
        bind(source, shared_bytes=240_000)
    assert not caught.value.sticky
    bind(source, shared_bytes=100)(0, 1000, 2000)


# ---- errors of the driver --------------------------------------------------------------------------------------------

STICKY = (
    "ILLEGAL_ADDRESS",
    "MISALIGNED_ADDRESS",
    "LAUNCH_FAILED",
    "ASSERT",
    "ILLEGAL_INSTRUCTION",
    "ECC_UNCORRECTABLE",
)
HEALING = ("LAUNCH_OUT_OF_RESOURCES", "INVALID_VALUE", "OUT_OF_MEMORY", "STREAM_CAPTURE_INVALIDATED", "NOT_READY")


@pytest.mark.parametrize("name", STICKY + HEALING)
def test_errors_of_the_driver_say_whether_the_context_is_lost(cuda: Any, source: Path, name: str) -> None:
    bound = bind(source)
    cuda.failures = [f"CUDA_ERROR_{name}: some words\nof the driver."]
    with pytest.raises(LaunchError) as caught:
        bound(0, 1000, 2000)
    assert str(caught.value) == (f"kernel scale could not be launched: CUDA_ERROR_{name}: some words of the driver.")
    assert caught.value.sticky == (name in STICKY)
    assert isinstance(caught.value.__cause__, fake_driver.DriverError)
    bound(0, 1000, 2000)
    assert len(cuda.launches) == 1


def test_a_cubin_that_the_driver_refuses_is_compiled_again_once(cuda: Any, source: Path, compiles: list[str]) -> None:
    bind(source)
    stored = next(path for path in (source.parent / "cache" / "kernels").iterdir())
    content = stored.read_bytes()
    cuda.bad_cubins = [b"intact, but of another world"]
    from samebits.jit.store import Cache

    assert Cache(stored.parent).put(stored.name, cuda.bad_cubins[0])
    jit.clear()
    bind(source)(0, 1000, 2000)
    assert compiles == ["sm_90", "sm_90"]
    assert stored.read_bytes() == content
    cuda.bad_cubins += cuda.loaded_cubins
    jit.clear()
    with pytest.raises(CompileError, match=r"sm_90 cannot be loaded: CUDA_ERROR_INVALID_IMAGE"):
        bind(source)


@pytest.mark.parametrize("sizes", [[8, 8, 4], [8, 8, 4, 8], [8, 8, 4, 4, 4]])
def test_machine_code_with_other_parameters_is_refused(cuda: Any, source: Path, sizes: list[int]) -> None:
    cuda.parameter_sizes = sizes
    with pytest.raises(KernelArgumentError, match=r"read as parameters of \[8, 8, 4, 4\] bytes, but the machine code"):
        bind(source)
    cuda.parameter_sizes = [8, 8, 4, 4]
    bind(source)(0, 1000, 2000)


# ---- captures --------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_or_loaded_during_a_capture(cuda: Any, source: Path, compiles: list[str]) -> None:
    cuda.capturing = True
    with pytest.raises(CompileInCaptureError, match="kernel scale is not loaded for cuda:0"):
        bind(source)
    assert (compiles, cuda.loaded_cubins, cuda.loads) == ([], [], [])
    cuda.capturing = False
    bind(source)
    jit.clear()
    cuda.loaded_cubins.clear()
    cuda.capturing = True
    with pytest.raises(CompileInCaptureError):
        bind(source)
    assert cuda.loaded_cubins == [], "a cubin on disk is not loaded either"


def test_what_is_loaded_runs_in_a_capture(cuda: Any, source: Path) -> None:
    bound = bind(source)
    cuda.capturing = True
    bound(0, 1000, 2000)
    bind(source)(0, 1000, 2000)
    assert len(cuda.launches) == 2
    with pytest.raises(CompileInCaptureError, match="cuda:1"):
        bound(1, 1000, 2000)
    with pytest.raises(CompileInCaptureError, match="kernel other"):
        jit.compile(source, "other", {"WIDTH": 4}, CUDA)
    assert len(cuda.launches) == 2


# ---- caches ----------------------------------------------------------------------------------------------------------


def test_the_same_kernel_is_compiled_once(cuda: Any, source: Path, compiles: list[str]) -> None:
    kernel = jit.compile(source, "scale", {"WIDTH": 4}, CUDA)
    assert jit.compile(source, "scale", {"WIDTH": 4}, CUDA) is kernel
    jit.compile(source, "other", {"WIDTH": 4}, CUDA)
    assert compiles == ["sm_90"], "all kernels of a source are one cubin"
    jit.clear()
    jit.compile(source, "scale", {"WIDTH": 4}, CUDA)
    assert compiles == ["sm_90"], "the second process finds it on disk"


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "the source": lambda path, patch: path.write_text(KERNEL + "\n"),
    "an included file": lambda path, patch: path.with_name("factor.cuh").write_text("#define FACTOR 3.0f\n"),
    "NVRTC": lambda path, patch: patch.setattr(nvrtc, "toolchain_identity", lambda: "nvrtc 99.9"),
    "a flag": lambda path, patch: patch.setattr(nvrtc, "FLAGS", (*nvrtc.FLAGS, "--ftz=false")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_kernel_is_compiled_after_a_change_of(
    cuda: Any, source: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    jit.compile(source, "scale", {"WIDTH": 4}, CUDA)
    CHANGES[change](source, monkeypatch)
    jit.clear()
    jit.compile(source, "scale", {"WIDTH": 4}, CUDA)
    assert len(compiles) == 2


def test_another_constant_is_another_kernel(cuda: Any, source: Path, compiles: list[str]) -> None:
    kernels = {jit.compile(source, "scale", {"WIDTH": width}, CUDA) for width in (4, 8, 4)}
    assert len(kernels) == len(compiles) == 2


@pytest.mark.parametrize("damage", [b"", b"random", None])
def test_a_damaged_cache_only_costs_a_compilation(
    cuda: Any, source: Path, compiles: list[str], damage: bytes | None
) -> None:
    bind(source)
    (stored,) = (source.parent / "cache" / "kernels").iterdir()
    content = stored.read_bytes()
    stored.write_bytes(content[: len(content) // 2] if damage is None else damage)
    jit.clear()
    bind(source)(0, 1000, 2000)
    assert compiles == ["sm_90", "sm_90"]
    assert stored.read_bytes() == content


@pytest.mark.parametrize("folder", ["/proc/no/such", "/dev/null/x"])
def test_without_a_usable_cache_folder_kernels_still_compile(
    cuda: Any, source: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", folder)
    bind(source)(0, 1000, 2000)
    jit.clear()
    bind(source)(0, 1000, 2000)
    assert compiles == ["sm_90", "sm_90"]


def test_threads_that_want_one_kernel_compile_it_once(cuda: Any, source: Path, compiles: list[str]) -> None:
    kernels: list[Any] = []
    barrier = threading.Barrier(8)

    def want() -> None:
        barrier.wait()
        kernels.append(jit.compile(source, "scale", {"WIDTH": 4}, CUDA))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len(set(kernels)) == len(compiles) == 1
    assert cuda.loads == [0]


# ---- NVRTC -----------------------------------------------------------------------------------------------------------


def test_threads_that_want_the_runtime_first_get_one_that_one_of_them_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing cuda.core twice at once: the second finds it half imported, and takes it for broken."""
    made = []

    class Slow:
        def __init__(self) -> None:
            made.append(self)
            time.sleep(0.05)

    monkeypatch.setattr(driver, "Runtime", Slow)
    driver._runtime.cache_clear()
    try:
        start = threading.Barrier(6)
        found: list[Any] = []

        def want() -> None:
            start.wait()
            found.append(driver.runtime())

        threads = [threading.Thread(target=want) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        driver._runtime.cache_clear()
    assert len(made) == 1
    assert found == made * 6


def test_a_source_that_does_not_compile_shows_nvrtcs_words(cuda: Any, source: Path) -> None:
    source.write_text('extern "C" __global__ void scale(float* y) { y[0] = no_such_name; }\n')
    with pytest.raises(CompileError, match='identifier "no_such_name" is undefined') as caught:
        jit.compile(source, "scale", {}, CUDA)
    assert (caught.value.kernel, caught.value.target) == ("scale", "sm_90")
    assert "scale.cu(1): error" in str(caught.value)


def test_the_log_never_reaches_memory_that_python_shares(source: Path) -> None:
    """NVRTC's log of a clean compilation is one byte, and one-byte bytes objects are shared by the whole process."""
    jit.compile_to_cubin(source, "scale", {"WIDTH": 4}, "sm_90")
    assert bytes([32]) == b" "
    assert bytes([0]) == b"\0"


def test_the_working_directory_is_not_searched_for_headers(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled must be what was hashed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "stray.h").write_text("#define STRAY 1\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    source.write_text('#include <stray.h>\nextern "C" __global__ void scale(float* y) { y[0] = STRAY; }\n')
    with pytest.raises(CompileError, match=r'cannot open source file "stray\.h"'):
        jit.compile_to_ptx(source, "scale", {}, "sm_90")


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((9, 0), "sm_90"), ((12, 0), "sm_120")]
)
def test_a_device_gets_its_own_architecture(capability: tuple[int, int], expected: str) -> None:
    assert nvrtc.architecture_for(*capability) == expected


def test_an_unknown_minor_version_gets_the_newest_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "supported_architectures", lambda: (75, 80, 86, 90, 100, 120))
    assert nvrtc.architecture_for(10, 3) == "sm_100"
    assert nvrtc.architecture_for(8, 9) == "sm_86"
    with pytest.raises(CompileError, match=r"compute capability 13\.0: it knows 7\.5, 8\.0, 8\.6, 9\.0, 10\.0, 12\.0"):
        nvrtc.architecture_for(13, 0)


def test_headers_are_found_in_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = nvrtc.include_folder()
    include = tmp_path / "toolkit" / "include"
    include.mkdir(parents=True)
    for name in nvrtc.HEADERS:
        (include / name).symlink_to(real / name)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda scheme: str(tmp_path / "nothing"))
    monkeypatch.setattr(nvrtc, "_SYSTEM_TOOLKIT", str(tmp_path / "no toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    nvrtc.include_folder.cache_clear()
    try:
        assert nvrtc.include_folder() == include
        nvrtc.include_folder.cache_clear()
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
        with pytest.raises(CompileError, match=r"the CUDA headers .* were not found\. Looked in: .*gone/include"):
            nvrtc.include_folder()
    finally:
        nvrtc.include_folder.cache_clear()


# ---- whether anything can run ----------------------------------------------------------------------------------------


def test_a_usable_device_has_no_reason(cuda: Any) -> None:
    assert jit.unavailable(torch.device("cuda")) is None
    assert jit.unavailable(torch.device("cuda", 2)) is None


def test_every_reason_is_a_sentence(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: str = "cuda:0", host: bool = False) -> str:
        jit.clear()
        return str(jit.unavailable(torch.device(device), host))

    assert reason("meta") == "there are kernels for CUDA devices, and the tensors are on meta"
    assert reason("cpu").startswith("the tensors are on the CPU, where kernels run only when")
    assert reason("cuda:7") == "there is no cuda:7: torch sees 3 CUDA devices"
    cuda.capabilities[0] = (7, 5)
    assert reason() == "an imagined GPU has compute capability 7.5; the kernels need 8.0 or newer"
    cuda.capabilities[0] = (99, 0)
    assert "cannot compile for compute capability 99.0" in reason()
    cuda.capabilities[0] = (12, 0)
    assert reason() == "None"
    with monkeypatch.context() as patch:
        patch.setattr("sys.byteorder", "big")
        assert "little-endian" in reason()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "runtime", lambda: driver.Runtime())
        patch.setitem(sys.modules, "cuda.core", None)
        assert "cuda-core cannot be used: " in reason()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "runtime", lambda: driver.Runtime())
        patch.delattr("cuda.core.launch")
        assert "no attribute 'launch'" in reason()
    with monkeypatch.context() as patch:
        patch.setattr("cuda.bindings.nvrtc.nvrtcVersion", lambda: (_ for _ in ()).throw(RuntimeError("no libnvrtc")))
        nvrtc.bindings.cache_clear()
        nvrtc.include_folder.cache_clear()
        nvrtc.version.cache_clear()
        assert "NVRTC, the CUDA run-time compiler, cannot be loaded: no libnvrtc" in reason()
    cuda.capabilities.clear()
    assert "no usable CUDA device" in reason()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert reason().startswith("this is a CPU build of torch")


def test_the_answer_is_kept(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.unavailable(CUDA) is None
    monkeypatch.setattr(driver, "unavailable", lambda device: pytest.fail("asked again"))
    assert jit.unavailable(CUDA) is None


def test_another_kind_of_device_cannot_be_compiled_for(source: Path) -> None:
    with pytest.raises(CompileError, match="for CUDA devices and for the CPU, not for meta"):
        jit.compile(source, "scale", {"WIDTH": 4}, torch.device("meta"))


def test_importing_the_jit_loads_no_toolchain() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # some builds of torch import a part of cuda themselves
        "import samebits.jit\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert 'samebits' in new and 'cuda' not in new, new\n"
        "assert 'samebits.host' not in sys.modules and 'subprocess' not in new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONWARNINGS": "error"})
