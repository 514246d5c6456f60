"""Which calls of a denoiser a graph answers, which it must not, and that no answer is ever out of date."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from denoisers import check_same_bits, same_bits
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from graph_fakes import NOT_PERMITTED, OpenGate, Stale, Tape, TapeBackend, tensors_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from samebits import capture
from samebits.errors import ContractViolation
from samebits.graphs import denoiser
from samebits.graphs.denoiser import DenoiserGraphs
from samebits.graphs.model_state import TRUSTED, ModelState
from samebits.graphs.recorder import HostConstants, Recorder
from samebits.graphs.row import (
    AUTOCAST,
    BUSY,
    CAPTURED,
    CAPTURING,
    CAPTURING_ELSEWHERE,
    CHECKED,
    CLOSED,
    FIRST,
    GRADIENTS,
    NO_MEMORY,
    NO_ROOM,
    UNSETTLED,
)
from samebits.patch import Patch, obstacle

HERE = __name__.partition(".")[0]


@dataclass
class Result:
    sample: list[Tensor]
    scale: float | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = 1.5
        self.scaling = {"default": 2.0}
        self.processor: Any = None
        self.body: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x)) * self.factor * self.scaling["default"]


class Toy(nn.Module):
    """A denoiser in which a test can have anything happen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("shift", torch.randn(8))
        self.table = torch.randn(8)
        self.last: Callable[..., Any] | None = None

    def forward(
        self, x: Tensor, prompts: Any = (), *, extra: Any = None, scale: float = 1.0, return_dict: bool = True
    ) -> Any:
        if self.last is not None:
            return self.last(x, prompts)
        for block in self.blocks:
            x = block(x)
        x = x * scale + self.shift + self.table
        parts = [x, *(x[0, 0] + prompt.sum() for prompt in tensors_in([prompts, extra]))]
        return Result(parts, scale) if return_dict else (parts,)


def x_of(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(seed))


class Setup:
    """A toy with graphs, the same toy without, and a fake for everything around them."""

    def __init__(self, **options: Any) -> None:
        self.model, self.twin = Toy().requires_grad_(False), Toy().requires_grad_(False)
        self.backend, self.gate = TapeBackend(), OpenGate()
        self.graphs = DenoiserGraphs(
            "toy",
            self.model,
            self.gate,
            foreign=obstacle,
            backend=self.backend,
            trusted=TRUSTED | {HERE},
            **options,
        )
        self.patch = Patch(self.model, self.graphs.wrap)

    def call(self, *args: Any, **kwargs: Any) -> str:
        """Call both, compare, and return how the call was answered: "replayed", or the reason why not."""
        before = self.graphs.row
        with torch.no_grad():
            ours, theirs = self.model(*args, **kwargs), self.twin(*args, **kwargs)
        check_same_bits(list(leaves(ours)), list(leaves(theirs)))
        return self.since(before)

    def since(self, before: Any) -> str:
        row = self.graphs.row
        assert row.replayed + row.plain == before.replayed + before.plain + 1
        if row.replayed > before.replayed:
            return "replayed"
        (reason,) = [r for r, calls in row.reasons.items() if calls > before.reasons.get(r, 0)]
        return reason

    def calls(self, *seeds: int, **kwargs: Any) -> list[str]:
        return [self.call(x_of(seed), **kwargs) for seed in seeds]

    def both(self, change: Callable[[Toy], object]) -> None:
        for model in (self.model, self.twin):
            change(model)

    def warm(self, *args: Any, **kwargs: Any) -> None:
        """Call until a graph answers."""
        args = args or (x_of(0),)
        for seed in range(100, 104):
            self.call(x_of(seed, args[0].shape[1]), *args[1:], **kwargs)
        assert self.call(*args, **kwargs) == "replayed"


def leaves(result: Any) -> Any:
    return tensors_in(result.sample if isinstance(result, Result) else result)


# The life of a key.


def test_a_key_is_verified_captured_checked_once_and_replayed() -> None:
    setup = Setup()
    assert setup.calls(0, 1, 2, 3, 4) == [FIRST, CAPTURED, CHECKED, "replayed", "replayed"]
    row = setup.graphs.row
    assert (row.replayed, row.plain, row.captured, row.graphs, row.bytes) == (2, 3, 1, 1, 1000)
    assert row.to_json()["reasons"] == {FIRST: 1, CAPTURED: 1, CHECKED: 1}
    assert "cuda graph of toy: replayed 2, plain 3; 1 graph in 0 MiB\n  first call with such arguments: 1" in str(row)


def test_results_stay_what_they_were() -> None:
    setup = Setup()
    setup.warm()
    with torch.no_grad():
        kept = [setup.model(x_of(seed)) for seed in range(4)]
        expected = [setup.twin(x_of(seed)) for seed in range(4)]
    assert setup.graphs.row.replayed >= 5
    for ours, theirs in zip(kept, expected, strict=True):
        assert type(ours) is Result
        assert ours.scale == 1.0
        check_same_bits(list(leaves(ours)), list(leaves(theirs)))
    assert not same_bits(list(leaves(kept[0])), list(leaves(kept[1])))


