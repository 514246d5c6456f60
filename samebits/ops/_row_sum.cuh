// The mean of squares of one row, as ATen's reduce_kernel sums it over fp32, by a block laid out as ATen's.
//
// A block of COLUMNS x GROUPS threads sums a row. Thread (column, group) takes the 4-vectors column + COLUMNS * group, then
// every COLUMNS * GROUPS further; it keeps one accumulator for each place in the vector and adds them in order; columns fold by
// halves (across warps, then across lanes), then the groups do; mean = sum * factor, factor = float(rows) / float(elements).
// COLUMNS and GROUPS depend on the number of rows.
//
// Needs: `Element`, the element type; WIDTH, the row's length; COLUMNS, GROUPS.

#pragma once

#include "_numerics.cuh"

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
  const float total = shared[0][0];
  __syncthreads();  // the next row sum writes here again
  return total;
}

// The sum of squares of a row in shared memory; every thread of the block gets it.
__device__ __forceinline__ float sum_of_squares(const Element* row) {
  const int column = threadIdx.x, group = threadIdx.y;
  float a[4] = {};
#pragma unroll
  for (int at = (column + COLUMNS * group) * 4; at < WIDTH; at += THREADS * 4) {
    const Vector<Element, 4> v = load<Element, 4>(row + at);
    const float2 low = widen(v.pair[0]), high = widen(v.pair[1]);
    a[0] = __fadd_rn(a[0], __fmul_rn(low.x, low.x));
    a[1] = __fadd_rn(a[1], __fmul_rn(low.y, low.y));
    a[2] = __fadd_rn(a[2], __fmul_rn(high.x, high.x));
    a[3] = __fadd_rn(a[3], __fmul_rn(high.y, high.y));
  }
  return fold_row(fold_accumulators(a), column, group);
}

// `rsqrt(x.pow(2).mean() + eps)` of a row in shared memory.
__device__ __forceinline__ float reciprocal_root_mean_square(const Element* row, float mean_factor, float eps) {
  return reciprocal_deviation(__fmul_rn(sum_of_squares(row), mean_factor), eps);
}

// round(round(x * r) * weight), for two neighbouring elements: diffusers' RMSNorm with a weight of x's type.
__device__ __forceinline__ Pair<Element> rms_norm(Pair<Element> x, float r, Pair<Element> weight) {
  const float2 f = widen(x);
  return product(round_pair<Element>(__fmul_rn(f.x, r), __fmul_rn(f.y, r)), weight);
}
