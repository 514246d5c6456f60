"""Whole denoisers, small and on the CPU: what is compared, what voids a comparison, what a launch is counted as."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from test_bench_timing import FakeStopwatch

from samebits.bench import denoisers, evidence, launches, models, targets, warm
from samebits.bench.comparing import Bench
from samebits.bench.denoisers import Calls
from samebits.bench.models import Denoiser
from samebits.cli.bench import bench as bench_command
from samebits.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
BUILD: dict[str, Callable[[torch.device], Denoiser]] = {
    "qwen-image": partial(
        models.qwen_image,
        dtype=torch.float32,
        side=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        in_channels=16,
        out_channels=4,
    ),
    "z-image": partial(
        models.z_image,
        side=8,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 12, 12],
        axes_lens=[512, 64, 64],
    ),
}


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


@pytest.fixture(scope="module", params=BUILD)
def denoiser(request: pytest.FixtureRequest) -> Denoiser:
    with torch.no_grad():
        return BUILD[request.param](CPU)


def test_models_are_the_same_every_time_and_their_norms_have_weights(denoiser: Denoiser) -> None:
    again = BUILD[denoiser.name](CPU)
    for (name, one), other in zip(denoiser.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert not one.requires_grad
    norms = [p for name, p in denoiser.model.named_parameters() if "norm_q" in name and p.dim() == 1]
    assert norms
    assert all(len(norm.unique()) > 1 for norm in norms)
    assert torch.get_default_dtype() is torch.float32


def test_an_observation_holds_every_block_and_every_step(denoiser: Denoiser) -> None:
    seen = denoisers.observe(denoiser, steps=3)
    assert len(seen.blocks) == len(denoiser.blocks)
    assert {len(block) for block in seen.blocks} == {2 if denoiser.name == "qwen-image" else 1}
    assert len(seen.latents) == 3
    assert seen.output.shape == seen.latents[-1].shape == denoiser.latents.shape
    assert bool(seen.output.isfinite().all())
    assert not torch.equal(seen.latents[0], seen.latents[-1])
    assert not any(block._forward_hooks for block in denoiser.blocks)


def test_a_row_of_a_model_that_runs_eager_everywhere(denoiser: Denoiser, bench: Bench) -> None:
    row = denoisers.measure(denoiser, bench, OPS, steps=2, rounds=2)
    assert evidence.DENOISERS.problem(row) is None
    count = len(denoiser.blocks)
    assert (row["blocks_equal"], row["output_equal"], row["steps_equal"]) == (f"{count}/{count}", True, "2/2")
    assert (row["void"], row["finite"]) == (False, True)
    assert row["ms_eager"] == row["ms_ours"] == 7.0
    assert row["fused_calls"] == 0
    assert row["eager_calls"] > 0
    assert row["reasons"]
    assert all("forward" not in block.__dict__ for block in denoiser.blocks), "it must leave no trace"


class Spoiler:
    """Stands for a handle whose kernels change one bit of one block's output from then on."""

    def __init__(self, block: torch.nn.Module) -> None:
        def spoil(module: Any, args: Any, outputs: Any) -> Any:
            parts = [part.clone() for part in (outputs if isinstance(outputs, tuple) else (outputs,))]
            denoisers.bits.integer_view(parts[-1]).view(-1)[0] ^= 1
            return tuple(parts) if isinstance(outputs, tuple) else parts[0]

        self.hook = block.register_forward_hook(spoil)

    def report(self) -> Any:
        return SimpleNamespace(rows=[SimpleNamespace(fused=3, eager=1, reasons={"why": 1})])

    def remove(self) -> None:
        self.hook.remove()


def test_one_wrong_bit_in_the_last_block_is_told_and_takes_the_speed_away(
    denoiser: Denoiser, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoisers, "apply", lambda model: Spoiler(denoiser.blocks[-1]))
    row = denoisers.measure(denoiser, bench, OPS, steps=2)
    count = len(denoiser.blocks)
    assert evidence.DENOISERS.problem(row) is None
    assert row["blocks_equal"] == f"{count - 1}/{count}"
    assert row["ms_eager"] is row["ms_ours"] is None
    assert not denoiser.blocks[-1]._forward_hooks


