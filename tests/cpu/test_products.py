"""Products that end in an activation: when they take a call, who has it when they do not, what a report says."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from denoisers import (
    NOT_HERE,
    PRODUCTS,
    KernelGate,
    check_same_bits,
    eager_calls,
    fused_calls,
    one_ulp_up,
    qwen,
    qwen_inputs,
    run,
    same_bits,
    z_image,
    z_image_inputs,
)
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from peft import LoraConfig
from torch import nn
from torch.nn import functional as F

from samebits.apply import apply
from samebits.gate import Gate
from samebits.models import _final, _products
from samebits.models._family import OTHER_REASONS, REASONS_LIMIT, Line, Reasons
from samebits.models._packed import AUTOCAST
from samebits.models._products import Product
from samebits.models.z_image import QUANTISED_AFTER
from samebits.ops import by_name
from samebits.quant.linear import Fp8Linear

BF16 = torch.bfloat16
BUILDS = {"qwen": (qwen, lambda: qwen_inputs(batch=1, mask=False)), "z-image": (z_image, z_image_inputs)}
OP_OF = {"qwen": ("linear_gelu_tanh", "gelu_tanh"), "z-image": ("linear_swiglu", "swiglu")}
LINEARS = {"linear_gelu_tanh": ("proj",), "linear_swiglu": ("w1", "w3")}
"""What the linears are called, by op. Those of GELU have a bias, those of SwiGLU have none."""

both = pytest.mark.parametrize("name", BUILDS)
ops = pytest.mark.parametrize("op", LINEARS)


class Made:
    """One product of an op, the linears that it reads, and the module around them."""

    def __init__(self, op: str, gate: Gate | None = None, dtype: torch.dtype = BF16) -> None:
        torch.manual_seed(3)
        self.op, self.gate = op, KernelGate() if gate is None else gate
        self.names, self.biased = LINEARS[op], op == "linear_gelu_tanh"
        linears = {name: nn.Linear(32, 48, bias=self.biased, dtype=dtype) for name in self.names}
        self.holder: Any = nn.ModuleDict(linears).requires_grad_(False)
        self.line = Line("here.product", op, self.gate.site("here.product", by_name(op)))
        self.product = Product(self.line, self.holder, self.names, biased=self.biased)
        self.x = torch.randn(2, 5, 32).to(dtype)

    def eager(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """What diffusers computes."""
        results = [self.holder[name](self.x if x is None else x) for name in self.names]
        return F.gelu(results[0], approximate="tanh") if self.biased else F.silu(results[0]) * results[1]

    @property
    def passed_on(self) -> dict[str, int]:
        return dict(self.line.passed_on)


# When it takes a call.


@ops
def test_a_call_that_is_taken_has_eagers_bits(op: str) -> None:
    made = Made(op)
    for _ in range(3):
        result = made.product(made.x)
        assert result is not None
        check_same_bits([result], [made.eager()])
    assert (made.line.site.counters.fused, made.line.site.counters.eager) == (2, 1)
    assert not made.passed_on
    assert made.product.why_not() is None
    made.gate.spoil = lambda name, outputs: one_ulp_up(outputs[0])
    assert not same_bits([made.product(made.x)], [made.eager()])  # it is the kernel that answers


def hooked(made: Made) -> None:
    made.holder[made.names[-1]].register_forward_hook(lambda *_: None)


def with_a_forward(made: Made) -> None:
    made.holder[made.names[0]].forward = lambda x: x


def another_class(made: Made) -> None:
    class MyLinear(nn.Linear):
        pass

    made.holder[made.names[-1]].__class__ = MyLinear


def quantised(made: Made) -> None:
    made.holder[made.names[0]] = Fp8Linear(32, 48, bias=made.biased, static=True)


def gone(made: Made) -> None:
    del made.holder[made.names[-1]]


def other_bias(made: Made) -> None:
    bias = nn.Parameter(torch.zeros(48, dtype=BF16), requires_grad=False)
    made.holder[made.names[-1]].bias = None if made.biased else bias


def transposed(made: Made) -> None:
    linear = made.holder[made.names[0]]
    linear.weight.data = linear.weight.data.t().contiguous().t()


def subclassed(made: Made) -> None:
    class MyParameter(nn.Parameter):
        pass

    made.holder[made.names[0]].weight = MyParameter(torch.zeros(48, 32, dtype=BF16))


def sparse_rows(made: Made) -> None:
    linear = made.holder[made.names[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them beta
        linear.weight = nn.Parameter(linear.weight.to_sparse_csr(), requires_grad=False)


def sparse_coordinates(made: Made) -> None:
    linear = made.holder[made.names[-1]]
    linear.weight = nn.Parameter(linear.weight.to_sparse(), requires_grad=False)


def trained(made: Made) -> None:
    made.holder.requires_grad_(True)


CHANGES: dict[str, tuple[Callable[[Made], None], str]] = {
    "a hook": (hooked, "carries a hook or a forward of its own"),
    "a forward": (with_a_forward, "carries a hook or a forward of its own"),
    "a subclass of Linear": (another_class, "is a MyLinear, the op stands for exactly Linear"),
    "a quantised linear": (quantised, "is a Fp8Linear, the op stands for exactly Linear"),
    "no linear": (gone, "there is no "),
    "a bias, or none": (other_bias, "a Linear with"),
    "a transposed weight": (transposed, "is not contiguous"),
    "a subclass of Parameter": (subclassed, "no plain parameter"),
    "a sparse weight by rows": (sparse_rows, "is sparse"),
    "a sparse weight by coordinates": (sparse_coordinates, "is sparse"),
    "gradients": (trained, "gradients are enabled"),
}


@ops
@pytest.mark.parametrize("change", CHANGES)
def test_linears_that_are_not_plain_are_left_to_themselves(change: str, op: str) -> None:
    do, sentence = CHANGES[change]
    made = Made(op)
    assert made.product(made.x) is not None
    do(made)
    assert made.product(made.x) is None
    assert [sentence in reason for reason in made.passed_on] == [True]
    assert sentence in (made.product.why_not() or "")
    assert made.line.site.counters.eager + made.line.site.counters.fused == 1
    assert not made.line.declined


@ops
def test_gradients_that_are_not_enabled_are_none(op: str) -> None:
    made = Made(op)
    trained(made)
    with torch.no_grad():
        assert made.product(made.x) is not None
        assert made.product.why_not() is None


def autocast(made: Made) -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert made.product(made.x) is None


def input_with_gradient(made: Made) -> None:
    x = made.x.clone().requires_grad_(True)
    assert made.product(x) is None
    with torch.no_grad():
        assert made.product(x) is not None


def subclass_of_tensor(made: Made) -> None:
    class Mine(torch.Tensor):
        pass

    assert made.product(made.x.as_subclass(Mine)) is None


def something_else(made: Made) -> None:
    assert made.product(object()) is None


def sparse(made: Made) -> None:
    assert made.product(made.x.to_sparse()) is None


def weight_elsewhere(made: Made) -> None:
    """As under sequential offloading outside of the linear's own call."""
    made.holder[made.names[-1]].to("meta")
    assert made.product(made.x) is None


