"""silu(temb) once a forward: every block of Qwen-Image computes it anew for both of its streams.

The value is shared by proof and never by guess: for the same tensor object, to which nothing was written since by
torch's own count of writes, in the same lane (stream and capture), and only from a block to one further down, so that
what one forward computed never answers in the next. Writes that torch does not count could be missed between two
blocks of one forward; no such write is part of any pipeline, and a forward after it starts from nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits import capture
from samebits.models._family import TorchForward
from samebits.modules import calls_only_forward

SILU_SOURCE = TorchForward(nn.SiLU, ("F", "silu", "inplace", "self", "input"))
SEQUENTIAL_SOURCE = TorchForward(nn.Sequential, ("self", "input", "module"))


def is_silu_and_one_more(module: Any) -> bool:
    """Whether ``module`` is a SiLU and one more module in a row, with nothing hooked on before the second."""
    if type(module) is not nn.Sequential or not calls_only_forward(module.__dict__):
        return False
    parts = module._modules
    if tuple(parts) != ("0", "1"):
        return False
    silu = parts["0"]
    return type(silu) is nn.SiLU and not silu.inplace and calls_only_forward(silu.__dict__)


class Silu:
    """What was computed from one ``temb`` in one lane.

    Attributes
    ----------
    all, text : Tensor
        ``silu(temb)``, and silu of the part of ``temb`` that the text stream sees.
    block : int
        The last block that was given it.
    """

    __slots__ = ("all", "block", "halved", "lane", "source", "text", "version")

    def __init__(self, source: weakref.ref[Tensor], temb: Tensor, lane: Hashable, block: int, halved: bool) -> None:
        self.source = source
        self.version = temb._version
        self.lane = lane
        self.block = block
        self.halved = halved
        self.all = F.silu(temb)
        self.text = F.silu(torch.chunk(temb, 2, dim=0)[0]) if halved else self.all

    def holds(self, temb: Tensor) -> bool:
        """Whether these are still ``temb``'s values: nothing was written to it, and nothing to them."""
        return (
            self.source() is temb
            and temb._version == self.version
            and self.all._version == 0
            and self.text._version == 0
        )


class SharedSilu:
    """The blocks of one model share one of these."""

    def __init__(self) -> None:
        self._known: Silu | None = None
        self._usable = SILU_SOURCE.obstacle() is None and SEQUENTIAL_SOURCE.obstacle() is None

    def of(self, temb: Tensor, block: int, halved: bool) -> Silu | None:
        """The values for ``temb``, or ``None`` where nothing can prove that they may be shared.

        Parameters
        ----------
        temb : Tensor
            ``(B, D)``.
        block : int
            The number of the block that asks.
        halved : bool
            Whether the text stream sees the first half of the rows only.
        """
        if (
            not self._usable
            or type(temb) is not Tensor
            # Sharing a node of the graph would add up its gradient in another order.
            or torch.is_grad_enabled()
            # Writes to tensors of the inference mode are not counted.
            or torch.is_inference_mode_enabled()
            or temb.is_inference()
        ):
            return None
        lane = capture.lane(temb.device)
        if lane is None:
            return None
        known = self._known
        if (
            known is not None
            and known.block < block
            and known.lane == lane
            and known.halved == halved
            and known.holds(temb)
        ):
            known.block = block
        else:
            self._known = known = Silu(weakref.ref(temb, self._forget), temb, lane, block, halved)
        return known

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        """Let go of the values when their ``temb`` is gone: in a capture they live in the graph's memory."""
        known = self._known
        if known is not None and known.source is source:
            self._known = None
