"""One call for both streams of a block where they are plain enough for it; else two calls, or diffusers' lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from denoisers import DTYPES, KernelGate, check_same_bits, flat, one_ulp_up, qwen, qwen_inputs, run, same_bits
from test_quant_models import quantised
from torch import nn

from samebits.apply import Handle, apply
from samebits.errors import ContractViolation
from samebits.gate import COMPARED
from samebits.models._family import Line
from samebits.models._final import Learnt
from samebits.ops import Op, by_name
from samebits.verdict import Counters

BF16 = torch.bfloat16
BLOCKS = 3
OP = "gated_residual_norm_modulate"
BOTH = ("norm2", "next_norm1")
EACH = ("img_norm2", "txt_norm2", "img_next_norm1", "txt_next_norm1")


def build(dtype: torch.dtype = BF16, **config: Any) -> Any:
    return qwen(dtype, num_layers=BLOCKS, **config)


def calls(handle: Handle, names: tuple[str, ...]) -> dict[str, list[int]]:
    """How often each block called the sites of these names."""
    found: dict[str, list[int]] = {name: [] for name in names}
    for row in handle.report().rows:
        _, _, name = row.site.removeprefix("transformer_blocks.").partition(".")
        if row.site.startswith("transformer_blocks") and name in found:
            found[name].append(row.fused + row.eager)
    return found


def why(handle: Handle, site: str) -> str:
    """What the report says of a site."""
    return " ".join(next(row.reasons for row in handle.report().rows if row.site == site))


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_call_for_both(dtype: torch.dtype, edit: bool) -> None:
    model, inputs = build(dtype, zero_cond_t=edit), qwen_inputs(dtype, edit=edit)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for number in (1, 2, 3):
            check_same_bits(run(model, inputs), expected)
            assert calls(handle, BOTH) == {"norm2": [number] * BLOCKS, "next_norm1": [number] * (BLOCKS - 1)}
            assert {count for counts in calls(handle, EACH).values() for count in counts} == {0}
        assert why(handle, "transformer_blocks.1.img_norm2").endswith("of the other stream, as norm2")
        assert why(handle, "transformer_blocks.1.txt_next_norm1").endswith("of the other stream, as next_norm1")
        assert why(handle, "transformer_blocks.1.img_residual").endswith("as next_norm1")


@pytest.mark.parametrize("edit", [False, True])
def test_one_call_for_both_where_they_are_quantised(edit: bool) -> None:
    model, inputs = quantised(build(zero_cond_t=edit)), qwen_inputs(BF16, edit=edit)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(2):
            check_same_bits(run(model, inputs), expected)
        assert calls(handle, BOTH) == {"norm2": [2] * 3, "next_norm1": [2] * 2}
        assert {count for counts in calls(handle, EACH).values() for count in counts} == {0}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_block_answers_diffusers_bits(block: int) -> None:
    """Seen by a hook that only looks, which leaves everything on."""
    outputs: list[tuple[torch.Tensor, ...]] = []

    def look(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        outputs.append(output)

    look.only_looks = True  # type: ignore[attr-defined]
    model, inputs = build(), qwen_inputs(BF16)
    model.transformer_blocks[block].register_forward_hook(look)
    run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        run(model, inputs)
        run(model, inputs)
        assert calls(handle, BOTH)["norm2"] == [2] * BLOCKS
    theirs, *ours = outputs
    for answer in ours:
        check_same_bits(answer, theirs)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("output", range(4))
def test_each_result_of_each_site_reaches_the_picture(name: str, output: int) -> None:
    """The control: an ulp in one result of the one call, of either stream, changes what comes out."""
    model, inputs = build(), qwen_inputs(BF16, mask=False)
    gate, number = KernelGate(), 0

    def spoil(op: str, outputs: Any) -> None:
        nonlocal number
        if len(outputs) == 4:
            number += 1
            if number % 2 == 1 - BOTH.index(name):  # in every block first one, then the other
                for index in range(64):
                    one_ulp_up(outputs[output], index)

    with apply(model, gate=gate):
        for _ in range(2):  # every signature is verified now
            expected = run(model, inputs)
        gate.spoil = spoil
        assert not same_bits(run(model, inputs), expected)
        assert number == 2 * BLOCKS - 1


# What keeps the two streams apart.


def hook(part: str) -> Callable[[Any, list[str]], None]:
    def put(block: Any, seen: list[str]) -> None:
        block.get_submodule(part).register_forward_hook(lambda module, args, output: output * 2)

    put.__name__ = f"hook on {part}"
    return put


def own_feed_forward(block: Any, seen: list[str]) -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    block.txt_mlp = Mine()


def own_forward_of_the_feed_forward(block: Any, seen: list[str]) -> None:
    mlp = block.img_mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x * 2)


def own_gelu(block: Any, seen: list[str]) -> None:
    block.txt_mlp.net[0].gelu = torch.relu


def erf_form(block: Any, seen: list[str]) -> None:
    block.img_mlp.net[0].approximate = "none"


def own_activation(block: Any, seen: list[str]) -> None:
    class Last(nn.Module):
        def __init__(self, proj: nn.Module) -> None:
            super().__init__()
            self.proj = proj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.proj(x))

    block.txt_mlp.net[0] = Last(block.txt_mlp.net[0].proj)


def one_more_part(block: Any, seen: list[str]) -> None:
    block.img_mlp.net.append(nn.Tanh())


def another_norm(block: Any, seen: list[str]) -> None:
    block.txt_norm2 = nn.RMSNorm(64, elementwise_affine=False)


PARTS = [
    f"{stream}_{part}"
    for stream in ("img", "txt")
    for part in ("norm2", "mlp", "mlp.net.0", "mlp.net.0.proj", "mlp.net.1", "mlp.net.2")
]
APART = [
    *map(hook, PARTS),
    own_feed_forward,
    own_forward_of_the_feed_forward,
    own_gelu,
    erf_form,
    own_activation,
    one_more_part,
    another_norm,
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", APART, ids=lambda change: change.__name__)
def test_what_keeps_the_streams_of_its_block_apart(change: Callable[[Any, list[str]], None], when: str) -> None:
    """The picture is the user's, whether it came before or after the apply; the other blocks go on together."""
    inputs = qwen_inputs(BF16)
    theirs, ours = build(), build()
    untouched = run(theirs, inputs)
    torch.manual_seed(3)
    change(theirs.transformer_blocks[1], [])
    expected = run(theirs, inputs)
    assert not same_bits(expected, untouched)
    if when == "before":
        change(ours.transformer_blocks[1], [])
    with apply(ours, gate=KernelGate()) as handle:
        if when == "after":
            check_same_bits(run(ours, inputs), untouched)
            change(ours.transformer_blocks[1], [])
        before = calls(handle, BOTH)
        for _ in range(2):
            check_same_bits(run(ours, inputs), expected)
        found = {
            name: [now - then for now, then in zip(counts, before[name], strict=True)]
            for name, counts in calls(handle, BOTH).items()
        }
        assert found == {"norm2": [2, 0, 2], "next_norm1": [2, 0]}
        if when == "before":
            for name in BOTH:
                assert why(handle, f"transformer_blocks.1.{name}").startswith("the two streams are served one by one: ")


