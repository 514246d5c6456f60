// bf16 and fp16. Arithmetic is one rounding of the exact result: for a sum, difference or product of two halves the
// fp32 result rounded once more gives the same bits (fp32 has more than twice their digits); for a fused
// multiply-add it does not, hence the rounding to odd.
//
// The types convert to nothing by themselves: a kernel says where it rounds.
#pragma once

#include "arithmetic.h"
#include "bits.h"
#include "vectors.h"

struct alignas(2) __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(2) __half {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
};
struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half low, __half high) : x(low), y(high) {}
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using half = __half;
using half2 = __half2;

inline float __bfloat162float(__nv_bfloat16 a) { return samebits::bf16_to_float(a.bits); }
inline float __half2float(__half a) { return samebits::half_to_float(a.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float a) { return {samebits::bf16_from_float(a)}; }
inline __nv_bfloat16 __float2bfloat16(float a) { return __float2bfloat16_rn(a); }
inline __half __float2half_rn(float a) { return {samebits::half_from_float(a)}; }
inline __half __float2half(float a) { return __float2half_rn(a); }

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half a) { return a.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

// One set of functions for each of the two types: TYPE, its pair, the infixes of CUDA's names, and the conversions.
#define SAMEBITS_HALVES(one, two, word, from, to)                                                              \
  inline two __floats2##word##2_rn(float a, float b) { return {from(a), from(b)}; }                            \
  inline two __float2##word##2_rn(float a) { return {from(a), from(a)}; }                                      \
  inline two __float22##word##2_rn(float2 a) { return {from(a.x), from(a.y)}; }                                \
  inline float2 __##word##22float2(two a) { return {to(a.x), to(a.y)}; }                                       \
  inline two __halves2##word##2(one a, one b) { return {a, b}; }                                               \
  inline two __##word##2##word##2(one a) { return {a, a}; }                                                    \
  inline float __low2float(two a) { return to(a.x); }                                                          \
  inline float __high2float(two a) { return to(a.y); }                                                         \
  inline one __low2##word(two a) { return a.x; }                                                               \
  inline one __high2##word(two a) { return a.y; }                                                              \
  inline one __hadd_rn(one a, one b) { return from(__fadd_rn(to(a), to(b))); }                                 \
  inline one __hsub_rn(one a, one b) { return from(__fsub_rn(to(a), to(b))); }                                 \
  inline one __hmul_rn(one a, one b) { return from(__fmul_rn(to(a), to(b))); }                                 \
  inline one __hfma(one a, one b, one c) { return from(samebits::fma_to_odd(to(a), to(b), to(c))); }           \
  inline two __hadd2_rn(two a, two b) { return {__hadd_rn(a.x, b.x), __hadd_rn(a.y, b.y)}; }                   \
  inline two __hsub2_rn(two a, two b) { return {__hsub_rn(a.x, b.x), __hsub_rn(a.y, b.y)}; }                   \
  inline two __hmul2_rn(two a, two b) { return {__hmul_rn(a.x, b.x), __hmul_rn(a.y, b.y)}; }                   \
  inline two __hfma2(two a, two b, two c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }           \
  inline one __hadd(one a, one b) { return __hadd_rn(a, b); }                                                  \
  inline one __hsub(one a, one b) { return __hsub_rn(a, b); }                                                  \
  inline one __hmul(one a, one b) { return __hmul_rn(a, b); }                                                  \
  inline two __hadd2(two a, two b) { return __hadd2_rn(a, b); }                                                \
  inline two __hsub2(two a, two b) { return __hsub2_rn(a, b); }                                                \
  inline two __hmul2(two a, two b) { return __hmul2_rn(a, b); }

SAMEBITS_HALVES(__nv_bfloat16, __nv_bfloat162, bfloat16, __float2bfloat16_rn, __bfloat162float)
SAMEBITS_HALVES(__half, __half2, half, __float2half_rn, __half2float)
#undef SAMEBITS_HALVES
