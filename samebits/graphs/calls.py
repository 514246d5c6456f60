"""What a call of a denoiser is made of: its key, its tensors, the memory a graph reads them from, and its result.

Two calls may share a graph when they have the same key: the same structure, every number, string and flag equal by
value, every tensor of the same type, shape, strides, device and alignment, and the same switches of torch. What a
key cannot hold (an object of an unknown class, a tensor on the host) has no key, and the call runs plainly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

Key = tuple[Hashable, ...]

_BY_VALUE = (int, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


class Call(NamedTuple):
    """One call: what it can share a graph by, and its tensors in the order in which they occur.

    Attributes
    ----------
    switches, arguments : tuple
        The two parts of ``key``: the switches when the call came, and what its arguments are.
    """

    switches: Key
    arguments: Key
    leaves: list[Tensor]

    @property
    def key(self) -> Key:
        """What calls that may share a graph have in common."""
        return self.switches, self.arguments


class _Unfit(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[str] = []


@dataclass(frozen=True)
class Place:
    """Where tensors have to be, and up to what their addresses have to be the same."""

    device_type: str
    alignment_bytes: int


def read(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Call | str:
    """Return the call, or the sentence that says which argument keeps it from having a key.

    Parameters
    ----------
    args, kwargs
        The arguments of the denoiser's forward: tensors, numbers, strings and None, in tuples, lists and dicts.
    place : Place
        Where every tensor has to be.
    """
    key: list[Any] = []
    leaves: list[Tensor] = []
    try:
        _read(args, key, leaves, place)
        _read(kwargs, key, leaves, place)
    except _Unfit as unfit:
        return f"argument {'.'.join(unfit.path) or '0'} is {unfit}"
    if not leaves:
        return "no argument is a tensor"
    if any(leaf.device != leaves[0].device for leaf in leaves):
        return "the arguments are on different devices"
    return Call(switches(), tuple(key), leaves)


def _read(value: Any, key: list[Any], leaves: list[Tensor], place: Place) -> None:
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        unfit = _why_not(value, place.device_type)
        if unfit is not None:
            raise _Unfit(unfit)
        address = value.data_ptr() % place.alignment_bytes
        key += (Tensor, value.dtype, value.shape, value.stride(), value.device, address)
        leaves.append(value)
    elif kind in _BY_VALUE:
        key += (kind, value)
    elif kind is float:
        # Equal and yet not the same: -0.0 is 0.0 to a dictionary, and a NaN is not even itself.
        key += (float, value if value > 0.0 or value < 0.0 else repr(value))
    elif kind is tuple or kind is list:
        key += (kind, len(value))
        for number, item in enumerate(value):
            try:
                _read(item, key, leaves, place)
            except _Unfit as unfit:
                unfit.path.insert(0, str(number))
                raise
    elif kind is dict:
        key += (kind, len(value))
        for name, item in value.items():
            if type(name) not in (str, int):
                raise _Unfit(f"a dict with a {type(name).__qualname__} for a key")
            key.append(name)
            try:
                _read(item, key, leaves, place)
            except _Unfit as unfit:
                unfit.path.insert(0, str(name))
                raise
    elif isinstance(value, Tensor):
        raise _Unfit(f"a tensor subclass ({kind.__module__}.{kind.__qualname__})")
    else:
        raise _Unfit(f"a {kind.__module__}.{kind.__qualname__}, which has no value to know it by")


def _why_not(tensor: Tensor, device_type: str) -> str | None:
    if tensor.device.type != device_type:
        return f"a tensor on {tensor.device.type}, not on {device_type}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "a tensor without plain memory"
    if tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        return "a tensor with a lazy negation or conjugation"
    if tensor.numel() == 0:
        return "an empty tensor"
    return None


def switches() -> Key:
    """The switches of torch and diffusers under which eager may choose another kernel.

    torch settles some of them by itself when they are first needed: the order of the attention back ends changes in
    the first attention on a GPU of the Hopper generation or later.
    """
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        # A default device is a function mode, and asking for it without one would be slow.
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        _ask(torch.get_float32_matmul_precision),
        _ask(lambda: cuda.matmul.allow_tf32),
        _ask(lambda: cuda.matmul.fp32_precision),
        _ask(torch._C._get_cublas_allow_fp16_reduced_precision_reduction),
        _ask(torch._C._get_cublas_allow_bf16_reduced_precision_reduction),
        _ask(lambda: cuda.matmul.allow_fp16_accumulation),
        _ask(torch._C._get_blas_preferred_backend),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        _ask(lambda: cudnn.allow_tf32),
        _ask(lambda: cudnn.conv.fp32_precision),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        _ask(cuda.fp16_bf16_reduction_math_sdp_allowed),
        _ask(lambda: tuple(torch._C._get_sdp_priority_order())),
        F.scaled_dot_product_attention,  # which people replace by another one
        _active_attention(),
    )


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or None where this torch has no such switch or two of its switches contradict each other."""
    try:
        return question()
    except (AttributeError, RuntimeError):
        return None


