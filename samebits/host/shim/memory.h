// Loads and stores with cache hints, which change no value; atomics, since blocks may run on several OS threads.
#pragma once

#include <cstdint>

#include "bits.h"

#define SAMEBITS_LOAD(name) \
  template <class T>        \
  T name(const T* address) { \
    return *address;        \
  }
#define SAMEBITS_STORE(name)          \
  template <class T>                  \
  void name(T* address, T value) {    \
    *address = value;                 \
  }
SAMEBITS_LOAD(__ldg)
SAMEBITS_LOAD(__ldca)
SAMEBITS_LOAD(__ldcg)
SAMEBITS_LOAD(__ldcs)
SAMEBITS_LOAD(__ldlu)
SAMEBITS_LOAD(__ldcv)
SAMEBITS_STORE(__stwb)
SAMEBITS_STORE(__stcg)
SAMEBITS_STORE(__stcs)
SAMEBITS_STORE(__stwt)
#undef SAMEBITS_LOAD
#undef SAMEBITS_STORE

inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicOr(unsigned* address, unsigned value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }
inline float atomicAdd(float* address, float value) {
  uint32_t* const bits = reinterpret_cast<uint32_t*>(address);
  uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    const float old = samebits::cast_bits<float>(seen);
    const uint32_t next = samebits::cast_bits<uint32_t>(samebits::canonical(old + value));
    if (__atomic_compare_exchange_n(bits, &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
  }
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() {}
