"""Host microseconds of a launch. Run alone: another process on the same cores spoils them.

What a launch costs depends on the machine, and on a shared one on the minute. So it is measured against a call of torch
that was timed just before and just after; the figure for the record's own machine is a target of the benchmark.
"""

from __future__ import annotations

import pytest
import torch

from samebits.bench.comparing import Bench
from samebits.bench.ops import host_row, smallest
from samebits.bench.timing import host_us
from samebits.ops import OPS, Op

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ADDITIONS = 2.0
"""A launch of a kernel of ours takes at most so many times what torch's cheapest call takes, an addition into given
memory. A launch through Triton takes two to three times that, one through torch's own NVRTC wrapper more than five."""
ADDITIONS_OF_MANY = {"qk_norm_rope": 3.0}
"""The same for a kernel that is handed fifteen tensors, each of which costs."""
EAGERS = {"gelu_tanh": 2.0, "swiglu": 1.25, "linear_gelu_tanh": 2.5, "linear_swiglu": 2.5}
"""How many times as long as eager's a call of a site may keep the host: eager's chain is one kernel here, or two, and
the gate's look at a signature costs as much as half a launch. Every longer chain must be cheaper than eager's."""


def addition_us(bench: Bench) -> float:
    x = torch.ones(64, device=bench.device)
    y = torch.empty_like(x)
    return host_us(lambda: torch.add(x, x, out=y), bench.stopwatch.synchronize)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_host_time_of_a_launch(op: Op, device: torch.device) -> None:
    bench = Bench.on(device)
    before = addition_us(bench)
    row = host_row(op, smallest(op), bench)
    addition = max(before, addition_us(bench))
    print(row, f"an addition: {addition:.2f} us")
    assert row.get("error") is None
    if (
        op.moves_bytes
    ):  # else it is torch that launches, or the launch starts a product and keeps the GPU busy for longer
        assert row["us_host_launch"] <= ADDITIONS_OF_MANY.get(op.name, ADDITIONS) * addition
    assert row["us_host_site"] < EAGERS.get(op.name, 1.0) * row["us_host_eager"]
