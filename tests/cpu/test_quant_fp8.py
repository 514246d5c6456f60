"""The FP8 chain against a decoder and a rounding of its own, and the linear that is built on it."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

from samebits.quant import Fp8Linear, QuantizedInput, _scaled_mm, dynamic_scale, quantize_fp8
from samebits.quant._fp8 import SMALLEST_SCALE

BF16 = torch.bfloat16


def e4m3(byte: int) -> float:
    """The number that a byte of float8_e4m3fn stands for: a sign, four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


POSITIVE = np.array([e4m3(byte) for byte in range(0x7F)])
"""0, 2^-9, ... 448: in the order of their bytes."""


def nearest(values: np.ndarray) -> np.ndarray:
    """The bytes of the e4m3 numbers nearest to fp32 ``values`` in [-448, 448], ties to the even byte."""
    size = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(POSITIVE, size), 0, len(POSITIVE) - 1)
    below = np.maximum(above - 1, 0)
    up, down = POSITIVE[above] - size, size - POSITIVE[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    byte = np.where(take_above, above, below).astype(np.uint8)
    byte = np.where(np.isnan(values), 0x7F, byte)
    return byte | (np.signbit(values).astype(np.uint8) << 7)


def chain(x: Tensor, scale: Tensor) -> np.ndarray:
    """The documented chain in numpy's fp32."""
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = np.float32(1) / scale.numpy()
        return nearest(np.clip(x.float().numpy() * inverse, np.float32(-448), np.float32(448)))


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def same_bytes(actual: Tensor, expected: np.ndarray) -> bool:
    """Equal bytes, except that a NaN may have either sign."""
    got = actual.view(torch.uint8).numpy()
    nan = ((got & 0x7F) == 0x7F) & ((expected & 0x7F) == 0x7F)
    return got.shape == expected.shape and bool(((got == expected) | nan).all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.03125, 0.0123, 7.7, 3.1e-5, 1e30])
def test_every_half_value_has_the_documented_byte(dtype: torch.dtype, scale: float) -> None:
    x, scale_ = every_half(dtype), torch.tensor(scale)
    assert same_bytes(quantize_fp8(x, scale_), chain(x, scale_))


def test_the_comparison_sees_one_byte() -> None:
    x, scale = every_half(BF16), torch.tensor(0.0123)
    expected = chain(x, scale)
    expected[12_345] ^= 1
    assert not same_bytes(quantize_fp8(x, scale), expected)


def test_other_ways_to_quantise_give_other_bytes() -> None:
    """Else the choice that the chain documents would be no choice, and no test could tell."""
    x, scale = every_half(BF16), torch.tensor(7 / 4096)
    ours = quantize_fp8(x, scale).view(torch.uint8)
    divided = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    in_bf16 = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert 0 < int((ours != divided).sum()) < 100
    assert int((ours != in_bf16).sum()) > 100


def test_ties_signs_and_what_is_no_number() -> None:
    x = torch.tensor([-0.0, 17.0, 19.0, -17.0, 500.0, -1e30, float("inf"), float("-inf"), float("nan"), 2.0**-10])
    got = quantize_fp8(x, torch.tensor(1.0))
    # 17 and 19 lie between 16, 18 and 20; half of the smallest subnormal goes to zero, which is even.
    assert got.float()[1:8].tolist() == [16.0, 20.0, -16.0, 448.0, -448.0, 448.0, -448.0]
    assert got.view(torch.uint8)[0] == 0x80
    assert bool(got[8].isnan())
    assert got.view(torch.uint8)[9] == 0


def layouts() -> Iterator[tuple[str, Tensor]]:
    wide = torch.randn(3, 7, 96)
    yield "contiguous", wide
    yield "rows of something wider", wide[..., 16:64]
    yield "tokens left out", wide[:, ::2]
    yield "transposed", torch.randn(3, 40, 7).transpose(1, 2)
    yield "every other column", wide[..., ::2]
    yield "expanded", torch.randn(1, 1, 33).expand(2, 5, 33)
    yield "one row", torch.randn(17)
    yield "no rows", torch.randn(2, 0, 24)


@pytest.mark.parametrize(("x"), [x for _, x in layouts()], ids=[name for name, _ in layouts()])
@pytest.mark.parametrize("per_token", [False, True])
def test_strided_inputs_have_the_bytes_of_their_copies(x: Tensor, per_token: bool) -> None:
    x = x.to(BF16)
    scale = dynamic_scale(x, per_token)
    got = quantize_fp8(x, scale)
    assert got.is_contiguous()
    assert same_bytes(got, chain(x.contiguous(), scale))
    linear = made(x.shape[-1], 10, static=False, per_channel=per_token)
    assert linear(x).is_contiguous()
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear(x), linear(QuantizedInput(got, scale, BF16)))
    assert linear(x).shape == (*x.shape[:-1], 10)


