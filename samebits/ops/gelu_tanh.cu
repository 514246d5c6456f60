// GELU in its tanh form: fp32 inside, one rounding at the end. Two kernels with the same bits:
//
//   gelu_tanh_direct     the formula for every element
//   gelu_tanh_by_table   bf16, many elements: y = round(x * gate(x)), the gate read from a table
//
// Computing the tanh takes longer than moving an element: _gelu_table.cuh.
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

#include "_gelu_table.cuh"

// grid (blocks), as many as run at once; block (THREADS). A thread takes one vector after another, the next already on its way.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
gelu_tanh_by_table(const Element* __restrict__ x, const float* __restrict__ input_scale, Result* __restrict__ y, long long elements) {
  __shared__ float table[2 * SIDE];
  const long long vectors = elements / 8, step = (long long)gridDim.x * THREADS;
  long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
  Vector<Element, 8> next = {};
  if (at < vectors) next = load<Element, 8>(x + at * 8);
  fill_gates(table, threadIdx.x, THREADS);
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
