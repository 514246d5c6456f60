"""Q and k norms with RoPE: the complex product's orientation, signs of zero, joint buffers, strides, other types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ring import NO_TEXT, assert_same_bits, awkward_rows, check, check_or_declined, randn, rope_stream, unusual_rows

from samebits.gate import Gate
from samebits.ops import by_name

pytestmark = pytest.mark.gpu

ROPE = by_name("qk_norm_rope")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [
    (kind, dtype)
    for kind in ("diffusers", "native", "torch")
    for dtype in (BF16, FP16, FP32)
    if not (kind == "native" and dtype is FP32)
]
every_kind = pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)


@every_kind
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_two_streams_and_one(head_dim: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for values in (True, False):
        for per_sample, text_per_sample in ((False, False), (True, False), (True, True)):
            image = rope_stream(2, 37, 5, head_dim, dtype, device, values=values, per_sample=per_sample)
            text = rope_stream(2, 11, 5, head_dim, dtype, device, 20, values=values, per_sample=text_per_sample)
            check(ROPE, (*image, *text, 1e-6, kind))
            if not values:
                check(ROPE, (*image, *NO_TEXT, 1e-6, kind))


@every_kind
@pytest.mark.parametrize("head_dim", [64, 128])
def test_awkward_and_unusual_rows(head_dim: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for rows in (awkward_rows(head_dim, dtype, device), unusual_rows(head_dim, dtype, device)):
        _, _, _, *rest = rope_stream(1, rows.shape[0], 1, head_dim, dtype, device)
        q = rows[None, :, None].contiguous()
        check(ROPE, (q, q.flip(1), None, *rest, *NO_TEXT, 1e-6, kind))


def heads_of(values: tuple[float, float], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A head of ones and a weight: normed without eps the head is ``values`` again and again, exactly."""
    weight = torch.tensor(values, dtype=dtype, device=device).repeat(64)
    return torch.ones(1, 8, 4, 128, dtype=dtype, device=device), weight