def test_hooks_see_diffusers_order_of_calls() -> None:
    """Every hook of a feed-forward, in one block: in the order in which diffusers calls them."""

    def watched(model: Any) -> list[str]:
        seen: list[str] = []
        for part in PARTS:
            module = model.transformer_blocks[1].get_submodule(part)
            module.register_forward_pre_hook(lambda module, args, part=part: seen.append(part))
        return seen

    inputs = qwen_inputs(BF16)
    theirs, ours = build(), build()
    expected_order, order = watched(theirs), watched(ours)
    expected = run(theirs, inputs)
    with apply(ours, gate=KernelGate()):
        check_same_bits(run(ours, inputs), expected)
        check_same_bits(run(ours, inputs), expected)
    assert order == 2 * expected_order
    assert len(expected_order) == len(PARTS)


class Wrapper(nn.Module):
    """A linear inside another module, as a LoRA has it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("place", ["0.proj", "2"])
def test_a_hook_inside_a_wrapped_linear_is_a_hook(place: str) -> None:
    """What it writes is read by what diffusers runs after it, and by nothing before."""

    def wrapped() -> Any:
        model = build()
        block = model.transformer_blocks[1]
        holder, _, name = f"img_mlp.net.{place}".rpartition(".")
        linear = block.get_submodule(f"{holder}.{name}")
        setattr(block.get_submodule(holder), name, Wrapper(linear))
        linear.register_forward_hook(lambda *_: setattr(block.txt_norm2, "eps", block.txt_norm2.eps * 2 + 0.1))
        return model

    inputs, theirs, ours = qwen_inputs(BF16), wrapped(), wrapped()
    expected = [run(theirs, inputs) for _ in range(3)]
    assert not same_bits(expected[0], expected[1])
    with apply(ours, gate=KernelGate()) as handle:
        for answer in expected:
            check_same_bits(run(ours, inputs), answer)
        assert calls(handle, BOTH)["norm2"] == [3, 0, 3]


@pytest.mark.parametrize("stream", ["img", "txt"])
def test_norms_of_two_eps_are_two_calls(stream: str) -> None:
    """Behind the attention, or of the next block: two calls, both fused; everything else of the block stays one."""
    inputs = qwen_inputs()
    for part, left in (("norm2", {"norm2": [2, 0, 2]}), ("norm1", {"next_norm1": [0, 2]})):
        model = build(torch.float32)
        getattr(model.transformer_blocks[1], f"{stream}_{part}").eps = 1e-2
        expected = run(model, inputs)
        assert not same_bits(expected, run(build(torch.float32), inputs))
        with apply(model, gate=KernelGate()) as handle:
            for _ in range(2):
                check_same_bits(run(model, inputs), expected)
            together = {"norm2": [2] * 3, "next_norm1": [2] * 2}
            assert calls(handle, BOTH) == together | left
            singles = calls(handle, EACH)
            assert sum(map(sum, singles.values())) == 4  # of both streams, in both forwards
            called = [row for row in handle.report().rows if row.site.endswith(EACH) and row.fused + row.eager]
            assert {reason for row in called for reason in row.reasons} <= {COMPARED}


@pytest.mark.parametrize("stream", ["img", "txt"])
def test_one_quantised_stream(stream: str) -> None:
    model, inputs = quantised(build(), only=lambda name: stream in name), qwen_inputs(BF16)
    expected = run(model, inputs)
    assert not same_bits(expected, run(build(), inputs))
    with apply(model, gate=KernelGate()) as handle:
        for _ in range(3):
            check_same_bits(run(model, inputs), expected)
        assert calls(handle, BOTH) == {"norm2": [0] * 3, "next_norm1": [3] * 2}
        assert calls(handle, EACH[:2]) == dict.fromkeys(EACH[:2], [3] * 3)
        assert all(
            row.fused == 3 for row in handle.report().rows if row.site.endswith(EACH[:2]) and ".0." not in row.site
        )


def test_biases_that_are_added_late_come_one_by_one() -> None:
    model, inputs = quantised(build()), qwen_inputs(BF16)
    with apply(model, gate=KernelGate(), contract="measured", on_trial=True) as handle:
        assert "leave their biases" in why(handle, "transformer_blocks.1.norm2")
        run(model, inputs)
        assert not any(map(sum, calls(handle, BOTH).values()))
        assert handle.moved == 4 * BLOCKS


def test_gradients_and_autocast_keep_diffusers_order() -> None:
    model, inputs = build(torch.float32).requires_grad_(True), qwen_inputs()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        sum(output.square().sum() for output in flat(model(**inputs))).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    with torch.autocast("cpu", BF16):
        cast = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        check_same_bits(gradients(), expected)
        with torch.autocast("cpu", BF16):
            check_same_bits(run(model, inputs), cast)
        assert not any(map(sum, calls(handle, BOTH).values()))
        run(model, inputs)
        assert all(map(sum, calls(handle, BOTH).values()))


# What the gate says of the larger call.


class Picky(KernelGate):
    """A gate whose kernels of two streams are wrong, or are not there; those of one stream are right.

    Parameters
    ----------
    fault : {"refused", "unsupported", "failed"}
    """

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def site(self, name: str, op: Op, **options: Any) -> Any:
        """A site of the op with the fault."""
        super().site(name, op, **options)
        if op.name == OP and self.ops[op.name].unsupported is not self._unsupported:
            self.ops[op.name] = dataclasses.replace(
                op, prepare=lambda *args: self._faulty(op, args), unsupported=self._unsupported
            )
        return super().site(name, op, **options)

    def _unsupported(self, *args: Any) -> str | None:
        return "not two of them" if self._fault == "unsupported" and _is_of_both(args) else None

    def _faulty(self, op: Op, args: tuple[Any, ...]) -> Any:
        right = self._kernel(op)
        if not _is_of_both(args):
            return right
        if self._fault == "failed":
            raise ValueError("no such kernel")

        def wrong(*args: Any, out: Any = None) -> Any:
            results = right(*args, out=out)
            one_ulp_up(results[-1])
            return results

        return wrong


def _is_of_both(args: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of two streams."""
    return len(args) > 9


