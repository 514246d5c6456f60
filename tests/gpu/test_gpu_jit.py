"""The jit on a real GPU: arguments, streams, threads and captures; and the shim's arithmetic against the GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits import jit
from samebits.errors import CompileInCaptureError, LaunchError

pytestmark = pytest.mark.gpu

SOURCES = Path(__file__).parents[1] / "host" / "sources"
PROBE = SOURCES / "shim_probe.cu"
CPU = torch.device("cpu")
MISSING = jit.unavailable(CPU, host=True)
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def launch(
    name: str,
    *tensors: torch.Tensor,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared_bytes: int = 0,
    **scalars: Any,
) -> None:
    device = tensors[0].device
    kernel = jit.compile(PROBE, name, {}, device)
    kernel.bind(grid, block, shared_bytes, **scalars)(device.index or 0, *(tensor.data_ptr() for tensor in tensors))


# ---- the shim and the GPU --------------------------------------------------------------------------------------------


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns alike, with many zeros, infinities, NaNs and ends of the range, and many usual numbers."""
    generator = torch.Generator().manual_seed(41)
    bits = torch.randint(0, 1 << 32, shape, generator=generator)
    special = torch.tensor([0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x7F800001])
    special = torch.cat([special, special | 1 << 31, special << 3])
    chosen = special[torch.randint(0, len(special), shape, generator=generator)]
    bits = torch.where(torch.rand(shape, generator=generator) < 0.2, chosen, bits)
    usual = torch.randn(shape, generator=generator).view(torch.int32).long()
    bits = torch.where(torch.rand(shape, generator=generator) < 0.4, usual, bits)
    return bits.to(torch.int32).view(dtype)


