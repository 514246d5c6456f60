"""Launch accounting: what a trace says, which chains remain, the byte floor; with traces made by hand, and on a CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import denoisers as small
import pytest
import torch
from click.testing import CliRunner, Result
from test_bench_timing import FakeStopwatch

from samebits import bits
from samebits.bench import chains, charts, models, profile, profile_tables, trace
from samebits.bench.comparing import Bench
from samebits.bench.denoisers import Calls
from samebits.bench.launches import Launches, account
from samebits.bench.profile import CountingGate, Profile, Subject
from samebits.bench.trace import BLOCK_MARK, SITE_MARK, Launch
from samebits.cli import main
from samebits.ops import OPS, by_name

CPU = torch.device("cpu")


class Tape:
    """A trace as the profiler writes it, of a host that launches and a GPU that runs later."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self.now, self.gpu, self.number = 0.0, 1_000.0, 0

    def span(self, name: str, category: str, *inside: Any) -> None:
        start = self.now
        self.now += 1.0
        for part in inside:
            part()
        self.now += 1.0
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": self.now - start, "args": {}})

    def op(self, name: str, *inside: Any) -> Any:
        return lambda: self.span(name, "cpu_op", *inside)

    def range(self, name: str, *inside: Any) -> Any:
        def run() -> None:
            self.span(name, "user_annotation", *inside)
            # The same range once more on the GPU's timeline, which is not the host's.
            self.events.append({**self.events[-1], "cat": "gpu_user_annotation", "ts": self.gpu, "dur": 50.0})

        return run

    def launch(self, kernel: str, us: float, category: str = "kernel", known: bool = True) -> Any:
        def run() -> None:
            self.number += 1
            linked = {"correlation": self.number}
            if known:
                call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": self.now, "dur": 0.5}
                self.events.append({**call, "args": linked})
            self.now += 1.0
            self.events.append({"ph": "X", "cat": category, "name": kernel, "ts": self.gpu, "dur": us, "args": linked})
            self.gpu += us

        return run


def forward_of_two_layers() -> Tape:
    """Two layers: GEMM with its memset, a chain of three, a kernel of ours, attention, a copy; and a copy ahead."""
    tape = Tape()
    tape.op("aten::copy_", tape.launch("Memcpy DtoD", 2.0, "gpu_memcpy"))()
    for number in range(2):
        tape.range(
            f"{BLOCK_MARK}layers.{number}",
            tape.op(
                "aten::linear",
                tape.op(
                    "aten::addmm", tape.launch("Memset (Device)", 1.0, "gpu_memset"), tape.launch("nvjet_a", 100.0)
                ),
            ),
            tape.op("aten::mul", tape.launch("elementwise_mul", 5.0)),
            tape.op("aten::mul", tape.launch("elementwise_mul", 5.0)),
            tape.op("aten::add", tape.launch("elementwise_add", 6.0)),
            tape.range(f"{SITE_MARK}layers.{number}.norm (rms_norm_scale)", tape.launch("row_per_warp", 7.0)),
            tape.op("aten::sdpa", tape.launch("flash_fwd", 50.0)),
            tape.op("aten::cat", tape.launch("CatArrayBatchedCopy", 4.0)),
        )()
    return tape


def test_launches_know_their_operator_block_and_site() -> None:
    found = trace.launches_in(forward_of_two_layers().events)
    assert len(found) == 17
    assert found[0] == Launch("Memcpy DtoD", 2.0, "aten::copy_")
    assert found[1] == Launch("Memset (Device)", 1.0, "aten::addmm", "layers.0")
    assert found[2] == Launch("nvjet_a", 100.0, "aten::addmm", "layers.0")
    assert found[6] == Launch("row_per_warp", 7.0, "", "layers.0", "layers.0.norm (rms_norm_scale)")
    assert found[7] == Launch("flash_fwd", 50.0, "aten::sdpa", "layers.0")
    assert {launch.block for launch in found[9:]} == {"layers.1"}


def test_launches_come_in_the_gpu_s_order_whatever_order_the_file_has() -> None:
    events = forward_of_two_layers().events
    assert trace.launches_in(reversed(events)) == trace.launches_in(events)


def test_a_launch_whose_call_was_not_recorded_stands_where_the_one_before_it_stood() -> None:
    tape = Tape()
    tape.launch("first", 1.0, known=False)()
    tape.range(
        f"{BLOCK_MARK}layers.0",
        tape.op("aten::add", tape.launch("add", 1.0)),
        tape.op("aten::mul", tape.launch("unknown", 2.0, known=False)),
    )()
    assert trace.launches_in(tape.events) == [
        Launch("first", 1.0),
        Launch("add", 1.0, "aten::add", "layers.0"),
        Launch("unknown", 2.0, "", "layers.0"),
    ]


