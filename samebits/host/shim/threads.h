// The threads of a block, as a kernel sees them: their places, and what they wait for each other at.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace samebits {

struct Thread {
  uint3 index;
  uint32_t number;  // within the block, x fastest, as CUDA counts lanes
};

struct Place {
  uint3 index;
  dim3 dimensions;
  dim3 grid;
};

// Of the thread that runs and of its block. An OS thread runs one block at a time.
extern __thread const Thread* self;
extern __thread const Place* block;

enum class Operation { syncwarp, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot };

void wait_for_block();

// Waits until all lanes that the mask names have come to the same operation, and returns what it gives this lane.
uint64_t meet(Operation operation, uint32_t mask, uint32_t operand, int width, uint64_t value);

template <class T>
T shuffle(Operation operation, uint32_t mask, T value, uint32_t operand, int width) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 16, 32 and 64 bits");
  uint64_t carried = 0;
  std::memcpy(&carried, &value, sizeof value);
  carried = meet(operation, mask, operand, width, carried);
  std::memcpy(&value, &carried, sizeof value);
  return value;
}

}  // namespace samebits

inline void __syncthreads() { samebits::wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { samebits::meet(samebits::Operation::syncwarp, mask, 0, 32, 0); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return samebits::shuffle(samebits::Operation::shuffle, mask, value, static_cast<uint32_t>(lane), width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return samebits::shuffle(samebits::Operation::shuffle_up, mask, value, delta, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return samebits::shuffle(samebits::Operation::shuffle_down, mask, value, delta, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return samebits::shuffle(samebits::Operation::shuffle_xor, mask, value, static_cast<uint32_t>(lane_mask), width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(samebits::meet(samebits::Operation::ballot, mask, 0, 32, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
