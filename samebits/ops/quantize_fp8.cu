// The FP8 quantisation of an activation by itself: four eager kernels, each rounding as _quantize.cuh says.
//
// Macros: ELEMENT; WIDTH the row's length; WIDE elements a thread; QUANTIZED, always.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_quantize.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = WIDTH / WIDE;

// grid (blocks), block (THREADS): one vector a thread
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_fp8(const Element* __restrict__ x, const float* __restrict__ input_scale, Result* __restrict__ y, int rows, int tokens,
             long long sample_stride, long long token_stride) {
  const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
  const long long row = vector / VECTORS;
  const int at = (vector - row * VECTORS) * WIDE;
  if (row >= rows) return;
  const int sample = row / tokens, token = row - (long long)sample * tokens;
  const Vector<Element, WIDE> v = load<Element, WIDE>(x + sample * sample_stride + token * token_stride + at);
  store_result<WIDE>(y + row * WIDTH + at, v, result_factor(input_scale));
}
