"""What a call is made of, as far as bits are concerned: the key of a call and its readable, rebuildable form.

Two calls with the same key get the same kernel plan and make eager dispatch the same kernels. The key holds, per
tensor, the dtype, shape, strides, device and the address modulo 16 (ATen's vectorised kernels add unaligned head
elements first); the type and value of everything else; and the deterministic-algorithms flag, under which eager may
choose another kernel. State that sends a call to the reference anyway (autocast, gradients, modes) is checked
before the key and is therefore not in it. Left out because no chain contains what they govern: the matmul, cuDNN and
attention back-end flags, and the default dtype. A leaf: it knows torch and nothing of samebits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGNMENT_BYTES = 16
Key = tuple[Hashable, ...]

_CANONICAL_FORM = 1
_SCALARS = (float, int, bool, str, type(None))
_deterministic = torch.are_deterministic_algorithms_enabled


def signature_key(
    args: tuple[Any, ...],
    # Bound here because a local is found faster than a global on the way of every call.
    tensor: type = Tensor,
    parameter: type = Parameter,
) -> Key | None:
    """Return the key of a call with ``args``, or ``None`` when a verdict could not hold for it.

    That is so for subclasses of Tensor, for wrappers and layouts without memory of their own, for lazily negated or
    conjugated tensors and for unknown types; :func:`why_no_key` says which.
    """
    key: list[Any] = [_deterministic()]
    try:
        for arg in args:
            kind = type(arg)
            if kind is tensor or kind is parameter:
                address = arg.data_ptr()
                dtype = arg.dtype
                if not address or arg.is_neg() or (dtype.is_complex and arg.is_conj()):
                    return None
                key += (dtype, arg.shape, arg.stride(), arg.device, address & 15)
            elif kind is float:
                # Equal and yet not the same: -0.0 is 0.0 to a dictionary, and a NaN is not even itself.
                key += (float, arg if arg > 0.0 or arg < 0.0 else repr(arg))
            elif kind in _SCALARS:
                key += (kind, arg)
            else:
                return None
    except RuntimeError:
        # Sparse, nested and batched tensors refuse to name an address or strides.
        return None
    return tuple(key)


def why_no_key(args: Sequence[Any]) -> str:
    """Say in a few words why :func:`signature_key` gives ``args`` no key."""
    for position, arg in enumerate(args):
        reason = _why_not_plain(arg)
        if reason is not None:
            return f"argument {position} is {reason}"
    return "an argument has no plain memory"


def _why_not_plain(arg: Any) -> str | None:
    kind = type(arg)
    if kind is not Tensor and kind is not Parameter:
        if isinstance(arg, Tensor):
            return f"a tensor subclass ({kind.__module__}.{kind.__qualname__})"
        return None if kind in _SCALARS else f"a {kind.__module__}.{kind.__qualname__}, neither a tensor nor a scalar"
    if arg.is_nested:
        return "a nested tensor"
    if arg.layout is not torch.strided:
        return f"a tensor of layout {arg.layout}"
    if arg.is_neg() or arg.is_conj():
        return "a tensor with a lazy negation or conjugation"
    if arg.device.type == "meta":
        return "a tensor on the meta device"
    if arg.numel() == 0:
        return "an empty tensor"
    return None


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    misalignment_bytes: int
    """The address modulo 16."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describe ``tensor``."""
        address = tensor.data_ptr() % ALIGNMENT_BYTES
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, address)

    @property
    def span(self) -> int:
        """How many elements lie between the first and the last one, both and all gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        expected, contiguous = 1, []
        for size in reversed(self.shape):
            contiguous.append(expected)
            expected *= size
        strides = "" if self.stride == tuple(reversed(contiguous)) else f" strides {list(self.stride)}"
        offset = f" +{self.misalignment_bytes} bytes" if self.misalignment_bytes else ""
        return f"{dtype}{list(self.shape)}{strides}{offset} {self.device}"

    def flat(self) -> Tensor:
        """Return fresh, uninitialised memory for the whole span, a vector at the same address modulo 16.

        Raises
        ------
        ValueError
            The address is no multiple of the element size, so torch cannot place a tensor there.
        """
        size = self.dtype.itemsize
        if self.misalignment_bytes % size:
            raise ValueError(
                f"expected an address that is a multiple of the element size, got {self.misalignment_bytes} bytes past "
                f"a multiple of {ALIGNMENT_BYTES} for {self.dtype}."
            )
        room = self.span * size + ALIGNMENT_BYTES
        raw = torch.empty(room, dtype=torch.uint8, device=self.device)
        start = (self.misalignment_bytes - raw.data_ptr()) % ALIGNMENT_BYTES
        return raw[start : start + self.span * size].view(self.dtype)

    def view_of(self, flat: Tensor) -> Tensor:
        """Return the tensor of this spec that lives in ``flat``, a vector made by :meth:`flat`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def random(self, generator: torch.Generator) -> Tensor:
        """Return a tensor of this spec with normal floats, or zeros and ones where it holds integers."""
        flat = self.flat()
        size = (flat.numel(),)
        if self.dtype.is_complex or self.dtype.is_floating_point:
            wide = self.dtype if self.dtype.is_complex or self.dtype is torch.float64 else torch.float32
            values = torch.randn(size, dtype=wide, device=self.device, generator=generator)
        else:
            values = torch.randint(0, 2, size, device=self.device, generator=generator)
        return self.view_of(flat.copy_(values.to(self.dtype)))


