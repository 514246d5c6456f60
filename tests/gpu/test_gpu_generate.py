"""``samebits generate --prove`` on a GPU: the embedded pipelines fused, with eager's bits after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from samebits import tiny
from samebits.cli import main

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offload", ["none", "model", "group"])
@pytest.mark.parametrize("model", tiny.NAMES)
def test_a_fused_picture_has_eagers_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, model: str, offload: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--device", f"cuda:{device.index or 0}", "--offload", offload, "--steps", "4", "--size", "128x64"]
    done = CliRunner().invoke(main, ["generate", model, *asked, "--prove", "--json", "-o", "fox.png"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["proof"] == {"equal": True, "void": False, "steps": 4, "first_difference": None}
    eager = [site for site in found["sites"] if not site["fused"]]
    assert len(eager) < len(found["sites"]) / 2 if offload == "group" else not eager, eager
    # Group offload hooks the leaves: a norm whose weight a hook brings in must be called itself.
    assert all("carries a hook" in reason for site in eager for reason in site["reasons"]), eager
    assert found["device"].startswith("cuda")


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_have_eagers_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.chdir(tmp_path)
    for model in tiny.NAMES:
        asked = ["generate", model, "--dtype", dtype, "--steps", "2", "--size", "64x64", "--prove", "--json"]
        done = CliRunner().invoke(main, [*asked, "-o", f"{model}.png"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["proof"]["equal"]
