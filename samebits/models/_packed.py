"""Query, key and value weights of an attention as consecutive rows of one memory, so that one product serves all.

``samebits.apply`` copies the three weights (and biases) into one storage and points the same ``Parameter`` objects at
their ranges of it. So there is no second copy, and whoever writes to a parameter in place, LoRA's fuse or
``load_state_dict`` among them, writes to what the product reads. Whether the ranges still lie side by side is looked
up at every call: a weight that was replaced or moved sends the call to the three linears, and the report says so.

The weights move once and stay where they then are, ``handle.remove()`` included: a CUDA graph that somebody captured
meanwhile reads them at that address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter

from samebits import capture
from samebits.models._family import Line
from samebits.models._final import Learnt
from samebits.modules import calls_only_forward
from samebits.ops._library import ALIGNMENT_BYTES, blas_state

APART = "the weights of {names} do not lie side by side: they were moved or replaced; samebits.apply joins them again"
GRADIENTS = "gradients are enabled for the weights of {names}"
AUTOCAST = "autocast is on, which casts every weight by itself"
CAPTURED = "a CUDA graph was being captured when samebits was applied, so the weights of {names} were not moved"
UNALIGNED = f"an input of the projections is not aligned to {ALIGNMENT_BYTES} bytes"
_MOVING = ("offload", "casting")
"""Hooks of diffusers that move or cast weights have one of these words in their names."""


class Matrix(NamedTuple):
    """The weights and biases of several linears as one linear's."""

    weight: Tensor
    bias: Tensor | None


