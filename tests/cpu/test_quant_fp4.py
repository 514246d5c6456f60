"""NVFP4: packing, scales and their order in memory against a decoder of its own.

The native path runs on GPUs that we do not have. Here everything that goes to ``torch._scaled_mm`` is decoded again, by
the rules that cuBLAS documents, and multiplied.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_quant_fp8 import e4m3, nearest
from torch import Tensor, nn

from samebits.quant import NvFp4Linear, _fp4, _scaled_mm

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = np.array([e4m3(byte) for byte in range(256)])


def code(value: float) -> int:
    """The E2M1 code nearest to a number, ties to the even code, from the distances to all eight."""
    if np.isnan(value):
        return 7 | (8 if np.signbit(value) else 0)
    distance = [abs(abs(float(value)) - each) for each in E2M1]
    best = [place for place, each in enumerate(distance) if each == min(distance)]
    return (best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1]) | (8 if np.signbit(value) else 0)


def quantised(x: Tensor, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``(M, K)`` and scale bytes ``(M, K / 16)`` by the documented chain, in numpy's fp32."""
    g = np.float32(scale)
    groups = x.float().numpy().reshape(x.shape[0], -1, 16)
    largest = np.abs(groups).max(axis=-1)
    wanted = np.clip((largest * np.float32(1 / 6)) * (np.float32(1) / g), np.float32(2.0**-9), np.float32(448))
    scales = nearest(wanted)
    inverse = np.float32(1) / (E4M3[scales].astype(np.float32) * g)
    values = (groups * inverse[..., None]).reshape(x.shape)
    return np.vectorize(code)(values).astype(np.uint8), scales


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Codes from bytes: the even column is in the low half."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    return codes


def numbers(codes: np.ndarray) -> np.ndarray:
    sizes = np.array(E2M1)[codes & 7]
    return np.where(codes & 8, -sizes, sizes)


