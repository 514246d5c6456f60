// A gated residual: p = round(gate * y), h' = round(h + p), two eager kernels; with CLIP also clamped to +-65504.
//
// Macros: ELEMENT; WIDTH the row's length; WIDE elements a thread; CLIP 0 or 1; INDEX the integer type of the per-token
// choice between two gate rows, not defined where there is one row.

#include "_numerics.cuh"

using Element = ELEMENT;
constexpr int THREADS = 128;
#ifdef INDEX
constexpr bool INDEXED = true;
#else
#define INDEX int
constexpr bool INDEXED = false;
#endif

// grid (tokens, batch), block (THREADS)
extern "C" __global__ void __launch_bounds__(THREADS)
gated_residual(const Element* __restrict__ h, const Element* __restrict__ gate, const Element* __restrict__ y,
               const INDEX* __restrict__ index, Element* __restrict__ out, int tokens, long long h_batch_stride,
               long long h_token_stride, long long y_batch_stride, long long y_token_stride, long long gate_stride,
               long long index_batch_stride, long long index_token_stride) {
  // From the last row to the first: what came last into the L2 is read first, and what the next kernel reads first comes in last.
  const long long token = gridDim.x - 1 - blockIdx.x, batch = gridDim.y - 1 - blockIdx.y;
  const Element* h_row = h + batch * h_batch_stride + token * h_token_stride;  // (WIDTH,)
  const Element* y_row = y + batch * y_batch_stride + token * y_token_stride;  // (WIDTH,)
  long long gate_sample = batch;
  if (INDEXED) gate_sample += index[batch * index_batch_stride + token * index_token_stride] == 0 ? 0 : gridDim.y;
  const Element* gate_row = gate + gate_sample * gate_stride;  // (WIDTH,)
  Element* out_row = out + (batch * tokens + token) * WIDTH;  // (WIDTH,)
#pragma unroll 4
  for (int at = threadIdx.x * WIDE; at < WIDTH; at += THREADS * WIDE) {
    const Vector<Element, WIDE> a = load_last<Element, WIDE>(h_row + at), b = load_last<Element, WIDE>(y_row + at);
    const Vector<Element, WIDE> g = load<Element, WIDE>(gate_row + at);
    Vector<Element, WIDE> o;
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) {
      o.pair[k] = sum(a.pair[k], product(g.pair[k], b.pair[k]));
      if (CLIP) o.pair[k] = clip_to_half<Element>(o.pair[k]);
    }
    store(out_row + at, o);
  }
}
