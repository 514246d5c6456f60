"""FP8 on a GPU that has it: the chain's bytes, the products of ``torch._scaled_mm``, and whole models, fused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ring import assert_same_bits
from torch import Tensor, nn

from samebits import tiny
from samebits.apply import apply
from samebits.gate import Gate
from samebits.quant import Fp8Linear, QuantizedLinear, dynamic_scale, quantize_fp8
from samebits.quant._scaled_mm import fp8_native, fp8_reference, why_no_fp8

pytestmark = pytest.mark.gpu

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = (BF16, torch.float16, torch.float32)
KINDS = list(itertools.product([True, False], [True, False]))


@pytest.fixture(autouse=True)
def _has_fp8(device: torch.device) -> None:
    reason = why_no_fp8(device, 16, 16)
    if reason is not None:
        pytest.skip(reason)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equal bytes, but for the sign of a NaN, which a conversion may choose."""
    a, b = left.cpu().view(torch.uint8), right.cpu().view(torch.uint8)
    nan = ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F)
    return a.shape == b.shape and bool(((a == b) | nan).all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_every_half_value_has_the_bytes_that_the_cpu_gives(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (1.0, 0.03125, 0.0123, 7 / 4096, 7.7, 3.1e-5, 1e30):
        here, there = torch.tensor(scale), torch.tensor(scale, device=device)
        assert same_bytes(quantize_fp8(x.to(device), there), quantize_fp8(x, here)), scale
    moved = quantize_fp8(x, torch.tensor(1.0)).view(torch.uint8).clone()
    moved[123] ^= 1
    assert not same_bytes(quantize_fp8(x.to(device), torch.ones((), device=device)), moved.view(FP8))


def test_scales_and_bytes_of_any_rows_are_the_cpus(device: torch.device) -> None:
    wide = torch.randn(3, 70, 3100) * 3
    for x in (wide, wide[..., 7:3079], wide[:, ::2, :65], wide.transpose(1, 2), wide.half(), wide.to(BF16)[:, 1:2]):
        there = x.to(device)
        for per_token in (False, True):
            scale = dynamic_scale(there, per_token)
            assert torch.equal(scale.cpu(), dynamic_scale(x, per_token))
            got = quantize_fp8(there, scale)
            assert got.is_contiguous()
            assert same_bytes(got, quantize_fp8(x, scale.cpu()))


def made(device: torch.device, in_features: int, out_features: int, **options: Any) -> Fp8Linear:
    """Small whole numbers and scales that are powers of two: every sum is exact, in whatever order it is made."""
    linear = Fp8Linear(in_features, out_features, **{"dtype": BF16, **options})
    generator = torch.Generator().manual_seed(in_features + out_features)
    whole = torch.randint(-2, 3, (out_features, in_features), generator=generator)
    linear.weight.copy_(whole.to(FP8).view(torch.uint8))
    power = torch.randint(-3, 4, tuple(linear.weight_scale.shape), generator=generator)
    linear.weight_scale.copy_(torch.exp2(power.float()))
    if linear.input_scale is not None:
        linear.input_scale.fill_(0.5)
    if linear.bias is not None:
        linear.bias.data.copy_(torch.randn(out_features, generator=generator))
    return linear.to(device)


@pytest.mark.parametrize(("static", "per_channel"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_gpus_product_is_the_reference_where_sums_are_exact(
    device: torch.device, static: bool, per_channel: bool, dtype: torch.dtype, bias: bool
) -> None:
    for rows, columns, width in ((1, 16, 16), (2, 64, 128), (17, 48, 256), (200, 3072, 64), (4096, 128, 128)):
        linear = made(device, width, columns, static=static, per_channel=per_channel, bias=bias, dtype=dtype)
        x = (torch.randint(-3, 4, (1, rows, width), device=device) / 2).to(dtype)
        x[..., 0] = 1.75  # 448 under a power of two, so that dynamic scales are exact too
        quantised = linear.quantize(x)
        values, scale = quantised.values.reshape(-1, width), quantised.scale
        scale = scale.reshape(-1, 1) if scale.ndim else scale
        parts = (values, scale, linear.weight.view(FP8), linear.weight_scale, linear.bias, dtype)
        wanted = fp8_reference(*parts)
        assert_same_bits(fp8_native(*parts), wanted)
        assert_same_bits(linear(x), wanted.reshape(1, rows, columns))
        on_cpu = linear.cpu()(x.cpu())
        assert torch.equal(on_cpu, wanted.cpu().reshape(1, rows, columns))


@pytest.mark.parametrize(("static", "per_channel"), KINDS)
def test_a_real_size_is_near_the_reference(device: torch.device, static: bool, per_channel: bool) -> None:
    plain = nn.Linear(3072, 12288, device=device, dtype=BF16)
    linear = Fp8Linear.of(plain, 6.0 / 448 if static else None, per_channel=per_channel)
    x = torch.randn(1, 4096, 3072, device=device, dtype=BF16)
    quantised = linear.quantize(x)
    values, scale = quantised.values[0], quantised.scale.reshape(-1, 1) if quantised.scale.ndim else quantised.scale
    exact = fp8_reference(values, scale, linear.weight.view(FP8), linear.weight_scale, linear.bias, torch.float32)
    got = linear(x)[0].float()
    # A rounding to bf16, and partial sums that the tensor cores keep in fewer bits.
    assert float((got - exact).norm() / exact.norm()) < 5e-3
    assert float((got - plain(x)[0].float()).norm() / plain(x)[0].float().norm()) < 0.06
    assert_same_bits(linear(x), linear(x))
    assert not torch.equal(linear(x), linear(x + 0.25))


@pytest.mark.parametrize("sides", [(17, 33), (48, 40), (8, 64)])
def test_sizes_that_cublas_does_not_take_run_the_reference(device: torch.device, sides: tuple[int, int]) -> None:
    linear = made(device, *sides)
    x = (torch.randint(-3, 4, (2, 5, sides[0]), device=device) / 2).to(BF16)
    assert "reference path of the same values: cuBLAS takes" in repr(linear)
    got = linear(x).cpu()
    assert torch.equal(got, linear.cpu()(x.cpu()))
    assert linear.to(device)(x[:, :0]).shape == (2, 0, sides[1])


@pytest.mark.parametrize(("static", "per_channel"), KINDS)
def test_captured_and_traced_it_gives_the_same_bits(device: torch.device, static: bool, per_channel: bool) -> None:
    linear = made(device, 256, 512, static=static, per_channel=per_channel)
    x = torch.randn(2, 33, 256, device=device, dtype=BF16)
    wanted = linear(x)
    torch._dynamo.reset()
    assert_same_bits(torch.compile(linear, backend="aot_eager", fullgraph=True)(x), wanted)
    graph = torch.cuda.CUDAGraph()
    still = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = linear(still)
    still.copy_(x)
    graph.replay()
    assert_same_bits(captured, wanted)


def quantised(pipeline: Any, per_channel: bool) -> Any:
    """Quantise the linears of the pipeline's blocks, with static scales where the weight has one scale."""
    for name, module in list(pipeline.transformer.named_modules()):
        if type(module) is nn.Linear and not name.startswith("proj_out"):
            parent = pipeline.transformer.get_submodule(name.rpartition(".")[0])
            scale = None if per_channel else 20.0 / 448
            setattr(parent, name.rpartition(".")[2], Fp8Linear.of(module, scale, per_channel=per_channel))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: Any) -> Tensor:
    guidance = {"true_cfg_scale": 1.0} if "Qwen" in type(pipeline).__name__ else {"guidance_scale": 0.0}
    generator = torch.Generator().manual_seed(0)
    sizes = {"width": 256, "height": 192, "num_inference_steps": STEPS}
    out = pipeline(["a fox", "snow"], generator=generator, output_type="latent", **sizes, **guidance)
    found: Tensor = out.images.clone()
    return found


STEPS = 3
NEVER_FUSED = {
    "joint_projection": "is a Fp8Linear, the op stands for exactly Linear",
    "attention": "unsupported: the values are contiguous, so there is no copy to save",
}
"""Sites that are eager at every call of a quantised model, and why: no weights are joined, so the values of the
attention are what their own linear gave."""


def calls_by_site(rows: Any) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Fused and eager calls of every site that was called; and which of them are never fused, all calls for a reason
    of ``NEVER_FUSED``."""
    called = {row.site: (row.fused, row.eager) for row in rows if row.fused or row.eager}
    never = {
        row.site
        for row in rows
        if row.op in NEVER_FUSED and [reason.endswith(NEVER_FUSED[row.op]) for reason in row.reasons] == [True]
    }
    return called, never & called.keys()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("model", tiny.NAMES)
def test_a_quantised_model_is_fused_and_keeps_its_bits(device: torch.device, model: str, per_channel: bool) -> None:
    pipeline = quantised(tiny.build(model, BF16).to(device), per_channel)
    wanted = latents(pipeline)
    assert torch.isfinite(wanted).all()
    native = [module for module in pipeline.transformer.modules() if isinstance(module, QuantizedLinear)]
    assert all("torch._scaled_mm" in module.runs_as() for module in native)
    with apply(pipeline, gate=Gate(), strict=True) as handle:
        latents(pipeline)
        first, never_fused = calls_by_site(handle.report().rows)
        got = latents(pipeline)
        both, still_never_fused = calls_by_site(handle.report().rows)
    assert both.keys() == first.keys()
    assert never_fused == still_never_fused
    for site, (fused, eager) in both.items():
        # A forward per step; in the first picture a signature is compared at the site that meets it first, and no more.
        assert first[site] == ((0, STEPS) if site in never_fused else (STEPS - eager, eager)), str(handle.report())
        assert (fused, eager) == ((0, 2 * STEPS) if site in never_fused else (2 * STEPS - eager, eager))
        assert eager <= 1 or site in never_fused, str(handle.report())
    attentions = [module for module in pipeline.transformer.modules() if hasattr(module, "to_q")]
    # With static scales the inputs come quantised: then nobody asks to join weights. Z-Image has an attention besides.
    asks = (1 if per_channel else 0) + (1 if model == "tiny-z-image" else 0)
    assert len(never_fused) == asks * len(attentions)
    assert len(both) > 2 * len(never_fused)
    assert_same_bits(got, wanted)
    plain = tiny.build(model, BF16).to(device)
    plain.set_progress_bar_config(disable=True)
    assert not torch.equal(latents(plain), wanted), "the quantised model is another one"


def test_offloaded_by_layer_it_gives_the_same_picture(device: torch.device) -> None:
    pipeline = quantised(tiny.build(tiny.NAMES[0], BF16), False)
    wanted = latents(quantised(tiny.build(tiny.NAMES[0], BF16), False).to(device))
    pipeline.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)
    got = latents(pipeline)
    assert_same_bits(got, wanted)
    native = [module for module in pipeline.transformer.modules() if isinstance(module, QuantizedLinear)]
    assert all("torch._scaled_mm" in module.runs_as() for module in native)
