"""Compare tensors as integers: how many elements differ, where first, both values, the distance in ulp.

Floating-point equality is no help here: it takes ``-0.0`` for ``0.0`` and no NaN for another. Two tensors
are the same when dtype, shape, strides and every stored bit are, and nothing in this module has a tolerance.
A leaf: it knows torch and nothing of samebits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Stored as a bare exponent or as two values in a byte: no sign-and-magnitude order to count steps in.
_WITHOUT_ULP = frozenset(
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
)
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Difference:
    """The first thing in which two results differ. ``str()`` is a sentence for a report.

    Attributes
    ----------
    kind : str
        ``"structure"``, ``"dtype"``, ``"device"``, ``"shape"``, ``"strides"`` or ``"bits"``. Only ``"bits"`` fills the
        attributes after ``expected``.
    output : int or None
        Which output of a tuple differs, ``None`` when there is only one.
    actual, expected
        What was found and what should have been: words, dtypes, shapes, strides, or the two values.
    differing, total : int
        How many elements differ, of how many.
    index : tuple of int
        Where the first differing element is.
    actual_bits, expected_bits : int
        The stored bits of the two values, as unsigned integers.
    bits_width : int
        How many bits an element has.
    ulp : int or None
        How many representable values apart the two are; ``None`` for NaN and for types without that notion.
        Zero means that only the sign of a zero differs.
    max_ulp : int or None
        The largest such distance over all differing elements that are not NaN, for floats of up to 32 bits.
    """

    kind: str
    output: int | None
    actual: Any
    expected: Any
    differing: int = 0
    total: int = 0
    index: tuple[int, ...] = ()
    actual_bits: int = 0
    expected_bits: int = 0
    bits_width: int = 0
    ulp: int | None = None
    max_ulp: int | None = None

    def __str__(self) -> str:
        where = "" if self.output is None else f"output {self.output}: "
        if self.kind == "structure":
            return f"{where}expected {self.expected}, got {self.actual}"
        if self.kind != "bits":
            return f"{where}{self.kind} {self.actual} instead of {self.expected}"
        digits = self.bits_width // 4
        distance = "" if self.ulp is None else f", {self.ulp} ulp apart"
        if self.max_ulp is not None and self.differing > 1:
            distance += f" (at most {self.max_ulp} anywhere)"
        return (
            f"{where}{self.differing} of {self.total} elements differ, first at {list(self.index)}: "
            f"{self.actual!r} (0x{self.actual_bits:0{digits}x}) instead of "
            f"{self.expected!r} (0x{self.expected_bits:0{digits}x}){distance}"
        )


def compare(
    actual: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor | Sequence[torch.Tensor]
) -> Difference | None:
    """Return the first difference between two results, or ``None`` when they are the same bits.

    Parameters
    ----------
    actual, expected : Tensor or sequence of Tensor
        Any strides, any dtype with 1 to 16 bytes an element, on one device. A lazy negation or conjugation
        is carried out first. A sequence is compared output by output, its length being part of the result.

    Returns
    -------
    Difference or None
        Equal tensors cost one reduction and, on a GPU, one synchronisation each.

    Raises
    ------
    TypeError
        Something that is not a strided tensor with memory of its own.
    """
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        return _compare_tensors(actual, expected, None)
    if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor) or len(actual) != len(expected):
        return Difference("structure", None, _structure(actual), _structure(expected))
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        found = _compare_tensors(one, other, number)
        if found is not None:
            return found
    return None


class Later:
    """A comparison whose answer is read when the device has computed it; :func:`compare_later` makes it."""

    def __init__(self, known: Difference | None, pending: Sequence[_Pending] = (), rows: torch.Tensor | None = None):
        self._known, self._pending, self._rows = known, pending, rows

    def read(self) -> Difference | None:
        """Return the first difference, or ``None``. Only to be called when the device has come that far.

        What it says is what :func:`compare` says, without ``max_ulp``.
        """
        if self._rows is None:
            return self._known
        for pending, (differing, first, actual, expected) in zip(self._pending, self._rows.tolist(), strict=True):
            if differing:
                return pending.describe(differing, first, actual, expected)
        return None


def compare_later(
    actual: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor | Sequence[torch.Tensor]
) -> Later:
    """Compare like :func:`compare`, but on the device alone: nothing waits for it.

    Structure, dtypes, devices, shapes and strides are compared at once. Of the bits, the device counts how many
    elements differ and keeps the first of them, both values of it included: four integers an output, which are copied
    to page-locked host memory behind everything else on the current stream.

    Raises
    ------
    TypeError
        Something that is not a strided tensor with memory of its own.
    """
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        pairs: list[tuple[int | None, torch.Tensor, torch.Tensor]] = [(None, actual, expected)]
    elif isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor) or len(actual) != len(expected):
        return Later(Difference("structure", None, _structure(actual), _structure(expected)))
    else:
        pairs = [(number, *pair) for number, pair in enumerate(zip(actual, expected, strict=True))]
    for number, one, other in pairs:
        found = _other_layout(one, other, number)
        if found is not None:
            return Later(found)
    pending = [_Pending(number, one.dtype, tuple(one.shape)) for number, one, _ in pairs]
    rows = [_row(integer_view(one), integer_view(other)) for _, one, other in pairs]
    if not rows:
        return Later(None)
    table = torch.stack(rows)
    if table.device.type == "cpu":
        return Later(None, pending, table)
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return Later(None, pending, host.copy_(table, non_blocking=True))


def _row(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return how many integers differ, where the first does, and both there: four int64 on the device."""
    if ours.numel() == 0:
        return torch.zeros(4, dtype=torch.int64, device=ours.device)
    unequal = ours != theirs
    first = unequal.to(torch.uint8).reshape(-1).argmax().reshape(1)
    values = [torch.take(view, first).to(torch.int64) for view in (ours, theirs)]
    return torch.cat([unequal.sum().reshape(1), first, *values])


