"""Linears with quantised weights: :class:`Fp8Linear` and :class:`NvFp4Linear`.

They are ``nn.Linear`` by inheritance, so that offloading, LoRA and layer counters find them, but ``weight`` is a buffer
of bytes that no cast touches: ``model.to(torch.float16)`` changes ``compute_dtype`` and the dtype of the bias, and
leaves weight and scales alone. Bytes and not float8, because diffusers casts an input to the dtype of a floating-point
weight, and asks for ``compute_dtype`` where it is none. For inference only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.quant._export_config import GROUP
from samebits.quant._fp4 import dequantize, fp4_native, why_no_fp4
from samebits.quant._fp8 import FP8, QuantizedInput, dynamic_scale, quantize_fp8
from samebits.quant._lora import refuse_fusing
from samebits.quant._scaled_mm import finish, fp8_native, fp8_reference, why_no_fp8


class QuantizedLinear(nn.Linear):
    """What both linears share: a weight and scales that are moved but never cast or loaded from another dtype.

    Attributes
    ----------
    weight : Tensor
        uint8: the bytes of the quantised weight.
    compute_dtype : torch.dtype
        The dtype of the bias, and that in which inputs are expected; others are taken.
    """

    compute_dtype: torch.dtype
    _stored_as: torch.dtype
    """The dtype of the weight in an export."""
    _ran_on: torch.device | None = None
    """Where the last call was. Under offloading the weight is elsewhere by the time that somebody asks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        buffers: dict[str, Tensor | None],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight of another kind.
        self.in_features = in_features
        self.out_features = out_features
        self.compute_dtype = torch.get_default_dtype() if dtype is None else dtype
        for name, value in buffers.items():
            self.register_buffer(name, value)
        zeros = torch.zeros(out_features, device=device, dtype=self.compute_dtype) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros, requires_grad=False))

    def reset_parameters(self) -> None:
        """Nothing: there is no random quantised weight."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        kept = {id(buffer) for buffer in self._buffers.values()}

        def keep(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept or not tensor.is_floating_point():
                return fn(tensor)
            # As integers of the same size it is moved and never cast.
            return fn(tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int32)).view(tensor.dtype)

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        ours = {name: state_dict[prefix + name] for name in self._buffers if prefix + name in state_dict}
        for name, value in ours.items():
            buffer = self._buffers[name]
            bytes_of_it = name == "weight" and value.dtype == self._stored_as
            if buffer is not None and value.dtype != buffer.dtype and not bytes_of_it:
                # A plain load would cast, without a scale: numbers that mean nothing.
                errors.append(f"{prefix}{name} is {value.dtype}; a {type(self).__name__} holds {buffer.dtype}")
                return
        if "weight" in ours:
            state_dict = {**state_dict, f"{prefix}weight": ours["weight"].view(torch.uint8)}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def apply(self, fn: Callable[[nn.Module], None]) -> QuantizedLinear:
        """As any module's.

        Raises
        ------
        LoraFusingError
            ``fn`` is diffusers' and would fuse a LoRA into quantised weights.
        """
        refuse_fusing(fn, self, QuantizedLinear)
        return super().apply(fn)

    def _note(self, device: torch.device) -> None:
        if not torch.compiler.is_compiling() and self._ran_on != device:
            self.__dict__["_ran_on"] = device

    def without_bias(self, x: Any) -> Tensor:
        """A call's product without the bias, rounded to the input's dtype: somebody else adds it."""
        raise NotImplementedError

    def runs_as(self) -> str:
        """How the last call was computed, or the first would be where the weight is now: words for reports."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.runs_as()}"


