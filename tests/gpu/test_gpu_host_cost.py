"""Host microseconds of a launch. Run alone: another process on the same cores spoils them."""

from __future__ import annotations

import pytest
import torch

from samebits.bench.comparing import Bench
from samebits.bench.ops import host_row, smallest
from samebits.bench.targets import HOST_LAUNCH_US
from samebits.ops import OPS, Op

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_host_time_of_a_launch(op: Op, device: torch.device) -> None:
    row = host_row(op, smallest(op), Bench.on(device))
    print(row)
    assert row.get("error") is None
    assert row["us_host_launch"] <= HOST_LAUNCH_US
    assert row["us_host_site"] < row["us_host_eager"]
