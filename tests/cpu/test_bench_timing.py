"""How the benchmark takes time, with a clock that the test owns; and input sets that keep their layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from samebits.bench import timing
from samebits.bench.inputs import clone_args, poison, refill, storage_bytes, tensors_of, unchanged
from samebits.bits import integer_view

MIB = 2**20


class FakeStopwatch:
    """A device on which a call takes the microseconds that ``spend`` is told, and whose events read that clock."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.captured = 0
        self.log: list[str] = []

    def spend(self, name: str, us: float) -> None:
        self.now_us += us
        self.log.append(name)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        before = self.now_us
        body()
        self.now_us = before  # a capture records and runs nothing
        self.captured += 1
        return body

    def elapsed_ms(self, body: Callable[[], object]) -> float:
        before = self.now_us
        body()
        return (self.now_us - before) / 1e3


@pytest.mark.parametrize(
    ("set_bytes", "l2_bytes", "budget_bytes", "sets"),
    [
        (50 * MIB, 60 * MIB, 2**40, timing.MIN_SETS),  # large sets: the minimum is past the cache already
        (2 * MIB, 60 * MIB, 2**40, 120),  # four times 60 MiB
        (3 * MIB + 1, 60 * MIB, 2**40, 80),  # rounded up
        (1024, 60 * MIB, 2**40, timing.MAX_SETS),
        (1000 * MIB, 60 * MIB, 5000 * MIB, 5),  # memory bounds it
        (1000 * MIB, 60 * MIB, 10 * MIB, 1),
    ],
)
def test_sets_needed(set_bytes: int, l2_bytes: int, budget_bytes: int, sets: int) -> None:
    assert timing.sets_needed(set_bytes, l2_bytes, budget_bytes) == sets


def test_sets_needed_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="positive"):
        timing.sets_needed(0, MIB)


@pytest.mark.parametrize(("sets", "calls"), [(1, 60), (12, 60), (13, 65), (60, 60), (61, 61), (256, 256)])
def test_a_graph_uses_every_set_equally_often(sets: int, calls: int) -> None:
    assert timing.calls_per_graph(sets) == calls


def test_device_time_is_per_call_interleaved_and_over_all_sets() -> None:
    watch = FakeStopwatch()
    used: dict[str, list[int]] = {"eager": [], "fused": []}

    def call(name: str, us: float) -> Callable[[int], None]:
        def run(index: int) -> None:
            used[name].append(index)
            watch.spend(name, us)

        return run

    taken = timing.device_us({"eager": call("eager", 85.0), "fused": call("fused", 16.0)}, 12, watch, replays=5)
    assert taken == {"eager": pytest.approx(85.0), "fused": pytest.approx(16.0)}
    assert watch.captured == 2
    assert [used["fused"].count(i) for i in range(12)] == [used["fused"].count(0)] * 12
    replays = [name for name, before in zip(watch.log[1:], watch.log, strict=False) if name != before]
    assert replays[-4:] == ["eager", "fused", "eager", "fused"], "the competitors must take turns"


def test_device_time_is_a_median() -> None:
    watch = FakeStopwatch()
    replays = iter([10.0, 10.0, 900.0, 10.0, 10.0])
    factor = [1.0]

    class Hiccup(FakeStopwatch):
        def elapsed_ms(self, body: Callable[[], object]) -> float:
            factor[0] = next(replays)
            return super().elapsed_ms(body)

    watch = Hiccup()
    taken = timing.device_us({"fused": lambda i: watch.spend("fused", factor[0])}, 1, watch, replays=5)
    assert taken["fused"] == pytest.approx(10.0)


