// The FP8 quantisation of an activation, each rounding that of eager's chain (samebits/ops/_quantize.py):
//
//   s = 1 / scale                        fp32, a correctly rounded division
//   v = float(x) * s                     fp32, one rounding
//   q = e4m3(min(max(v, -448), 448))     to nearest, ties to even; NaN stays NaN, -0 stays -0
//
// Needs: `Element`, the element type; QUANTIZED where the kernel's last result is quantised, not defined where it is not.

#pragma once

#include "_numerics.cuh"

// `scale.reciprocal()`.
__device__ __forceinline__ float reciprocal_of(const float* scale) { return __fdiv_rn(1.0f, *scale); }

// An fp32 value to the bits of float8_e4m3fn: the four bits of exponent count from 2^-7, three bits of fraction.
__device__ __forceinline__ unsigned e4m3_by_bits(float v) {
  const unsigned sign = __float_as_uint(v) >> 24 & 0x80u, magnitude = __float_as_uint(v) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;                  // NaN, of which a product has but one
  if (magnitude >= __float_as_uint(448.0f)) return sign | 0x7eu;
  if (magnitude < __float_as_uint(0x1p-6f)) {                 // subnormal: a multiple of 2^-9, the last bit of a sum around 2^14
    return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - __float_as_uint(0x1p14f));
  }
  const unsigned odd = magnitude >> 20 & 1u;                  // of the last bit that stays
  return sign | (((magnitude + 0x7ffffu + odd) >> 20) - (120u << 3));
}

// Two of them, the first in the low byte. From sm_89 on it is one instruction.
__device__ __forceinline__ unsigned e4m3_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return e4m3_by_bits(first) | e4m3_by_bits(second) << 8;
#endif
}

__device__ __forceinline__ unsigned quantize(Pair<Element> p, float reciprocal) {
  const float2 f = widen(p);
  return e4m3_pair(__fmul_rn(f.x, reciprocal), __fmul_rn(f.y, reciprocal));
}

// N elements to N bytes of one store.
template <int N> __device__ __forceinline__ void store_quantized(unsigned char* p, Vector<Element, N> v, float reciprocal) {
  unsigned bytes[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; i++) bytes[i] = quantize(v.pair[2 * i], reciprocal) | quantize(v.pair[2 * i + 1], reciprocal) << 16;
  if constexpr (N == 8) *reinterpret_cast<uint2*>(p) = make_uint2(bytes[0], bytes[1]);
  else *reinterpret_cast<unsigned*>(p) = bytes[0];
}

// The kernel's last result: elements, or e4m3 where the next thing that happens to it is a product in FP8.
#ifdef QUANTIZED
using Result = unsigned char;
__device__ __forceinline__ float result_factor(const float* scale) { return reciprocal_of(scale); }
template <int N> __device__ __forceinline__ void store_result(Result* p, Vector<Element, N> v, float factor) { store_quantized<N>(p, v, factor); }
#else
using Result = Element;
__device__ __forceinline__ float result_factor(const float*) { return 1.0f; }
template <int N> __device__ __forceinline__ void store_result(Result* p, Vector<Element, N> v, float) { store(p, v); }
#endif
