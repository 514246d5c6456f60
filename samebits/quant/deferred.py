"""A linear's bias that is added later: a value that cannot be forgotten, used twice, or taken for a tensor.

A quantised linear can leave its bias out of its product, and the kernel of the residual that must run anyway adds it
(``bias_gated_residual`` and ``bias_gated_residual_norm_modulate``). What lies in between is a tensor that lacks
something. As a plain tensor, or as a pair that any caller may unpack, it would be a wrong picture without an error: so
it is neither.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from samebits import capture
from samebits.errors import DeferredBiasError
from samebits.modules import calls_only_forward
from samebits.quant._fp8 import QuantizedInput
from samebits.quant.linear import Fp8Linear, NvFp4Linear, QuantizedLinear

_DEFERRING = (Fp8Linear, NvFp4Linear)


class DeferredBias:
    """The output of a linear without its bias, and the bias. Not a tensor: whoever wants one has to :meth:`take` it.

    Made by :meth:`Deferrals.defer`. Using it as a tensor, taking it twice and never taking it raise
    :class:`~samebits.errors.DeferredBiasError`.
    """

    __slots__ = ("__weakref__", "_bias", "_output", "_taken")

    def __init__(self, output: Tensor, bias: Tensor) -> None:
        self._output: Tensor | None = output
        self._bias: Tensor | None = bias
        self._taken = False

    @property
    def taken(self) -> bool:
        """Whether output and bias went to whoever adds them up."""
        return self._taken

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the output ``(..., N)`` and the bias ``(N,)``, once.

        Raises
        ------
        DeferredBiasError
            They were taken before: the bias would be added twice.
        """
        output, bias = self._output, self._bias
        if self._taken or output is None or bias is None:
            raise DeferredBiasError(problem="it was consumed before, so the bias would be added twice")
        self._taken = True
        self._output = self._bias = None
        return output, bias

    def add(self) -> Tensor:
        """Return ``output + bias``, the ordinary way on where no kernel takes them in. Consumes it."""
        output, bias = self.take()
        return output + bias

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise DeferredBiasError(problem="it was used as a tensor, but its bias is not in it yet")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        raise DeferredBiasError(problem=f"it was given to torch's {name}, but its bias is not in it yet")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for, such as a way to copy it
            raise AttributeError(name)
        raise DeferredBiasError(problem=f"its attribute {name!r} was asked for, as if it were a tensor")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = _refuse
    __copy__ = __deepcopy__ = __reduce__ = _refuse

    def __repr__(self) -> str:
        return f"<DeferredBias, {'consumed' if self._taken else 'its bias is still to be added'}>"


class Deferrals:
    """The deferred biases of one block: when the ``with`` block ends, every one must have been consumed.

    Raises
    ------
    DeferredBiasError
        At the end, where one was dropped. An exception that is on its way already goes on instead.
    """

    def __init__(self) -> None:
        self._made: list[tuple[str, DeferredBias]] = []

    def defer(self, linear: QuantizedLinear, x: Tensor | QuantizedInput, name: str = "a linear") -> DeferredBias:
        """Multiply ``x``, ``(..., K)``, and leave the bias for later.

        Raises
        ------
        ValueError
            ``linear`` may not defer its bias: :func:`why_not_defer` says why.
        """
        reason = why_not_defer(linear)
        if reason is not None or linear.bias is None:
            raise ValueError(f"expected a linear that may defer its bias: {reason}.")
        made = DeferredBias(linear.without_bias(x), linear.bias)
        self._made.append((name, made))
        return made

    def __enter__(self) -> Deferrals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dropped = [name for name, made in self._made if not made.taken]
        self._made.clear()
        if dropped and error is None:
            raise DeferredBiasError(problem=f"it was dropped at {', '.join(dropped)}, so the bias was never added")


def why_not_defer(linear: Any) -> str | None:
    """Say why the linear must add its bias itself, or return ``None``."""
    if type(linear) not in _DEFERRING:
        return f"it is a {type(linear).__name__}; only quantised linears, and nothing around them, leave their bias out"
    if linear.bias is None:
        return "it has no bias"
    attributes = linear.__dict__
    if not calls_only_forward({**attributes, "_compiled_call_impl": None}):
        return "it carries a hook or a forward of its own, which must see its whole result"
    if not calls_only_forward(attributes):
        return "its call is compiled by torch.compile, which must see its whole result"
    if linear.bias.requires_grad and torch.is_grad_enabled():
        return "its bias requires grad"
    interception = capture.interception()
    if interception is not None:
        return interception
    return None
