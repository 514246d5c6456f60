"""Input sets: copies of an op's arguments that keep every layout, fresh values, poison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from samebits.bits import integer_view

# NaN patterns with a payload that no arithmetic produces: an element that a kernel forgot keeps its payload and
# cannot be mistaken for a NaN that eager computed.
_POISON = {
    torch.float16: 0x7F5A,
    torch.bfloat16: 0x7FDA,
    torch.float32: 0x7FDA5A5A,
    torch.float64: 0x7FFA5A5A5A5A5A5A,
    torch.float8_e4m3fn: 0xFF,  # no payload to choose; but the GPU's arithmetic makes the positive NaN alone
}


def tensors_of(args: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among ``args``, in order; a tuple or list counts with what it holds."""
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(tensors_of(value))
    return found


def storage_bytes(args: Iterable[Any]) -> int:
    """Bytes of the storages behind the tensors of ``args``, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(args)}
    return sum(storages.values())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as bytes, shape (nbytes,), uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def clone_args(args: Sequence[Any]) -> tuple[Any, ...]:
    """Copy the arguments of a call, keeping shapes, strides, offsets and which tensors share a storage.

    ``Tensor.clone`` would turn slices of one fused projection into separate dense tensors: another signature.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(copy(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage().data_ptr()
        if key not in copies:
            copies[key] = _whole(value).clone()
        view = torch.empty(0, dtype=value.dtype, device=value.device)
        return view.set_(copies[key].untyped_storage(), value.storage_offset(), value.shape, value.stride())

    return tuple(copy(value) for value in args)


def refill(args: Sequence[Any], seed: int, amplitude: float, which: int = 2) -> None:
    """Overwrite the first ``which`` floating tensors of ``args`` with normal values of the given amplitude.

    The seed decides the values; strided views are written in place, so the layout stays.
    """
    floating = [t for t in tensors_of(args) if t.is_floating_point()][:which]
    if not floating:
        raise ValueError("no floating-point tensor among the arguments to refill")
    generator = torch.Generator(device=floating[0].device).manual_seed(seed)
    for tensor in floating:
        tensor.normal_(0.0, amplitude, generator=generator)


def unchanged(args: Iterable[Any], pristine: Iterable[Any]) -> bool:
    """Whether the storages behind ``args`` still hold, byte for byte, what ``pristine`` (a ``clone_args``) holds.

    The whole storage counts, also what lies between the rows of a strided view.
    """
    pairs = zip(tensors_of(args), tensors_of(pristine), strict=True)
    return all(torch.equal(_whole(now), _whole(then)) for now, then in pairs)


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill tensors with a NaN pattern that no arithmetic produces (integers with a large odd value)."""
    for tensor in tensors:
        if tensor.is_floating_point():
            integer_view(tensor).fill_(_POISON[tensor.dtype])
        else:
            tensor.fill_(0x5A)