@pytest.mark.parametrize("return_dict", [True, False])
def test_nested_arguments_are_copied_in_and_structures_come_out(return_dict: bool) -> None:
    setup = Setup()

    def prompts(seed: int) -> Any:
        return [x_of(seed, 1), (x_of(seed + 1, 2), [x_of(seed + 2)])], {"extra": {"mask": x_of(seed + 3), "n": None}}

    answers = []
    for seed in range(0, 60, 10):
        nested, named = prompts(seed)
        answers.append(setup.call(x_of(seed), nested, **named, return_dict=return_dict))
    assert answers == [FIRST, CAPTURED, CHECKED, "replayed", "replayed", "replayed"]


def strided(seed: int) -> Tensor:
    return torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(seed)).permute(2, 1, 0)


def with_gaps(seed: int) -> Tensor:
    return torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed))[..., ::2]


def expanded(seed: int) -> Tensor:
    return torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(seed)).expand(2, 3, 8)


def misaligned(seed: int) -> Tensor:
    raw = torch.empty(2 * 3 * 8 + 64 + 1)
    start = next(n for n in range(1, 65) if (raw.data_ptr() + 4 * n) % 64 == 4)
    return raw[start : start + 48].normal_(generator=torch.Generator().manual_seed(seed)).view(2, 3, 8)


@pytest.mark.parametrize("make", [strided, with_gaps, expanded, misaligned])
def test_arguments_of_every_layout(make: Callable[[int], Tensor]) -> None:
    setup = Setup()
    seen: list[Tensor] = []
    setup.both(lambda model: model.blocks[0].register_buffer("unused", None))
    answers = []
    for seed in range(5):
        answers.append(setup.call(make(seed)))
    assert answers == [FIRST, CAPTURED, CHECKED, "replayed", "replayed"]
    (graph,) = setup.graphs._graphs.values()
    seen = [static.view for static in graph._statics]
    assert [(t.stride(), t.data_ptr() % 64) for t in seen] == [(make(0).stride(), make(0).data_ptr() % 64)]


def test_numbers_and_shapes_are_part_of_the_key() -> None:
    setup = Setup()
    setup.warm()
    for kwargs in ({"scale": 2.0}, {"scale": -0.0}, {"scale": 0.0}, {"extra": [[(1, 4)]]}, {"return_dict": False}):
        assert setup.call(x_of(1), **kwargs) == FIRST
    assert setup.call(x_of(1, rows=4)) == FIRST
    assert setup.call(x_of(1).double().float()) == "replayed"
    assert setup.calls(2, scale=2.0) == [CAPTURED]


@pytest.mark.parametrize(
    "switch",
    [
        lambda on: torch.use_deterministic_algorithms(on),
        lambda on: torch.backends.cuda.enable_flash_sdp(not on),
        lambda on: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(on),
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
    ],
)
def test_switches_of_torch_are_part_of_the_key(switch: Callable[[bool], None]) -> None:
    setup, x = Setup(), x_of(1)
    setup.warm()
    switch(True)
    try:
        assert setup.call(x) == FIRST
    finally:
        switch(False)
    assert setup.calls(1) == ["replayed"]


def set_attention_order(order: list[int]) -> None:
    torch._C._set_sdp_priority_order(order)  # type: ignore[attr-defined]


def test_a_switch_that_the_first_call_settles_costs_no_further_call() -> None:
    """On a GPU of the Hopper generation the first attention of a process puts another back end first."""
    before: list[int] = torch._C._get_sdp_priority_order()  # type: ignore[attr-defined]
    settled = [before[-1], *before[:-1]]
    setup = Setup()
    setup.both(lambda model: setattr(model.blocks[0], "body", lambda x: (set_attention_order(settled), x)[1]))
    try:
        assert setup.calls(0, 1, 2, 3) == [FIRST, CAPTURED, CHECKED, "replayed"]
        assert len(setup.graphs._seen) == 1
        set_attention_order(before)
        assert setup.calls(4) == [FIRST], "another order is another key"
        assert setup.calls(5) == ["replayed"], "that call has put the order back"
    finally:
        set_attention_order(before)


def test_a_switch_that_the_watched_call_settles_is_no_fault_of_the_arguments() -> None:
    before: list[int] = torch._C._get_sdp_priority_order()  # type: ignore[attr-defined]
    setup = Setup()
    try:
        assert setup.calls(0) == [FIRST]
        settle = [before[-1], *before[:-1]]
        setup.both(lambda model: setattr(model.blocks[0], "body", lambda x: (set_attention_order(settle), x)[1]))
        answer = "the forward changes a switch of torch, will be tried again"
        assert setup.calls(1, 2, 3, 4, 5) == [answer, answer, CAPTURED, CHECKED, "replayed"]
    finally:
        set_attention_order(before)


def test_the_attention_back_end_of_diffusers_is_part_of_the_key() -> None:
    from diffusers.models.attention_dispatch import attention_backend

    setup = Setup()
    setup.warm()
    with attention_backend("_native_math"):
        assert setup.calls(1) == [FIRST]
    assert setup.calls(1) == ["replayed"]


# Calls that are plain.


