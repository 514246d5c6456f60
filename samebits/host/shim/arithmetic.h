// IEEE arithmetic with the GPU's one NaN. The host compiles without contraction, so each is one rounding.
#pragma once

#include <climits>
#include <cmath>

#include "bits.h"

inline float __fadd_rn(float a, float b) { return samebits::canonical(a + b); }
inline float __fsub_rn(float a, float b) { return samebits::canonical(a - b); }
inline float __fmul_rn(float a, float b) { return samebits::canonical(a * b); }
inline float __fdiv_rn(float a, float b) { return samebits::canonical(a / b); }
inline float __frcp_rn(float a) { return samebits::canonical(1.0f / a); }
inline float __fsqrt_rn(float a) { return samebits::canonical(std::sqrt(a)); }
inline float __fmaf_rn(float a, float b, float c) { return samebits::canonical(__builtin_fmaf(a, b, c)); }

inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

inline float __int_as_float(int bits) { return samebits::cast_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return samebits::cast_bits<float>(bits); }
inline int __float_as_int(float value) { return samebits::cast_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return samebits::cast_bits<unsigned>(value); }

inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }
inline float __ll2float_rn(long long value) { return static_cast<float>(value); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }

// Each nibble of the selector picks one of the eight bytes of (b, a); its top bit spreads that byte's sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t{b} << 32) | a;
  unsigned result = 0;
  for (int at = 0; at < 4; ++at) {
    const unsigned pick = selector >> (4 * at) & 15u;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7u))) & 255u;
    if (pick & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * at);
  }
  return result;
}

// The GPU orders -0 below +0 and lets a number win over NaN.
namespace samebits {
inline float smaller(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
inline float larger(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
}  // namespace samebits

#define SAMEBITS_EXTREMES(type)                                       \
  inline constexpr type min(type a, type b) { return b < a ? b : a; } \
  inline constexpr type max(type a, type b) { return a < b ? b : a; }
SAMEBITS_EXTREMES(int)
SAMEBITS_EXTREMES(unsigned)
SAMEBITS_EXTREMES(long long)
SAMEBITS_EXTREMES(unsigned long long)
#undef SAMEBITS_EXTREMES
inline float min(float a, float b) { return samebits::smaller(a, b); }
inline float max(float a, float b) { return samebits::larger(a, b); }
