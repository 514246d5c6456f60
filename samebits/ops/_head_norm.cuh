// Per-head RMSNorm: three references are in use; r is 1 / sqrt(mean square + eps):
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
// Needs: `Element`, `Weight`, the types of x and of the weight (the result has the weight's); HEAD_DIM; REFERENCE one of the
// three; VECTOR ATen's vector length, not defined for half precision and heads of 128.

#pragma once

#include "_numerics.cuh"

constexpr int DIFFUSERS = 0, NATIVE = 1, TORCH = 2;
constexpr int WARPS = 8;  // warps a block

// x * x as `pow(2)` computes it: in fp32 (DIFFUSERS), or rounded to the element type (NATIVE).
__device__ __forceinline__ float square(float x) {
  const float s = __fmul_rn(x, x);
  return REFERENCE == NATIVE ? widen(round_to<Element>(s)) : s;
}

// One more value in a thread's own sum.
__device__ __forceinline__ float accumulate(float total, float x) {
  return REFERENCE == TORCH ? __fmaf_rn(x, x, total) : __fadd_rn(total, square(x));
}

// From a row's sum of squares to r; the mean's factor depends on how many rows eager reduces at once.
__device__ __forceinline__ float reciprocal_root(float total, int rows, float eps) {
  if (REFERENCE == TORCH) return reciprocal_deviation(__fdiv_rn(total, (float)HEAD_DIM), eps);
  const float mean = __fmul_rn(total, mean_factor(rows, HEAD_DIM));
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
// Half precision, heads of 128: sixteen lanes a row, 16 bytes a lane; a half warp has several rows in flight.
//
// A lane's eight elements are those of ATen's threads 2 * lane and 2 * lane + 1 (4-vectors), or of its thread `lane`
// (NATIVE: 8-vectors). ATen's offsets 16, 8, 4, 2 are lane offsets 8, 4, 2, 1 here; its offset 1 stays in the lane.
// ---------------------------------------------------------------------------------------------------------------------
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

// A lane's eight elements of one row, normalised and weighted.
struct Eight {
  Pair<Weight> pair[4];
};

__device__ __forceinline__ Eight normalize(const Vector<Element, 8>& v, const Vector<Weight, 4> (&weight)[2], int rows, float eps) {
  const float r = reciprocal_root(sum_of_squares(v), rows, eps);
  Eight y;
#pragma unroll
  for (int j = 0; j < 4; j++) y.pair[j] = weigh(widen(v.pair[j]), r, weight[j / 2].pair[j % 2]);
  return y;
}

__device__ __forceinline__ void store_eight(Weight* out, const Eight& y) {
  if constexpr (sizeof(Weight) == 2) {
    store(out, Vector<Weight, 8>{y.pair[0], y.pair[1], y.pair[2], y.pair[3]});
  } else {
    store(out, Vector<Weight, 4>{y.pair[0], y.pair[1]});
    store(out + 4, Vector<Weight, 4>{y.pair[2], y.pair[3]});
  }
}

#else
// ---------------------------------------------------------------------------------------------------------------------
// Any element type and head_dim: one warp a row; lane l stands for ATen's threads l and, where it uses more than one
// warp, l + 32. Element i of step k of thread t is VECTOR * (t + k * COLUMNS) + i; without vectors ATen keeps four
// accumulators and step k goes to the k % 4th.
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

// r of a row; every lane gets it. With fewer than 32 columns only the first lanes hold the sum.
template <int COLUMNS> __device__ __forceinline__ float row_reciprocal_root(const Element* x, int lane, int rows, float eps) {
  return reciprocal_root(__shfl_sync(ALL_LANES, sum_of_squares<COLUMNS>(x, lane), 0), rows, eps);
}
#endif
