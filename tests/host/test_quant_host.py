"""Quantised models through the kernels' own source on the CPU: the picture of the unfused quantised model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samebits import jit, tiny
from samebits.apply import apply
from samebits.gate import COMPARED, Gate
from samebits.quant import Fp8Linear

MISSING = jit.unavailable(torch.device("cpu"), host=True)
BF16 = torch.bfloat16


def quantised(model: str, per_channel: bool) -> Any:
    pipeline = tiny.build(model, BF16)
    transformer = pipeline.transformer
    for name, module in list(transformer.named_modules()):
        if type(module) is nn.Linear and not name.startswith("proj_out"):
            parent, _, leaf = name.rpartition(".")
            scale = None if per_channel else 20.0 / 448
            setattr(transformer.get_submodule(parent), leaf, Fp8Linear.of(module, scale, per_channel=per_channel))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: Any) -> Tensor:
    guidance = {"true_cfg_scale": 1.0} if "Qwen" in type(pipeline).__name__ else {"guidance_scale": 0.0}
    sizes = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
    found: Tensor = pipeline("a fox", generator=torch.Generator().manual_seed(0), **sizes, **guidance).images
    return found


@pytest.mark.host
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(("model", "per_channel"), [(tiny.NAMES[0], False), (tiny.NAMES[1], True)])
def test_the_quantised_picture_is_kept(model: str, per_channel: bool) -> None:
    pipeline = quantised(model, per_channel)
    wanted = latents(pipeline)
    with apply(pipeline, host=True, gate=Gate()) as handle:
        got = latents(pipeline)
        report = handle.report()
    assert torch.equal(got, wanted)
    products = ("joint_projection", "attention")  # of quantised linears none are joined
    called = [row for row in report.rows if (row.fused or row.eager) and row.op not in products]
    assert len(called) > 15
    assert sum(row.fused for row in called) > 15
    # What eager answered was compared with a kernel first, and only a CPU's own order of sums was the reason.
    assert all(reason == COMPARED or reason.startswith("refused") for row in called for reason in row.reasons), str(
        report
    )
    assert "FP8 weights" in " ".join(report.notes)
    assert not torch.equal(latents(tiny.build(model, BF16)), wanted), "the quantised model is another one"
