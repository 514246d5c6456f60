"""The comparison that everything rests on. Every test of equality has a twin that must fail."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.bits import Difference, compare, compare_later, integer_view, ulp_distance

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHT_BIT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.float8_e8m0fnu]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random elements of any dtype, from random bytes: NaN, infinities and subnormals included."""
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (raw & 1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def flip(tensor: torch.Tensor, *index: int) -> torch.Tensor:
    """A copy of ``tensor`` with the lowest bit of one element flipped."""
    changed = tensor.clone(memory_format=torch.preserve_format)
    view = integer_view(changed)
    view[index] ^= 1
    return changed


def found(actual: object, expected: object) -> Difference:
    difference = compare(actual, expected)  # type: ignore[arg-type]
    assert difference is not None
    return difference


@pytest.mark.parametrize("dtype", FLOATS + EIGHT_BIT + INTEGERS + OTHERS, ids=str)
def test_equal_bits_are_equal_and_one_flipped_bit_is_found(dtype: torch.dtype) -> None:
    expected = values(dtype, 3, 5)
    assert compare(expected.clone(), expected) is None
    difference = found(flip(expected, 1, 2), expected)
    assert (difference.kind, difference.differing, difference.total) == ("bits", 1, 15)
    assert difference.index == (1, 2)
    assert difference.actual_bits ^ difference.expected_bits == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_minus_zero_is_not_zero(dtype: torch.dtype) -> None:
    zero = torch.zeros(4, dtype=dtype)
    minus = zero.clone()
    minus[2] = -0.0
    assert torch.equal(minus, zero)
    difference = found(minus, zero)
    assert (difference.index, difference.ulp) == ((2,), 0)
    assert math.copysign(1.0, difference.actual) == -1.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_same_nan_is_equal_and_another_payload_is_not(dtype: torch.dtype) -> None:
    nan = torch.full((4,), math.nan, dtype=dtype)
    assert not torch.equal(nan, nan.clone())
    assert compare(nan.clone(), nan) is None
    difference = found(flip(nan, 3), nan)
    assert (difference.index, difference.ulp, difference.max_ulp) == ((3,), None, None)


def test_dtype_shape_strides_and_device_count() -> None:
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert found(x.double(), x).kind == "dtype"
    assert found(x.reshape(4, 3), x).kind == "shape"
    transposed = x.t().contiguous().t()
    assert torch.equal(transposed, x)
    difference = found(transposed, x)
    assert (difference.kind, difference.actual, difference.expected) == ("strides", (1, 3), (4, 1))
    assert str(difference) == "strides (1, 3) instead of (4, 1)"
    assert found(x.to("meta"), x).kind == "device"


def test_strided_views_are_compared_where_they_lie() -> None:
    base = torch.randn(4, 6, 10)
    for view in (lambda t: t[:, ::2, 3:7], lambda t: t.transpose(1, 2), lambda t: t[:, :, :1].expand(4, 6, 5)):
        expected, actual = view(base), view(base.clone())
        assert compare(actual, expected) is None
        other = base.clone()
        view(other)[3, 1, 0] += 1.0
        assert found(view(other), expected).index == (3, 1, 0)
    gap = base.clone()
    gap[:, 1::2] = math.nan
    assert compare(gap[:, ::2], base[:, ::2]) is None


def test_first_index_count_and_values() -> None:
    expected = torch.ones(4, 5)
    actual = expected.clone()
    actual[1, 3], actual[2, 0], actual[3, 4] = 1.0 + 2**-23, 0.5, 3.0
    difference = found(actual, expected)
    assert (difference.differing, difference.index, difference.ulp) == (3, (1, 3), 1)
    assert (difference.actual, difference.expected) == (1.0 + 2**-23, 1.0)
    assert difference.max_ulp == 0x40400000 - 0x3F800000
    assert str(difference) == (
        "3 of 20 elements differ, first at [1, 3]: 1.0000001192092896 (0x3f800001) instead of 1.0 (0x3f800000), "
        f"1 ulp apart (at most {0x40400000 - 0x3F800000} anywhere)"
    )


def test_a_scalar_tensor_has_an_empty_index() -> None:
    assert found(torch.tensor(2), torch.tensor(1)).index == ()
    assert compare(torch.tensor(1), torch.tensor(1)) is None
    assert compare(torch.empty(0, 3), torch.empty(0, 3)) is None


def test_complex_names_the_part_that_differs() -> None:
    expected = torch.ones(3, dtype=torch.complex64)
    actual = expected.clone()
    torch.view_as_real(actual)[1, 1] = -0.0
    difference = found(actual, expected)
    assert (difference.differing, difference.total, difference.index) == (1, 3, (1,))
    assert (difference.actual_bits, difference.expected_bits, difference.ulp) == (0x80000000, 0, 0)
    assert compare(actual.conj(), actual.conj().resolve_conj()) is None
    assert found(expected.conj(), expected).kind == "bits"


def test_lazy_negation_is_carried_out() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    lazy = z.conj().imag
    assert lazy.is_neg()
    resolved = torch.empty_strided(lazy.shape, lazy.stride()).copy_(lazy)
    assert not resolved.is_neg()
    assert torch.equal(integer_view(lazy), integer_view(resolved))
    assert not torch.equal(integer_view(lazy), integer_view(z.imag))


def test_tuples_are_compared_one_by_one() -> None:
    a, b = torch.randn(3), torch.randn(2, 2)
    assert compare((a.clone(), b.clone()), (a, b)) is None
    assert compare([a.clone()], (a,)) is None
    difference = found((a, flip(b, 1, 0)), (a, b))
    assert (difference.output, difference.index) == (1, (1, 0))
    assert str(difference).startswith("output 1: 1 of 4 elements differ, first at [1, 0]")
    assert found((a,), (a, b)).kind == "structure"
    assert str(found(a, (a,))) == "expected a tuple of 1 tensors, got one tensor"


def test_parameters_and_tensors_that_require_grad() -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    assert compare(weight, weight.detach().clone()) is None
    assert found(weight, flip(weight.detach(), 0)).index == (0,)


def test_what_has_no_plain_memory_is_a_type_error() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(TypeError, match="expected a strided tensor with memory of its own"):
            compare(tensor, tensor)


def test_the_first_difference_is_found_behind_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.bits._CHUNK_ELEMENTS", 4)
    expected = torch.zeros(3, 7)
    actual = expected.clone()
    actual[1, 4:] = 1.0
    assert found(actual, expected).index == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_ulp_counts_the_representable_values_between(dtype: torch.dtype) -> None:
    width = dtype.itemsize * 8
    every = torch.arange(1 << width, dtype=torch.int32).to(torch.int16 if width == 16 else torch.uint8)
    numbers = every.view(dtype).double() if width == 16 else every.view(dtype).float().double()
    finite = [(v, b) for v, b in zip(numbers.tolist(), range(1 << width), strict=True) if not math.isnan(v)]
    ladder = sorted({v for v, _ in finite})
    rung = {v: i for i, v in enumerate(ladder)}
    for (v, b), (w, c) in zip(finite[::17], finite[5::17], strict=False):
        assert ulp_distance(dtype, b, c) == abs(rung[v] - rung[w])


def test_ulp_of_other_types() -> None:
    assert ulp_distance(torch.int8, 0xFF, 0x01) == 2
    assert ulp_distance(torch.uint8, 0xFF, 0x01) == 254
    assert ulp_distance(torch.float8_e8m0fnu, 1, 2) is None


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_ulp_is_a_distance(a: float, b: float) -> None:
    bits = [int(v) & 0xFFFFFFFF for v in torch.tensor([a, b], dtype=torch.float32).view(torch.int32).tolist()]
    there, back = ulp_distance(torch.float32, *bits), ulp_distance(torch.float32, *reversed(bits))
    assert there == back
    assert there is not None
    assert (there == 0) == (a == b)
    if a != b:
        step = torch.nextafter(torch.tensor(a), torch.tensor(b))
        nearer = ulp_distance(torch.float32, int(step.view(torch.int32).item()) & 0xFFFFFFFF, bits[1])
        assert nearer == there - 1


# Comparisons whose answer is read later.


@pytest.mark.parametrize("dtype", FLOATS + EIGHT_BIT + INTEGERS + [torch.bool, torch.float8_e8m0fnu], ids=str)
def test_what_is_read_later_is_what_is_known_at_once(dtype: torch.dtype) -> None:
    expected = values(dtype, 3, 5)
    assert compare_later(expected.clone(), expected).read() is None
    for actual in (flip(expected, 1, 2), flip(flip(expected, 2, 4), 0, 3), flip(expected.t(), 2, 1)):
        reference = expected if actual.shape == expected.shape else expected.t()
        at_once, later = found(actual, reference), compare_later(actual, reference).read()
        assert later is not None
        assert repr(dataclasses.replace(at_once, max_ulp=None)) == repr(later)


def test_complex_elements_are_named_with_the_part_that_differs() -> None:
    expected = torch.arange(6).to(torch.complex64).reshape(2, 3)
    actual = expected.clone()
    torch.view_as_real(actual)[1, 2, 1] = 0.5
    difference = compare_later(actual, expected).read()
    assert difference is not None
    assert (difference.index, difference.actual, difference.expected) == ((1, 2, 1), 0.5, 0.0)
    assert (difference.differing, difference.total) == (1, 12)


def test_outputs_are_read_in_order_and_layouts_are_compared_at_once() -> None:
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    y = x.bfloat16()
    assert compare_later((x.clone(), y.clone()), (x, y)).read() is None
    difference = compare_later((x.clone(), flip(y, 2, 3)), (x, y)).read()
    assert difference is not None
    assert (difference.output, difference.index) == (1, (2, 3))
    for actual, expected in (
        (x, (x,)),
        ((x,), (x, x)),
        (x.double(), x),
        (x.t().contiguous().t(), x),
        (x.to("meta"), x),
        ((x, y.reshape(4, 3)), (x, y)),
    ):
        assert compare_later(actual, expected).read() == compare(actual, expected) is not None
    assert compare_later((), ()).read() is None
    assert compare_later(x[:0], x[:0]).read() is None


def test_what_is_written_after_the_comparison_does_not_count() -> None:
    x = torch.zeros(4)
    actual = torch.ones(4)
    later = compare_later(actual, x)
    actual.zero_()
    difference = later.read()
    assert difference is not None
    assert (difference.differing, difference.actual, difference.expected) == (4, 1.0, 0.0)