class Odd:
    pass


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"extra": torch.zeros(2, device="meta")}, "argument extra is a tensor on meta, not on cpu"),
        ({"extra": [1, {"a": Odd()}]}, f"argument extra.1.a is a {HERE}.Odd, which has no value to know it by"),
        ({"extra": {(1, 2): 3}}, "argument extra is a dict with a tuple for a key"),
        ({"extra": nn.Buffer(torch.zeros(0))}, "argument extra is an empty tensor"),
        ({"extra": torch.zeros(2).to_sparse()}, "argument extra is a tensor without plain memory"),
        ({"extra": torch.zeros(2, dtype=torch.complex64).conj()}, "lazy negation or conjugation"),
    ],
)
def test_arguments_that_no_key_can_hold(kwargs: dict[str, Any], reason: str) -> None:
    setup = Setup()
    before = setup.graphs.row
    setup.model.last = lambda x, prompts: (x + 1,)
    for _ in range(3):
        with torch.no_grad():
            setup.model(x_of(0), **kwargs)
    row = setup.graphs.row
    assert row.plain == before.plain + 3
    (told,) = row.reasons
    assert reason in told
    assert setup.backend.attempts == 0


def test_calls_without_tensors_are_plain() -> None:
    setup = Setup()
    setup.model.last = lambda x, prompts: (x,)
    with torch.no_grad():
        assert setup.model(1) == (1,)
    assert setup.graphs.row.reasons == {"no argument is a tensor": 1}


def test_gradients_autocast_captures_and_a_stopped_gate_make_a_call_plain() -> None:
    setup = Setup()
    setup.warm()
    plain = dict(setup.graphs.row.reasons)

    def told() -> dict[str, int]:
        return {r: n - plain.get(r, 0) for r, n in setup.graphs.row.reasons.items() if n > plain.get(r, 0)}

    check_same_bits(list(leaves(setup.model(x_of(1)))), list(leaves(setup.twin(x_of(1)))))
    assert told() == {GRADIENTS: 1}
    with torch.autocast("cpu", torch.bfloat16):
        assert setup.call(x_of(1)) == AUTOCAST
    setup.backend.here = True
    assert setup.call(x_of(1)) == CAPTURING
    setup.backend.here = False
    setup.gate.reason = "the gate is disabled"
    assert setup.call(x_of(1)) == "the gate is disabled"
    setup.gate.reason = None
    assert setup.call(x_of(1)) == "replayed"
    with torch.inference_mode():
        ours = setup.model(x_of(2)).sample[0]
        assert ours.is_inference()
    check_same_bits([ours.clone()], [setup.twin(x_of(2)).sample[0]])
    assert setup.graphs.row.replayed >= 2


def test_nothing_is_captured_while_anybody_captures_or_before_every_op_is_verified() -> None:
    setup = Setup()

    def unsettle(model: Toy) -> None:
        model.blocks[0].body = lambda x: (setattr(setup.gate, "unsettled_calls", setup.gate.unsettled_calls + 1), x)[1]

    settled = setup.model.blocks[0].body
    setup.both(unsettle)
    assert setup.calls(0, 1, 2) == [FIRST, UNSETTLED, UNSETTLED]
    setup.both(lambda model: setattr(model.blocks[0], "body", settled))
    assert setup.calls(3) == [UNSETTLED]
    setup.backend.anywhere = True
    assert setup.calls(4) == [CAPTURING_ELSEWHERE]
    setup.backend.anywhere = False
    assert setup.calls(5) == [CAPTURED]


def test_a_graph_that_was_captured_with_an_unverified_op_is_made_anew() -> None:
    setup = Setup()
    assert setup.calls(0) == [FIRST]

    class Unsettling(Tape):
        def __enter__(self) -> Any:
            setup.gate.unsettled_calls += 1
            return super().__enter__()

    setup.backend.kind = Unsettling
    assert setup.calls(1) == [UNSETTLED]
    assert not setup.backend.live
    setup.backend.kind = Tape
    assert setup.calls(2, 3) == [UNSETTLED, CAPTURED]


# The model: what keeps it from being captured, and what makes its graphs go.


def test_a_process_without_end_of_new_keys_remembers_only_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoiser, "SEEN_LIMIT", 3)
    setup = Setup()
    for scale in range(10):
        assert setup.calls(0, scale=float(scale)) == [FIRST]
    assert len(setup.graphs._seen) == 3


class Noting(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def hook_of_accelerate(model: Toy) -> Callable[[], object]:
    add_hook_to_module(model.blocks[0].linear, Noting())
    return lambda: remove_hook_from_module(model.blocks[0].linear)


def hook_of_accelerate_on_top(model: Toy) -> Callable[[], object]:
    add_hook_to_module(model, Noting())
    return lambda: remove_hook_from_module(model)


def hook_of_diffusers(model: Toy) -> Callable[[], object]:
    registry = HookRegistry.check_if_exists_or_initialize(model.blocks[1])
    registry.register_hook(DiffusersHook(), "first_block_cache")
    return lambda: registry.remove_hook("first_block_cache")


def forward_hook(model: Toy) -> Callable[[], object]:
    return model.blocks[0].register_forward_hook(lambda *args: None).remove


def forward_pre_hook(model: Toy) -> Callable[[], object]:
    return model.blocks[0].linear.register_forward_pre_hook(lambda *args: None).remove


def compiled(model: Toy) -> Callable[[], object]:
    model.blocks[0].compile(backend="eager", disable=True)
    return lambda: model.blocks[0].__dict__.pop("_compiled_call_impl")


def replaced_forward(model: Toy) -> Callable[[], object]:
    model.blocks[0].forward = lambda x: type(model.blocks[0]).forward(model.blocks[0], x)
    return lambda: delattr(model.blocks[0], "forward")


class Stranger:
    __module__ = "somebody.elses"


def processor(model: Toy) -> Callable[[], object]:
    model.blocks[0].processor = Stranger()
    return lambda: setattr(model.blocks[0], "processor", None)


def meta_weight(model: Toy) -> Callable[[], object]:
    block = model.blocks[0]
    block.register_parameter("away", nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False))
    return lambda: delattr(block, "away")


