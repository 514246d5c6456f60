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


def reads_a_norm(site: dict[str, Any]) -> bool:
    """Whether a site reads the weight of a norm that it stands for.

    Group offload hooks every module that has weights of its own, and such a weight is on the GPU only while its module
    is called; so the norm is called itself. A site that is one norm alone lies under that norm's hook and stays fused.
    """
    of_a_norm = site["op"] in {"rms_norm_scale", "qk_norm_rope", "gated_residual_rms_norm"}
    return of_a_norm and site["site"] not in {"txt_norm", "cap_embedder.0"}


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
    # Weights are joined neither under a hook that moves them nor at the odd widths of the embedded models, which are
    # too narrow for products of ours too.
    by_themselves = {"joint_projection", "attention", "linear_gelu_tanh", "linear_swiglu"}
    others = [site for site in found["sites"] if site["op"] not in by_themselves]
    called = [site for site in others if site["fused"] or site["eager"]]
    assert len(called) > len(others) / 2
    eager = {site["site"] for site in called if not site["fused"]}
    assert eager == ({site["site"] for site in called if reads_a_norm(site)} if offload == "group" else set())
    for site in others:
        told = [reason for reason in site["reasons"] if "carries a hook" in reason]
        if site["site"] in eager:
            assert site["reasons"] == dict.fromkeys(told[:1], site["eager"]), site
        else:
            assert not told, site
    assert found["device"].startswith("cuda")


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_have_eagers_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.chdir(tmp_path)
    for model in tiny.NAMES:
        asked = ["generate", model, "--dtype", dtype, "--steps", "2", "--size", "64x64", "--prove", "--json"]
        done = CliRunner().invoke(main, [*asked, "-o", f"{model}.png"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["proof"]["equal"]
