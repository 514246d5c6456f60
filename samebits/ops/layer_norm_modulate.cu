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
// Macros: ELEMENT the element type; WIDTH the row's length; ROWS_PER_BLOCK (row_per_warp only);
// INDEX the integer type of the per-token choice between two modulation rows, or nothing where there is one row.

#include "_numerics.cuh"

using Element = ELEMENT;
constexpr int THREADS = 128;  // ATen's threads a row
constexpr int SPAN = 4 * THREADS;  // elements that they take together in one step
constexpr int STEPS = WIDTH / SPAN;  // steps in which every thread has a vector

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

#ifndef ROWS_PER_BLOCK
// ---------------------------------------------------------------------------------------------------------------------
// One block of 128 threads a row, as in ATen. Takes every width that ATen's vectorized kernel takes.
// grid (tokens, batch), block (32, 4)
// ---------------------------------------------------------------------------------------------------------------------
constexpr int LEFT = WIDTH % SPAN / 4;  // threads that have one vector more

extern "C" __global__ void __launch_bounds__(THREADS)
row_per_block(const Element* __restrict__ x, const Element* __restrict__ scale, const Element* __restrict__ shift,
              const INDEX* __restrict__ index, Element* __restrict__ y, int tokens, long long x_batch_stride,
              long long x_token_stride, long long scale_stride, long long shift_stride, long long index_batch_stride,
              long long index_token_stride, float eps) {
  const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;
  const long long token = blockIdx.x, batch = blockIdx.y, batches = gridDim.y;
  const Element* row = x + batch * x_batch_stride + token * x_token_stride;  // (WIDTH,)

  Vector<Element, 4> v[STEPS + 1];
#pragma unroll
  for (int i = 0; i < STEPS; i++) v[i] = load<Element, 4>(row + i * SPAN + thread * 4);
  const bool has_left = thread < LEFT;
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
    const float upper_count = __shfl_down_sync(ALL_LANES, count, offset);
    w = welford_combine(w, upper, count, upper_count);
    count = __fadd_rn(count, upper_count);
  }

  __shared__ Welford partial[4];
  __shared__ float counts[4];
  if (lane == 0) partial[warp] = w, counts[warp] = count;
  __syncthreads();
  const Welford even = welford_combine(partial[0], partial[2], counts[0], counts[2]);
  const Welford odd = welford_combine(partial[1], partial[3], counts[1], counts[3]);
  w = welford_combine(even, odd, __fadd_rn(counts[0], counts[2]), __fadd_rn(counts[1], counts[3]));
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

#else
// ---------------------------------------------------------------------------------------------------------------------
// One warp a row, each lane standing for four of ATen's threads: for half precision and widths of whole steps.
//
// A lane loads 16 bytes at a time. Within each step of 512 elements its first vector holds the values of ATen's
// threads 2 * lane and 2 * lane + 1, its second those of threads 64 + 2 * lane and 65 + 2 * lane. So lanes 0-15 carry
// ATen's warps 0 and 2, lanes 16-31 its warps 1 and 3, and no fold needs more than shuffles.
// grid (blocks, batch), block (32, ROWS_PER_BLOCK), shared: (1 + scale) and shift of every modulation row
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ Welford row_statistics(const Vector<Element, 8> (&v)[STEPS][2]) {
  Welford w[4] = {};  // ATen's threads 2 * lane, 2 * lane + 1, 64 + 2 * lane, 65 + 2 * lane
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const float2 f = widen(v[i][t / 2].pair[t % 2 * 2 + k / 2]);
        welford_push(w[t], k % 2 ? f.y : f.x, 1.0f / (4 * i + k + 1));
      }
    }
  }
  float count = 4 * STEPS;
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {  // ATen's lane offsets 16, 8, 4, 2
#pragma unroll
    for (int t = 0; t < 4; t++) w[t] = welford_combine(w[t], shuffle_down(w[t], offset, 16), count, count);
    count *= 2;
  }
  const Welford low = welford_combine(w[0], w[1], count, count);  // offset 1 of warps 0 (lane 0) and 1 (lane 16)
  const Welford high = welford_combine(w[2], w[3], count, count);  // the same of warps 2 and 3
  const Welford half = welford_combine(low, high, 2 * count, 2 * count);  // warps (0,2) and (1,3)
  const Welford other{__shfl_sync(ALL_LANES, half.mean, 16), __shfl_sync(ALL_LANES, half.m2, 16)};
  const Welford whole = welford_combine(half, other, 4 * count, 4 * count);
  return Welford{__shfl_sync(ALL_LANES, whole.mean, 0), __shfl_sync(ALL_LANES, whole.m2, 0)};
}