def test_without_a_gpu_the_innermost_operators_count_but_a_gemm_is_one_whole() -> None:
    tape = Tape()
    tape.range(
        f"{BLOCK_MARK}layers.0",
        tape.op("aten::linear", tape.op("aten::addmm", tape.op("aten::copy_"))),
        tape.op("aten::view"),
        tape.op("aten::gelu"),
    )()
    assert [(launch.name, launch.block) for launch in trace.launches_in(tape.events)] == [
        ("aten::linear", "layers.0"),
        ("aten::gelu", "layers.0"),
    ]


def test_classes_in_order() -> None:
    found = trace.launches_in(forward_of_two_layers().events)
    assert chains.kinds_of(found, {"row_per_warp": "ours"})[:9] == [
        "copies",
        "gemm",
        "gemm",
        "other",
        "other",
        "other",
        "ours",
        "attention",
        "other",
    ]
    on_cpu = [Launch("aten::addmm", 1.0), Launch("aten::copy_", 1.0), Launch("aten::mul", 1.0)]
    assert chains.kinds_of([*on_cpu, Launch("aten::_scaled_dot_product_flash_attention_for_cpu", 1.0)]) == [
        "gemm",
        "copies",
        "other",
        "attention",
    ]


def test_chains_lie_between_gemm_attention_and_ours_and_stop_at_a_block() -> None:
    found = chains.chains(trace.launches_in(forward_of_two_layers().events), {"row_per_warp": "ours"})
    told = [(c.where, c.after, c.before, c.operators, c.times, c.launches, c.ms) for c in found]
    assert told == [
        ("layers.*", "gemm", "ours", ("mul x2", "add"), 2, 6, pytest.approx(0.032)),
        ("layers.*", "attention", "the end", ("cat",), 2, 2, pytest.approx(0.008)),
        ("outside of the blocks", "the start", "the end", ("copy_",), 1, 1, pytest.approx(0.002)),
    ]


def test_a_kernel_that_is_not_ours_joins_the_chain() -> None:
    found = chains.chains(trace.launches_in(forward_of_two_layers().events), {})
    assert found[0].operators == ("mul x2", "add", "[layers.*.norm (rms_norm_scale)]")
    assert found[0].before == "attention"


def test_a_site_whose_reference_ran_is_one_entry() -> None:
    site = "layers.7.norm (rms_norm_scale)"
    run = [Launch(f"k{n}", 1.0, "aten::mul", "layers.7", site) for n in range(6)]
    (chain,) = chains.chains([Launch("nvjet", 1.0, "", "layers.7"), *run])
    assert chain.operators == ("[layers.*.norm (rms_norm_scale)] x6",)


def test_no_launches_no_chains() -> None:
    assert chains.chains([]) == []
    assert "No eager chain" in profile_tables.chains_table([], 5)


# The byte floor.


def test_a_counting_gate_adds_up_bytes_and_answers_like_any_gate() -> None:
    op = by_name("rms_norm_scale")
    case = min(op.cases, key=lambda case: case.rows)
    args = case.build(CPU, 0)
    gate = CountingGate(unavailable=lambda device, host: "no kernels today")
    site = gate.site("here", op)
    for _ in range(3):
        assert bits.compare(site(*args), op.reference(*args)) is None
    assert gate.calls_by_op == Counter({op.name: 3})
    assert gate.bytes_by_op[op.name] == 3 * op.bytes_moved(*args) > 0
    assert (site.name, site.counters.eager, site.counters.fused) == ("here", 3, 0)
    gate.clear()
    assert not gate.calls_by_op


class KernelCountingGate(CountingGate, small.KernelGate):
    """Counts, and its kernels are Python, as in the other tests."""

    def __init__(self) -> None:
        small.KernelGate.__init__(self)
        self.bytes_by_op, self.calls_by_op, self.marking = Counter(), Counter(), False


@pytest.fixture(scope="module", params=models.SMALL)
def subject(request: pytest.FixtureRequest) -> Subject:
    with torch.no_grad():
        denoiser = models.SMALL[request.param](CPU)
    return Subject(request.param, denoiser.model, denoiser.forward)


@pytest.fixture
def bench() -> Bench:
    return Bench(CPU, FakeStopwatch(), 1024, lambda _: None)


def test_blocks_are_those_that_diffusers_repeats(subject: Subject) -> None:
    stacks = {path.rpartition(".")[0] for path in subject.blocks}
    wanted = {"qwen-image": {"transformer_blocks"}, "z-image": {"noise_refiner", "context_refiner", "layers"}}
    assert stacks == wanted[subject.name]


