"""What holds for every ring."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that draws random numbers without a generator of its own draws the same ones in every run."""
    torch.manual_seed(0)
