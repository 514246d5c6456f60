"""Linears with quantised weights: :class:`Fp8Linear` and :class:`NvFp4Linear`.

They are ``nn.Linear`` by inheritance, so that offloading, LoRA and layer counters find them, but ``weight`` is a buffer
that no cast touches: ``model.to(torch.float16)`` changes the dtype of the bias and leaves weight and scales alone. For
inference only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samebits.quant._fp8 import FP8, QuantizedInput, dynamic_scale, quantize_fp8
from samebits.quant._scaled_mm import fp8_native, fp8_reference, why_no_fp8

# From one dtype to an integer one of the same size: what is no floating-point number is moved, never cast.
_AS_INTEGER = {FP8: torch.uint8, torch.uint8: torch.uint8, torch.float32: torch.int32}


class QuantizedLinear(nn.Linear):
    """What both linears share: a weight and scales that are moved but never cast or loaded from another dtype."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, buffers: dict[str, Tensor | None], **kind: Any
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight of another kind.
        self.in_features = in_features
        self.out_features = out_features
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, **kind), requires_grad=False) if bias else None
        )

    def reset_parameters(self) -> None:
        """Nothing: there is no random quantised weight."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        kept = {id(buffer) for buffer in self._buffers.values()}

        def keep(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                return fn(tensor)
            return fn(tensor.view(_AS_INTEGER[tensor.dtype])).view(tensor.dtype)

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        for name, buffer in self._buffers.items():
            value = state_dict.get(prefix + name)
            if buffer is not None and isinstance(value, Tensor) and value.dtype != buffer.dtype:
                # A plain load would cast, without a scale: numbers that mean nothing.
                errors.append(f"{prefix}{name} is {value.dtype}; a {type(self).__name__} holds {buffer.dtype}")
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def runs_as(self) -> str:
        """How a call on the device where the weight is now would be computed: a few words for reports."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.runs_as()}"


class Fp8Linear(QuantizedLinear):
    """A linear in FP8: weights of ``float8_e4m3fn``, activations quantised on the way in (W8A8).

    Parameters
    ----------
    in_features, out_features : int
        K and N, any positive numbers.
    bias : bool
        Whether there is one, ``(N,)``.
    static : bool
        Whether the input's scale is known; else it is found from each input: one for the whole input where the weight
        has one scale, one a token where the weight has one a channel.
    per_channel : bool
        Whether the weight has a scale for each of its N rows.
    device, dtype
        Where everything lives, and the dtype of the bias.

    Attributes
    ----------
    weight : Tensor
        ``(N, K)`` float8_e4m3fn, contiguous.
    weight_scale : Tensor
        fp32, ``()`` or ``(N,)``.
    input_scale : Tensor or None
        fp32, ``()``; ``None`` where the scale is dynamic.

    Notes
    -----
    A call is the chain of ``samebits/quant/_fp8.py`` and one matrix product, whose sum takes the bias before it is
    rounded to the input's dtype. Where there are no FP8 tensor cores the product is computed from the same FP8 values
    by :func:`~samebits.quant._scaled_mm.fp8_reference`, and ``repr`` and ``samebits``' report say so.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        static: bool = True,
        per_channel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        buffers = {
            "weight": torch.zeros(out_features, in_features, dtype=FP8, device=device),
            "weight_scale": torch.ones((out_features,) if per_channel else (), dtype=torch.float32, device=device),
            "input_scale": torch.ones((), dtype=torch.float32, device=device) if static else None,
        }
        super().__init__(in_features, out_features, bias, buffers, device=device, dtype=dtype)

    @property
    def per_token(self) -> bool:
        """Whether every token of an input gets a scale of its own."""
        return self.input_scale is None and self.weight_scale.ndim > 0

    def quantize(self, x: Tensor) -> QuantizedInput:
        """Quantise ``x``, ``(..., K)``, as a call does first. Linears of equal ``input_scale`` can share the result."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        scale = dynamic_scale(x, self.per_token) if self.input_scale is None else self.input_scale
        return QuantizedInput(quantize_fp8(x, scale), scale, x.dtype)

    def forward(self, x: Tensor | QuantizedInput) -> Tensor:
        """Multiply ``x``, ``(..., K)`` of any strides or quantised already. Returns ``(..., N)``, contiguous."""
        return self.multiply(x if isinstance(x, QuantizedInput) else self.quantize(x), self.bias)

    def multiply(self, x: QuantizedInput, bias: Tensor | None) -> Tensor:
        """The matrix product of a call, with the bias ``(N,)`` that is given here, or without one.

        Raises
        ------
        ValueError
            ``x`` is not K wide.
        """
        *batch, width = x.values.shape
        if width != self.in_features:
            raise ValueError(f"expected an input of width {self.in_features}, got {tuple(x.values.shape)}.")
        values = x.values.reshape(-1, width)
        scale = x.scale.reshape(-1, 1) if x.scale.ndim else x.scale
        native = values.shape[0] and why_no_fp8(values.device, self.out_features, width) is None
        product = fp8_native if native else fp8_reference
        result = product(values, scale, self.weight, self.weight_scale, bias, x.dtype)
        return result.reshape(*batch, self.out_features)

    def runs_as(self) -> str:
        weight = "per channel" if self.weight_scale.ndim else "per tensor"
        inputs = "static" if self.input_scale is not None else "per token" if self.per_token else "per tensor"
        reason = why_no_fp8(self.weight.device, self.out_features, self.in_features)
        how = "torch._scaled_mm" if reason is None else f"reference path of the same values: {reason}"
        return f"FP8 weights {weight}, inputs {inputs}, {how}"
