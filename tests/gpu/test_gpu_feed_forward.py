"""Both families' feed-forwards at their real size: the product with its activation, and who has the other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from ring import assert_same_bits, randn

from samebits import bits
from samebits.apply import Handle, Row, apply
from samebits.bench import models
from samebits.bench.models import Denoiser
from samebits.gate import Gate
from samebits.models import _products
from samebits.ops import by_name

pytestmark = pytest.mark.gpu

BUILD: dict[str, Callable[..., Denoiser]] = {
    "qwen-image": partial(models.qwen_image, side=16, num_layers=1),
    "z-image": partial(models.z_image, side=32, n_layers=1, n_refiner_layers=1),
}
OP_OF = {"qwen-image": ("linear_gelu_tanh", "gelu_tanh"), "z-image": ("linear_swiglu", "swiglu")}
SITE = {"qwen-image": "transformer_blocks.0.img_mlp.net.0", "z-image": "layers.0.feed_forward"}
TOKENS = {"qwen-image": (4096, 1024, 6889), "z-image": (4224, 4128, 1152)}
WIDTH = {"qwen-image": 3072, "z-image": 3840}
families = pytest.mark.parametrize("name", BUILD)
sizes = pytest.mark.parametrize(("name", "tokens"), [(name, tokens) for name in BUILD for tokens in TOKENS[name]])


@contextmanager
def feed_forward(name: str, device: torch.device) -> Iterator[tuple[Denoiser, Any]]:
    """A denoiser of one block of real width, and its feed-forward, without gradients."""
    denoiser = BUILD[name](device)
    model: Any = denoiser.model
    with torch.no_grad():
        yield denoiser, model.transformer_blocks[0].img_mlp if name == "qwen-image" else model.layers[0].feed_forward


def tokens_of(name: str, tokens: int, device: torch.device, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return randn(batch, tokens, WIDTH[name], dtype=torch.bfloat16, device=device, seed=seed)


def rows(handle: Handle, name: str) -> tuple[Row, Row]:
    """The rows of the product and of the activation alone."""
    found = {row.site: row for row in handle.report().rows}
    return found[f"{SITE[name]}.product"], found[SITE[name]]


def runs_here(name: str, device: torch.device) -> bool:
    return by_name(OP_OF[name][0]).is_for(device)


@sizes
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("amplitude", [1.0, 60.0])
def test_a_whole_feed_forward_has_eagers_bits(
    name: str, tokens: int, batch: int, amplitude: float, device: torch.device
) -> None:
    with feed_forward(name, device) as (denoiser, part):
        x = tokens_of(name, tokens, device, batch) * amplitude
        expected = part(x)
        with apply(denoiser.model, gate=Gate()) as handle:
            for _ in range(3):
                assert_same_bits(part(x), expected)
            product, alone = rows(handle, name)
            if runs_here(name, device):
                assert (product.fused, product.eager) == (2, 1), product
                assert (alone.fused, alone.eager) == (0, 0)
            else:
                assert (product.fused, product.eager, alone.fused) == (0, 0, 2)
            other = tokens_of(name, tokens, device, batch, seed=9)  # of the verified signature
            ours = part(other)
        assert_same_bits(ours, part(other))
        assert bits.compare((ours,), (expected,)) is not None
        assert_same_bits(part(x), expected)


@families
@pytest.mark.parametrize("tokens", [1, 17, 128])
def test_few_rows_are_fused_without_the_product(name: str, tokens: int, device: torch.device) -> None:
    with feed_forward(name, device) as (denoiser, part):
        x = tokens_of(name, tokens, device)
        expected = part(x)
        with apply(denoiser.model, gate=Gate()) as handle:
            for _ in range(3):
                assert_same_bits(part(x), expected)
            product, alone = rows(handle, name)
            assert (product.fused, product.eager) == (0, 0)
            assert sum(product.reasons.values()) == 3
            assert (alone.fused, alone.eager) == (2, 1)
            if runs_here(name, device):
                assert ["rows are too few" in reason for reason in product.reasons] == [True]


@families
def test_a_graph_of_a_feed_forward_reads_what_is_there_at_the_replay(name: str, device: torch.device) -> None:
    """The addresses are in the kernel's arguments by value; the values behind them are not."""
    with feed_forward(name, device) as (denoiser, part):
        x, other = (tokens_of(name, TOKENS[name][0], device, seed=seed) for seed in (0, 5))
        expected, unlike = part(x), part(other)
        with apply(denoiser.model, gate=Gate()) as handle:
            for _ in range(2):
                part(x)
            fused = sum(row.fused for row in rows(handle, name))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = part(x)
            assert sum(row.fused for row in rows(handle, name)) == fused + 1
            for values, wanted in ((None, expected), (other, unlike)):
                if values is not None:
                    x.copy_(values)
                output.fill_(float("nan"))
                graph.replay()
                assert_same_bits(output, wanted)


@families
def test_weights_that_moved_and_an_input_that_is_not_aligned(name: str, device: torch.device) -> None:
    with feed_forward(name, device) as (denoiser, part):
        x = tokens_of(name, TOKENS[name][0], device)
        room = torch.empty(x.numel() + 8, dtype=x.dtype, device=device)
        shifted = room[8:].view(x.shape).copy_(x)  # 16 bytes on: what the kernel can read and the library sees
        expected, of_shifted = part(x), part(shifted)
        with apply(denoiser.model, gate=Gate()) as handle:
            for _ in range(2):
                assert_same_bits(part(x), expected)
            torch.nn.Module.to(denoiser.model, "cpu")
            torch.nn.Module.to(denoiser.model, device)
            assert_same_bits(part(x), expected)
            assert_same_bits(part(shifted), of_shifted)
            product, _ = rows(handle, name)
            if runs_here(name, device):
                assert product.fused == 2
            assert product.reasons[_products.UNALIGNED] == 1


@families
def test_linears_that_must_be_called_are_called(name: str, device: torch.device) -> None:
    with feed_forward(name, device) as (denoiser, part):
        x = tokens_of(name, TOKENS[name][0], device)
        linear = part.net[0].proj if name == "qwen-image" else part.w3
        linear.register_forward_hook(lambda module, args, output: output * 2)
        expected = part(x)
        with apply(denoiser.model, gate=Gate()) as handle:
            for _ in range(3):
                assert_same_bits(part(x), expected)
            product, alone = rows(handle, name)
            assert (product.fused, product.eager) == (0, 0)
            assert ["carries a hook" in reason for reason in product.reasons] == [True]
            assert alone.fused == 2


@families
def test_half_precision_of_the_other_kind(name: str, device: torch.device) -> None:
    denoiser = BUILD[name](device, dtype=torch.float16)
    model: Any = denoiser.model
    part = model.transformer_blocks[0].img_mlp if name == "qwen-image" else model.layers[0].feed_forward
    x = tokens_of(name, TOKENS[name][0], device).half()
    with torch.no_grad():
        expected = part(x)
        with apply(model, gate=Gate()) as handle:
            for _ in range(3):
                assert_same_bits(part(x), expected)
            product, alone = rows(handle, name)
    assert (product.fused, product.eager) == (0, 0)
    assert alone.fused == 2
