// The threads of a block as fibres of one OS thread. A fibre runs until it waits for others at a barrier or a warp
// operation; the scheduler then runs the next one. Nothing is preempted, so a run is repeatable, and a barrier that
// can never be passed is seen at once: no fibre can go on.
#pragma once

#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "switch.h"
#include "threads.h"

namespace samebits {

enum class State { ready, at_block_barrier, at_warp, finished };

struct WarpCall {  // what a thread brings to a warp operation, and what it gets
  Operation operation;
  uint32_t mask;
  uint32_t operand;  // source lane, delta or lane mask
  uint32_t width;
  uint64_t value;
};

struct Fibre : Thread {
  Context context;
  State state;
  WarpCall call;
};

struct Block : Place {
  std::vector<Fibre> fibres;
  std::vector<uint32_t> order;
  Context scheduler;
  void (*body)(const void*);
  const void* body_data;
  uint32_t live = 0;
  uint32_t at_barrier = 0;
  std::string error;
};

__thread const Thread* self = nullptr;
__thread const Place* block = nullptr;

inline Block& here() { return *static_cast<Block*>(const_cast<Place*>(block)); }
inline Fibre& running() { return *static_cast<Fibre*>(const_cast<Thread*>(self)); }
inline uint32_t lane_of(const Fibre& fibre) { return fibre.number & 31u; }

inline const char* spelling(Operation operation) {
  static const char* const names[] = {"__syncwarp",      "__shfl_sync",     "__shfl_up_sync",
                                      "__shfl_down_sync", "__shfl_xor_sync", "a vote"};
  return names[static_cast<int>(operation)];
}

__attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (here().error.empty()) here().error = text;
}

// Leave the running fibre; it goes on when the scheduler finds it ready again, and never after a fault.
inline void wait(State state) {
  Fibre& waiting = running();
  waiting.state = state;
  change(waiting.context, here().scheduler);
}

inline void fibre_main() {
  here().body(here().body_data);
  wait(State::finished);
}

// ---- warp operations ----------------------------------------------------------------------------------------------

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

uint64_t meet(Operation operation, uint32_t mask, uint32_t operand, int width, uint64_t value) {
  const bool power_of_two = width >= 1 && width <= 32 && (width & (width - 1)) == 0;
  if (!power_of_two) fail("%s: the width must be a power of two up to 32, got %d", spelling(operation), width);
  if (!(mask >> lane_of(running()) & 1u))
    fail("%s: lane %u calls with mask 0x%08x, which does not name it", spelling(operation), lane_of(running()), mask);
  Fibre& me = running();
  me.call = {operation, mask, operand, static_cast<uint32_t>(width), value};
  wait(State::at_warp);
  return me.call.value;
}

// ---- what threads wait for --------------------------------------------------------------------------------------

inline Fibre* warp_of(const Fibre& fibre) { return &here().fibres[fibre.number & ~31u]; }

inline uint32_t lanes_in(const Fibre* warp) {
  const uint32_t rest = static_cast<uint32_t>(here().fibres.size()) - warp->number;
  return rest < 32u ? rest : 32u;
}

// After a thread arrived at a warp operation: release everybody once all lanes that its mask names are there.
inline void check_warp(const Fibre& arrived) {
  Fibre* const warp = warp_of(arrived);
  const WarpCall& call = arrived.call;
  const uint32_t lanes = lanes_in(warp);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!(call.mask >> lane & 1u)) continue;
    if (lane >= lanes || warp[lane].state == State::finished) {
      return fail("%s with mask 0x%08x waits for lane %u, which %s", spelling(call.operation), call.mask, lane,
                  lane >= lanes ? "the block does not have" : "has returned from the kernel");
    }
    if (warp[lane].state != State::at_warp) return;
    const WarpCall& other = warp[lane].call;
    if (other.mask != call.mask) {
      if (!(other.mask >> lane_of(arrived) & 1u)) return;  // another group of lanes; it may join this one later
      return fail("lane %u is at %s with mask 0x%08x and lane %u at %s with mask 0x%08x: the masks must be equal", lane,
                  spelling(other.operation), other.mask, lane_of(arrived), spelling(call.operation), call.mask);
    }
    if (other.operation != call.operation || other.width != call.width) {
      return fail("lane %u is at %s (width %u) while lane %u is at %s (width %u): the lanes of a mask must meet at one "
                  "operation",
                  lane, spelling(other.operation), other.width, lane_of(arrived), spelling(call.operation), call.width);
    }
  }
  finish_warp_operation(warp, call.mask);
}

