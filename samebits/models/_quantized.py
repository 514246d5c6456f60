"""Where an activation is quantised already when a linear gets it: by the kernel before it, once for all who share it.

A quantised linear quantises its own input. Where the kernel before it is ours, it can do that on its way out, so the
linear is handed a ``QuantizedInput`` instead of a tensor. That is no tensor, so it may only pass through modules that
are known to pass it on: the block calls past the modules in between, and only while nothing is hooked onto them. And
linears that share an input may share its quantisation only where their scales are the same number, which is looked up
once and then held to by identity and torch's count of writes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from samebits import capture
from samebits.models._ahead import Unwritten
from samebits.models._family import Line, source
from samebits.modules import calls_nothing_else, calls_only_forward
from samebits.quant._fp8 import QuantizedInput
from samebits.quant.deferred import Deferrals, DeferredBias, why_not_defer
from samebits.quant.linear import Fp8Linear

FEED_FORWARD_SOURCE = source(FeedForward, "forward", "dae2c9f53987c25ad38cacbeafb54bd72d4b780ab9772413b559a0a94c3c7058")


def input_scale_of(linear: Any) -> Tensor | None:
    """The number with which the linear quantises its input, where it is plain and knows it ahead."""
    if type(linear) is not Fp8Linear or not calls_only_forward(linear.__dict__):
        return None
    scale = linear._buffers.get("input_scale")
    return scale if scale is not None and scale.dim() == 0 else None


def why_no_input_scale(name: str, linear: Any) -> str | None:
    """The sentence for ``input_scale_of``, or ``None`` where it knows a number."""
    if type(linear) is not Fp8Linear:
        kind = type(linear)
        return f"{name} is a {kind.__module__}.{kind.__qualname__}, which reads a tensor"
    if not calls_only_forward(linear.__dict__):
        return f"{name} carries a hook or a forward of its own, which must see a tensor"
    return f"{name} finds its scale from each input" if input_scale_of(linear) is None else None


def read_by_fp8(part: nn.Module, names: Iterable[str]) -> bool:
    """Whether one of the linears of ``part`` with these names is in FP8."""
    return holds_fp8(part._modules.get(name) for name in names)


def holds_fp8(linears: Iterable[Any]) -> bool:
    """Whether one of ``linears``, or what it wraps, is in FP8, so that there is something to quantise for."""
    modules = (module for linear in linears if isinstance(linear, nn.Module) for module in linear.modules())
    return any(isinstance(module, Fp8Linear) for module in modules)


class SharedScale:
    """The input scale of linears that read one activation, or ``None`` while they cannot share its quantisation."""

    def __init__(self) -> None:
        self._known: tuple[list[Unwritten], bool] = [], False  # one value, for threads that come in between

    def of(self, linears: Sequence[Any]) -> Tensor | None:
        """The scale of all ``linears``. Comparing them waits for the device, once."""
        scales = [input_scale_of(linear) for linear in linears]
        first = scales[0]
        if first is None or any(scale is None or scale.device != first.device for scale in scales):
            return None
        if len(scales) == 1 or all(scale is first for scale in scales):
            return first
        if first.is_meta or any(scale is None or scale.is_inference() for scale in scales):
            return None  # on meta, where offloading leaves them, there is no number
        seen, same = self._known
        if len(seen) != len(scales) or not all(was.is_still(scale) for was, scale in zip(seen, scales, strict=True)):
            if first.device.type == "cuda" and (capture.capturing_here(first.device) or capture.capturing_anywhere()):
                return None
            seen = [Unwritten(scale) for scale in scales]  # before they are read: a write meanwhile counts as one after
            same = len({float(scale) for scale in scales if scale is not None}) == 1
            self._known = seen, same
        return first if same else None


def may_quantise() -> bool:
    """Whether this thread runs plainly enough for a value that is no tensor to pass between modules."""
    return not torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled() and not capture.tracing()


def where_plain(scale: Tensor | None, x: Tensor, *others: Tensor | None) -> Tensor | None:
    """``scale``, where what is computed from ``x`` and ``others`` has the dtype of ``x``: bytes tell none."""
    if scale is None or any(other is not None and other.dtype != x.dtype for other in others):
        return None
    return scale


def as_input(values: Tensor, scale: Tensor | None, like: Tensor) -> Any:
    """What a site returned, as the linears take it."""
    return values if scale is None else QuantizedInput(values, scale, like.dtype)


def is_placed(module: nn.Module) -> bool:
    """Whether calling ``module`` runs the forward that samebits put on it, and nothing is hooked onto it."""
    attributes = module.__dict__
    forward = attributes.get("forward")
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return (
        type(forward) is types.MethodType
        and forward.__self__ is module
        and code is not None
        and code.co_qualname == "_dispatcher.<locals>.forward"
        and code.co_filename.replace("\\", "/").endswith("samebits/patch.py")
        and calls_nothing_else(attributes)
    )


def why_not_past(name: str, part: nn.Module, lines: object) -> str | None:
    """Why ``part`` has to be called as the module that it is; ``lines`` are its own of ours, if it has some."""
    if lines is None:
        return f"{name} runs diffusers' own lines"
    if not is_placed(part):
        return f"{name} carries a hook or a forward of its own, which must see a tensor"
    return None


def why_not_shared(linears: Mapping[str, Any], shared: SharedScale | None) -> str | None:
    """The sentence for ``shared.of``, or ``None`` where it gives a scale; ``linears`` are its own, by name."""
    for name, linear in linears.items():
        reason = why_no_input_scale(name, linear)
        if reason is not None:
            return reason
    if shared is None or shared.of(list(linears.values())) is not None:
        return None
    names = list(linears)
    told = " and ".join([", ".join(names[:-1]), names[-1]])
    return f"the input scales of {told} are not known to be one number"


@dataclass
class Parts:
    """What the blocks of one model call past the modules in between."""

    gelus: dict[nn.Module, Line] = field(default_factory=dict)
    """The site of each activation that samebits stands for."""
    attentions: dict[nn.Module, Inner] = field(default_factory=dict)


@dataclass(frozen=True)
class Inner:
    """An attention's own lines, and whether they would answer a call with these keyword arguments."""

    ready: Callable[[dict[str, Any]], bool]
    forward: Callable[..., Any]
    why_not: Callable[[], str | None]
    """Why they would answer no call at all."""


