// LayerNorm without weight or bias, times (1 + scale), plus shift, in one pass:
//
//   n = round(rstd * (x - mean))          LayerNorm: statistics in fp32, one rounding to the element type
//   g = round(1 + scale)                  its own eager kernel, so its own rounding
//   y = round(round(n * g) + shift)       two eager kernels, two roundings
//
// A block takes one row after another, as far apart as there are blocks; with AHEAD the next one is already on its way.
//
// With an input_scale y is quantised on its way out: _quantize.cuh.
//
// Macros: ELEMENT the element type; WIDTH the row's length; AHEAD 0 or 1; BLOCKS of a multiprocessor; INDEX the integer type of
// the per-token choice between two modulation rows, not defined where there is one row; QUANTIZED where y becomes e4m3.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_layer_norm.cuh"
#include "_quantize.cuh"

__device__ __forceinline__ void load_row(Share& v, const Element* row) {
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (has_vector(i)) v[i] = load<Element, 4>(row + element_of(i));
  }
}

// grid (blocks, batch), block (32, 4)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
layer_norm_modulate(const Element* __restrict__ x, const Element* __restrict__ scale, const Element* __restrict__ shift,
                    const INDEX* __restrict__ index, const float* __restrict__ input_scale, Result* __restrict__ y, int tokens,
                    long long x_batch_stride, long long x_token_stride, long long scale_stride, long long shift_stride, long long index_batch_stride,
                    long long index_token_stride, float eps) {
  const long long batch = blockIdx.y;
  const float factor = result_factor(input_scale);
  const Element* first = x + batch * x_batch_stride;  // (tokens, WIDTH)
  long long token = blockIdx.x;
  Share v, ahead;
  load_row(v, first + token * x_token_stride);
  for (int turn = 0;; turn++) {
    const long long next = token + gridDim.x;
    const bool has_more = next < tokens;
    if (AHEAD && has_more) load_row(ahead, first + next * x_token_stride);
    const Statistics statistics = layer_norm_statistics(v, eps, turn);
    if (AHEAD) {
#pragma unroll
      for (int i = 0; i < STEPS + 1; i++) {
        if (has_vector(i)) forget_widened(v[i]);
      }
    }

    const long long modulation = modulation_row(index, batch * index_batch_stride + token * index_token_stride);
    const Element* scale_row = scale + modulation * scale_stride;  // (WIDTH,)
    const Element* shift_row = shift + modulation * shift_stride;  // (WIDTH,)
    Result* out = y + (batch * tokens + token) * WIDTH;            // (WIDTH,)
#pragma unroll
    for (int i = 0; i < STEPS + 1; i++) {
      if (!has_vector(i)) break;
      const int at = element_of(i);
      const Vector<Element, 4> s = load<Element, 4>(scale_row + at), t = load<Element, 4>(shift_row + at);
      Vector<Element, 4> o;
#pragma unroll
      for (int k = 0; k < 2; k++) o.pair[k] = normalize_modulate(v[i].pair[k], statistics, s.pair[k], t.pair[k]);
      store_result<4>(out + at, o, factor);
    }
    if (!has_more) return;
    token = next;
    if (AHEAD) {
#pragma unroll
      for (int i = 0; i < STEPS + 1; i++) v[i] = ahead[i];
    } else {
      load_row(v, first + token * x_token_stride);
    }
  }
}