OBSTACLES = [
    (hook_of_accelerate, "blocks.0.linear carries a hook of accelerate (Noting), which may move weights"),
    (hook_of_accelerate_on_top, "Toy carries a hook of accelerate (Noting), which may move weights"),
    (hook_of_diffusers, "blocks.1 carries a hook of diffusers (first_block_cache)"),
    (forward_hook, "blocks.0 carries a forward hook, which a replay would not call"),
    (forward_pre_hook, "blocks.0.linear carries a forward hook, which a replay would not call"),
    (compiled, "torch.compile runs blocks.0"),
    (replaced_forward, "blocks.0: its forward was replaced on the instance by"),
    (processor, "blocks.0 runs code of somebody.elses.Stranger, which may do on the host"),
    (meta_weight, "blocks.0.away is on meta, not on cpu"),
]


@pytest.mark.parametrize(("put", "reason"), OBSTACLES, ids=[put.__name__ for put, _ in OBSTACLES])
def test_what_keeps_a_model_from_being_captured(put: Callable[[Toy], Callable[[], object]], reason: str) -> None:
    setup = Setup()
    take = put(setup.model)
    assert setup.calls(0) == [FIRST]
    for seed in range(4):
        assert setup.call(x_of(seed)).startswith(reason)
    assert setup.backend.attempts == 0
    take()
    assert CAPTURED in setup.calls(*range(6))
    assert setup.calls(7) == ["replayed"]
    put(setup.model)
    assert setup.call(x_of(8)).startswith("the model changed since the last call: ")
    assert not setup.backend.live, "the graphs of the model as it was are still there"
    assert any(answer.startswith(reason) for answer in setup.calls(*range(6)))


def test_a_forward_hook_on_the_denoiser_itself_sees_replays() -> None:
    setup = Setup()
    seen: list[Any] = []
    setup.model.register_forward_hook(lambda module, args, output: seen.append(output))
    setup.warm()
    assert len(seen) == 5


def test_a_model_that_never_stays_the_same_is_looked_at_more_and_more_rarely() -> None:
    setup = Setup()

    def churn(model: Toy) -> None:
        model.blocks[0].linear.weight.data = model.blocks[0].linear.weight.data.clone()

    for seed in range(60):
        setup.both(churn)
        setup.call(x_of(seed))
    assert 3 <= setup.backend.attempts <= 12
    assert setup.graphs.row.replayed == 0


def changed(change: Callable[[Toy], object]) -> Callable[[Toy], None]:
    def make(model: Toy) -> None:
        torch.manual_seed(11)
        with torch.no_grad():
            change(model)

    return make


def weight(model: Toy) -> Any:
    return model.blocks[0].linear.weight


class Processor:
    __module__ = "diffusers.fake"

    def __init__(self) -> None:
        self._attention_backend: str | None = None


