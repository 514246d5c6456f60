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

#include "vectors.h"

#if !(defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)))
#include <ucontext.h>
#endif

namespace samebits {

// ---- switching from one stack to another -----------------------------------------------------------------------

#if defined(__linux__) && defined(__x86_64__)
// Saves what the calling convention says survives a call, on the old stack, and takes the same from the new one.
asm(R"(
.text
.p2align 4
samebits_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#define SAMEBITS_ASSEMBLY 1
inline void* first_frame(unsigned char* top, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(top);
  *--frame = nullptr;                           // entry never returns; this keeps the stack aligned as after a call
  *--frame = reinterpret_cast<void*>(entry);    // where `ret` goes
  for (int saved = 0; saved < 6; ++saved) *--frame = nullptr;
  return frame;
}
#elif defined(__linux__) && defined(__aarch64__)
asm(R"(
.text
.p2align 4
samebits_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#define SAMEBITS_ASSEMBLY 1
inline void* first_frame(unsigned char* top, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(top) - 20;
  for (int saved = 0; saved < 20; ++saved) frame[saved] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);  // x30, where `ret` goes
  return frame;
}
#endif

#ifdef SAMEBITS_ASSEMBLY
extern "C" void samebits_switch(void** save, void* load) asm("samebits_switch") __attribute__((visibility("hidden")));
using Context = void*;
inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  context = first_frame(stack + bytes, entry);
}
inline void change(Context& from, Context& to) { samebits_switch(&from, to); }
#else
using Context = ucontext_t;
inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
inline void change(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

// ---- a block and its threads ------------------------------------------------------------------------------------

enum class State { ready, at_block_barrier, at_warp, finished };

enum class Operation { syncwarp, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot };

inline const char* spelling(Operation operation) {
  static const char* const names[] = {"__syncwarp",      "__shfl_sync",     "__shfl_up_sync",
                                      "__shfl_down_sync", "__shfl_xor_sync", "a vote"};
  return names[static_cast<int>(operation)];
}

struct WarpCall {  // what a thread brings to a warp operation, and what it gets
  Operation operation;
  uint32_t mask;
  uint32_t operand;  // source lane, delta or lane mask
  uint32_t width;
  uint64_t value;
};

struct Fibre {
  Context context;
  State state;
  uint3 index;
  uint32_t number;  // within the block, x fastest, as CUDA counts lanes
  WarpCall call;
};

struct Block {
  uint3 index;
  dim3 dimensions;
  dim3 grid;
  std::vector<Fibre> fibres;
  std::vector<uint32_t> order;
  Context scheduler;
  void (*body)(void*);
  void* body_data;
  uint32_t live = 0;
  uint32_t at_barrier = 0;
  std::string error;
};

inline thread_local Block* block = nullptr;
inline thread_local Fibre* self = nullptr;

inline uint32_t lane_of(const Fibre& fibre) { return fibre.number & 31u; }

__attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (block->error.empty()) block->error = text;
}

// Leave the running fibre; it goes on when the scheduler finds it ready again, and never after a fault.
inline void wait(State state) {
  Fibre* const waiting = self;
  waiting->state = state;
  change(waiting->context, block->scheduler);
}

inline void fibre_main() {
  block->body(block->body_data);
  wait(State::finished);
}

// ---- what threads wait for --------------------------------------------------------------------------------------

void finish_warp_operation(Fibre* warp, uint32_t mask);  // in warp.h

inline Fibre* warp_of(const Fibre& fibre) { return &block->fibres[fibre.number & ~31u]; }

inline uint32_t lanes_in(const Fibre* warp) {
  const uint32_t rest = static_cast<uint32_t>(block->fibres.size()) - warp->number;
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
  if (block->live == 0 || block->at_barrier != block->live) return;
  block->at_barrier = 0;
  for (Fibre& fibre : block->fibres)
    if (fibre.state == State::at_block_barrier) fibre.state = State::ready;
}

inline void explain_deadlock() {
  uint32_t at_warp = 0;
  const Fibre* example = nullptr;
  for (const Fibre& fibre : block->fibres) {
    if (fibre.state != State::at_warp) continue;
    ++at_warp;
    example = &fibre;
  }
  char where[96] = "";
  if (example)
    std::snprintf(where, sizeof where, " (for example thread %u at %s, mask 0x%08x)", example->number,
                  spelling(example->call.operation), example->call.mask);
  fail("the threads wait for each other for ever: %u at __syncthreads, %u at a warp operation%s, %zu returned",
       block->at_barrier, at_warp, where, block->fibres.size() - block->live);
}

// ---- running a block --------------------------------------------------------------------------------------------

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

// Runs all threads of `block` to their end. False, with block->error set, after a fault.
inline bool run_block(Stacks& stacks) {
  for (Fibre& fibre : block->fibres) {
    fibre.state = State::ready;
    prepare(fibre.context, stacks.at(fibre.number), Stacks::bytes, fibre_main);
  }
  block->live = static_cast<uint32_t>(block->fibres.size());
  block->at_barrier = 0;
  while (block->live) {
    bool progress = false;
    for (uint32_t number : block->order) {
      Fibre& fibre = block->fibres[number];
      if (fibre.state != State::ready) continue;
      progress = true;
      self = &fibre;
      change(block->scheduler, fibre.context);
      if (!block->error.empty()) return false;
      if (fibre.state == State::at_warp) {
        check_warp(fibre);
      } else if (fibre.state == State::at_block_barrier) {
        ++block->at_barrier;
        check_barrier();
      } else if (fibre.state == State::finished) {
        --block->live;
        check_finished(fibre);
        check_barrier();
      }
      if (!stacks.intact(number)) fail("thread %u needs more than %zu bytes of stack", number, Stacks::bytes);
      if (!block->error.empty()) return false;
    }
    if (!progress) {
      explain_deadlock();
      return false;
    }
  }
  return true;
}

}  // namespace samebits
