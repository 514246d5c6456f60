// GELU in its tanh form of bf16 values by table: y = round(x * gate(x)), the gate 0.5 * (1 + tanh(...)) looked up.
//
// bf16 has only 3,328 values from 2^-9 up to 2^4, both signs counted. Below, the gate is so near to 0.5 that x * 0.5 rounds alike;
// above, it is exactly 1 or 0. To halve is exact, so x * (0.5 * (1 + tanh(...))) is the same product as ATen's (0.5 * x) * (1 + tanh(...)).

#pragma once

#include "_numerics.cuh"

constexpr int BELOW = 0x3aff, ABOVE = 0x4180;  // the last bf16 before 2^-9, and 2^4; from one to the other the bits count up
constexpr int SIDE = ABOVE - BELOW + 1;        // places for one sign

// Table (2, SIDE): the gates of the positive values, then those of the negative ones. The first place stands for everything
// below it, down to 0, and the last one for everything above, up to infinity and NaN, which stays NaN in the product.
__device__ __forceinline__ void fill_gates(float* table, int thread, int threads) {
  for (int i = thread; i < 2 * SIDE; i += threads) {
    const int sign = i / SIDE, place = i - sign * SIDE;
    const float x = place == 0 ? 0.0f : widen(__ushort_as_bfloat16(sign << 15 | (BELOW + place)));
    table[i] = __fmul_rn(0.5f, one_plus_gelu_tanh(x));
  }
}

__device__ __forceinline__ float gate(const float* table, __nv_bfloat16 x) {
  const int bits = __bfloat16_as_ushort(x), magnitude = bits & 0x7fff;
  return table[(bits >> 15) * SIDE + min(max(magnitude, BELOW), ABOVE) - BELOW];
}

__device__ __forceinline__ __nv_bfloat162 gelu_by_table(const float* table, __nv_bfloat162 x) {
  const float2 f = widen(x);
  return round_pair<__nv_bfloat16>(__fmul_rn(f.x, gate(table, x.x)), __fmul_rn(f.y, gate(table, x.y)));
}