@pytest.mark.parametrize("fault", ["refused", "unsupported", "failed"])
def test_a_final_verdict_leaves_two_fused_calls(fault: str) -> None:
    model, inputs = build(), qwen_inputs(BF16)
    expected = run(model, inputs)
    with apply(model, gate=Picky(fault)) as handle:
        for _ in range(4):
            check_same_bits(run(model, inputs), expected)
        rows = {row.site.removeprefix("transformer_blocks."): row for row in handle.report().rows}
        for block in range(BLOCKS - 1):
            for name in BOTH:  # asked once by every block, and never again
                row = rows[f"{block}.{name}"]
                assert (row.fused, row.eager) == (0, 1)
                assert next(iter(row.reasons)).startswith(fault)
            for name in EACH:
                assert rows[f"{block}.{name}"].fused >= 2
                assert rows[f"{block}.{name}"].fused + rows[f"{block}.{name}"].eager == 3


def test_another_shape_is_asked_about_anew() -> None:
    model = build()
    gate = Picky("unsupported")
    short, long = qwen_inputs(BF16), qwen_inputs(BF16)
    long["encoder_hidden_states"] = long["encoder_hidden_states"].repeat(1, 2, 1)
    long["encoder_hidden_states_mask"] = long["encoder_hidden_states_mask"].repeat(1, 2)
    expected = [run(model, inputs) for inputs in (short, long)]
    with apply(model, gate=gate) as handle:
        for _ in range(2):
            for inputs, answer in zip((short, long), expected, strict=True):
                check_same_bits(run(model, inputs), answer)
        assert calls(handle, BOTH)["norm2"] == [2] * BLOCKS


