// Full-width RMSNorm as diffusers spells it, times (1 + scale), in one pass:
//
//   r = rsqrt(mean(x * x) + eps)                     fp32; the order of the mean: _row_sum.cuh
//   n = round(x * r)                                 fp32 product, cast to the weight's type
//   g = round(1 + scale)                             its own eager kernel
//   y = round(round(n * weight) * g)                 two eager kernels, two roundings; without scale just the first
//   t = round(tanh(gate))                            of two gates, which the block needs later; its own eager kernel
//
// Macros: ELEMENT; WIDTH; COLUMNS, GROUPS ATen's geometry; WIDE elements that one memory instruction moves (4, or 8 where
// the pointers allow); HAS_SCALE, HAS_GATES 0 or 1.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_row_sum.cuh"

// One vector of the gates, which lie one after the other, (2, gate_rows, WIDTH): `at` counts vectors.
__device__ __forceinline__ void open_gate(const Element* gate, const Element* next_gate, Element* gate_out, Element* next_gate_out,
                                          int at, int gate_rows, long long gate_stride, long long next_gate_stride) {
  constexpr int VECTORS = WIDTH / WIDE;
  const bool is_next = at >= gate_rows * VECTORS;
  if (is_next) at -= gate_rows * VECTORS;
  const int row = at / VECTORS, column = (at - row * VECTORS) * WIDE;
  if (row >= gate_rows) return;
  const Element* from = is_next ? next_gate + row * next_gate_stride : gate + row * gate_stride;  // (WIDTH,)
  const Vector<Element, WIDE> v = load<Element, WIDE>(from + column);
  Vector<Element, WIDE> o;
#pragma unroll
  for (int k = 0; k < WIDE / 2; k++) o.pair[k] = tanh_of<Element>(v.pair[k]);
  store((is_next ? next_gate_out : gate_out) + (long long)row * WIDTH + column, o);
}

// grid (gate_blocks + rows), block as _row_sum.cuh says, shared (WIDTH,) elements. The first blocks have the gates, a vector a
// thread: a few elements, computed here while the rows are on their way.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_scale(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ scale,
               const Element* __restrict__ gate, const Element* __restrict__ next_gate, Element* __restrict__ y,
               Element* __restrict__ gate_out, Element* __restrict__ next_gate_out, int rows, int tokens,
               long long x_sample_stride, long long x_token_stride, long long scale_sample_stride,
               long long scale_token_stride, int gate_blocks, int gate_rows, long long gate_stride,
               long long next_gate_stride, float eps) {
  extern __shared__ uint4 shared[];
  int index = blockIdx.x;
  if (HAS_GATES) {
    if (index < gate_blocks) {
      open_gate(gate, next_gate, gate_out, next_gate_out, index * THREADS + thread_of_row(), gate_rows, gate_stride, next_gate_stride);
      return;
    }
    index -= gate_blocks;
  }
  Element* row = reinterpret_cast<Element*>(shared);  // (WIDTH,)
  const int sample = index / tokens, token = index - sample * tokens;
  fetch_row(row, x + sample * x_sample_stride + token * x_token_stride);
  const float r = reciprocal_root_mean_square(row, rows, eps);

  const Element* scale_row = scale + sample * scale_sample_stride + token * scale_token_stride;  // (WIDTH,)
  Element* out = y + (long long)index * WIDTH;                                                   // (WIDTH,)
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
    store(out + at, o);
  }
}
