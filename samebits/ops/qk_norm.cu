// Per-head RMSNorm of query and key in one launch. Three references are in use; r is 1 / sqrt(mean square + eps):
//
//   DIFFUSERS  y = round(round(x * r) * weight)   mean square and r in fp32; with an fp32 weight nothing is rounded to half
//   NATIVE     the same chain all in half precision: squares, their mean, the sum with eps, r and both products are
//              each rounded to the element type
//   TORCH      y = round(weight * (r * x))        torch's fused kernel: fp32 inside, one rounding at the end
//
// The mean square of DIFFUSERS and NATIVE follows ATen's reduce_kernel (COLUMNS threads a row, VECTOR-wide loads, lane
// accumulators in order, lanes folded by halves, then one product with the factor float(rows) / float(elements)); that of
// TORCH follows vectorized_layer_norm_kernel (128 threads a row, 4-vectors, fma, fold by halves, a division).
//
// Macros: ELEMENT, WEIGHT the types of x and of the weight (the result has the weight's); HEAD_DIM; Q_HEADS, K_HEADS;
// REFERENCE one of the three; Q_COLUMNS, K_COLUMNS, VECTOR ATen's geometry (any_head_dim only).

#include "_numerics.cuh"

using Element = ELEMENT;
using Weight = WEIGHT;
constexpr int DIFFUSERS = 0, NATIVE = 1, TORCH = 2;
constexpr int WARPS = 8;  // warps a block

// The two tensors of a launch: blockIdx.y picks one. Element (row, i) lies at
// (row / heads / tokens) * sample_stride + (row / heads % tokens) * token_stride + (row % heads) * head_stride + i.
struct Rows {
  const Element* x;
  const Weight* weight;  // (HEAD_DIM,)
  Weight* y;             // (rows, HEAD_DIM)
  int rows, tokens;
  long long sample_stride, token_stride, head_stride;
  float mean_factor;

  __device__ __forceinline__ const Element* row(int index, int heads) const {
    const int token = index / heads, head = index - token * heads;
    const int sample = token < tokens ? 0 : token / tokens;
    return x + sample * sample_stride + (token - sample * tokens) * token_stride + head * head_stride;
  }
};

// x * x as `pow(2)` computes it: in fp32 (DIFFUSERS), or rounded to the element type (NATIVE).
__device__ __forceinline__ float square(float x) {
  const float s = __fmul_rn(x, x);
  return REFERENCE == NATIVE ? widen(round_to<Element>(s)) : s;
}

// One more value in a thread's own sum.
__device__ __forceinline__ float accumulate(float total, float x) {
  return REFERENCE == TORCH ? __fmaf_rn(x, x, total) : __fadd_rn(total, square(x));
}

// From the row's sum of squares to r.
__device__ __forceinline__ float reciprocal_root(float total, float mean_factor, float eps) {
  if (REFERENCE == TORCH) return reciprocal_deviation(__fdiv_rn(total, (float)HEAD_DIM), eps);
  const float mean = __fmul_rn(total, mean_factor);
  if (REFERENCE == DIFFUSERS) return reciprocal_deviation(mean, eps);
  const float shifted = widen(round_to<Element>(__fadd_rn(widen(round_to<Element>(mean)), eps)));
  return widen(round_to<Element>(rsqrtf(shifted)));
}

// A pair of elements, normalised and weighted.
__device__ __forceinline__ Pair<Weight> weigh(float2 x, float r, Pair<Weight> weight) {
  if (REFERENCE == TORCH) {
    const float2 w = widen(weight);
    return round_pair<Weight>(__fmul_rn(w.x, __fmul_rn(r, x.x)), __fmul_rn(w.y, __fmul_rn(r, x.y)));
  }
  return product(round_pair<Weight>(__fmul_rn(x.x, r), __fmul_rn(x.y, r)), weight);
}

