// Roundings and conversions by integer arithmetic: nothing here depends on what the host's processor or compiler
// thinks of NaN, subnormals or half precision.
#pragma once

#include <cstdint>
#include <cstring>

namespace samebits {

template <class To, class From>
inline To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "only the type changes, never the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// An arithmetic instruction of the GPU knows one NaN.
inline float canonical(float value) { return value == value ? value : cast_bits<float>(0x7FFFFFFFu); }

inline bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

// fp32 -> bf16, to nearest, ties to even; a carry out of the mantissa is the next exponent, and infinity at the end.
inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = cast_bits<uint32_t>(value);
  if (is_nan(bits)) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float bf16_to_float(uint16_t bits) { return cast_bits<float>(static_cast<uint32_t>(bits) << 16); }

// fp32 -> fp16, to nearest, ties to even, subnormals kept.
inline uint16_t half_from_float(float value) {
  const uint32_t bits = cast_bits<uint32_t>(value);
  if (is_nan(bits)) return 0x7FFF;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65536 and up
  uint32_t mantissa, shift;
  if (magnitude >= 0x38800000u) {  // 2^-14 and up: a normal number, whose exponent moves from bias 127 to 15
    mantissa = magnitude - (112u << 23);
    shift = 13;
  } else {
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102u) return static_cast<uint16_t>(sign);  // below half of the smallest subnormal, 2^-25
    mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
    shift = 126u - exponent;
  }
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t tie = 1u << (shift - 1u);
  const uint32_t up = rest > tie || (rest == tie && (kept & 1u)) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (kept + up));
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 31) return cast_bits<float>(mantissa ? 0x7FFFFFFFu : sign | 0x7F800000u);
  if (exponent) return cast_bits<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  if (!mantissa) return cast_bits<float>(sign);
  uint32_t power = 113;  // 2^-14
  while (!(mantissa & 0x400u)) {
    mantissa <<= 1;
    --power;
  }
  return cast_bits<float>(sign | (power << 23) | ((mantissa & 0x3FFu) << 13));
}

// a * b + c for factors of at most 24 bits, rounded to fp32 "to odd": the last bit says whether anything was cut off,
// so that one more rounding to a half-precision type is the only rounding.
inline float fma_to_odd(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);  // exact
  const double addend = c;
  double sum = product + addend;
  if (!(sum - sum == 0)) return canonical(static_cast<float>(sum));
  const double addend_seen = sum - product;
  const double error = (product - (sum - addend_seen)) + (addend - addend_seen);  // exact: Knuth's two-sum
  uint64_t wide = cast_bits<uint64_t>(sum);
  if (error != 0 && !(wide & 1u)) {
    wide += (error > 0) == (sum > 0) ? 1 : -1;
    sum = cast_bits<double>(wide);
  }
  const float narrow = static_cast<float>(sum);
  if (static_cast<double>(narrow) == sum) return narrow;
  uint32_t bits = cast_bits<uint32_t>(narrow);
  if ((narrow < 0 ? -static_cast<double>(narrow) : static_cast<double>(narrow)) > (sum < 0 ? -sum : sum)) bits -= 1;
  return cast_bits<float>(bits | 1u);
}

}  // namespace samebits