class SideBySide:
    """The linears of an attention that read one input.

    Parameters
    ----------
    attn : torch.nn.Module
        Holds them.
    names : sequence of str
        What they are called in it, in the order of their columns.
    around : iterable of torch.nn.Module
        The modules around the attention, whose hooks may move its weights.
    """

    def __init__(self, attn: nn.Module, names: Sequence[str], around: Iterable[nn.Module] = ()) -> None:
        self._attn = attn
        self.names = tuple(names)
        self._around = tuple(around)
        self._why_not_taken: tuple[Any, str] | None = None
        """Where the weights were when they were not moved, and why not."""

    @property
    def _told(self) -> str:
        return " and ".join(part for part in (", ".join(self.names[:-1]), self.names[-1]) if part)

    def joined(self) -> Matrix | None:
        """The linears as one, where they are plain and their weights lie side by side. Asked on every call."""
        modules = self._attn._modules
        if len(self.names) == 1:
            return _alone(modules.get(self.names[0]))
        weights: list[Any] = []
        biases: list[Any] = []
        for name in self.names:
            linear = modules.get(name)
            if type(linear) is not Linear:
                return None
            attributes = linear.__dict__
            if not calls_only_forward(attributes):
                return None
            parameters = attributes["_parameters"]
            weights.append(parameters.get("weight"))
            biases.append(parameters.get("bias"))
        first = biases[0]
        if not _lie_side_by_side(weights) or (
            any(bias is not None for bias in biases) if first is None else not _lie_side_by_side(biases)
        ):
            return None
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (*weights, *biases)):
            return None  # the gradient of one view would not reach the other two
        count, weight = len(weights), weights[0]
        rows, width = weight.shape
        try:
            whole = weight.as_strided((count * rows, width), (width, 1))
            return Matrix(whole, None if first is None else first.as_strided((count * rows,), (1,)))
        except RuntimeError:  # neighbours by chance, in memory of their own
            return None

    def why_not(self) -> str | None:
        """The sentence for ``joined``, or ``None`` where it would answer."""
        reason = self._why_not_plain() or self._collect([])
        if reason is not None:
            return reason
        if torch.is_grad_enabled():
            with torch.no_grad():
                apart = self.joined() is None
            if not apart:
                return None if self.joined() is not None else GRADIENTS.format(names=self._told)
        elif self.joined() is not None:
            return None
        if self._why_not_taken is not None and self._why_not_taken[0] == self._device():
            return self._why_not_taken[1]
        return APART.format(names=self._told)

    def _device(self) -> torch.device | None:
        weight: Any = getattr(self._attn._modules.get(self.names[0]), "weight", None)
        return getattr(weight, "device", None)

    def take(self, site: Any) -> bool:
        """Put the weights side by side where nothing speaks against it, and say whether memory was moved.

        Parameters
        ----------
        site : Site
            Where the product will be asked for: no weight is moved for a device on which no kernel can run.
        """
        self._why_not_taken = None
        with torch.no_grad():
            if self.joined() is not None or self._why_not_plain() is not None:
                return False
        parameters: list[list[Any]] = []
        reason = self._collect(parameters) or self._why_not_move(parameters, site)
        if reason is None:
            try:
                _move(parameters)
                return True
            except RuntimeError as error:  # out of memory, above all; nothing was changed then
                told = str(error).splitlines()[0] if str(error) else type(error).__name__
                reason = f"the weights of {self._told} could not be joined: {told}"
        self._why_not_taken = (self._device(), reason)
        return False

    def _why_not_plain(self) -> str | None:
        for name in self.names:
            linear = self._attn._modules.get(name)
            if linear is None:
                return f"there is no {name}"
            if type(linear) is not Linear:
                return f"{name} is a {type(linear).__name__}, the op stands for exactly Linear"
            if not calls_only_forward(linear.__dict__):
                return f"{name} carries a hook or a forward of its own, so it is called itself"
        return None

    def _collect(self, parameters: list[list[Any]]) -> str | None:
        """Put the weights, and the biases where there are some, into ``parameters``; or say why they are not alike."""
        linears = [self._attn._modules[name] for name in self.names]
        parameters.append([linear._parameters.get("weight") for linear in linears if linear is not None])
        biases = [linear._parameters.get("bias") for linear in linears if linear is not None]
        if any(bias is not None for bias in biases):
            parameters.append(biases)
        for alike in parameters:
            for parameter in alike:
                if type(parameter) is not Parameter or parameter.is_inference():
                    return f"a weight of {self._told} is missing or no plain parameter"
                if parameter.layout is not torch.strided:
                    return f"a weight of {self._told} is sparse"
            if len({(p.shape, p.dtype, p.device) for p in alike}) > 1:
                return f"the weights of {self._told} differ in shape, dtype or device"
            if not all(p.is_contiguous() for p in alike):
                return f"a weight of {self._told} is not contiguous"
        return None

    def _why_not_move(self, parameters: list[list[Any]], site: Any) -> str | None:
        device, dtype = parameters[0][0].device, parameters[0][0].dtype
        if device.type not in ("cpu", "cuda"):
            return f"the weights of {self._told} are on {device.type}"
        reason: str | None = site.obstacle(device)
        if reason is not None:
            return reason
        if dtype not in ((torch.bfloat16, torch.float16) if device.type == "cuda" else _FLOATS):
            return f"the weights of {self._told} are {dtype}, products of which are not joined"
        for module in (*self._around, self._attn):
            hook = _moving_hook(module)
            if hook is not None:
                return f"{type(module).__name__} carries {hook}, which may move or cast the weights of {self._told}"
        aligned_to = ALIGNMENT_BYTES if device.type == "cuda" else 16
        for parameter in (p for alike in parameters for p in alike):
            storage = parameter.untyped_storage()
            size = parameter.numel() * parameter.element_size()
            if parameter.storage_offset() or storage.nbytes() != size or not _has_one_owner(storage):
                return f"the memory of a weight of {self._told} is shared with something else"
            if size % aligned_to or parameter.data_ptr() % aligned_to:
                return f"a weight of {self._told} does not start or end at a multiple of {aligned_to} bytes"
        if device.type == "cuda" and (capture.capturing_here(device) or capture.capturing_anywhere()):
            return CAPTURED.format(names=self._told)
        return None


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _alone(linear: Any) -> Matrix | None:
    """What ``SideBySide.joined`` says of a single linear: nothing has to lie beside it."""
    if type(linear) is not Linear:
        return None
    attributes = linear.__dict__
    if not calls_only_forward(attributes):
        return None
    parameters = attributes["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if not _is_rows(weight) or not (bias is None or _is_rows(bias)):
        return None
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return None  # the gradient would not reach the parameter
    return Matrix(weight, bias)


def _is_rows(parameter: Any) -> bool:
    """Whether this is a plain parameter, contiguous; a sparse one refuses to be asked that."""
    return type(parameter) is Parameter and parameter.layout is torch.strided and parameter.is_contiguous()


def _lie_side_by_side(parameters: list[Any]) -> bool:
    """Whether these are contiguous parameters of one shape and type, each where the one before it ends.

    Equal addresses *and* storage offsets that fit: memory that was allocated next to other memory has offset zero.
    """
    first = parameters[0]
    if not _is_rows(first):
        return False
    shape, dtype, numel = first.shape, first.dtype, first.numel()
    offset, address, size = first.storage_offset(), first.data_ptr(), numel * first.element_size()
    for parameter in parameters[1:]:
        offset += numel
        address += size
        if (
            not _is_rows(parameter)
            or parameter.data_ptr() != address
            or parameter.storage_offset() != offset
            or parameter.shape != shape
            or parameter.dtype != dtype
        ):
            return False
    return True


def _has_one_owner(storage: torch.UntypedStorage) -> bool:
    """Whether nothing but one tensor, and the object handed in, holds this memory."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) <= 2


def _moving_hook(module: nn.Module) -> str | None:
    attributes = vars(module)
    if attributes.get("_hf_hook") is not None:
        return f"a hook of accelerate ({type(attributes['_hf_hook']).__name__})"
    hooks = getattr(attributes.get("_diffusers_hook"), "hooks", None) or ()
    return next((f"a hook of diffusers ({n})" for n in hooks if any(word in n for word in _MOVING)), None)


def _move(parameters: list[list[Any]]) -> None:
    """Point every list of parameters at consecutive ranges of one new memory that holds their values."""
    device = parameters[0][0].device
    with torch.inference_mode(False), torch.no_grad():
        _wait(device)  # for whatever still writes to them, on any stream
        views = []
        for alike in parameters:
            rows = alike[0].shape[0]
            shape = (len(alike) * rows, *alike[0].shape[1:])
            whole = torch.empty(shape, dtype=alike[0].dtype, device=device)
            if whole.data_ptr() % (ALIGNMENT_BYTES if device.type == "cuda" else 16):
                raise RuntimeError("the new memory is not aligned")
            views.append(list(whole.chunk(len(alike))))
            for view, parameter in zip(views[-1], alike, strict=True):
                view.copy_(parameter)
        before = [parameter.data for alike in parameters for parameter in alike]
        for alike, ranges in zip(parameters, views, strict=True):
            for parameter, view in zip(alike, ranges, strict=True):
                parameter.data = view
        _wait(device)  # for whatever still reads the old ones, before they are freed
        del before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_cuda: Any = torch.cuda  # torch annotates half of it


def free_cached_memory() -> None:
    """Give back what the weights left behind: torch keeps it, in pieces too small for anything joined."""
    if _cuda.is_initialized() and not capture.capturing_anywhere():
        torch.cuda.empty_cache()


class Projections:
    """Linears of one or two inputs whose results lie beside each other, as one site.

    Parameters
    ----------
    line : Line
        The site, of the op ``joint_projection``.
    image, text : SideBySide
        The linears of the stream, or of both.
    """

    def __init__(self, line: Line, image: SideBySide, text: SideBySide | None = None) -> None:
        self._line = line
        self._image, self._text = image, text
        self._parts = len(image.names)
        # Where the reference will always run, it joins by ``cat``, which the linears need not.
        self._learnt = Learnt(line)
        self._joins = line.joins = (image,) if text is None else (image, text)

    def why_not(self) -> str | None:
        """Why the next call would run the linears one by one, or ``None``."""
        return next((reason for join in self._joins if (reason := join.why_not()) is not None), None)

    def __call__(self, x: Tensor, text: Tensor | None = None) -> Tensor | None:
        """What the op returns for ``x`` ``(B, S, K)`` and ``text`` ``(B, T, K)``; ``None``: run the linears."""
        line = self._line
        image = self._image.joined()
        words = None if image is None or self._text is None else self._text.joined()
        if image is None or (self._text is not None and words is None):
            line.declined[self.why_not() or APART.format(names="the projections")] += 1
            return None
        state = blas_state()
        reason = _why_not_these(x, text) or self._learnt.why_not(x, text, state)
        if reason is not None:
            line.declined[reason] += 1
            return None
        args = (None, None, None) if words is None else (text, *words)
        result: Tensor = self._learnt(x, text, x, *image, *args, self._parts, state, about=state)
        return result


def _why_not_these(x: Tensor, text: Tensor | None) -> str | None:
    if torch._C._is_any_autocast_enabled():
        return AUTOCAST
    if x.is_cuda and (x.data_ptr() | (0 if text is None else text.data_ptr())) % ALIGNMENT_BYTES:
        return UNALIGNED
    return None
