// The part of the shim that is the same for every kernel: running blocks, and the recorded values. Compiled once.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "asynchronous.h"
#include "bits.h"
#include "block.h"
#include "launch.h"
#include "recorded.h"

namespace samebits {

// ---- all blocks of a launch -----------------------------------------------------------------------------------------

constexpr unsigned char shared_poison = 0xFF;  // NaN in every type: shared memory starts as garbage
constexpr unsigned char shared_guard = 0xA5;

static void arrange(std::vector<uint32_t>& order, uint64_t seed) {
  const size_t count = order.size();
  for (size_t at = 0; at < count; ++at) order[at] = static_cast<uint32_t>(seed == 1 ? count - 1 - at : at);
  if (seed < 2) return;
  uint64_t state = seed;
  for (size_t at = count; at > 1; --at) {  // Fisher and Yates, with Knuth's linear congruential generator
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[at - 1], order[(state >> 33) % at]);
  }
}

static std::string run_blocks(const Launch& launch, std::atomic<uint64_t>& next, std::atomic<bool>& stop) {
  const uint32_t threads = launch.block.x * launch.block.y * launch.block.z;
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  Block mine;
  mine.dimensions = launch.block;
  mine.grid = launch.grid;
  mine.body = launch.body;
  mine.body_data = launch.body_data;
  mine.loads_are_late = launch.order != 0;
  mine.fibres.resize(threads);
  mine.order.resize(threads);
  arrange(mine.order, launch.order);
  Stacks stacks(threads);
  if (!stacks.usable()) return "no memory for the stacks of a block's threads";
  for (uint32_t number = 0; number < threads; ++number) {
    mine.fibres[number].number = number;
    mine.fibres[number].index = {number % launch.block.x, number / launch.block.x % launch.block.y,
                                 number / launch.block.x / launch.block.y};
  }
  const DynamicShared shared = launch.shared();
  if (shared.memory && launch.shared_bytes + shared_guard_bytes > shared.bytes) return "a block asks for too much shared memory";
  block = &mine;
  for (uint64_t number; !stop.load() && (number = next.fetch_add(1)) < blocks;) {
    mine.index = {static_cast<unsigned>(number % launch.grid.x),
                  static_cast<unsigned>(number / launch.grid.x % launch.grid.y),
                  static_cast<unsigned>(number / launch.grid.x / launch.grid.y)};
    if (shared.memory) {
      std::memset(shared.memory, shared_poison, launch.shared_bytes);
      std::memset(shared.memory + launch.shared_bytes, shared_guard, shared_guard_bytes);
    }
    bool good = run_block(stacks);
    for (size_t at = 0; good && shared.memory && at < shared_guard_bytes; ++at) {
      if (shared.memory[launch.shared_bytes + at] == shared_guard) continue;
      fail("byte %zu of dynamic shared memory was written, but a block has only %u", launch.shared_bytes + at,
           launch.shared_bytes);
      good = false;
    }
    if (good) continue;
    stop = true;
    char where[64];
    std::snprintf(where, sizeof where, "block (%u, %u, %u): ", mine.index.x, mine.index.y, mine.index.z);
    block = nullptr;
    return where + mine.error;
  }
  block = nullptr;
  return "";
}

// The floating-point state that kernels are written for, whatever the caller (torch.set_flush_denormal) has set.
class DefaultArithmetic {
 public:
#if defined(__x86_64__)
  DefaultArithmetic() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1F80); }
  ~DefaultArithmetic() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultArithmetic() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

int run(const Launch& launch, char* message, uint64_t message_bytes) {
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::vector<std::string> errors(launch.workers);
  std::vector<std::thread> helpers;
  const auto work = [&](uint32_t worker) {
    const DefaultArithmetic arithmetic;
    try {
      errors[worker] = run_blocks(launch, next, stop);
    } catch (const std::bad_alloc&) {
      block = nullptr;
      stop = true;
      errors[worker] = "no memory for a block's threads";
    }
  };
  try {
    for (uint32_t worker = 1; worker < launch.workers; ++worker) helpers.emplace_back(work, worker);
  } catch (const std::system_error&) {
    // The system gives no more threads; those that there are do the work.
  }
  work(0);
  for (std::thread& helper : helpers) helper.join();
  for (const std::string& error : errors) {
    if (error.empty()) continue;
    std::snprintf(message, message_bytes, "%s", error.c_str());
    return 1;
  }
  message[0] = 0;
  return 0;
}

// ---- recorded values ------------------------------------------------------------------------------------------------

// Correctly rounded: the double result is within one of its last places of the true one, and no fp32 input has a
// reciprocal square root that close to the middle between two floats.
static float rsqrt_exact(float value) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(value))); }

struct Recorded {
  const char* name;
  float (*otherwise)(float);
  std::vector<std::pair<uint32_t, uint32_t>> pairs = {};  // sorted by input bits
  std::atomic<uint64_t> misses{0};                        // inputs that a given table did not hold
};

static Recorded recorded[] = {
    {"rsqrtf", rsqrt_exact},
    {"expf", [](float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }},
    {"tanhf", [](float x) { return static_cast<float>(std::tanh(static_cast<double>(x))); }},
    {"erff", [](float x) { return static_cast<float>(std::erf(static_cast<double>(x))); }},
};

float approximate(Approximate which, float value) {
  Recorded& function = recorded[static_cast<int>(which)];
  if (!function.pairs.empty()) {
    const uint32_t bits = cast_bits<uint32_t>(value);
    const auto found = std::lower_bound(function.pairs.begin(), function.pairs.end(), std::make_pair(bits, uint32_t{0}));
    if (found != function.pairs.end() && found->first == bits) return cast_bits<float>(found->second);
    function.misses.fetch_add(1, std::memory_order_relaxed);
  }
  return canonical(function.otherwise(value));
}

static Recorded* find_recorded(const char* name) {
  for (Recorded& function : recorded)
    if (!std::strcmp(function.name, name)) return &function;
  return nullptr;
}

}  // namespace samebits

#define SAMEBITS_EXPORT extern "C" __attribute__((visibility("default")))

// Replaces the table of a function; a count of 0 takes it away. Returns 0, or 1 for a function that has none.
SAMEBITS_EXPORT int samebits_record(const char* name, const uint32_t* inputs, const uint32_t* outputs, uint64_t count) {
  samebits::Recorded* const function = samebits::find_recorded(name);
  if (!function) return 1;
  std::vector<std::pair<uint32_t, uint32_t>> pairs(count);
  for (uint64_t at = 0; at < count; ++at) pairs[at] = {inputs[at], outputs[at]};
  std::sort(pairs.begin(), pairs.end());
  function->pairs = std::move(pairs);
  function->misses = 0;
  return 0;
}

SAMEBITS_EXPORT uint64_t samebits_misses(const char* name) {
  samebits::Recorded* const function = samebits::find_recorded(name);
  return function ? function->misses.load() : 0;
}