CHANGES = {
    "a new parameter": lambda m: setattr(m.blocks[0].linear, "weight", nn.Parameter(torch.randn(8, 8), False)),
    "new memory of a parameter": lambda m: setattr(weight(m), "data", torch.randn(8, 8)),
    "transposed memory": lambda m: setattr(weight(m), "data", weight(m).data.t()),
    "half of the memory": lambda m: setattr(m.blocks[0].linear.bias, "data", m.blocks[0].linear.bias.data[:1]),
    "memory as another type": lambda m: setattr(m.shift, "data", m.shift.data.view(torch.int32)),
    "a state dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "a new buffer": lambda m: m.register_buffer("shift", torch.randn(8)),
    "no bias": lambda m: m.blocks[0].linear.register_parameter("bias", None),
    "a number": lambda m: setattr(m.blocks[0], "factor", 0.7),
    "a number in a dict": lambda m: m.blocks[1].scaling.update(default=0.7),
    "another dict": lambda m: setattr(m.blocks[1], "scaling", {"default": 0.7}),
    "a plain tensor": lambda m: setattr(m, "table", torch.randn(8)),
    "memory of a plain tensor": lambda m: setattr(m.table, "data", torch.randn(8)),
    "a submodule": lambda m: setattr(m.blocks[0], "linear", nn.Linear(8, 8).requires_grad_(False)),
    "one block less": lambda m: m.blocks.__delitem__(0),
    "one block more": lambda m: m.blocks.append(Block().requires_grad_(False)),
    "training": lambda m: m.train(not m.training),
    "a field of a processor": lambda m: setattr(m.blocks[0].processor, "_attention_backend", "flash"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_never_missed(name: str) -> None:
    setup = Setup()
    setup.both(lambda model: setattr(model.blocks[0], "processor", Processor()))
    setup.warm()
    old = setup.backend.live
    setup.both(changed(CHANGES[name]))
    assert setup.calls(5)[0].startswith("the model changed since the last call: ")
    assert all(tape.freed for tape in old)
    assert setup.calls(6, 7, 8) == [CAPTURED, CHECKED, "replayed"]


def test_tensors_of_one_element_are_told_apart_by_identity() -> None:
    """Two that are equal now are still two: a graph reads the old one for ever."""
    setup = Setup()
    setup.both(lambda model: setattr(model.blocks[1], "scaling", {"default": torch.tensor([0.5])}))
    setup.warm()
    setup.both(lambda model: model.blocks[1].scaling.update(default=torch.tensor([0.5])))
    assert setup.calls(5)[0] == "the model changed since the last call: an attribute that holds a tensor changed"
    assert setup.calls(6, 7, 8) == [CAPTURED, CHECKED, "replayed"]


def test_an_array_in_the_model_is_no_fault_of_ours_and_keeps_it_from_being_captured() -> None:
    setup = Setup()
    setup.warm()
    setup.model.notes = np.zeros(3)  # type: ignore[assignment]
    assert setup.calls(1)[0].startswith("the model changed since the last call: ")
    for seed in range(3):
        assert setup.call(x_of(seed)) == "Toy.notes is a numpy.ndarray, which can change unseen"
    setup.model.notes = np.ones(3)  # type: ignore[assignment]
    assert setup.call(x_of(5)) == "Toy.notes is a numpy.ndarray, which can change unseen"


def test_what_cannot_be_compared_counts_as_changed() -> None:
    setup = Setup()
    setup.both(lambda model: setattr(model.blocks[0], "thing", Undecided()))
    setup.warm()
    setup.both(lambda model: setattr(model.blocks[0], "thing", Undecided()))
    answer = "the model changed since the last call: an attribute that holds a tensor or an array changed"
    assert setup.calls(1, 2) == [answer, CAPTURED]


class Undecided:
    """Like an array: whether two are equal has no truth value."""

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth value is ambiguous")

    __hash__ = object.__hash__


def test_queues_in_the_model_are_compared() -> None:
    setup = Setup()
    setup.both(lambda model: setattr(model.blocks[0], "queue", deque([1, 2])))
    setup.warm()
    setup.both(lambda model: model.blocks[0].queue.append(3))
    assert setup.calls(1, 2) == ["the model changed since the last call: blocks.0.queue changed", CAPTURED]


IN_PLACE = {
    "a weight": lambda m: weight(m).copy_(torch.randn(8, 8)),
    "a buffer": lambda m: m.shift.normal_(),
    "a plain tensor": lambda m: m.table.normal_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_values_written_in_place_are_followed_and_checked_once(name: str) -> None:
    setup = Setup()
    setup.warm()
    setup.both(changed(IN_PLACE[name]))
    assert setup.calls(5, 6) == [CHECKED, "replayed"]
    assert setup.graphs.row.captured == 1


def test_values_written_behind_torchs_back_are_followed() -> None:
    setup = Setup()
    setup.warm()
    setup.both(changed(lambda model: weight(model).data.normal_()))
    assert setup.calls(5) == ["replayed"]


def test_stale_weights_are_found_where_the_model_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the comparison of the model's state the same test fails."""
    setup = Setup()
    setup.warm()
    monkeypatch.setattr(ModelState, "change", lambda self: None)
    monkeypatch.setattr(ModelState, "versions", lambda self: setup.graphs._graphs and _versions(setup))
    for name in ("a new parameter", "new memory of a parameter", "a number", "a number in a dict", "a submodule"):
        setup.both(changed(CHANGES[name]))
        with pytest.raises(AssertionError, match="elements differ"):
            setup.call(x_of(5))
    assert setup.graphs.row.replayed > 5


def _versions(setup: Setup) -> list[int]:
    (graph,) = setup.graphs._graphs.values()
    return graph.versions


def test_nothing_keeps_weights_alive_that_the_model_let_go() -> None:
    setup = Setup()
    setup.warm()
    gone = [weakref.ref(weight(setup.model)), weakref.ref(setup.model.blocks[1].linear.weight.untyped_storage())]
    setup.both(changed(CHANGES["a new parameter"]))
    setup.both(lambda model: setattr(model.blocks[1], "linear", nn.Linear(8, 8).requires_grad_(False)))
    # The tape itself holds what it reads, which a CUDA graph does not.
    for tape in setup.backend.tapes:
        tape.calls = []
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_class_that_somebody_patches_makes_graphs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    setup.both(lambda model: setattr(model.blocks[0], "processor", Processor()))
    setup.warm()
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) * 2)
    answer = "the model changed since the last call: something was put on the class"
    assert setup.calls(1, 2) == [f"{answer} Block", CAPTURED]
    setup.warm()
    monkeypatch.setattr(Processor, "_parallel_config", None, raising=False)
    assert setup.calls(1)[0] == f"{answer} Processor"


def test_another_attention_function_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    setup.warm()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    assert setup.calls(1) == [FIRST]


def test_a_withdrawn_verdict_makes_graphs_go() -> None:
    setup = Setup()
    setup.warm()
    setup.gate.withdrawals += 1
    answer = "the model changed since the last call: a verdict on one of its ops was withdrawn"
    assert setup.calls(1, 2) == [answer, CAPTURED]


# What a forward may not do.


def keeping(cache: dict[Any, Any]) -> Callable[..., Any]:
    def forward(x: Tensor, prompts: Any) -> Any:
        cache.setdefault(id(x), (x, x * 2))
        return (x + cache[id(x)][1],)

    return forward


def appending(x: Tensor, prompts: Any) -> Any:
    prompts.append(x)
    return (x * 2,)


def drawing(x: Tensor, prompts: Any) -> Any:
    return (x + torch.rand(8),)


FORWARDS: list[tuple[Callable[..., Any], str]] = [
    (
        lambda x, p: (x * x.sum().item(),),
        "the forward waits for a value on the host (aten._local_scalar_dense.default)",
    ),
    (lambda x, p: (x * torch.nonzero(x).shape[0],), "the forward waits for a value on the host"),
    (lambda x, p: (x.mul_(2).clone(),), "the forward writes to its arguments"),
    (appending, "the forward changes its arguments"),
    (lambda x, p: (x,), "the forward returns memory that was there before"),
    (lambda x, p: (x[:, :1],), "the forward returns memory that was there before"),
    (lambda x, p: x.sum(0).numpy(), "the forward returns a numpy.ndarray"),
    (lambda x, p: 7, "the forward returns no tensor"),
    (drawing, "the forward draws random numbers"),
    (keeping({}), "the forward keeps a tensor that it made for later"),
]


@pytest.mark.parametrize(("forward", "reason"), FORWARDS)
def test_what_a_forward_does_that_no_graph_can(forward: Callable[..., Any], reason: str) -> None:
    setup = Setup()
    setup.model.last = setup.twin.last = forward
    for number in range(4):
        before = setup.graphs.row
        x, prompts = x_of(number), [x_of(number + 10)]
        theirs_x, theirs_prompts = x.clone(), list(prompts)
        with torch.no_grad():
            torch.manual_seed(number)
            ours, state = setup.model(x, prompts), torch.get_rng_state()
            torch.manual_seed(number)
            theirs = setup.twin(theirs_x, theirs_prompts)
        assert torch.equal(state, torch.get_rng_state()), "random numbers were drawn twice"
        assert torch.equal(x, theirs_x)
        assert len(prompts) == len(theirs_prompts)
        if isinstance(ours, tuple):
            check_same_bits([ours[0].clone()], [theirs[0].clone()])
            assert (ours[0].data_ptr() == x.data_ptr()) == (theirs[0].data_ptr() == theirs_x.data_ptr())
        answer = setup.since(before)
        assert answer == FIRST if number == 0 else answer.startswith(reason)
    assert setup.backend.attempts == 0


def test_a_forward_that_changes_the_model() -> None:
    setup = Setup()

    def counting(x: Tensor, prompts: Any) -> Any:
        setup.model.count = getattr(setup.model, "count", 0) + 1  # type: ignore[assignment]
        return (x + 1,)

    setup.model.last = counting
    with torch.no_grad():
        for _ in range(4):
            setup.model(x_of(0))
    assert [r for r in setup.graphs.row.reasons if r.startswith("the forward changes the model (Toy changed)")]
    setup.model.last = lambda x, prompts: (x + 1,)
    with torch.no_grad():
        for seed in range(12):
            setup.model(x_of(seed))
    assert setup.graphs.row.replayed > 0


def test_a_fault_of_ours_never_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise KeyError("oh")

    setup, strict = Setup(), Setup(strict=True)
    for one in (setup, strict):
        one.warm()
    monkeypatch.setattr(ModelState, "change", broken)
    assert setup.calls(1, 2) == ["a fault of samebits: KeyError: 'oh'", CLOSED]
    assert not setup.backend.live
    assert "runs without CUDA graphs from now on" in caplog.text
    with pytest.raises(KeyError), torch.no_grad():
        strict.model(x_of(1))


def test_reasons_are_counted_by_name_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoiser, "REASON_LIMIT", 3)
    setup = Setup()
    for number in range(6):
        setup.gate.reason = f"reason {number}"
        with torch.no_grad():
            setup.model(x_of(0))
    assert setup.graphs.row.reasons == {"reason 0": 1, "reason 1": 1, "reason 2": 1, "other reasons": 3}


