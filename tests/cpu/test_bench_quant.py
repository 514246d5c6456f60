"""One forward in FP8: which linears are quantised, what is compared and timed, what a row may say, what is wanted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import denoisers as small
import pytest
import torch
from click.testing import CliRunner, Result
from test_bench_models import bench, graphs  # noqa: F401  fixtures
from torch import nn

from samebits import bits
from samebits.apply import apply
from samebits.bench import (
    charts,
    evidence,
    forwards,
    latents,
    launches,
    models,
    quant,
    quant_ratios,
    reports,
    tables,
    variants,
)
from samebits.bench.comparing import Bench
from samebits.bench.models import Denoiser
from samebits.bench.variants import Outcome
from samebits.cli import _bench_quant, main
from samebits.ops import OPS
from samebits.quant import Fp8Linear

CPU = torch.device("cpu")
COLUMNS = ["model", "size", "batch", "variant", "ms", "bits_equal", "launches", "ms_gemm", "ms_attention", "ms_other"]
BY_CLASS = ["launches_gemm", "launches_attention", "launches_other"]
MOVED = ["biases_absorbed", "output_relative_error", "output_psnr_db", "latents_psnr_db", "latents_ssim"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def denoiser() -> Denoiser:
    with torch.no_grad():  # in bf16, where a bias that is added later moves bits
        return models.SMALL["qwen-image"](CPU, dtype=torch.bfloat16)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def z_denoiser() -> Denoiser:
    with torch.no_grad():
        return models.SMALL["z-image"](CPU, dtype=torch.bfloat16)  # type: ignore[call-arg]


class Applied:
    """Stands for ``apply``: with a gate for each contract, whose kernels are Python and can be spoilt."""

    def __init__(self) -> None:
        self.exact, self.measured = small.KernelGate(), small.KernelGate()
        self.asked: list[dict[str, Any]] = []
        self.moves = True
        """Whether what may move bits does."""

    def __call__(self, model: nn.Module, **options: Any) -> Any:
        self.asked.append(options)
        return apply(model, gate=self.measured if options else self.exact, **(options if self.moves else {}))


def move(op: str, outputs: Sequence[torch.Tensor]) -> None:
    """More than FP8 rounds away."""
    outputs[-1].mul_(1.01)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    made = Applied()
    monkeypatch.setattr(variants, "apply", made)
    return made


def measure(denoiser: Denoiser, bench: Bench, graphs: bool = False, rounds: int = 1) -> Outcome:  # noqa: F811
    return quant.measure(denoiser, bench, OPS, 128, 1, graphs, rounds)


def by_variant(outcome: Outcome) -> dict[str, dict[str, Any]]:
    for row in outcome.rows:
        assert evidence.QUANT.problem(row) is None
        assert list(row)[: len(COLUMNS)] == COLUMNS, "the columns of models.json come first"
    return {row["variant"]: row for row in outcome.rows}


def traces(model: nn.Module) -> list[str]:
    return [
        name for part in model.modules() for name in ("forward", "_samebits", "_quantizer") if name in part.__dict__
    ]


# The FP8 model.


def test_the_linears_of_the_blocks_are_quantised_but_those_of_the_modulation(denoiser: Denoiser) -> None:
    linears = [name for name, part in denoiser.model.named_modules() if isinstance(part, nn.Linear)]
    chosen = {name for name in linears if quant.is_quantized(name)}
    first = "transformer_blocks.0."
    assert {name.removeprefix(first) for name in chosen if name.startswith(first)} == {
        *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
        *(f"attn.add_{name}_proj" for name in "qkv"),
        *(f"{stream}_mlp.net.{part}" for stream in ("img", "txt") for part in ("0.proj", "2")),
    }
    left = set(linears) - chosen
    assert {"img_in", "txt_in", "proj_out", "norm_out.linear", f"{first}img_mod.1", f"{first}txt_mod.1"} <= left
    assert len(chosen) == 12 * len(denoiser.blocks)


def test_the_linears_of_z_images_blocks_are_quantised_but_those_of_the_modulation(z_denoiser: Denoiser) -> None:
    linears = [name for name, part in z_denoiser.model.named_modules() if isinstance(part, nn.Linear)]
    chosen = {name for name in linears if quant.is_quantized(name)}
    for block in ("noise_refiner.0.", "context_refiner.0.", "layers.1."):
        assert {name.removeprefix(block) for name in chosen if name.startswith(block)} == {
            *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
        }
    left = set(linears) - chosen
    assert {"cap_embedder.1", "t_embedder.mlp.0", "layers.0.adaLN_modulation.0"} <= left
    assert len(chosen) == 7 * len(z_denoiser.blocks)
    scales = quant.input_scales(z_denoiser)
    assert scales.keys() == chosen
    assert scales["layers.0.attention.to_q"] == scales["layers.0.attention.to_k"] == scales["layers.0.attention.to_v"]
    assert scales["layers.0.feed_forward.w1"] == scales["layers.0.feed_forward.w3"]
    assert scales["layers.0.feed_forward.w1"] != scales["layers.0.feed_forward.w2"]


def test_the_fp8_model_shares_what_is_not_quantised_and_leaves_the_other_as_it_is(
    denoiser: Denoiser, z_denoiser: Denoiser
) -> None:
    for each in (denoiser, z_denoiser):
        _check_sharing(each)


def _check_sharing(denoiser: Denoiser) -> None:
    before = denoiser.forward().clone()
    made = quant.prepare(denoiser, 128, 1)
    assert bits.compare(denoiser.forward(), before) is None
    assert not any(isinstance(part, Fp8Linear) for part in denoiser.model.modules())
    parts, originals = dict(made.model.named_modules()), dict(denoiser.model.named_modules())
    assert parts.keys() == originals.keys()
    for name, part in parts.items():
        assert isinstance(part, Fp8Linear) == quant.is_quantized(name) or not isinstance(part, nn.Linear)
        assert part is not originals[name]
        if isinstance(part, Fp8Linear):
            assert part.weight.dtype == torch.uint8
            assert part.input_scale is not None
        else:
            for key, parameter in part.named_parameters(recurse=False):
                assert parameter is originals[name].get_parameter(key), "no second copy of a weight"
    assert all(part._forward_pre_hooks == {} for part in denoiser.model.modules()), "calibration leaves nothing behind"
    assert bits.compare(made.latents, denoiser.latents) is None
    assert 0 < latents.relative_error(made.forward(), before) < 0.05


def test_input_scales_are_the_largest_magnitudes_over_448(denoiser: Denoiser) -> None:
    largest: dict[str, float] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            largest[name] = max(largest.get(name, 0.0), float(args[0].abs().max()))

        return hook

    names = ["transformer_blocks.1.attn.to_q", "transformer_blocks.1.txt_mlp.net.2"]
    parts = dict(denoiser.model.named_modules())
    hooks = [parts[name].register_forward_pre_hook(look(name)) for name in names]
    scales = quant.input_scales(denoiser)
    for hook in hooks:
        hook.remove()
    assert len(scales) == 12 * len(denoiser.blocks)
    for name in names:
        assert scales[name] == pytest.approx(largest[name] / 448, rel=1e-6)
    block = "transformer_blocks.0.attn."
    assert scales[f"{block}to_q"] == scales[f"{block}to_k"] == scales[f"{block}to_v"], "one input, to be shared"
    assert scales[f"{block}to_q"] != scales[f"{block}to_out.0"]


def test_only_linears_are_made_fp8(denoiser: Denoiser) -> None:
    with pytest.raises(TypeError, match="expected a linear at norm_out, got a AdaLayerNormContinuous"):
        quant.in_fp8(denoiser.model, {"norm_out": 1.0})


def test_each_state_answers_in_its_own_turn_only(denoiser: Denoiser, applied: Applied) -> None:
    made = quant.prepare(denoiser, 128, 1)
    switch = variants.Switch(made.model, quant.QuantContest.applied)

    def counted() -> dict[str, int]:
        return {state: sum(row.fused for row in handle.report().rows) for state, handle in switch.handles.items()}

    unfused = made.forward().clone()
    for state in ("fp8_fused", "fp8_absorbed", "eager", "fp8_fused", "eager", "fp8_absorbed"):
        switch.to(state)
        made.forward()
        before = counted()
        result, after = made.forward(), counted()
        assert [name for name in after if after[name] > before[name]] == [name for name in after if name == state]
        assert (bits.compare(result, unfused) is None) == (state != "fp8_absorbed"), state
    switch.close()
    assert traces(made.model) == []
    assert bits.compare(made.forward(), unfused) is None


# Measuring.


def test_rows_of_a_run_without_graphs(denoiser: Denoiser, bench: Bench, applied: Applied) -> None:  # noqa: F811
    outcome = measure(denoiser, bench)
    rows = by_variant(outcome)
    assert list(rows) == ["fp8_unfused", "fp8_fused"]
    for row in rows.values():
        assert list(row) == [*COLUMNS, *BY_CLASS]
        assert (row["model"], row["size"], row["batch"], row["ms"]) == ("qwen-image", 128, 1, 7.0)
        assert row["bits_equal"] is True
    assert applied.asked == [{}, {"contract": "measured", "on_trial": True}]
    told = "\n".join(outcome.notes)
    assert re.search(r"^fp8_fused: [1-9]\d* calls fused, ", told, re.MULTILINE)
    assert re.search(r"^fp8_absorbed: [1-9]\d* calls fused, ", told, re.MULTILINE)
    assert traces(denoiser.model) == []
    assert quant.good(outcome)


@pytest.mark.usefixtures("graphs")
def test_rows_of_a_whole_run(denoiser: Denoiser, bench: Bench, applied: Applied) -> None:  # noqa: F811
    outcome = measure(denoiser, bench, graphs=True)
    rows = by_variant(outcome)
    assert tuple(rows) == evidence.QUANT_VARIANTS
    assert {name: row["bits_equal"] for name, row in rows.items()} == {
        name: name != "fp8_absorbed_graph" for name in evidence.QUANT_VARIANTS
    }
    assert all(row["ms"] == 7.0 for row in rows.values())
    assert list(rows["fp8_absorbed_graph"]) == [*COLUMNS, *BY_CLASS, *MOVED]
    assert applied.asked == [{}, {}, {"contract": "measured", "on_trial": True}], "bf16, FP8, absorbed"
    assert traces(denoiser.model) == []
    assert quant.good(outcome)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_model_that_absorbs_no_biases_has_no_such_row(
    z_denoiser: Denoiser,
    bench: Bench,  # noqa: F811
    applied: Applied,
    with_graphs: bool,
) -> None:
    outcome = measure(z_denoiser, bench, graphs=with_graphs)
    rows = by_variant(outcome)
    graphed = ["bf16_exact_graph", "fp8_unfused", "fp8_fused", "fp8_fused_graph"]
    assert list(rows) == (graphed if with_graphs else ["fp8_unfused", "fp8_fused"])
    for row in rows.values():
        assert (row["model"], row["bits_equal"], row["ms"]) == ("z-image", True, 7.0)
        assert list(row) == [*COLUMNS, *BY_CLASS]
    assert applied.asked == [{}] * (1 + with_graphs)
    assert "fp8_absorbed: not run, samebits adds no bias of a ZImageTransformer2DModel late" in outcome.notes
    assert traces(z_denoiser.model) == []
    assert quant.good(outcome)

    def spoil(op: str, outputs: Sequence[torch.Tensor]) -> None:
        if op == "swiglu" and outputs[0].dtype == torch.float8_e4m3fn:
            outputs[0].view(torch.uint8).bitwise_xor_(0x80)

    applied.exact.spoil = spoil
    outcome = measure(z_denoiser, bench, graphs=with_graphs)
    rows = by_variant(outcome)
    assert (rows["fp8_fused"]["bits_equal"], rows["fp8_fused"]["ms"]) == (False, None)
    assert rows["fp8_unfused"]["ms"] == 7.0
    assert not quant.good(outcome)


@pytest.mark.usefixtures("graphs")
def test_how_far_absorbing_moves_is_measured_and_told(
    denoiser: Denoiser,
    bench: Bench,  # noqa: F811
    applied: Applied,
) -> None:
    row = by_variant(measure(denoiser, bench, graphs=True))["fp8_absorbed_graph"]
    assert 0 < row["output_relative_error"] < 0.5
    assert 0 < row["output_psnr_db"] < 100
    assert 0 < row["latents_psnr_db"] < 100
    assert 0 < row["latents_ssim"] < 1
    assert row["biases_absorbed"] == 4 * len(denoiser.blocks)
    near = row["output_relative_error"]
    applied.measured.spoil = move
    row = by_variant(measure(denoiser, bench, graphs=True))["fp8_absorbed_graph"]
    assert row["output_relative_error"] > 2 * near, "how far is measured, not only that"
    applied.measured.spoil, applied.moves = None, False
    outcome = measure(denoiser, bench, graphs=True)
    row = by_variant(outcome)["fp8_absorbed_graph"]
    assert row["bits_equal"] is True
    assert (row["output_relative_error"], row["output_psnr_db"], row["latents_ssim"]) == (0.0, None, 1.0)
    assert row["biases_absorbed"] == 0
    assert any("its bits are those of fp8_unfused; nothing moved" in note for note in outcome.notes)


@pytest.mark.usefixtures("graphs")
def test_a_wrong_bit_of_the_fused_model_takes_its_times_away_and_nobody_elses(
    denoiser: Denoiser,
    bench: Bench,  # noqa: F811
    applied: Applied,
) -> None:
    def after_bf16(op: str, outputs: Sequence[torch.Tensor]) -> None:
        if len(applied.asked) > 1:
            move(op, outputs)

    applied.exact.spoil = after_bf16
    outcome = measure(denoiser, bench, graphs=True)
    rows = by_variant(outcome)
    for name in ("fp8_fused", "fp8_fused_graph"):
        assert (rows[name]["bits_equal"], rows[name]["ms"], rows[name]["ms_other"]) == (False, None, None)
    assert rows["fp8_unfused"]["ms"] == rows["fp8_absorbed_graph"]["ms"] == 7.0
    assert any(note.startswith("fp8_fused: bits DIFFER from eager's; 0/2 blocks") for note in outcome.notes)
    assert not quant.good(outcome)


def test_bits_that_go_wrong_while_time_is_taken_are_noticed(
    denoiser: Denoiser,
    bench: Bench,  # noqa: F811
    applied: Applied,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(bodies: Any, *rest: Any, **options: Any) -> dict[str, float]:
        applied.exact.spoil = move
        return dict.fromkeys(bodies, 7.0)

    monkeypatch.setattr(variants, "interleaved_ms", timed)
    outcome = measure(denoiser, bench)
    rows = by_variant(outcome)
    assert (rows["fp8_fused"]["bits_equal"], rows["fp8_fused"]["ms"]) == (False, None)
    assert rows["fp8_unfused"]["ms"] == 7.0
    assert not quant.good(outcome)


@pytest.mark.usefixtures("graphs")
def test_an_absorbed_variant_that_fails_is_a_row_without_figures(
    denoiser: Denoiser,
    bench: Bench,  # noqa: F811
    applied: Applied,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(model: nn.Module, **options: Any) -> Any:
        if options:
            raise RuntimeError("no contract")
        return applied(model)

    monkeypatch.setattr(variants, "apply", fails)
    whole = forwards.record(
        None,
        lambda *_: measure(denoiser, bench, graphs=True),
        OPS,
        ("qwen-image",),
        (128,),
        (1,),
        command="x",
        environment={},
        kind="quant",
    )
    rows = by_variant(whole)
    assert (rows["fp8_absorbed_graph"]["ms"], rows["fp8_absorbed_graph"]["bits_equal"]) == (None, False)
    assert rows["fp8_fused_graph"]["ms"] == 7.0
    assert any("fp8_absorbed failed: RuntimeError: no contract" in note for note in whole.notes)
    assert not quant.good(whole)
    whole.rows = [row for row in whole.rows if row["ms"] is not None]
    assert not quant.good(whole), "without a GPU the variant has no row, and still it failed"


def test_a_model_that_gives_no_numbers_is_not_measured(
    denoiser: Denoiser,
    bench: Bench,  # noqa: F811
    applied: Applied,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # FP8 has no infinity: a value that a scale takes out of range is clamped, so only NaN comes through.
    monkeypatch.setattr(quant, "input_scales", lambda _: {"transformer_blocks.0.attn.to_q": float("nan")})
    with pytest.raises(RuntimeError, match="is not finite"):
        measure(denoiser, bench)
    assert traces(denoiser.model) == []


def test_biases_are_counted_where_an_op_took_them_in() -> None:
    rows = [
        SimpleNamespace(op=op, fused=fused)
        for op, fused in (("bias_gated_residual", 3), ("bias_gated_residual_norm_modulate", 4), ("gated_residual", 9))
    ]
    handle: Any = SimpleNamespace(report=lambda: SimpleNamespace(rows=rows))
    assert quant._biases(handle) == 7


@pytest.mark.parametrize(
    "kernel",
    [
        "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_bias_TNT",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::Gemm<x>>>",
        "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x64_stage3_warpsize2x2x1_tensor16x8x32_kernel",
    ],
)
def test_scaled_products_count_as_gemm(kernel: str) -> None:
    assert launches.class_of(kernel, launches.kernels_of(OPS)) == "gemm"


def test_launches_by_class_are_those_of_the_lane() -> None:
    counted = launches.account(
        [("nvjet_a", 1000.0)] * 2 + [("flash", 500.0), ("mine", 30.0), ("Memcpy", 20.0)], {"mine": "ours"}
    )
    lane = variants.Lane(lambda: None, None, True, account=counted)
    assert quant._launches(lane) == {"launches_gemm": 2, "launches_attention": 1, "launches_other": 2}
    assert set(quant._launches(None).values()) == {0}


# Distances.


def pictures(seed: int, noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(2, 3, 24, 17, generator=generator, dtype=torch.float64).cumsum(-1)
    return one + noise * torch.randn(one.shape, generator=generator, dtype=torch.float64), one


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.0])
def test_figures_are_those_of_torchmetrics(noise: float) -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    found, expected = pictures(1, noise)
    peak = float(expected.max() - expected.min())
    theirs = image.structural_similarity_index_measure(found, expected, data_range=peak)
    assert latents.ssim(found, expected) == pytest.approx(float(theirs), abs=1e-6)
    theirs = image.peak_signal_noise_ratio(found, expected, data_range=peak)  # which takes its logarithm in fp32
    assert latents.psnr_db(found, expected) == pytest.approx(float(theirs), abs=1e-4)


def test_figures_of_what_is_equal_and_of_what_is_not() -> None:
    found, expected = pictures(2)
    assert (latents.relative_error(expected, expected), latents.ssim(expected, expected)) == (0.0, 1.0)
    assert latents.psnr_db(expected, expected) == float("inf")
    assert latents.relative_error(2 * expected, expected) == pytest.approx(1.0)
    assert latents.ssim(found, expected) < latents.ssim(*pictures(2, 0.01)) < 1.0  # type: ignore[operator]
    assert latents.ssim(expected[..., :6, :], expected[..., :6, :]) == 1.0
    assert latents.ssim(expected[..., :5, :], expected[..., :5, :]) is None
    flat = torch.zeros(1, 1, 12, 12)
    assert (latents.ssim(flat, flat), latents.relative_error(flat, flat)) == (1.0, 0.0)
    assert latents.relative_error(flat + 1, flat) == float("inf")
    assert latents.psnr_db(flat + 1, flat) == 0.0


def test_latents_become_pictures_as_the_pipeline_makes_them() -> None:
    from diffusers import QwenImagePipeline

    packed = torch.randn(2, 64, 64)
    theirs = QwenImagePipeline._unpack_latents(packed, 128, 128, 8)
    assert torch.equal(latents.qwen_image_pictures(packed), theirs[:, :, 0])
    with pytest.raises(ValueError, match="square"):
        latents.qwen_image_pictures(packed[:, :60])


# Rows, ratios, targets, pages.

TIMES = {"bf16_exact_graph": 120.0, "fp8_unfused": 110.0, "fp8_fused": 90.0, "fp8_fused_graph": 84.0}
TIMES |= {"fp8_absorbed_graph": 82.0}


def rows_of(size: int = 1024, model: str = "qwen-image", **ms: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "size": size,
            "batch": 1,
            "variant": variant,
            "ms": taken,
            "bits_equal": variant != "fp8_absorbed_graph",
            "launches": 2500,
            "ms_gemm": 55.5,
            "ms_attention": 13.5,
            "ms_other": 9.25,
            "launches_gemm": 900,
            "launches_attention": 60,
            "launches_other": 1540,
        }
        for variant, taken in (TIMES | ms).items()
    ]
    rows[-1] |= dict(zip(MOVED, (240, 0.0012, 61.5, 44.25, 0.9987), strict=True))
    return rows


@pytest.mark.parametrize(
    ("variant", "changed", "said"),
    [
        ("fp8_fused", {"variant": "fp8"}, "'variant' must be one of"),
        ("fp8_fused", {"note": "x"}, "'note' is not one of"),
        ("fp8_fused", {"launches_gemm": None}, "'launches_gemm' must be"),
        ("fp8_fused", {"bits_equal": False}, "bits differ, so 'ms' must be null"),
        ("fp8_fused_graph", {"bits_equal": False, "ms": None}, "bits differ, so 'ms_gemm' must be null"),
        ("bf16_exact_graph", {"bits_equal": False}, "bits differ, so 'ms' must be null"),
        ("fp8_absorbed_graph", {"latents_ssim": float("nan")}, "'latents_ssim' must be a finite number or null"),
        ("fp8_absorbed_graph", {"biases_absorbed": "240"}, "'biases_absorbed' must be a finite number or null"),
    ],
    ids=str,
)
def test_rows_are_exact(variant: str, changed: dict[str, Any], said: str) -> None:
    (row,) = (row for row in rows_of() if row["variant"] == variant)
    assert evidence.QUANT.problem(row) is None
    assert said in (evidence.QUANT.problem({**row, **changed}) or "")


def test_what_absorbs_biases_keeps_its_time_and_no_other_that_differs() -> None:
    row = rows_of()[-1]
    assert row["bits_equal"] is False
    assert row["ms"] is not None
    assert evidence.QUANT.problem({**row, **dict.fromkeys(MOVED)}) is None


def test_targets_at_1024() -> None:
    told = quant_ratios.targets(rows_of())
    assert [(target.wanted, target.got, target.reached) for target in told] == [
        ("equal", "equal", True),
        ("<= 0.75", "0.700", True),
        ("<= 0.85", "0.818", True),
        ("240", "240", True),
    ]
    slow = quant_ratios.targets(rows_of(fp8_fused_graph=90.1, fp8_fused=94.0))
    assert [target.reached for target in slow] == [True, False, False, True]
    assert quant_ratios.targets(rows_of(size=2048)) == []
    (bits,) = quant_ratios.targets(rows_of(model="z-image")[:-1])
    assert (bits.name, bits.got, bits.reached) == ("z-image, fp8 fused, every block and the output", "equal", True)
    both = quant_ratios.targets([*rows_of(), *rows_of(model="z-image")[:-1]])
    assert [target.name.split(",")[0] for target in both] == ["qwen-image"] * 4 + ["z-image"]


def test_targets_without_figures_are_not_reached() -> None:
    wrong = [
        evidence.without_speeds(row) | {"bits_equal": False} if row["variant"].startswith("fp8_fused") else row
        for row in rows_of()[:-1]
    ]
    assert [(target.got, target.reached) for target in quant_ratios.targets(wrong)] == [
        ("DIFFERENT", False),
        ("not measured", False),
        ("not measured", False),
        ("not measured", False),
    ]


def test_the_table_tells_bits_ratios_classes_and_what_moved() -> None:
    lines = [" ".join(line.split()) for line in quant_ratios.quant_table(rows_of(), ["a note"]).splitlines()]
    end = "2,500 900 60 1,540 55.50 13.50 9.25"
    assert f"qwen-image 1024 1 fp8_fused_graph 84.00 0.764 equal {end}" in lines
    assert f"qwen-image 1024 1 fp8_absorbed_graph 82.00 0.745 moved {end}" in lines
    assert "qwen-image 1024 batch 1 0.700 0.818 0.976" in lines
    assert "qwen-image 1024 1 240 1.20e-03 61.5 dB 44.2 dB 0.9987" in lines
    assert lines[-1] == "a note"
    wrong = [rows_of()[2] | {"bits_equal": False, "ms": None}]
    assert "DIFFERENT" in quant_ratios.quant_table(wrong, [])


def test_a_record_becomes_a_page_a_chart_and_a_block_of_the_docs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source = {"ops": {op.name: op.source_hash for op in OPS}}
    environment = {"gpu": {"name": "Pretend 9"}, "torch": {"version": "2.99.0"}}
    made = evidence.Record("quant", "samebits bench quant", environment, source, rows_of())
    folder = tmp_path / "evidence" / "pretend"
    assert evidence.read(made.write(folder)).rows == rows_of()
    written, missing = reports.write(made, folder, quant_ratios.targets(made.rows), ["a note"])
    assert missing is None
    assert [path.name for path in written] == ["quant.md", "quant.png"]
    line = "| qwen-image | 1024 | 1 | fp8_fused_graph | 84.00 | 0.764 | equal "
    line += "| 2,500 | 900 | 60 | 1,540 | 55.50 | 13.50 | 9.25 |"
    page = written[0].read_text()
    assert line in page
    assert "| qwen-image | 1024 | 1 | 240 | 1.20e-03 | 61.5 dB | 44.2 dB | 0.9987 |" in page
    assert written[1].read_bytes().startswith(b"\x89PNG")

    root = Path(tables.__file__).parents[2]
    shutil.copy(root / "README.md", tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(root / "docs" / "quant.md", tmp_path / "docs")
    assert tmp_path / "docs" / "quant.md" in tables.update(tmp_path)
    text = (tmp_path / "docs" / "quant.md").read_text()
    assert "Pretend 9, torch 2.99.0, by `samebits bench quant`" in text
    assert line in text
    assert "| qwen-image, fp8 fused / fp8 unfused | <= 0.85 | 0.818 | yes |" in text
    stale = evidence.Record("quant", "x", environment, {"ops": {}}, rows_of())
    stale.write(folder)
    tables.update(tmp_path)
    assert line not in (tmp_path / "docs" / "quant.md").read_text(), "another source's figures are not shown"


def test_a_chart_of_two_models_has_a_bar_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    stacked = charts.stacked_chart

    def look(bars: Any, *rest: Any, **options: Any) -> Path:
        drawn.extend(bars)
        return stacked(bars, *rest, **options)

    monkeypatch.setattr(charts, "stacked_chart", look)
    charts.quant_chart([*rows_of(), *rows_of(model="z-image")[:-1]], tmp_path / "two.png")
    assert len(drawn) == 9
    assert drawn[0] == "qwen-image 1024, batch 1: bf16_exact_graph ="
    assert drawn[-1] == "z-image 1024, batch 1: fp8_fused_graph ="
    drawn.clear()
    charts.quant_chart(rows_of(), tmp_path / "one.png")
    assert drawn[0] == "bf16_exact_graph ="


def test_no_chart_without_a_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    untimed = [evidence.without_speeds(row) for row in rows_of()]
    written, missing = reports.write(evidence.Record("quant", "x", {}, {}, untimed), tmp_path)
    assert [path.name for path in written] == ["quant.md"]
    assert "no chart" in str(missing)


# The command line, where there is no GPU.

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here bench would measure")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "quant", *arguments])


@without_a_gpu
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "100"), "multiple of 16"),
        (("--size", "0"), "--size"),
        (("--batch", "0"), "--batch"),
        (("--rounds", "0"), "--rounds"),
        (("--out", "here"), "torch sees none"),
        (("--add",), "torch sees none"),
        (("--model", "z-image"), "--model"),
        (("flux",), "no model is called 'flux'; there are z-image, qwen-image"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@without_a_gpu
def test_on_a_cpu_it_runs_the_tiny_model_and_says_that_the_figures_mean_nothing(applied: Applied) -> None:
    result = invoke("--rounds", "1", "--size", "64", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["meaningful"] is False
    assert [row["variant"] for row in document["quant"]] == ["fp8_unfused", "fp8_fused"]
    assert document["targets"] == []
    assert any("fp8_absorbed: " in note for note in document["notes"])


@without_a_gpu
def test_on_a_cpu_it_runs_the_tiny_z_image_too(applied: Applied) -> None:
    result = invoke("z-image", "--rounds", "1", "--size", "64", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [(row["model"], row["variant"]) for row in document["quant"]] == [
        ("z-image", "fp8_unfused"),
        ("z-image", "fp8_fused"),
    ]
    assert any("fp8_absorbed: not run" in note for note in document["notes"])


def test_rows_of_another_model_can_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU: the command's own record, with rows that nobody had to measure."""
    monkeypatch.setattr(evidence, "package_hash", lambda: "same")
    monkeypatch.setattr(_bench_quant, "has_gpu", lambda: True)
    monkeypatch.setattr(_bench_quant, "on_gpu", lambda out: (None, {"gpu": {"name": "Pretend"}}, tmp_path))
    monkeypatch.setattr(quant, "here", lambda *_: lambda model, *rest: Outcome(rows_of(model=model), []))
    asked: list[list[Any]] = []

    def report(folder: Path, kind: str, wanted: list[Any], notes: Any) -> str:
        asked.append([target.name.split(",")[0] for target in wanted])
        return f"{kind} in {folder}"

    monkeypatch.setattr(_bench_quant, "report", report)
    assert invoke("--rounds", "2").exit_code == 0
    result = invoke("z-image", "--add")
    assert result.exit_code == 0, result.output
    written = evidence.read(tmp_path / "quant.json")
    assert written.command == "samebits bench quant --size 1024 --rounds 2; samebits bench quant z-image --size 1024"
    assert [row["model"] for row in written.rows] == ["qwen-image"] * 5 + ["z-image"] * 5
    assert asked == [["qwen-image"] * 4, ["qwen-image"] * 4 + ["z-image"]], "the page is about all rows"
    assert invoke("z-image").exit_code == 0
    assert [row["model"] for row in evidence.read(tmp_path / "quant.json").rows] == ["z-image"] * 5
    monkeypatch.setattr(evidence, "package_hash", lambda: "another")
    result = invoke("--add")
    assert result.exit_code == 2
    assert "run everything anew" in result.output


@without_a_gpu
def test_tables_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def recorded(*args: Any, command: str, **options: Any) -> Outcome:
        asked.append(command)
        assert options["kind"] == "quant"
        return Outcome(rows_of(), ["a note"])

    monkeypatch.setattr(forwards, "record", recorded)
    result = invoke("--rounds", "3", "--batch", "2")
    assert result.exit_code == 0, result.output
    assert forwards.MEANINGLESS in result.stdout
    assert "fp8_absorbed_graph" in result.stdout
    assert asked == ["samebits bench quant --size 128 --batch 2 --rounds 3"]
    wrong = [rows_of()[2] | {"bits_equal": False, "ms": None}]
    monkeypatch.setattr(forwards, "record", lambda *args, **options: Outcome(wrong, []))
    assert invoke().exit_code == 1
