"""One forward every way: what is compared, what is timed, what a row may say, and what was to be reached."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import denoisers as small
import pytest
import torch
from click.testing import CliRunner, Result
from test_bench_timing import FakeStopwatch
from torch import nn

from samebits import bits
from samebits.apply import apply
from samebits.bench import evidence, floor, forwards, launches, models, ratios, reports, targets, variants
from samebits.bench.comparing import Bench
from samebits.bench.models import Denoiser
from samebits.bench.variants import Choice, Outcome, Switch
from samebits.cli import main
from samebits.errors import EvidenceError
from samebits.ops import OPS

CPU = torch.device("cpu")
COLUMNS = ["model", "size", "batch", "variant", "ms", "bits_equal", "launches", "ms_gemm", "ms_attention", "ms_other"]
FAST = {"backend": "eager"}  # for torch.compile: traces, and compiles nothing


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def bench() -> Bench:
    class Ticking(FakeStopwatch):
        def elapsed_ms(self, body: Callable[[], object]) -> float:
            body()
            return 7.0

    return Bench(CPU, Ticking(), 1024, lambda _: None)


@pytest.fixture(scope="module", params=models.SMALL)
def denoiser(request: pytest.FixtureRequest) -> Denoiser:
    with torch.no_grad():
        return models.SMALL[request.param](CPU)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> small.KernelGate:
    """The gate that samebits is applied with, whose kernels are Python and can be spoilt."""
    made = small.KernelGate()
    monkeypatch.setattr(variants, "apply", partial(apply, gate=made))
    return made


def spoil(op: str, outputs: Sequence[torch.Tensor]) -> None:
    bits.integer_view(outputs[-1]).view(-1)[0] ^= 1


def traces(model: nn.Module) -> list[str]:
    """What was left on the model's modules."""
    return [name for part in model.modules() for name in ("forward", "_compiled_call_impl") if name in part.__dict__]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing without a GPU: a replay runs the body again, in the state of then, into the same memory."""

    def capture(self: variants.Contest, body: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        state, output = self.switch._state, body()

        def replay() -> None:
            now = self.switch._state
            self.switch.to(state)
            result = body()
            self.switch.to(now)
            if output is not None:
                output.copy_(result)

        return replay, output

    monkeypatch.setattr(variants.Contest, "_capture", capture)


# The models and their inputs.


def test_sizes_and_batches_share_one_model(denoiser: Denoiser) -> None:
    assert models.at_size(denoiser, models.SMALL_SIZE).latents.shape == denoiser.latents.shape
    two = models.at_size(denoiser, 64, batch=2)
    assert two.model is denoiser.model
    assert two.forward().shape == two.latents.shape
    assert two.latents.shape[0] == 2
    assert bool(two.forward().isfinite().all())
    assert models.at_size(denoiser, 64).forward().shape == models.at_size(denoiser, 64).latents.shape


@pytest.mark.parametrize(
    ("pixels", "batch", "said"), [(100, 1, "multiple of 16"), (0, 1, "positive"), (64, 0, "batch")]
)
def test_sizes_that_cannot_be(denoiser: Denoiser, pixels: int, batch: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        models.at_size(denoiser, pixels, batch)


# The floor.


def test_the_floor_is_every_linear_and_every_attention_and_nothing_else(denoiser: Denoiser) -> None:
    called: list[nn.Module] = []
    hooks = [
        part.register_forward_hook(lambda module, *_: called.append(module))
        for part in denoiser.model.modules()
        if isinstance(part, nn.Linear)
    ]
    denoiser.forward()
    for hook in hooks:
        hook.remove()
    recorded = floor.record(denoiser.forward, denoiser.model)
    assert recorded.count("gemm") == len(called) > 20
    assert recorded.count("attention") == len(denoiser.blocks)
    assert len(recorded.calls) == recorded.count("gemm") + recorded.count("attention")


def test_a_replayed_floor_makes_the_same_calls_and_no_other(denoiser: Denoiser) -> None:
    recorded = floor.record(denoiser.forward, denoiser.model)
    again = floor.record(recorded.run, denoiser.model)
    assert [call.operator for call in again.calls] == [call.operator for call in recorded.calls]
    shapes = [[tuple(a.shape) for a in call.args if isinstance(a, torch.Tensor)] for call in recorded.calls]
    assert shapes == [[tuple(a.shape) for a in call.args if isinstance(a, torch.Tensor)] for call in again.calls]


def test_the_floor_reads_the_real_weights_and_real_values(denoiser: Denoiser) -> None:
    weights = {parameter.data_ptr() for parameter in denoiser.model.parameters()}
    recorded = floor.record(denoiser.forward, denoiser.model)
    read, copies = set(), {}
    for call in recorded.calls:
        for argument in call.args:
            if isinstance(argument, torch.Tensor):
                if argument.data_ptr() in weights:
                    read.add(argument.data_ptr())
                else:
                    copies[argument.data_ptr()] = argument
    linears = [part for part in denoiser.model.modules() if isinstance(part, nn.Linear)]
    assert {part.weight.data_ptr() for part in linears} <= read
    assert all(float(copy.float().abs().max()) > 0 for copy in copies.values())
    assert len(copies) < len(recorded.calls), "equal shapes must share one copy"


def test_layouts_of_the_floor_are_those_of_the_forward() -> None:
    x, weight = torch.randn(3, 8, 16).transpose(1, 2), torch.randn(3, 8, 5)
    module = nn.Linear(2, 2)
    recorded = floor.record(lambda: torch.bmm(x, weight), module)
    (call,) = recorded.calls
    assert call.args[0].stride() == x.stride()
    assert torch.equal(call.args[0], x)
    assert call.args[0].data_ptr() != x.data_ptr()


def test_a_forward_without_gemms_has_no_floor() -> None:
    with pytest.raises(RuntimeError, match="found none"):
        floor.record(lambda: torch.ones(3) + 1, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::addmm.out", "gemm"),
        ("aten::_scaled_mm", "gemm"),
        ("aten::_scaled_dot_product_cudnn_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("flash_attn::_flash_attn_forward", "attention"),
        ("aten::mul.Tensor", None),
        ("aten::_fused_sdp_choice", None),
        ("aten::native_layer_norm", None),
    ],
)
def test_which_operators_are_the_floor(operator: str, kind: str | None) -> None:
    assert floor.kind_of(operator) == kind


# States of one model.


def test_a_switch_goes_through_every_state_and_leaves_no_trace(denoiser: Denoiser, gate: small.KernelGate) -> None:
    expected = denoiser.forward().clone()
    switch = Switch(denoiser.model)
    switch.compile("compile", FAST)
    fused = 0
    for state in ("compile", "ours", "eager", "compile", "ours", "compile"):
        switch.to(state)
        found = set(traces(denoiser.model))
        assert found == {"compile": {"_compiled_call_impl"}, "ours": {"forward"}, "eager": set()}[state], state
        assert bits.compare(denoiser.forward(), expected) is None, state
        now = switch.handles["ours"].report() if switch.handles else None
        counted = 0 if now is None else sum(row.fused + row.eager for row in now.rows)
        assert (counted > fused) == (state == "ours"), "samebits must answer in its own state only"
        fused = counted
    switch.to("eager")
    assert traces(denoiser.model) == []
    switch.to("ours")
    switch.close()
    assert traces(denoiser.model) == []
    assert not any("_samebits" in part.__dict__ for part in denoiser.model.modules())
    apply(denoiser.model).remove()


def test_a_change_that_fails_half_way_leaves_no_trace(denoiser: Denoiser) -> None:
    switch = Switch(denoiser.model)

    def change() -> None:
        denoiser.blocks[0].compile(**FAST)
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        switch._add("compile", change)
    assert traces(denoiser.model) == ["_compiled_call_impl"]
    switch.to("eager")
    assert traces(denoiser.model) == []


def test_a_profiler_that_fails_costs_no_time_that_was_taken(
    denoiser: Denoiser, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome()
    contest = variants.Contest(denoiser, Bench(torch.device("cuda"), bench.stopwatch, 1, print), OPS, outcome)
    contest.lanes = {"eager": variants.Lane(denoiser.forward, "eager", True), "none": variants.Lane(print, None, True)}
    answers = iter([[("nvjet", 5.0)] * 6, []])
    monkeypatch.setattr(launches, "events_of", lambda body, runs: next(answers))
    contest.profile()
    assert contest.lanes["eager"].account is not None
    assert contest.lanes["eager"].account.total == 2
    assert contest.lanes["none"].account is None
    assert outcome.notes == [
        "none was not profiled: RuntimeError: the profiler saw nothing on the GPU; is another profiler attached to it?"
    ]


def test_turns_compile_nothing_again(denoiser: Denoiser, gate: small.KernelGate) -> None:
    from torch._dynamo.utils import counters

    switch = Switch(denoiser.model)
    switch.compile("compile", FAST)
    for _ in range(2):
        denoiser.forward()
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        for state in ("eager", "ours", "compile"):
            switch.to(state)
            denoiser.forward()
    assert counters["stats"]["unique_graphs"] == before > 0
    switch.close()


# Measuring.


def test_rows_of_a_run_without_graphs(denoiser: Denoiser, bench: Bench, gate: small.KernelGate) -> None:
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice(("compile",), False, 2, FAST))
    assert [row["variant"] for row in outcome.rows] == ["eager", "compile", "ours"]
    for row in outcome.rows:
        assert list(row) == COLUMNS
        assert evidence.MODELS.problem(row) is None
        assert (row["model"], row["size"], row["batch"], row["ms"]) == (denoiser.name, 128, 1, 7.0)
    assert outcome.rows[2]["bits_equal"] is True
    assert any("calls fused, 0 eager" in note for note in outcome.notes)
    assert not any(": 0 calls fused" in note for note in outcome.notes)
    assert traces(denoiser.model) == []
    assert forwards.good(outcome)


@pytest.mark.usefixtures("graphs")
def test_rows_of_a_whole_run(denoiser: Denoiser, bench: Bench, gate: small.KernelGate) -> None:
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice(("compile",), True, 2, FAST))
    assert [row["variant"] for row in outcome.rows] == list(evidence.VARIANTS)
    equal = {row["variant"]: row["bits_equal"] for row in outcome.rows}
    assert equal == {name: name != "floor_graph" for name in evidence.VARIANTS}
    assert all(row["ms"] == 7.0 for row in outcome.rows)
    assert any(note.startswith("floor: ") for note in outcome.notes)
    assert forwards.good(outcome)


@pytest.mark.usefixtures("graphs")
def test_only_the_variants_that_were_asked_for_have_turns(
    denoiser: Denoiser, bench: Bench, gate: small.KernelGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[list[str]] = []

    def timed(bodies: Any, *rest: Any, **options: Any) -> dict[str, float]:
        turns.append(list(bodies))
        return dict.fromkeys(bodies, 7.0)

    monkeypatch.setattr(variants, "interleaved_ms", timed)
    only = ("ours_graph", "eager", "compile_graph")
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice(("compile",), True, 2, FAST, only))
    assert [row["variant"] for row in outcome.rows] == ["eager", "compile_graph", "ours_graph"]
    assert all(row["ms"] == 7.0 and row["bits_equal"] for row in outcome.rows)
    assert turns == [["eager", "compile_graph", "ours_graph"]], "compile and ours are only what graphs are made from"
    assert not any(note.startswith("floor: ") for note in outcome.notes)
    gate.spoil = spoil
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice((), True, 2, only=("eager", "ours_graph")))
    assert [(row["variant"], row["bits_equal"], row["ms"]) for row in outcome.rows] == [
        ("eager", True, 7.0),
        ("ours_graph", False, None),
    ]


def test_what_a_choice_wants_and_needs() -> None:
    assert Choice().wanted == evidence.VARIANTS
    assert Choice((), graphs=False).wanted == ("eager", "ours")
    extra = Choice(("compile", "compile_max_autotune"))
    assert extra.wanted == (*evidence.VARIANTS, "compile_max_autotune")
    assert Choice(only=("floor_graph", "ours_graph")).wanted == ("ours_graph", "floor_graph")
    assert Choice(only=("ours_graph",)).needed == {"ours_graph", "ours"}
    assert Choice((), only=("compile",)).wanted == ()


@pytest.mark.usefixtures("graphs")
def test_one_wrong_bit_of_ours_takes_its_times_away_and_nobody_elses(
    denoiser: Denoiser, bench: Bench, gate: small.KernelGate
) -> None:
    gate.spoil = spoil
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice((), True, 1))
    rows = {row["variant"]: row for row in outcome.rows}
    for name in ("ours", "ours_graph"):
        assert rows[name]["bits_equal"] is False
        assert rows[name]["ms"] is None
        assert evidence.MODELS.problem(rows[name]) is None
    assert rows["eager"]["ms"] == rows["floor_graph"]["ms"] == 7.0
    assert any("DIFFER" in note for note in outcome.notes)
    assert not forwards.good(outcome)


def test_a_block_that_differs_counts_even_where_the_output_does_not(
    denoiser: Denoiser, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handle:
        """Applied to nothing: the block's output is changed in what was seen of it."""

        def __init__(self, model: nn.Module) -> None:
            pass

        def report(self) -> Any:
            return type("Report", (), {"rows": []})

        def remove(self) -> None:
            pass

    seen: list[int] = []

    def observe(made: Denoiser, steps: int) -> Any:
        found = original(made, steps)
        seen.append(1)
        if len(seen) == 3:  # eager twice, then ours
            bits.integer_view(found.blocks[-1][-1]).view(-1)[0] ^= 1
        return found

    original = variants.observe
    monkeypatch.setattr(variants, "apply", Handle)
    monkeypatch.setattr(variants, "observe", observe)
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice((), False, 1))
    assert outcome.rows[-1]["bits_equal"] is False
    assert f"{len(denoiser.blocks) - 1}/{len(denoiser.blocks)} blocks" in "".join(outcome.notes)


