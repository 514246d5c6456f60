// The threads of a block as fibres of one OS thread. A fibre runs until it waits for others at a barrier or a warp
// operation; the scheduler then runs the next one. Nothing is preempted, so a run is repeatable, and a barrier that
// can never be passed is seen at once: no fibre can go on.
#pragma once

#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "hopper.h"
#include "switch.h"
#include "threads.h"

namespace samebits {

enum class State { ready, at_block_barrier, at_cluster, at_group, at_phase, at_products, at_warp, finished };

struct WarpCall {  // what a thread brings to a warp operation, and what it gets
  Operation operation;
  uint32_t mask;
  uint32_t operand;  // source lane, delta or lane mask
  uint32_t width;
  uint64_t value;
};

struct Load {  // a box on its way to shared memory
  unsigned char* to;
  TensorMap from;
  Barrier* done;
  int column, row;
};

struct Store {  // and one on its way back
  TensorMap to;
  const unsigned char* from;
  int column, row;
  bool begun;
};

struct Product {  // of tiles, and where this thread's sums are
  float* sums;
  MatrixView a, b;
  bool add;
  size_t group;  // it belongs to, counted by products_end

  bool operator==(const Product& other) const {  // but for the sums
    return a.tile == other.a.tile && a.column == other.a.column && b.tile == other.b.tile && b.column == other.b.column &&
           add == other.add && group == other.group;
  }
};

struct Group {  // of warps that meet at group_sync
  uint32_t threads = 0;
  uint32_t arrived = 0;
};

struct Fibre : Thread {
  Context context;
  State state;
  WarpCall call;
  int group;               // where it waits at group_sync
  const Barrier* barrier;  // and at barrier_wait
  unsigned parity;
  std::vector<Store> stores;
  std::vector<Product> products;
  size_t groups_begun;
  size_t groups_left;  // that products_wait does not wait for
};

struct Block : Place {
  static constexpr int groups_count = 16;
  std::vector<Fibre> fibres;
  std::vector<uint32_t> order;
  Context scheduler;
  void (*body)(const void*);
  const void* body_data;
  uint32_t live = 0;
  uint32_t at_barrier = 0;
  uint32_t at_cluster = 0;
  Group groups[groups_count];
  bool loads_are_late = false;
  std::deque<Load> loads;
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

// Threads that wait at a barrier may go on.
template <class Which>
void release(State state, Which which) {
  for (Fibre& fibre : here().fibres)
    if (fibre.state == state && which(fibre)) fibre.state = State::ready;
}
inline bool everyone(const Fibre&) { return true; }

// __syncthreads and cluster_sync count the threads that have not returned.
inline void check_barriers() {
  if (here().live == 0) return;
  if (here().at_barrier == here().live) {
    here().at_barrier = 0;
    release(State::at_block_barrier, everyone);
  }
  if (here().at_cluster == here().live) {
    here().at_cluster = 0;
    release(State::at_cluster, everyone);
  }
}

// group_sync counts the threads that have come.
inline void check_group(const Fibre& arrived) {
  const int number = arrived.group;
  Group& group = here().groups[number];
  if (++group.arrived < group.threads) return;
  group.arrived = 0;
  release(State::at_group, [number](const Fibre& fibre) { return fibre.group == number; });
}

void check_products(const Fibre& arrived);  // asynchronous.h
void copy_to_shared(const Load& load);

inline std::string example_of(const Fibre& fibre) {
  char text[160];
  const unsigned thread = fibre.number;
  if (fibre.state == State::at_warp) {
    std::snprintf(text, sizeof text, "thread %u at %s, mask 0x%08x", thread, spelling(fibre.call.operation), fibre.call.mask);
  } else if (fibre.state == State::at_group) {
    const Group& group = here().groups[fibre.group];
    std::snprintf(text, sizeof text, "thread %u at number %d, where %u of %u have come", thread, fibre.group, group.arrived, group.threads);
  } else if (fibre.state == State::at_phase) {
    std::snprintf(text, sizeof text, "thread %u for a phase of parity %u, which lacks %u arrivals and %d bytes", thread, fibre.parity,
                  unsigned(fibre.barrier->pending), int(fibre.barrier->bytes));
  } else {
    std::snprintf(text, sizeof text, "thread %u", thread);
  }
  return text;
}

inline void explain_deadlock() {
  static const std::pair<State, const char*> places[] = {
      {State::at_block_barrier, "__syncthreads"}, {State::at_warp, "a warp operation"},     {State::at_cluster, "cluster_sync"},
      {State::at_group, "group_sync"},            {State::at_phase, "barrier_wait"},        {State::at_products, "products_wait"},
  };
  std::string text;
  for (const auto& [state, place] : places) {
    uint32_t count = 0;
    const Fibre* example = nullptr;
    for (const Fibre& fibre : here().fibres) {
      if (fibre.state != state) continue;
      ++count;
      example = &fibre;
    }
    if (!count && state != State::at_block_barrier && state != State::at_warp) continue;
    text += std::to_string(count) + " at " + place;
    if (example && state != State::at_block_barrier) text += " (for example " + example_of(*example) + ")";
    text += ", ";
  }
  fail("the threads wait for each other for ever: %s%zu returned", text.c_str(), here().fibres.size() - here().live);
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
    fibre.stores.clear();
    fibre.products.clear();
    fibre.groups_begun = 0;
    prepare(fibre.context, stacks.at(fibre.number), Stacks::bytes, fibre_main);
  }
  here().live = static_cast<uint32_t>(here().fibres.size());
  here().at_barrier = here().at_cluster = 0;
  for (Group& group : here().groups) group = {};
  here().loads.clear();
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
        check_barriers();
      } else if (fibre.state == State::at_cluster) {
        ++here().at_cluster;
        check_barriers();
      } else if (fibre.state == State::at_group) {
        check_group(fibre);
      } else if (fibre.state == State::at_products) {
        check_products(fibre);
      } else if (fibre.state == State::finished) {
        --here().live;
        if (!fibre.stores.empty()) fail("thread %u returned and did not wait for its stores", number);
        check_finished(fibre);
        check_barriers();
      }
      if (!stacks.intact(number)) fail("thread %u needs more than %zu bytes of stack", number, Stacks::bytes);
      if (!here().error.empty()) return false;
    }
    if (progress) continue;
    if (here().loads.empty()) {
      explain_deadlock();
      return false;
    }
    const Load load = here().loads.front();
    here().loads.pop_front();
    copy_to_shared(load);
    if (!here().error.empty()) return false;
  }
  if (!here().loads.empty()) fail("all threads have returned, and nobody has waited for %zu loads", here().loads.size());
  return here().error.empty();
}

}  // namespace samebits
