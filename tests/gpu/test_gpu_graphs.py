"""CUDA graphs of real denoisers: eager's bits at every replay, whatever changes between; failures leave no trace."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook
from peft import LoraConfig
from ring import assert_same_bits, randn
from torch import Tensor, nn

from samebits import bits, capture
from samebits.apply import Handle, apply
from samebits.bench import launches, models
from samebits.gate import Gate
from samebits.graphs import DenoiserGraphs
from samebits.graphs.model_state import TRUSTED
from samebits.graphs.row import CAPTURED, CAPTURING, CHECKED, FIRST, UNSETTLED
from samebits.ops import OPS
from samebits.patch import Patch

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def qwen(device: torch.device, **config: Any) -> Any:
    """Two blocks of Qwen-Image at their real width."""
    return models.qwen_image(device, side=16, num_layers=2, **config).model


def z_image(device: torch.device) -> Any:
    """Two layers of Z-Image and one of each refiner at their real width."""
    return models.z_image(device, side=32, n_layers=2, n_refiner_layers=1).model


def qwen_inputs(device: torch.device, seed: int, side: int = 16, words: int = 37, batch: int = 1) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, side * side, 64, dtype=BF16, device=device, seed=seed),
        "encoder_hidden_states": randn(batch, words, 3584, dtype=BF16, device=device, seed=seed + 1000),
        "timestep": torch.full((batch,), 0.1 + 0.01 * (seed % 80), dtype=BF16, device=device),
        "img_shapes": [[(1, side, side)]] * batch,
        "return_dict": False,
    }


def z_image_inputs(device: torch.device, seed: int, side: int = 32, words: int = 37) -> dict[str, Any]:
    return {
        "x": [randn(16, 1, side, side, dtype=BF16, device=device, seed=seed)],
        "t": torch.full((1,), 0.1 + 0.01 * (seed % 80), dtype=BF16, device=device),
        "cap_feats": [randn(words, 2560, dtype=BF16, device=device, seed=seed + 1000)],
        "return_dict": False,
    }


FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "qwen-image": (qwen, qwen_inputs),
    "z-image": (z_image, z_image_inputs),
}


def result(output: Any) -> tuple[Tensor, ...]:
    (first, *_) = output
    return tuple(first) if isinstance(first, list) else (first,)


def answers_of(step: Callable[[], str], count: int) -> list[str]:
    """How so many calls were answered, but for up to two at which ops were still compared.

    A product that cuBLAS computes otherwise with joined weights, as it may for so few rows, is refused at the first
    call; the second one runs the linears apart, and what comes after them has signatures that were never met.
    """
    answers: list[str] = []
    waited = 0
    while len(answers) < count:
        answer = step()
        if answer == UNSETTLED and len(answers) == 1 and waited < 2:
            waited += 1
        else:
            answers.append(answer)
    return answers


class Pair:
    """A denoiser with graphs, and the same one without anything."""

    def __init__(self, name: str, device: torch.device, config: dict[str, Any] | None = None, **options: Any) -> None:
        build, self.make = FAMILIES[name]
        self.device = device
        self.ours, self.eager = (build(device, **(config or {})) for _ in range(2))
        self.handle: Handle = apply(self.ours, cuda_graphs=True, gate=Gate(), **options)

    def step(self, seed: int, **sizes: Any) -> str:
        """One call of each with new inputs, compared; how ours was answered."""
        return self.call(self.make(self.device, seed, **sizes))

    def call(self, inputs: dict[str, Any]) -> str:
        before = self.handle.report().graphs[0]
        ours = result(self.ours(**inputs))
        assert_same_bits(ours, result(self.eager(**inputs)))
        after = self.handle.report().graphs[0]
        if after.replayed > before.replayed:
            return "replayed"
        (reason,) = [r for r, calls in after.reasons.items() if calls > before.reasons.get(r, 0)]
        return reason

    def warm(self, **sizes: Any) -> None:
        """To the first replay."""
        seeds = itertools.count()
        assert answers_of(lambda: self.step(next(seeds), **sizes), 4) == [FIRST, CAPTURED, CHECKED, "replayed"]

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.ours, self.eager):
            change(model)


@pytest.fixture(params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Pair]:
    made = Pair(request.param, device)
    yield made
    made.handle.remove()


def test_replays_have_eagers_bits_while_sizes_change(pair: Pair) -> None:
    for sizes in ({}, {"words": 64}, {"side": 24}, {"side": 24, "words": 5}):
        seeds = itertools.count()
        answers = answers_of(lambda seeds=seeds, sizes=sizes: pair.step(next(seeds), **sizes), 7)  # type: ignore[misc]
        assert answers == [FIRST, CAPTURED, CHECKED, *["replayed"] * 4]
    assert pair.step(50) == "replayed"
    (row,) = pair.handle.report().graphs
    print(row)
    assert (row.graphs, row.captured) == (4, 4)
    assert row.bytes > 0


def test_results_of_replays_are_kept(pair: Pair) -> None:
    pair.warm()
    inputs = [pair.make(pair.device, seed) for seed in range(20, 24)]
    kept = [result(pair.ours(**one)) for one in inputs]
    expected = [result(pair.eager(**one)) for one in inputs]
    assert pair.handle.report().graphs[0].replayed >= 5
    for ours, eager in zip(kept, expected, strict=True):
        assert_same_bits(ours, eager)
    assert bits.compare(kept[0], kept[1]) is not None


def test_graphs_hold_our_kernels(pair: Pair) -> None:
    inputs = pair.make(pair.device, 30)
    names = launches.kernels_of(OPS)
    eager = launches.record(lambda: pair.eager(**inputs), names)  # the profiler is there before the first capture
    pair.warm()
    before = pair.handle.report().graphs[0].replayed
    ours = launches.record(lambda: pair.ours(**inputs), names)
    print(ours.counts, eager.counts)
    assert pair.handle.report().graphs[0].replayed == before + 2
    assert ours.counts["ours"] > 0
    assert "ours" not in eager.counts or eager.counts["ours"] == 0


def test_weights_written_in_place_and_replaced(pair: Pair) -> None:
    pair.warm()
    generator = torch.Generator(pair.device)

    def write(model: Any) -> None:
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator.manual_seed(1), device=pair.device))

    pair.both(write)
    assert [pair.step(seed) for seed in (30, 31)] == [CHECKED, "replayed"]

    def write_uncounted(model: Any) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.01)

    pair.both(write_uncounted)
    assert pair.step(32) == "replayed"

    def replace(model: Any) -> None:
        state = {name: value * 0.99 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.requires_grad_(False)

    pair.both(replace)
    answers = [pair.step(seed) for seed in range(40, 45)]
    assert answers[0].startswith("the model changed since the last call")
    assert answers[-1] == "replayed"

    def move(model: Any) -> None:
        model.to("cpu")
        model.to(pair.device)

    pair.both(move)
    # Had every weight come back to where it was, the graph would be as good as before.
    assert [pair.step(seed) for seed in range(50, 57)][-1] == "replayed"


def test_stale_weights_would_be_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with the look at the model switched off, a replay is out of date and the test sees it."""
    from samebits.graphs.model_state import ModelState

    pair.warm()
    old = [parameter.data for parameter in pair.ours.parameters()]  # the graph reads these
    monkeypatch.setattr(ModelState, "change", lambda self: None)
    (graph,) = pair.handle._graphs[0]._graphs.values()
    monkeypatch.setattr(ModelState, "versions", lambda self: graph.versions)
    for model in (pair.ours, pair.eager):
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)
    inputs = pair.make(pair.device, 60)
    before = pair.handle.report().graphs[0].replayed
    assert bits.compare(result(pair.ours(**inputs)), result(pair.eager(**inputs))) is not None
    assert pair.handle.report().graphs[0].replayed == before + 1
    del old


