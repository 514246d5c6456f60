// The tanh of the two gates of a block of Z-Image, beside the kernel that has the block's first norm:
//
//   t = round(tanh(gate))
//
// A gate is one row a sample, so few elements that a launch of its own costs more than all of its work. Here the first blocks of
// the norm's own launch do it, a vector a thread, before the blocks that have rows.
//
// Needs: `Element`; WIDTH; WIDE, the elements of a vector; THREADS and thread_of_row() of _row_sum.cuh.

#pragma once

#include "_numerics.cuh"
#include "_row_sum.cuh"

struct Gates {
  const Element* msa;  // (rows, WIDTH), rows msa_stride apart
  const Element* mlp;
  Element* msa_out;    // (rows, WIDTH)
  Element* mlp_out;
  int rows;
  long long msa_stride, mlp_stride;
};

// The part of one block: one vector a thread, of both gates, one gate after the other.
__device__ __forceinline__ void open_gates(const Gates& gates, int block) {
  constexpr int VECTORS = WIDTH / WIDE;
  const long long vector = (long long)block * THREADS + thread_of_row(), each = (long long)gates.rows * VECTORS;
  if (vector >= 2 * each) return;
  const bool is_mlp = vector >= each;
  const long long flat = is_mlp ? vector - each : vector, row = flat / VECTORS, at = (flat - row * VECTORS) * WIDE;
  const Vector<Element, WIDE> v = load<Element, WIDE>((is_mlp ? gates.mlp + row * gates.mlp_stride : gates.msa + row * gates.msa_stride) + at);
  Vector<Element, WIDE> o;
#pragma unroll
  for (int k = 0; k < WIDE / 2; k++) o.pair[k] = tanh_of<Element>(v.pair[k]);
  store((is_mlp ? gates.mlp_out : gates.msa_out) + row * WIDTH + at, o);
}