def test_dynamic_scales_take_the_largest_to_448() -> None:
    x = torch.tensor([[1.0, -4.48], [0.0, 0.0], [2.24, 1.0]], dtype=torch.float64).float()
    by_448 = torch.from_numpy(np.array([4.48, 0.0, 2.24], np.float32) * np.float32(1 / 448))
    assert torch.equal(dynamic_scale(x, False), by_448[0])
    rows = dynamic_scale(x, True)
    assert torch.equal(rows, by_448.clamp(min=SMALLEST_SCALE).reshape(3, 1))
    assert quantize_fp8(x, rows).float().tolist()[1] == [0.0, 0.0]
    assert quantize_fp8(x, rows).float().abs().amax(dim=1).tolist() == [448.0, 0.0, 448.0]
    assert bool(dynamic_scale(torch.tensor([1.0, float("nan")]), False).isnan())


@pytest.mark.parametrize(
    ("values", "scale", "dtype", "error", "complaint"),
    [
        (torch.zeros(2, 4), torch.ones(()), BF16, TypeError, "expected float8_e4m3fn values"),
        (torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones((), dtype=BF16), BF16, TypeError, "an fp32 scale"),
        (torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(()), torch.int8, TypeError, "activation's dtype"),
        (torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(2), BF16, ValueError, r"\(\) or \(2, 1\)"),
        (torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), BF16, ValueError, r"got \(1, 1\)"),
    ],
)
def test_a_quantised_input_of_parts_that_do_not_belong_together(
    values: Tensor, scale: Tensor, dtype: torch.dtype, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        QuantizedInput(values, scale, dtype)


def test_a_quantised_input_is_no_tensor() -> None:
    quantised = made(16, 8).quantize(torch.randn(2, 16))
    for use in (lambda: quantised + 1, lambda: torch.abs(quantised), lambda: tuple(quantised)):  # type: ignore[operator, call-overload, arg-type]
        with pytest.raises(TypeError):
            use()


# The linear


def made(in_features: int, out_features: int, **options: Any) -> Fp8Linear:
    """A linear with small whole numbers for weights and powers of two for scales, so that every sum is exact."""
    options = {"dtype": BF16, **options}
    linear = Fp8Linear(in_features, out_features, **options)
    generator = torch.Generator().manual_seed(in_features * 1000 + out_features)
    whole = torch.randint(-8, 9, (out_features, in_features), generator=generator)
    linear.weight.copy_(whole.to(torch.float8_e4m3fn).view(torch.uint8))
    power = torch.randint(-3, 4, tuple(linear.weight_scale.shape), generator=generator)
    linear.weight_scale.copy_(torch.exp2(power.float()))
    if linear.input_scale is not None:
        linear.input_scale.fill_(0.25)
    if linear.bias is not None:
        linear.bias.data.copy_(torch.randn(out_features, generator=generator))
    return linear


def expected(linear: Fp8Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same from the decoded bytes, in fp64, rounded to fp32 and then once to the result's dtype."""
    table = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)
    quantised = linear.quantize(x)
    values = table[quantised.values.view(torch.uint8).long()]
    weight = table[linear.weight.long()]
    scales = (quantised.scale * linear.weight_scale).double()
    result = (values @ weight.T) * scales
    if linear.bias is not None:
        result = result + linear.bias.double()
    return result.float().to(dtype)


KINDS = list(itertools.product([True, False], [True, False]))
SIZES = [(16, 16), (17, 5), (64, 33), (1, 1), (256, 96)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("static", "per_channel"), KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_the_reference_gives_the_exact_product_rounded_once(
    size: tuple[int, int], static: bool, per_channel: bool, dtype: torch.dtype, bias: bool
) -> None:
    linear = made(*size, static=static, per_channel=per_channel, bias=bias, dtype=dtype)
    # Quarters that survive quantisation, whatever the scale: a power of two for static and for dynamic inputs.
    x = torch.randint(-8, 9, (2, 3, size[0])).to(dtype) / 4
    x[..., 0] = 3.5
    got = linear(x)
    assert got.dtype == dtype
    assert got.shape == (2, 3, size[1])
    assert torch.equal(got, expected(linear, x, dtype))


def test_a_bias_after_the_rounding_would_be_seen() -> None:
    linear, x = made(64, 96), torch.randint(-8, 9, (4, 64)).to(BF16) / 4
    late = linear.multiply(linear.quantize(x), None) + linear.bias
    assert not torch.equal(late, linear(x))
    moved = linear(x)
    moved.view(torch.int16)[1, 2] += 1
    assert not torch.equal(moved, expected(linear, x, BF16))


def test_a_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width 16, got \(2, 3, 15\)"):
        made(16, 8)(torch.zeros(2, 3, 15))


def test_one_quantised_input_serves_several_linears() -> None:
    query, key = made(32, 16), made(32, 24)
    x = torch.randn(2, 5, 32, dtype=BF16)
    shared = query.quantize(x)
    assert torch.equal(query(shared), query(x))
    assert torch.equal(key(shared), key(x))
    key.input_scale.fill_(0.3)  # type: ignore[union-attr]
    assert not torch.equal(key(shared), key(x))


def test_a_picture_does_not_depend_on_its_batch_unless_one_scale_is_found_for_all() -> None:
    x = torch.randn(3, 4, 32, dtype=BF16)
    x[1] *= 10
    for static, per_channel in ((True, False), (False, True)):
        linear = made(32, 16, static=static, per_channel=per_channel)
        assert torch.equal(linear(x)[:1], linear(x[:1]))
    linear = made(32, 16, static=False)
    assert not torch.equal(linear(x)[:1], linear(x[:1]))


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.to(torch.float16),
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.to("cpu", torch.float32),
        lambda module: copy.deepcopy(module).bfloat16(),
        saved_and_loaded,
    ],
)
def test_casts_change_the_bias_alone(move: Callable[[nn.Module], nn.Module]) -> None:
    linear = made(32, 16, per_channel=True)
    before = {name: value.clone() for name, value in linear.state_dict().items()}
    moved = move(nn.Sequential(linear))[0]
    assert isinstance(moved, Fp8Linear)
    for name in ("weight", "weight_scale", "input_scale"):
        assert moved.state_dict()[name].dtype == before[name].dtype
        assert torch.equal(moved.state_dict()[name].float(), before[name].float())
    meta = linear.to("meta")
    assert {value.device.type for value in meta.state_dict().values()} == {"meta"}
    assert meta.to_empty(device="cpu").weight.dtype == torch.uint8


