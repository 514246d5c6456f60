// A gated residual, then LayerNorm without weight or bias, times (1 + scale), plus shift; both results are kept:
//
//   p = round(gate * y)                   its own eager kernel
//   h' = round(h + p)                     its own eager kernel; with CLIP also clamped to +-65504
//   z = LayerNorm(h') * (1 + scale) + shift, rounded, and quantised where a scale is given, as in layer_norm_modulate.cu
//
// Up to two streams take part, for Qwen-Image text and image: the blocks of the text come first, so that its few rows are no tail.
//
// Macros: ELEMENT the element type; WIDTH the row's length; CLIP 0 or 1; INDEX, QUANTIZED as in layer_norm_modulate.cu (the index
// picks the gate's row too, of the image alone); TEXT where there are two streams.

#include "_numerics.cuh"

using Element = ELEMENT;

#include "_layer_norm.cuh"
#include "_quantize.cuh"

// One row by one block: h, y, gate, scale and shift (WIDTH,) each; it goes to element `out` of both results.
__device__ __forceinline__ void take_row(const Element* h_row, const Element* y_row, const Element* gate_row, const Element* scale_row,
                                         const Element* shift_row, const float* input_scale, Element* h_out, Result* z_out, long long out, float eps) {
  const float factor = result_factor(input_scale);

  Share v, y_share;
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (has_vector(i)) v[i] = load<Element, 4>(h_row + element_of(i)), y_share[i] = load<Element, 4>(y_row + element_of(i));
  }
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (!has_vector(i)) break;
    const Vector<Element, 4> g = load<Element, 4>(gate_row + element_of(i));
#pragma unroll
    for (int k = 0; k < 2; k++) {
      v[i].pair[k] = sum(v[i].pair[k], product(g.pair[k], y_share[i].pair[k]));
      if (CLIP) v[i].pair[k] = clip_to_half<Element>(v[i].pair[k]);
    }
    store(h_out + out + element_of(i), v[i]);
  }
  const Statistics statistics = layer_norm_statistics(v, eps);
#pragma unroll
  for (int i = 0; i < STEPS + 1; i++) {
    if (!has_vector(i)) break;
    const int at = element_of(i);
    const Vector<Element, 4> s = load<Element, 4>(scale_row + at), t = load<Element, 4>(shift_row + at);
    Vector<Element, 4> o;
#pragma unroll
    for (int k = 0; k < 2; k++) o.pair[k] = normalize_modulate(v[i].pair[k], statistics, s.pair[k], t.pair[k]);
    store_result<4>(z_out + out + at, o, factor);
  }
}

#ifndef TEXT

// grid (tokens, batch), block (32, 4)
extern "C" __global__ void __launch_bounds__(THREADS)
gated_residual_norm_modulate(const Element* __restrict__ h, const Element* __restrict__ gate, const Element* __restrict__ y,
                             const Element* __restrict__ scale, const Element* __restrict__ shift,
                             const INDEX* __restrict__ index, const float* __restrict__ input_scale,
                             Element* __restrict__ h_out, Result* __restrict__ z_out, int tokens, long long h_batch_stride, long long h_token_stride, long long y_batch_stride,
                             long long y_token_stride, long long gate_stride, long long scale_stride,
                             long long shift_stride, long long index_batch_stride, long long index_token_stride, float eps) {
  // From the last row to the first: what came last into the L2 is read first, and what the next kernel reads first comes in last.
  const long long token = gridDim.x - 1 - blockIdx.x, batch = blockIdx.y;
  const Element* h_row = h + batch * h_batch_stride + token * h_token_stride;
  const Element* y_row = y + batch * y_batch_stride + token * y_token_stride;
  const long long modulation = modulation_row(index, batch * index_batch_stride + token * index_token_stride);
  take_row(h_row, y_row, gate + modulation * gate_stride, scale + modulation * scale_stride, shift + modulation * shift_stride,
           input_scale, h_out, z_out, (batch * tokens + token) * WIDTH, eps);
}

#else

// grid (text_tokens + tokens, batch), block (32, 4)
extern "C" __global__ void __launch_bounds__(THREADS)
gated_residual_norm_modulate_both(const Element* __restrict__ h, const Element* __restrict__ gate, const Element* __restrict__ y,
                                  const Element* __restrict__ scale, const Element* __restrict__ shift,
                                  const INDEX* __restrict__ index, const float* __restrict__ input_scale,
                                  const Element* __restrict__ text_h, const Element* __restrict__ text_gate,
                                  const Element* __restrict__ text_y, const Element* __restrict__ text_scale,
                                  const Element* __restrict__ text_shift, const float* __restrict__ text_input_scale,
                                  Element* __restrict__ h_out, Result* __restrict__ z_out, Element* __restrict__ text_h_out,
                                  Result* __restrict__ text_z_out, int tokens, int text_tokens, long long h_batch_stride,
                                  long long h_token_stride, long long y_batch_stride, long long y_token_stride,
                                  long long gate_stride, long long scale_stride, long long shift_stride,
                                  long long index_batch_stride, long long index_token_stride, long long text_h_batch_stride,
                                  long long text_h_token_stride, long long text_y_batch_stride, long long text_y_token_stride,
                                  long long text_gate_stride, long long text_scale_stride, long long text_shift_stride, float eps) {
  const long long batch = blockIdx.y;
  if (blockIdx.x < text_tokens) {
    const long long token = text_tokens - 1 - (int)blockIdx.x;
    take_row(text_h + batch * text_h_batch_stride + token * text_h_token_stride,
             text_y + batch * text_y_batch_stride + token * text_y_token_stride, text_gate + batch * text_gate_stride,
             text_scale + batch * text_scale_stride, text_shift + batch * text_shift_stride, text_input_scale, text_h_out,
             text_z_out, (batch * text_tokens + token) * WIDTH, eps);
    return;
  }
  // As where the image is alone.
  const long long token = gridDim.x - 1 - blockIdx.x;
  const Element* h_row = h + batch * h_batch_stride + token * h_token_stride;
  const Element* y_row = y + batch * y_batch_stride + token * y_token_stride;
  const long long modulation = modulation_row(index, batch * index_batch_stride + token * index_token_stride);
  take_row(h_row, y_row, gate + modulation * gate_stride, scale + modulation * scale_stride, shift + modulation * shift_stride,
           input_scale, h_out, z_out, (batch * tokens + token) * WIDTH, eps);
}

#endif