CALLS: dict[Callable[[Made], None], str] = {
    autocast: AUTOCAST,
    input_with_gradient: _products.GRADIENT,
    subclass_of_tensor: _products.SUBCLASS,
    something_else: _products.SUBCLASS,
    sparse: _products.SUBCLASS,
    weight_elsewhere: _products.ELSEWHERE,
}


@ops
@pytest.mark.parametrize("call", CALLS)
def test_calls_that_are_not_plain_are_left_to_the_linears(call: Any, op: str) -> None:
    made = Made(op)
    call(made)
    assert made.passed_on == {CALLS[call]: 1}
    assert not made.line.site.counters.eager or call is input_with_gradient


@ops
def test_a_linear_whose_forward_was_replaced_on_the_class(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * 2)
    made = Made(op)
    assert made.product(made.x) is None
    assert list(made.passed_on) == ["torch.nn.Linear.forward was replaced by another function"]
    assert made.product.why_not() == "torch.nn.Linear.forward was replaced by another function"


class Asked(KernelGate):
    """Counts how often a product is asked what it takes; it takes 5 rows and more."""

    asked = 0
    say = ""

    def site(self, name: str, op: Any, **options: Any) -> Any:
        """As every site, but for the question."""
        site = super().site(name, op, **options)
        if op.name not in PRODUCTS:
            return site

        def unsupported(x: torch.Tensor, *_: Any) -> str | None:
            self.asked += 1
            return None if x.shape[1] >= 5 else self.say or f"few rows: {x.shape[1]}"

        site.op = dataclasses.replace(site.op, unsupported=unsupported)
        site._table.op = site.op
        return site


