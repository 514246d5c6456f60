// The tanh of the two gates of a block of Z-Image, beside the kernel that has the block's first norm:
//
//   t = round(tanh(gate))
//
// A gate is one row a sample, so few elements that a launch of its own costs more than all of its work. Here some threads take a
// vector each while the rows of the norm are on their way from memory.
//
// Needs: `Element`; WIDTH; WIDE, the elements of a vector.

#pragma once

#include "_numerics.cuh"

struct Gates {
  const Element* msa;  // (rows, WIDTH), rows msa_stride apart
  const Element* mlp;
  Element* msa_out;    // (rows, WIDTH)
  Element* mlp_out;
  int rows;
  long long msa_stride, mlp_stride;
};

// Take vector `first` of both gates, one gate after the other, then every `step` further.
__device__ __forceinline__ void open_gates(const Gates& gates, long long first, long long step) {
  constexpr int VECTORS = WIDTH / WIDE;
  for (long long vector = first; vector < 2LL * gates.rows * VECTORS; vector += step) {
    const bool is_mlp = vector >= (long long)gates.rows * VECTORS;
    const long long flat = is_mlp ? vector - (long long)gates.rows * VECTORS : vector;
    const long long row = flat / VECTORS, at = (flat - row * VECTORS) * WIDE;
    const Vector<Element, WIDE> v = load<Element, WIDE>((is_mlp ? gates.mlp + row * gates.mlp_stride : gates.msa + row * gates.msa_stride) + at);
    Vector<Element, WIDE> o;
#pragma unroll
    for (int k = 0; k < WIDE / 2; k++) o.pair[k] = tanh_of<Element>(v.pair[k]);
    store((is_mlp ? gates.mlp_out : gates.msa_out) + row * WIDTH + at, o);
  }
}
