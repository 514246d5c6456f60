"""Putting a forward on one instance and taking it off, among the hooks that others put on the same module."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
import types
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.hooks import ModelHook as DiffusersHook
from torch import nn

from samebits.patch import Patch, find, obstacle


class Scale(nn.Module):
    """A module whose forward has a signature worth keeping."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        """Multiply."""
        return x * self.weight * (2 if twice else 1)


class Counting:
    """What a patch puts in place: the original's result, and how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        return forward


class AddsTen(AccelerateHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 10


class Negates(DiffusersHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return -output


class Squares(DiffusersHook):
    """A hook with a forward of its own, as the cache hooks have."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.fn_ref.original_forward(*args, **kwargs) ** 2


def trace(module: nn.Module) -> dict[str, Any]:
    """All that a patch could leave behind on an instance."""
    return {name: value for name, value in module.__dict__.items() if name not in {"_parameters", "_buffers"}}


def value_of(module: nn.Module) -> float:
    with torch.no_grad():
        return float(module(torch.tensor(3.0)))


def test_patch_answers_on_this_instance_only_and_undo_leaves_no_trace() -> None:
    module, sibling, counting = Scale(), Scale(), Counting()
    before, class_forward = trace(module), Scale.forward
    patch = Patch(module, counting, owner="me")
    found = find(module)
    assert found is not None
    assert found.owner == "me"
    assert value_of(module) == value_of(sibling) == 6.0
    assert counting.calls == 1
    assert Scale.forward is class_forward
    assert find(sibling) is None
    assert patch.undo() is None
    assert patch.undo() is None
    assert trace(module) == before
    assert find(module) is None
    assert value_of(module) == 6.0
    assert counting.calls == 1


def test_module_looks_the_same_while_patched() -> None:
    module = Scale()
    before = {
        "state": dict(module.state_dict()),
        "modules": dict(module.named_modules()),
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "signature": inspect.signature(module.forward),
        "repr": repr(module),
    }
    Patch(module, Counting())
    assert {
        "state": dict(module.state_dict()),
        "modules": dict(module.named_modules()),
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "signature": inspect.signature(module.forward),
        "repr": repr(module),
    } == before


def test_second_patch_is_refused() -> None:
    module = Scale()
    patch = Patch(module, Counting())
    with pytest.raises(ValueError, match="patched already"):
        Patch(module, Counting())
    patch.undo()
    Patch(module, Counting()).undo()
    assert "forward" not in module.__dict__


@pytest.mark.parametrize(
    "theirs",
    [lambda x: x, types.MethodType(lambda self, x: x, Scale()), Scale().forward],
    ids=["lambda", "method", "other"],
)
def test_a_forward_that_the_user_set_wins(theirs: Any) -> None:
    module = Scale()
    module.forward = theirs
    assert "wins over ours" in (obstacle(module) or "")
    with pytest.raises(ValueError, match="wins over ours"):
        Patch(module, Counting())
    assert module.forward is theirs
    assert find(module) is None


def test_a_bound_copy_of_the_class_forward_is_no_replacement() -> None:
    module, counting = Scale(), Counting()
    module.forward = module.forward  # what a removed hook leaves behind
    patch = Patch(module, counting)
    assert value_of(module) == 6.0
    assert counting.calls == 1
    patch.undo()
    assert module.__dict__["forward"] == types.MethodType(Scale.forward, module)


def test_a_forward_that_the_user_sets_later_wins_and_stays() -> None:
    module, counting = Scale(), Counting()
    patch = Patch(module, counting)
    module.forward = lambda x: x + 1
    assert value_of(module) == 4.0
    assert counting.calls == 0
    assert "a forward that came later" in (patch.undo() or "")
    assert value_of(module) == 4.0


def test_inside_a_foreign_wrapper_an_undone_patch_only_passes_on() -> None:
    module, counting = Scale(), Counting()
    patch = Patch(module, counting)
    inner = module.forward
    module.forward = lambda *args: inner(*args) + 1
    assert value_of(module) == 7.0
    assert counting.calls == 1
    left = patch.undo()
    assert "passes on" in (left or "")
    assert value_of(module) == 7.0
    assert counting.calls == 1
    module.forward = inner  # the wrapper goes away and puts ours back
    assert value_of(module) == 6.0
    assert counting.calls == 1
    again = Patch(module, counting)
    assert value_of(module) == 6.0
    assert counting.calls == 2
    assert again.undo() is None
    assert "forward" not in module.__dict__


def acts(module: nn.Module, counting: Counting | None) -> dict[str, Any]:
    """What can happen to a module, by name. Without ``counting`` the patch is left out."""
    patches: list[Patch] = []

    def patch() -> None:
        if counting is None:
            return
        if obstacle(module) is None:
            patches.append(Patch(module, counting))
        else:  # accelerate's wrapper survived its own removal: without us every call raises
            assert outcome(module) is AttributeError

    def undo() -> None:
        for placed in patches:
            placed.undo()

    def registry() -> HookRegistry:
        return HookRegistry.check_if_exists_or_initialize(module)

    return {
        "patch": patch,
        "undo": undo,
        "accelerate": lambda: add_hook_to_module(module, AddsTen()),
        "accelerate off": lambda: remove_hook_from_module(module),
        "diffusers": lambda: registry().register_hook(Negates(), "negates"),
        "diffusers off": lambda: registry().remove_hook("negates"),
        "cache": lambda: registry().register_hook(Squares(), "squares"),
        "cache off": lambda: registry().remove_hook("squares"),
    }


def orders(*names: str) -> list[tuple[str, ...]]:
    """Every order of these acts in which nothing is taken off before it was put on."""
    pairs = [("patch", "undo")] + [(name, f"{name} off") for name in names]
    found = []
    for order in itertools.permutations(itertools.chain(*pairs)):
        if all(order.index(on) < order.index(off) for on, off in pairs):
            found.append(order)
    return found


def outcome(module: nn.Module) -> Any:
    """The value of a call, or what it raises: accelerate and diffusers do not survive each other in every order."""
    try:
        return value_of(module)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("hooks", [("accelerate", "diffusers"), ("accelerate", "cache"), ("diffusers", "cache")])
def test_hooks_come_and_go_in_every_order(hooks: tuple[str, str]) -> None:
    """After every step the module computes what it computes without us, and at the end looks like it."""
    all_orders = orders(*hooks)
    assert len(all_orders) == 90
    for order in all_orders:
        with_us, without_us, counting = Scale(), Scale(), Counting()
        ours, theirs = acts(with_us, counting), acts(without_us, None)
        for step in order:
            ours[step]()
            theirs[step]()
            assert outcome(with_us) == outcome(without_us), f"{order} after {step}"
        calls = counting.calls
        outcome(with_us)
        assert counting.calls == calls, f"{order}: still asked after undo"
        left, expected = trace(with_us), trace(without_us)
        assert left.keys() - {"forward"} == expected.keys() - {"forward"}, order
        forward = left.get("forward")
        assert "samebits" not in repr(getattr(forward, "__func__", forward)), order


def test_every_hook_still_sees_the_calls_while_ours_answers() -> None:
    for order in itertools.permutations(["patch", "accelerate", "diffusers", "cache"]):
        module, plain, counting = Scale(), Scale(), Counting()
        doing, without = acts(module, counting), acts(plain, None)
        for step in order:
            doing[step]()
            without[step]()
        assert value_of(module) == value_of(plain)
        assert counting.calls == 1, order


def test_a_hook_that_loses_the_chain_loses_it_without_us_too() -> None:
    """The negative control of the permutations: a hook that is really gone is noticed."""
    module = Scale()
    acts(module, None)["accelerate"]()
    assert value_of(module) == 16.0
    del module.__dict__["forward"]
    assert value_of(module) == 6.0


def test_deep_copy_is_eager_equal_and_independent() -> None:
    module, counting = Scale(), Counting()
    add_hook_to_module(module, AddsTen())
    Patch(module, counting)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.fill_(5.0)
    assert value_of(other) == 25.0
    assert counting.calls == 0
    assert value_of(module) == 16.0
    assert counting.calls == 1
    assert find(other) is None
    mine = Counting()
    patch = Patch(other, mine)
    assert value_of(other) == 25.0
    assert mine.calls == 1
    patch.undo()
    assert value_of(other) == 25.0
    assert mine.calls == 1


def test_a_patched_copy_is_as_if_it_had_never_been_one() -> None:
    module = Scale()
    patch = Patch(module, Counting())
    other = copy.deepcopy(module)
    Patch(other, Counting()).undo()
    assert "forward" not in other.__dict__
    patch.undo()
    assert module.__dict__.keys() == other.__dict__.keys() == Scale().__dict__.keys()


def test_pickle_holds_nothing_of_ours() -> None:
    module, counting = Scale(), Counting()
    Patch(module, counting, owner=object())
    data = pickle.dumps(module)
    assert b"samebits" not in data.replace(b"_samebits", b"")
    loaded = pickle.loads(data)
    assert value_of(loaded) == 6.0
    assert find(loaded) is None
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert value_of(torch.load(buffer, weights_only=False)) == 6.0
    assert counting.calls == 0
    value_of(module)
    assert counting.calls == 1


def test_a_copied_list_of_modules_keeps_each_to_itself() -> None:
    modules, counting = nn.ModuleList([Scale(2.0), Scale(3.0)]), Counting()
    for module in modules:
        Patch(module, counting)
    copied = copy.deepcopy(modules)
    with torch.no_grad():
        copied[0].weight.fill_(7.0)
    assert [value_of(module) for module in copied] == [21.0, 9.0]
    assert [value_of(module) for module in modules] == [6.0, 9.0]


def test_process_wide_module_hooks_see_the_class_forward() -> None:
    module, counting = Scale(), Counting()
    Patch(module, counting)
    registered = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        value_of(module)
    finally:
        registered.remove()
    assert counting.calls == 0
    value_of(module)
    assert counting.calls == 1


def test_whoever_intercepts_torch_calls_gets_the_class_forward() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module, counting = Scale(), Counting()
    Patch(module, counting)
    with FlopCounterMode(display=False):
        value_of(module)
    torch.func.vmap(module)(torch.ones(3))
    assert counting.calls == 0
    value_of(module)
    assert counting.calls == 1


def test_replaced_function_of_the_class_is_honoured_after_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Scale()
    Patch(module, Counting()).undo()
    monkeypatch.setattr(Scale, "forward", lambda self, x: x - 1)
    assert value_of(module) == 2.0
    counting = Counting()
    patch = Patch(module, counting)
    assert value_of(module) == 2.0
    assert counting.calls == 1
    patch.undo()
    assert value_of(module) == 2.0
