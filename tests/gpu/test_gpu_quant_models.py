"""FP8 blocks of Qwen-Image and Z-Image at their real width: fused as unfused, in a graph too; biases that join late."""

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


def fp8_z_image(device: torch.device, batch: int) -> Denoiser:
    denoiser = models.z_image(device, side=32, batch=batch, n_layers=BLOCKS, n_refiner_layers=1)
    for name, module in list(denoiser.model.named_modules()):
        if type(module) is nn.Linear and (".attention." in name or ".feed_forward." in name):
            parent, _, last = name.rpartition(".")
            denoiser.model.get_submodule(parent)._modules[last] = Fp8Linear.of(module, 0.02)
    return denoiser


Z_BLOCKS = ("noise_refiner.0", "context_refiner.0", *(f"layers.{number}" for number in range(BLOCKS)))
READ_QUANTISED = tuple(f"attention.to_{name}" for name in "qkv") + tuple(
    f"feed_forward.w{number}" for number in (1, 2, 3)
)


@pytest.mark.parametrize("batch", [1, 2])
def test_z_image_fused_is_unfused(batch: int, device: torch.device) -> None:
    denoiser = fp8_z_image(device, batch)
    expected = denoiser.forward().clone()
    assert_same_bits(denoiser.forward(), expected)
    with apply(denoiser.model, gate=Gate()) as handle:
        for _ in range(3):
            assert_same_bits(denoiser.forward(), expected)
        # The attention's own site wants values in the rows of a joint product, which FP8 has none of.
        asked = [verdict for verdict in handle.gate.verdicts() if verdict.op != "attention"]
        assert [str(verdict) for verdict in asked if verdict.state is not State.VERIFIED] == []
        rows = {row.site: row for row in handle.report().rows}
        for block in Z_BLOCKS:
            own = {name: rows[f"{block}.{name}.input"] for name in (*READ_QUANTISED, "attention.to_out.0")}
            calls = {name: row.fused + row.eager for name, row in own.items()}
            assert calls == {**dict.fromkeys(READ_QUANTISED, 0), "attention.to_out.0": 3}, block
            for site in ("attention_norm2", "ffn_norm2", "feed_forward"):
                assert rows[f"{block}.{site}"].fused >= 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = denoiser.forward()
        output.fill_(float("nan"))
        graph.replay()
        assert_same_bits(output, expected)


def test_z_image_with_scales_that_differ(device: torch.device) -> None:
    """The control, and the way back: a scale that changed is seen, and its linears quantise for themselves."""
    denoiser = fp8_z_image(device, 1)
    shared = denoiser.forward().clone()
    with apply(denoiser.model, gate=Gate()) as handle:
        for _ in range(2):
            denoiser.forward()
        block = denoiser.model.layers[1]
        block.attention.to_k.input_scale.mul_(1.5)
        block.feed_forward.w3.input_scale.mul_(1.5)
        apart = [denoiser.forward().clone() for _ in range(3)]
        rows = {row.site: row for row in handle.report().rows}
        for name in READ_QUANTISED:
            row = rows[f"layers.1.{name}.input"]
            assert row.fused + row.eager == (0 if name.endswith("w2") else 3), name
    expected = denoiser.forward().clone()
    assert not torch.equal(expected, shared)
    for output in apart:
        assert_same_bits(output, expected)


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