#ifndef VECTOR
// ---------------------------------------------------------------------------------------------------------------------
// Half precision, heads of 128: sixteen lanes a row, 16 bytes a lane, ROWS_AHEAD rows of each half warp in flight.
//
// A lane's eight elements are those of ATen's threads 2 * lane and 2 * lane + 1 (4-vectors), or of its thread `lane`
// (NATIVE: 8-vectors). ATen's offsets 16, 8, 4, 2 are lane offsets 8, 4, 2, 1 here; its offset 1 stays in the lane.
// grid (blocks, 2), block (32, WARPS)
// ---------------------------------------------------------------------------------------------------------------------
constexpr int ROWS_AHEAD = 4;
constexpr int ROWS_PER_WARP = 2 * ROWS_AHEAD;

__device__ __forceinline__ float sum_of_squares(const Vector<Element, 8>& v) {
  float2 f[4];
#pragma unroll
  for (int k = 0; k < 4; k++) f[k] = widen(v.pair[k]);
  if (REFERENCE == TORCH) {
    float even = accumulate(accumulate(accumulate(accumulate(0.0f, f[0].x), f[0].y), f[1].x), f[1].y);
    float odd = accumulate(accumulate(accumulate(accumulate(0.0f, f[2].x), f[2].y), f[3].x), f[3].y);
    return __fadd_rn(fold_lanes(even, 16), fold_lanes(odd, 16));
  }
  const float s[8] = {square(f[0].x), square(f[0].y), square(f[1].x), square(f[1].y),
                      square(f[2].x), square(f[2].y), square(f[3].x), square(f[3].y)};
  if (REFERENCE == NATIVE) return fold_lanes(fold_accumulators(s), 16);
  const float even[4] = {s[0], s[1], s[2], s[3]}, odd[4] = {s[4], s[5], s[6], s[7]};
  return __fadd_rn(fold_lanes(fold_accumulators(even), 16), fold_lanes(fold_accumulators(odd), 16));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
heads_of_128(const Element* __restrict__ q, const Element* __restrict__ k, const Weight* __restrict__ q_weight,
             const Weight* __restrict__ k_weight, Weight* __restrict__ q_out, Weight* __restrict__ k_out, int q_rows,
             int k_rows, int q_tokens, int k_tokens, long long q_sample_stride, long long q_token_stride,
             long long q_head_stride, long long k_sample_stride, long long k_token_stride, long long k_head_stride,
             float q_mean_factor, float k_mean_factor, float eps) {
  const bool is_key = blockIdx.y;
  const Rows t = is_key ? Rows{k, k_weight, k_out, k_rows, k_tokens, k_sample_stride, k_token_stride, k_head_stride, k_mean_factor}
                        : Rows{q, q_weight, q_out, q_rows, q_tokens, q_sample_stride, q_token_stride, q_head_stride, q_mean_factor};
  const int lane = threadIdx.x % 16, half = threadIdx.x / 16;
  const int first = (blockIdx.x * WARPS + threadIdx.y) * ROWS_PER_WARP + half;

  Vector<Element, 8> v[ROWS_AHEAD] = {};
#pragma unroll
  for (int i = 0; i < ROWS_AHEAD; i++) {
    const int row = first + 2 * i;
    if (row < t.rows) v[i] = load<Element, 8>((is_key ? t.row(row, K_HEADS) : t.row(row, Q_HEADS)) + lane * 8);
  }
  Vector<Weight, 4> w[2];
#pragma unroll
  for (int i = 0; i < 2; i++) w[i] = load<Weight, 4>(t.weight + lane * 8 + i * 4);

#pragma unroll
  for (int i = 0; i < ROWS_AHEAD; i++) {
    const int row = first + 2 * i;
    const float r = reciprocal_root(sum_of_squares(v[i]), t.mean_factor, eps);
    if (row >= t.rows) continue;
    Weight* out = t.y + (long long)row * HEAD_DIM + lane * 8;
    if constexpr (sizeof(Weight) == 2) {
      Vector<Weight, 8> o;
#pragma unroll
      for (int j = 0; j < 4; j++) o.pair[j] = weigh(widen(v[i].pair[j]), r, w[j / 2].pair[j % 2]);
      store(out, o);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        Vector<Weight, 4> o;
#pragma unroll
        for (int j = 0; j < 2; j++) o.pair[j] = weigh(widen(v[i].pair[h * 2 + j]), r, w[h].pair[j]);
        store(out + h * 4, o);
      }
    }
  }
}

