// The functions that the GPU's hardware approximates (and those that its library builds on them): here the correctly
// rounded value of the host's library, unless pairs of input and output bits recorded on a GPU were handed in.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "bits.h"

namespace samebits {

struct Recorded {
  const char* name;
  float (*otherwise)(float);
  std::vector<std::pair<uint32_t, uint32_t>> pairs = {};  // sorted by input bits
  std::atomic<uint64_t> misses{0};                        // inputs that a given table did not hold

  float operator()(float value) {
    if (!pairs.empty()) {
      const uint32_t bits = cast_bits<uint32_t>(value);
      const auto found = std::lower_bound(pairs.begin(), pairs.end(), std::make_pair(bits, uint32_t{0}));
      if (found != pairs.end() && found->first == bits) return cast_bits<float>(found->second);
      misses.fetch_add(1, std::memory_order_relaxed);
    }
    return canonical(otherwise(value));
  }
};

// Correctly rounded. The double result is within one of its last places of the true one, and no fp32 input has a
// reciprocal square root that close to the middle between two floats: checked for all 2^24 mantissas.
inline float rsqrt_exact(float value) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(value))); }

inline Recorded recorded_rsqrtf{"rsqrtf", rsqrt_exact};
inline Recorded recorded_expf{"expf", [](float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }};
inline Recorded recorded_tanhf{"tanhf", [](float x) { return static_cast<float>(std::tanh(static_cast<double>(x))); }};
inline Recorded recorded_erff{"erff", [](float x) { return static_cast<float>(std::erf(static_cast<double>(x))); }};
inline Recorded* const recorded_functions[] = {&recorded_rsqrtf, &recorded_expf, &recorded_tanhf, &recorded_erff};

inline Recorded* find_recorded(const char* name) {
  for (Recorded* function : recorded_functions)
    if (!std::strcmp(function->name, name)) return function;
  return nullptr;
}

}  // namespace samebits

// Replaces the table of a function; a count of 0 takes it away. Returns 0, or 1 for a function that has none.
extern "C" __attribute__((visibility("default"))) int samebits_record(const char* name, const uint32_t* inputs,
                                                                      const uint32_t* outputs, uint64_t count) {
  samebits::Recorded* const function = samebits::find_recorded(name);
  if (!function) return 1;
  std::vector<std::pair<uint32_t, uint32_t>> pairs(count);
  for (uint64_t at = 0; at < count; ++at) pairs[at] = {inputs[at], outputs[at]};
  std::sort(pairs.begin(), pairs.end());
  function->pairs = std::move(pairs);
  function->misses = 0;
  return 0;
}

extern "C" __attribute__((visibility("default"))) uint64_t samebits_misses(const char* name) {
  samebits::Recorded* const function = samebits::find_recorded(name);
  return function ? function->misses.load() : 0;
}
