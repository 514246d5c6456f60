"""The floor: the GEMM and attention calls of a forward and nothing else, in their order, to be replayed.

One forward of eager runs under a dispatch mode that writes down every call of an operator that is a matrix product or
attention, with its arguments. Replaying the list computes no picture: it does the work that no fusion can take away.

What is in it: every ``mm``, ``addmm`` (with its bias epilogue), ``bmm``, ``baddbmm``, scaled matrix product and fused
attention of the whole forward, embedders and modulation projections included, with whatever the libraries behind
them launch (split-K reductions, zeroed workspaces). What is not: norms, activations, residuals, RoPE, copies,
concatenations, layout changes, every other operator.

Weights stay the model's own, so they are read from memory as in a forward. Other inputs are copies of what the first
call of that operator, shape and layout got: real values, because a matrix product of zeros runs faster than one of
data. One copy serves all later calls of its kind, so the list takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_GEMMS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_addmm_activation", "mv", "addmv", "linear", "matmul"}
)
_ATTENTION_WORDS = ("scaled_dot_product", "attention_forward", "flash_attn")


def kind_of(operator: str) -> str | None:
    """``"gemm"``, ``"attention"`` or ``None``, told from an operator's name, for example ``"aten::addmm.out"``."""
    name = operator.rpartition("::")[2].partition(".")[0]
    if any(word in operator for word in _ATTENTION_WORDS):
        return "attention"
    return "gemm" if name in _GEMMS else None


@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: str

    def __call__(self) -> None:
        """Make the call; its results are dropped, so that their memory is free for the next one."""
        self.operator(*self.args, **self.kwargs)


@dataclass
class Floor:
    """The calls of one forward, in their order."""

    calls: list[Call] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """How many calls are ``"gemm"`` or ``"attention"``."""
        return sum(call.kind == kind for call in self.calls)

    def run(self) -> None:
        """Make every call, one after the other."""
        for call in self.calls:
            call()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator as it is and keeps the calls that belong to the floor."""

    def __init__(self, weights: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floor = Floor()
        self._weights = weights
        self._copies: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func.name())
        if kind is not None:
            # Before the call: an operator may write into an argument (out=).
            place = [0]

            def own(tensor: torch.Tensor) -> torch.Tensor:
                place[0] += 1
                return self._own(tensor, (func.name(), place[0]))

            own_args, own_kwargs = tree_map_only(torch.Tensor, own, (tuple(args), dict(kwargs)))
            self.floor.calls.append(Call(func, own_args, own_kwargs, kind))
        return func(*args, **kwargs)

    def _own(self, tensor: torch.Tensor, role: Any) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.detach()
        key = (role, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copies:
            # A view of a copy of its span of memory: gaps, overlaps and expanded dimensions stay as they are.
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            span = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
            flat = tensor.detach().as_strided((span,), (1,)).clone()
            self._copies[key] = flat.as_strided(tensor.shape, tensor.stride())
        return self._copies[key]


def record(forward: Callable[[], object], model: nn.Module) -> Floor:
    """Run ``forward`` once and return its GEMM and attention calls.

    Parameters
    ----------
    forward : callable
        One forward of ``model`` in eager. A model that samebits is applied to runs eager here by itself, because its
        sites step aside under a dispatch mode.
    model : torch.nn.Module
        Whose parameters and buffers stay what they are in the recorded calls.

    Raises
    ------
    RuntimeError
        The forward made no such call, so there is nothing to replay.
    """
    tensors = (*model.parameters(), *model.buffers())
    recorder = _Recorder(frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors))
    with torch.no_grad(), recorder:
        forward()
    if not recorder.floor.calls:
        raise RuntimeError("expected GEMM or attention calls in the forward, found none")
    return recorder.floor
