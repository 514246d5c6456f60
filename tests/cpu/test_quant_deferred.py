"""A deferred bias: consumed exactly once, by whoever says so, or an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samebits.bits import compare
from samebits.errors import DeferredBiasError
from samebits.quant import Deferrals, DeferredBias, Fp8Linear, NvFp4Linear, why_not_defer


def linear(cls: type = Fp8Linear, *, bias: bool = True) -> Any:
    made = cls(32, 16, bias, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for buffer in made.buffers():
        if buffer.ndim == 2 and buffer.dtype == torch.uint8:
            bytes_ = torch.randint(0, 0x78, buffer.shape, generator=generator, dtype=torch.uint8)
            buffer.copy_(bytes_)
    if bias:
        made.bias.data = torch.randn(16, generator=generator).bfloat16()
    return made


X = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("cls", [Fp8Linear, NvFp4Linear])
def test_output_and_bias_come_apart_and_together(cls: type) -> None:
    module = linear(cls)
    without = copy.deepcopy(module)
    without.bias = None
    with Deferrals() as deferrals:
        output, bias = deferrals.defer(module, X).take()
        added = deferrals.defer(module, X).add()
    assert compare(output, without(X)) is None
    assert bias is module.bias
    assert compare(added, without(X) + module.bias) is None
    assert compare(added, output) is not None


AS_A_TENSOR: dict[str, Callable[[Any], Any]] = {
    "sum": lambda d: d + X,
    "sum from the right": lambda d: X + d,
    "product": lambda d: d * 2,
    "product from the right": lambda d: 2 * d,
    "torch function": lambda d: torch.add(X, d),
    "layer norm": lambda d: nn.functional.layer_norm(d, (16,)),
    "attribute": lambda d: d.shape,
    "method": lambda d: d.float(),
    "index": lambda d: d[0],
    "unpacking": lambda d: tuple(d),
    "length": len,
    "truth": bool,
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "stack": lambda d: torch.stack([d, d]),
}


@pytest.mark.parametrize("use", AS_A_TENSOR)
def test_it_is_no_tensor(use: str) -> None:
    with Deferrals() as deferrals:
        deferred = deferrals.defer(linear(), X)
        with pytest.raises(DeferredBiasError, match=r"a deferred bias: .*Expected: exactly one kernel"):
            AS_A_TENSOR[use](deferred)
        assert not isinstance(deferred, torch.Tensor)
        assert not deferred.taken
        assert "still to be added" in repr(deferred)
        deferred.add()
        assert "consumed" in repr(deferred)


@pytest.mark.parametrize("first", ["take", "add"])
@pytest.mark.parametrize("second", ["take", "add"])
def test_it_is_consumed_once(first: str, second: str) -> None:
    with Deferrals() as deferrals:
        deferred = deferrals.defer(linear(), X)
        getattr(deferred, first)()
        with pytest.raises(DeferredBiasError, match="added twice"):
            getattr(deferred, second)()


def test_it_cannot_be_dropped() -> None:
    def forget_one() -> None:
        with Deferrals() as deferrals:
            deferrals.defer(linear(), X, "txt_mlp").add()
            deferrals.defer(linear(), X, "img_mlp")

    with pytest.raises(DeferredBiasError, match=r"dropped at img_mlp, so the bias was never added"):
        forget_one()


def test_an_error_on_its_way_is_not_hidden() -> None:
    def break_off() -> None:
        with Deferrals() as deferrals:
            deferrals.defer(linear(), X)
            raise KeyError("theirs")

    with pytest.raises(KeyError):
        break_off()


class Own(Fp8Linear):
    pass


def with_hook(module: Any) -> Any:
    module.register_forward_hook(lambda *_: None)
    return module


def with_forward(module: Any) -> Any:
    module.forward = lambda x: x
    return module


def compiled(module: Any) -> Any:
    module.compile(backend="eager")
    return module


class Lora(nn.Module):
    """As peft's: a wrapper around the linear."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.bias = base_layer.bias


DECLINED = {
    "plain": (lambda: nn.Linear(32, 16), "it is a Linear"),
    "subclass": (lambda: Own(32, 16), "it is a Own"),
    "lora": (lambda: Lora(linear()), "it is a Lora"),
    "no bias": (lambda: linear(bias=False), "it has no bias"),
    "hook": (lambda: with_hook(linear()), "carries a hook"),
    "compiled": (lambda: compiled(linear()), "compiled by torch.compile"),
    "forward": (lambda: with_forward(linear()), "a forward of its own"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    make, sentence = DECLINED[name]
    assert sentence in (why_not_defer(make()) or "")
    with pytest.raises(ValueError, match=sentence), Deferrals() as deferrals:
        deferrals.defer(make(), X)


def test_declined_under_tracing() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    reasons: list[str | None] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        reasons.append(why_not_defer(module))
        return x * 2

    module = linear()
    assert why_not_defer(module) is None
    make_fx(body)(X)
    assert "dispatch mode" in (reasons[0] or "")


def test_only_what_was_made_by_a_linear_counts() -> None:
    """The class itself holds a pair, whoever makes it."""
    deferred = DeferredBias(torch.zeros(2), torch.ones(2))
    assert compare(deferred.add(), torch.ones(2)) is None