@dataclass(frozen=True)
class _Pending:
    """What has to be remembered of two tensors to say how they differ."""

    output: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    def describe(self, differing: int, first: int, actual: int, expected: int) -> Difference:
        """Make the difference of the numbers that the device left; of a complex element, of the part that differs."""
        parts = 2 if self.dtype.is_complex else 1
        dtype = self.dtype.to_real() if self.dtype.is_complex else self.dtype
        width = dtype.itemsize * 8
        pair = [bits & ((1 << width) - 1) for bits in (actual, expected)]
        values = [_value_of(dtype, bits) for bits in pair]
        return Difference(
            "bits",
            self.output,
            values[0],
            values[1],
            differing=differing,
            total=parts * math.prod(self.shape),
            index=_unravel(first, (*self.shape, parts) if parts > 1 else self.shape),
            actual_bits=pair[0],
            expected_bits=pair[1],
            bits_width=width,
            ulp=None if any(map(_is_nan, values)) else ulp_distance(dtype, pair[0], pair[1]),
        )


def _value_of(dtype: torch.dtype, bits: int) -> Any:
    """Return the value of an element that is stored as ``bits``, an unsigned integer."""
    raw = torch.tensor(list(bits.to_bytes(dtype.itemsize, sys.byteorder)), dtype=torch.uint8, device="cpu")
    return _value(raw.view(dtype), (0,))


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` as integers of the same width, without copying them.

    Complex elements gain a last dimension of size 2, real before imaginary part.

    Raises
    ------
    TypeError
        The tensor is sparse, quantised, on the meta device or has another layout without plain memory.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(
            f"expected a strided tensor with memory of its own, got layout {tensor.layout}, dtype {tensor.dtype} on "
            f"{tensor.device}. Compare its dense parts instead."
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def ulp_distance(dtype: torch.dtype, actual_bits: int, expected_bits: int) -> int | None:
    """Return how many representable values of ``dtype`` lie between two bit patterns.

    Parameters
    ----------
    dtype : torch.dtype
        A real dtype. For integers and bool it is the plain distance.
    actual_bits, expected_bits : int
        The stored bits as unsigned integers. They must not be NaN, whose distance means nothing.

    Returns
    -------
    int or None
        ``None`` for packed and exponent-only types.
    """
    if dtype in _WITHOUT_ULP:
        return None
    width = dtype.itemsize * 8
    return abs(_ordered(dtype, width, actual_bits) - _ordered(dtype, width, expected_bits))


def _ordered(dtype: torch.dtype, width: int, bits: int) -> int:
    """Map stored bits to an integer that grows with the value, one step per representable value."""
    sign = 1 << (width - 1)
    if dtype.is_floating_point:
        return -(bits ^ sign) if bits & sign else bits
    return bits - 2 * sign if dtype.is_signed and bits & sign else bits


def _structure(result: torch.Tensor | Sequence[torch.Tensor]) -> str:
    return "one tensor" if isinstance(result, torch.Tensor) else f"a tuple of {len(result)} tensors"


def _other_layout(actual: torch.Tensor, expected: torch.Tensor, output: int | None) -> Difference | None:
    for kind, found, wanted in (
        ("dtype", actual.dtype, expected.dtype),
        ("device", actual.device, expected.device),
        ("shape", tuple(actual.shape), tuple(expected.shape)),
        ("strides", actual.stride(), expected.stride()),
    ):
        if found != wanted:
            return Difference(kind, output, found, wanted)
    return None


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, output: int | None) -> Difference | None:
    found = _other_layout(actual, expected, output)
    if found is not None:
        return found
    ours, theirs = integer_view(actual), integer_view(expected)
    if torch.equal(ours, theirs):
        return None
    return _describe(actual, expected, ours, theirs, output)


def _describe(
    actual: torch.Tensor, expected: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, output: int | None
) -> Difference:
    """Say how two tensors differ that are known to. Slow, and reached only once per refusal."""
    is_complex = actual.is_complex()
    dtype = torch.view_as_real(actual.detach().resolve_conj()).dtype if is_complex else actual.dtype
    unequal = ours != theirs
    elements = unequal.any(dim=-1) if is_complex else unequal
    first = _first_true(elements)
    index = _unravel(first, tuple(elements.shape))
    part = (int(unequal[index].to(torch.uint8).argmax()),) if is_complex else ()
    width = dtype.itemsize * 8
    pair = [int(view[index + part].item()) & ((1 << width) - 1) for view in (ours, theirs)]
    values = [_value(tensor, index) for tensor in (actual, expected)]
    parts = [_part(value, part) for value in values]
    return Difference(
        "bits",
        output,
        values[0],
        values[1],
        differing=int(elements.sum().item()),
        total=elements.numel(),
        index=index,
        actual_bits=pair[0],
        expected_bits=pair[1],
        bits_width=width,
        ulp=None if any(map(_is_nan, parts)) else ulp_distance(dtype, pair[0], pair[1]),
        max_ulp=_max_ulp(dtype, ours[unequal], theirs[unequal]),
    )


def _first_true(flags: torch.Tensor) -> int:
    """Return the flat index of the first true element, reading ahead only as far as needed."""
    flat = flags.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        place = int(chunk.to(torch.uint8).argmax().item())
        if bool(chunk[place].item()):
            return start + place
    raise ValueError("expected at least one true element, got none.")


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def _value(tensor: torch.Tensor, index: tuple[int, ...]) -> Any:
    element = tensor.detach()[index]
    if tensor.dtype in _WITHOUT_ULP:
        return int(element.view(torch.uint8).item())
    # Eight-bit floats have no item() of their own on every version.
    return element.float().item() if tensor.dtype.is_floating_point and tensor.element_size() == 1 else element.item()


def _part(value: Any, part: tuple[int, ...]) -> Any:
    return (value.real, value.imag)[part[0]] if part else value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _max_ulp(dtype: torch.dtype, ours: torch.Tensor, theirs: torch.Tensor) -> int | None:
    """Return the largest distance in ulp over all pairs without a NaN, ``None`` when there are none."""
    if not dtype.is_floating_point or dtype in _WITHOUT_ULP or dtype.itemsize > 4:
        return None
    valued = ~(_float_nan(dtype, ours) | _float_nan(dtype, theirs))
    ours, theirs = ours[valued], theirs[valued]
    if ours.numel() == 0:
        return None
    return int((_ordered_tensor(dtype, ours) - _ordered_tensor(dtype, theirs)).abs().max().item())


def _float_nan(dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    return bits.view(dtype).float().isnan()


def _ordered_tensor(dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    sign = 1 << (dtype.itemsize * 8 - 1)
    wide = bits.to(torch.int64) & (2 * sign - 1)
    return torch.where(wide >= sign, sign - wide, wide)
