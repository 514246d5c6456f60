"""Weights side by side: the same parameters with the same values through everything that people do to a model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from denoisers import (
    KernelGate,
    check_same_bits,
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
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from samebits.apply import Handle, apply
from samebits.gate import Gate
from samebits.models import _packed
from samebits.models._packed import SideBySide, free_cached_memory
from samebits.ops import by_name, joint_projection

BUILDS = {"qwen": (qwen, lambda: qwen_inputs(batch=1, mask=False), 0), "z-image": (z_image, z_image_inputs, 5)}
"""Builder, inputs, and how many groups of three linears are joined: those of one stream."""
QKV = ("to_q", "to_k", "to_v")
BF16 = torch.bfloat16

both = pytest.mark.parametrize("name", BUILDS)


class Free:
    """A site whose op could run anywhere."""

    def obstacle(self, device: torch.device) -> None:
        return None


def attention(bias: bool = True, **factory: Any) -> nn.Module:
    """Three linears of random weights."""
    torch.manual_seed(5)
    return nn.ModuleDict({name: nn.Linear(32, 32, bias=bias, **factory) for name in QKV}).requires_grad_(False)


def groups(model: Any) -> list[tuple[nn.Linear, ...]]:
    """Query, key and value of every attention and stream."""
    found = []
    for module in model.modules():
        for names in (QKV, ("add_q_proj", "add_k_proj", "add_v_proj")):
            if all(getattr(module, name, None) is not None for name in names):
                found.append(tuple(getattr(module, name) for name in names))
    return found


def joined(model: Any) -> int:
    """How many groups lie in one memory each."""
    places = [{linear.weight.untyped_storage().data_ptr() for linear in group} for group in groups(model)]
    return sum(len(group) == 1 and 0 not in group for group in places)  # meta tensors are at address 0


def declined(handle: Handle) -> set[str]:
    """The reasons of joint projections that were not asked for."""
    return {reason for line in handle.sites if line.op == "joint_projection" for reason in line.declined}


def check(name: str, model: Any, inputs: Any, expected: Any, calls: int = 2) -> None:
    """The picture is diffusers', at every call."""
    for _ in range(calls):
        check_same_bits(run(model, inputs), expected)


# Moving them.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_parameters_stay_and_share_one_memory_without_a_second_copy(bias: bool, dtype: torch.dtype) -> None:
    attn = attention(bias, dtype=dtype)
    before, values = dict(attn.named_parameters()), {k: v.clone() for k, v in attn.state_dict().items()}
    side = SideBySide(attn, QKV)
    assert side.joined() is None
    assert side.take(Free())
    assert {k: id(v) for k, v in attn.named_parameters()} == {k: id(v) for k, v in before.items()}
    assert all(torch.equal(value, values[k]) for k, value in attn.state_dict().items())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in attn.parameters()}
    assert sum(storages.values()) == sum(p.numel() * p.element_size() for p in attn.parameters())
    matrix = side.joined()
    assert matrix is not None
    assert torch.equal(matrix.weight, torch.cat([values[f"{name}.weight"] for name in QKV]))
    assert matrix.weight.data_ptr() == before["to_q.weight"].data_ptr()
    assert (matrix.bias is None) == (not bias)
    if matrix.bias is not None:
        assert torch.equal(matrix.bias, torch.cat([values[f"{name}.bias"] for name in QKV]))
    attn["to_k"].weight.fill_(7.0)
    assert (matrix.weight[32:64] == 7.0).all()
    assert not (matrix.weight[:32] == 7.0).any()
    assert not side.take(Free()), "what lies side by side is not moved again"
    assert matrix.weight.data_ptr() == before["to_q.weight"].data_ptr()


def unlike_dtype(attn: Any) -> None:
    attn["to_k"].to(BF16)


def unlike_shape(attn: Any) -> None:
    attn["to_k"] = nn.Linear(32, 16)


def without_bias(attn: Any) -> None:
    attn["to_v"].bias = None


def view_of_something(attn: Any) -> None:
    attn["to_v"].weight.data = torch.zeros(64, 32)[32:]