def test_eager_that_differs_from_itself_voids_everything(bench: Bench) -> None:
    made = models.SMALL["z-image"](CPU)
    count = [0]

    def unsteady(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        count[0] += 1
        return made.velocity(latents, sigma) + count[0] * 0.5

    odd = Denoiser("z-image", made.model, made.blocks, made.latents, unsteady)
    outcome = variants.measure(odd, bench, OPS, 128, 1, Choice((), False, 1))
    assert not any(row["bits_equal"] for row in outcome.rows)
    assert outcome.rows[-1]["ms"] is None
    assert "void" in outcome.notes[0]
    assert not forwards.good(outcome)


def test_a_variant_that_fails_is_a_row_without_figures(
    denoiser: Denoiser, bench: Bench, gate: small.KernelGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Switch, name: str, options: Any) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(Switch, "compile", fails)
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice(("compile",), False, 1))
    row = outcome.rows[1]
    assert (row["variant"], row["ms"], row["bits_equal"]) == ("compile", None, False)
    assert evidence.MODELS.problem(row) is None
    assert "compile failed: RuntimeError: no compiler here" in outcome.notes
    assert outcome.rows[2]["ms"] == 7.0
    assert not forwards.good(outcome)


def test_bits_that_go_wrong_while_time_is_taken_are_noticed(
    denoiser: Denoiser, bench: Bench, gate: small.KernelGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(bodies: Any, *rest: Any, **options: Any) -> dict[str, float]:
        gate.spoil = spoil
        return dict.fromkeys(bodies, 7.0)

    monkeypatch.setattr(variants, "interleaved_ms", timed)
    outcome = variants.measure(denoiser, bench, OPS, 128, 1, Choice((), False, 1))
    assert outcome.rows[-1]["bits_equal"] is False
    assert outcome.rows[-1]["ms"] is None
    assert "after the timed runs" in outcome.notes[-1]


def test_figures_add_up() -> None:
    counted = launches.account(
        [("nvjet_a", 1000.0), ("flash", 500.0), ("mine", 30.0), ("Memcpy", 20.0), ("x", 50.0)], {"mine": "ours"}
    )
    lane = variants.Lane(lambda: None, None, True, account=counted)
    row = variants.figures(lane, 2.0, "ours")
    assert row == {
        "ms": 2.0,
        "bits_equal": True,
        "launches": 5,
        "ms_gemm": 1.0,
        "ms_attention": 0.5,
        "ms_other": 0.1,
    }
    lane.bits_equal = False
    assert variants.figures(lane, 2.0, "ours")["ms_other"] is None
    assert variants.figures(lane, 2.0, "compile")["ms_other"] == 0.1


# The record.


def test_sizes_follow_each_other_and_what_cannot_be_built_is_told(
    bench: Bench, gate: small.KernelGate, tmp_path: Path
) -> None:
    def fails(device: torch.device) -> Denoiser:
        raise RuntimeError("out of memory")

    outcome = record(tmp_path, bench, sizes=(64, 128), names=("large", "z-image"), large=fails)
    assert [(row["size"], row["variant"]) for row in outcome.rows] == [
        (64, "eager"),
        (64, "ours"),
        (128, "eager"),
        (128, "ours"),
    ]
    assert "large 64x64 batch 1: nothing was measured: RuntimeError: out of memory" in outcome.notes
    assert not forwards.good(outcome)
    written = evidence.read(tmp_path / "models.json")
    assert list(written.rows) == outcome.rows
    assert set(written.source["ops"]) == {op.name for op in OPS}


def record(folder: Path, bench: Bench, **options: Any) -> Outcome:
    builders = {"z-image": models.SMALL["z-image"], "large": options.pop("large", None)}
    run = forwards.here(bench, OPS, Choice((), False, 1), builders)
    chosen = {"names": ("z-image",), "sizes": (64,), "batches": (1,), "command": "one", "environment": {}} | options
    return forwards.record(folder, run, OPS, **chosen)


def test_a_process_of_its_own_gives_back_rows_or_what_went_wrong() -> None:
    """Without a GPU the child cannot measure: what it raised arrives here, and the parent goes on."""
    if torch.cuda.is_available():
        pytest.skip("here the child would build a real model")
    outcome = forwards.record(
        None,
        forwards.apart(torch.device("cuda"), Choice()),
        OPS,
        ("z-image",),
        (64,),
        (1, 2),
        command="x",
        environment={},
    )
    assert outcome.rows == []
    assert len(outcome.notes) == 2
    assert all("batch" in note and ": nothing was measured: " in note for note in outcome.notes)
    assert not forwards.good(outcome)


def test_rows_can_be_added_to_those_of_the_same_source(
    bench: Bench, gate: small.KernelGate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody may edit the package while this runs, and then nothing may be added: see the next test.
    monkeypatch.setattr(evidence, "package_hash", lambda: "same")
    record(tmp_path, bench)
    record(tmp_path, bench, sizes=(128,), add=True, command="two")
    written = evidence.read(tmp_path / "models.json")
    assert written.command == "one; two"
    assert [row["size"] for row in written.rows] == [64, 64, 128, 128]
    record(tmp_path, bench, add=True, command="three")
    assert [row["size"] for row in evidence.read(tmp_path / "models.json").rows] == [128, 128, 64, 64]
    record(tmp_path, bench)
    assert [row["size"] for row in evidence.read(tmp_path / "models.json").rows] == [64, 64]


def test_groups_go_from_small_to_large_whatever_order_rows_came_in() -> None:
    came = [("z", 1024, 1), ("q", 2048, 1), ("q", 512, 1), ("z", 1024, 2), ("z", 512, 1), ("q", 512, 2)]
    rows = [{"model": model, "size": size, "batch": batch, "variant": "eager"} for model, size, batch in came]
    assert list(ratios.groups(rows)) == [
        ("z", 512, 1),
        ("z", 1024, 1),
        ("z", 1024, 2),
        ("q", 512, 1),
        ("q", 2048, 1),
        ("q", 512, 2),
    ]


def test_two_runs_add_to_one_record_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "package_hash", lambda: "same")
    both = threading.Barrier(2)

    def add(size: int, also: int) -> None:
        def run(name: str, size: int, batch: int) -> Outcome:
            both.wait(timeout=20)  # each has begun before the other writes
            row = {"model": name, "size": size, "batch": batch, "variant": "eager", "ms": 1.0, "bits_equal": True}
            return Outcome(rows=[row | dict.fromkeys(("launches", "ms_gemm", "ms_attention", "ms_other"), 1)])

        options = {"command": f"of {size}", "environment": {}, "add": True}
        forwards.record(tmp_path, run, OPS, ("z-image",), (size, also), (1,), **options)

    threads = [threading.Thread(target=add, args=sizes) for sizes in ((64, 128), (256, 512))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = evidence.read(tmp_path / "models.json")
    assert sorted(row["size"] for row in written.rows) == [64, 128, 256, 512]
    assert sorted(written.command.split("; ")) == ["of 256", "of 64"]


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("source", "package", "0"), ("environment", "gpu", {"name": "another"}), ("environment", "torch", "1")],
)
def test_rows_are_never_added_to_those_of_another_source_or_machine(
    bench: Bench, gate: small.KernelGate, tmp_path: Path, part: str, key: str, value: Any
) -> None:
    record(tmp_path, bench)
    path = tmp_path / "models.json"
    data = json.loads(path.read_text())
    data[part][key] = value
    path.write_text(json.dumps(data))
    with pytest.raises(EvidenceError, match="run everything anew"):
        record(tmp_path, bench, sizes=(128,), add=True)
    assert json.loads(path.read_text()) == data


