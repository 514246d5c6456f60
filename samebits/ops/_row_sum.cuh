// The mean of squares of one row, as ATen's reduce_kernel sums it over fp32, by a block laid out as ATen's.
//
// A block of COLUMNS x GROUPS threads sums a row. Thread (column, group) takes the 4-vectors column + COLUMNS * group, then
// every COLUMNS * GROUPS further; it keeps one accumulator for each place in the vector and adds them in order; columns fold by
// halves (across warps, then across lanes), then the groups do; mean = sum * factor.
// COLUMNS and GROUPS depend on the number of rows.
//
// Needs: `Element`, the element type; WIDTH, the row's length; COLUMNS, GROUPS; WIDE.

#pragma once

#include "_numerics.cuh"

// Where ATen gives a row to one warp, that would leave too few threads to move memory, and a thread's four accumulators do not
// depend on each other. So four threads stand for one of ATen's here, an accumulator each: block (128), thread t taking
// elements t, t + 128, t + 256, ... Elsewhere the block is ATen's own, block (COLUMNS, GROUPS).
constexpr bool SPLIT = COLUMNS * GROUPS == 32;
constexpr int THREADS = SPLIT ? 128 : COLUMNS * GROUPS;

__device__ __forceinline__ int thread_of_row() { return SPLIT ? threadIdx.x : threadIdx.x + COLUMNS * threadIdx.y; }

// How often a thread takes `wide` elements of a row, the last time perhaps in vain, and where it does.
__device__ constexpr int steps(int wide) { return (WIDTH / wide + THREADS - 1) / THREADS; }
__device__ __forceinline__ int element_of(int step, int wide) { return (step * THREADS + thread_of_row()) * wide; }

// Begin to copy a row to shared memory. WIDE is what one memory instruction moves: 4 elements, or 8 where the pointers allow.
__device__ __forceinline__ void begin_row(Element* shared, const Element* row) {
#pragma unroll
  for (int i = 0; i < steps(WIDE); i++) {
    if (element_of(i, WIDE) < WIDTH) copy_async<Element, WIDE>(shared + element_of(i, WIDE), row + element_of(i, WIDE));
  }
}

// Wait until every row that was begun is there, for every thread; what was read before may be written again.
__device__ __forceinline__ void await_row() {
  wait_for_copies();
  __syncthreads();
}

__device__ __forceinline__ void fetch_row(Element* shared, const Element* row) {
  begin_row(shared, row);
  await_row();
}

// block_x_reduce and block_y_reduce: the sum lands in every thread of the row. Between two of them there must be a barrier.
__device__ __forceinline__ float fold_row(float a, int column, int group) {
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

// The sum of squares of a row in shared memory; every thread of the block gets it. Between two sums there must be a barrier.
__device__ __forceinline__ float sum_of_squares(const Element* row) {
  if constexpr (SPLIT) {
    float a = 0.0f;
#pragma unroll
    for (int i = 0; i < steps(1); i++) {
      const int at = element_of(i, 1);
      if (at >= WIDTH) break;
      const float f = widen(row[at]);
      a = __fadd_rn(a, __fmul_rn(f, f));
    }
    // ((a0 + a1) + a2) + a3 in the first of each four lanes, then ATen's 32 lanes fold in every warp alike.
    float total = a;
#pragma unroll
    for (int i = 1; i < 4; i++) total = __fadd_rn(total, __shfl_down_sync(ALL_LANES, a, i));
    __shared__ float lanes[32];
    if (threadIdx.x % 4 == 0) lanes[threadIdx.x / 4] = total;
    __syncthreads();
    return fold_lanes(lanes[threadIdx.x % 32], 32);
  } else {
    float a[4] = {};
#pragma unroll
    for (int i = 0; i < steps(4); i++) {
      const int at = element_of(i, 4);
      if (at >= WIDTH) break;
      const Vector<Element, 4> v = load<Element, 4>(row + at);
      const float2 low = widen(v.pair[0]), high = widen(v.pair[1]);
      a[0] = __fadd_rn(a[0], __fmul_rn(low.x, low.x));
      a[1] = __fadd_rn(a[1], __fmul_rn(low.y, low.y));
      a[2] = __fadd_rn(a[2], __fmul_rn(high.x, high.x));
      a[3] = __fadd_rn(a[3], __fmul_rn(high.y, high.y));
    }
    return fold_row(fold_accumulators(a), threadIdx.x, threadIdx.y);
  }
}

// `rsqrt(x.pow(2).mean() + eps)` of a row in shared memory; `rows` is how many eager reduces at once.
__device__ __forceinline__ float reciprocal_root_mean_square(const Element* row, int rows, float eps) {
  return reciprocal_deviation(__fmul_rn(sum_of_squares(row), mean_factor(rows, WIDTH)), eps);
}

// round(round(x * r) * weight), for two neighbouring elements: diffusers' RMSNorm with a weight of x's type.
__device__ __forceinline__ Pair<Element> rms_norm(Pair<Element> x, float r, Pair<Element> weight) {
  const float2 f = widen(x);
  return product(round_pair<Element>(__fmul_rn(f.x, r), __fmul_rn(f.y, r)), weight);
}
