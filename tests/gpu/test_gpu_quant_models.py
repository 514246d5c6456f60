"""Two FP8 blocks of Qwen-Image at their real width: fused as unfused, in a graph too; and biases that join late."""

from __future__ import annotations

import pytest
import torch
from ring import assert_same_bits
from torch import nn

from samebits.apply import Handle, apply
from samebits.bench import models
from samebits.bench.models import Denoiser
from samebits.gate import Gate, State
from samebits.quant import Fp8Linear

pytestmark = pytest.mark.gpu
BLOCKS = 2


def fp8(device: torch.device, batch: int) -> Denoiser:
    denoiser = models.qwen_image(device, side=16, batch=batch, num_layers=BLOCKS)
    for name, module in list(denoiser.model.named_modules()):
        if type(module) is nn.Linear and "transformer_blocks" in name and "_mod" not in name:
            parent, _, last = name.rpartition(".")
            denoiser.model.get_submodule(parent)._modules[last] = Fp8Linear.of(module, 0.02)
    return denoiser


def settled(handle: Handle) -> None:
    """Nothing that a kernel was asked for was refused, and something was answered."""
    verdicts = handle.gate.verdicts()
    assert [str(verdict) for verdict in verdicts if verdict.state is not State.VERIFIED] == []
    assert verdicts


@pytest.mark.parametrize("batch", [1, 2])
def test_fused_is_unfused(batch: int, device: torch.device) -> None:
    denoiser = fp8(device, batch)
    expected = denoiser.forward().clone()
    assert_same_bits(denoiser.forward(), expected)
    with apply(denoiser.model, gate=Gate()) as handle:
        for _ in range(3):
            assert_same_bits(denoiser.forward(), expected)
        settled(handle)
        rows = {row.site: row for row in handle.report().rows}
        assert rows["transformer_blocks.0.attn.to_out.0.input"].fused == 2
        assert rows["transformer_blocks.1.attn.to_q.input"].fused == 0  # the kernel before quantises for it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = denoiser.forward()
        output.fill_(float("nan"))
        graph.replay()
        assert_same_bits(output, expected)


@pytest.mark.parametrize("rounding", ["eager", "fma"])
def test_biases_that_join_late(rounding: str, device: torch.device) -> None:
    denoiser = fp8(device, 1)
    exact = denoiser.forward().clone()
    with apply(denoiser.model, gate=Gate(), contract="measured", rounding=rounding, on_trial=True) as handle:
        unfused = denoiser.forward().clone()  # every signature at first sight: the reference's own result
        for _ in range(2):
            assert_same_bits(denoiser.forward(), unfused)
        settled(handle)
        late = {row.site: row for row in handle.report().rows if row.site.endswith("_bias") and row.fused + row.eager}
        # Four biases a block join late: of the attention and of the MLP, of both streams. The MLP's joins the norm of
        # the next block where there is one.
        after_mlp = ["next_norm1"] * (BLOCKS - 1) + ["residual"]
        assert set(late) == {
            f"transformer_blocks.{number}.{stream}_{part}_bias"
            for number, last in enumerate(after_mlp)
            for stream in ("img", "txt")
            for part in ("norm2", last)
        }
        # One call in each of three forwards. A signature is compared at the first site that meets it: the norms of
        # both kinds share one, the last block's residual has another, each once for the tokens of either stream.
        assert {row.fused + row.eager for row in late.values()} == {3}
        compared = {site.removeprefix("transformer_blocks.") for site, row in late.items() if row.eager}
        assert compared == {f"0.{stream}_norm2_bias" for stream in ("img", "txt")} | {
            f"{BLOCKS - 1}.{stream}_residual_bias" for stream in ("img", "txt")
        }
        assert sum(row.fused for row in late.values()) == 3 * 4 * BLOCKS - 4
    difference = (unfused.float() - exact.float()).norm() / exact.float().norm()
    assert 0 < difference < 0.05
    assert_same_bits(denoiser.forward(), exact)
