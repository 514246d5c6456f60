"""Shapes, strides and memory: where eager's own order changes, and where address arithmetic breaks."""

from __future__ import annotations

import pytest
import torch
from ring import (
    DTYPES,
    assert_same_bits,
    check,
    check_or_declined,
    modulate_args,
    qk_args,
    randn,
    rms_args,
)

from samebits.gate import Gate
from samebits.ops import Args, Op, by_name

pytestmark = pytest.mark.gpu

MODULATE, QK, RMS = by_name("layer_norm_modulate"), by_name("qk_norm"), by_name("rms_norm_scale")
BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 15, 16, 17, 4096])
def test_rms_norm_tree_changes_with_the_number_of_rows(rows: int, device: torch.device) -> None:
    for width in (128, 256, 2560, 3072, 3584, 3840, 5120, 8192, 8200, 12288):
        x = randn(1, rows, width, dtype=BF16, device=device, seed=width)
        assert check_or_declined(RMS, rms_args(x, scaled=False)) is None


def test_one_verdict_does_not_cover_another_batch(device: torch.device) -> None:
    """Batches of 1, 2 and 3 with 5 tokens: 5, 10 and 15 rows, each with its own eager tree and its own verdict."""
    for op, make in ((MODULATE, modulate_args), (RMS, rms_args)):
        gate = Gate()
        site = gate.site("batch", op)
        for number, batch in enumerate((1, 2, 3), start=1):
            args = make(randn(batch, 5, 3072, dtype=BF16, device=device, seed=batch))
            for _ in range(3):
                assert_same_bits(site(*args), op.reference(*args))
            assert len(list(gate.verdicts())) == number, f"batch {batch} shares a verdict"
        assert site.counters.fused >= 6, dict(site.counters.reasons)
        check(op, args)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_qk_norm_weights_in_fp32_and_in_steps_of_bf16(head_dim: int, device: torch.device) -> None:
    q = randn(2, 17, 6, head_dim, dtype=BF16, device=device, seed=1)
    k = randn(2, 17, 6, head_dim, dtype=BF16, device=device, seed=2)
    args = qk_args(q, k, "diffusers", torch.float32)
    assert QK.reference(*args)[0].dtype is torch.float32
    check(QK, args)
    weight = (1 + torch.arange(head_dim, device=device) % 128 / 128).to(BF16)
    for kind in ("diffusers", "native", "torch"):
        check(QK, (q, k, weight, weight.flip(0).contiguous(), 1e-6, kind))


def test_qk_norm_storage_of_more_than_four_gib(device: torch.device) -> None:
    """Samples 2^31 + 256 elements apart: 32-bit address arithmetic would read the first one twice, or worse."""
    stride = 2**31 + 256
    elements = stride + 8 * 40 * 128
    free, _ = torch.cuda.mem_get_info(device)
    if free < 6 * elements:
        pytest.skip(f"needs {6 * elements / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}")
    storage = torch.empty(elements, dtype=BF16, device=device)
    q = storage.as_strided((2, 8, 40, 128), (stride, 40 * 128, 128, 1))
    q.copy_(randn(2, 8, 40, 128, dtype=BF16, device=device, seed=1))
    k = randn(2, 8, 40, 128, dtype=BF16, device=device, seed=2)
    for kind in ("diffusers", "native", "torch"):
        for args in (qk_args(q, k, kind), qk_args(k, q, kind)):
            assert QK.unsupported(*args) is None
            expected = QK.reference(*args)
            assert_same_bits(QK.prepare(*args)(*args), expected)
    del storage, q
    torch.cuda.empty_cache()


def test_rows_from_a_buffer_that_starts_one_element_later(device: torch.device) -> None:
    for dtype in DTYPES:
        buffer = randn(1 + 5 * 3584, dtype=dtype, device=device)
        x = buffer[1:].view(1, 5, 3584)
        check_or_declined(RMS, rms_args(x))
        check_or_declined(MODULATE, modulate_args(x))
        q = buffer[1 : 1 + 5 * 3584].view(1, 5, 28, 128)
        for kind in ("diffusers", "torch"):
            check_or_declined(QK, qk_args(q, q, kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widest_rows(dtype: torch.dtype, device: torch.device) -> None:
    x = randn(1, 5, 16384, dtype=dtype, device=device)
    assert check_or_declined(RMS, rms_args(x)) is None
    assert check_or_declined(MODULATE, modulate_args(x)) is None
    wider = randn(1, 5, 16388, dtype=dtype, device=device)
    assert check_or_declined(RMS, rms_args(wider)) is not None
    assert check_or_declined(MODULATE, modulate_args(wider)) is not None


@pytest.mark.parametrize(("op", "make"), [(MODULATE, modulate_args), (RMS, rms_args)], ids=["modulate", "rms"])
def test_views(op: Op, make: object, device: torch.device) -> None:
    assert callable(make)
    y = randn(2, 3072, 74, dtype=BF16, device=device)
    assert check_or_declined(op, make(y.transpose(-1, -2))) is not None, "the last dimension is not contiguous"
    wide = randn(2, 74, 6144, dtype=BF16, device=device)
    assert check_or_declined(op, make(wide[..., ::2])) is not None
    assert check_or_declined(op, make(wide[..., 3072:])) is None, "rows that are slices of longer rows"
    half = randn(2, 74, 3072, dtype=BF16, device=device).chunk(2, 1)[1]
    assert check_or_declined(op, make(half)) is None
    check_or_declined(op, make(randn(1, 37, 3072, dtype=BF16, device=device).expand(2, -1, -1)))
    check_or_declined(op, make(randn(37, 2, 3072, dtype=BF16, device=device).transpose(0, 1)))
    for tokens in (1985, 37):
        assert check_or_declined(op, make(randn(1, tokens, 3072, dtype=BF16, device=device))) is None


def test_declined_views_run_eager_behind_the_gate(device: torch.device) -> None:
    args = rms_args(randn(2, 3072, 74, dtype=BF16, device=device).transpose(-1, -2))
    site = Gate().site("view", RMS)
    for _ in range(2):
        assert_same_bits(site(*args), RMS.reference(*args))
    assert site.counters.fused == 0
    assert site.counters.eager == 2
    assert sum(site.counters.reasons.values()) == 2


def text_args(op: Op, length: int, device: torch.device) -> Args:
    if op is QK:
        q = randn(1, length, 24, 128, dtype=BF16, device=device, seed=length)
        return qk_args(q, q.flip(1).contiguous(), "diffusers")
    make = modulate_args if op is MODULATE else rms_args
    return make(randn(1, length, 3072, dtype=BF16, device=device, seed=length))


@pytest.mark.parametrize("op", [MODULATE, QK, RMS], ids=lambda op: op.name)
def test_text_lengths(op: Op, device: torch.device) -> None:
    """One verification a length and no more, whatever happens in between."""
    lengths = (1, 5, 17, 31, 32, 33, 1024)
    gate = Gate()
    site = gate.site("text", op)
    for _ in range(3):
        for length in lengths:
            args = text_args(op, length, device)
            assert_same_bits(site(*args), op.reference(*args))
    assert len(list(gate.verdicts())) <= len(lengths)
    assert site.counters.fused >= 2 * len(lengths), dict(site.counters.reasons)
    for length in lengths:
        check(op, text_args(op, length, device))