# Rows, ratios and targets.

PROTOTYPE = {"eager": 146.0, "eager_graph": 142.0, "compile": 99.3, "compile_graph": 96.5, "ours": 95.0}
PROTOTYPE |= {"ours_graph": 91.5, "floor_graph": 86.0}


def rows_of(model: str = "z-image", size: int = 1024, **ms: float | None) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "size": size,
            "batch": 1,
            "variant": variant,
            "ms": taken,
            "bits_equal": variant not in ("compile", "compile_graph", "floor_graph"),
            "launches": 900,
            "ms_gemm": 59.2,
            "ms_attention": 13.5,
            "ms_other": 0 if variant == "floor_graph" else 5.9,
        }
        for variant, taken in (PROTOTYPE | ms).items()
    ]


def test_targets_at_1024() -> None:
    rows = rows_of()
    assert all(evidence.MODELS.problem(row) is None for row in rows)
    assert [target.reached for target in ratios.targets(rows)] == [True] * 6
    assert [target.got for target in ratios.targets(rows)] == ["equal", "0.627", "0.948", "1.064", "0.957", "5.90"]
    slow = ratios.targets(rows_of(ours_graph=93.0))
    assert [target.reached for target in slow] == [True, False, False, False, True, True]
    assert ratios.targets(rows_of(size=2048)) == []
    assert ratios.targets(rows_of("another")) == []
    # Qwen-Image's limits are its own
    assert [target.wanted for target in ratios.targets(rows_of("qwen-image"))][1:] == [
        "<= 0.69",
        "<= 0.9",
        "<= 1.07",
        "<= 0.94",
        "<= 8.5",
    ]


