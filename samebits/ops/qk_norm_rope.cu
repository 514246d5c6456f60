// Per-head RMSNorm of query and key, then complex RoPE, written straight into the joint attention buffers:
//
//   n = RMSNorm(x)                                     _head_norm.cuh, rounded to the weight's type
//   (re, im) = (n0, n1) * (cos, sin)                   complex64 product of neighbours: re = fma(n0, cos, -(n1 * sin)),
//                                                      im = fma(n0, sin, n1 * cos), as the CUDA compiler contracts ATen's
//   y = round((re, im))                                to the weight's type
//
// Up to two streams take part, for Qwen-Image text and image: rows of the text come first in the joint buffers. Values are only
// copied there. Heads are packed: head h of a token starts at h * HEAD_DIM.
//
// Macros: ELEMENT, WEIGHT, HEAD_DIM, REFERENCE as in qk_norm.cu; HEADS; TENSORS 3, or 2 without values; for half precision and
// heads of 128 HEADS_AHEAD, how many neighbouring heads a half warp takes, elsewhere IMAGE_COLUMNS, TEXT_COLUMNS, VECTOR, ATen's
// geometry.

#include "_numerics.cuh"

using Element = ELEMENT;
using Weight = WEIGHT;
#include "_head_norm.cuh"

// One tensor of one stream. Row r of it is head r % HEADS of token r / HEADS.
struct Stream {
  const Element* x;
  const Weight* weight;  // (HEAD_DIM,); null for values
  const float2* table;   // cos and sin: (tokens, HEAD_DIM / 2) for every sample, or one for each
  Weight* y;             // (samples, joint_tokens, HEADS, HEAD_DIM), from this stream's first token
  int rows, tokens, joint_tokens;
  long long sample_stride, token_stride, table_sample_stride;
};

struct Place {
  const Element* x;     // (HEAD_DIM,)
  const float2* table;  // (HEAD_DIM / 2,)
  Weight* y;            // (HEAD_DIM,)
};

__device__ __forceinline__ Place place_of(const Stream& s, int row) {
  const int flat = row / HEADS, head = row - flat * HEADS;
  const int sample = flat < s.tokens ? 0 : flat / s.tokens, token = flat - sample * s.tokens;
  return Place{s.x + sample * s.sample_stride + token * s.token_stride + head * HEAD_DIM,
               s.table + sample * s.table_sample_stride + (long long)token * (HEAD_DIM / 2),
               s.y + (((long long)sample * s.joint_tokens + token) * HEADS + head) * HEAD_DIM};
}

__device__ __forceinline__ Pair<Weight> rotate(Pair<Weight> n, float2 t) {
  const float2 f = widen(n);
  return round_pair<Weight>(__fmaf_rn(f.x, t.x, -__fmul_rn(f.y, t.y)), __fmaf_rn(f.x, t.y, __fmul_rn(f.y, t.x)));
}

#ifndef VECTOR
constexpr int ROWS_PER_BLOCK = WARPS * 2 * HEADS_AHEAD;
#else
constexpr int ROWS_PER_BLOCK = WARPS;
#endif

