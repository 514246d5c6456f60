"""The rounding steps of every op's chain.

Adding an op adds one entry to ``STEPS``; ``coverage.py`` says which device functions no step reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.ops._fma import fused_multiply_add
from samebits.ops._quantize import FP8, LARGEST
from samebits.proof.steps import ALL, FP32, HALVES, Step, Types, Unit

_NUMERICS = Unit("_numerics.cuh")
WIDTHS = (128, 256, 2560, 3072, 3584, 3840, 4096, 5120, 8192, 12288, 16384)
_MOST_ROWS = 1 << 22


def _row_mean_factor(types: Types, width: Tensor, rows: Tensor) -> Tensor:
    return rows.float() / (rows.long() * width).float()


WIDEN = (
    Step("float(a), pairs", _NUMERICS, "widen(a)", "f", "E", lambda t, a: a.float()),
    Step("float(a)", _NUMERICS, "widen(a)", "f", "E", lambda t, a: a.float(), each=True),
)
ROUND = (
    Step("round(a) from fp32", _NUMERICS, "round_to<Element>(a)", "E", "f", lambda t, a: a.to(t.element), each=True),
    Step(
        "round(a) from fp32, pairs", _NUMERICS, "round_pair<Element>(a.x, a.y)", "E", "f", lambda t, a: a.to(t.element)
    ),
)
PRODUCT = Step("round(a * b)", _NUMERICS, "product(a, b)", "E", "EE", lambda t, a, b: a * b)
SUM = Step("round(a + b)", _NUMERICS, "sum(a, b)", "E", "EE", lambda t, a, b: a + b)
ONE_PLUS = Step("round(1 + a)", _NUMERICS, "one_plus<Element>(a)", "E", "E", lambda t, a: 1 + a)
# Of a sum, as in the chain: alone it would meet NaNs whose payload ATen hands on, and a sum has only one NaN.
CLIP = Step(
    "clip(round(a + b))",
    _NUMERICS,
    "clip_to_half<Element>(sum(a, b))",
    "E",
    "EE",
    lambda t, a, b: (a + b).clip(-65504, 65504),
)
SILU = (
    Step(
        "round(silu(a))",
        _NUMERICS,
        "round_pair<Element>(silu(widen(a).x), silu(widen(a).y))",
        "E",
        "E",
        lambda t, a: F.silu(a),
        portable=False,
    ),
    Step("exp(a), fp32", _NUMERICS, "expf(a)", "f", "f", lambda t, a: torch.exp(a), each=True, portable=False),
)
GELU = (
    Step(
        "round(gelu_tanh(a))",
        _NUMERICS,
        "round_pair<Element>(gelu_tanh(widen(a).x), gelu_tanh(widen(a).y))",
        "E",
        "E",
        lambda t, a: F.gelu(a, approximate="tanh"),
        portable=False,
    ),
    Step("tanh(a), fp32", _NUMERICS, "tanhf(a)", "f", "f", lambda t, a: torch.tanh(a), each=True, portable=False),
)

TANH = (
    Step("round(tanh(a))", _NUMERICS, "tanh_of<Element>(a)", "E", "E", lambda t, a: a.tanh(), portable=False),
    GELU[1],
)


def _root(eps: str, name: str, aten: Callable[..., Tensor]) -> Step:
    code = f"reciprocal_deviation(a, {eps})"
    return Step(name, _NUMERICS, code, "f", "f", aten, each=True, portable=False)


# a + -0.0 is a, whatever a is.
ROOT = (
    _root("-0.0f", "rsqrt(a), fp32", lambda t, a: torch.rsqrt(a)),
    _root("1e-6f", "rsqrt(a + 1e-6), fp32", lambda t, a: torch.rsqrt(a + 1e-6)),
    _root("1e-5f", "rsqrt(a + 1e-5), fp32", lambda t, a: torch.rsqrt(a + 1e-5)),
)
MEAN_FACTOR = Step(
    "float(rows) / float(rows * width)",
    _NUMERICS,
    "mean_factor(b, a)",
    "f",
    "ii",
    _row_mean_factor,
    each=True,
    grid=(WIDTHS, _MOST_ROWS),
)
# Two partial results of counts n - 1 and 1 and means 0 and 1: what is left of the mean is the reciprocal itself.
COUNTS = Step(
    "1 / count",
    _NUMERICS,
    "welford_combine(Welford{0.0f, 0.0f}, Welford{1.0f, 0.0f}, (float)(b - a), (float)a).mean",
    "f",
    "ii",
    lambda t, a, b: torch.reciprocal(b.float()).expand(a.shape[0], -1),
    each=True,
    grid=((1,), 1 << 16),
)

_MODULATE = Unit("_layer_norm.cuh", (("WIDTH", 3072),))
_ZERO, _MINUS_ZERO, _ONE = (f"round_pair<Element>({value}, {value})" for value in ("0.0f", "-0.0f", "1.0f"))


def _modulate(name: str, code: str, operands: str, aten: Callable[..., Tensor], layout: str, **more: object) -> Step:
    dtypes = ALL if "f" in operands else HALVES
    return Step(name, _MODULATE, f"normalize_modulate({code})", "E", operands, aten, layout, dtypes=dtypes)


def _modulated(t: Types, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (rstd * (x.float() - mean)).to(t.element) * (1 + scale) + shift


MODULATE = (
    _modulate(
        "round(x - mean), mean of 16 bits",
        f"a, Statistics{{widen(b).x, 1.0f}}, {_ZERO}, {_MINUS_ZERO}",
        "EE",
        lambda t, x, mean: (x.float() - mean.float()).to(t.element),
        "io",
    ),
    _modulate(
        "round(rstd * x), rstd of 16 bits",
        f"a, Statistics{{0.0f, widen(b).x}}, {_ZERO}, {_MINUS_ZERO}",
        "EE",
        lambda t, x, rstd: (rstd.float() * x.float()).to(t.element),
        "io",
    ),
    _modulate(
        "round(n * round(1 + scale))",
        f"a, Statistics{{0.0f, 1.0f}}, b, {_MINUS_ZERO}",
        "EE",
        lambda t, n, scale: n * (1 + scale),
        "io",
    ),
    _modulate(
        "round(round(1 + scale) + shift)",
        f"{_ONE}, Statistics{{0.0f, 1.0f}}, a, b",
        "EE",
        lambda t, scale, shift: (1 + scale) + shift,
        "io",
    ),
    _modulate(
        "round(n + shift)",
        f"a, Statistics{{0.0f, 1.0f}}, {_ZERO}, b",
        "EE",
        lambda t, n, shift: n + shift,
        "io",
    ),
    _modulate(
        "LayerNorm's product to y, fp32 mean and rstd",
        "a, Statistics{b.x, c.x}, d, e",
        "EffEE",
        _modulated,
        "ioooo",
    ),
)

_ROW_SUM = Unit("_row_sum.cuh", (("WIDTH", 3840), ("COLUMNS", 32), ("GROUPS", 1), ("WIDE", 4)))
RMS = (
    Step(
        "round(x * r), r of 16 bits",
        _ROW_SUM,
        f"rms_norm(a, widen(b).x, {_ONE})",
        "E",
        "EE",
        lambda t, x, r: (x * r.float()).to(t.element),
        "io",
        dtypes=HALVES,
    ),
    Step("round(n * weight)", _ROW_SUM, "rms_norm(a, 1.0f, b)", "E", "EE", lambda t, x, w: x * w, "io", dtypes=HALVES),
    Step(
        "round(round(x * r) * weight), fp32 r",
        _ROW_SUM,
        "rms_norm(a, b.x, c)",
        "E",
        "EfE",
        lambda t, x, r, w: (x * r).to(t.element) * w,
        "ioo",
    ),
)

_KINDS = {"diffusers": 0, "native": 1, "torch": 2}


def _heads(kind: str, weight: torch.dtype | None = None) -> Unit:
    own = (("REFERENCE", _KINDS[kind]),)
    return Unit("_head_norm.cuh", (("HEAD_DIM", 128), *own), (("HEAD_DIM", 72), ("VECTOR", 4), *own), weight)


def _mean_of(t: Types, total: Tensor) -> Tensor:
    head_dim = 72 if t.element == FP32 else 128
    rows = torch.tensor(98304.0, device=total.device)
    return total * (rows / (rows * head_dim))


def _heads_root(kind: str, aten: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...]) -> Step:
    code = "reciprocal_root(a, 98304, 1e-6f)"
    name = f"r from the sum of squares, {kind}"
    return Step(name, _heads(kind), code, "f", "f", aten, each=True, dtypes=dtypes, portable=False)


def _native_root(t: Types, total: Tensor) -> Tensor:
    return torch.rsqrt(_mean_of(t, total).to(t.element) + 1e-6).float()


def _torch_root(t: Types, total: Tensor) -> Tensor:
    # A tensor: by a Python number ATen does not divide, it multiplies with the number's reciprocal.
    head_dim = torch.tensor(72.0 if t.element == FP32 else 128.0, device=total.device)
    return torch.rsqrt(total / head_dim + 1e-6)


def _weigh(kind: str, r: str, weight: torch.dtype | None = None) -> Step:
    """The two products of a head norm: ``r`` says whether it has 16 bits (``E``), is 1 (empty) or any fp32 (``f``)."""
    factor = {"E": "widen(b).x", "": "1.0f", "f": "b.x"}[r]
    w = {"E": "round_pair<Weight>(1.0f, 1.0f)", "": "b", "f": "c"}[r]

    def aten(t: Types, x: Tensor, *rest: Tensor) -> Tensor:
        root, weighed = (rest[0].float() if r else None), (rest[-1] if r != "E" else None)
        if kind == "torch":
            y = x.float() if root is None else root * x.float()
            return (y if weighed is None else weighed.float() * y).to(t.weight)
        y = x if root is None else (x * root.to(t.element) if kind == "native" else x * root)
        if t.weight != FP32:
            y = y.to(t.weight)
        return y.to(t.weight) if weighed is None else y * weighed

    what = {"E": "round(x * r), r of 16 bits", "": "round(n * weight)", "f": "x, r and weight to y, fp32 r"}[r]
    name = f"{what}, {kind}" + (" fp32 weight" if weight else "")
    operands = {"E": "EE", "": "EW", "f": "EfW"}[r]
    dtypes = HALVES if r != "f" or kind == "native" or weight else ALL
    places = "i" + "o" * (len(operands) - 1)
    return Step(
        name, _heads(kind, weight), f"weigh(widen(a), {factor}, {w})", "W", operands, aten, places, dtypes=dtypes
    )


HEADS = (
    Step("x * x, fp32", _heads("diffusers"), "square(widen(a))", "f", "E", lambda t, a: a.float().pow(2), each=True),
    Step(
        "round(x * x), native",
        _heads("native"),
        "square(widen(a))",
        "f",
        "E",
        lambda t, a: a.pow(2).float(),
        each=True,
        dtypes=HALVES,
    ),
    _heads_root("diffusers", lambda t, total: torch.rsqrt(_mean_of(t, total) + 1e-6), ALL),
    _heads_root("native", _native_root, HALVES),
    _heads_root("torch", _torch_root, ALL),
    *(
        _weigh(kind, r)
        for kind in ("diffusers", "native", "torch")
        for r in ("E", "", "f")
        if (kind, r) != ("native", "f")
    ),
    *(_weigh("diffusers", r, FP32) for r in ("E", "f")),
)

_ROPE = Unit(
    "qk_norm_rope.cu",
    (("HEAD_DIM", 128), ("HEADS", 24), ("HEADS_AHEAD", 6), ("REFERENCE", 0), ("TENSORS", 3)),
    (
        ("HEAD_DIM", 128),
        ("HEADS", 24),
        ("IMAGE_COLUMNS", 32),
        ("TEXT_COLUMNS", 32),
        ("VECTOR", 4),
        ("REFERENCE", 0),
        ("TENSORS", 3),
    ),
)


def _rotated(t: Types, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    shape = (b.shape[0], a.shape[1])
    pair = torch.complex(a.float().expand(shape), b.float().expand(shape))
    return torch.view_as_real(pair * torch.complex(cos, sin)).to(t.weight)


def _turn(cos: float, sin: float) -> Step:
    def aten(t: Types, a: Tensor, b: Tensor) -> Tensor:
        fixed = (torch.full((1, 1), value, dtype=FP32, device=a.device) for value in (cos, sin))
        return _rotated(t, a, b, *fixed)

    turn = ", ".join(f"{float(torch.tensor(value)).hex()}f" for value in (cos, sin))
    code = f"rotate(Pair<Weight>{{a, b}}, make_float2({turn}))"
    name = f"round((a + bi) * ({cos:g} + {sin:g}i))"
    return Step(name, _ROPE, code, "W", "WW", aten, "io", each=True, parts=2, dtypes=HALVES, portable=False)


ROTATE = (
    *(_turn(cos, sin) for cos, sin in ((0.5403023, 0.84147096), (1.0, 0.0), (-0.99999994, 3.4526698e-4))),
    Step(
        "round((a + bi) * (c + di)), fp32 table",
        _ROPE,
        "rotate(Pair<Weight>{a, b}, make_float2(c, d))",
        "W",
        "WWff",
        _rotated,
        "iooo",
        each=True,
        parts=2,
        portable=False,
    ),
)

_BIAS, _BIAS_FMA = (Unit("_bias.cuh", (("NATIVE_FMA", native),)) for native in (0, 1))


def _biased(name: str, code: str, operands: str, aten: Callable[..., Tensor], unit: Unit = _BIAS) -> Step:
    layout = "i" + "o" * (len(operands) - 1)
    dtypes = HALVES if len(operands) == 2 else ALL
    return Step(name, unit, f"biased_residual({code})", "E", operands, aten, layout, dtypes=dtypes)


def _with_bias(t: Types, y: Tensor, h: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return h + gate * (y + bias)


def _with_bias_once(t: Types, y: Tensor, h: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return fused_multiply_add(gate, y + bias, h)


BIAS = (
    _biased("round(y + bias)", f"{_MINUS_ZERO}, {_ONE}, a, b", "EE", lambda t, y, bias: y + bias),
    _biased("round(h + b)", f"a, {_ONE}, b, {_MINUS_ZERO}", "EE", lambda t, h, b: h + b),
    _biased("round(gate * b)", f"{_MINUS_ZERO}, a, b, {_MINUS_ZERO}", "EE", lambda t, gate, b: gate * b),
    _biased("round(h + round(gate * round(y + bias)))", "b, c, a, d", "EEEE", _with_bias),
    _biased("round(h + gate * round(y + bias)), once", "b, c, a, d", "EEEE", _with_bias_once, _BIAS_FMA),
)

# A product first: NaN then is the one that arithmetic makes, as in the chain.
_QUANTIZE = Unit("_quantize.cuh", (("QUANTIZED", 1),))
_BY_BITS = "e4m3_by_bits(__fmul_rn(widen(a).x, 1.0f)) | e4m3_by_bits(__fmul_rn(widen(a).y, 1.0f)) << 8"


def _e4m3(value: Tensor) -> Tensor:
    return value.clamp(-LARGEST, LARGEST).to(FP8)


QUANTIZE = (
    Step("1 / scale, fp32", _QUANTIZE, "result_factor(&a)", "f", "f", lambda t, a: a.reciprocal(), each=True),
    Step("e4m3(a)", _QUANTIZE, "two_bytes(quantize(a, 1.0f))", "B", "E", lambda t, a: _e4m3(a.float() * 1.0)),
    Step("e4m3(a), by bits", _QUANTIZE, f"two_bytes({_BY_BITS})", "B", "E", lambda t, a: _e4m3(a.float() * 1.0)),
    Step(
        "e4m3(a * s), s of 16 bits",
        _QUANTIZE,
        "two_bytes(quantize(a, widen(b).x))",
        "B",
        "EE",
        lambda t, a, s: _e4m3(a.float() * s.float()),
        "io",
        dtypes=HALVES,
    ),
    Step(
        "e4m3(a * s), fp32 s",
        _QUANTIZE,
        "two_bytes(quantize(a, b.x))",
        "B",
        "Ef",
        lambda t, a, s: _e4m3(a.float() * s),
        "io",
    ),
)

STEPS: Mapping[str, tuple[Step, ...]] = {
    "layer_norm_modulate": (*WIDEN, *ROUND, ONE_PLUS, PRODUCT, SUM, *ROOT, COUNTS, *MODULATE, *QUANTIZE),
    "gated_residual_norm_modulate": (
        *(*WIDEN, *ROUND, ONE_PLUS, PRODUCT, SUM, CLIP, *ROOT, COUNTS, *MODULATE),
        *QUANTIZE,
    ),
    "gated_residual": (PRODUCT, SUM, CLIP),
    "rms_norm_scale": (*WIDEN, *ROUND, ONE_PLUS, PRODUCT, *ROOT, MEAN_FACTOR, *RMS, *TANH, *QUANTIZE),
    "gated_residual_rms_norm": (*WIDEN, *ROUND, ONE_PLUS, PRODUCT, SUM, *ROOT, MEAN_FACTOR, *RMS, *TANH, *QUANTIZE),
    "qk_norm": (*WIDEN, *ROUND, PRODUCT, *ROOT, MEAN_FACTOR, *HEADS),
    "qk_norm_rope": (*WIDEN, *ROUND, PRODUCT, *ROOT, MEAN_FACTOR, *HEADS, *ROTATE),
    "gelu_tanh": (*WIDEN, *ROUND, *GELU, *QUANTIZE),
    "swiglu": (*WIDEN, *ROUND, PRODUCT, *SILU, *QUANTIZE),
    "linear_gelu_tanh": (*WIDEN, *ROUND, *GELU),
    "linear_swiglu": (*WIDEN, *ROUND, PRODUCT, *SILU),
    "quantize_fp8": (*WIDEN, *QUANTIZE),
    "bias_gated_residual": (PRODUCT, SUM, CLIP, *BIAS),
    "bias_gated_residual_norm_modulate": (
        *(*WIDEN, *ROUND, ONE_PLUS, PRODUCT, SUM, CLIP, *ROOT, COUNTS, *MODULATE, *BIAS),
        *QUANTIZE,
    ),
}
"""By op: the steps of its chain. A step that several ops share is run once and recorded for each."""