def test_targets_without_figures_are_not_reached() -> None:
    wrong = rows_of(ours=None, ours_graph=None)
    for row in wrong:
        if row["variant"].startswith("ours"):
            row |= evidence.without_speeds(row) | {"bits_equal": False}
    assert all(evidence.MODELS.problem(row) is None for row in wrong)
    told = ratios.targets(wrong)
    assert not any(target.reached for target in told)
    assert [target.got for target in told] == ["DIFFERENT"] + ["not measured"] * 5
    assert not any(target.reached for target in ratios.targets(rows_of()[:1]))


def test_the_table_tells_bits_and_ratios() -> None:
    told = ratios.models_table(rows_of(), ["a note"])
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert "z-image 1024 1 eager 146.00 1.000 equal 900 59.20 13.50 5.90" in lines
    assert "z-image 1024 1 compile 99.30 0.680 DIFFERENT 900 59.20 13.50 5.90" in lines
    assert "z-image 1024 1 floor_graph 86.00 0.589 none 900 59.20 13.50 0.00" in lines
    assert "z-image 1024 batch 1 0.627 0.948 1.064 0.957" in lines
    assert lines[-1] == "a note"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"variant": "fast"}, "'variant' must be one of"),
        ({"note": "x"}, "'note' is not one of"),
        ({"ms": 0}, "'ms' must be"),
        ({"ms_other": -1.0}, "'ms_other' must be"),
        ({"launches": None}, "'launches' must be"),
        ({"size": 1024.0}, "'size' must be"),
        ({"bits_equal": None}, "'bits_equal' must be"),
        ({"bits_equal": False}, "bits differ, so 'ms' must be null"),
        ({"bits_equal": False, "ms": None}, "bits differ, so 'ms_gemm' must be null"),
    ],
    ids=str,
)
def test_rows_of_models_are_exact(changed: dict[str, Any], said: str) -> None:
    row = {**rows_of()[4], **changed}
    assert said in (evidence.MODELS.problem(row) or "")