def transposed(attn: Any) -> None:
    attn["to_q"].weight.data = torch.zeros(32, 32).t()


def subclassed(attn: Any) -> None:
    class MyParameter(nn.Parameter):
        pass

    attn["to_q"].weight = MyParameter(torch.zeros(32, 32))


def hooked(attn: Any) -> None:
    attn["to_q"].register_forward_hook(lambda *_: None)


def with_a_forward(attn: Any) -> None:
    attn["to_q"].forward = lambda x: x


def another_class(attn: Any) -> None:
    class MyLinear(nn.Linear):
        pass

    attn["to_q"].__class__ = MyLinear


def on_meta(attn: Any) -> None:
    attn.to("meta")


def cast(attn: Any) -> None:
    attn.to(torch.float64)


def gone(attn: Any) -> None:
    del attn["to_v"]


OBSTACLES = {
    "another dtype": (unlike_dtype, "differ in shape, dtype or device"),
    "another shape": (unlike_shape, "differ in shape, dtype or device"),
    "one bias missing": (without_bias, "missing or no plain parameter"),
    "a view": (view_of_something, "is shared with something else"),
    "transposed": (transposed, "is not contiguous"),
    "a subclass of Parameter": (subclassed, "no plain parameter"),
    "a hook": (hooked, "carries a hook or a forward of its own"),
    "a forward": (with_a_forward, "carries a hook or a forward of its own"),
    "another class": (another_class, "is a MyLinear"),
    "on meta": (on_meta, "are on meta"),
    "float64": (cast, "are torch.float64"),
    "no value": (gone, "there is no to_v"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_nothing_is_moved_where_something_speaks_against_it(obstacle: str) -> None:
    change, words = OBSTACLES[obstacle]
    attn = attention()
    change(attn)
    before = {name: p.data_ptr() for name, p in attn.named_parameters()}
    side = SideBySide(attn, QKV)
    assert not side.take(Free())
    assert side.joined() is None
    assert words in (side.why_not() or "")
    assert {name: p.data_ptr() for name, p in attn.named_parameters()} == before


def test_memory_that_somebody_else_holds_is_not_moved() -> None:
    """Moving would cut a tie and leave a second copy: another parameter, a state dict that was kept, a view."""
    for hold in (lambda attn: attn.state_dict(), lambda attn: nn.Parameter(attn["to_k"].weight.detach())):
        attn = attention()
        held = hold(attn)
        side = SideBySide(attn, QKV)
        assert not side.take(Free())
        assert "is shared with something else" in (side.why_not() or "")
        del held
        gc.collect()
        assert side.take(Free())
        assert side.why_not() is None


def test_a_parameter_that_two_modules_have_stays_one() -> None:
    attn, other = attention(), nn.Linear(32, 32)
    other.weight = attn["to_k"].weight
    assert SideBySide(attn, QKV).take(Free())
    attn["to_k"].weight.fill_(3.0)
    assert other.weight is attn["to_k"].weight
    assert (other.weight == 3.0).all()


def test_no_weight_is_moved_where_no_kernel_can_run_or_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Barred:
        def obstacle(self, device: torch.device) -> str:
            return f"no kernel runs on {device}"

    attn = attention()
    before = {name: p.data_ptr() for name, p in attn.named_parameters()}
    side = SideBySide(attn, QKV)
    assert not side.take(Barred())
    assert side.why_not() == "no kernel runs on cpu"

    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room\nfor anything")

    monkeypatch.setattr(_packed.torch, "empty", short)
    assert not side.take(Free())
    assert "could not be joined: no room" in (side.why_not() or "")
    assert {name: p.data_ptr() for name, p in attn.named_parameters()} == before
    monkeypatch.undo()
    assert side.take(Free())
    free_cached_memory()


# Whether they still lie there, call by call.


def moved_and_back(attn: Any) -> None:
    for name in QKV:
        attn[name].weight.data = attn[name].weight.data.clone()


def one_replaced(attn: Any) -> None:
    attn["to_k"].weight = nn.Parameter(attn["to_k"].weight.detach().clone(), requires_grad=False)


def two_swapped(attn: Any) -> None:
    attn["to_q"].weight, attn["to_k"].weight = attn["to_k"].weight, attn["to_q"].weight


def one_cast(attn: Any) -> None:
    attn["to_v"].to(BF16)


def a_bias_moved(attn: Any) -> None:
    attn["to_k"].bias.data = attn["to_k"].bias.data.clone()


def a_bias_taken_away(attn: Any) -> None:
    attn["to_q"].bias = None


CHANGES = {
    moved_and_back: "do not lie side by side",
    one_replaced: "do not lie side by side",
    two_swapped: "do not lie side by side",
    one_cast: "differ in shape, dtype or device",
    a_bias_moved: "do not lie side by side",
    a_bias_taken_away: "missing or no plain parameter",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_lie_there_any_more_is_seen_at_the_call(change: Any) -> None:
    attn = attention()
    side = SideBySide(attn, QKV)
    side.take(Free())
    assert side.joined() is not None
    change(attn)
    assert side.joined() is None
    assert CHANGES[change] in (side.why_not() or "")


def test_memories_that_happen_to_touch_are_not_one() -> None:
    """Three tensors at addresses that fit, each with a storage of its own, as an allocator may place them."""
    attn = attention(bias=False)
    whole = torch.zeros(96, 32)
    for name, part in zip(QKV, whole.chunk(3), strict=True):
        attn[name].weight.data = torch.from_dlpack(part)
        assert attn[name].weight.storage_offset() == 0
    assert attn["to_k"].weight.data_ptr() == attn["to_q"].weight.data_ptr() + 32 * 32 * 4
    side = SideBySide(attn, QKV)
    assert side.joined() is None
    for name, part in zip(QKV, whole.chunk(3), strict=True):  # the control
        attn[name].weight.data = part
    assert side.joined() is not None


def test_gradients_reach_every_weight() -> None:
    attn = attention().requires_grad_(True)
    side = SideBySide(attn, QKV)
    assert side.take(Free())
    assert all(p.requires_grad and p.is_leaf for p in attn.parameters())
    assert side.joined() is None
    assert "gradients are enabled" in (side.why_not() or "")
    with torch.no_grad():
        assert side.joined() is not None
        assert side.why_not() is None
    x = torch.randn(2, 32)
    sum(attn[name](x).square().sum() for name in QKV).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.any() for p in attn.parameters())
    with torch.inference_mode():
        assert side.joined() is not None


# Whole models.


@both
def test_apply_joins_and_remove_leaves_them_where_they_are(name: str) -> None:
    build, arguments, count = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    handle = apply(model, gate=KernelGate())
    assert joined(model) == count
    assert len(groups(model)) == (count or 4)
    places = [p.data_ptr() for p in model.parameters()]
    check(name, model, inputs, expected)
    assert not declined(handle)
    handle.remove()
    check(name, model, inputs, expected)
    again = apply(model, gate=KernelGate())
    assert [p.data_ptr() for p in model.parameters()] == places
    check(name, model, inputs, expected)
    assert not declined(again)
    again.remove()
    now = model.state_dict()
    assert list(now) == list(values)
    assert all(torch.equal(now[key], values[key]) for key in values)


@both
def test_where_no_kernel_runs_no_weight_is_moved(name: str) -> None:
    build, arguments, _ = BUILDS[name]
    model, inputs = build(), arguments()
    places = [p.data_ptr() for p in model.parameters()]
    with apply(model, gate=Gate()) as handle:
        run(model, inputs)
        assert all("cpu" in reason.lower() for reason in declined(handle))
    assert [p.data_ptr() for p in model.parameters()] == places


@both
def test_weights_that_were_moved_send_calls_to_the_linears_until_applied_again(name: str) -> None:
    build, arguments, count = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    gate = KernelGate()
    handle = apply(model, gate=gate)
    check(name, model, inputs, expected)
    nn.Module.to(model, torch.float64)
    nn.Module.to(model, torch.float32)
    assert joined(model) == 0
    check(name, model, inputs, expected)
    assert all("do not lie side by side" in reason for reason in declined(handle))
    assert bool(declined(handle)) == bool(count)  # a product of single linears needs no neighbours
    before = sum(sum(line.declined.values()) for line in handle.sites)
    assert apply(model, gate=gate) is handle
    assert joined(model) == count
    check(name, model, inputs, expected)
    assert sum(sum(line.declined.values()) for line in handle.sites) == before
    handle.remove()


@both
def test_what_loads_and_saves_a_model_sees_nothing(name: str, tmp_path: Path) -> None:
    build, arguments, count = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    other = build(seed=3)
    unlike = run(other, inputs)
    assert not same_bits(unlike, expected)
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        model.save_pretrained(tmp_path / "whole")
        check(name, type(model).from_pretrained(tmp_path / "whole"), inputs, expected)
        model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
        check(name, type(model).from_pretrained(tmp_path / "shards"), inputs, expected)
        save_file(model.state_dict(), tmp_path / "state.safetensors")
        loaded = load_file(tmp_path / "state.safetensors")
        assert {k: v.shape for k, v in loaded.items()} == {k: v.shape for k, v in model.state_dict().items()}
        memory = io.BytesIO()
        torch.save(model.state_dict(), memory)
        assert memory.tell() < 1.5 * sum(p.numel() * p.element_size() for p in model.parameters()) + 200_000
        memory.seek(0)
        for state in (loaded, torch.load(memory)):
            model.load_state_dict(other.state_dict())
            check(name, model, inputs, unlike)
            model.load_state_dict(state)
            check(name, model, inputs, expected)
        assert not declined(handle)
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
        check(name, model, inputs, unlike)
        assert bool(declined(handle)) == bool(count)


@both
def test_copies_and_pickles_are_models_of_their_own(name: str) -> None:
    build, arguments, _ = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()):
        run(model, inputs)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            check(name, made, inputs, expected)
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.zero_()
            check(name, model, inputs, expected)
            with apply(copy.deepcopy(model), gate=KernelGate()) as handle:
                check(name, handle.models[0], inputs, expected)
                assert not declined(handle)


@both
def test_half_and_back(name: str) -> None:
    build, _, _ = BUILDS[name]
    model = build()
    inputs = (qwen_inputs if name == "qwen" else z_image_inputs)(torch.float32)
    with apply(model, gate=KernelGate()):
        run(model, inputs)
        nn.Module.to(model, BF16)
        half = (qwen_inputs if name == "qwen" else z_image_inputs)(BF16)
        answer = run(model, half)
    check(name, model, half, answer)


@both
@pytest.mark.parametrize("order", ["apply, lora", "lora, apply"])
def test_lora_on_query_key_and_value(order: str, name: str) -> None:
    """r=8, scale 1, 0.7, 0, hot-swapped, fused, unfused, unloaded: at each the bits of the same steps without us."""
    build, arguments, count = BUILDS[name]
    inputs = arguments()
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_v", "add_k_proj"], init_lora_weights=False)

    def steps(model: Any, applied: bool) -> list[Any]:
        handle = apply(model, gate=KernelGate()) if applied and order == "apply, lora" else None
        seen = [run(model, inputs)]
        torch.manual_seed(4)
        model.add_adapter(config)
        model.requires_grad_(False)
        if applied and handle is None:
            handle = apply(model, gate=KernelGate())
        for weight in (1.0, 0.7, 0.0):
            model.set_adapters(["default"], [weight])
            seen.append(run(model, inputs))
        if handle is not None:
            assert any("exactly Linear" in reason for reason in declined(handle))
        state = {key: -3 * value for key, value in model.state_dict().items() if "lora_" in key}
        hotswap_adapter_from_state_dict(model, state, "default", model.peft_config["default"])
        model.set_adapters(["default"], [0.7])
        seen.append(run(model, inputs))
        for step in (model.fuse_lora, model.unfuse_lora, model.unload_lora):
            step()
            seen.append(run(model, inputs))
        if handle is not None:
            # Plain linears again: the product answers, at once or once samebits.apply was told to look again.
            apply(model, gate=handle.gate)
            assert joined(model) == count
            before = sum(sum(line.declined.values()) for line in handle.sites)
            check("", model, inputs, seen[-1])
            assert sum(sum(line.declined.values()) for line in handle.sites) == before
            handle.remove()
            seen.append(run(model, inputs))
        return seen

    expected, ours = steps(build(), False), steps(build(), True)
    assert len({tuple(answer[0].flatten().tolist()) for answer in expected}) > 3
    for answer, wanted in zip(ours, [*expected, expected[-1]], strict=True):
        check_same_bits(answer, wanted)


def test_writes_in_place_are_read_by_the_joint_product() -> None:
    """As LoRA's fuse writes; the spoilt control shows that the product is what answers."""
    model, inputs = qwen(), qwen_inputs(batch=1, mask=False)
    reference = qwen()
    gate = KernelGate()
    with apply(model, gate=gate) as handle, torch.no_grad():
        run(model, inputs)
        for made in (model, reference):
            made.transformer_blocks[0].attn.to_k.weight.data += 0.25
            made.transformer_blocks[1].attn.add_v_proj.bias.mul_(3)
        check_same_bits(run(model, inputs), run(reference, inputs))
        assert not declined(handle)
        gate.spoil = lambda name, outputs: outputs[0].add_(0.5) if name == "joint_projection" else None
        spoilt = run(model, inputs)
        assert not same_bits(spoilt, run(reference, inputs))


def test_fused_projections_in_any_order() -> None:
    for build, arguments, count in BUILDS.values():
        model, inputs = build(), arguments()
        expected = run(model, inputs)
        attentions = [
            module for module in model.modules() if hasattr(module, "fuse_projections") and hasattr(module, "to_q")
        ]
        for first in (True, False):
            if first:
                for module in attentions:
                    module.fuse_projections()
            with apply(model, gate=KernelGate()):
                assert joined(model) == count
                for module in attentions:
                    module.fuse_projections()
                check("", model, inputs, expected)
            check("", model, inputs, expected)


@both
def test_hooks_that_move_weights(name: str) -> None:
    """Offloading and casting, before and after: diffusers' picture, and no weight is moved under a hook."""
    build, arguments, count = BUILDS[name]
    inputs = arguments()
    cpu = torch.device("cpu")
    hooks = {
        "accelerate, module by module": lambda model: cpu_offload(model, execution_device=cpu),
        "accelerate, whole": lambda model: cpu_offload_with_hook(model, execution_device=cpu),
        "casting": lambda model: apply_layerwise_casting(
            model, storage_dtype=torch.float16, compute_dtype=torch.float32, skip_modules_pattern=("norm", "embed")
        ),
        "group": lambda model: apply_group_offloading(
            model, onload_device=cpu, offload_device=cpu, offload_type="block_level", num_blocks_per_group=1
        ),
    }
    for kind, hook in hooks.items():
        model = build()
        hook(model)
        expected = run(model, inputs)
        with apply(model, gate=KernelGate()) as handle:
            assert joined(model) < max(count, 1), kind
            check(name, model, inputs, expected)
            assert declined(handle) or not count, kind
        model = build()
        with apply(model, gate=KernelGate()):
            assert joined(model) == count
            run(model, inputs)
            hook(model)
            check(name, model, inputs, expected)
        check(name, model, inputs, expected)


def test_two_handles_removed_in_another_order() -> None:
    first, second, inputs = qwen(), qwen(seed=2), qwen_inputs(batch=1, mask=False)
    expected, other = run(first, inputs), run(second, inputs)
    one, two = apply(first, gate=KernelGate()), apply(second, gate=KernelGate())
    for _ in range(2):
        check_same_bits(run(first, inputs), expected)
        check_same_bits(run(second, inputs), other)
    one.remove()
    check_same_bits(run(first, inputs), expected)
    check_same_bits(run(second, inputs), other)
    two.remove()
    check_same_bits(run(second, inputs), other)


def test_autocast_keeps_the_linears() -> None:
    model, inputs = qwen(), qwen_inputs(batch=1, mask=False)
    with torch.autocast("cpu", dtype=BF16):
        expected = run(model, inputs)
        with apply(model, gate=KernelGate()) as handle:
            check_same_bits(run(model, inputs), expected)
            assert declined(handle) == {_packed.AUTOCAST}


@both
def test_a_refused_product_is_not_asked_for_again(name: str) -> None:
    """The reference of the op joins by a copy, so the linears themselves are what a refused shape gets."""
    build, arguments, _ = BUILDS[name]
    model, inputs = build(), arguments()
    expected = run(model, inputs)

    class Wrong(KernelGate):
        def _kernel(self, op: Any) -> Any:
            launch = super()._kernel(op)

            def wrong(*args: Any, out: Any = None) -> Any:
                result = launch(*args, out=out)
                if op.name == "joint_projection":
                    one_ulp_up(result if isinstance(result, torch.Tensor) else result[0])
                return result

            return wrong

    with apply(model, gate=Wrong()) as handle:
        check(name, model, inputs, expected, calls=3)
        assert declined(handle)
        assert all(reason.startswith("refused: ") for reason in declined(handle))
        lines = [line for line in handle.sites if line.op == "joint_projection"]
        assert sum(line.site.counters.eager for line in lines) <= 2 * len(lines)


# The op itself.


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_the_op_gives_what_three_linears_and_cat_give(batch: int, bias: bool) -> None:
    attn, words = attention(bias), attention(bias)
    x, text = torch.randn(batch, 6, 32), torch.randn(batch, 4, 32)
    matrices = []
    for made in (attn, words):
        side = SideBySide(made, QKV)
        side.take(Free())
        matrices.append(side.joined())
    (weight, image_bias), (text_weight, text_bias) = matrices
    op = by_name("joint_projection")
    one = (x, weight, image_bias, None, None, None, 3, "")
    two = (x, weight, image_bias, text, text_weight, text_bias, 3, "")
    for args in (one, two):
        parts = [torch.cat([made[name](y) for name in QKV], -1) for made, y in ((words, text), (attn, x))]
        wanted = parts[1:] if args[3] is None else [torch.cat(parts, 1)]
        eager = op.reference(*args)
        eager = (eager,) if isinstance(eager, torch.Tensor) else eager
        check_same_bits(eager, wanted)
        launcher = op.prepare(*args)
        for out in (None, op.allocate(*args)):
            ours = launcher(*args, out=out)
            ours = (ours,) if isinstance(ours, torch.Tensor) else ours
            # This library of this CPU may choose another order for a wider product; on a GPU the gate compares bits.
            for mine, theirs in zip(ours, eager, strict=True):
                assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
                torch.testing.assert_close(mine, theirs)
            assert out is None or all(mine is given for mine, given in zip(ours, out, strict=True))


def test_the_attention_op_reads_values_where_they_are() -> None:
    op = by_name("attention")
    q, k = torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    v = torch.randn(2, 7, 96)[..., 64:].unflatten(-1, (2, 16))
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., 4:] = False
    for args in ((q, k, v, None, ""), (q, k, v, mask, "")):
        wanted = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v.contiguous())), args[3])
        eager = op.reference(*args)
        check_same_bits([eager], [wanted.transpose(1, 2)])
        check_same_bits([op.prepare(*args)(*args)], [eager])
        out = op.allocate(*args)
        assert op.prepare(*args)(*args, out=out) is out[0]
        check_same_bits(out, [eager])
    with pytest.raises(ValueError, match="eager's should have"):
        op.prepare(*args)(*args, out=(torch.empty(2, 2, 7, 16).transpose(1, 2),))


def test_flags_of_the_libraries_are_part_of_a_signature() -> None:
    state, attention_state = (
        joint_projection.blas_state(),
        by_name("attention").cases[0].build(torch.device("cpu"), 0)[-1],
    )
    assert "allow_bf16_reduced_precision_reduction" in state
    assert "flash_sdp_enabled=True" in attention_state
    was = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not was
        assert joint_projection.blas_state() != state
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = was
    assert joint_projection.blas_state() == state
