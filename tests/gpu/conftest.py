"""The GPU ring runs where torch sees an NVIDIA GPU and is skipped, with this reason, everywhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

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
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