@ops
def test_the_op_is_asked_once_a_shape_and_before_the_gate(op: str) -> None:
    made = Made(op, Asked())
    few = made.x[:, :4].contiguous()
    for _ in range(3):
        assert made.product(few) is None
        assert made.product(made.x) is not None
    assert made.passed_on == {"few rows: 4": 3}
    assert dict(made.line.site.counters.reasons).keys().isdisjoint(made.passed_on)
    assert made.line.site.counters.fused == 2
    assert made.gate.asked == 3  # for each shape, and once by the gate about the one that reached it


@ops
def test_no_kernel_on_this_device_and_a_gate_that_is_closed_for_a_while(op: str) -> None:
    made = Made(op, Gate())
    assert made.product(made.x) is None
    assert ["the tensors are on the CPU" in reason for reason in made.passed_on] == [True]
    made = Made(op)
    made.gate.disable("closed")
    assert made.product(made.x) is None
    made.gate.enable()
    assert made.product(made.x) is not None
    assert made.passed_on == {"closed": 1}


@ops
def test_an_op_that_fails_when_asked_fails_at_the_gate_and_nowhere_else(op: str) -> None:
    class Broken(KernelGate):
        def site(self, name: str, op: Any, **options: Any) -> Any:
            def unsupported(*_: Any) -> str | None:
                raise RuntimeError("a fault of ours")

            site = super().site(name, op, **options)
            site.op = dataclasses.replace(site.op, unsupported=unsupported)
            site._table.op = site.op
            return site

    made = Made(op, Broken())
    check_same_bits([made.product(made.x)], [made.eager()])
    assert ["a fault of ours" in reason for reason in made.line.site.counters.reasons] == [True]
    assert made.product(made.x) is None
    assert ["a fault of ours" in reason for reason in made.passed_on] == [True]


class Wrong(KernelGate):
    """A gate whose products are wrong by an ulp from the first call on."""

    def _kernel(self, op: Any) -> Any:
        launch = super()._kernel(op)

        def wrong(*args: Any, out: Any = None) -> Any:
            result = launch(*args, out=out)
            if op.name in PRODUCTS and args[0].shape[1] > 4:
                one_ulp_up(result)
            return result

        return wrong


@ops
def test_a_refused_product_has_one_call_and_the_linears_have_the_others(op: str) -> None:
    made = Made(op, Wrong())
    check_same_bits([made.product(made.x)], [made.eager()])
    for _ in range(2):
        assert made.product(made.x) is None
    (reason,) = made.passed_on
    assert reason.startswith("refused: ")
    assert made.passed_on[reason] == 2
    assert made.line.site.counters.eager == 1
    few = made.x[:, :4].contiguous()  # another shape has a verdict of its own
    for _ in range(2):
        check_same_bits([made.product(few)], [made.eager(few)])
    assert made.line.site.counters.fused == 1