class Quantizer:
    """What quantises a linear's input in place of the eager chain, with the same bits. A copy of the linear has none.

    Parameters
    ----------
    quantize : callable
        ``quantize(x, scale)`` returns what :func:`quantize_fp8` does.
    owner : object
        Whoever placed it.
    """

    __slots__ = ("owner", "quantize")

    def __init__(self, quantize: Callable[[Tensor, Tensor], Tensor], owner: object) -> None:
        self.quantize = quantize
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


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
        ``(N, K)`` uint8, contiguous: the bytes of float8_e4m3fn.
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
    _stored_as = FP8

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
            "weight": torch.zeros(out_features, in_features, dtype=torch.uint8, device=device),
            "weight_scale": torch.ones((out_features,) if per_channel else (), dtype=torch.float32, device=device),
            "input_scale": torch.ones((), dtype=torch.float32, device=device) if static else None,
        }
        super().__init__(in_features, out_features, bias, buffers, device, dtype)

    @classmethod
    def of(cls, linear: nn.Linear, input_scale: float | None = None, *, per_channel: bool = False) -> Fp8Linear:
        """Quantise a plain linear: each scale takes the largest magnitude that it stands for to 448.

        Parameters
        ----------
        linear : torch.nn.Linear
            Stays as it is.
        input_scale : float, optional
            The largest magnitude that inputs have, divided by 448. By default it is found from each input.
        per_channel : bool
            One scale for each row of the weight.
        """
        weight = linear.weight.detach()
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            static=input_scale is not None,
            per_channel=per_channel,
            device=weight.device,
            dtype=weight.dtype,
        )
        scale = dynamic_scale(weight, per_channel)
        made.weight.copy_(quantize_fp8(weight, scale).view(torch.uint8))
        made.weight_scale.copy_(scale.flatten() if per_channel else scale)
        if made.input_scale is not None:
            made.input_scale.fill_(input_scale)  # type: ignore[arg-type]
        if linear.bias is not None:
            made.bias.data.copy_(linear.bias.detach())
        return made

    @property
    def per_token(self) -> bool:
        """Whether every token of an input gets a scale of its own."""
        return self.input_scale is None and self.weight_scale.ndim > 0

    def quantize(self, x: Tensor) -> QuantizedInput:
        """Quantise ``x``, ``(..., K)``, as a call does first. Linears of equal ``input_scale`` can share the result."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        scale = dynamic_scale(x, self.per_token) if self.input_scale is None else self.input_scale
        placed: Quantizer | None = self.__dict__.get("_quantizer")
        if placed is None or scale.ndim or torch.compiler.is_compiling():
            return QuantizedInput(quantize_fp8(x, scale), scale, x.dtype)
        return QuantizedInput(placed.quantize(x, scale), scale, x.dtype)

    def forward(self, x: Tensor | QuantizedInput) -> Tensor:
        """Multiply ``x``, ``(..., K)`` of any strides or quantised already. Returns ``(..., N)``, contiguous."""
        return self.multiply(x if isinstance(x, QuantizedInput) else self.quantize(x), self.bias)

    def without_bias(self, x: Tensor | QuantizedInput) -> Tensor:
        """A call's product without the bias, rounded to the input's dtype. Returns ``(..., N)``, contiguous."""
        return self.multiply(x if isinstance(x, QuantizedInput) else self.quantize(x), None)

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
        self._note(x.values.device)
        values = x.values.reshape(-1, width)
        scale = x.scale.reshape(-1, 1) if x.scale.ndim else x.scale
        native = values.shape[0] and why_no_fp8(values.device, self.out_features, width) is None
        product = fp8_native if native else fp8_reference
        result = product(values, scale, self.weight.view(FP8), self.weight_scale, bias, x.dtype)
        return result.reshape(*batch, self.out_features)

    def runs_as(self) -> str:
        weight = "per channel" if self.weight_scale.ndim else "per tensor"
        inputs = "static" if self.input_scale is not None else "per token" if self.per_token else "per tensor"
        reason = why_no_fp8(self._ran_on or self.weight.device, self.out_features, self.in_features)
        how = "torch._scaled_mm" if reason is None else f"reference path of the same values: {reason}"
        return f"FP8 weights {weight}, inputs {inputs}, {how}"


class NvFp4Linear(QuantizedLinear):
    """A linear with NVFP4 weights: four bits a number, a scale for 16 columns, and one for all.

    Parameters
    ----------
    in_features, out_features : int
        K, a multiple of 16, and N.
    bias : bool
        Whether there is one, ``(N,)``.
    static : bool
        Whether the input's scale is known. If not, activations are never quantised (W4A16).
    device, dtype
        Where everything lives, and the dtype of the bias.

    Attributes
    ----------
    weight : Tensor
        ``(N, K / 2)`` uint8, two columns a byte.
    weight_scale : Tensor
        ``(N, K / 16)`` float8_e4m3fn.
    weight_scale_2, input_scale : Tensor
        fp32, ``()``; ``input_scale`` may be ``None``.

    Notes
    -----
    GPUs of compute capability 10.x and 12.x multiply FP4 by FP4: there the input is quantised too, by the chain of
    ``samebits/quant/_fp4.py``. Everywhere else, and without an input scale, each call turns the weight into the input's
    dtype and multiplies with the input as it is: other numbers than FP4 times FP4, nearer to the unquantised model, no
    faster than it, and with a quarter of its memory. ``repr`` and the report say which it is.

    Raises
    ------
    ValueError
        K is no multiple of 16.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor | None
    _stored_as = torch.uint8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        static: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if in_features % GROUP:
            raise ValueError(f"expected in_features to be a multiple of {GROUP}, got {in_features}.")
        buffers = {
            "weight": torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device),
            "weight_scale": torch.ones(out_features, in_features // GROUP, device=device).to(FP8),
            "weight_scale_2": torch.ones((), dtype=torch.float32, device=device),
            "input_scale": torch.ones((), dtype=torch.float32, device=device) if static else None,
        }
        super().__init__(in_features, out_features, bias, buffers, device, dtype)

    def dequantized(self) -> Tensor:
        """The weight as numbers, ``(N, K)`` fp32."""
        return dequantize(self.weight, self.weight_scale, self.weight_scale_2)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x``, ``(..., K)`` of any strides. Returns ``(..., N)``.

        Raises
        ------
        ValueError
            ``x`` is not K wide.
        """
        return self._multiply(x, self.bias)

    def without_bias(self, x: Tensor) -> Tensor:
        """A call's product without the bias, rounded to the input's dtype. Returns ``(..., N)``."""
        return self._multiply(x, None)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        *batch, width = x.shape
        if width != self.in_features:
            raise ValueError(f"expected an input of width {self.in_features}, got {tuple(x.shape)}.")
        self._note(x.device)
        if self.input_scale is None or not x.numel() or why_no_fp4(x.device, self.out_features, width) is not None:
            return F.linear(x, self.dequantized().to(x.dtype), None if bias is None else bias.to(x.dtype))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        sums = fp4_native(x.reshape(-1, width), self.input_scale, self.weight, self.weight_scale)
        result = finish(sums, self.input_scale, self.weight_scale_2, bias, x.dtype)
        return result.reshape(*batch, self.out_features)

    def runs_as(self) -> str:
        reason = why_no_fp4(self._ran_on or self.weight.device, self.out_features, self.in_features)
        if self.input_scale is None:
            reason = "the checkpoint quantises weights alone"
        if reason is None:
            return "NVFP4 weights and inputs, torch._scaled_mm"
        return f"NVFP4 weights, turned into the input's dtype on each call: {reason}"


def how_linears_run(model: nn.Module) -> list[str]:
    """What a report says of a model's quantised linears: a sentence for each way in which some of them run."""
    kinds = Counter(module.runs_as() for module in model.modules() if isinstance(module, QuantizedLinear))
    return [f"{count} linears: {kind}" for kind, count in kinds.items()]


def scheme_of(model: nn.Module) -> str | None:
    """What the weights of a model's linears are quantised to, such as ``modelopt FP8``; ``None`` where none is."""
    kinds = {type(module) for module in model.modules()}
    names = [name for cls, name in ((Fp8Linear, "FP8"), (NvFp4Linear, "NVFP4")) if cls in kinds]
    return f"modelopt {' and '.join(names)}" if names else None