def test_a_wrong_first_block_reaches_output_and_steps(
    denoiser: Denoiser, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loud(Spoiler):
        def __init__(self, block: torch.nn.Module) -> None:
            self.hook = block.register_forward_hook(
                lambda module, args, out: tuple(o * 1.5 for o in out) if isinstance(out, tuple) else out * 1.5
            )

    monkeypatch.setattr(denoisers, "apply", lambda model: Loud(denoiser.blocks[0]))
    row = denoisers.measure(denoiser, bench, OPS, steps=2)
    assert row["output_equal"] is False
    assert row["steps_equal"] == "0/2"


def test_eager_that_differs_from_itself_voids_the_row(bench: Bench) -> None:
    made = BUILD["z-image"](CPU)
    count = [0]

    def unsteady(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        count[0] += 1
        return made.velocity(latents, sigma) + count[0] * 0.5

    row = denoisers.measure(Denoiser("x", made.model, made.blocks, made.latents, unsteady), bench, OPS, steps=1)
    assert row["void"] is True
    assert row["output_equal"] is False
    assert row["ms_eager"] is None


def test_a_model_that_fails_is_a_row_and_the_next_one_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device) -> Denoiser:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(denoisers, "BUILDERS", {"large": fails, "z-image": BUILD["z-image"]})
    rows = denoisers.record(
        tmp_path, bench, OPS, ["large", "z-image"], command="samebits bench denoisers", environment={}
    )
    assert [row["output_equal"] for row in rows] == [False, True]
    assert rows[0]["error"] == "RuntimeError: out of memory"
    written = evidence.read(tmp_path / "denoisers.json")
    assert list(written.rows) == rows
    assert set(written.source["ops"]) == {op.name for op in OPS}
    assert "out of memory" in targets.denoisers_table(rows)


def test_calls_are_counted_between_two_reports() -> None:
    before = Calls(10, 2, Counter({"compared with eager at this call": 2, "never called": 0}))
    after = Calls(30, 3, Counter({"compared with eager at this call": 2, "never called": 0, "view": 1}))
    assert after.since(before) == Calls(20, 1, Counter({"view": 1, "never called": 0}))


def test_targets_of_denoisers() -> None:
    row = {**denoisers.empty_row("z-image", 34, 4), "launches_eager": 2873, "launches_ours": 1500}
    assert [target.reached for target in targets.denoiser_targets([row])] == [False, True]
    row |= {"blocks_equal": "34/34", "steps_equal": "4/4", "output_equal": True, "launches_ours": 2873}
    assert [target.reached for target in targets.denoiser_targets([row])] == [True, False]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void gemvNSP_kernel<__nv_bfloat16>", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4>", "other"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_add_gemm_mul_3", "other"),
        ("triton_tem_fused_addmm_7", "gemm"),
        ("row_per_warp", "ours"),
        ("row_per_warp(__nv_bfloat16 const*, int)", "ours"),
        ("row_per_warp_of_somebody_else", "other"),
        ("linear_and_more", "gemm"),
        ("linear_and_more_of_somebody_else", "other"),
    ],
)
def test_classes_of_kernels(kernel: str, kind: str) -> None:
    assert launches.class_of(kernel, {**OURS, "heads_of_128": "ours", "linear_and_more": "gemm"}) == kind


OURS = {"row_per_warp": "ours", "row_per_block": "ours"}


def test_accounting_adds_up() -> None:
    events = [("nvjet_a", 100.0), ("nvjet_a", 300.0), ("Memset (Device)", 1.0), ("row_per_block", 16.0), ("x", 2.0)]
    counted = launches.account(events, OURS)
    assert counted.total == 5
    assert counted.counts == {"gemm": 2, "attention": 0, "ours": 1, "copies": 1, "other": 1}
    assert counted.ms["gemm"] == pytest.approx(0.4)
    assert next(iter(counted.kernels.items())) == ("nvjet_a", (2, pytest.approx(0.4)))