def both(name: str, inputs: list[torch.Tensor], shapes: list[tuple[tuple[int, ...], torch.dtype]], n: int) -> None:
    """Run a kernel on the GPU and behind the shim; every output must have the same bits."""
    results = []
    for device in (CPU, torch.device("cuda", torch.cuda.current_device())):
        outputs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        moved = [tensor.to(device) for tensor in inputs]
        launch(name, *moved, *outputs, grid=(-(-n // 256), 1, 1), block=(256, 1, 1), n=n)
        results.append([output.cpu() for output in outputs])
    for number, (host, gpu) in enumerate(zip(*results, strict=True)):
        bits = torch.int16 if host.element_size() == 2 else torch.int32
        different = (host.view(bits) != gpu.view(bits)).nonzero()
        assert not len(different), (
            f"output {number}: {len(different)} differ, first at {different[0].tolist()}: "
            f"host {host[tuple(different[0])].item()!r}, GPU {gpu[tuple(different[0])].item()!r}"
        )


@needs_compiler
def test_the_shim_rounds_as_the_gpu_does(device: torch.device) -> None:
    n = 1 << 20
    x = random_bits(n, dtype=torch.float32)
    both("float_to_halves", [x], [((n,), torch.int16)] * 2, n)
    both("pack", [x, x.flip(0)], [((n,), torch.int32)] * 2, n)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    both("halves_to_float", [halves], [((1 << 16,), torch.float32)] * 2, 1 << 16)


@needs_compiler
@pytest.mark.parametrize(("name", "rows"), [("float_arithmetic", 9), ("bf16_arithmetic", 4), ("fp16_arithmetic", 4)])
def test_the_shim_computes_as_the_gpu_does(device: torch.device, name: str, rows: int) -> None:
    n = 1 << 20
    dtype = torch.float32 if name == "float_arithmetic" else torch.int32
    operands = list(random_bits(3, n, dtype=dtype))
    if dtype == torch.float32:  # c nearly cancels a * b in half of them
        operands[2][::2] = -(operands[0] * operands[1])[::2]
    both(name, operands, [((rows, n), dtype)], n)


@needs_compiler
def test_the_shims_warps_and_blocks_are_the_gpus(device: torch.device) -> None:
    results = []
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(43))
    for where in (CPU, device):
        shuffled = torch.zeros(5, 32, 4, 32, dtype=torch.int32, device=where)
        split = torch.zeros(64, dtype=torch.int32, device=where)
        sums = torch.zeros(37, device=where)
        launch("shuffles", shuffled)
        launch("split_warps", split, block=(64, 1, 1))
        launch("block_sum", x.to(where), sums, grid=(37, 1, 1), block=(64, 4, 1), shared_bytes=1024, rounds=3)
        results.append([shuffled.cpu(), split.cpu(), sums.cpu().view(torch.int32)])
    for host, gpu in zip(*results, strict=True):
        assert torch.equal(host, gpu)


# ---- launching -------------------------------------------------------------------------------------------------------


def test_arguments_of_every_type_arrive(device: torch.device) -> None:
    out = torch.zeros(9, dtype=torch.float64, device=device)
    big = torch.zeros(2, dtype=torch.int64, device=device)
    scalars = {"b": True, "c": -128, "uc": 255, "s": -32768, "us": 65535, "i": -(2**31), "u": 2**32 - 1}
    launch("arguments", out, big, block=(1, 1, 1), l=-(2**63), ul=2**64 - 1, f=0.1, d=0.1, **scalars)
    single = torch.tensor(0.1).double().item()
    assert out.tolist() == [1, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, single, 0.1]
    assert big.tolist() == [-(2**63), -1]


def add_one(counter: torch.Tensor) -> None:
    wide = torch.zeros(1, dtype=torch.int64, device=counter.device)
    total = torch.zeros(1, device=counter.device)
    launch("count", counter, wide, total, block=(1, 1, 1))


def test_launches_keep_the_order_of_torchs_current_stream(device: torch.device) -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            for _ in range(50):
                counter = torch.randint(0, 100, (1,), device=device).to(torch.int32)
                before = counter.clone()
                add_one(counter)
                assert (counter - before).item() == 1


def test_a_thread_that_made_no_cuda_call_yet_can_launch(device: torch.device) -> None:
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    wide, total = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    bound = jit.compile(PROBE, "count", {}, device).bind((1, 1, 1), (1, 1, 1))
    pointers = [tensor.data_ptr() for tensor in (counter, wide, total)]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            bound(device.index, *pointers)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    assert counter.item() == 8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_decides_and_the_current_one_stays() -> None:
    for index in (1, 0):
        counter = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
        with torch.cuda.device(0):
            add_one(counter)
            assert torch.cuda.current_device() == 0
        assert counter.item() == 1


def test_a_block_may_use_all_the_shared_memory_there_is(device: torch.device) -> None:
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    x, y = torch.ones(1, 256, device=device), torch.zeros(1, device=device)
    sizes = {"grid": (1, 1, 1), "block": (64, 4, 1)}
    launch("block_sum", x, y, shared_bytes=most - 1024, rounds=1, **sizes)  # type: ignore[arg-type]
    assert y.item() == 256
    with pytest.raises(LaunchError, match="bytes of dynamic shared memory a block were asked for") as caught:
        launch("block_sum", x, y, shared_bytes=most + 1, rounds=1, **sizes)  # type: ignore[arg-type]
    assert not caught.value.sticky
    y.zero_()
    launch("block_sum", x, y, shared_bytes=1024, rounds=1, **sizes)  # type: ignore[arg-type]
    assert y.item() == 256


# ---- captures --------------------------------------------------------------------------------------------------------


def test_a_launch_is_captured_and_replayed(device: torch.device) -> None:
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    add_one(counter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_one(counter)
    assert counter.item() == 1, "a capture runs nothing"
    for _ in range(3):
        graph.replay()
    assert counter.item() == 4


def test_a_cold_kernel_is_refused_in_a_capture_and_the_capture_goes_on(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "cold.cu"
    path.write_text('extern "C" __global__ void cold(int* out) { out[0] = 7; }\n')
    value = torch.zeros(1, dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CompileInCaptureError, match="kernel cold is not loaded"):
            jit.compile(path, "cold", {}, device)
        value += 1
    graph.replay()
    assert value.item() == 1
    jit.compile(path, "cold", {}, device).bind((1, 1, 1), (1, 1, 1))(device.index or 0, value.data_ptr())
    assert value.item() == 7


def test_the_first_launch_after_loading_can_be_in_a_capture(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "fresh.cu"
    path.write_text('extern "C" __global__ void fresh(int* out) { out[0] += 1; }\n')
    value = torch.zeros(1, dtype=torch.int32, device=device)
    bound = jit.compile(path, "fresh", {}, device).bind((1, 1, 1), (1, 1, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(device.index or 0, value.data_ptr())
    graph.replay()
    graph.replay()
    assert value.item() == 2


# ---- faults: each in a process of its own, since the context is lost -------------------------------------------------

FAULT = """
import sys, torch
from pathlib import Path
from samebits import jit
from samebits.errors import LaunchError
Path(sys.argv[1]).write_text('extern "C" __global__ void wild(int* out) { out[0] = 1; }\\n')
bound = jit.compile(Path(sys.argv[1]), "wild", {}, torch.device("cuda", 0)).bind((1, 1, 1), (1, 1, 1))
bound(0, %s)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    bound(0, 0)
except LaunchError as error:
    print(error.sticky, error)
"""


@pytest.mark.parametrize(
    ("address", "name"), [("8", "ILLEGAL_ADDRESS"), ("torch.zeros(8, device='cuda').data_ptr() + 1", "MISALIGNED")]
)
def test_a_lost_context_is_told_by_the_next_launch(tmp_path: Path, address: str, name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_LAUNCH_BLOCKING"}
    result = subprocess.run(
        [sys.executable, "-c", FAULT % address, str(tmp_path / "wild.cu")],
        capture_output=True, text=True, env=environment, timeout=240, check=False,
    )  # fmt: skip
    assert result.stdout.startswith("True kernel wild could not be launched: CUDA_ERROR_"), result.stderr
    assert name in result.stdout