def test_a_state_dict_goes_round() -> None:
    for options in ({}, {"static": False}, {"per_channel": True}, {"bias": False}):
        source, target = made(32, 16, **options), Fp8Linear(32, 16, **{"dtype": BF16, **options})
        x = torch.randn(3, 32, dtype=BF16)
        assert not torch.equal(source(x), target(x))
        target.load_state_dict(source.state_dict())
        assert torch.equal(source(x), target(x))
    assert list(made(32, 16, static=False).state_dict()) == ["bias", "weight", "weight_scale"]
    stored = {**source.state_dict(), "weight": source.weight.view(torch.float8_e4m3fn)}
    target = Fp8Linear(32, 16, bias=False, dtype=BF16)
    target.load_state_dict(stored)
    assert torch.equal(source(x), target(x)), "as an export stores it"


def test_weights_of_another_kind_are_not_cast_into_it() -> None:
    linear = made(32, 16)
    before = linear.weight.clone()
    with pytest.raises(RuntimeError, match=r"weight is torch\.float32; a Fp8Linear holds torch\.uint8"):
        linear.load_state_dict(nn.Linear(32, 16).state_dict(), strict=False)
    assert torch.equal(linear.weight, before)


@pytest.mark.parametrize(("static", "per_channel"), KINDS)
def test_a_plain_linear_can_be_quantised(static: bool, per_channel: bool) -> None:
    plain = nn.Linear(64, 48, dtype=BF16).requires_grad_(False)
    before = plain.weight.clone()
    linear = Fp8Linear.of(plain, 4.0 / 448 if static else None, per_channel=per_channel)
    assert torch.equal(plain.weight, before)
    assert torch.equal(linear.bias, plain.bias)
    table = torch.tensor([e4m3(byte) for byte in range(256)])
    scales = linear.weight_scale.reshape(-1, 1)
    numbers = table[linear.weight.long()]
    largest = numbers.abs().amax(dim=1) if per_channel else numbers.abs().max()
    assert bool((largest == 448).all())
    off = (numbers * scales - plain.weight.float()).abs()
    assert bool((off <= (plain.weight.float().abs() / 16).maximum(scales * 2.0**-10) * 1.01).all())
    x = torch.randn(5, 64, dtype=BF16)
    assert float((linear(x) - plain(x)).norm() / plain(x).norm()) < 0.06


