// Full-width RMSNorm as diffusers spells it, times (1 + scale), in one pass:
//
//   r = rsqrt(mean(x * x) + eps)                     fp32; the order of the mean: _row_sum.cuh
//   n = round(x * r)                                 fp32 product, cast to the weight's type
//   g = round(1 + scale)                             its own eager kernel
//   y = round(round(n * weight) * g)                 two eager kernels, two roundings; without scale just the first
//
// With HAS_GATES also the tanh of two gates: _gates.cuh. With an input_scale y is quantised on its way out: _quantize.cuh.
//
// Macros: ELEMENT; WIDTH; COLUMNS, GROUPS ATen's geometry; WIDE elements that one memory instruction moves (4, or 8 where
// the pointers allow); HAS_SCALE, HAS_GATES 0 or 1; AHEAD, the blocks of a multiprocessor that stay and take one row after another,
// the next one already on its way, or 0 where every block takes one row; QUANTIZED where y becomes e4m3.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_gates.cuh"
#include "_quantize.cuh"
#include "_row_sum.cuh"

// grid (gate_blocks + rows), or with AHEAD as many as stay; block as _row_sum.cuh says; shared (WIDTH,) elements, with AHEAD (2, WIDTH)
extern "C" __global__ void __launch_bounds__(THREADS, AHEAD ? AHEAD : 1)
rms_norm_scale(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ scale,
               const Element* __restrict__ gate_msa, const Element* __restrict__ gate_mlp,
               const float* __restrict__ input_scale, Result* __restrict__ y,
               Element* __restrict__ gate_msa_out, Element* __restrict__ gate_mlp_out, int rows, int tokens,
               long long x_sample_stride, long long x_token_stride, long long scale_sample_stride,
               long long scale_token_stride, int gate_blocks, int gate_rows, long long gate_msa_stride,
               long long gate_mlp_stride, float eps) {
  extern __shared__ uint4 shared[];
  if (HAS_GATES && (int)blockIdx.x < gate_blocks) {
    open_gates(Gates{gate_msa, gate_mlp, gate_msa_out, gate_mlp_out, gate_rows, gate_msa_stride, gate_mlp_stride}, blockIdx.x);
    return;
  }
  Element* row = reinterpret_cast<Element*>(shared);  // (WIDTH,)
  Element* row_ahead = row + WIDTH;                   // (WIDTH,), with AHEAD
  const float factor = result_factor(input_scale);
  unsigned index = blockIdx.x - (HAS_GATES ? gate_blocks : 0);
  unsigned sample = index / tokens, token = index - sample * tokens;
  begin_row(row, x + sample * x_sample_stride + token * x_token_stride);
  while (true) {
    await_row();
    const Element* scale_row = scale + sample * scale_sample_stride + token * scale_token_stride;  // (WIDTH,)
    Result* out = y + (long long)index * WIDTH;                                                    // (WIDTH,)
    index += gridDim.x - (HAS_GATES ? gate_blocks : 0);
    const bool has_more = AHEAD && index < (unsigned)rows;
    if (has_more) {
      sample = index / tokens, token = index - sample * tokens;
      begin_row(row_ahead, x + sample * x_sample_stride + token * x_token_stride);
    }
    const float r = reciprocal_root_mean_square(row, rows, eps);
#pragma unroll
    for (int i = 0; i < steps(WIDE); i++) {
      const int at = element_of(i, WIDE);
      if (at >= WIDTH) break;
      const Vector<Element, WIDE> v = load<Element, WIDE>(row + at), w = load<Element, WIDE>(weight + at);
      Vector<Element, WIDE> s = {}, o;
      if (HAS_SCALE) s = load<Element, WIDE>(scale_row + at);
#pragma unroll
      for (int k = 0; k < WIDE / 2; k++) {
        o.pair[k] = rms_norm(v.pair[k], r, w.pair[k]);
        if (HAS_SCALE) o.pair[k] = product(o.pair[k], one_plus<Element>(s.pair[k]));
      }
      store_result<WIDE>(out + at, o, factor);
    }
    if (!has_more) break;
    Element* done = row;
    row = row_ahead, row_ahead = done;
  }
}