@dataclass(frozen=True)
class Reader:
    """A part of a block with a forward of ours, whose input goes to some of its linears and nowhere else."""

    part: nn.Module
    linears: tuple[str, ...]
    """Their names in the part."""
    why_not: Callable[[Mapping[str, Any] | None], str | None]
    """Why a call with these keyword arguments would not be answered by ``forward``'s own lines; given ``None``, why
    any call."""
    forward: Callable[..., Any]
    """Takes a tensor or a :class:`QuantizedInput`, past the module."""
    shared: SharedScale = field(default_factory=SharedScale)

    def found(self) -> list[Any]:
        modules = self.part._modules
        return [modules.get(name) for name in self.linears]


class Readers:
    """The readers of one model, by module: how a block hands a part the input that it quantised for its linears."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, Reader] = {}

    def add(self, reader: Reader) -> None:
        self._known[reader.part] = reader

    def scale(self, part: nn.Module, **arguments: Any) -> Tensor | None:
        """The number that ``part``'s input may be quantised with in a call with ``arguments``, else ``None``."""
        reader = self._known.get(part)
        if reader is None:
            return None
        linears = reader.found()
        if type(linears[0]) is not Fp8Linear:  # most models have none: ask no more
            return None
        if not may_quantise() or not is_placed(part) or reader.why_not(arguments) is not None:
            return None
        return reader.shared.of(linears)

    def call(self, part: Any, x: Any, **arguments: Any) -> Any:
        """Call ``part``, or its own forward past the module where ``x`` is quantised."""
        return self._known[part].forward(x, **arguments) if isinstance(x, QuantizedInput) else part(x, **arguments)

    def why_not(self, name: str, part: nn.Module, linears: tuple[str, ...]) -> str | None:
        """Why ``part``, called ``name``, wants a tensor: a sentence, or ``None``."""
        found = {linear: part._modules.get(linear) for linear in linears}
        reader = self._known.get(part)
        reason = why_not_past(name, part, reader) or why_not_shared(found, None if reader is None else reader.shared)
        return reason if reason is not None or reader is None else reader.why_not(None)


