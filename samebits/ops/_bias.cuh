// A linear's bias that joins behind its GEMM, in the kernel of the gated residual:
//
//   b = round(y + bias)                   its own eager kernel
//   eager's roundings                     p = round(gate * b), h' = round(h + p), two eager kernels
//   NATIVE_FMA                            h' = round(gate * b + h), one rounding, in the element type itself: through fp32 a
//                                         value just beside a tie would be rounded to the tie first, and then the wrong way
//
// Needs: `Element`, the element type; NATIVE_FMA 0 or 1.

#pragma once

#include "_numerics.cuh"

__device__ __forceinline__ float2 fused_multiply_add(float2 a, float2 b, float2 c) { return make_float2(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y)); }
__device__ __forceinline__ __half2 fused_multiply_add(__half2 a, __half2 b, __half2 c) { return __hfma2(a, b, c); }
__device__ __forceinline__ __nv_bfloat162 fused_multiply_add(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return __hfma2(a, b, c); }

__device__ __forceinline__ Pair<Element> biased_residual(Pair<Element> h, Pair<Element> gate, Pair<Element> y, Pair<Element> bias) {
  const Pair<Element> b = sum(y, bias);
  if constexpr (NATIVE_FMA) return fused_multiply_add(gate, b, h);
  else return sum(h, product(gate, b));
}