// A thread returned: lanes that wait for it would wait for ever.
inline void check_finished(const Fibre& finished) {
  const Fibre* const warp = warp_of(finished);
  for (uint32_t lane = 0; lane < lanes_in(warp); ++lane) {
    const Fibre& other = warp[lane];
    if (other.state == State::at_warp && (other.call.mask >> lane_of(finished) & 1u)) return check_warp(other);
  }
}

// __syncthreads counts the threads that have not returned.
inline void check_barrier() {
  if (here().live == 0 || here().at_barrier != here().live) return;
  here().at_barrier = 0;
  for (Fibre& fibre : here().fibres)
    if (fibre.state == State::at_block_barrier) fibre.state = State::ready;
}

inline void explain_deadlock() {
  uint32_t at_warp = 0;
  const Fibre* example = nullptr;
  for (const Fibre& fibre : here().fibres) {
    if (fibre.state != State::at_warp) continue;
    ++at_warp;
    example = &fibre;
  }
  char where[96] = "";
  if (example)
    std::snprintf(where, sizeof where, " (for example thread %u at %s, mask 0x%08x)", example->number,
                  spelling(example->call.operation), example->call.mask);
  fail("the threads wait for each other for ever: %u at __syncthreads, %u at a warp operation%s, %zu returned",
       here().at_barrier, at_warp, where, here().fibres.size() - here().live);
}

void wait_for_block() { wait(State::at_block_barrier); }

// ---- running a block ----------------------------------------------------------------------------------------------

// The stacks of a block's threads, one after another. Below each lies a pattern that tells an overflow; a page that
// faults would tell it sooner, but a process may map only some ten thousand areas.
class Stacks {
 public:
  static constexpr size_t bytes = 128 << 10;

  explicit Stacks(size_t count) : bytes_((count + 1) * bytes) {  // one more, for what the first overflows into
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory_ = memory == MAP_FAILED ? nullptr : static_cast<unsigned char*>(memory);
    for (size_t number = 0; memory_ && number < count; ++number) std::memcpy(at(number), pattern, sizeof pattern);
  }
  ~Stacks() {
    if (memory_) munmap(memory_, bytes_);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  bool usable() const { return memory_; }
  unsigned char* at(size_t number) { return memory_ + (number + 1) * bytes; }
  bool intact(size_t number) { return !std::memcmp(at(number), pattern, sizeof pattern); }

 private:
  static constexpr char pattern[] = "the end of a stack";
  unsigned char* memory_;
  size_t bytes_;
};

// Runs all threads of `block` to their end. False, with here().error set, after a fault.
inline bool run_block(Stacks& stacks) {
  for (Fibre& fibre : here().fibres) {
    fibre.state = State::ready;
    prepare(fibre.context, stacks.at(fibre.number), Stacks::bytes, fibre_main);
  }
  here().live = static_cast<uint32_t>(here().fibres.size());
  here().at_barrier = 0;
  while (here().live) {
    bool progress = false;
    for (uint32_t number : here().order) {
      Fibre& fibre = here().fibres[number];
      if (fibre.state != State::ready) continue;
      progress = true;
      self = &fibre;
      change(here().scheduler, fibre.context);
      if (!here().error.empty()) return false;
      if (fibre.state == State::at_warp) {
        check_warp(fibre);
      } else if (fibre.state == State::at_block_barrier) {
        ++here().at_barrier;
        check_barrier();
      } else if (fibre.state == State::finished) {
        --here().live;
        check_finished(fibre);
        check_barrier();
      }
      if (!stacks.intact(number)) fail("thread %u needs more than %zu bytes of stack", number, Stacks::bytes);
      if (!here().error.empty()) return false;
    }
    if (!progress) {
      explain_deadlock();
      return false;
    }
  }
  return true;
}

}  // namespace samebits