def test_memory_that_a_forward_reads_stays_as_long_as_its_graph() -> None:
    """A table in a cache somewhere, which forgets it: a CUDA graph would read what comes to lie there."""
    setup = Setup()
    cache = {"table": torch.randn(8)}
    table = cache["table"].clone()
    storage = weakref.ref(cache["table"].untyped_storage())
    setup.model.last = lambda x, prompts: (x + cache["table"],)
    setup.twin.last = lambda x, prompts: (x + table,)
    setup.warm()
    cache["table"] = table
    for tape in setup.backend.tapes:  # the tape holds what it reads, which a CUDA graph does not
        tape.calls = []
    gc.collect()
    assert storage() is not None
    setup.graphs.close()
    gc.collect()
    assert storage() is None


def test_tensors_made_from_numbers_are_the_ones_of_the_watched_call() -> None:
    setup = Setup()
    setup.model.last = setup.twin.last = lambda x, prompts: (x * torch.tensor([1.0, -0.0, 3.0, 4.0] * 2),)
    assert setup.calls(0, 1, 2, 3) == [FIRST, CAPTURED, CHECKED, "replayed"]

    setup = Setup()
    setup.model.last = setup.twin.last = lambda x, prompts: (x * torch.tensor([2.0] * 8).add_(1),)
    answer = "the forward writes to a tensor that it made from numbers on the host"
    assert setup.calls(0, 1, 2) == [FIRST, answer, answer]

    setup = Setup()
    numbers = iter(range(100))
    setup.model.last = lambda x, prompts: (x * torch.tensor([float(next(numbers))]),)
    with torch.no_grad():
        for seed in range(2):
            setup.model(x_of(seed))
    (reason,) = [r for r in setup.graphs.row.reasons if r != FIRST]
    assert reason.startswith(f"capturing it raised RuntimeError: {NOT_PERMITTED}")