def test_a_verdict_that_may_change_is_not_learnt() -> None:
    """The gate is asked again as long as its answer is not final."""

    class Site:
        def __init__(self) -> None:
            self.counters, self.word = Counters(), ""

        def __call__(self, *args: Any) -> str:
            self.counters.count_eager(self.word)
            return "result"

        def final(self, args: tuple[Any, ...]) -> str | None:
            return self.word if self.word.startswith("refused") else None

    site = Site()
    line = Line("a", "an op", site)
    learnt, x = Learnt(line), torch.zeros(1, 2, 3)
    for word, final in (("will be tried again", False), ("compared with eager", False), ("refused: bits", True)):
        site.word = word
        assert learnt(x, x, 1) == "result"
        assert learnt.why_not(x, x) == (word if final else None)
    assert learnt.why_not(x, x[:, :1]) is None
    assert learnt.why_not(x.half(), x) is None


def test_a_verdict_of_another_thread_s_call_is_not_learnt_for_this_one() -> None:
    """Two threads share a site: while one compares, the other's signature is refused."""
    site = KernelGate().site("shared", by_name("layer_norm_modulate"))

    class Interrupted:
        """The site, during whose calls another thread has one refused."""

        counters, final = site.counters, site.final

        def __call__(self, *args: Any) -> Any:
            result = site(*args)
            site.counters.count_eager("refused: the other thread's")
            return result

    learnt, x = Learnt(Line("a", "an op", Interrupted())), torch.randn(1, 3, 8)
    with torch.no_grad():
        learnt(x, None, x, torch.randn(1, 8), torch.randn(1, 8), 1e-6)
    assert learnt.why_not(x, None) is None


def test_a_strict_site_raises() -> None:
    model, inputs = build(), qwen_inputs(BF16)
    with apply(model, gate=Picky("refused"), strict=True), pytest.raises(ContractViolation, match="norm2"):
        run(model, inputs)


def test_a_gate_that_stopped_is_asked_stream_by_stream() -> None:
    model, inputs = build(), qwen_inputs(BF16)
    expected = run(model, inputs)
    gate = KernelGate()
    with apply(model, gate=gate) as handle:
        run(model, inputs)
        gate.disable("for a while")
        check_same_bits(run(model, inputs), expected)
        assert calls(handle, BOTH)["norm2"] == [1] * BLOCKS
        gate.enable()
        check_same_bits(run(model, inputs), expected)
        assert calls(handle, BOTH)["norm2"] == [2] * BLOCKS
