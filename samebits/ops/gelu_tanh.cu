// GELU in its tanh form: fp32 inside, one rounding at the end. Two kernels with the same bits:
//
//   gelu_tanh_direct     the formula for every element
//   gelu_tanh_by_table   bf16, many elements: y = round(x * gate(x)), the gate read from a table
//
// The gate is 0.5 * (1 + tanh(...)). Computing it takes longer than moving an element, but bf16 has only 3,328 values from 2^-9 up
// to 2^4, both signs counted. Below, the gate is so near to 0.5 that x * 0.5 rounds alike; above, it is exactly 1 or 0.
// To halve is exact, so x * (0.5 * (1 + tanh(...))) is the same product as ATen's (0.5 * x) * (1 + tanh(...)).
//
// With an input_scale y is quantised on its way out (_quantize.cuh); then no element is left over.
//
// Macros: ELEMENT; WIDE elements a thread, not defined where the table is used; QUANTIZED where y becomes e4m3.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_quantize.cuh"

#ifdef WIDE
constexpr int THREADS = 128;

// grid (blocks), block (THREADS): one vector a thread, the last thread also what is left over
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_tanh_direct(const Element* __restrict__ x, const float* __restrict__ input_scale, Result* __restrict__ y, long long elements) {
  const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * WIDE;
  if (at + WIDE <= elements) {
    const Vector<Element, WIDE> v = load<Element, WIDE>(x + at);
    Vector<Element, WIDE> o;
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) {
      const float2 f = widen(v.pair[k]);
      o.pair[k] = round_pair<Element>(gelu_tanh(f.x), gelu_tanh(f.y));
    }
    store_result<WIDE>(y + at, o, result_factor(input_scale));
  } else {
#ifndef QUANTIZED
    for (long long i = at; i < elements; i++) y[i] = round_to<Element>(gelu_tanh(widen(x[i])));
#endif
  }
}

#else
constexpr int THREADS = 1024;
constexpr int BELOW = 0x3aff, ABOVE = 0x4180;  // the last bf16 before 2^-9, and 2^4; from one to the other the bits count up
constexpr int SIDE = ABOVE - BELOW + 1;        // places for one sign

// Table (2, SIDE): the gates of the positive values, then those of the negative ones. The first place stands for everything
// below it, down to 0, and the last one for everything above, up to infinity and NaN, which stays NaN in the product.
__device__ __forceinline__ void fill(float* table) {
  for (int i = threadIdx.x; i < 2 * SIDE; i += THREADS) {
    const int sign = i / SIDE, place = i - sign * SIDE;
    const float x = place == 0 ? 0.0f : widen(__ushort_as_bfloat16(sign << 15 | (BELOW + place)));
    table[i] = __fmul_rn(0.5f, one_plus_gelu_tanh(x));
  }
}

__device__ __forceinline__ float gate(const float* table, Element x) {
  const int bits = __bfloat16_as_ushort(x), magnitude = bits & 0x7fff;
  return table[(bits >> 15) * SIDE + min(max(magnitude, BELOW), ABOVE) - BELOW];
}

__device__ __forceinline__ Pair<Element> gelu_by_table(const float* table, Pair<Element> x) {
  const float2 f = widen(x);
  return round_pair<Element>(__fmul_rn(f.x, gate(table, x.x)), __fmul_rn(f.y, gate(table, x.y)));
}

// grid (blocks), as many as run at once; block (THREADS). A thread takes one vector after another, the next already on its way.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
gelu_tanh_by_table(const Element* __restrict__ x, const float* __restrict__ input_scale, Result* __restrict__ y, long long elements) {
  __shared__ float table[2 * SIDE];
  const long long vectors = elements / 8, step = (long long)gridDim.x * THREADS;
  long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
  Vector<Element, 8> next = {};
  if (at < vectors) next = load<Element, 8>(x + at * 8);
  fill(table);
  __syncthreads();
#ifndef QUANTIZED
  const long long left = vectors * 8 + at;  // fewer than eight elements are left over
  if (left < elements) y[left] = round_to<Element>(__fmul_rn(widen(x[left]), gate(table, x[left])));
#endif
  const float factor = result_factor(input_scale);
  while (at < vectors) {
    const Vector<Element, 8> v = next;
    if (at + step < vectors) next = load<Element, 8>(x + (at + step) * 8);
    Vector<Element, 8> o;
#pragma unroll
    for (int k = 0; k < 4; k++) o.pair[k] = gelu_by_table(table, v.pair[k]);
    store_result<8>(y + at * 8, o, factor);
    at += step;
  }
}
#endif
