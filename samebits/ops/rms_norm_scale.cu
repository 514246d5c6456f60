// Full-width RMSNorm as diffusers spells it, times scale, in one pass:
//
//   r = rsqrt(mean(x * x) + eps)                     fp32
//   n = round(x * r)                                 fp32 product, cast to the weight's type
//   y = round(round(n * weight) * scale)             two eager kernels, two roundings; without scale just the first
//
// The mean follows ATen's reduce_kernel over fp32: a block of COLUMNS x GROUPS threads sums a row. Thread (column, group)
// takes the 4-vectors column + COLUMNS * group, then every COLUMNS * GROUPS further; it keeps one accumulator for each place in
// the vector and adds them in order; columns fold by halves (across warps, then across lanes), then the groups do;
// mean = sum * factor, factor = float(rows) / float(elements). COLUMNS and GROUPS depend on the number of rows.
//
// Macros: ELEMENT; WIDTH; COLUMNS, GROUPS ATen's geometry; WIDE elements that one memory instruction moves (4, or 8 where
// the pointers allow); HAS_SCALE 0 or 1.

#include "_numerics.cuh"

using Element = ELEMENT;
constexpr int THREADS = COLUMNS * GROUPS;
// block_x_reduce and block_y_reduce: the sum lands in every thread of the row.
__device__ __forceinline__ float fold_row(float a, int column, int group) {
  if constexpr (THREADS == 32) return fold_lanes(a, 32);
  __shared__ float shared[GROUPS][COLUMNS];
  if constexpr (COLUMNS > 32) {
    for (int offset = COLUMNS / 2; offset >= 32; offset /= 2) {
      shared[group][column] = a;
      __syncthreads();
      if (column < offset) a = __fadd_rn(a, shared[group][column + offset]);
      __syncthreads();
    }
  }
  a = fold_lanes(a, 32);
  if (column == 0) shared[group][0] = a;
  __syncthreads();
  for (int offset = GROUPS / 2; offset > 0; offset /= 2) {
    if (column == 0 && group < offset) shared[group][0] = __fadd_rn(shared[group][0], shared[group + offset][0]);
    __syncthreads();
  }
  return shared[0][0];
}

// grid (rows), block (COLUMNS, GROUPS), shared (WIDTH,) elements
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_scale(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ scale,
               Element* __restrict__ y, int tokens, long long x_sample_stride, long long x_token_stride,
               long long scale_sample_stride, long long scale_token_stride, float mean_factor, float eps) {
  extern __shared__ uint4 shared[];
  Element* row = reinterpret_cast<Element*>(shared);  // (WIDTH,)
  const int column = threadIdx.x, group = threadIdx.y, thread = column + COLUMNS * group;
  const int sample = blockIdx.x / tokens, token = blockIdx.x - sample * tokens;
  const Element* in = x + sample * x_sample_stride + token * x_token_stride;  // (WIDTH,)
#pragma unroll
  for (int at = thread * WIDE; at < WIDTH; at += THREADS * WIDE) copy_async<Element, WIDE>(row + at, in + at);
  wait_for_copies();
  __syncthreads();

  float a[4] = {};
#pragma unroll
  for (int at = thread * 4; at < WIDTH; at += THREADS * 4) {
    const Vector<Element, 4> v = load<Element, 4>(row + at);
    const float2 low = widen(v.pair[0]), high = widen(v.pair[1]);
    a[0] = __fadd_rn(a[0], __fmul_rn(low.x, low.x));
    a[1] = __fadd_rn(a[1], __fmul_rn(low.y, low.y));
    a[2] = __fadd_rn(a[2], __fmul_rn(high.x, high.x));
    a[3] = __fadd_rn(a[3], __fmul_rn(high.y, high.y));
  }
  const float total = fold_row(fold_accumulators(a), column, group);
  const float r = reciprocal_deviation(__fmul_rn(total, mean_factor), eps);

  const Element* scale_row = scale + sample * scale_sample_stride + token * scale_token_stride;  // (WIDTH,)
  Element* out = y + (long long)blockIdx.x * WIDTH;  // (WIDTH,)
#pragma unroll 4
  for (int at = thread * WIDE; at < WIDTH; at += THREADS * WIDE) {
    const Vector<Element, WIDE> v = load<Element, WIDE>(row + at), w = load<Element, WIDE>(weight + at);
    Vector<Element, WIDE> s = {}, o;
    if (HAS_SCALE) s = load<Element, WIDE>(scale_row + at);
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) {
      const float2 f = widen(v.pair[k]);
      o.pair[k] = product(round_pair<Element>(__fmul_rn(f.x, r), __fmul_rn(f.y, r)), w.pair[k]);
      if (HAS_SCALE) o.pair[k] = product(o.pair[k], s.pair[k]);
    }
    store(out + at, o);
  }
}
