// LayerNorm without weight or bias, times (1 + scale), plus shift, in one pass:
//
//   n = round(rstd * (x - mean))          LayerNorm: statistics in fp32, one rounding to the element type
//   g = round(1 + scale)                  its own eager kernel, so its own rounding
//   y = round(round(n * g) + shift)       two eager kernels, two roundings
//
// The statistics follow ATen's vectorized_layer_norm_kernel: 128 threads a row, thread t takes the 4-vectors
// t, t + 128, t + 256, ...; each thread runs Welford's recurrence over its values in order; lanes fold by offsets
// 16, 8, 4, 2, 1; then warps (0,2) and (1,3) and the two results; variance = m2 / width, a division.
//
// A block here is laid out as ATen's, so every width that its kernel takes is taken here.
//
// Macros: ELEMENT the element type; WIDTH the row's length; INDEX the integer type of the per-token choice between two
// modulation rows, not defined where there is one row.

#include "_numerics.cuh"

using Element = ELEMENT;
constexpr int THREADS = 128;  // ATen's threads a row
constexpr int SPAN = 4 * THREADS;  // elements that they take together in one step
constexpr int STEPS = WIDTH / SPAN;  // steps in which every thread has a vector
constexpr int LEFT = WIDTH % SPAN / 4;  // threads that have one vector more

#ifdef INDEX
constexpr int MODULATIONS = 2;
#else
constexpr int MODULATIONS = 1;
#define INDEX int
#endif

// Which of the two modulation rows a token uses: `torch.where(index == 0, first, second)`.
__device__ __forceinline__ int modulation_of(const INDEX* index, long long offset) {
  return MODULATIONS == 2 ? (index[offset] == 0 ? 0 : 1) : 0;
}

// y = round(round(round(rstd * (x - mean)) * g) + shift), for two neighbouring elements.
__device__ __forceinline__ Pair<Element> normalize_modulate(Pair<Element> x, float mean, float rstd, Pair<Element> g, Pair<Element> shift) {
  const float2 f = widen(x);
  const Pair<Element> n = round_pair<Element>(__fmul_rn(rstd, __fsub_rn(f.x, mean)), __fmul_rn(rstd, __fsub_rn(f.y, mean)));
  return sum(product(n, g), shift);
}

// grid (tokens, batch), block (32, 4)
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_modulate(const Element* __restrict__ x, const Element* __restrict__ scale, const Element* __restrict__ shift,
                    const INDEX* __restrict__ index, Element* __restrict__ y, int tokens, long long x_batch_stride,
                    long long x_token_stride, long long scale_stride, long long shift_stride, long long index_batch_stride,
                    long long index_token_stride, float eps) {
  const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;
  const long long token = blockIdx.x, batch = blockIdx.y, batches = gridDim.y;
  const Element* row = x + batch * x_batch_stride + token * x_token_stride;  // (WIDTH,)

  Vector<Element, 4> v[STEPS + 1];
#pragma unroll
  for (int i = 0; i < STEPS; i++) v[i] = load<Element, 4>(row + i * SPAN + thread * 4);
  const bool has_left = LEFT > 0 && thread < LEFT;
  if (has_left) v[STEPS] = load<Element, 4>(row + STEPS * SPAN + thread * 4);

  Welford w{0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (i == STEPS && !has_left) break;
    const float2 a = widen(v[i].pair[0]), b = widen(v[i].pair[1]);
    welford_push(w, a.x, 1.0f / (4 * i + 1));
    welford_push(w, a.y, 1.0f / (4 * i + 2));
    welford_push(w, b.x, 1.0f / (4 * i + 3));
    welford_push(w, b.y, 1.0f / (4 * i + 4));
  }

  float count = 4 * STEPS + (has_left ? 4 : 0);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Welford upper = shuffle_down(w, offset);
    const float upper_count = LEFT == 0 ? count : __shfl_down_sync(ALL_LANES, count, offset);
    w = welford_combine(w, upper, count, upper_count);
    count += upper_count;
  }

  __shared__ Welford partial[4];
  __shared__ float counts[4];
  if (lane == 0) partial[warp] = w, counts[warp] = count;
  __syncthreads();
  float n[4];
#pragma unroll
  for (int i = 0; i < 4; i++) n[i] = LEFT == 0 ? 128.0f * STEPS : counts[i];
  const Welford even = welford_combine(partial[0], partial[2], n[0], n[2]);
  const Welford odd = welford_combine(partial[1], partial[3], n[1], n[3]);
  w = welford_combine(even, odd, n[0] + n[2], n[1] + n[3]);
  const float rstd = reciprocal_deviation(__fdiv_rn(w.m2, (float)WIDTH), eps);

  const long long modulation = batch + batches * modulation_of(index, batch * index_batch_stride + token * index_token_stride);
  const Element* scale_row = scale + modulation * scale_stride;  // (WIDTH,)
  const Element* shift_row = shift + modulation * shift_stride;  // (WIDTH,)
  Element* out = y + (batch * tokens + token) * WIDTH;  // (WIDTH,)
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (i == STEPS && !has_left) break;
    const int at = i * SPAN + thread * 4;
    const Vector<Element, 4> s = load<Element, 4>(scale_row + at), t = load<Element, 4>(shift_row + at);
    Vector<Element, 4> o;
#pragma unroll
    for (int k = 0; k < 2; k++) o.pair[k] = normalize_modulate(v[i].pair[k], w.mean, rstd, one_plus<Element>(s.pair[k]), t.pair[k]);
    store(out + at, o);
  }
}