def test_host_tensors_and_indexes_are_told_apart() -> None:
    """The meta device stands for the GPU."""
    x, host = torch.zeros(3, device="meta"), torch.zeros(3)
    cases: list[tuple[Callable[[], object], str | None]] = [
        (lambda: host + 1, None),
        (lambda: torch.empty_like(x, device="cpu"), None),  # what attention does
        (lambda: x[torch.zeros(2, dtype=torch.int64, device="meta")], None),
        (lambda: x + 2.0, None),
        (lambda: host.to("meta"), "the forward takes a tensor from the host to the GPU (aten._to_copy.default)"),
        (lambda: x + torch.zeros(()), "the forward takes a tensor from the host to the GPU (aten.add.Tensor)"),
    ]
    for run, reason in cases:
        with Recorder("meta", ()) as recorder:
            run()
        assert recorder.reason == reason
    with Recorder("cpu", ()) as recorder:
        host[host > 0]
    assert recorder.reason == "the forward waits for a value on the host (aten.index.Tensor)"


def test_kernels_run_inside_the_mode_that_gives_those_tensors_out() -> None:
    class Other(TorchFunctionMode):
        pass

    with HostConstants("cpu"):
        assert capture.interception() is None
        with Other():
            assert capture.interception() == "a torch function mode is active"
    with HostConstants("cpu"), Recorder("cpu", ()):
        assert capture.interception() == "a torch dispatch mode is active"


# Wrong graphs.


def test_a_graph_that_does_not_follow_its_arguments_is_found_at_the_first_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.backend.kind = Stale
    assert setup.calls(0, 0, 0) == [FIRST, CAPTURED, "replayed"]
    answer = setup.calls(1)
    assert answer == [CHECKED]
    assert not setup.backend.live
    (refused,) = set(setup.calls(2, 3, 0))
    assert refused.startswith("a replay did not follow a change: output 0: 48 of 48 elements differ")
    assert "runs without a CUDA graph" in caplog.text


def test_a_graph_that_baked_in_one_argument_is_found_when_that_one_changes() -> None:
    """What was computed from a prompt outside the capture stays right until the prompt is another one."""
    setup = Setup()
    prompt, other = x_of(50), x_of(51)

    class Deaf(Tape):
        """Goes on to use the prompt of its capture."""

        def replay(self) -> None:
            (graph,) = setup.graphs._graphs.values() or [None]
            if graph is None:  # the comparison at the capture
                return super().replay()
            view = graph._statics[1].view
            present = view.clone()
            view.copy_(prompt)
            super().replay()
            view.copy_(present)
            return None

    setup.backend.kind = Deaf
    assert [setup.call(x_of(seed), [prompt]) for seed in (0, 1)] == [FIRST, CAPTURED]
    assert [setup.call(x_of(seed), [prompt]) for seed in (2, 3)] == [CHECKED, "replayed"]
    assert setup.call(x_of(4), [prompt.clone()]) == "replayed"  # another tensor with the same values
    assert setup.call(x_of(5), [other]) == CHECKED
    assert setup.call(x_of(6), [other]).startswith("a replay did not follow a change")


def test_a_result_that_differs_outside_its_tensors_is_found() -> None:
    setup = Setup()
    numbers = iter(range(100))
    setup.model.last = lambda x, prompts: (x + 1, float(next(numbers)))
    with torch.no_grad():
        for seed in range(4):
            assert setup.model(x_of(seed))[1] in (0.0, 1.0, 3.0, 4.0)  # 2 was seen by the capture alone
    (reason,) = [r for r in setup.graphs.row.reasons if r != FIRST]
    assert reason == "a replay did not give a plain call's bits: the result has another form"


def test_a_graph_that_is_wrong_from_the_start_never_answers() -> None:
    class Wrong(Tape):
        def replay(self) -> None:
            super().replay()
            self.calls[-1][3][0].view(torch.int32).view(-1)[0] ^= 1  # type: ignore[union-attr]

    setup = Setup()
    setup.backend.kind = Wrong
    assert setup.calls(0) == [FIRST]
    for seed in range(1, 4):
        assert setup.call(x_of(seed)).startswith(
            "a replay did not give a plain call's bits: output 0: 1 of 48 elements"
        )
    assert setup.backend.attempts == 1
    assert not setup.backend.live

    strict = Setup(strict=True)
    strict.backend.kind = Wrong
    strict.calls(0)
    with pytest.raises(ContractViolation, match="cuda graph"), torch.no_grad():
        strict.model(x_of(1))


# Failures and limits.


def test_a_capture_that_fails_is_tried_again_a_few_times() -> None:
    setup = Setup()
    setup.backend.error = RuntimeError("operation not permitted when stream is capturing\nand more")
    answers = setup.calls(*range(12))
    reason = "capturing it raised RuntimeError: operation not permitted when stream is capturing"
    assert answers[0] == FIRST
    assert set(answers[1:-1]) == {f"{reason}, will be tried again", reason}
    assert answers[-1] == reason
    assert setup.backend.attempts == 3
    assert all(pool.closed for pool in setup.backend.pools)


def test_a_capture_that_failed_once_may_succeed_later() -> None:
    setup = Setup()
    setup.backend.error = RuntimeError("interrupted")
    assert len(set(setup.calls(0, 1))) == 2
    setup.backend.error = None
    assert CAPTURED in setup.calls(2, 3, 4)


