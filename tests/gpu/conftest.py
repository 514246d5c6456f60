"""The GPU ring runs where torch sees an NVIDIA GPU and is skipped, with this reason, everywhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from samebits.ops import OPS, Op

REASON = "torch sees no NVIDIA GPU here; scripts/gpu runs this ring where there is one"


NOT_ALONE = "timings need the machine for themselves"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        for item in items:
            if item.get_closest_marker("alone") is not None:
                item.add_marker(pytest.mark.skip(reason=NOT_ALONE))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _ops_of_this_gpu(request: pytest.FixtureRequest) -> None:
    """Skip a test of an op that is written for another architecture."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or not torch.cuda.is_available():
        return
    named = {op.name: op for op in OPS}
    for value in parameters.params.values():
        op = named.get(value) if isinstance(value, str) else value
        if isinstance(op, Op) and not op.is_for(torch.device("cuda", torch.cuda.current_device())):
            pytest.skip(f"{op.name} is written for {', '.join(op.architectures)}")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
