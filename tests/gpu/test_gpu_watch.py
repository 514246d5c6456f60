"""Re-checks and stored verdicts on a real GPU: nothing waits for them, and what they find comes in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ring import assert_same_bits, randn, rms_args
from torch import Tensor

from samebits import bits
from samebits.certificate import StoredVerdict
from samebits.gate import AWAITED, HINTED, RECHECKED, Gate, State
from samebits.ops import OPS, Op, by_name
from samebits.signature import Signature

pytestmark = pytest.mark.gpu

RMS = by_name("rms_norm_scale")
BF16 = torch.bfloat16


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def turned(result: tuple[Tensor, ...], output: int) -> tuple[Tensor, ...]:
    """A copy with one bit more in the last element of one output."""
    parts = tuple(part.clone() for part in result)
    bits.integer_view(parts[output]).view(-1)[-1:].bitwise_xor_(1)
    return parts


def turning(op: Op, output: int = -1) -> tuple[Op, list[bool]]:
    """An op whose kernel gives one bit more in the last element of one output once the list says so."""
    wrong = [False]

    def prepare(*args: Any) -> Any:
        right = op.prepare(*args)

        def launch(*args: Any, out: Any = None) -> Any:
            result = right(*args, out=out)
            if wrong[0]:
                part = result if isinstance(result, Tensor) else result[output]
                bits.integer_view(part).view(-1)[-1:].bitwise_xor_(1)
            return result

        return launch

    return dataclasses.replace(op, prepare=prepare), wrong


def test_that_waiting_would_be_noticed(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_recheck_of_every_op_waits_for_nothing(op: Op, device: torch.device) -> None:
    case = min(op.cases, key=lambda case: case.rows)
    args = case.build(device, 0)
    if op.unsupported(*args) is not None:
        pytest.skip("the smallest case is not taken here")
    gate = Gate(recheck_every=1)
    site = gate.site("watched", op)
    expected = op.reference(*args)
    site(*args)
    site(*args)  # The first page-locked memory may be waited for.
    torch.cuda.synchronize()
    gate.collect()
    with no_waiting():
        results = [site(*args) for _ in range(6)]
    assert site.counters.reasons[RECHECKED] == 7
    for result in results:
        assert_same_bits(result, expected)
    torch.cuda.synchronize()
    assert gate.collect() == 0
    assert (site.counters.rechecked, site.counters.differed) == (7, 0)


@pytest.mark.parametrize(
    ("output", "where"),
    [
        (0, "output 0: 1 of 234240 elements differ, first at [0, 60, 3839]"),  # the normed rows
        (2, "output 2: 1 of 3840 elements differ, first at [0, 0, 3839]"),  # the second of the gates it takes along
    ],
)
def test_a_kernel_that_turns_wrong_is_found_with_both_values(output: int, where: str, device: torch.device) -> None:
    op, wrong = turning(RMS, output)
    gate = Gate(recheck_every=4)
    site = gate.site("block.3", op)
    args = rms_args(randn(1, 61, 3840, dtype=BF16, device=device))
    expected = op.reference(*args)
    assert isinstance(expected, tuple)
    assert len(expected) == 3
    for _ in range(20):
        assert_same_bits(site(*args), expected)
    wrong[0] = True
    for _ in range(20):
        result = site(*args)
        torch.cuda.synchronize()
    assert_same_bits(result, expected)
    (revocation,) = site.counters.revocations
    assert revocation.cause.startswith(where)
    assert "1 ulp apart" in revocation.cause
    at_once = bits.compare(turned(expected, output), expected)
    assert str(at_once) == revocation.cause


def test_a_capture_between_a_recheck_and_its_answer(device: torch.device) -> None:
    gate = Gate(recheck_every=1)
    site = gate.site("captured", RMS)
    args = rms_args(randn(1, 62, 3840, dtype=BF16, device=device))
    expected = RMS.reference(*args)
    for _ in range(3):
        site(*args)
    compared = site.counters.reasons[RECHECKED]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = site(*args)
    assert site.counters.reasons[RECHECKED] == compared
    graph.replay()
    assert_same_bits(recorded, expected)
    site(*args)
    torch.cuda.synchronize()
    assert gate.collect() == 0
    assert site.counters.differed == 0


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        self.known: dict[Any, StoredVerdict] = {}

    def get(self, op: str, source: str, signature: str) -> StoredVerdict | None:
        """What was put."""
        return self.known.get((op, source, signature))

    def put(self, verdict: StoredVerdict) -> None:
        """Keep it."""
        self.known[verdict.key] = verdict

    def flush(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("lie", [False, True])
def test_a_hint_is_confirmed_without_waiting_and_a_false_one_changes_no_bit(device: torch.device, lie: bool) -> None:
    op, wrong = turning(RMS)
    args = rms_args(randn(1, 63, 3840, dtype=BF16, device=device))
    expected = op.reference(*args)
    store = Store()
    Gate(store=store).site("first process", op)(*args)
    (kept,) = store.known.values()
    assert kept.signature == Signature.of((), args).canonical()
    assert torch.cuda.get_device_name(device) in kept.signature
    gate = Gate(store=store, recheck_every=0)
    site = gate.site("second process", op)
    other = rms_args(randn(1, 64, 3840, dtype=BF16, device=device))
    Gate(recheck_every=1).site("page-locked memory is there", RMS)(*other)
    op.prepare(*args)
    wrong[0] = lie
    with no_waiting():
        results = [site(*args) for _ in range(3)]
    torch.cuda.synchronize()
    results += [site(*args) for _ in range(3)]
    for result in results:
        assert_same_bits(result, expected)
    assert site.counters.reasons[HINTED] == 1
    assert set(site.counters.reasons) - {HINTED, AWAITED} == ({site_reason(gate)} if lie else set())
    assert (site.counters.fused >= 3) is not lie


def site_reason(gate: Gate) -> str:
    (verdict,) = gate.verdicts()
    assert verdict.state is State.REFUSED
    return f"refused: {verdict.cause}"
