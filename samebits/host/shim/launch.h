// From untyped slots to a typed call of the kernel, once per thread of every block.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fibres.h"

namespace samebits {

struct DynamicShared {  // the array that `extern __shared__` names; this OS thread's own
  unsigned char* memory;
  size_t bytes;
};

struct Launch {
  dim3 grid, block;
  uint32_t shared_bytes;
  uint32_t workers;  // OS threads
  uint64_t order;    // of the threads in a block: 0 ascending, 1 descending, else shuffled by this seed
  void (*body)(void*);
  void* body_data;
  DynamicShared (*shared)();
};

constexpr size_t shared_guard_bytes = 256;
constexpr unsigned char shared_poison = 0xFF;  // NaN in every type: shared memory starts as garbage
constexpr unsigned char shared_guard = 0xA5;

inline void arrange(std::vector<uint32_t>& order, uint64_t seed) {
  const size_t count = order.size();
  for (size_t at = 0; at < count; ++at) order[at] = static_cast<uint32_t>(seed == 1 ? count - 1 - at : at);
  if (seed < 2) return;
  uint64_t state = seed;
  for (size_t at = count; at > 1; --at) {  // Fisher and Yates, with Knuth's linear congruential generator
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[at - 1], order[(state >> 33) % at]);
  }
}

inline std::string run_blocks(const Launch& launch, std::atomic<uint64_t>& next, std::atomic<bool>& stop) {
  const uint32_t threads = launch.block.x * launch.block.y * launch.block.z;
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  Block here;
  here.dimensions = launch.block;
  here.grid = launch.grid;
  here.body = launch.body;
  here.body_data = launch.body_data;
  here.fibres.resize(threads);
  here.order.resize(threads);
  arrange(here.order, launch.order);
  Stacks stacks(threads);
  if (!stacks.usable()) return "no memory for the stacks of a block's threads";
  for (uint32_t number = 0; number < threads; ++number) {
    here.fibres[number].number = number;
    here.fibres[number].index = {number % launch.block.x, number / launch.block.x % launch.block.y,
                                 number / launch.block.x / launch.block.y};
  }
  const DynamicShared shared = launch.shared();
  block = &here;
  for (uint64_t number; !stop.load() && (number = next.fetch_add(1)) < blocks;) {
    here.index = {static_cast<unsigned>(number % launch.grid.x),
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
    std::snprintf(where, sizeof where, "block (%u, %u, %u): ", here.index.x, here.index.y, here.index.z);
    block = nullptr;
    return where + here.error;
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

inline std::string run(const Launch& launch) {
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::vector<std::string> errors(launch.workers);
  std::vector<std::thread> helpers;
  const auto work = [&](uint32_t worker) {
    const DefaultArithmetic arithmetic;
    errors[worker] = run_blocks(launch, next, stop);
  };
  for (uint32_t worker = 1; worker < launch.workers; ++worker) helpers.emplace_back(work, worker);
  work(0);
  for (std::thread& helper : helpers) helper.join();
  for (const std::string& error : errors)
    if (!error.empty()) return error;
  return "";
}

template <class T>
T take(uint64_t slot) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof slot, "a parameter must fit a slot");
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

// How the compiler understood a parameter: a letter and its bytes, compared with what was read from the text.
template <class T>
std::string describe() {
  const char letter = std::is_pointer_v<T>               ? 'p'
                      : std::is_same_v<T, bool>          ? 'b'
                      : std::is_floating_point_v<T>      ? 'f'
                      : std::is_signed_v<T>              ? 'i'
                      : std::is_unsigned_v<T>            ? 'u'
                                                         : '?';
  return letter + std::to_string(sizeof(T)) + " ";
}

template <class... Parameters>
std::string describe_parameters(void (*)(Parameters...)) {
  return (std::string() + ... + describe<Parameters>());
}

template <class... Parameters, size_t... At>
std::string launch_typed(void (*kernel)(Parameters...), Launch launch, const uint64_t* slots, std::index_sequence<At...>) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {take<Parameters>(slots[At])...}};
  launch.body = [](void* data) {
    Call* const call = static_cast<Call*>(data);
    std::apply(call->kernel, call->arguments);
  };
  launch.body_data = &call;
  return run(launch);
}

template <class... Parameters>
std::string launch_typed(void (*kernel)(Parameters...), const Launch& launch, const uint64_t* slots) {
  return launch_typed(kernel, launch, slots, std::index_sequence_for<Parameters...>{});
}

struct Absent {  // stands for a kernel that the constants leave out
  constexpr Absent() {}
};
inline std::string describe_parameters(Absent) { return "absent"; }
inline std::string launch_typed(Absent, const Launch&, const uint64_t*) { return "its constants leave it out"; }

inline int hand_back(const std::string& text, char* message, uint64_t bytes) {
  std::snprintf(message, bytes, "%s", text.c_str());
  return text.empty() ? 0 : 1;
}

}  // namespace samebits
