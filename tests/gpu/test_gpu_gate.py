"""The gate on a real GPU: captures, threads, devices, a cold cache."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from ring import assert_same_bits, modulate_args, qk_args, randn, rms_args

from samebits.errors import CompileInCaptureError
from samebits.gate import Gate
from samebits.ops import by_name

pytestmark = pytest.mark.gpu

MODULATE, QK, RMS = by_name("layer_norm_modulate"), by_name("qk_norm"), by_name("rms_norm_scale")
BF16 = torch.bfloat16


def states(gate: Gate) -> list[str]:
    return [verdict.state.value for verdict in gate.verdicts()]


def test_tensors_of_another_device_than_the_current_one(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - (device.index or 0))
    site = Gate().site("other device", MODULATE)
    args = modulate_args(randn(1, 9, 3072, dtype=BF16, device=other))
    for _ in range(3):
        assert_same_bits(site(*args), MODULATE.reference(*args))
    assert site.counters.fused >= 2, dict(site.counters.reasons)
    assert torch.cuda.current_device() == device.index
    mixed = (args[0], args[1].to(device), args[2], args[3])
    assert MODULATE.unsupported(*mixed) is not None


def test_mixed_devices_are_declined(device: torch.device) -> None:
    x, scale, shift, eps = modulate_args(randn(1, 9, 3072, dtype=BF16, device=device))
    assert "one device" in str(MODULATE.unsupported(x, scale.cpu(), shift, eps))
    q, k, q_weight, k_weight, eps, kind = qk_args(x.view(1, 9, 24, 128), x.view(1, 9, 24, 128), "diffusers")
    assert "one device" in str(QK.unsupported(q, k, q_weight.cpu(), k_weight, eps, kind))
    x, weight, scale, eps, gate_msa, gate_mlp = rms_args(x)
    assert "one device" in str(RMS.unsupported(x, weight.cpu(), scale, eps))
    assert "on its device" in str(RMS.unsupported(x, weight, scale, eps, gate_msa, gate_mlp.cpu()))


def test_capture_with_a_signature_never_seen(device: torch.device) -> None:
    """Eager is recorded, nothing is verified inside; later the kernel is, and its graph replays new data."""
    gate = Gate()
    site = gate.site("capture", MODULATE)
    args = modulate_args(randn(1, 61, 3072, dtype=BF16, device=device))
    eager_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(eager_graph):
        recorded = site(*args)
    assert (site.counters.fused, site.counters.eager) == (0, 1)
    assert "verified" not in states(gate)
    args[0].copy_(randn(1, 61, 3072, dtype=BF16, device=device, seed=2))
    eager_graph.replay()
    assert_same_bits(recorded, MODULATE.reference(*args))

    for _ in range(3):
        assert_same_bits(site(*args), MODULATE.reference(*args))
    assert states(gate) == ["verified"]
    fused = site.counters.fused
    assert fused >= 1

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = site(*args)
    assert site.counters.fused == fused + 1, dict(site.counters.reasons)
    for seed in (3, 4):
        args[0].copy_(randn(1, 61, 3072, dtype=BF16, device=device, seed=seed))
        graph.replay()
        assert_same_bits(recorded, MODULATE.reference(*args))


def test_a_signature_met_in_a_capture_is_verified_at_another_signatures_quiet_call(device: torch.device) -> None:
    gate = Gate()
    site = gate.site("queue", RMS)
    met = rms_args(randn(1, 43, 3840, dtype=BF16, device=device))
    other = rms_args(randn(1, 44, 3840, dtype=BF16, device=device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        site(*met)
    for _ in range(3):
        assert_same_bits(site(*other), RMS.reference(*other))
    assert states(gate) == ["verified", "verified"]
    fused = site.counters.fused
    assert_same_bits(site(*met), RMS.reference(*met))
    assert site.counters.fused == fused + 1, "the first call after the capture should be fused already"


def test_no_verification_while_another_thread_captures(device: torch.device) -> None:
    gate = Gate()
    site = gate.site("beside", RMS)
    args = rms_args(randn(1, 45, 3840, dtype=BF16, device=device))
    x = randn(64, dtype=BF16, device=device)
    inside, done = threading.Event(), threading.Event()
    failures: list[BaseException] = []
    results: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        try:
            torch.cuda.set_device(device)
            # thread_local: eager's own allocations in the other thread must not break this capture
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results.append(x * 2)
                inside.set()
                assert done.wait(60)
                results.append(results[0] + 1)
        except BaseException as error:
            failures.append(error)
            inside.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert inside.wait(60)
    during = site(*args)
    counted = (site.counters.fused, site.counters.eager, states(gate))
    done.set()
    thread.join(60)
    assert not failures, failures
    assert counted[:2] == (0, 1)
    assert "verified" not in counted[2]
    assert_same_bits(during, RMS.reference(*args))
    graph.replay()
    assert_same_bits(results[1], x * 2 + 1)
    for _ in range(3):
        assert_same_bits(site(*args), RMS.reference(*args))
    assert states(gate) == ["verified"]


def test_cold_cache_inside_a_capture_compiles_nothing(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    gate = Gate()
    site = gate.site("cold", MODULATE)
    # a width that no other test uses: neither in memory nor in the empty folder
    args = modulate_args(randn(1, 7, 2044, dtype=BF16, device=device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = site(*args)
    assert (site.counters.fused, site.counters.eager) == (0, 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "something was compiled inside the capture"
    graph.replay()
    assert_same_bits(recorded, MODULATE.reference(*args))

    for _ in range(2):
        assert_same_bits(site(*args), MODULATE.reference(*args))
    assert [path for path in tmp_path.rglob("*") if path.is_file()], "the warm call compiled"
    fused = site.counters.fused
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = site(*args)
    assert site.counters.fused == fused + 1
    graph.replay()
    assert_same_bits(recorded, MODULATE.reference(*args))


def test_preparing_a_cold_kernel_inside_a_capture_is_refused_and_leaves_the_capture_alive(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    args = modulate_args(randn(1, 7, 2036, dtype=BF16, device=device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = args[0] * 2
        with pytest.raises(CompileInCaptureError):
            MODULATE.prepare(*args)
    graph.replay()
    assert_same_bits(doubled, args[0] * 2)


def test_two_threads_on_two_streams_meet_a_cold_signature(device: torch.device) -> None:
    gate = Gate()
    site = gate.site("threads", RMS)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    failures: list[BaseException] = []
    for number in range(100):
        args = rms_args(randn(1, 20 + number, 512, dtype=BF16, device=device, seed=number))
        torch.cuda.synchronize()
        results: list[torch.Tensor | None] = [None, None]
        barrier = threading.Barrier(2)

        def work(which: int, args=args, results=results, barrier=barrier) -> None:  # type: ignore[no-untyped-def]
            try:
                torch.cuda.set_device(device)
                with torch.no_grad(), torch.cuda.stream(streams[which]):
                    barrier.wait(60)
                    results[which] = site(*args)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        torch.cuda.synchronize()
        assert not failures, failures
        for result in results:
            assert_same_bits(result, RMS.reference(*args))
        assert len(list(gate.verdicts())) == number + 1
    for number in range(100):
        args = rms_args(randn(1, 20 + number, 512, dtype=BF16, device=device, seed=number))
        assert_same_bits(site(*args), RMS.reference(*args))
    assert set(states(gate)) == {"verified"}
    assert site.counters.fused + site.counters.eager == 300


def test_poisoned_allocator_behind_the_gate(device: torch.device) -> None:
    """What a fused call allocates starts as NaN; nothing of it may remain."""
    site = Gate().site("poison", QK)
    q = randn(1, 77, 24, 128, dtype=BF16, device=device, seed=1)
    args = qk_args(q, q.flip(1).contiguous(), "diffusers")
    for _ in range(4):
        spoiled = [torch.full((2**n,), float("nan"), device=device) for n in range(10, 24)]
        del spoiled
        assert_same_bits(site(*args), QK.reference(*args))
    assert site.counters.fused >= 3
