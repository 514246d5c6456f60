"""What holds for every ring."""

from __future__ import annotations

import pytest
import torch

from samebits.settings import CERTIFICATES


@pytest.fixture(autouse=True)
def _no_stored_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run before found must not decide what a test sees, and a test leaves nothing for the next."""
    monkeypatch.setenv(CERTIFICATES, "off")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that draws random numbers without a generator of its own draws the same ones in every run."""
    torch.manual_seed(0)
