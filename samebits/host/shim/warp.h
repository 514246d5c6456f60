// Barriers, shuffles and votes.
#pragma once

#include "bits.h"
#include "fibres.h"

namespace samebits {

// The lane whose value a shuffle hands to `lane`, as PTX defines shfl.sync; the lane itself where the source lies
// outside its segment.
inline uint32_t shuffle_source(const WarpCall& call, uint32_t lane) {
  const uint32_t operand = call.operand & 31u;
  const uint32_t first = lane & ~(call.width - 1u);
  const uint32_t last = lane | (call.width - 1u);
  switch (call.operation) {
    case Operation::shuffle:
      return first | (operand & (call.width - 1u));
    case Operation::shuffle_up:
      return lane >= first + operand ? lane - operand : lane;
    case Operation::shuffle_down:
      return lane + operand <= last ? lane + operand : lane;
    case Operation::shuffle_xor:
      return (lane ^ operand) <= last ? lane ^ operand : lane;
    default:
      return lane;
  }
}

inline void finish_warp_operation(Fibre* warp, uint32_t mask) {
  uint64_t answers[32] = {};
  uint64_t votes = 0;
  for (uint32_t lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1u) votes |= (warp[lane].call.value & 1u) << lane;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    const WarpCall& call = warp[lane].call;
    if (call.operation == Operation::ballot) {
      answers[lane] = votes;
    } else if (call.operation != Operation::syncwarp) {
      const uint32_t source = shuffle_source(call, lane);
      if (!(mask >> source & 1u)) {
        return fail("%s: lane %u reads lane %u, which the mask 0x%08x does not name", spelling(call.operation), lane,
                    source, mask);
      }
      answers[lane] = warp[source].call.value;
    }
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    warp[lane].call.value = answers[lane];
    warp[lane].state = State::ready;
  }
}

inline uint64_t meet(Operation operation, uint32_t mask, uint32_t operand, int width, uint64_t value) {
  const bool power_of_two = width >= 1 && width <= 32 && (width & (width - 1)) == 0;
  if (!power_of_two) fail("%s: the width must be a power of two up to 32, got %d", spelling(operation), width);
  if (!(mask >> lane_of(*self) & 1u))
    fail("%s: lane %u calls with mask 0x%08x, which does not name it", spelling(operation), lane_of(*self), mask);
  Fibre* const me = self;
  me->call = {operation, mask, operand, static_cast<uint32_t>(width), value};
  wait(State::at_warp);
  return me->call.value;
}

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

inline void __syncthreads() { samebits::wait(samebits::State::at_block_barrier); }
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