#else
// ---------------------------------------------------------------------------------------------------------------------
// Any element type and head_dim: one warp a row; lane l stands for ATen's threads l and, where it uses more than one
// warp, l + 32. Element i of step k of thread t is VECTOR * (t + k * COLUMNS) + i; without vectors ATen keeps four
// accumulators and step k goes to the k % 4th.
// grid (blocks, 2), block (32, WARPS)
// ---------------------------------------------------------------------------------------------------------------------
template <int COLUMNS> __device__ __forceinline__ float sum_of_squares(const Element* x, int lane) {
  constexpr int STAND_FOR = (COLUMNS + 31) / 32;  // ATen threads a lane stands for
  constexpr int LANES = COLUMNS < 32 ? COLUMNS : 32;
  constexpr int STEPS = (HEAD_DIM / VECTOR + COLUMNS - 1) / COLUMNS;
  constexpr int ACCUMULATORS = REFERENCE == TORCH ? 1 : VECTOR == 1 ? 4 : VECTOR;

  float totals[STAND_FOR];
#pragma unroll
  for (int thread = 0; thread < STAND_FOR; thread++) {
    float a[ACCUMULATORS] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int at = VECTOR * (lane + 32 * thread + step * COLUMNS);
      if (lane >= LANES || at >= HEAD_DIM) continue;
#pragma unroll
      for (int i = 0; i < VECTOR; i++) {
        float& total = a[(VECTOR == 1 ? step : i) % ACCUMULATORS];
        total = accumulate(total, widen(x[at + i]));
      }
    }
    totals[thread] = fold_accumulators(a);
  }
  // reduce_kernel folds its warps before the lanes, the LayerNorm kernel its lanes before the warps.
  if (STAND_FOR == 1) return fold_lanes(totals[0], LANES);
  const float second = totals[STAND_FOR - 1];
  if (REFERENCE == TORCH) return __fadd_rn(fold_lanes(totals[0], 32), fold_lanes(second, 32));
  return fold_lanes(__fadd_rn(totals[0], second), 32);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
any_head_dim(const Element* __restrict__ q, const Element* __restrict__ k, const Weight* __restrict__ q_weight,
             const Weight* __restrict__ k_weight, Weight* __restrict__ q_out, Weight* __restrict__ k_out, int q_rows,
             int k_rows, int q_tokens, int k_tokens, long long q_sample_stride, long long q_token_stride,
             long long q_head_stride, long long k_sample_stride, long long k_token_stride, long long k_head_stride,
             float q_mean_factor, float k_mean_factor, float eps) {
  const bool is_key = blockIdx.y;
  const Rows t = is_key ? Rows{k, k_weight, k_out, k_rows, k_tokens, k_sample_stride, k_token_stride, k_head_stride, k_mean_factor}
                        : Rows{q, q_weight, q_out, q_rows, q_tokens, q_sample_stride, q_token_stride, q_head_stride, q_mean_factor};
  const int lane = threadIdx.x, row = blockIdx.x * WARPS + threadIdx.y;
  if (row >= t.rows) return;
  const Element* x = is_key ? t.row(row, K_HEADS) : t.row(row, Q_HEADS);  // (HEAD_DIM,)
  const float total = is_key ? sum_of_squares<K_COLUMNS>(x, lane) : sum_of_squares<Q_COLUMNS>(x, lane);
  // With fewer than 32 columns only the first lanes hold the sum.
  const float r = reciprocal_root(__shfl_sync(ALL_LANES, total, 0), t.mean_factor, eps);

  Weight* out = t.y + (long long)row * HEAD_DIM;  // (HEAD_DIM,)
#pragma unroll
  for (int i = 0; i < HEAD_DIM; i += 64) {
    const int at = i + 2 * lane;
    if (at >= HEAD_DIM) break;
    const Vector<Weight, 2> w = load<Weight, 2>(t.weight + at);
    Vector<Weight, 2> o;
    o.pair[0] = weigh(make_float2(widen(x[at]), widen(x[at + 1])), r, w.pair[0]);
    store(out + at, o);
  }
}
#endif
