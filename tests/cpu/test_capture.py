"""The capture probe against a torch.cuda and a driver made of Python, and what intercepts torch calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits import capture
from samebits.capture import CudaProbe

SUCCESS, IMPLICIT, INVALID_CONTEXT = "CUDA_SUCCESS", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "CUDA_ERROR_INVALID_CONTEXT"
NONE, ACTIVE, INVALIDATED = "NONE", "ACTIVE", "INVALIDATED"
RELAXED, GLOBAL = "RELAXED", "GLOBAL"
POOL = 32


class FakeDriver:
    """The calls of the CUDA driver that the probe makes. Handles are integers; 0 is the legacy default stream."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS)
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=NONE, CU_STREAM_CAPTURE_STATUS_ACTIVE=ACTIVE)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)

    def __init__(self, active: set[int]) -> None:
        self.active = active
        self.status: dict[int, str] = {}
        self.legacy = SUCCESS
        self.contexts: list[int] = []
        self.retained = 0
        self.mode = GLOBAL
        self.asked: list[int] = []
        self.number = 1

    def cuStreamGetCaptureInfo(self, handle: int) -> tuple[Any, ...]:
        return SUCCESS, self.status.get(handle, NONE), self.number, "graph", [], [], 0

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[str, int, bool]:
        return SUCCESS, 0, device in self.active

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[str, int]:
        assert device in self.active, "asking must not create a context"
        self.retained += 1
        return SUCCESS, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[str]:
        self.retained -= 1
        return (SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> tuple[str]:
        self.contexts.append(context)
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[str, int]:
        return SUCCESS, self.contexts.pop()

    def CUstream(self, handle: int) -> int:
        return handle

    def cuStreamIsCapturing(self, handle: int) -> tuple[str, str]:
        assert self.mode == RELAXED
        self.asked.append(handle)
        if handle == 0:
            return (self.legacy if self.contexts else INVALID_CONTEXT), NONE
        return SUCCESS, self.status.get(handle, NONE)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[str, str]:
        before, self.mode = self.mode, mode
        return SUCCESS, before


class FakeCuda:
    """torch.cuda as the probe sees it: two devices, pools of 32 streams handed out in turn per priority."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.initialized = True
        self.turn: dict[tuple[int, int], int] = {}
        self.stolen = 0
        self.current = {device: 1000 * (device + 1) for device in range(devices)}
        self.here = False
        self.on: list[object] = []
        self.graph = SimpleNamespace(default_capture_stream=None)

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return self.devices

    def is_current_stream_capturing(self) -> bool:
        return self.here

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.on.append(device)
        yield

    def current_stream(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=self.current[device])

    def Stream(self, device: int, priority: int) -> SimpleNamespace:
        level = max(priority, -3)
        turn = self.turn.get((device, level), 5)
        if self.stolen and turn == 9:  # Another thread draws in between.
            self.stolen -= 1
            turn += 1
        self.turn[device, level] = turn + 1
        return SimpleNamespace(cuda_stream=100_000 * (device + 1) + 1000 * -level + turn % POOL)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(capture, "_cuda", fake)
    return fake


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeDriver:
    fake = FakeDriver(active={0})
    monkeypatch.setattr(capture, "_driver", lambda: fake)
    return fake


def test_quiet_asks_every_stream_of_active_devices_only(cuda: FakeCuda, driver: FakeDriver) -> None:
    probe = CudaProbe()
    assert probe.anywhere() is False
    pool = {100_000 + 1000 * level + number for level in range(4) for number in range(POOL)}
    assert set(driver.asked) == pool | {0, cuda.current[0]}
    assert (driver.mode, driver.contexts, driver.retained) == (GLOBAL, [], 0)
    drawn = dict(cuda.turn)
    probe.anywhere()
    assert cuda.turn == drawn  # The pool is enumerated once.
    assert all(device == 0 for device, _ in drawn)


def test_drawing_leaves_the_turn_where_it_was(cuda: FakeCuda, driver: FakeDriver) -> None:
    CudaProbe().anywhere()
    assert {turn % POOL for turn in cuda.turn.values()} == {5}


def test_a_stream_that_another_thread_draws_meanwhile_is_not_missed(cuda: FakeCuda, driver: FakeDriver) -> None:
    cuda.stolen = 1
    probe = CudaProbe()
    driver.status[100_009] = ACTIVE
    assert probe.anywhere() is True


@pytest.mark.parametrize("status", [ACTIVE, INVALIDATED])
@pytest.mark.parametrize("handle", [100_000, 101_031, 103_007, 1000])
def test_a_capture_on_any_stream_is_found(cuda: FakeCuda, driver: FakeDriver, handle: int, status: str) -> None:
    probe = CudaProbe()
    assert probe.anywhere() is False
    driver.status[handle] = status
    assert probe.anywhere() is True
    assert (driver.mode, driver.contexts, driver.retained) == (GLOBAL, [], 0)
    driver.status.clear()
    assert probe.anywhere() is False


def test_a_blocking_stream_of_somebody_else_is_found_through_the_default_stream(
    cuda: FakeCuda, driver: FakeDriver
) -> None:
    driver.legacy = IMPLICIT
    assert CudaProbe().anywhere() is True


def test_the_streams_of_torch_cuda_graph_and_of_later_devices_are_asked(cuda: FakeCuda, driver: FakeDriver) -> None:
    probe = CudaProbe()
    cuda.graph.default_capture_stream = SimpleNamespace(cuda_stream=77)
    driver.status[77] = ACTIVE
    assert probe.anywhere() is True
    driver.status = {200_003: ACTIVE}
    assert probe.anywhere() is False
    driver.active.add(1)
    assert probe.anywhere() is True


def test_without_cuda_nobody_is_asked(cuda: FakeCuda, driver: FakeDriver) -> None:
    cuda.initialized = False
    cuda.here = True
    probe = CudaProbe()
    assert (probe.here(), probe.anywhere()) == (False, False)
    with probe.relaxed():
        assert driver.mode == GLOBAL
    assert driver.asked == []


def test_without_the_bindings_nothing_is_known_and_everything_may_be_captured(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_driver", lambda: None)
    assert CudaProbe().anywhere() is True
    with CudaProbe().relaxed():
        pass


def test_relaxed_restores_the_mode_also_after_an_error(cuda: FakeCuda, driver: FakeDriver) -> None:
    def fail() -> None:
        with CudaProbe().relaxed():
            assert driver.mode == RELAXED
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert driver.mode == GLOBAL


def test_here_asks_about_the_device_of_the_call(cuda: FakeCuda, driver: FakeDriver) -> None:
    cuda.here = True
    probe = CudaProbe()
    assert probe.here() is True
    assert probe.here(torch.device("cpu")) is True
    assert cuda.on == []
    assert probe.here(torch.device("cuda:1")) is True
    assert cuda.on == [torch.device("cuda:1")]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The current device and its current stream, as torch's own functions give them."""
    now = {"device": 0, "stream": 1000}
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now["device"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"], raising=False)
    return now


def test_a_lane_is_a_stream_and_a_capture(cuda: FakeCuda, driver: FakeDriver, stream: dict[str, int]) -> None:
    device = torch.device("cuda:0")
    outside = capture.lane(device)
    assert outside is not None
    assert capture.lane(device) == outside
    cuda.here, driver.status[1000] = True, ACTIVE
    first = capture.lane(device)
    assert first not in {outside, None}
    assert capture.lane(device) == first
    driver.number = 2
    assert capture.lane(device) not in {outside, first, None}
    cuda.here = False
    assert capture.lane(device) == outside
    stream["stream"] = 1001
    assert capture.lane(device) not in {outside, None}


def test_a_lane_that_cannot_be_told(
    cuda: FakeCuda, driver: FakeDriver, stream: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda:0")
    assert capture.lane(torch.device("cpu")) is not None
    assert capture.lane(torch.device("meta")) is None
    stream["device"] = 1  # whether its stream captures is asked about the current device only
    assert capture.lane(device) is None
    stream["device"] = 0
    cuda.here, driver.status[1000] = True, INVALIDATED
    assert capture.lane(device) is None
    monkeypatch.setattr(capture, "_driver", lambda: None)
    assert capture.lane(device) is None
    cuda.here = False
    assert capture.lane(device) is not None
    cuda.initialized = False
    assert capture.lane(device) is None


def test_the_process_wide_probe_answers_on_this_machine() -> None:
    if not torch.cuda.is_initialized():
        assert not capture.capturing_here()
        assert not capture.capturing_anywhere()
    assert capture.forked() is False
    assert isinstance(capture.default_probe(), CudaProbe)


def test_tracing() -> None:
    assert capture.tracing() is False
    seen = torch.vmap(lambda row: row + capture.tracing())(torch.zeros(3))
    assert seen.tolist() == [1.0, 1.0, 1.0]
    with torch.device("cpu"):
        assert capture.tracing() is False
