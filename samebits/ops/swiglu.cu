// silu(a) * b: s = round(silu(a)), y = round(s * b), two eager kernels. With an input_scale y is quantised: _quantize.cuh.
//
// Macros: ELEMENT; WIDTH the row's length; WIDE elements a thread; QUANTIZED where y becomes e4m3.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_quantize.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = WIDTH / WIDE;

// grid (blocks), block (THREADS): one vector a thread
extern "C" __global__ void __launch_bounds__(THREADS)
swiglu(const Element* __restrict__ a, const Element* __restrict__ b, const float* __restrict__ input_scale,
       Result* __restrict__ y, int rows, long long a_stride, long long b_stride) {
  const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
  const long long row = vector / VECTORS;
  const int at = (vector - row * VECTORS) * WIDE;
  if (row >= rows) return;
  const Vector<Element, WIDE> v = load<Element, WIDE>(a + row * a_stride + at), w = load<Element, WIDE>(b + row * b_stride + at);
  Vector<Element, WIDE> o;
#pragma unroll
  for (int k = 0; k < WIDE / 2; k++) {
    const float2 f = widen(v.pair[k]);
    o.pair[k] = product(round_pair<Element>(silu(f.x), silu(f.y)), w.pair[k]);
  }
  store_result<WIDE>(y + row * WIDTH + at, o, result_factor(input_scale));
}