def unblocked(flat: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Scales by row and column, from the order that cuBLAS documents for its tiles of 128 x 4."""
    tiles_a_row = -(-columns // 4)
    assert flat.shape == (-(-rows // 128) * 128 * tiles_a_row * 4,)
    found = np.empty((rows, columns), dtype=flat.dtype)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * tiles_a_row + column // 4
            found[row, column] = flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
    return found


def inputs() -> list[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 64, generator=generator)
    return [
        (wide, 0.01),
        (wide.to(BF16) * 40, 0.0123),
        (wide.half() * 1e-4, 1.0),  # scales below the smallest
        (wide * 1e6, 1e-4),  # scales beyond 448
        (torch.zeros(2, 32), 0.5),
        # Every tie, both signs, and what is beyond the last, under a scale of one.
        (
            torch.tensor(
                [[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -2.5, -5.0, 0.0, -0.0, 4.9]]
            ),
            1.0,
        ),
        (torch.tensor([[float("nan"), 1.0, *[2.0] * 14]]), 1.0),
    ]


@pytest.mark.parametrize(("x", "scale"), inputs())
def test_an_activation_is_quantised_by_the_documented_chain(x: Tensor, scale: float) -> None:
    packed, scales = _fp4.quantize(x, torch.tensor(scale))
    codes, scale_bytes = quantised(x, scale)
    finite = ~np.isnan(x.float().numpy().reshape(x.shape[0], -1, 16)).any(axis=-1)
    got = scales.view(torch.uint8).numpy()
    assert packed.is_contiguous()
    assert scales.is_contiguous()
    assert np.array_equal(got[finite], scale_bytes[finite])
    if finite.all():
        assert np.array_equal(unpacked(packed.numpy()), codes)
        moved = packed.numpy().copy()
        moved[-1, -1] ^= 1
        assert not np.array_equal(unpacked(moved), codes)
    else:
        assert (got[~finite] & 0x7F == 0x7F).all(), "a NaN makes its group's scale NaN"


def test_ties_go_to_the_even_code() -> None:
    x, scale = inputs()[5]
    packed, scales = _fp4.quantize(x, torch.tensor(scale))
    assert scales.float().item() == 1.0
    found = numbers(unpacked(packed.numpy()))[0].tolist()
    assert found == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -1.0, -2.0, -4.0, 0.0, -0.0, 4.0]


def test_a_weight_is_decoded_as_it_was_packed() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(0, 256, (24, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 127, (24, 4), dtype=torch.uint8, generator=generator)
    second = torch.tensor(0.0625)
    wanted = numbers(unpacked(weight.numpy())) * np.repeat(E4M3[scales.numpy()] * 0.0625, 16, axis=1)
    got = _fp4.dequantize(weight, scales.view(FP8), second)
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), wanted)
    swapped = (weight << 4) | (weight >> 4)
    assert not np.array_equal(_fp4.dequantize(swapped, scales.view(FP8), second).numpy(), wanted)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (32, 4), (33, 3), (130, 5), (256, 12), (300, 13)], ids=str)
def test_scales_lie_as_cublas_reads_them(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    scales = torch.randint(1, 127, shape, dtype=torch.uint8, generator=generator)
    flat = _fp4.blocked(scales.view(FP8)).view(torch.uint8).numpy()
    assert np.array_equal(unblocked(flat, *shape), scales.numpy())
    assert np.count_nonzero(flat) == shape[0] * shape[1], "zero where there is no scale"
    if shape[0] > 32:
        plain = F.pad(scales, (0, -shape[1] % 4, 0, -shape[0] % 128)).flatten().numpy()
        assert not np.array_equal(flat, plain), "row by row would be another order"


@pytest.mark.parametrize(
    ("have", "sides", "reason"),
    [
        ((0, 0), (16, 32), "0.0"),
        ((8, 9), (16, 32), "8.9 has no FP4 tensor cores"),
        ((9, 0), (16, 32), "9.0"),
        ((10, 0), (16, 32), None),
        ((10, 3), (16, 32), None),
        ((11, 0), (16, 32), "11.0"),
        ((12, 0), (3072, 12288), None),
        ((12, 1), (16, 32), None),
        ((10, 0), (16, 48), "K a multiple of 32"),
        ((10, 0), (8, 32), "N of 16"),
    ],
)
def test_which_gpu_takes_fp4(
    monkeypatch: pytest.MonkeyPatch, have: tuple[int, int], sides: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(_fp4, "capability", lambda device: have)
    got = _fp4.why_no_fp4(torch.device("cuda", 0), *sides)
    assert got is None if reason is None else reason in str(got)
    assert "cpu has no FP4" in str(_fp4.why_no_fp4(torch.device("cpu"), *sides)) or have[0] in (10, 12)


# The linear


def made(in_features: int = 64, out_features: int = 48, **options: Any) -> NvFp4Linear:
    linear = NvFp4Linear(in_features, out_features, **{"dtype": BF16, **options})
    generator = torch.Generator().manual_seed(3)
    linear.weight.copy_(torch.randint(0, 256, tuple(linear.weight.shape), dtype=torch.uint8, generator=generator))
    scales = torch.randint(0x28, 0x48, tuple(linear.weight_scale.shape), dtype=torch.uint8, generator=generator)
    linear.weight_scale.copy_(scales.view(FP8))
    linear.weight_scale_2.fill_(0.02)
    if linear.input_scale is not None:
        linear.input_scale.fill_(0.003)
    if linear.bias is not None:
        linear.bias.data.copy_(torch.randn(out_features, generator=generator))
    return linear


class Gpu:
    """Stands for ``torch._scaled_mm`` on FP4: decodes what it is given and multiplies exactly."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        self.calls += 1
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
        assert scale_a.dtype == scale_b.dtype == FP8
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0]), "the second operand is column-major"
        assert a.shape[1] == b.shape[0]
        assert a.shape[1] % 16 == 0
        assert b.shape[1] % 16 == 0
        left, right = (self._decode(m, s) for m, s in ((a, scale_a), (b.t(), scale_b)))
        return torch.from_numpy(left @ right.T).to(out_dtype)

    def _decode(self, packed: Tensor, scales: Tensor) -> np.ndarray:
        codes = unpacked(packed.view(torch.uint8).numpy())
        rows, columns = codes.shape
        table = E4M3[unblocked(scales.view(torch.uint8).numpy(), rows, columns // 16)]
        return numbers(codes) * np.repeat(table, 16, axis=1)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 70, 64), (2, 2, 3, 64)], ids=str)