def test_the_repr_says_what_it_is_and_how_it_runs() -> None:
    assert "static, reference path of the same values: cpu has no FP8 tensor cores" in repr(made(32, 16))
    assert "weights per channel, inputs per token" in repr(made(32, 16, static=False, per_channel=True))
    assert "weights per tensor, inputs per tensor" in repr(made(32, 16, static=False))


@pytest.mark.parametrize(
    ("have", "sides", "reason"),
    [
        ((8, 0), (16, 16), "compute capability 8.0 has no FP8"),
        ((8, 6), (16, 16), "8.6"),
        ((8, 9), (16, 16), None),
        ((9, 0), (3072, 12288), None),
        ((10, 0), (16, 16), None),
        ((10, 3), (16, 16), None),
        ((12, 0), (16, 16), None),
        ((9, 0), (8, 16), "multiples of 16"),
        ((9, 0), (16, 24), "multiples of 16"),
        ((0, 0), (16, 16), "0.0"),
    ],
)
def test_which_gpu_takes_fp8(
    monkeypatch: pytest.MonkeyPatch, have: tuple[int, int], sides: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(_scaled_mm, "capability", lambda device: have)
    got = _scaled_mm.why_no_fp8(torch.device("cuda", 0), *sides)
    assert got is None if reason is None else reason in str(got)


def test_a_capability_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(_scaled_mm, "_capabilities", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    for _ in range(3):
        assert _scaled_mm.capability(torch.device("cuda", 1)) == (9, 0)
    assert len(asked) == 1
    assert _scaled_mm.capability(torch.device("cpu")) == (0, 0)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert _scaled_mm.capability(torch.device("cuda", 1)) == (0, 0)


class Gpu:
    """Stands for ``torch._scaled_mm``: takes what the GPU takes, as its documentation and its checks say, no more."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        self.calls += 1
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0]), "the second operand is column-major"
        assert use_fast_accum
        if scale_a.numel() > 1 or scale_b.numel() > 1:
            assert scale_a.shape == (a.shape[0], 1)
            assert scale_b.shape == (1, b.shape[1])
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            assert out_dtype == BF16
        if bias is not None:
            assert out_dtype != torch.float32
            assert bias.dtype == out_dtype
        result = (a.float() @ b.float()) * (scale_a * scale_b)
        return (result if bias is None else result + bias.float()).to(out_dtype)


@pytest.mark.parametrize(("static", "per_channel"), KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 2, 3, 64)])
def test_the_gpu_is_asked_for_the_same_product(
    monkeypatch: pytest.MonkeyPatch,
    static: bool,
    per_channel: bool,
    dtype: torch.dtype,
    bias: bool,
    shape: tuple[int, ...],
) -> None:
    gpu = Gpu()
    linear, x = made(64, 32, static=static, per_channel=per_channel, bias=bias, dtype=dtype), torch.randn(shape)
    x = x.to(dtype)
    reference = linear(x)
    monkeypatch.setattr(torch, "_scaled_mm", gpu)
    monkeypatch.setattr("samebits.quant.linear.why_no_fp8", lambda *_: None)
    assert torch.equal(linear(x), reference)
    assert gpu.calls == 1
    assert linear(x.new_empty(0, 64)).shape == (0, 32)
    assert gpu.calls == 1, "no rows are no product"


def test_autocast_gives_its_own_dtype_and_leaves_the_sums_alone() -> None:
    linear, x = made(64, 32), torch.randn(4, 64)
    with torch.autocast("cpu", BF16):
        got = linear(x)
    assert got.dtype == BF16
    assert torch.equal(got, linear(x.to(BF16)))


def test_offloading_moves_everything() -> None:
    x = torch.randn(3, 32, dtype=BF16)
    plain = nn.Sequential(made(32, 32), made(32, 32))
    wanted = plain(x)
    offloaded = copy.deepcopy(plain)
    cpu_offload(offloaded, execution_device=torch.device("cpu"), offload_buffers=True)
    assert offloaded[0].weight.device.type == "meta"
    assert torch.equal(offloaded(x), wanted)
    grouped = copy.deepcopy(plain)
    apply_group_offloading(grouped, onload_device=torch.device("cpu"), offload_type="leaf_level")
    assert torch.equal(grouped(x), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_can_be_traced_whole(backend: str) -> None:
    torch._dynamo.reset()
    for options in ({}, {"static": False}, {"static": False, "per_channel": True}):
        linear, x = made(32, 16, **options), torch.randn(2, 3, 32, dtype=BF16)
        compiled = torch.compile(linear, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), linear(x))
        shared = torch.compile(lambda value, linear=linear: linear(value), backend=backend, fullgraph=True)
        assert torch.equal(shared(linear.quantize(x)), linear(x))
