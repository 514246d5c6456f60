"""The first norm of a block, computed at the end of the block before: one kernel less, one activation less to read.

The residual that ends a block and the norm that begins the next one are a chain of their own, but two forwards lie
between them. So a block may do the next one's first lines ahead: its modulation and its norm. The next block takes
the values by proof and never by guess: only for the same tensor objects, to which nothing was written since by torch's
own count of writes, in the same lane (stream and capture). Where anything else stands between the two blocks, a
ControlNet's residual, a cache that skips a block, a hook that loads its weights, the values are not computed or not
taken, and the next block computes its own.

torch counts no write through ``.data`` into the memory that is there. So nothing is done ahead while anybody's code
could run in between: a hook, or a forward that somebody placed, on the block or on any module in it.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits import capture
from samebits.modules import calls_only_forward

_LONGEST_WAIT_CALLS = 1024


class Unwritten:
    """A tensor as it was: the object, its address and its count of writes. It does not keep the tensor."""

    __slots__ = ("address", "reference", "version")

    def __init__(self, tensor: Tensor | None, forget: Callable[[Any], None] | None = None) -> None:
        self.reference = None if tensor is None else weakref.ref(tensor, forget)
        self.version = 0 if tensor is None else tensor._version
        self.address = 0 if tensor is None else _address(tensor)

    def is_still(self, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is the same object and nothing was written to it since."""
        if tensor is None or self.reference is None:
            return tensor is None and self.reference is None
        # Who streams weights points ``.data`` at other memory, which is no write to torch.
        return self.reference() is tensor and tensor._version == self.version and _address(tensor) == self.address


class Ahead:
    """What one block computed for the next.

    Attributes
    ----------
    modulation : object
        What the next block's modulation made of ``inputs``.
    streams : dict of str to tuple
        By the name of a residual stream: the stream, as it left the block, its modulated norm, that one's version,
        the scale that it was quantised with, and the eps of its norm.
    """

    __slots__ = ("inputs", "lane", "modulation", "number", "streams")

    def __init__(
        self,
        number: int,
        lane: Hashable,
        inputs: Iterable[Tensor | None],
        modulation: Any,
        forget: Callable[[Any], None],
    ) -> None:
        self.number = number
        self.lane = lane
        self.inputs = [Unwritten(tensor) for tensor in inputs]
        self.modulation = modulation
        self.streams: dict[str, tuple[Unwritten, Tensor, int, Unwritten, float]] = {}

    def stream(self, name: str, stream: Tensor, eps: float | None, scale: Tensor | None = None) -> Tensor | None:
        """The modulated norm of ``stream`` with ``eps``, quantised with ``scale``.

        ``None`` where it is another tensor than the one that was normed, or wanted with another eps or scale. An eps of
        ``None`` says that the norm is not plain by now.
        """
        found = self.streams.get(name)
        if found is None:
            return None
        was, modulated, version, quantised_with, normed_with = found
        held = was.is_still(stream) and modulated._version == version
        return modulated if held and quantised_with.is_still(scale) and normed_with == eps else None


@dataclass
class _Boundary:
    """Between a block and the next: whether what was done ahead is taken over there."""

    wait_calls: int = 0
    misses: int = 0

    def open(self) -> bool:
        """Whether it is worth trying; after values that nobody took, not for a growing number of calls."""
        if self.wait_calls:
            self.wait_calls -= 1
            return False
        return True

    def missed(self) -> None:
        self.wait_calls = min(1 << self.misses, _LONGEST_WAIT_CALLS)
        self.misses += 1

    def taken(self) -> None:
        self.misses = 0


class LookAhead:
    """The blocks of one stack share one of these."""

    def __init__(self) -> None:
        self._blocks: dict[int, nn.Module] = {}
        self._boundaries: dict[int, _Boundary] = {}
        self._known: Ahead | None = None

    def add(self, number: int, block: nn.Module) -> None:
        """Let ``block`` take part; the blocks of a stack are called in the order of their numbers."""
        self._blocks[number] = block
        self._boundaries[number] = _Boundary()

    def take(self, number: int, inputs: Iterable[Tensor | None], device: torch.device) -> Ahead | None:
        """What the block before computed for block ``number`` from exactly these ``inputs``, or ``None``.

        It is given once. Each of its streams still has to be asked whether it is the one at hand.
        """
        known, self._known = self._known, None
        if known is None:
            return None
        held = known.number == number and known.lane == capture.lane(device) and _unchanged(known.inputs, inputs)
        if not held:
            self._boundaries[known.number].missed()
            return None
        return known

    def settle(self, number: int, taken: bool) -> None:
        """Say whether block ``number`` could use the stream that was normed for it."""
        boundary = self._boundaries[number]
        if taken:
            boundary.taken()
        else:
            boundary.missed()

    def following(self, number: int, block: nn.Module, stream: Tensor) -> Any:
        """The block after block ``number`` if its first lines may be done now, else ``None``.

        What is hooked onto a block may load its weights, change its input or skip it, so there must be nothing
        between the two blocks, nor in the first one, whose later modules run after the lines that are done ahead.
        Whether the norm and the modulation of the next block are plain is for the caller.
        """
        following = self._blocks.get(number + 1)
        if (
            following is None
            or type(stream) is not Tensor
            # The graph of gradients would be another one.
            or torch.is_grad_enabled()
            # Writes to tensors of the inference mode are not counted.
            or torch.is_inference_mode_enabled()
            or stream.is_inference()
            or not _is_called_as_it_is(following)
            or not _nobody_else_in(block)
        ):
            return None
        return following if self._boundaries[number + 1].open() else None

    def begin(
        self, number: int, inputs: Iterable[Tensor | None], modulation: Any, device: torch.device
    ) -> Ahead | None:
        """Keep the modulation of block ``number`` and make room for its streams.

        ``None`` in no known lane, and for inputs that count no writes.
        """
        lane, inputs = capture.lane(device), list(inputs)
        if lane is None or any(tensor is not None and tensor.is_inference() for tensor in inputs):
            return None
        self._known = Ahead(number, lane, inputs, modulation, self._forget)
        return self._known

    def put(
        self, ahead: Ahead, name: str, stream: Tensor, modulated: Tensor, eps: float, scale: Tensor | None = None
    ) -> None:
        """Keep the modulated norm of a stream until the next block takes it or the stream is gone."""
        if scale is not None and scale.is_inference():
            return  # nobody could tell whether it was written to
        quantised_with = Unwritten(scale)
        ahead.streams[name] = Unwritten(stream, self._forget), modulated, modulated._version, quantised_with, eps

    def _forget(self, stream: weakref.ref[Tensor]) -> None:
        known = self._known
        if known is not None and any(was.reference is stream for was, *_ in known.streams.values()):
            self._known = None  # nobody can ask for it any more, so nobody will
            self._boundaries[known.number].missed()