// The blocks of a launch take query, key and value of the image, then of the text; `block` becomes the block within its tensor.
// Without values there are none of the third kind.
__device__ __forceinline__ int tensor_of(int& block, int rows, int text_rows) {
  const int blocks = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK, text_blocks = (text_rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
  if (block < TENSORS * blocks) {
    const int tensor = block / blocks;
    block -= tensor * blocks;
    return tensor;
  }
  block -= TENSORS * blocks;
  const int tensor = block / text_blocks;
  block -= tensor * text_blocks;
  return 3 + tensor;
}

// grid (blocks), block (32, WARPS)
extern "C" __global__ void __launch_bounds__(32 * WARPS)
qk_norm_rope(const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
             const Weight* __restrict__ q_weight, const Weight* __restrict__ k_weight, const float2* __restrict__ table,
             const Element* __restrict__ text_q, const Element* __restrict__ text_k, const Element* __restrict__ text_v,
             const Weight* __restrict__ text_q_weight, const Weight* __restrict__ text_k_weight,
             const float2* __restrict__ text_table, Weight* __restrict__ joint_q, Weight* __restrict__ joint_k,
             Weight* __restrict__ joint_v, int rows, int tokens, int text_rows, int text_tokens,
             long long q_sample_stride, long long q_token_stride, long long k_sample_stride, long long k_token_stride,
             long long v_sample_stride, long long v_token_stride, long long text_q_sample_stride,
             long long text_q_token_stride, long long text_k_sample_stride, long long text_k_token_stride,
             long long text_v_sample_stride, long long text_v_token_stride, long long table_sample_stride,
             long long text_table_sample_stride, float eps) {
  int block = blockIdx.x;
  const int tensor = tensor_of(block, rows, text_rows);
  const int joint_tokens = tokens + text_tokens;
  const long long image = (long long)text_tokens * HEADS * HEAD_DIM;  // where the image's tokens begin
  Stream s;
  switch (tensor) {
    case 0: s = Stream{q, q_weight, table, joint_q + image, rows, tokens, joint_tokens, q_sample_stride, q_token_stride, table_sample_stride}; break;
    case 1: s = Stream{k, k_weight, table, joint_k + image, rows, tokens, joint_tokens, k_sample_stride, k_token_stride, table_sample_stride}; break;
    case 2: s = Stream{v, nullptr, table, joint_v + image, rows, tokens, joint_tokens, v_sample_stride, v_token_stride, table_sample_stride}; break;
    case 3: s = Stream{text_q, text_q_weight, text_table, joint_q, text_rows, text_tokens, joint_tokens, text_q_sample_stride, text_q_token_stride, text_table_sample_stride}; break;
    case 4: s = Stream{text_k, text_k_weight, text_table, joint_k, text_rows, text_tokens, joint_tokens, text_k_sample_stride, text_k_token_stride, text_table_sample_stride}; break;
    default: s = Stream{text_v, nullptr, text_table, joint_v, text_rows, text_tokens, joint_tokens, text_v_sample_stride, text_v_token_stride, text_table_sample_stride}; break;
  }
  const bool is_value = s.weight == nullptr;

#ifndef VECTOR
  // Neighbouring heads of one token: they share the token's place, its rotation and the weight.
  const int lane = threadIdx.x % 16, group = (block * WARPS + threadIdx.y) * 2 + threadIdx.x / 16;
  const bool is_there = group * HEADS_AHEAD < s.rows;  // every lane takes part in the shuffles below
  const Place place = place_of(s, is_there ? group * HEADS_AHEAD : 0);
  Vector<Element, 8> x[HEADS_AHEAD];
#pragma unroll
  for (int i = 0; i < HEADS_AHEAD; i++) x[i] = load<Element, 8>(place.x + i * HEAD_DIM + lane * 8);
  if (is_value) {  // the weight has the element's type here
#pragma unroll
    for (int i = 0; i < HEADS_AHEAD; i++) {
      if (is_there) store(reinterpret_cast<Element*>(place.y) + i * HEAD_DIM + lane * 8, x[i]);
    }
    return;
  }
  const Vector<Weight, 4> w[2] = {load<Weight, 4>(s.weight + lane * 8), load<Weight, 4>(s.weight + lane * 8 + 4)};
  Vector<float, 4> t[2];  // cos and sin of this lane's four pairs
#pragma unroll
  for (int j = 0; j < 2; j++) t[j] = load<float, 4>(reinterpret_cast<const float*>(place.table + lane * 4 + j * 2));
#pragma unroll
  for (int i = 0; i < HEADS_AHEAD; i++) {
    Eight y = normalize(x[i], w, s.rows, eps);
#pragma unroll
    for (int j = 0; j < 4; j++) y.pair[j] = rotate(y.pair[j], t[j / 2].pair[j % 2]);
    if (is_there) store_eight(place.y + i * HEAD_DIM + lane * 8, y);
  }
#else
  const int lane = threadIdx.x, row = block * WARPS + threadIdx.y;
  if (row >= s.rows) return;
  const Place place = place_of(s, row);
  if (is_value) {
    for (int at = lane; at < HEAD_DIM; at += 32) reinterpret_cast<Element*>(place.y)[at] = place.x[at];
    return;
  }
  const float r = tensor < 3 ? row_reciprocal_root<IMAGE_COLUMNS>(place.x, lane, s.rows, eps)
                             : row_reciprocal_root<TEXT_COLUMNS>(place.x, lane, s.rows, eps);
#pragma unroll
  for (int i = 0; i < HEAD_DIM; i += 64) {
    const int at = i + 2 * lane;
    if (at >= HEAD_DIM) break;
    const Vector<Weight, 2> w = load<Weight, 2>(s.weight + at);
    const Pair<Weight> n = weigh(make_float2(widen(place.x[at]), widen(place.x[at + 1])), r, w.pair[0]);
    store(place.y + at, Vector<Weight, 2>{rotate(n, place.table[at / 2])});
  }
#endif
}