def test_only_what_the_gpu_ran_is_counted() -> None:
    def event(name: str, device: str, start: float, annotation: bool = False) -> Any:
        kind, span = SimpleNamespace(name=device), SimpleNamespace(start=start)
        return SimpleNamespace(
            name=name, device_type=kind, device_time=5.0, is_user_annotation=annotation, time_range=span
        )

    events = [
        event("aten::add", "CPU", 0.0),
        event("second", "CUDA", 9.0),
        event("first", "CUDA", 2.0),
        event("step", "CUDA", 1.0, annotation=True),
    ]
    assert launches.device_events(events) == [("first", 5.0), ("second", 5.0)]


def test_memsets_right_before_a_gemm_belong_to_it() -> None:
    events = [
        ("Memset (Device)", 1.0),
        ("Memset (Device)", 1.0),
        ("nvjet_a", 9.0),
        ("Memset (Device)", 1.0),
        ("x", 1.0),
    ]
    counted = launches.account(launches.owned(events))
    assert counted.counts == {"gemm": 3, "attention": 0, "ours": 0, "copies": 1, "other": 1}
    assert counted.ms["gemm"] == pytest.approx(0.011)
    assert launches.account(events).counts["gemm"] == 1


def test_an_account_of_several_runs_is_of_one() -> None:
    one = [("nvjet_a", 100.0), ("row_per_block", 16.0)]
    assert launches.account(one * 3, OURS, runs=3) == launches.account(one, OURS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_has_kernels_that_the_accounting_knows(op: Any) -> None:
    names = launches.kernels_in(op.sources)
    text = "".join(path.read_text() for path in op.sources if path.suffix == ".cu")
    assert len(names) == text.count("__global__")
    assert bool(names) != bool(op.library)  # what a library launches counts as what it is
    assert not any(launches.class_of(name) in ("gemm", "attention", "copies") for name in names)
    # A product of ours does what the floor's library does; its launches are not to look like work beside the GEMMs.
    kind = "gemm" if op.is_product else "ours"
    assert launches.kernels_of([op]) == dict.fromkeys(names, kind)
    assert all(launches.class_of(name, launches.kernels_of(OPS)) == kind for name in names)


def test_kernels_are_found_behind_every_attribute(tmp_path: Path) -> None:
    heads = ("", "__launch_bounds__(256) ", "__cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(3 * LANES, 1)\n")
    for number, head in enumerate(heads):
        (tmp_path / f"{number}.cu").write_text(f'extern "C" __global__ void {head}kernel_{number}(int rows) {{}}')
    paths = [tmp_path / f"{number}.cu" for number in range(3)]
    assert launches.kernels_in(paths) == ("kernel_0", "kernel_1", "kernel_2")


def test_compiling_ahead_skips_what_an_op_declines_and_tells_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []

    def prepare(number: int) -> None:
        if number == 2:
            raise RuntimeError("no compiler")
        prepared.append(number)

    cases = [SimpleNamespace(name=f"case {n}", build=lambda device, seed, n=n: (n,)) for n in range(3)]
    op = SimpleNamespace(cases=cases, unsupported=lambda n: "odd" if n == 1 else None, prepare=prepare)
    monkeypatch.setattr(warm, "by_name", lambda name: op)
    assert [warm.prepare_case("op", n, "cpu") for n in range(3)] == [
        None,
        None,
        "op case 2: RuntimeError: no compiler",
    ]
    assert prepared == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here bench would measure")
@pytest.mark.parametrize("verb", ["ops", "denoisers"])
def test_the_verb_without_a_gpu_says_so_and_writes_nothing(verb: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(bench_command, [verb, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "needs an NVIDIA GPU" in result.output
    assert not (tmp_path / "out").exists()


def gpu_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": os.sys.executable}  # type: ignore[attr-defined]
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "speed"), "unknown part speed"),
        (("--fast",), "unknown option --fast"),
        (("--out",), "--out needs a value"),
        (("--jobs", "many"), "--jobs needs a number"),
    ],
)
def test_the_script_names_what_it_does_not_understand(arguments: tuple[str, ...], said: str) -> None:
    done = gpu_script(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_script_explains_itself() -> None:
    done = gpu_script("--help")
    assert done.returncode == 0
    for part in ("tests", "ops", "denoisers", "models", "record"):
        assert part in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="here scripts/gpu would run")
def test_the_script_without_a_gpu_says_so(tmp_path: Path) -> None:
    done = gpu_script("--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr
    assert not (tmp_path / "out").exists()