def test_what_the_gpu_is_given_is_the_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    linear, gpu = made(bias=bias, dtype=dtype), Gpu()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    monkeypatch.setattr(_fp4, "capability", lambda device: (10, 0))
    monkeypatch.setattr(torch, "_scaled_mm", gpu)
    got = linear(x)
    assert gpu.calls == 1
    codes, scales = quantised(x.reshape(-1, 64), 0.003)
    left = numbers(codes) * np.repeat(E4M3[scales], 16, axis=1)
    right = numbers(unpacked(linear.weight.numpy())) * np.repeat(
        E4M3[linear.weight_scale.view(torch.uint8).numpy()], 16, axis=1
    )
    sums = torch.from_numpy(left @ right.T).float()
    wanted = sums * (torch.tensor(0.003) * torch.tensor(0.02))
    if linear.bias is not None:
        wanted = wanted + linear.bias.float()
    assert torch.equal(got, wanted.to(dtype).reshape(*shape[:-1], 48))
    assert linear(x.new_empty(0, 64)).shape == (0, 48)
    assert gpu.calls == 1


def test_a_wrong_layout_of_the_scales_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = made(), torch.randn(70, 64, dtype=BF16)
    monkeypatch.setattr(_fp4, "capability", lambda device: (12, 0))
    monkeypatch.setattr(torch, "_scaled_mm", Gpu())
    wanted = linear(x)
    row_by_row = lambda s: F.pad(s.view(torch.uint8), (0, -s.shape[1] % 4, 0, -s.shape[0] % 128)).flatten().view(FP8)  # noqa: E731
    monkeypatch.setattr(_fp4, "blocked", row_by_row)
    assert not torch.equal(linear(x), wanted)


def test_elsewhere_the_weight_becomes_numbers_and_the_input_stays() -> None:
    x = torch.randn(2, 3, 64, dtype=BF16)
    for linear in (made(), made(static=False), made(bias=False)):
        bias = None if linear.bias is None else linear.bias
        assert torch.equal(linear(x), F.linear(x, linear.dequantized().to(BF16), bias))
    assert "NVFP4 weights, turned into the input's dtype on each call: cpu has no FP4 tensor cores" in repr(made())


def test_weights_alone_stay_so_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fp4, "capability", lambda device: (10, 0))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: pytest.fail("the input was quantised"))
    linear = made(static=False)
    linear(torch.randn(3, 64, dtype=BF16))
    assert "the checkpoint quantises weights alone" in repr(linear)
    assert "NVFP4 weights and inputs, torch._scaled_mm" in repr(made())


def test_strided_rows_and_any_batch() -> None:
    linear = made()
    wide = torch.randn(3, 7, 96, dtype=BF16)
    for x in (wide[..., 16:80], wide[:, ::2, :64], torch.randn(3, 64, 7, dtype=BF16).transpose(1, 2)):
        assert torch.equal(linear(x), F.linear(x, linear.dequantized().to(BF16), linear.bias)), "as a plain linear does"
    with pytest.raises(ValueError, match=r"width 64, got \(3, 7, 96\)"):
        linear(wide)
    with pytest.raises(ValueError, match="multiple of 16, got 40"):
        NvFp4Linear(40, 16)


def test_moves_casts_and_state_dicts() -> None:
    linear = made()
    x = torch.randn(3, 64, dtype=BF16)
    other = NvFp4Linear(64, 48, dtype=BF16)
    assert not torch.equal(other(x), linear(x))
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other(x), linear(x))
    half = copy.deepcopy(nn.Sequential(linear)).half()[0]
    assert (half.bias.dtype, half.compute_dtype) == (torch.float16, torch.float16)
    for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        assert torch.equal(getattr(half, name).float(), getattr(linear, name).float())
        assert getattr(half, name).dtype == getattr(linear, name).dtype
    with pytest.raises(RuntimeError, match=r"weight_scale is torch\.float32; a NvFp4Linear holds torch\.float8_e4m3fn"):
        other.load_state_dict({**linear.state_dict(), "weight_scale": linear.weight_scale.float()})


def test_it_can_be_traced_whole() -> None:
    torch._dynamo.reset()
    linear, x = made(), torch.randn(2, 3, 64, dtype=BF16)
    assert torch.equal(torch.compile(linear, backend="aot_eager", fullgraph=True)(x), linear(x))


def test_the_capability_is_the_one_of_the_device() -> None:
    assert _fp4.capability is _scaled_mm.capability
