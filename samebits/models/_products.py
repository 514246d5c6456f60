"""A matrix product that ends in the activation after it, as one site beside the site of the activation alone.

The product is no call of a library but a kernel of its own, so it takes fewer cases than a linear: some GPUs, some
shapes. Everywhere else the linears are called as the modules they are, and the activation has its own site as if there
were no product. Whether it takes a call is asked once a shape, before the gate is; so a call that it does not take is
fused from the first one on. Such calls are counted with their reason, but as nobody's eager calls: another site has
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samebits import capture
from samebits.models._family import Line, TorchForward
from samebits.models._final import Learnt, remember
from samebits.models._norms import CHANGED
from samebits.models._packed import AUTOCAST, SideBySide
from samebits.ops._library import ALIGNMENT_BYTES, blas_state

LINEAR_SOURCE = TorchForward(nn.Linear, ("F", "linear", "weight", "bias", "self", "input"))
TOGETHER = "its lines run together with the linears before it, as product"
ELSEWHERE = "a weight of the product is not on the device of its input"
GRADIENT = "the input of the product requires grad"
SUBCLASS = "the input of the product is no plain tensor"
UNALIGNED = f"an input or a weight of the product is not aligned to {ALIGNMENT_BYTES} bytes"


class Product:
    """The linears of one input and what is computed from their results, as one site.

    Parameters
    ----------
    line : Line
        The site, of an op that takes the input, the weight of every linear with its bias if it has one, and what
        :func:`samebits.ops._library.blas_state` says.
    holder : torch.nn.Module
        Holds the linears.
    names : sequence of str
        What they are called in it, in the op's order.
    biased : bool
        Whether the op stands for linears with a bias.
    """

    def __init__(self, line: Line, holder: nn.Module, names: Sequence[str], *, biased: bool) -> None:
        self._line = line
        self._linears = tuple(SideBySide(holder, (name,)) for name in names)
        self._biased = biased
        self._unknown = LINEAR_SOURCE.obstacle()
        self._learnt = Learnt(line)
        self._taken: dict[tuple[Any, ...], str | None] = {}
        """By shapes and the library's flags: why the op does not take a call, or ``None`` where it does."""

    def why_not(self) -> str | None:
        """Why the next call would not be this site's, as far as the linears tell, or ``None``."""
        if self._unknown is not None:
            return self._unknown
        for linear in self._linears:
            reason = linear.why_not()
            if reason is not None:
                return reason
        with torch.no_grad():  # what gradients forbid was told above
            plain = [linear.joined() for linear in self._linears]
        for linear, matrix in zip(self._linears, plain, strict=True):
            if matrix is not None and (matrix.bias is None) == self._biased:
                has, with_one = ("no bias", "with one") if self._biased else ("a bias", "without one")
                return f"{linear.names[0]} has {has}, the op stands for a Linear {with_one}"
        return None

    def why_not_alone(self) -> str | None:
        """Why the activation's own site was not called: this one has had its calls. ``None`` where it has had none."""
        counters = self._line.site.counters
        return TOGETHER if counters.fused or counters.eager else None

    def __call__(self, x: Any) -> Tensor | None:
        """What the op returns for ``x`` ``(B, S, K)``; ``None``: call the linears and the activation's own site."""
        tensors = self._tensors()
        if tensors is None:
            self.pass_on(self.why_not() or CHANGED)
            return None
        state = blas_state()
        # All that decides beside the input; flags may be set back, and a weight be replaced by another one.
        about = (state, *[(tensor.dtype, tensor.shape) for tensor in tensors])
        reason = self._why_not_these(x, tensors, about)
        if reason is not None:
            self.pass_on(reason)
            return None
        result: Tensor = self._learnt(x, None, x, *tensors, state, about=about)
        return result

    def pass_on(self, reason: str) -> None:
        """Count a call that something else than the linears keeps from this site."""
        self._line.passed_on[reason] += 1

    def _tensors(self) -> list[Tensor] | None:
        """Weights and biases in the op's order, where the linears are plain. Asked on every call."""
        if self._unknown is not None:
            return None
        found: list[Tensor] = []
        for linear in self._linears:
            matrix = linear.joined()
            if matrix is None or (matrix.bias is None) == self._biased:
                return None
            found.append(matrix.weight)
            if matrix.bias is not None:
                found.append(matrix.bias)
        return found

    def _why_not_these(self, x: Any, tensors: list[Tensor], about: tuple[Any, ...]) -> str | None:
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
            return SUBCLASS
        if torch._C._is_any_autocast_enabled():
            return AUTOCAST
        if x.requires_grad and torch.is_grad_enabled():
            return GRADIENT
        device = x.device
        addresses = x.data_ptr() if x.is_cuda else 0
        for tensor in tensors:
            if tensor.device != device:
                return ELSEWHERE
            if x.is_cuda:
                addresses |= tensor.data_ptr()
        if addresses % ALIGNMENT_BYTES:
            return UNALIGNED
        return self._learnt.why_not(x, None, about) or self._unfit(x, tensors, about)

    def _unfit(self, x: Tensor, tensors: list[Tensor], about: tuple[Any, ...]) -> str | None:
        """Why no kernel takes a call with ``x``: what the op says, asked once a shape."""
        shapes = x.dtype, x.device, x.shape, x.stride(), about
        try:
            return self._taken[shapes]
        except KeyError:
            pass
        site = self._line.site
        obstacle: str | None = site.obstacle(x.device)
        if obstacle is not None:
            return obstacle  # not kept: a gate may be opened again
        if x.is_cuda and (capture.capturing_here(x.device) or capture.capturing_anywhere()):
            return None  # an op is asked nothing during a capture; the gate knows what to do
        try:
            reason: str | None = site.op.unsupported(x, *tensors, about[0])
        except Exception:
            return None  # the gate will meet the same, and no caller does
        remember(self._taken, shapes, reason)
        return reason
