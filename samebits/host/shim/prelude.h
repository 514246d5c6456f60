// What the CUDA compiler knows by itself and a host compiler does not: qualifiers, vector types, built-in
// variables and functions. Included before a kernel's own source, which is compiled unchanged.
//
// The promise: every value has the bits it has on the GPU, except for the hardware's approximate functions
// (rsqrt, exp, tanh, erf), which take recorded values where some were given (see recorded.h).
#pragma once

#include <cfloat>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <math.h>

#define SAMEBITS_HOST 1

#include "bits.h"
#include "vectors.h"
#include "threads.h"
#include "recorded.h"
#include "arithmetic.h"
#include "halves.h"
#include "hopper.h"
#include "memory.h"
#include "launch.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ thread_local  // an OS thread runs one block at a time
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

#define threadIdx (::samebits::self->index)
#define blockIdx (::samebits::block->index)
#define blockDim (::samebits::block->dimensions)
#define gridDim (::samebits::block->grid)
#define warpSize 32

// Last, so that no standard header above sees them.
#define rsqrtf(x) ::samebits::approximate(::samebits::Approximate::rsqrtf, x)
#define expf(x) ::samebits::approximate(::samebits::Approximate::expf, x)
#define tanhf(x) ::samebits::approximate(::samebits::Approximate::tanhf, x)
#define erff(x) ::samebits::approximate(::samebits::Approximate::erff, x)
#define fminf(a, b) ::samebits::smaller(a, b)
#define fmaxf(a, b) ::samebits::larger(a, b)
#define sqrtf(x) __fsqrt_rn(x)
#define fmaf(a, b, c) __fmaf_rn(a, b, c)