TARGETS = {"qwen-image": ["to_out.0", "img_mlp.net.2"], "z-image": ["to_out.0", "feed_forward.w2"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_lora_comes_changes_and_goes(name: str, device: torch.device) -> None:
    pair = Pair(name, device)
    config = LoraConfig(r=8, lora_alpha=8, target_modules=TARGETS[name], init_lora_weights=False)

    def load(model: Any) -> None:
        torch.manual_seed(5)
        model.add_adapter(config)
        model.to(BF16).requires_grad_(False)

    steps: list[Callable[[Any], object]] = [
        load,
        lambda model: model.set_adapters(["default"], [0.7]),
        lambda model: model.disable_adapters(),
        lambda model: model.enable_adapters(),
        lambda model: model.fuse_lora(),
        lambda model: model.unfuse_lora(),
        lambda model: model.unload_lora(),
    ]
    try:
        assert [pair.step(seed) for seed in range(9)][-1] == "replayed"
        for number, step in enumerate(steps):
            pair.both(step)
            answers = [pair.step(100 * number + seed) for seed in range(9)]
            assert answers[0].startswith("the model changed since the last call"), answers
            assert answers[-1] == "replayed", answers
    finally:
        pair.handle.remove()


def masked(device: torch.device, seed: int) -> dict[str, Any]:
    inputs = qwen_inputs(device, seed, batch=2)
    mask = torch.ones(2, 37, dtype=torch.int64, device=device)
    mask[1, 20 + seed % 10 :] = 0
    return inputs | {"encoder_hidden_states_mask": mask}


def edit(device: torch.device, seed: int) -> dict[str, Any]:
    inputs = qwen_inputs(device, seed)
    tokens = randn(1, 256 + 64, 64, dtype=BF16, device=device, seed=seed)
    return inputs | {"hidden_states": tokens, "img_shapes": [[(1, 16, 16), (1, 8, 8)]]}


@pytest.mark.parametrize(
    ("make", "config"), [(masked, {}), (edit, {"zero_cond_t": True})], ids=["a batch with masks", "edit"]
)
def test_forwards_that_make_tensors_from_numbers_are_captured(
    make: Callable[[torch.device, int], dict[str, Any]], config: dict[str, Any], device: torch.device
) -> None:
    pair = Pair("qwen-image", device, config)
    try:
        seeds = itertools.count()
        answers = answers_of(lambda: pair.call(make(device, next(seeds))), 6)
        print(pair.handle.report())
        assert answers == [FIRST, CAPTURED, CHECKED, *["replayed"] * 3]
    finally:
        pair.handle.remove()


def test_tables_that_a_cache_forgets_stay_alive(device: torch.device) -> None:
    """diffusers keeps the rotary tables of the last 128 sizes; a graph's table must outlive that."""
    pair = Pair("qwen-image", device)
    try:
        pair.warm()
        for model in (pair.ours, pair.eager):
            for height in range(20, 160):
                model.pos_embed([(1, height, 3)], max_txt_seq_len=5, device=device)
        gc.collect()
        filled = [torch.full((1 << 18,), float("nan"), device=device) for _ in range(64)]
        assert pair.step(30) == "replayed"
        del filled
    finally:
        pair.handle.remove()


def test_replays_on_other_streams_wait_for_each_other(pair: Pair) -> None:
    pair.warm()
    streams = [torch.cuda.Stream(pair.device) for _ in range(3)]
    inputs = [pair.make(pair.device, seed) for seed in range(12)]
    expected = [result(pair.eager(**one)) for one in inputs]
    torch.cuda.synchronize()
    before = pair.handle.report().graphs[0].replayed
    kept = []
    for number, one in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            kept.append(result(pair.ours(**one)))
    torch.cuda.synchronize()
    assert pair.handle.report().graphs[0].replayed == before + len(inputs)
    for ours, eager in zip(kept, expected, strict=True):
        assert_same_bits(ours, eager)


def test_threads_get_their_own_results(pair: Pair) -> None:
    pair.warm()
    expected = {seed: result(pair.eager(**pair.make(pair.device, seed))) for seed in range(40)}
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def run(seeds: range) -> None:
        try:
            torch.cuda.set_device(pair.device)
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(pair.device)):
                for seed in seeds:
                    assert bits.compare(result(pair.ours(**pair.make(pair.device, seed))), expected[seed]) is None
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(range(first, 40, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    print(pair.handle.report().graphs[0])


def test_a_capture_of_the_caller_is_plain_and_survives_removal(pair: Pair) -> None:
    pair.warm()
    inputs = pair.make(pair.device, 70)
    expected = result(pair.eager(**inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = result(pair.ours(**inputs))
        pair.handle.remove()
        gc.collect()
    assert pair.handle.report().graphs[0].reasons[CAPTURING] == 1
    for tensor in recorded:
        tensor.fill_(float("nan"))
    graph.replay()
    assert_same_bits(recorded, expected)


def test_removal_gives_the_memory_back(device: torch.device) -> None:
    build, make = FAMILIES["qwen-image"]
    model = build(device)
    model(**make(device, 0))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    handle = apply(model, cuda_graphs=True, gate=Gate())
    for seed in range(5):
        model(**make(device, seed))
    (row,) = handle.report().graphs
    assert row.replayed == 2
    assert row.bytes > 1 << 20
    handle.remove()
    gc.collect()
    torch.cuda.empty_cache()
    # What stays is a workspace of the GEMM library, which torch keeps for the capture stream.
    assert torch.cuda.memory_reserved(device) - before < 128 << 20
    assert handle.report().graphs[0].bytes == 0


def test_bounds(device: torch.device) -> None:
    pair = Pair("qwen-image", device, max_graphs=1)
    pair.warm()
    pair.warm(words=64)
    assert pair.handle.report().graphs[0].graphs == 1
    pair.handle.remove()
    pair = Pair("qwen-image", device, max_graph_bytes=1)
    answers = [pair.step(seed) for seed in range(4)]
    assert answers[0] == FIRST
    assert set(answers[1:]) == {answers[1]}
    assert "1 are allowed" in answers[1]
    pair.handle.remove()


def test_model_offload_is_plain(pair: Pair) -> None:
    pair.warm()
    _, hook = cpu_offload_with_hook(pair.ours, execution_device=pair.device)
    for seed in range(3):
        inputs = pair.make(pair.device, seed)
        assert_same_bits(result(pair.ours(**inputs)), result(pair.eager(**inputs)))
        hook.offload()
    (row,) = pair.handle.report().graphs
    assert row.graphs == 0
    assert any("carries a hook of accelerate" in reason for reason in row.reasons)


def test_another_current_device(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - (device.index or 0))
    pair = Pair("z-image", other)
    try:
        pair.warm()
        assert torch.cuda.current_device() == device.index
    finally:
        pair.handle.remove()


# Captures that fail.


class OpenGate:
    def stopped(self) -> str | None:
        return None

    def unsettled(self) -> int:
        return 0

    def withdrawn(self) -> int:
        return 0


class Toy(nn.Module):
    """Does ``act`` in the middle of its forward."""

    def __init__(self, act: Callable[[], object], device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(256, 256, device=device).requires_grad_(False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.act()
        return self.linear(x)


def while_capturing(act: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        if torch.cuda.is_current_stream_capturing():
            act()

    return run


def fail() -> None:
    raise KeyError("in the capture alone")


def allocate_for_ever() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def is_well(device: torch.device) -> None:
    """What a capture that failed could have left broken works."""
    assert not torch.cuda.is_current_stream_capturing()
    assert not capture.capturing_anywhere()
    torch.cuda.manual_seed(7)
    first = torch.rand(64, device=device)
    torch.cuda.manual_seed(7)
    assert torch.equal(first, torch.rand(64, device=device))
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        block = torch.zeros(1 << 20, device=device)
        block.record_stream(torch.cuda.current_stream())
    del block
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(64, device=device) + first
    graph.replay()
    torch.cuda.synchronize()
    assert bool(drawn.isfinite().all())


@pytest.mark.parametrize("act", [torch.cuda.synchronize, fail, allocate_for_ever], ids=lambda act: act.__name__)
def test_a_capture_that_fails_leaves_no_trace(act: Callable[[], object], device: torch.device) -> None:
    model = Toy(while_capturing(act), device)
    graphs = DenoiserGraphs("toy", model, OpenGate(), trusted=TRUSTED | {__name__.partition(".")[0]})
    patch = Patch(model, graphs.wrap)
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state(device)
    for seed in range(12):
        x = randn(8, 256, dtype=torch.float32, device=device, seed=seed)
        assert_same_bits(model(x), model.linear(model.linear(x)))
    assert torch.cuda.current_stream() == stream
    assert torch.equal(state, torch.cuda.get_rng_state(device))
    row = graphs.row
    print(row)
    assert (row.replayed, row.graphs) == (0, 0)
    assert len(row.reasons) >= 2
    is_well(device)

    # The same model works once the cause is gone, and a graph of it is right.
    model.act = lambda: None
    patch.undo()
    graphs = DenoiserGraphs("toy", model, OpenGate(), trusted=TRUSTED | {__name__.partition(".")[0]})
    patch = Patch(model, graphs.wrap)
    for seed in range(5):
        x = randn(8, 256, dtype=torch.float32, device=device, seed=seed)
        assert_same_bits(model(x), model.linear(model.linear(x)))
    assert graphs.row.replayed == 2
    patch.undo()
    graphs.close()


def test_other_threads_see_our_captures(device: torch.device) -> None:
    seen: list[bool] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: seen.append(capture.capturing_anywhere()))
        thread.start()
        thread.join(60)

    model = Toy(while_capturing(ask), device)
    graphs = DenoiserGraphs("toy", model, OpenGate(), trusted=TRUSTED | {__name__.partition(".")[0]})
    patch = Patch(model, graphs.wrap)
    x = randn(8, 256, dtype=torch.float32, device=device)
    for _ in range(3):
        assert_same_bits(model(x), model.linear(model.linear(x)))
    assert seen == [True]
    assert graphs.row.replayed == 1
    patch.undo()
    graphs.close()
    assert not capture.capturing_anywhere()


def test_a_forward_that_draws_random_numbers_is_not_captured(device: torch.device) -> None:
    model = Toy(lambda: None, device)
    model.linear = nn.Sequential(nn.Linear(256, 256, device=device), nn.Dropout(0.5)).requires_grad_(False).train()
    graphs = DenoiserGraphs("toy", model, OpenGate(), trusted=TRUSTED | {__name__.partition(".")[0]})
    patch = Patch(model, graphs.wrap)
    x = randn(8, 256, dtype=torch.float32, device=device)
    for seed in range(4):
        torch.cuda.manual_seed(seed)
        ours, state = model(x), torch.cuda.get_rng_state(device)
        torch.cuda.manual_seed(seed)
        eager = model.linear(model.linear(x))
        assert_same_bits(ours, eager)
        assert torch.equal(state, torch.cuda.get_rng_state(device))
    assert graphs.row.reasons == {FIRST: 1, "the forward draws random numbers": 3}
    patch.undo()
    graphs.close()