def _address(tensor: Tensor) -> int:
    """Where the memory of ``tensor`` begins; 0 where it has none of its own."""
    try:
        return tensor.data_ptr()
    except Exception:  # wrappers of tracers and of quantisation
        return 0


def _unchanged(before: list[Unwritten], now: Iterable[Tensor | None]) -> bool:
    tensors = list(now)  # fewer or more where a LoRA or a part came or went
    if len(before) != len(tensors):
        return False
    for was, tensor in zip(before, tensors, strict=True):  # noqa: SIM110 - without a frame for every tensor
        if not was.is_still(tensor):
            return False
    return True


def _only_look(hooks: Mapping[int, Any]) -> bool:
    """Whether every hook says of itself, by ``only_looks``, that it changes nothing; samebits' own measurements do."""
    return all(getattr(hook, "only_looks", False) for hook in hooks.values())


def _is_placed_by_us(module: nn.Module, forward: Any) -> bool:
    """Whether ``forward``, on the instance, is the one that stands for the class's own and says so.

    accelerate's and diffusers' hooks put a partial there, and people functions and methods of theirs.
    """
    return type(forward) is types.MethodType and getattr(forward, "__wrapped__", None) is type(module).forward


def _is_called_as_it_is(block: nn.Module) -> bool:
    """Whether calling ``block`` runs our forward before anything else."""
    attributes = block.__dict__
    return (
        _only_look(attributes["_forward_pre_hooks"])
        and not attributes["_backward_pre_hooks"]
        and _is_placed_by_us(block, attributes.get("forward"))
        and attributes.get("_compiled_call_impl") is None
    )


def _nobody_else_in(block: nn.Module) -> bool:
    """Whether a call of ``block`` runs no code that somebody put onto it or onto a module in it.

    Asked at every call: the modules are walked by their dictionaries, in a few microseconds. Hooks for all modules of
    the process are no matter: while there is one, no forward of ours runs.
    """
    modules: list[Any] = [block]
    for module in modules:  # which grows meanwhile
        if module is None:
            continue
        attributes = module.__dict__
        before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
        if (before and not _only_look(before)) or (after and not _only_look(after)):
            return False
        if "forward" in attributes:
            forward = attributes["forward"]
            if forward is not None and not _is_placed_by_us(module, forward):
                return False
        children = attributes["_modules"]
        if children:
            modules += children.values()
    return True


def _modules_of(module: nn.Module) -> list[nn.Module]:
    """``module`` and every module in it, each once, in a fixed order.

    The walk of ``nn.Module.modules`` builds a name for each, which costs several times as much.
    """
    found: list[Any] = [module]
    for each in found:  # which grows meanwhile
        children = each.__dict__["_modules"]
        if children:
            found += [child for child in children.values() if child is not None and child not in found]
    return found


def may_run_early(modulation: nn.Module, source: Tensor) -> bool:
    """Whether calling ``modulation`` on ``source`` now is what calling it later is: no hooks, its weights at hand.

    That nothing is written to the weights until then has to be seen later: they belong to the ``inputs``. Tensors of
    the inference mode count no writes, so what lies in them is never done early.
    """
    if source.is_inference():
        return False
    for module in _modules_of(modulation):
        attributes = module.__dict__
        if not calls_only_forward(attributes):
            return False
        for parameter in attributes["_parameters"].values():
            if parameter is not None and (
                parameter.device != source.device or parameter.dtype != source.dtype or parameter.is_inference()
            ):
                return False
        for buffer in attributes["_buffers"].values():  # the weights and scales of a quantised linear
            if buffer is not None and (buffer.device != source.device or buffer.is_inference()):
                return False
    return True


def weights_of(modulation: nn.Module) -> list[Tensor | None]:
    """Every parameter of ``modulation``, and every buffer: a quantised linear keeps its weight in one."""
    weights: list[Tensor | None] = []
    for module in _modules_of(modulation):
        attributes = module.__dict__
        weights += attributes["_parameters"].values()
        weights += attributes["_buffers"].values()
    return weights
