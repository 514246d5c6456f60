// A gated residual of a normalised branch, and the next norm of the result (Z-Image); RMS is diffusers' full-width RMSNorm:
//
//   n = RMS(y, y_weight)                  rounded after y * r and after the weight
//   p = round(gate * n)                   without a gate just n
//   x' = round(x + p)                     kept
//   z = round(RMS(x', weight) * g)        where HAS_NEXT; g = round(1 + scale); without a scale just RMS(x', weight)
//
// With HAS_GATES also the tanh of the next block's two gates: _gates.cuh. With an input_scale z is quantised: _quantize.cuh.
//
// Macros: ELEMENT; WIDTH; COLUMNS, GROUPS ATen's geometry; WIDE elements that one memory instruction moves (4, or 8 where
// the pointers allow); HAS_GATE, HAS_NEXT, HAS_SCALE, HAS_GATES 0 or 1; QUANTIZED where z becomes e4m3.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_gates.cuh"
#include "_quantize.cuh"
#include "_row_sum.cuh"

// grid (gate_blocks + rows), block as _row_sum.cuh says, shared (WIDTH,) elements
extern "C" __global__ void __launch_bounds__(THREADS, SPLIT ? 16 : 1)
gated_residual_rms_norm(const Element* __restrict__ x, const Element* __restrict__ gate, const Element* __restrict__ y,
                        const Element* __restrict__ y_weight, const Element* __restrict__ weight,
                        const Element* __restrict__ scale, const Element* __restrict__ gate_msa,
                        const Element* __restrict__ gate_mlp, const float* __restrict__ input_scale,
                        Element* __restrict__ x_out, Result* __restrict__ z_out,
                        Element* __restrict__ gate_msa_out, Element* __restrict__ gate_mlp_out, int rows, int tokens,
                        long long x_sample_stride, long long x_token_stride, long long y_sample_stride,
                        long long y_token_stride, long long gate_sample_stride, long long gate_token_stride,
                        long long scale_sample_stride, long long scale_token_stride, int gate_blocks,
                        int gate_rows, long long gate_msa_stride, long long gate_mlp_stride, float eps) {
  extern __shared__ uint4 shared[];
  if (HAS_GATES && (int)blockIdx.x < gate_blocks) {
    open_gates(Gates{gate_msa, gate_mlp, gate_msa_out, gate_mlp_out, gate_rows, gate_msa_stride, gate_mlp_stride}, blockIdx.x);
    return;
  }
  Element* row = reinterpret_cast<Element*>(shared);  // (WIDTH,): first y, then x'
  // From the last row to the first: what came last into the L2 is read first, and what the next kernel reads first comes in last.
  const int index = gridDim.x - 1 - blockIdx.x, sample = index / tokens, token = index - sample * tokens;
  const Element* x_row = x + sample * x_sample_stride + token * x_token_stride;           // (WIDTH,)
  const Element* gate_row = gate + sample * gate_sample_stride + token * gate_token_stride;  // (WIDTH,)
  const long long out = (long long)index * WIDTH;
  const float factor = result_factor(input_scale);
  fetch_row(row, y + sample * y_sample_stride + token * y_token_stride);
  float r = reciprocal_root_mean_square(row, rows, eps);
  __syncthreads();  // every thread has read what the next loop overwrites
#pragma unroll
  for (int i = 0; i < steps(WIDE); i++) {
    const int at = element_of(i, WIDE);
    if (at >= WIDTH) break;
    const Vector<Element, WIDE> v = load<Element, WIDE>(row + at), w = load<Element, WIDE>(y_weight + at);
    Vector<Element, WIDE> o = load<Element, WIDE>(x_row + at), g = {};
    if (HAS_GATE) g = load<Element, WIDE>(gate_row + at);
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) {
      const Pair<Element> n = rms_norm(v.pair[k], r, w.pair[k]);
      o.pair[k] = sum(o.pair[k], HAS_GATE ? product(g.pair[k], n) : n);
    }
    store(x_out + out + at, o);
    if (HAS_NEXT) store_shared(row + at, o);
  }
  if (!HAS_NEXT) return;
  __syncthreads();
  r = reciprocal_root_mean_square(row, rows, eps);

  const Element* scale_row = scale + sample * scale_sample_stride + token * scale_token_stride;  // (WIDTH,)
#pragma unroll
  for (int i = 0; i < steps(WIDE); i++) {
    const int at = element_of(i, WIDE);
    if (at >= WIDTH) break;
    const Vector<Element, WIDE> v = load<Element, WIDE>(row + at), w = load<Element, WIDE>(weight + at);
    Vector<Element, WIDE> s = {}, o;
    if (HAS_SCALE) s = load<Element, WIDE>(scale_row + at);
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) {
      o.pair[k] = rms_norm(v.pair[k], r, w.pair[k]);
      if (HAS_SCALE) o.pair[k] = product(o.pair[k], one_plus<Element>(s.pair[k]));
    }
    store_result<WIDE>(z_out + out + at, o, factor);
  }
}
