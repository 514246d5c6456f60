// ATen's LayerNorm of one row, by one block laid out as ATen's (vectorized_layer_norm_kernel).
//
// 128 threads take a row, thread t the 4-vectors t, t + 128, t + 256, ...; each runs Welford's recurrence over its values in
// order; lanes fold by offsets 16, 8, 4, 2, 1; then warps (0,2) and (1,3) and the two results; variance = m2 / width, a
// division. Every width that ATen's kernel takes, a multiple of four, is taken here.
//
// Needs: `Element`, the element type; WIDTH, the row's length.

#pragma once

#include "_numerics.cuh"

constexpr int THREADS = 128;                // ATen's threads a row: block (32, 4)
constexpr int SPAN = 4 * THREADS;           // elements that they take together in one step
constexpr int STEPS = WIDTH / SPAN;         // steps in which every thread has a vector
constexpr int LEFT = WIDTH % SPAN / 4;      // threads that have one vector more

// A thread's share of a row: vector i lies at element i * SPAN + 4 * thread.
using Share = Vector<Element, 4>[STEPS + 1];

__device__ __forceinline__ int thread_of_row() { return threadIdx.y * 32 + threadIdx.x; }

// Whether this thread has vector i.
__device__ __forceinline__ bool has_vector(int i) { return i < STEPS || (LEFT > 0 && thread_of_row() < LEFT); }

__device__ __forceinline__ int element_of(int i) { return i * SPAN + 4 * thread_of_row(); }

struct Statistics {
  float mean, rstd;
};

// A block that takes several rows numbers them: what the rows of two turns share lies apart, so that no barrier is needed after it.
__device__ __forceinline__ Statistics layer_norm_statistics(const Share& v, float eps, int turn = 0) {
  Welford w{0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (!has_vector(i)) break;
    const float2 a = widen(v[i].pair[0]), b = widen(v[i].pair[1]);
    welford_push(w, a.x, 1.0f / (4 * i + 1));
    welford_push(w, a.y, 1.0f / (4 * i + 2));
    welford_push(w, b.x, 1.0f / (4 * i + 3));
    welford_push(w, b.y, 1.0f / (4 * i + 4));
  }

  float count = 4 * STEPS + (has_vector(STEPS) ? 4 : 0);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Welford upper = shuffle_down(w, offset);
    const float upper_count = LEFT == 0 ? count : __shfl_down_sync(ALL_LANES, count, offset);
    w = welford_combine(w, upper, count, upper_count);
    count += upper_count;
  }

  __shared__ Welford partials[2][4];
  __shared__ float counts[4];  // the same in every turn
  Welford* partial = partials[turn % 2];
  if (threadIdx.x == 0) partial[threadIdx.y] = w, counts[threadIdx.y] = count;
  __syncthreads();
  float n[4];
#pragma unroll
  for (int i = 0; i < 4; i++) n[i] = LEFT == 0 ? 128.0f * STEPS : counts[i];
  const Welford even = welford_combine(partial[0], partial[2], n[0], n[2]);
  const Welford odd = welford_combine(partial[1], partial[3], n[1], n[3]);
  w = welford_combine(even, odd, n[0] + n[2], n[1] + n[3]);
  return Statistics{w.mean, reciprocal_deviation(__fdiv_rn(w.m2, (float)WIDTH), eps)};
}

// n = round(rstd * (x - mean)), g = round(1 + scale), y = round(round(n * g) + shift), for two neighbouring elements.
__device__ __forceinline__ Pair<Element> normalize_modulate(Pair<Element> x, Statistics s, Pair<Element> scale, Pair<Element> shift) {
  const float2 f = widen(x);
  const Pair<Element> n = round_pair<Element>(__fmul_rn(s.rstd, __fsub_rn(f.x, s.mean)), __fmul_rn(s.rstd, __fsub_rn(f.y, s.mean)));
  return sum(product(n, one_plus<Element>(scale)), shift);
}

// Which modulation row a token uses. INDEX is the integer type of a per-token choice between two, not defined where a sample
// has one: `torch.where(index == 0, first, second)`, the first rows of all samples before the second ones.
#ifdef INDEX
__device__ __forceinline__ long long modulation_row(const INDEX* index, long long at) { return blockIdx.y + (index[at] == 0 ? 0 : gridDim.y); }
#else
#define INDEX int
__device__ __forceinline__ long long modulation_row(const INDEX*, long long) { return blockIdx.y; }
#endif