def table_of(value: complex, device: torch.device) -> torch.Tensor:
    return torch.full((8, 64), value, dtype=torch.complex64, device=device)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_orientation_of_the_complex_product(dtype: torch.dtype, device: torch.device) -> None:
    """x = (1 + 2^-23, -1), table (1, 1 - 2^-24): whatever the compiler of this torch made of ATen's product."""
    x, weight = heads_of((1 + 2**-23, -1.0), FP32, device)
    table = table_of(complex(1, 1 - 2**-24), device)
    args = (x.to(dtype), x.to(dtype), None, weight, weight, table, *NO_TEXT, 0.0, "diffusers")
    normed = torch.view_as_complex(weight.view(64, 2))
    assert torch.equal(ROPE.reference(*args)[0][0, 0, 0].view(64, 2), torch.view_as_real(normed * table[0]))
    check(ROPE, args)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_signs_of_zero(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = heads_of((-0.0, 0.0), dtype, device)
    for turn in (complex(1, 0), complex(-1, 0), complex(0, 1), complex(0, -1), complex(-0.0, -0.0)):
        args = (x, x, None, weight, weight, table_of(turn, device), *NO_TEXT, 0.0, "diffusers")
        assert bool((ROPE.reference(*args)[0] == 0).all()), "not the case meant"
        check(ROPE, args)


def test_weights_in_fp32_and_in_steps_of_bf16(device: torch.device) -> None:
    for head_dim in (64, 128):
        args: tuple[Any, ...] = (
            *rope_stream(2, 17, 6, head_dim, BF16, device, values=False, weight_dtype=FP32),
            *rope_stream(2, 5, 6, head_dim, BF16, device, 20, values=False, weight_dtype=FP32),
        )
        assert ROPE.reference(*args, 1e-6, "diffusers")[0].dtype is FP32
        check(ROPE, (*args, 1e-6, "diffusers"))
        weight = (1 + torch.arange(head_dim, device=device) % 128 / 128).to(BF16)
        q, k, _, _, _, table = args[:6]
        for kind in ("diffusers", "native", "torch"):
            check(ROPE, (q, k, None, weight, weight.flip(0).contiguous(), table, *NO_TEXT, 1e-6, kind))


@pytest.mark.parametrize(("tokens", "text_tokens"), [(1, 1), (3, 1), (1, 3), (7, 20), (20, 7), (4096, 1), (1, 4096)])
def test_every_stream_takes_the_tree_of_its_rows(tokens: int, text_tokens: int, device: torch.device) -> None:
    for head_dim in (64, 96, 128, 256):
        for kind in ("diffusers", "native"):
            image = rope_stream(1, tokens, 1, head_dim, BF16, device)
            check(ROPE, (*image, *rope_stream(1, text_tokens, 1, head_dim, BF16, device, 20), 1e-6, kind))


def test_values_are_copied_bit_by_bit(device: torch.device) -> None:
    for dtype in (BF16, FP16):
        streams = [list(rope_stream(1, tokens, 4, 128, dtype, device, tokens)) for tokens in (64, 128)]
        for stream in streams:
            bits = torch.arange(stream[2].numel(), device=device, dtype=torch.int32)
            stream[2] = (bits * 17).to(torch.int16).view(dtype).view(stream[2].shape)
            assert bool(stream[2].isnan().any()), "not the case meant"
        check(ROPE, (*streams[0], *streams[1], 1e-6, "diffusers"))


def test_storage_of_more_than_four_gib(device: torch.device) -> None:
    """Samples 2^31 + 256 elements apart: 32-bit address arithmetic would read the first one twice, or worse."""
    stride = 2**31 + 256
    elements = stride + 8 * 40 * 128
    free, _ = torch.cuda.mem_get_info(device)
    if free < 6 * elements:
        pytest.skip(f"needs {6 * elements / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}")
    storage = torch.empty(elements, dtype=BF16, device=device)
    far = storage.as_strided((2, 8, 40, 128), (stride, 40 * 128, 128, 1))
    far.copy_(randn(2, 8, 40, 128, dtype=BF16, device=device, seed=1))
    near = randn(2, 8, 40, 128, dtype=BF16, device=device, seed=2)
    _, _, _, q_weight, k_weight, table = rope_stream(2, 8, 40, 128, BF16, device)
    for q, k, v in ((far, near, near), (near, far, near), (near, near, far)):
        stream = (q, k, v, q_weight, k_weight, table)
        args = (*stream, *stream, 1e-6, "diffusers")
        assert ROPE.unsupported(*args) is None
        assert_same_bits(ROPE.prepare(*args)(*args), ROPE.reference(*args))
    del storage, far
    torch.cuda.empty_cache()


def test_views(device: torch.device) -> None:
    for head_dim in (72, 128):
        image, text = (rope_stream(2, 40, 6, head_dim, BF16, device, seed) for seed in (8, 20))
        q, k, v, *rest, table = image
        later = (*(t[:, 9:] for t in (q, k, v)), *rest, table[9:])
        spread = (q[:, ::2], k[:, 1::2], v[:, :20], *rest, table[:20])
        for stream in (later, spread):
            assert check_or_declined(ROPE, (*stream, *text, 1e-6, "diffusers")) is None
        buffer = randn(16 + q.numel(), dtype=BF16, device=device)
        for start in (1, 2, 4, 8):
            late = buffer[start : start + q.numel()].view(q.shape)
            for kind in ("diffusers", "native", "torch"):
                check_or_declined(ROPE, (late, k, v, *rest, table, *text, 1e-6, kind))
        assert check_or_declined(
            ROPE, (q.transpose(1, 2), k.transpose(1, 2), None, *rest, table, *NO_TEXT, 1e-6, "torch")
        )
        assert check_or_declined(ROPE, (q[..., ::2], k[..., ::2], None, *rest, table, *NO_TEXT, 1e-6, "torch"))


def test_types_that_are_declined_run_eager_or_fail_as_eager_does(device: torch.device) -> None:
    q, k, _, *weights, table = rope_stream(1, 8, 4, 128, BF16, device, values=False)
    wide = (q, k, None, *weights, table.to(torch.complex128), *NO_TEXT, 1e-6, "diffusers")
    assert check_or_declined(ROPE, wide) is not None
    site = Gate().site("table", ROPE)
    for _ in range(2):
        assert_same_bits(site(*wide), ROPE.reference(*wide))
    assert (site.counters.fused, site.counters.eager) == (0, 2)
    real = (q, k, None, *weights, table.real.to(BF16), *NO_TEXT, 1e-6, "diffusers")
    assert check_or_declined(ROPE, real) is not None
    eighths = (*(t.to(torch.float8_e4m3fn) for t in (q, k)), None, *weights, table, *NO_TEXT, 1e-6, "diffusers")
    assert check_or_declined(ROPE, eighths) is not None


def test_text_lengths(device: torch.device) -> None:
    """One verification a length and no more, whatever happens in between."""
    lengths = (1, 5, 17, 31, 32, 33, 1024)
    image = rope_stream(1, 256, 24, 128, BF16, device)
    gate = Gate()
    site = gate.site("text", ROPE)
    for _ in range(3):
        for length in lengths:
            args = (*image, *rope_stream(1, length, 24, 128, BF16, device, length), 1e-6, "diffusers")
            assert_same_bits(site(*args), ROPE.reference(*args))
    assert len(list(gate.verdicts())) <= len(lengths)
    assert site.counters.fused >= 2 * len(lengths), dict(site.counters.reasons)
