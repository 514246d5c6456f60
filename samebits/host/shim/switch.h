// Switching from one stack to another: by hand where the calling convention is known here, else through ucontext.
#pragma once

#include <cstddef>

#if !(defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)))
#include <ucontext.h>
#endif

namespace samebits {

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

}  // namespace samebits
