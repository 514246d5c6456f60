// Full-width RMSNorm as diffusers spells it, times scale, in one pass:
//
//   r = rsqrt(mean(x * x) + eps)                     fp32; the order of the mean: _row_sum.cuh
//   n = round(x * r)                                 fp32 product, cast to the weight's type
//   y = round(round(n * weight) * scale)             two eager kernels, two roundings; without scale just the first
//
// Macros: ELEMENT; WIDTH; COLUMNS, GROUPS ATen's geometry; WIDE elements that one memory instruction moves (4, or 8 where
// the pointers allow); HAS_SCALE 0 or 1.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_row_sum.cuh"

// grid (rows), block as _row_sum.cuh says, shared (WIDTH,) elements
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_scale(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ scale,
               Element* __restrict__ y, int tokens, long long x_sample_stride, long long x_token_stride,
               long long scale_sample_stride, long long scale_token_stride, float eps) {
  extern __shared__ uint4 shared[];
  Element* row = reinterpret_cast<Element*>(shared);  // (WIDTH,)
  const int sample = blockIdx.x / tokens, token = blockIdx.x - sample * tokens;
  fetch_row(row, x + sample * x_sample_stride + token * x_token_stride);
  const float r = reciprocal_root_mean_square(row, eps);

  const Element* scale_row = scale + sample * scale_sample_stride + token * scale_token_stride;  // (WIDTH,)
  Element* out = y + (long long)blockIdx.x * WIDTH;                                              // (WIDTH,)
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
      if (HAS_SCALE) o.pair[k] = product(o.pair[k], s.pair[k]);
    }
    store(out + at, o);
  }
}
