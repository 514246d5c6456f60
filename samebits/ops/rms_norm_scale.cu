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
// Macros: ELEMENT; WIDTH; COLUMNS, GROUPS ATen's geometry; ROWS_PER_BLOCK rows a block (one unless a warp does a row);
// HAS_SCALE 0 or 1.

#include "_numerics.cuh"

using Element = ELEMENT;
constexpr int THREADS = COLUMNS * GROUPS;
constexpr int VECTORS = WIDTH / 4;
constexpr int STEPS = (VECTORS + THREADS - 1) / THREADS;  // vectors a thread, the last one perhaps missing
constexpr bool KEEP = STEPS * sizeof(Vector<Element, 4>) <= 320;  // the row stays in registers, else it is read again

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

// grid (blocks), block (COLUMNS, GROUPS, ROWS_PER_BLOCK)
extern "C" __global__ void __launch_bounds__(THREADS * ROWS_PER_BLOCK)
rms_norm_scale(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ scale,
               Element* __restrict__ y, int rows, int tokens, long long x_sample_stride, long long x_token_stride,
               long long scale_sample_stride, long long scale_token_stride, float mean_factor, float eps) {
  const int column = threadIdx.x, group = threadIdx.y, thread = column + COLUMNS * group;
  const int row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.z;
  if (row >= rows) return;  // whole warps only: a block with several threads a row's warps has one row
  const int sample = row / tokens, token = row - sample * tokens;
  const Element* in = x + sample * x_sample_stride + token * x_token_stride;  // (WIDTH,)

  Vector<Element, 4> kept[KEEP ? STEPS : 1];
  float a[4] = {};
#pragma unroll
  for (int i = 0; i < (KEEP ? STEPS : 0); i++) {
    if (thread + i * THREADS < VECTORS) kept[i] = load<Element, 4>(in + (thread + i * THREADS) * 4);
  }
#pragma unroll(KEEP ? STEPS : 8)
  for (int i = 0; i < STEPS; i++) {
    const int vector = thread + i * THREADS;
    if (vector >= VECTORS) break;
    const Vector<Element, 4> v = KEEP ? kept[KEEP ? i : 0] : load<Element, 4>(in + vector * 4);
    const float2 low = widen(v.pair[0]), high = widen(v.pair[1]);
    a[0] = __fadd_rn(a[0], __fmul_rn(low.x, low.x));
    a[1] = __fadd_rn(a[1], __fmul_rn(low.y, low.y));
    a[2] = __fadd_rn(a[2], __fmul_rn(high.x, high.x));
    a[3] = __fadd_rn(a[3], __fmul_rn(high.y, high.y));
  }
#pragma unroll
  for (int i = 0; i < (KEEP ? STEPS : 0); i++) forget_widened(kept[i]);
  const float total = fold_row(fold_accumulators(a), column, group);
  const float r = reciprocal_deviation(__fmul_rn(total, mean_factor), eps);

  const Element* scale_row = scale + sample * scale_sample_stride + token * scale_token_stride;  // (WIDTH,)
  Element* out = y + (long long)row * WIDTH;  // (WIDTH,)
#pragma unroll(KEEP ? STEPS : 8)
  for (int i = 0; i < STEPS; i++) {
    const int vector = thread + i * THREADS;
    if (vector >= VECTORS) break;
    const Vector<Element, 4> v = KEEP ? kept[KEEP ? i : 0] : load<Element, 4>(in + vector * 4);
    const Vector<Element, 4> w = load<Element, 4>(weight + vector * 4);
    Vector<Element, 4> s = {};
    if (HAS_SCALE) s = load<Element, 4>(scale_row + vector * 4);
    Vector<Element, 4> o;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float2 f = widen(v.pair[k]);
      o.pair[k] = product(round_pair<Element>(__fmul_rn(f.x, r), __fmul_rn(f.y, r)), w.pair[k]);
      if (HAS_SCALE) o.pair[k] = product(o.pair[k], s.pair[k]);
    }
    store(out + vector * 4, o);
  }
}