def test_host_time_is_the_fastest_loop_without_the_warm_up_and_the_synchronisation() -> None:
    now = [0.0]
    calls = [0]

    def call() -> None:
        calls[0] += 1
        # The first loop compiles; the second meets other work on the host.
        now[0] += 1.0 if calls[0] <= 10 else 9e-6 if calls[0] <= 20 else 6e-6

    def synchronize() -> None:
        now[0] += 5.0

    assert timing.host_us(call, synchronize, calls=10, loops=3, clock=lambda: now[0]) == pytest.approx(6.0)
    assert calls[0] == 40


def test_interleaved_runs_prepare_each_turn_and_do_not_count_its_first_run() -> None:
    watch = FakeStopwatch()
    order: list[str] = []
    mode = ["off"]

    def switch(to: str) -> Callable[[], None]:
        def run() -> None:
            order.append(to)
            mode[0] = to

        return run

    def body() -> None:
        watch.spend(mode[0], {"off": 170_000.0, "on": 125_000.0}[mode[0]])

    taken = timing.interleaved_ms(
        {"eager": body, "ours": body}, watch, 3, {"eager": switch("off"), "ours": switch("on")}
    )
    assert taken == {"eager": pytest.approx(170.0), "ours": pytest.approx(125.0)}
    assert order == ["off", "on"] * 3


def test_copy_bandwidth_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = FakeStopwatch()
    monkeypatch.setattr(timing, "device_us", lambda *_, **__: {"copy": 10.0})
    # 2 * 4 bytes * 1000 elements in 10 us = 0.8 GB/s
    assert timing.copy_gb_per_s(torch.device("cpu"), watch, elements=1000) == pytest.approx(0.8)


def test_clones_keep_strides_offsets_and_shared_memory() -> None:
    qkv = torch.randn(2, 5, 96).to(torch.bfloat16)
    q, k, _ = qkv.chunk(3, -1)
    args = (q, k, 1e-6, None, (torch.randn(3),), "diffusers")
    copy = clone_args(args)
    assert [t.stride() for t in tensors_of(copy)] == [t.stride() for t in tensors_of(args)]
    assert [t.storage_offset() for t in tensors_of(copy)] == [0, 32, 0]
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(copy), tensors_of(args), strict=True))
    assert copy[0].untyped_storage().data_ptr() == copy[1].untyped_storage().data_ptr()
    assert copy[0].data_ptr() != q.data_ptr()
    assert copy[2:4] == (1e-6, None)
    assert copy[5] == "diffusers"
    assert storage_bytes(args) == 2 * 5 * 96 * 2 + 12


def test_unchanged_sees_a_write_between_the_rows_of_a_view() -> None:
    whole = torch.zeros(4, 8)
    args = (whole[:, :4], 1.0)
    pristine = clone_args(args)
    assert unchanged(args, pristine)
    whole[2, 6] = -0.0  # one bit, outside the view
    assert not unchanged(args, pristine)


def test_refill_writes_in_place_and_leaves_the_rest() -> None:
    qkv = torch.zeros(64, 96)
    args = (qkv[:, :32], qkv[:, 32:64], torch.ones(32))
    refill(args, 1, 200.0)
    assert 150 < float(args[0].std()) < 250
    assert bool((qkv[:, 64:] == 0).all())
    assert bool((args[2] == 1).all())
    again = clone_args(args)
    refill(again, 1, 200.0)
    assert torch.equal(again[0], args[0])
    refill(again, 2, 200.0)
    assert not torch.equal(again[0], args[0])
    with pytest.raises(ValueError, match="floating"):
        refill((torch.zeros(3, dtype=torch.int32),), 0, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_poison_is_a_nan_that_arithmetic_does_not_give(dtype: torch.dtype) -> None:
    out = torch.zeros(4, dtype=dtype)
    poison((out,))
    assert bool(out.isnan().all())
    computed = torch.tensor([float("inf")], dtype=dtype) - torch.tensor([float("inf")], dtype=dtype)
    assert int(integer_view(out)[0]) != int(integer_view(computed)[0])


def test_poison_of_integers() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    poison((out,))
    assert bool((out != 0).all())
