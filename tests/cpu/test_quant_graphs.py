"""CUDA graphs over quantised linears: their weights are buffers, and what changes in them is followed or noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from denoisers import KernelGate, check_same_bits, qwen, qwen_inputs, run, same_bits
from graph_fakes import TapeBackend
from torch import nn

from samebits.apply import apply
from samebits.graphs import denoiser
from samebits.quant import Fp8Linear

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TapeBackend()
    monkeypatch.setattr(denoiser, "CudaBackend", lambda: backend)


def quantised(per_channel: bool) -> Any:
    model = qwen(BF16)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "blocks" in name:
            parent, _, leaf = name.rpartition(".")
            scale = None if per_channel else 8.0 / 448
            setattr(model.get_submodule(parent), leaf, Fp8Linear.of(module, scale, per_channel=per_channel))
    return model


@pytest.mark.parametrize("per_channel", [False, True])
def test_replays_have_the_plain_models_bits_and_follow_the_weights(per_channel: bool) -> None:
    model = quantised(per_channel)
    plain = copy.deepcopy(model)
    inputs = [qwen_inputs(BF16, batch=1, mask=False, seed=seed) for seed in range(6)]
    with apply(model, cuda_graphs=True, gate=KernelGate()) as handle:
        for each in inputs:
            check_same_bits(run(model, each), run(plain, each))
        replayed = handle.report().graphs[0].replayed
        assert replayed >= 3, str(handle.report())
        for each in (model, plain):
            linear = each.transformer_blocks[1].attn.to_out[0]
            linear.weight.view(torch.uint8)[:, 0] ^= 0x80  # another sign
            linear.weight_scale.mul_(1.5)
        before = run(model, inputs[0])
        check_same_bits(before, run(plain, inputs[0]))
        check_same_bits(run(model, inputs[1]), run(plain, inputs[1]))
        linear = model.transformer_blocks[0].attn.to_q
        linear.weight = linear.weight.clone()  # elsewhere now
        linear.weight_scale.mul_(2.0)
        plain.transformer_blocks[0].attn.to_q.weight_scale.mul_(2.0)
        check_same_bits(run(model, inputs[0]), run(plain, inputs[0]))
        assert not same_bits(run(model, inputs[0]), before)