@ops
def test_a_flag_of_the_library_makes_another_signature(op: str) -> None:
    made = Made(op)
    for _ in range(2):
        made.product(made.x)
    counters = made.line.site.counters
    assert (counters.fused, counters.eager) == (1, 1)
    matmul = torch.backends.cuda.matmul
    was = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = not was
        made.product(made.x)
        assert (counters.fused, counters.eager) == (1, 2)  # compared anew
    finally:
        matmul.allow_bf16_reduced_precision_reduction = was
    made.product(made.x)
    assert (counters.fused, counters.eager) == (2, 2)


class OfFlags(KernelGate):
    """A gate whose products take no call under a flag, and no weight of fp32."""

    def site(self, name: str, op: Any, **options: Any) -> Any:
        site = super().site(name, op, **options)

        def unsupported(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> str | None:
            if others[-1].endswith("tunable"):
                return "TunableOp is enabled"
            return None if weight.dtype is BF16 else "the weight must be bfloat16"

        if op.name in PRODUCTS:
            site.op = site._table.op = dataclasses.replace(site.op, unsupported=unsupported)
        return site


@ops
@pytest.mark.parametrize("first", ["before the first call", "after a verdict"])
def test_a_flag_that_is_set_back_opens_the_product_again(op: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it had no calls is not said any longer than it is true."""
    made = Made(op, OfFlags())
    if first == "after a verdict":
        made.product(made.x)
    with monkeypatch.context() as under_a_flag:
        under_a_flag.setattr(_products, "blas_state", lambda: "tunable")
        for _ in range(3):
            assert made.product(made.x) is None
    for _ in range(2):
        check_same_bits([made.product(made.x)], [made.eager()])
    assert made.passed_on == {"TunableOp is enabled": 3}
    assert made.line.site.counters.fused == (1 if first == "before the first call" else 2)


@ops
def test_a_weight_that_is_replaced_is_asked_about_anew(op: str) -> None:
    made = Made(op, OfFlags())
    made.holder.float()
    assert made.product(made.x) is None  # eager says that the dtypes differ, and its words are the caller's
    made.holder.to(BF16)
    for _ in range(2):
        check_same_bits([made.product(made.x)], [made.eager()])
    assert made.line.site.counters.fused == 1


@ops
def test_what_is_remembered_of_shapes_is_bounded(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a thousand lengths, each with a sentence of its own about why it is not taken."""
    monkeypatch.setattr(_final, "LIMIT", 8)
    made = Made(op, Asked())
    most = REASONS_LIMIT + 10
    for batch in range(1, most + 1):
        x = torch.zeros(batch, 4, 32, dtype=BF16)
        made.gate.say = f"few rows: {batch * 4}"
        assert made.product(x) is None
        assert len(made.product._taken) <= 8
    assert len(made.passed_on) == REASONS_LIMIT + 1
    assert sum(made.passed_on.values()) == most
    assert made.passed_on[OTHER_REASONS] == 10
    assert made.passed_on["few rows: 4"] == 1


@ops
def test_weights_are_read_at_the_call(op: str) -> None:
    """Written to in place, pointed elsewhere, replaced, of another width and dtype: always what is there now."""
    made = Made(op)
    for _ in range(2):
        made.product(made.x)
    last = made.holder[made.names[-1]]
    with torch.no_grad():
        last.weight.mul_(2)
        check_same_bits([made.product(made.x)], [made.eager()])
        last.weight.data = torch.randn(48, 32).to(BF16)
        check_same_bits([made.product(made.x)], [made.eager()])
        last.weight = nn.Parameter(torch.randn(48, 32).to(BF16), requires_grad=False)
        check_same_bits([made.product(made.x)], [made.eager()])
        assert made.line.site.counters.fused == 4
        for name in made.names:
            made.holder[name] = nn.Linear(32, 64, bias=made.biased, dtype=BF16).requires_grad_(False)
        check_same_bits([made.product(made.x)], [made.eager()])
        made.holder.float()
        x = made.x.float()
        check_same_bits([made.product(x)], [made.eager(x)])
    assert not made.passed_on


# Whole models.


def of(handle: Any, op: str) -> list[Any]:
    """The report's rows of an op."""
    return [row for row in handle.report().rows if row.op == op]


def check(model: Any, inputs: Any, expected: Any, calls: int = 2) -> None:
    """The picture is diffusers', at every call."""
    for _ in range(calls):
        check_same_bits(run(model, inputs), expected)


@both
def test_each_call_is_counted_at_one_of_the_two_sites(name: str) -> None:
    build, arguments = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    product, alone = OP_OF[name]
    with apply(model, gate=KernelGate()) as handle:
        check(model, inputs, expected, 3)
        called = [row for row in of(handle, product) if row.fused]
        assert len(called) == 4
        assert all(row.fused + row.eager == 3 and row.fused >= 2 for row in called)
        idle = [row for row in of(handle, alone) if f"{row.site}.product" in {row.site for row in called}]
        assert len(idle) == len(called)
        for row in idle:
            assert (row.fused, row.eager, row.reasons) == (0, 0, {_products.TOGETHER: 0})
        told = str(handle.report())
        assert _products.TOGETHER in told
    with apply(model, gate=KernelGate(lacks=PRODUCTS)) as handle:
        check(model, inputs, expected, 3)
        for row in of(handle, product):
            assert (row.fused, row.eager) == (0, 0)
        assert sum(row.fused + row.eager for row in of(handle, alone)) == 3 * len(called)
        assert sum(row.fused for row in of(handle, alone)) >= 2 * len(called)
        assert sum(row.reasons.get(NOT_HERE, 0) for row in of(handle, product)) == 3 * len(called)


def test_few_rows_of_the_text_are_fused_as_they_were() -> None:
    """The text of Qwen-Image has 4 tokens here: its activation alone is fused from the first comparison on."""
    model, inputs = qwen(), qwen_inputs(batch=1, mask=False)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :4]
    expected = run(model, inputs)
    with apply(model, gate=Asked()) as handle:
        check(model, inputs, expected, 3)
        for row in of(handle, "linear_gelu_tanh"):
            if ".txt_mlp." in row.site:
                assert (row.fused, row.eager, row.reasons) == (0, 0, {"few rows: 4": 3})
            else:
                assert row.fused + row.eager == 3
                assert row.fused >= 2
        for row in of(handle, "gelu_tanh"):
            assert row.fused + row.eager == (3 if ".txt_mlp." in row.site else 0)
            assert row.fused >= (2 if ".txt_mlp." in row.site else 0)
        last = handle.report()
        before = eager_calls(handle), fused_calls(handle)
        run(model, inputs)
        assert eager_calls(handle) == before[0]
        assert fused_calls(handle) > before[1]
        assert "few rows: 4: 6 calls" in str(last)


def test_a_report_is_made_while_other_threads_count() -> None:
    class Growing(Reasons):
        """As if another thread counted a new reason while this one looks through them."""

        def items(self) -> Any:
            for item in super().items():
                self[f"reason {len(self)}"] += 1
                yield item

    with apply(qwen(), gate=KernelGate()) as handle:
        for line in handle.sites:
            for name in ("declined", "passed_on"):
                counted = Growing()
                counted["few rows"] += 2
                setattr(line, name, counted)
        assert {row.reasons["few rows"] for row in handle.report().rows if row.reasons} == {4}


@both
def test_a_refused_product_leaves_the_activation_fused(name: str) -> None:
    build, arguments = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    product, alone = OP_OF[name]
    with apply(model, gate=Wrong()) as handle:
        check(model, inputs, expected, 4)
        for row in of(handle, product):
            if any(reason.startswith("refused: ") for reason in row.reasons):
                assert (row.fused, row.eager) == (0, 1)
                assert sum(row.reasons.values()) == 4
        assert sum(row.fused for row in of(handle, alone)) >= 8


@both
def test_the_user_s_own_activation_wins(name: str) -> None:
    build, arguments = BUILDS[name]
    model, inputs = build(), arguments()
    untouched = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        if name == "qwen":
            model.transformer_blocks[0].img_mlp.net[0].gelu = torch.relu
        else:
            model.layers[0].feed_forward._forward_silu_gating = lambda gate, values: torch.relu(gate) * values
        answer = run(model, inputs)
        sentence = "was replaced on the instance, which wins over ours"
        for op, counted in zip(OP_OF[name], (0, 1), strict=True):
            (row,) = [row for row in of(handle, op) if any(sentence in reason for reason in row.reasons)]
            assert row.eager - (op in PRODUCTS) == counted
    check_same_bits(answer, run(model, inputs))
    assert not same_bits(answer, untouched)


TARGETS = {"qwen": ["net.0.proj"], "z-image": ["feed_forward.w1", "feed_forward.w3"]}


@both
@pytest.mark.parametrize("order", ["apply, lora", "lora, apply"])
def test_lora_on_the_linears_before_the_activation(order: str, name: str) -> None:
    """r=8, scale 1, 0.7, 0, fused, unfused, unloaded: at each the bits of the same steps without us."""
    build, arguments = BUILDS[name]
    inputs = arguments()
    product, _ = OP_OF[name]
    config = LoraConfig(r=8, lora_alpha=8, target_modules=TARGETS[name], init_lora_weights=False)

    def steps(model: Any, applied: bool) -> list[Any]:
        handle = apply(model, gate=KernelGate()) if applied and order == "apply, lora" else None
        seen = [run(model, inputs)]
        torch.manual_seed(4)
        model.add_adapter(config)
        model.requires_grad_(False)
        if applied and handle is None:
            handle = apply(model, gate=KernelGate())
        before = 0 if handle is None else sum(row.fused + row.eager for row in of(handle, product))
        for weight in (1.0, 0.7, 0.0):
            model.set_adapters(["default"], [weight])
            seen.append(run(model, inputs))
        if handle is not None:
            assert sum(row.fused + row.eager for row in of(handle, product)) == before
            reasons = {reason for row in of(handle, product) for reason in row.reasons}
            assert any("exactly Linear" in reason for reason in reasons)
        for step in (model.fuse_lora, model.unfuse_lora, model.unload_lora):
            step()
            seen.append(run(model, inputs))
        if handle is not None:
            fused = sum(row.fused for row in of(handle, product))
            for _ in range(2):
                check_same_bits(run(model, inputs), seen[-1])
            assert sum(row.fused for row in of(handle, product)) > fused  # plain linears again
            handle.remove()
            seen.append(run(model, inputs))
        return seen

    expected, ours = steps(build(), False), steps(build(), True)
    # With the scale 0 it is the model without LoRA.
    assert len({tuple(answer[0].flatten().tolist()) for answer in expected}) > 2
    for answer, wanted in zip(ours, [*expected, expected[-1]], strict=True):
        check_same_bits(answer, wanted)


@both
@pytest.mark.parametrize("first", ["hook", "apply"])
def test_hooks_that_move_weights(first: str, name: str) -> None:
    """A hook on a linear sees its call; one above leaves the weights where the input is, and the product may read."""
    build, arguments = BUILDS[name]
    inputs, cpu = arguments(), torch.device("cpu")
    hooks: dict[str, tuple[Callable[[Any], object], bool]] = {
        "accelerate, module by module": (lambda model: cpu_offload(model, execution_device=cpu), False),
        "accelerate, whole": (lambda model: cpu_offload_with_hook(model, execution_device=cpu), True),
        "casting": (
            lambda model: apply_layerwise_casting(
                model, storage_dtype=torch.float16, compute_dtype=torch.float32, skip_modules_pattern=("norm", "embed")
            ),
            False,
        ),
        "group of blocks": (
            lambda model: apply_group_offloading(
                model, onload_device=cpu, offload_device=cpu, offload_type="block_level", num_blocks_per_group=1
            ),
            True,
        ),
        "group of leaves": (
            lambda model: apply_group_offloading(
                model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level"
            ),
            False,
        ),
    }
    for kind, (hook, taken) in hooks.items():
        other = build()
        hook(other)
        expected = run(other, inputs)
        model = build()
        if first == "hook":
            hook(model)
        with apply(model, gate=KernelGate()) as handle:
            if first == "apply":
                hook(model)
            check(model, inputs, expected)
            rows = [row for row in of(handle, OP_OF[name][0]) if "siglip" not in row.site]
            assert all(bool(row.fused) == taken for row in rows), kind
            if not taken:
                assert all("carries a hook" in reason for row in rows for reason in row.reasons), kind
        check(model, inputs, expected)


@both
def test_a_hook_on_one_linear_or_on_what_is_around_it(name: str) -> None:
    build, arguments = BUILDS[name]
    model, inputs, seen = build(), arguments(), []
    part = model.transformer_blocks[0].img_mlp.net[0] if name == "qwen" else model.layers[0].feed_forward
    linear = part.proj if name == "qwen" else part.w3
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        hook = linear.register_forward_hook(lambda module, args, output: seen.append(output) or output * 2)
        answer = run(model, inputs)
        (row,) = [row for row in of(handle, OP_OF[name][0]) if any("carries a hook" in why for why in row.reasons)]
        assert (row.fused, row.eager) == (0, 1)
        assert len(seen) == 1
        handle.remove()
        check_same_bits(answer, run(model, inputs))
        hook.remove()
    expected = run(model, inputs)
    part.register_forward_hook(lambda module, args, output: seen.append(output))
    with apply(model, gate=KernelGate()) as handle:
        seen.clear()
        check(model, inputs, expected)
        assert len(seen) == 2
        assert all(row.fused for row in of(handle, OP_OF[name][0]) if "siglip" not in row.site)


@both
def test_weights_that_are_moved_loaded_and_cast(name: str) -> None:
    build, arguments = BUILDS[name]
    model, other, inputs = build(), build(seed=3), arguments()
    expected, unlike = run(model, inputs), run(other, inputs)
    own = copy.deepcopy(model.state_dict())
    with apply(model, gate=KernelGate()) as handle:
        check(model, inputs, expected)
        nn.Module.to(model, torch.float64)
        nn.Module.to(model, torch.float32)
        check(model, inputs, expected)
        model.load_state_dict(other.state_dict())
        check(model, inputs, unlike)
        model.load_state_dict(own, assign=True)
        check(model, inputs, expected)
        assert not any(line.passed_on for line in handle.sites)
        assert not any(row.fused or row.eager for row in of(handle, OP_OF[name][1]))
        assert sum(row.fused + row.eager for row in of(handle, OP_OF[name][0])) == 8 * 4
    check(model, inputs, expected)


@both
def test_copies_are_models_of_their_own_and_remove_leaves_nothing(name: str) -> None:
    build, arguments = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    before = {module: set(module.__dict__) for module in model.modules()}
    places = [p.data_ptr() for p in model.parameters() if not p.is_meta]
    with apply(model, gate=KernelGate()) as handle:
        check(model, inputs, expected)
        made = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(0.5)
        count = sum(row.fused for row in of(handle, OP_OF[name][0]))
        assert not same_bits(run(made, inputs), expected)
        assert sum(row.fused for row in of(handle, OP_OF[name][0])) == count
        with apply(copy.deepcopy(model), gate=KernelGate()) as another:
            check(another.models[0], inputs, expected)
            assert any(row.fused for row in of(another, OP_OF[name][0]))
    assert {module: set(module.__dict__) for module in model.modules()} == before
    if name == "qwen":  # weights of a feed-forward never move; those of Z-Image's attentions do
        assert [p.data_ptr() for p in model.parameters()] == places
    check(model, inputs, expected)


@both
def test_gradients_are_diffusers(name: str) -> None:
    build, arguments = BUILDS[name]

    def gradients(applied: bool) -> tuple[list[torch.Tensor], Any]:
        model = build().requires_grad_(True)
        handle = apply(model, gate=KernelGate()) if applied else None
        (first, *_) = model(**arguments())
        sum(part.square().sum() for part in (first if isinstance(first, list) else [first])).backward()
        return [p.grad for p in model.parameters() if p.grad is not None], handle

    (expected, _), (ours, handle) = gradients(False), gradients(True)
    check_same_bits(ours, expected)
    assert len(ours) > 50
    rows = of(handle, OP_OF[name][0])
    assert not any(row.fused or row.eager for row in rows)
    assert any("gradients are enabled" in reason for row in rows for reason in row.reasons)


@both
def test_traced_calls_are_diffusers_own(name: str) -> None:
    build, arguments = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    part = model.transformer_blocks[0].img_mlp.net[0] if name == "qwen" else model.layers[0].feed_forward
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        plain = torch.export.export(part, (x,)).graph_module.code
        with apply(model, gate=KernelGate()) as handle:
            assert torch.export.export(part, (x,)).graph_module.code == plain
            with pytest.warns(DeprecationWarning, match="jit.trace"):
                traced = torch.jit.trace(part, (x,), check_trace=False)
            assert not any(row.fused or row.eager for row in of(handle, OP_OF[name][0]))
            check_same_bits([traced(x)], [part(x)])
            check(model, inputs, expected)


@both
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_kernels_built_for_the_cpu(dtype: torch.dtype, name: str) -> None:
    """``host=True``: every call is compared, whatever the op makes of the dtype."""
    if name == "qwen":
        model, inputs = qwen(dtype), qwen_inputs(dtype, batch=1, mask=False)
    else:  # in bf16 of a width from which a hidden one follows that the kernel takes
        width = {"dim": 192, "n_heads": 6, "n_kv_heads": 6} if dtype == BF16 else {}
        model, inputs = z_image(dtype, **width), z_image_inputs(dtype)
    expected = run(model, inputs)
    with apply(model, gate=Gate(), host=True) as handle:
        check(model, inputs, expected)
        product, alone = OP_OF[name]
        calls = [sum(row.fused + row.eager for row in of(handle, op)) for op in (product, alone)]
        assert sum(calls) == 8
        if dtype == BF16:
            assert calls[0] >= 4, [row.reasons for row in of(handle, product)]


def test_an_activation_that_is_quantised_for_the_last_linear_has_its_own_site() -> None:
    """``w2`` alone in FP8: SwiGLU quantises for it, which the product does not do."""
    model, inputs = z_image(BF16), z_image_inputs(BF16)
    plain = run(model, inputs)
    for layer in model.layers:
        layer.feed_forward.w2 = Fp8Linear.of(layer.feed_forward.w2, 0.05).requires_grad_(False)
    expected = run(model, inputs)
    assert not same_bits(expected, plain)
    with apply(model, gate=KernelGate()) as handle:
        check(model, inputs, expected)
        rows = {row.site: row for row in handle.report().rows}
        for number in range(2):
            site = f"layers.{number}.feed_forward"
            row = rows[f"{site}.product"]
            assert (row.fused, row.eager, row.reasons) == (0, 0, {QUANTISED_AFTER: 2})
            assert rows[site].fused + rows[site].eager == 2
            assert rows[f"{site}.w2.input"].fused + rows[f"{site}.w2.input"].eager == 0  # it comes quantised
        assert rows["noise_refiner.0.feed_forward.product"].fused >= 1