def test_a_profile_on_a_cpu(subject: Subject, bench: Bench) -> None:
    gate = KernelCountingGate()
    found = profile.measure(subject, bench, OPS, "here", gate)
    assert found.bits_equal
    linears = sum(isinstance(part, torch.nn.Linear) for part in subject.model.modules())
    assert found.eager.counts["gemm"] == found.ours.counts["gemm"] == linears
    assert found.eager.counts["attention"] == len(subject.blocks)
    # The joint projection of a block, the attention where it follows one, and the products that end in an activation,
    # of both streams or of one, are no question of bytes.
    assert found.bytes_by_op.keys().isdisjoint({op.name for op in OPS if not op.moves_bytes})
    of_no_bytes = 3 * len(subject.blocks)
    assert found.calls.fused == sum(calls for calls, _ in found.bytes_by_op.values()) + of_no_bytes > of_no_bytes
    assert found.calls.eager == 0
    assert found.floor_bytes > 0
    assert found.floor_ms is None
    assert found.chains_eager
    assert all(chain.ms >= after.ms for chain, after in zip(found.chains, found.chains[1:], strict=False))
    for part in subject.model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert "forward" not in part.__dict__
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["byte_floor"]["bytes"] == found.floor_bytes
    assert len(document["chains"]) == len(found.chains)


def test_no_time_of_ours_where_bits_differ(subject: Subject, bench: Bench) -> None:
    gate = KernelCountingGate()
    gate.spoil = lambda name, outputs: bits.integer_view(outputs[-1]).view(-1)[:1].bitwise_xor_(1)
    found = profile.measure(subject, bench, OPS, "here", gate)
    assert not found.bits_equal
    document = found.to_json()
    assert set(document["ours"]["ms"].values()) == {None}
    assert document["chains"] == document["ours"]["kernels"] == []
    told = profile_tables.profile_table(found)
    assert "DIFFERENT" in told
    assert "chains that remain" not in told
    bars, lines = profile.charted(found)
    assert list(bars) == ["eager"]
    assert lines == []


def made(bits_equal: bool = True) -> Profile:
    launches = trace.launches_in(forward_of_two_layers().events)
    counted: Launches = account([(launch.name, launch.us) for launch in launches], {"row_per_warp": "ours"})
    return Profile(
        "z-image",
        "1024x1024 on a Pretend 9",
        counted,
        counted,
        bits_equal,
        Calls(2, 1, Counter({"a reason": 1})),
        {"rms_norm_scale": (2, 4_000_000_000), "swiglu": (1, 200_000_000)},
        4_200.0,
        chains.chains(launches, {"row_per_warp": "ours"}),
    )


def test_tables_say_what_was_counted() -> None:
    told = profile_tables.profile_table(made(), top=1)
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert "GEMM 2 0.200 2 0.200" in lines
    assert "ours 2 0.014 2 0.014" in lines
    assert "together 17 0.358 17 0.358" in lines
    assert "rms_norm_scale 2 4,000.0" in lines
    assert (
        "At the copy bandwidth of this run, 4,200 GB/s: 1.000 ms; spent outside GEMM and attention: 0.058 ms." in lines
    )
    assert "layers.*, gemm to ours 2 6 0.032 mul x2, add" in lines
    assert "and 2 more kinds of chains, 0.010 ms together" in lines
    assert "a reason (1 calls)" in lines


def test_the_chart_is_a_png_with_floors(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bars, lines = profile.charted(made())
    assert [name for name, _ in lines] == ["GEMM and attention", "and the byte floor"]
    assert lines[1][1] - lines[0][1] == pytest.approx(1.0)
    path = charts.stacked_chart(bars, tmp_path / "x.png", "title", lines)
    assert path.read_bytes().startswith(b"\x89PNG")


# The command line.


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["profile", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "MODEL"),
        (("nope",), "no such model. Expected z-image, qwen-image, tiny-qwen-image, tiny-z-image"),
        (("z-image", "--size", "100", "--device", "cpu"), "multiple of 16"),
        (("tiny-z-image", "--batch", "2"), "--batch is for"),
        (("tiny-z-image", "--size", "50"), "multiples of"),
        (("z-image", "--top", "0"), "--top"),
        (("z-image", "--device", "tpu"), "tpu"),
        (("z-image", "--chart", "x.jpg"), "ends in .png"),
        (("z-image", "--chart", "/no/such/folder/x.png"), "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_chart_without_matplotlib_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = invoke("z-image", "--chart", "x.png")
    assert result.exit_code == 2
    assert "samebits[bench]" in result.output


def test_on_a_cpu_it_prints_the_classes_and_says_that_they_mean_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = tmp_path / "bar.png"
    result = invoke("z-image", "--device", "cpu", "--size", "64", "--top", "2", "--chart", str(chart))
    assert result.exit_code == 0, result.output
    assert "figures mean nothing" in result.stdout
    assert "other eager" in result.stdout
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_json_of_a_whole_pipeline_s_denoiser() -> None:
    result = invoke("tiny-z-image", "--device", "cpu", "--size", "64", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["meaningful"] is False
    assert document["bits_equal"] is True
    assert document["eager"]["launches"]["attention"] == 4
    assert document["calls"]["fused"] == 0
    assert set(document["byte_floor"]["by_op"]) <= {op.name for op in OPS}
