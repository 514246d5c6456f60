"""How each op is fed rows: its arguments from a number of rows and a width, for every variant that the families use.

Adding an op adds one entry to ``FORMS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samebits.ops import Args, gelu_tanh
from samebits.proof import values
from samebits.proof.domains import EVERY_16, every_16
from samebits.proof.steps import HALVES

HEADS = 24
"""Heads of a token where rows are heads."""


_FRESH_EVERY = 8
"""After how many draws adversarial rows are made anew; in between they change places."""


class Inputs:
    """Makes the tensors of one call and fills them anew for every draw.

    Parameters
    ----------
    dtype : torch.dtype
    device : torch.device
    seed : int
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._main: list[Tensor] = []
        self._base: list[Tensor] = []
        self._side: list[tuple[Tensor, float, float]] = []

    def rows(self, *shape: int) -> Tensor:
        """A tensor whose rows decide: filled with adversarial or random rows."""
        tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._main.append(tensor)
        return tensor

    def side(self, *shape: int, mean: float = 0.0, amplitude: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of ordinary values: modulation, a gate, a weight."""
        tensor = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        self._side.append((tensor, mean, amplitude))
        return tensor

    def table(self, tokens: int, pairs: int) -> Tensor:
        """A complex64 rotation for each token and pair."""
        angles = torch.randn(tokens, pairs, generator=self.generator, device=self.device) * 3
        return torch.polar(torch.ones_like(angles), angles)

    def adversarial(self, number: int) -> None:
        """Fill the rows with the patterns, the first with another one each time; further tensors are shifted."""
        if number % _FRESH_EVERY == 0:
            self._base = [values.adversarial(tensor, self.generator) for tensor in self._main]
            self._fill_side()
        for at, (tensor, base) in enumerate(zip(self._main, self._base, strict=True)):
            rows = tensor.view(-1, tensor.shape[-1])
            rows.copy_(base.roll((at + 1) * number, 0)[: rows.shape[0]])

    def random(self, number: int) -> None:
        """Fill the rows with normal numbers of the amplitude that is due."""
        for tensor in self._main:
            values.random(tensor, number, self.generator)
        if number % 8 == 0:
            self._fill_side()

    def _fill_side(self) -> None:
        for tensor, mean, amplitude in self._side:
            tensor.normal_(mean, amplitude, generator=self.generator)


Build = Callable[[Inputs, int, int, str], Args]


@dataclass(frozen=True)
class Every:
    """A call of an op without a sum whose elements run through every value, or every pair with ``outer``.

    Attributes
    ----------
    build : callable
        ``build(outer)`` returns the arguments; ``outer`` holds some values of a first operand, ``(O,)``.
    pairs : bool
        Whether there is a first operand; without one there is one call.
    """

    build: Callable[[Tensor], Args]
    pairs: bool = True


@dataclass(frozen=True)
class Form:
    """How one op is fed.

    Attributes
    ----------
    build : callable
        ``build(inputs, rows, width, variant)`` returns the arguments of one call. Rows count over one tensor.
    wide : tuple of int
        Rows and width of a call as the families make it.
    narrow : tuple of int
        Rows and width of a call that has many rows for its bytes.
    variants : mapping of str to tuple of torch.dtype, optional
        Texts for ``build``; each says for which element types it exists.
    tokens_only : bool
        Whether ``rows`` may be any number. Rows that are heads come in tokens.
    every : mapping of str to Every, optional
        By the step that they show.
    before_norm : bool
        Whether those calls also norm what they made.
    portable : bool
        Whether a CPU's eager owes the same bits.
    """

    build: Build
    wide: tuple[int, int]
    narrow: tuple[int, int]
    variants: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=lambda: {"": ()})
    tokens_only: bool = True
    every: Mapping[str, Every] = field(default_factory=dict)
    before_norm: bool = False
    portable: bool = False

    def variants_of(self, dtype: torch.dtype) -> list[str]:
        """The variants that take this element type."""
        return [name for name, dtypes in self.variants.items() if not dtypes or dtype in dtypes]


def _modulate(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    x = inputs.rows(1, rows, width)
    scale, shift = inputs.side(2 if variant == "two rows" else 1, 2 * width).chunk(2, dim=-1)
    index = _index(inputs, rows) if variant == "two rows" else None
    return x, scale, shift, 1e-6, index, _input_scale(inputs, variant)


def _input_scale(inputs: Inputs, variant: str, scale: float = 0.0117) -> Tensor | None:
    """The scale of a quantised result, no power of two."""
    return torch.full((), scale, device=inputs.device) if variant.endswith("quantised") else None


def _index(inputs: Inputs, rows: int) -> Tensor:
    return torch.randint(0, 2, (1, rows), generator=inputs.generator, device=inputs.device, dtype=torch.int32)


def _residual(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    gate = inputs.side(2 if variant == "two rows" else 1, 3 * width).chunk(3, dim=-1)[2]
    args = (inputs.rows(1, rows, width), gate, inputs.rows(1, rows, width), variant == "clip")
    return (*args, _index(inputs, rows)) if variant == "two rows" else args


def _residual_modulate(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    shift, scale, gate = inputs.side(2 if variant == "two rows" else 1, 3 * width).chunk(3, dim=-1)
    streams = inputs.rows(1, rows, width), gate, inputs.rows(1, rows, width), scale, shift
    index = _index(inputs, rows) if variant == "two rows" else None
    args = (*streams, 1e-6, variant == "clip", index, _input_scale(inputs, variant))
    if not variant.startswith("two streams"):
        return args
    few, (shift, scale, gate) = _few(rows), inputs.side(1, 3 * width).chunk(3, dim=-1)
    text = inputs.rows(1, few, width), gate, inputs.rows(1, few, width), scale, shift
    return (*args, *text, _input_scale(inputs, variant, 0.0093))


def _few(rows: int) -> int:
    """The tokens of a text beside an image of so many."""
    return max(1, rows // 32)


def _bias_residual(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    gate = inputs.side(2 if variant == "two rows" else 1, 3 * width).chunk(3, dim=-1)[2]
    streams = inputs.rows(1, rows, width), gate, inputs.rows(1, rows, width), inputs.side(width)
    args = (*streams, variant == "once", variant == "clip")
    return (*args, _index(inputs, rows)) if variant == "two rows" else args


def _bias_residual_modulate(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    shift, scale, gate = inputs.side(2 if variant == "two rows" else 1, 3 * width).chunk(3, dim=-1)
    streams = inputs.rows(1, rows, width), gate, inputs.rows(1, rows, width), inputs.side(width)
    index = _index(inputs, rows) if variant == "two rows" else None
    flags = variant == "once", variant == "clip"
    return (*streams, scale, shift, 1e-6, *flags, index, _input_scale(inputs, variant))


def _weight(inputs: Inputs, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return inputs.side(width, mean=1.0, amplitude=0.1, dtype=dtype)


def _rms(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    scale = None if variant == "no scale" else inputs.side(1, 1, width)
    args = (inputs.rows(1, rows, width), _weight(inputs, width), scale, 1e-5)
    return (*args, *_gates(inputs, width, variant), _input_scale(inputs, variant))


def _gates(inputs: Inputs, width: int, variant: str) -> tuple[Tensor | None, Tensor | None]:
    """The two gates of a block, before their tanh, where the variant has them."""
    if variant != "gates":
        return None, None
    return inputs.side(1, 1, width), inputs.side(1, 1, width, amplitude=4.0)


def _residual_rms(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    x, y = inputs.rows(1, rows, width), inputs.rows(1, rows, width)
    weight, y_weight = _weight(inputs, width), _weight(inputs, width)
    if variant == "no modulation":
        return x, None, y, y_weight, weight, None, 1e-5
    gate = inputs.side(1, 1, width, amplitude=0.5)
    if variant == "last":
        return x, gate, y, y_weight, None, None, 1e-5
    args = (x, gate, y, y_weight, weight, inputs.side(1, 1, width), 1e-5)
    return (*args, *_gates(inputs, width, variant), _input_scale(inputs, variant))


def _heads_of(rows: int) -> tuple[int, int]:
    return (rows // HEADS, HEADS) if rows % HEADS == 0 else (rows, 1)


def _qk(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    kind, _, weight = variant.partition(" ")
    tokens, heads = _heads_of(rows)
    q, k = inputs.rows(1, tokens, heads, width), inputs.rows(1, tokens, heads, width)
    dtype = torch.float32 if weight else None
    return q, k, _weight(inputs, width, dtype), _weight(inputs, width, dtype), 1e-6, kind


def _rope(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    kind, _, text = variant.partition(" ")
    tokens, heads = _heads_of(rows)

    def stream(tokens: int) -> tuple[Any, ...]:
        q, k = (inputs.rows(1, tokens, heads, width) for _ in range(2))
        v = inputs.rows(1, tokens, heads, width) if text else None
        return q, k, v, _weight(inputs, width), _weight(inputs, width), inputs.table(tokens, width // 2)

    return (*stream(tokens), *(stream(_few(tokens)) if text else (None,) * 6), 1e-6, kind)


def _gelu(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    return inputs.rows(1, rows, width), _input_scale(inputs, variant)


def _quantize(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    return inputs.rows(1, rows, width), _input_scale(inputs, "quantised")


def _swiglu(inputs: Inputs, rows: int, width: int, variant: str) -> Args:
    if variant == "packed":
        a, b = inputs.rows(1, rows, 2 * width).chunk(2, dim=-1)
        return a, b
    return inputs.rows(1, rows, width), inputs.rows(1, rows, width), _input_scale(inputs, variant)


# Calls that run through every pair: `outer` holds some values of one operand, the other takes all 65,536.
_WIDTH = 16384  # four rows of it hold every 16-bit value


def _grid(outer: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands of every pair, ``(1, 4 * O, _WIDTH)``: ``outer`` and every value."""
    inner = every_16(outer.dtype, outer.device).view(1, 4, _WIDTH)
    return outer.view(1, -1, 1).repeat_interleave(4, 1).repeat(1, 1, _WIDTH), inner.repeat(1, outer.numel(), 1)


def _sum_pairs(outer: Tensor, clip: bool = False) -> Args:
    h, y = _grid(outer)
    return h, torch.ones_like(h[:, 0]), y, clip


def _gate_pairs(outer: Tensor) -> Args:
    gate = every_16(outer.dtype, outer.device).view(4, _WIDTH)
    y = outer.view(1, -1, 1).repeat(4, 1, _WIDTH)
    return torch.full_like(y, -0.0), gate, y, False


def _with_norm(args: Args) -> Args:
    h, gate, y, clip = args
    return h, gate, y, torch.zeros_like(gate), torch.zeros_like(gate), 1e-6, clip


_SUMS = {
    "round(h + round(1 * y))": Every(_sum_pairs),
    "clip(round(h + round(1 * y)))": Every(lambda outer: _sum_pairs(outer, True)),
    "round(-0 + round(gate * y))": Every(_gate_pairs),
}


def _with_bias(every: Every) -> Every:
    def build(outer: Tensor) -> Args:
        h, gate, y, clip = every.build(outer)
        return h, gate, y, torch.full_like(h[0, 0], -0.0), False, clip

    return Every(build)


def _before_norm(every: Every) -> Every:
    return Every(lambda outer: _with_norm(every.build(outer)))


# So many bf16 elements that the kernel takes its table.
_TABLE_TIMES = -(-gelu_tanh.TABLE_FROM // EVERY_16)
_ALL_KINDS = {"diffusers": (), "native": HALVES, "torch": ()}

FORMS: Mapping[str, Form] = {
    "layer_norm_modulate": Form(_modulate, (4096, 3072), (32768, 516), {"": (), "two rows": (), "quantised": ()}),
    "gated_residual_norm_modulate": Form(
        _residual_modulate,
        (4096, 3072),
        (32768, 516),
        dict.fromkeys(("", "two rows", "clip", "quantised", "two streams", "two streams, quantised"), ()),
        every={name: _before_norm(every) for name, every in _SUMS.items()},
        before_norm=True,
    ),
    "gated_residual": Form(
        _residual, (4096, 3072), (65536, 128), {"": (), "two rows": (), "clip": ()}, every=_SUMS, portable=True
    ),
    "bias_gated_residual": Form(
        _bias_residual,
        (4096, 3072),
        (65536, 128),
        {"": (), "once": (), "two rows": (), "clip": ()},
        every={name: _with_bias(every) for name, every in _SUMS.items()},
        portable=True,
    ),
    "bias_gated_residual_norm_modulate": Form(
        _bias_residual_modulate,
        (4096, 3072),
        (32768, 516),
        {"": (), "once": (), "two rows": (), "clip": (), "quantised": ()},
    ),
    "rms_norm_scale": Form(_rms, (4224, 3840), (65536, 128), {"": (), "no scale": (), "gates": (), "quantised": ()}),
    "gated_residual_rms_norm": Form(
        _residual_rms,
        (4224, 3840),
        (65536, 128),
        {"": (), "no modulation": (), "last": (), "gates": (), "quantised": ()},
    ),
    "qk_norm": Form(
        _qk, (HEADS * 4096, 128), (HEADS * 4096, 128), {**_ALL_KINDS, "diffusers fp32-weight": HALVES}, False
    ),
    "qk_norm_rope": Form(
        _rope, (HEADS * 4096, 128), (HEADS * 4096, 128), {**_ALL_KINDS, "diffusers two-streams": ()}, False
    ),
    "gelu_tanh": Form(
        _gelu,
        (4096, 12288),
        (65536, 128),
        {"": (), "quantised": ()},
        every={
            "round(gelu_tanh(x)), directly": Every(lambda outer: (every_16(outer.dtype, outer.device),), False),
            "round(gelu_tanh(x)), many at once": Every(
                lambda outer: (every_16(outer.dtype, outer.device).repeat(_TABLE_TIMES),), False
            ),
        },
    ),
    "swiglu": Form(
        _swiglu,
        (4224, 10240),
        (65536, 128),
        {"": (), "packed": (), "quantised": ()},
        every={
            "round(round(silu(a)) * b)": Every(lambda outer: tuple(part.view(-1, EVERY_16) for part in _grid(outer)))
        },
    ),
    "quantize_fp8": Form(
        _quantize,
        (4096, 3072),
        (65536, 128),
        every={
            "e4m3(x * s)": Every(
                lambda outer: (
                    every_16(outer.dtype, outer.device).view(4, -1),
                    torch.full((), 0.0117, device=outer.device),
                ),
                False,
            )
        },
        portable=True,
    ),
}
"""By op: how it is fed."""