class QuantizedFeedForward:
    """diffusers' FeedForward with a GELU between two FP8 linears, as a block calls it when its input is quantised."""

    def __init__(self, parts: Parts, block: nn.Module, name: str) -> None:
        self._parts = parts
        self._block, self._name = block, name
        self._source_is_known = FEED_FORWARD_SOURCE.obstacle() is None
        self._first, self._second = SharedScale(), SharedScale()

    @property
    def _module(self) -> Any:
        """The block's feed-forward as it is now: somebody may have put another one there."""
        return self._block._modules[self._name]

    def scale(self) -> Tensor | None:
        """The number that its input may be quantised with, or ``None`` where it wants a tensor."""
        layers = self._layers()
        return None if layers is None else self._first.of([layers[0].proj])

    def reads_fp8(self) -> bool:
        """Whether the linear that reads its input is in FP8."""
        mlp = self._module
        if not self._is_known(mlp):
            return holds_fp8([mlp])
        return len(mlp.net) > 0 and holds_fp8([getattr(mlp.net[0], "proj", None)])

    def why_not(self, name: str) -> str | None:
        """Why the feed-forward, called ``name``, wants a tensor: a sentence, or ``None``."""
        mlp = self._module
        if not self._is_known(mlp):
            return f"{name} is not the FeedForward that samebits was written against"
        if not calls_only_forward(mlp.__dict__):
            return f"{name} carries a hook or a forward of its own, which must see a tensor"
        if self._layers() is not None:
            return None
        linears = {f"{name}.net.0.proj": mlp.net[0].proj, f"{name}.net.{len(mlp.net) - 1}": mlp.net[-1]}
        return why_not_shared(linears, None) or f"{name} has a hook or another module between its two linears"

    def plain_scale(self) -> tuple[bool, Tensor | None]:
        """Whether nobody sees what runs before or after it, and then what :meth:`scale` says.

        That is so where it is diffusers' own with an activation of ours, and nothing is hooked onto any part of it.
        """
        layers = self._plain_layers()
        if layers is None:
            return False, None
        proj, last = layers[0].proj, layers[1]
        if not _runs_forwards_alone(proj) or not _runs_forwards_alone(last):
            return False, None
        return True, self._first.of([proj]) if self._ends_in_fp8() and _are_quantised(layers) else None

    def _ends_in_fp8(self) -> bool:
        """Whether the last layer is in FP8. Most models have none, so this is asked before everything that costs."""
        net = self._module._modules.get("net")
        return net is not None and type(net._modules.get("2")) is Fp8Linear

    def _is_known(self, mlp: Any) -> bool:
        return type(mlp) is FeedForward and self._source_is_known

    def _plain_layers(self) -> tuple[Any, Any] | None:
        mlp = self._module
        if not self._is_known(mlp) or not calls_only_forward(mlp.__dict__):
            return None
        layers = list(mlp.net)
        if len(layers) != 3:
            return None
        activation, dropout, last = layers
        if activation not in self._parts.gelus or not is_placed(activation) or activation.approximate != "tanh":
            return None
        if "gelu" in activation.__dict__ or type(dropout) is not nn.Dropout or dropout.training:
            return None
        return (activation, last) if calls_only_forward(dropout.__dict__) else None

    def _layers(self) -> tuple[Any, Any] | None:
        layers = self._plain_layers() if self._ends_in_fp8() else None
        return layers if layers is not None and _are_quantised(layers) else None

    def __call__(self, x: Any, deferrals: Deferrals | None, name: str) -> Tensor | DeferredBias:
        """The feed-forward of a tensor or a quantised input; with ``deferrals`` without its last bias."""
        layers = self._layers() if self._ends_in_fp8() and may_quantise() else None
        if layers is None:
            result: Tensor = self._module(x)
            return result
        activation, last = layers
        hidden = activation.proj(x)
        scale = self._second.of([last])
        x = as_input(self._parts.gelus[activation].site(hidden, scale), scale, hidden)
        if deferrals is not None and why_not_defer(last) is None:
            return deferrals.defer(last, x, name)
        result = last(x)
        return result


def _runs_forwards_alone(part: nn.Module) -> bool:
    """Whether nothing is hooked onto ``part`` or onto a module in it, such as the linear that a LoRA wraps."""
    modules = [part]
    while modules:
        module = modules.pop()
        if not calls_only_forward(module.__dict__):
            return False
        children = module.__dict__["_modules"]
        if children:
            modules += [child for child in children.values() if child is not None]
    return True


def _are_quantised(layers: tuple[Any, Any]) -> bool:
    return input_scale_of(layers[0].proj) is not None and input_scale_of(layers[1]) is not None