def test_a_peer_keeps_its_time_though_its_bits_differ() -> None:
    row = rows_of()[2]
    assert row["variant"] == "compile"
    assert evidence.MODELS.problem({**row, "bits_equal": False}) is None


def test_every_op_has_a_target_at_its_largest_timed_shape() -> None:
    rows = [
        {"op": "swiglu", "case": f"1x{tokens}x8 {n}", "dtype": dtype, "copy_share": share, "shape": [1, tokens, 8]}
        for n, (tokens, dtype, share) in enumerate(
            [(4224, "bfloat16", 0.85), (4224, "bfloat16", 0.79), (128, "bfloat16", 0.1), (9999, "float16", 0.2)]
        )
    ]
    (target,) = targets.share_targets([*rows, {**rows[0], "copy_share": None}])
    assert (target.name, target.got, target.reached) == ("swiglu 1x4224x8 1, share of copy", "79.0%", False)
    assert targets.share_targets(rows[:1])[0].reached


# What lies beside the record.

OP_ROW = {
    "op": "swiglu",
    "case": "1x4224x10240",
    "dtype": "bfloat16",
    "us_eager": 100.0,
    "us_fused": 20.0,
    "copy_share": 0.85,
    "bits_equal": True,
    "rows_compared": 1_000,
}
WRONG_OP_ROW = OP_ROW | {"us_eager": None, "us_fused": None, "copy_share": None, "bits_equal": False, "error": "why"}


