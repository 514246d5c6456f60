"""The wrong kernels: our sources, each changed in one place, and the check that must see it.

A change that moves no bit is no control, so a comment says where the choice of shape matters. Whoever adds a device
function adds here what it could do wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from samebits.proof.chains import BIAS, CLIP, GELU, HEADS, MEAN_FACTOR, MODULATE, PRODUCT, QUANTIZE, ROOT, ROTATE, SILU
from samebits.proof.controls import Case, Control, Every, Rows, Steps
from samebits.proof.rows import Shape
from samebits.proof.steps import BF16, FP16, FP32, Step
from samebits.proof.workshop import Change


def _control(
    name: str, file: str, old: str, new: str, check: Steps | Every | Rows | Case, *, of_nan: bool = False
) -> Control:
    return Control(name, (Change(file, old, new),), check, of_nan)


def _named(steps: Sequence[Step], *words: str) -> tuple[Step, ...]:
    """The steps whose names hold all of the words."""
    found = tuple(step for step in steps if all(word in step.name for word in words))
    if not found:
        raise ValueError(f"no step's name holds {' and '.join(words)}")
    return found


_WIDE = Shape(256, 3840)
_NORM = Shape(256, 3072)
_HEAD = Shape(256 * 24, 128)
_RMS_FP32 = Rows("rms_norm_scale", FP32, _WIDE)
_NORM_FP32 = Rows("layer_norm_modulate", FP32, _NORM)

CONTROLS = (
    # roundings and contractions
    _control(
        "the sum contracts with the product before it",
        "gated_residual.cu",
        "o.pair[k] = sum(a.pair[k], product(g.pair[k], b.pair[k]));",
        "o.pair[k] = __hfma2(g.pair[k], b.pair[k], a.pair[k]);",
        Rows("gated_residual", BF16, _NORM),
    ),
    _control(
        "shift contracts with the product before it",
        "_layer_norm.cuh",
        "return sum(product(n, one_plus<Element>(scale)), shift);",
        "return __hfma2(n, one_plus<Element>(scale), shift);",
        Steps(_named(MODULATE, "LayerNorm"), BF16),
    ),
    _control(
        "1 + scale is not rounded",
        "_layer_norm.cuh",
        "return sum(product(n, one_plus<Element>(scale)), shift);",
        "const float2 m = widen(n), g = widen(scale);\n"
        "  const float low = __fmul_rn(m.x, __fadd_rn(1.0f, g.x)), high = __fmul_rn(m.y, __fadd_rn(1.0f, g.y));\n"
        "  return sum(round_pair<Element>(low, high), shift);",
        Steps(_named(MODULATE, "round(n * round(1 + scale))"), BF16),
    ),
    _control(
        "1 + scale is not rounded where it follows a norm",
        "rms_norm_scale.cu",
        "if (HAS_SCALE) o.pair[k] = product(o.pair[k], one_plus<Element>(s.pair[k]));",
        "const float2 n = widen(o.pair[k]), g = widen(s.pair[k]);\n"
        "        const float low = __fmul_rn(n.x, __fadd_rn(1.0f, g.x)), high = __fmul_rn(n.y, __fadd_rn(1.0f, g.y));\n"
        "        if (HAS_SCALE) o.pair[k] = round_pair<Element>(low, high);",
        Rows("rms_norm_scale", BF16, _WIDE),
    ),
    _control(
        "the cast before the weight is skipped",
        "_head_norm.cuh",
        "return product(round_pair<Weight>(__fmul_rn(x.x, r), __fmul_rn(x.y, r)), weight);",
        "const float2 w = widen(weight);\n"
        "  return round_pair<Weight>(__fmul_rn(__fmul_rn(x.x, r), w.x), __fmul_rn(__fmul_rn(x.y, r), w.y));",
        Steps(_named(HEADS[:-2], "fp32 r, diffusers"), BF16),
    ),
    _control(
        "the weight joins before r",
        "_head_norm.cuh",
        "return round_pair<Weight>(__fmul_rn(w.x, __fmul_rn(r, x.x)), __fmul_rn(w.y, __fmul_rn(r, x.y)));",
        "return round_pair<Weight>(__fmul_rn(__fmul_rn(w.x, r), x.x), __fmul_rn(__fmul_rn(w.y, r), x.y));",
        Steps(_named(HEADS, "fp32 r, torch"), BF16),
    ),
    _control(
        "squares are not rounded to half precision",
        "_head_norm.cuh",
        "return REFERENCE == NATIVE ? widen(round_to<Element>(s)) : s;",
        "return s;",
        Steps(_named(HEADS, "round(x * x), native"), BF16),
    ),
    _control(
        "silu is not rounded before the product",
        "swiglu.cu",
        "o.pair[k] = product(round_pair<Element>(silu(f.x), silu(f.y)), w.pair[k]);",
        "const float2 g = widen(w.pair[k]);\n"
        "    o.pair[k] = round_pair<Element>(__fmul_rn(silu(f.x), g.x), __fmul_rn(silu(f.y), g.y));",
        Every("swiglu", "round(round(silu(a)) * b)", BF16),
    ),
    _control(
        "the complex product contracts its second half",
        "qk_norm_rope.cu",
        "__fmaf_rn(f.x, t.x, -__fmul_rn(f.y, t.y))",
        "__fmaf_rn(-f.y, t.y, __fmul_rn(f.x, t.x))",
        Steps(_named(ROTATE, "fp32 table"), FP16),
    ),
    _control(
        "the complex product does not contract",
        "qk_norm_rope.cu",
        "__fmaf_rn(f.x, t.y, __fmul_rn(f.y, t.x))",
        "__fadd_rn(__fmul_rn(f.x, t.y), __fmul_rn(f.y, t.x))",
        Steps(_named(ROTATE, "fp32 table"), FP32),
    ),
    _control(
        "gelu's inner sum does not contract",
        "_numerics.cuh",
        "__fmaf_rn(0.044715f, cube, x)",
        "__fadd_rn(__fmul_rn(0.044715f, cube), x)",
        Steps(GELU[:1], FP32),
    ),
    _control(
        "silu divides by a reciprocal",
        "_numerics.cuh",
        "__fdiv_rn(x, __fadd_rn(1.0f, expf(-x)))",
        "__fmul_rn(x, __frcp_rn(__fadd_rn(1.0f, expf(-x))))",
        Steps(SILU[:1], FP32),
    ),
    _control(
        "the native multiply-add rounds twice",
        "_bias.cuh",
        "(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return __hfma2(a, b, c); }",
        "(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {\n"
        "  const float2 x = widen(a), y = widen(b), z = widen(c);\n"
        "  return round_pair<__nv_bfloat16>(__fmaf_rn(x.x, y.x, z.x), __fmaf_rn(x.y, y.y, z.y));\n}",
        Steps(_named(BIAS, "once"), BF16),
    ),
    _control(
        "the bias joins the product unrounded",
        "_bias.cuh",
        "else return sum(h, product(gate, b));",
        "else return fused_multiply_add(gate, b, h);",
        Steps(_named(BIAS, "round(h + round("), BF16),
    ),
    # values at the edges
    _control(
        "e4m3 flushes its subnormals",
        "_quantize.cuh",
        "return e4m3_pair(__fmul_rn(f.x, reciprocal), __fmul_rn(f.y, reciprocal));",
        "const float x = __fmul_rn(f.x, reciprocal), y = __fmul_rn(f.y, reciprocal);\n"
        "  return e4m3_pair(fabsf(x) < 0x1p-6f ? __fmul_rn(x, 0.0f) : x, y);",
        Steps(_named(QUANTIZE, "s of 16 bits"), BF16),
    ),
    _control(
        "e4m3 rounds ties up",
        "_quantize.cuh",
        "((magnitude + 0x7ffffu + odd) >> 20)",
        "((magnitude + 0x80000u) >> 20)",
        Steps(_named(QUANTIZE, "by bits"), BF16),
    ),
    _control(
        "no subnormal rescue in rsqrt",
        "_numerics.cuh",
        "return rsqrtf(__fadd_rn(variance, eps));",
        "const float v = __fadd_rn(variance, eps);\n"
        "  return rsqrtf(fabsf(v) < 1.17549435e-38f ? copysignf(0.0f, v) : v);",
        Steps(ROOT[:1], FP32),
    ),
    _control(
        "eps is forgotten",
        "_numerics.cuh",
        "rsqrtf(__fadd_rn(variance, eps))",
        "rsqrtf(variance)",
        Rows("layer_norm_modulate", BF16, _NORM),
    ),
    _control(
        "the clip loses NaN",
        "_numerics.cuh",
        "f.x != f.x ? f.x : fminf",
        "fminf",
        Steps((CLIP,), BF16),
    ),
    _control(
        "the clip stops one below",
        "_numerics.cuh",
        "f.y != f.y ? f.y : fminf(fmaxf(f.y, -65504.0f), 65504.0f)",
        "f.y != f.y ? f.y : fminf(fmaxf(f.y, -65504.0f), 65472.0f)",
        Every("gated_residual", "clip(round(h + round(1 * y)))", FP16),
    ),
    _control(
        "the table of gelu ends too early",
        "_gelu_table.cuh",
        "constexpr int BELOW = 0x3aff, ABOVE = 0x4180;",
        "constexpr int BELOW = 0x3aff, ABOVE = 0x4020;",
        Every("gelu_tanh", "round(gelu_tanh(x)), many at once", BF16),
    ),
    # sums
    _control(
        "lanes fold in the reversed order",
        "_numerics.cuh",
        "for (int offset = width / 2; offset > 0; offset /= 2) a =",
        "for (int offset = 1; offset < width; offset *= 2) a =",
        _RMS_FP32,
    ),
    _control(
        "a thread's accumulators join from the last on",
        "_numerics.cuh",
        "float total = a[0];\n#pragma unroll\n  for (int i = 1; i < N; i++) total = __fadd_rn(total, a[i]);",
        "float total = a[N - 1];\n#pragma unroll\n  for (int i = N - 2; i >= 0; i--) total = __fadd_rn(total, a[i]);",
        Rows("qk_norm", FP32, _HEAD, "diffusers"),
    ),
    _control(
        "squares contract with their sum",
        "_row_sum.cuh",
        "a = __fadd_rn(a, __fmul_rn(f, f));",
        "a = __fmaf_rn(f, f, a);",
        _RMS_FP32,
    ),
    _control(
        "the mean by a division",
        "_row_sum.cuh",
        "__fmul_rn(sum_of_squares(row), mean_factor(rows, WIDTH))",
        "__fdiv_rn(sum_of_squares(row), (float)WIDTH)",
        _RMS_FP32,
    ),
    _control(
        "the mean's factor is 1 / width",
        "_numerics.cuh",
        "__fdiv_rn((float)rows, (float)(rows * width))",
        "__fdiv_rn(1.0f, (float)width)",
        Steps((MEAN_FACTOR,), FP32),
    ),
    _control(
        "the tree of another number of rows",
        "rms_norm_scale.py",
        "plan, layout = reduce_plan(rows, width, 4), row_layout(x.shape, x.stride())",
        "plan, layout = reduce_plan(16, width, 4), row_layout(x.shape, x.stride())",
        Rows("rms_norm_scale", FP32, Shape(1, 3840)),
    ),
    # products
    _control(
        "the bias joins after the rounding",
        "_product.cuh",
        "f = sum(f, widen(biases[j]));",
        "f = widen(sum(round_pair<Half>(f.x, f.y), biases[j]));",
        Case("linear_gelu_tanh", "1x1024x3072 to 12288"),
    ),
    _control(
        "columns are summed up from the last to the first",
        "_product.cuh",
        "for (int k = 0; k < width; k += STEP, turn.next()) {\n      Barrier* full",
        "for (int k = width - STEP; k >= 0; k -= STEP, turn.next()) {\n      Barrier* full",
        Case("linear_swiglu", "1x1152x3840 to 10240"),
    ),
    _control(
        "silu is not rounded before the product, on the chip",
        "linear_swiglu.cu",
        "a.pair[k] = product(round_pair<Half>(silu(f.x), silu(f.y)), b.pair[k]);",
        "const float2 g = widen(b.pair[k]);\n"
        "      a.pair[k] = round_pair<Half>(__fmul_rn(silu(f.x), g.x), __fmul_rn(silu(f.y), g.y));",
        Case("linear_swiglu", "1x1152x3840 to 10240"),
    ),
    # Welford
    _control(
        "Welford's mean without an FMA",
        "_numerics.cuh",
        "const float mean = __fmaf_rn(delta, reciprocal, w.mean);",
        "const float mean = __fadd_rn(__fmul_rn(delta, reciprocal), w.mean);",
        _NORM_FP32,
    ),
    _control(
        "the two halves of Welford change places",
        "_layer_norm.cuh",
        "w = welford_combine(w, upper, count, upper_count);",
        "w = welford_combine(upper, w, upper_count, count);",
        # Where all counts are equal the formula is symmetric. Here the first thread has one vector more.
        Rows("layer_norm_modulate", FP32, Shape(256, 516)),
    ),
    _control(
        "warps fold as neighbours",
        "_layer_norm.cuh",
        "const Welford even = welford_combine(partial[0], partial[2], n[0], n[2]);\n"
        "  const Welford odd = welford_combine(partial[1], partial[3], n[1], n[3]);",
        "const Welford even = welford_combine(partial[0], partial[1], n[0], n[1]);\n"
        "  const Welford odd = welford_combine(partial[2], partial[3], n[2], n[3]);",
        _NORM_FP32,
    ),
    _control(
        "the variance by a product",
        "_layer_norm.cuh",
        "__fdiv_rn(w.m2, (float)WIDTH)",
        "__fmul_rn(w.m2, __fdiv_rn(1.0f, (float)WIDTH))",
        _NORM_FP32,
    ),
    # memory
    _control(
        "the second gate is read where the first one lies",
        "_gates.cuh",
        "is_mlp ? gates.mlp + row * gates.mlp_stride :",
        "is_mlp ? gates.msa + row * gates.msa_stride :",
        Rows("rms_norm_scale", BF16, _WIDE, "gates"),
    ),
    _control(
        "the text's gate is read where the image's lies",
        "gated_residual_norm_modulate.cu",
        "text_gate + batch * text_gate_stride",
        "gate + batch * text_gate_stride",
        Rows("gated_residual_norm_modulate", BF16, _NORM, "two streams"),
    ),
    _control(
        "one ulp in one element",
        "gated_residual.cu",
        "    store(out_row + at, o);",
        "    if (token == 3 && at == 8) words(o).x ^= 1u;\n    store(out_row + at, o);",
        Rows("gated_residual", BF16, _NORM),
    ),
    _control(
        "the last elements are not written",
        "gated_residual.cu",
        "    store(out_row + at, o);",
        "    if (at + WIDE < WIDTH) store(out_row + at, o);",
        Rows("gated_residual", FP16, _NORM),
    ),
    _control(
        "every token takes the first of two modulation rows",
        "gated_residual.cu",
        "== 0 ? 0 : gridDim.y;",
        "== 0 ? 0 : 0;",
        Rows("gated_residual", FP32, _NORM, "two rows"),
    ),
    _control(
        "a NaN is made from another",
        "_numerics.cuh",
        "__nv_bfloat162 product(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmul2_rn(a, b); }",
        "__nv_bfloat162 product(__nv_bfloat162 a, __nv_bfloat162 b) {\n"
        "  const __nv_bfloat162 p = __hmul2_rn(a, b);\n"
        "  const bool nan = widen(a.x) != widen(a.x);\n"
        "  return __nv_bfloat162{nan ? a.x : p.x, p.y};\n}",
        Steps((PRODUCT,), BF16),
        of_nan=True,
    ),
)
