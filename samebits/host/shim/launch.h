// From untyped slots to a typed call of the kernel, once per thread of every block.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "hopper.h"
#include "vectors.h"

namespace samebits {

constexpr size_t shared_guard_bytes = 256;

struct DynamicShared {  // the array that `extern __shared__` names; this OS thread's own
  unsigned char* memory;
  size_t bytes;
};

struct Launch {
  dim3 grid, block;
  uint32_t shared_bytes;
  uint32_t workers;  // OS threads
  uint64_t order;    // of the threads in a block: 0 ascending, 1 descending, else shuffled by this seed; 0 loads boxes at once
  DynamicShared (*shared)();
  void (*body)(const void*);  // one thread of the kernel
  const void* body_data;
};

// Runs all blocks. Returns 0, or 1 with the reason in `message`.
int run(const Launch& launch, char* message, uint64_t message_bytes);

// The value of a parameter; of a TensorMap the slot has the address.
template <class T>
T take(uint64_t slot) {
  constexpr bool by_address = std::is_same_v<T, TensorMap>;
  static_assert(std::is_trivially_copyable_v<T> && (by_address || sizeof(T) <= sizeof slot), "a parameter must fit a slot");
  T value;
  std::memcpy(&value, by_address ? reinterpret_cast<const void*>(slot) : &slot, sizeof value);
  return value;
}

template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  const uint64_t* slots;

  template <size_t... At>
  void make(std::index_sequence<At...>) const {
    kernel(take<Parameters>(slots[At])...);
  }

  static void body(const void* call) {
    static_cast<const Call*>(call)->make(std::index_sequence_for<Parameters...>{});
  }
};

template <class... Parameters>
int launch_typed(void (*kernel)(Parameters...), Launch launch, const uint64_t* slots, char* message, uint64_t bytes) {
  const Call<Parameters...> call{kernel, slots};
  launch.body = call.body;
  launch.body_data = &call;
  return run(launch, message, bytes);
}

// How the compiler understood the parameters: a letter and the bytes of each, compared with what was read from the text.
template <class T>
constexpr char letter_of() {
  if (std::is_pointer_v<T>) return 'p';
  if (std::is_same_v<T, bool>) return 'b';
  if (std::is_floating_point_v<T>) return 'f';
  if (std::is_integral_v<T>) return std::is_signed_v<T> ? 'i' : 'u';
  if (std::is_same_v<T, TensorMap>) return 't';
  return '?';
}

template <class... Parameters>
const char* describe_parameters(void (*)(Parameters...)) {
  static const std::string text = ((letter_of<Parameters>() + std::to_string(sizeof(Parameters)) + " ") + ... + std::string());
  return text.c_str();
}

struct Absent {  // stands for a kernel that the constants leave out
  constexpr Absent() {}
};
inline const char* describe_parameters(Absent) { return "absent"; }
inline int launch_typed(Absent, const Launch&, const uint64_t*, char*, uint64_t) { return 1; }

}  // namespace samebits