extern "C" __global__ void __launch_bounds__(32 * ROWS_PER_BLOCK, BLOCKS_PER_SM)
row_per_warp(const Element* __restrict__ x, const Element* __restrict__ scale, const Element* __restrict__ shift,
             const INDEX* __restrict__ index, Element* __restrict__ y, int tokens, long long x_batch_stride,
             long long x_token_stride, long long scale_stride, long long shift_stride, long long index_batch_stride,
             long long index_token_stride, float eps) {
  extern __shared__ uint4 shared[];
  using Vector8 = Vector<Element, 8>;
  constexpr int VECTORS = WIDTH / 8;
  Vector8* gain = reinterpret_cast<Vector8*>(shared);  // (MODULATIONS, WIDTH): 1 + scale
  Vector8* offset = gain + MODULATIONS * VECTORS;  // (MODULATIONS, WIDTH): shift
  const int lane = threadIdx.x, stride = gridDim.x * ROWS_PER_BLOCK;
  const long long batch = blockIdx.y, batches = gridDim.y;
  int token = blockIdx.x * ROWS_PER_BLOCK + threadIdx.y;

  Vector8 v[STEPS][2];
  auto load_row = [&](int at) {
    const Element* row = x + batch * x_batch_stride + at * x_token_stride;  // (WIDTH,)
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      v[i][0] = load<Element, 8>(row + i * SPAN + lane * 8);
      v[i][1] = load<Element, 8>(row + i * SPAN + 256 + lane * 8);
    }
  };
  if (token < tokens) load_row(token);  // in flight while the block prepares the modulation

  for (int j = threadIdx.y * 32 + lane; j < MODULATIONS * VECTORS; j += 32 * ROWS_PER_BLOCK) {
    const long long modulation = batch + batches * (j / VECTORS);
    const Vector8 s = load<Element, 8>(scale + modulation * scale_stride + j % VECTORS * 8);
    Vector8 g;
#pragma unroll
    for (int k = 0; k < 4; k++) g.pair[k] = one_plus<Element>(s.pair[k]);
    gain[j] = g;
    offset[j] = load<Element, 8>(shift + modulation * shift_stride + j % VECTORS * 8);
  }
  __syncthreads();

  while (token < tokens) {
    const Welford w = row_statistics(v);
#pragma unroll
    for (int i = 0; i < STEPS; i++) forget_widened(v[i][0]), forget_widened(v[i][1]);
    const float rstd = reciprocal_deviation(__fdiv_rn(w.m2, (float)WIDTH), eps);
    const int m = modulation_of(index, batch * index_batch_stride + token * index_token_stride) * VECTORS;
    Element* out = y + (batch * tokens + token) * WIDTH;  // (WIDTH,)
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int j = i * (SPAN / 8) + h * 32 + lane;
        const Vector8 g = gain[m + j], t = offset[m + j];
        Vector8 o;
#pragma unroll
        for (int k = 0; k < 4; k++) o.pair[k] = normalize_modulate(v[i][h].pair[k], w.mean, rstd, g.pair[k], t.pair[k]);
        store(out + j * 8, o);
      }
    }
    token += stride;
    if (token < tokens) load_row(token);
  }
}

#endif
