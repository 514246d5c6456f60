// GELU in its tanh form: fp32 inside, one rounding at the end.
//
// Macros: ELEMENT; WIDE elements a thread.

#include "_numerics.cuh"

using Element = ELEMENT;
constexpr int THREADS = 256;

// grid (blocks), block (THREADS): one vector a thread, the last thread also what is left over
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_tanh_kernel(const Element* __restrict__ x, Element* __restrict__ y, long long elements) {
  const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * WIDE;
  if (at + WIDE <= elements) {
    const Vector<Element, WIDE> v = load<Element, WIDE>(x + at);
    Vector<Element, WIDE> o;
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) {
      const float2 f = widen(v.pair[k]);
      o.pair[k] = round_pair<Element>(gelu_tanh(f.x), gelu_tanh(f.y));
    }
    store(y + at, o);
  } else {
    for (long long i = at; i < elements; i++) y[i] = round_to<Element>(gelu_tanh(widen(x[i])));
  }
}