@pytest.mark.parametrize(
    ("kind", "rows", "told"),
    [
        (
            "ops",
            [OP_ROW, WRONG_OP_ROW, OP_ROW | {"op": "attention", "copy_share": None}],
            "| `swiglu` | 1x4224x10240 | bf16 | equal | 1,000 | 100.0 | 20.0 | 5.00x | 85% |",
        ),
        (
            "models",
            rows_of(),
            "| z-image | 1024 | 1 | ours_graph | 91.50 | 0.627 | equal | 900 | 59.20 | 13.50 | 5.90 |",
        ),
    ],
)
def test_a_record_becomes_a_page_and_a_chart(kind: str, rows: Any, told: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = evidence.Record(kind, "samebits bench x", {"gpu": {"name": "Pretend 9"}}, {}, rows)
    wanted = [targets.Target("a", "b", "c", False)]
    written, missing = reports.write(made, tmp_path, wanted, ["a note"])
    assert missing is None
    assert [path.name for path in written] == [f"{kind}.md", f"{kind}.png"]
    page = written[0].read_text()
    assert told in page
    assert "Pretend 9, by `samebits bench x`" in page
    assert "| a | b | c | NO |" in page
    assert page.endswith("- a note\n")
    assert written[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["ops", "models"])
def test_no_chart_without_a_time(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    untimed = [WRONG_OP_ROW] if kind == "ops" else [row | {"ms": None} for row in rows_of()]
    written, missing = reports.write(evidence.Record(kind, "x", {}, {}, untimed), tmp_path)
    assert [path.name for path in written] == [f"{kind}.md"]
    assert "no chart" in str(missing)
    assert not (tmp_path / f"{kind}.png").exists()


def test_without_matplotlib_the_page_is_written_and_the_way_out_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports.charts, "find_spec", lambda name: None)
    written, missing = reports.write(evidence.Record("ops", "x", {}, {}, [OP_ROW]), tmp_path)
    assert [path.name for path in written] == ["ops.md"]
    assert "samebits[bench]" in str(missing)


# The command line, where there is no GPU.

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here bench would measure")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "models", *arguments])


@without_a_gpu
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "flux"), "no model is called 'flux'"),
        (("--size", "100"), "multiple of 16"),
        (("--size", "0"), "--size"),
        (("--batch", "0"), "--batch"),
        (("--rounds", "0"), "--rounds"),
        (("--out", "here"), "torch sees none"),
        (("--add",), "torch sees none"),
        (("--fast",), "--fast"),
        (("--variants", "eager,fast"), "--variants: there is no 'fast'; there are eager, eager_graph"),
        (("--variants", ""), "there is no ''"),
        (("--variants", "eager,ours_graph"), "--variants ours_graph: a graph is captured on a GPU"),
        (("--variants", "eager,compile", "--no-compile"), "--variants says which ways of torch.compile run"),
        (("--variants", "eager", "--max-autotune"), "--variants says which ways of torch.compile run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@without_a_gpu
def test_on_a_cpu_it_runs_the_tiny_models_and_says_that_the_figures_mean_nothing() -> None:
    result = invoke("--model", "z-image", "--rounds", "1", "--size", "64")
    assert result.exit_code == 0, result.output
    assert forwards.MEANINGLESS in result.stdout
    assert [line.split()[3] for line in result.stdout.splitlines() if line.startswith("z-image    64")] == [
        "eager",
        "ours",
    ]
    as_json = invoke("--model", "z-image", "--rounds", "1", "--size", "64", "--json")
    document = json.loads(as_json.stdout)
    assert document["meaningful"] is False
    assert [list(row) for row in document["models"]] == [COLUMNS] * 2
    assert document["targets"] == []


@without_a_gpu
def test_some_variants_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def recorded(folder: Any, run: Any, *args: Any, command: str, **options: Any) -> Outcome:
        asked.append((run, command))
        return Outcome(rows_of()[:1], [])

    monkeypatch.setattr(forwards, "here", lambda bench, ops, choice, builders: choice)
    monkeypatch.setattr(forwards, "record", recorded)
    assert invoke("--variants", "ours,eager, ours", "--rounds", "3").exit_code == 0
    ((choice, command),) = asked
    assert (choice.wanted, choice.compiled, choice.rounds) == (("eager", "ours"), (), 3)
    assert command == "samebits bench models --size 128 --rounds 3 --variants ours,eager"
    invoke("--variants", "compile")
    assert (asked[1][0].wanted, asked[1][0].compiled) == (("compile",), ("compile",))


@without_a_gpu
def test_a_run_in_which_bits_differ_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [row | {"bits_equal": False, "ms": None} for row in rows_of() if row["variant"] == "ours"]
    monkeypatch.setattr(forwards, "record", lambda *args, **options: Outcome(wrong, []))
    assert invoke().exit_code == 1