def test_out_of_memory_is_tried_again_without_end_and_ever_more_rarely() -> None:
    setup = Setup()
    setup.backend.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.14 GiB")
    assert set(setup.calls(*range(70))) == {FIRST, NO_MEMORY}
    assert setup.backend.attempts == 6
    setup.backend.error = None
    assert CAPTURED in setup.calls(*range(70))


def test_the_callers_own_mistakes_are_the_callers() -> None:
    setup = Setup()
    setup.warm()
    for _ in range(4):
        with pytest.raises(RuntimeError, match="mat1 and mat2"), torch.no_grad():
            setup.model(torch.zeros(2, 3, 5))
    assert setup.calls(1) == ["replayed"]


def test_a_plain_call_that_runs_out_of_memory_gets_that_of_the_graphs() -> None:
    setup = Setup()
    setup.warm()

    def short(x: Tensor) -> Tensor:
        if setup.backend.live:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x

    setup.both(lambda model: model.blocks[0].__dict__.update(body=lambda x: x))
    body = setup.model.blocks[0]
    assert CAPTURED in setup.calls(0, 1, 2)
    object.__setattr__(setup.graphs._state, "change", lambda: None)
    body.body = short
    assert setup.call(x_of(1, rows=5)) == FIRST
    assert not setup.backend.live


def test_the_least_recently_used_graph_goes_first() -> None:
    setup = Setup(max_graphs=2)
    for rows in (3, 4):
        setup.warm(x_of(0, rows))
    assert setup.call(x_of(1, 3)) == "replayed"  # 4 is older now
    assert [setup.call(x_of(seed, 5)) for seed in range(4)] == [FIRST, CAPTURED, CHECKED, "replayed"]
    assert len(setup.backend.live) == 2
    assert setup.call(x_of(2, 3)) == "replayed"
    assert setup.call(x_of(2, 4)) == NO_ROOM


def test_keys_that_chase_each_other_out_come_to_rest() -> None:
    setup = Setup(max_graphs=1)
    for seed in range(60):
        for rows in (3, 4):
            setup.call(x_of(seed, rows))
    assert setup.graphs.row.captured < 20
    assert setup.graphs.row.replayed > 40


def test_the_memory_of_graphs_is_bounded() -> None:
    setup = Setup(max_bytes=2500)
    for rows in (3, 4):
        setup.warm(x_of(0, rows))
    assert setup.graphs.row.bytes == 2000
    assert [setup.call(x_of(seed, 5)) for seed in range(2)] == [FIRST, NO_ROOM]
    assert (len(setup.backend.live), setup.graphs.row.bytes) == (0, 0)
    assert setup.backend.pools[0].closed
    assert [setup.call(x_of(seed, 5)) for seed in range(3)] == [NO_ROOM, CAPTURED, CHECKED]

    setup = Setup(max_bytes=999)
    assert setup.calls(0, 1, 2) == [FIRST, *["its graph needs 1,000 bytes, 999 are allowed"] * 2]
    assert not setup.backend.live

    setup = Setup()
    setup.backend.limit = 999
    assert setup.calls(0, 1) == [FIRST, "its graph needs 1,000 bytes, 999 are allowed"]


# Threads, and the end.


def test_a_second_thread_runs_plainly_meanwhile() -> None:
    setup = Setup()
    setup.warm()
    inside, done = threading.Event(), threading.Event()
    results: list[Any] = []

    class Slow(Tape):
        def replay(self) -> None:
            inside.set()
            assert done.wait(30)
            super().replay()

    (tape,) = setup.backend.live
    tape.__class__ = Slow

    def run() -> None:
        with torch.no_grad():
            results.append(setup.model(x_of(1)))

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(30)
    assert setup.call(x_of(2)) == BUSY
    done.set()
    thread.join(30)
    with torch.no_grad():
        check_same_bits(list(leaves(results[0])), list(leaves(setup.twin(x_of(1)))))
    assert setup.calls(3) == ["replayed"]


def test_many_threads_get_their_own_results() -> None:
    setup = Setup()
    failures: list[BaseException] = []

    def run(first: int) -> None:
        try:
            with torch.no_grad():
                for seed in range(first, first + 30):
                    ours, theirs = setup.model(x_of(seed)), setup.twin(x_of(seed))
                    assert same_bits(list(leaves(ours)), list(leaves(theirs)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    row = setup.graphs.row
    assert row.replayed + row.plain == 120


def test_close_frees_everything_also_from_inside_a_call() -> None:
    setup = Setup()
    setup.warm()
    setup.graphs.close()
    assert not setup.backend.live
    assert setup.calls(1) == [CLOSED]
    setup.graphs.close()

    setup = Setup()
    setup.warm()
    (tape,) = setup.backend.live

    class Closing(Tape):
        def replay(self) -> None:
            setup.graphs.close()
            super().replay()

    tape.__class__ = Closing
    assert setup.calls(1, 2) == ["replayed", CLOSED]
    assert tape.freed
    assert setup.backend.pools[-1].closed


def test_a_model_that_nobody_holds_goes_with_its_graphs() -> None:
    setup = Setup()
    setup.warm()
    backend, model, graphs = setup.backend, weakref.ref(setup.model), weakref.ref(setup.graphs)
    del setup
    gc.collect()
    assert model() is None
    assert graphs() is None
    assert not backend.live
    assert all(pool.closed for pool in backend.pools)