def _active_attention() -> Any:
    """The attention back end that diffusers uses where a processor names none."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return str(_AttentionBackendRegistry._active_backend)


def refill(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return ``value`` in new containers, every tensor in it replaced by the next of ``tensors``."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(refill(item, tensors) for item in value)
    if kind is dict:
        return {name: refill(item, tensors) for name, item in value.items()}
    return next(tensors) if isinstance(value, Tensor) else value


class Static:
    """The memory from which a graph reads one argument: as strided and as aligned as the argument that came.

    Attributes
    ----------
    view : Tensor
        What the forward is given.
    """

    __slots__ = ("_flat", "_span", "view")

    def __init__(self, like: Tensor, place: Place) -> None:
        span = _span(like)
        size = like.element_size()
        with torch.inference_mode(False):  # an inference tensor counts no versions
            raw = torch.empty(span * size + place.alignment_bytes, dtype=torch.uint8, device=like.device)
            start = (like.data_ptr() - raw.data_ptr()) % place.alignment_bytes
            flat = raw[start : start + span * size].view(like.dtype)
            self.view = flat.as_strided(like.shape, like.stride(), flat.storage_offset())
        self._flat = flat
        # Where elements overlap or have gaps between them, all from the first to the last is copied.
        self._span = 0 if is_dense(like) else span

    def fill(self, source: Tensor) -> None:
        """Copy the values of ``source``, which has the shape and strides of the argument this was made for."""
        if self._span:
            self._flat.copy_(source.as_strided((self._span,), (1,), source.storage_offset()))
        else:
            self.view.copy_(source)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory from the first to the last one, each on its own place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Output:
    """A forward's result: its structure and its tensors, so that a copy can be handed out.

    Parameters
    ----------
    value
        Tensors, numbers, strings and None in tuples, lists, dicts and dataclasses.

    Attributes
    ----------
    leaves : list of Tensor
        Its tensors.
    form : list
        Everything else in it; equal where two results differ at most in the values of their tensors.

    Raises
    ------
    TypeError
        There is something else in it; the message says what.
    """

    def __init__(self, value: Any) -> None:
        self.leaves: list[Tensor] = []
        self.form: list[Any] = []
        self._places: dict[int, int] = {}
        self._build = self._read(value)
        self._copies = [_copier(leaf) for leaf in self.leaves]

    def _read(self, value: Any) -> Callable[[list[Tensor]], Any]:
        kind = type(value)
        self.form.append(kind)
        if kind is Tensor:
            place = self._places.setdefault(id(value), len(self.leaves))
            if place == len(self.leaves):
                self.leaves.append(value)
            return lambda leaves: leaves[place]
        if kind in _BY_VALUE or kind is float:
            self.form.append(repr(value))
            return lambda leaves: value
        if kind is tuple or kind is list:
            self.form.append(len(value))
            parts = [self._read(item) for item in value]
            return lambda leaves: kind(part(leaves) for part in parts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: self._read(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return lambda leaves: kind(**{name: part(leaves) for name, part in fields.items()})
        if kind is dict:
            self.form.append(repr(list(value)))
            items = {name: self._read(item) for name, item in value.items()}
            return lambda leaves: {name: part(leaves) for name, part in items.items()}
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")

    def copy(self) -> tuple[Any, list[Tensor]]:
        """Return the result in memory of its own, and its tensors, by the values that they have now."""
        leaves = [copy() for copy in self._copies]
        return self._build(leaves), leaves


def _copier(tensor: Tensor) -> Callable[[], Tensor]:
    if is_dense(tensor):
        return tensor.clone
    shape, stride, span = tensor.shape, tensor.stride(), _span(tensor)
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset())
    return lambda: flat.clone().as_strided(shape, stride)