@dataclass(frozen=True)
class Signature:
    """The arguments of a call without the values of its tensors. ``str()`` is what a report prints."""

    names: tuple[str, ...]
    args: tuple[Any, ...]
    """A :class:`TensorSpec` for each tensor, and every other argument as it is."""
    deterministic: bool = False
    """Whether eager had to keep to deterministic algorithms."""

    @classmethod
    def of(cls, names: Sequence[str], args: Sequence[Any]) -> Signature:
        """Describe a call; ``names`` are the parameters of the reference."""
        padded = (*names, *(f"argument {n}" for n in range(len(names), len(args))))[: len(args)]
        specs = tuple(TensorSpec.of(arg) if isinstance(arg, Tensor) else arg for arg in args)
        return cls(padded, specs, _deterministic())

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the tensors, each once, in order."""
        return tuple(dict.fromkeys(arg.device for arg in self.args if isinstance(arg, TensorSpec)))

    @property
    def unfit(self) -> str | None:
        """Say why no kernel is ever asked about this signature, or ``None``."""
        if not self.devices:
            return "no argument is a tensor"
        if len(self.devices) > 1:
            return f"the arguments are on different devices ({', '.join(map(str, self.devices))})"
        if self.devices[0].type not in ("cpu", "cuda"):
            return f"no kernel is written for {self.devices[0].type} devices"
        for name, arg in zip(self.names, self.args, strict=True):
            if isinstance(arg, TensorSpec) and arg.misalignment_bytes % arg.dtype.itemsize:
                return f"the address of {name} is no multiple of its element size"
        return None

    @property
    def current(self) -> bool:
        """Whether eager would dispatch as it did for this signature, as far as flags of the process decide."""
        return self.deterministic is _deterministic()

    def __str__(self) -> str:
        text = ", ".join(
            f"{name}: {arg}" if isinstance(arg, TensorSpec) else f"{name}={arg!r}"
            for name, arg in zip(self.names, self.args, strict=True)
        )
        return f"{text}, deterministic algorithms" if self.deterministic else text

    def canonical(self) -> str:
        """Return a text that is the same in every process for the same signature, and for no other.

        It says everything that the key of a call says, but for the number of the device: in its place stands what
        decides about plans, the model of the GPU and how many multiprocessors it has. Names of arguments and addresses
        are not in it.
        """
        parts: list[Any] = [_CANONICAL_FORM, self.deterministic]
        for arg in self.args:
            if isinstance(arg, TensorSpec):
                dtype = str(arg.dtype).removeprefix("torch.")
                where = [dtype, list(arg.shape), list(arg.stride), arg.misalignment_bytes, _device_kind(arg.device)]
                parts.append(where)
            elif type(arg) is float:
                parts.append({"float": arg.hex()})
            else:
                parts.append({type(arg).__name__: arg})
        return json.dumps(parts, separators=(",", ":"))

    def rebuild(self, seed: int) -> tuple[Any, ...]:
        """Return fresh arguments of this signature, made without touching torch's global random state."""
        device = self.devices[0]
        generator = torch.Generator(device).manual_seed(seed)
        return tuple(arg.random(generator) if isinstance(arg, TensorSpec) else arg for arg in self.args)


def _device_kind(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return f"cuda {properties.name} {capability} {properties.multi_processor_count} multiprocessors"


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of ``function``."""
    code = getattr(function, "__code__", None)
    return () if code is None else tuple(code.co_varnames[: code.co_argcount])
