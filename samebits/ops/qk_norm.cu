// Per-head RMSNorm of query and key in one launch; the three references and their sums: _head_norm.cuh.
//
// Macros: ELEMENT, WEIGHT the types of x and of the weight (the result has the weight's); HEAD_DIM; Q_HEADS, K_HEADS;
// REFERENCE one of the three; Q_COLUMNS, K_COLUMNS, VECTOR ATen's geometry (any_head_dim only).

#include "_numerics.cuh"

using Element = ELEMENT;
using Weight = WEIGHT;
#include "_head_norm.cuh"

// The two tensors of a launch: blockIdx.y picks one. Element (row, i) lies at
// (row / heads / tokens) * sample_stride + (row / heads % tokens) * token_stride + (row % heads) * head_stride + i.
struct Rows {
  const Element* x;
  const Weight* weight;  // (HEAD_DIM,)
  Weight* y;             // (rows, HEAD_DIM)
  int rows, tokens;
  long long sample_stride, token_stride, head_stride;

  __device__ __forceinline__ const Element* row(int index, int heads) const {
    const int token = index / heads, head = index - token * heads;
    const int sample = token < tokens ? 0 : token / tokens;
    return x + sample * sample_stride + (token - sample * tokens) * token_stride + head * head_stride;
  }
};

#ifndef VECTOR
constexpr int ROWS_AHEAD = 4;  // rows of each half warp in flight
constexpr int ROWS_PER_WARP = 2 * ROWS_AHEAD;

// grid (blocks, 2), block (32, WARPS)
extern "C" __global__ void __launch_bounds__(32 * WARPS)
heads_of_128(const Element* __restrict__ q, const Element* __restrict__ k, const Weight* __restrict__ q_weight,
             const Weight* __restrict__ k_weight, Weight* __restrict__ q_out, Weight* __restrict__ k_out, int q_rows,
             int k_rows, int q_tokens, int k_tokens, long long q_sample_stride, long long q_token_stride,
             long long q_head_stride, long long k_sample_stride, long long k_token_stride, long long k_head_stride,
             float eps) {
  const bool is_key = blockIdx.y;
  const Rows t = is_key ? Rows{k, k_weight, k_out, k_rows, k_tokens, k_sample_stride, k_token_stride, k_head_stride}
                        : Rows{q, q_weight, q_out, q_rows, q_tokens, q_sample_stride, q_token_stride, q_head_stride};
  const int lane = threadIdx.x % 16, half = threadIdx.x / 16;
  const int first = (blockIdx.x * WARPS + threadIdx.y) * ROWS_PER_WARP + half;
  Vector<Element, 8> v[ROWS_AHEAD] = {};
#pragma unroll
  for (int i = 0; i < ROWS_AHEAD; i++) {
    const int row = first + 2 * i;
    if (row < t.rows) v[i] = load<Element, 8>((is_key ? t.row(row, K_HEADS) : t.row(row, Q_HEADS)) + lane * 8);
  }
  const Vector<Weight, 4> w[2] = {load<Weight, 4>(t.weight + lane * 8), load<Weight, 4>(t.weight + lane * 8 + 4)};
#pragma unroll
  for (int i = 0; i < ROWS_AHEAD; i++) {
    const int row = first + 2 * i;
    const Eight y = normalize(v[i], w, t.rows, eps);
    if (row < t.rows) store_eight(t.y + (long long)row * HEAD_DIM + lane * 8, y);
  }
}

#else
// grid (blocks, 2), block (32, WARPS)
extern "C" __global__ void __launch_bounds__(32 * WARPS)
any_head_dim(const Element* __restrict__ q, const Element* __restrict__ k, const Weight* __restrict__ q_weight,
             const Weight* __restrict__ k_weight, Weight* __restrict__ q_out, Weight* __restrict__ k_out, int q_rows,
             int k_rows, int q_tokens, int k_tokens, long long q_sample_stride, long long q_token_stride,
             long long q_head_stride, long long k_sample_stride, long long k_token_stride, long long k_head_stride,
             float eps) {
  const bool is_key = blockIdx.y;
  const Rows t = is_key ? Rows{k, k_weight, k_out, k_rows, k_tokens, k_sample_stride, k_token_stride, k_head_stride}
                        : Rows{q, q_weight, q_out, q_rows, q_tokens, q_sample_stride, q_token_stride, q_head_stride};
  const int lane = threadIdx.x, row = blockIdx.x * WARPS + threadIdx.y;
  if (row >= t.rows) return;
  const Element* x = is_key ? t.row(row, K_HEADS) : t.row(row, Q_HEADS);  // (HEAD_DIM,)
  const float r = is_key ? row_reciprocal_root<K_COLUMNS>(x, lane, t.rows, eps)
                         : row_reciprocal_root<Q_COLUMNS>(x, lane, t.rows, eps);
  Weight* out = t.y + (long long)row * HEAD_DIM;  // (HEAD_DIM,)
#pragma unroll
  for (int i = 0; i < HEAD_DIM; i += 64) {
    const int at = i + 2 * lane;
    if (at >= HEAD_DIM) break;
    const Vector<Weight, 2> w = load<Weight, 2>(t.weight + at);
    store(out + at, Vector<Weight, 2>{weigh(make_float2(widen(x[at]), widen(x[at + 1])), r, w.pair[0])});
  }
}
#endif
