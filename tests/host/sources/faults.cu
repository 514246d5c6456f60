// Kernels that are wrong, each in one way that hangs or silently corrupts on a GPU. The shim must say which.
#include <cuda_bf16.h>

extern "C" __global__ void half_a_warp_at_a_barrier(int* out) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __shfl_sync(0xFFFFFFFFu, 1, 0);
  }
  out[threadIdx.x] = 1;
}

extern "C" __global__ void lane_returned(int* out) {
  if (threadIdx.x == 3) return;
  out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1, 1);
}

extern "C" __global__ void lane_returns_late(int* out) {
  if (threadIdx.x == 31) return;  // the others already wait when the last thread runs
  out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1, 1);
}

extern "C" __global__ void lane_missing(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1, 1); }

extern "C" __global__ void masks_differ(int* out) {
  const unsigned mask = threadIdx.x < 8 ? 0xFFFFFFFFu : 0xFFFFFFFEu;
  out[threadIdx.x] = __shfl_sync(mask, 1, 5);
}

extern "C" __global__ void widths_differ(int* out) {
  out[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFu, 1, 1, threadIdx.x < 16 ? 16 : 32);
}

extern "C" __global__ void kinds_differ(int* out) {
  out[threadIdx.x] = threadIdx.x & 1 ? __shfl_down_sync(0xFFFFFFFFu, 1, 1) : __shfl_up_sync(0xFFFFFFFFu, 1, 1);
}

extern "C" __global__ void not_named(int* out) { out[threadIdx.x] = __shfl_sync(0x0000FFFFu, 1, 0); }

extern "C" __global__ void reads_unnamed(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0x0000FFFFu, 1, 1);
}

extern "C" __global__ void odd_width(int* out) { out[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, 1, 0, 24); }

extern "C" __global__ void shared_overflow(int* out) {
  extern __shared__ int shared[];
  shared[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

extern "C" __global__ void reads_unwritten(float* out) {
  extern __shared__ int shared[];
  out[threadIdx.x] = __int_as_float(shared[threadIdx.x]);
}

extern "C" __global__ void deep_stack(int* out, int depth) {
  volatile int local[48 << 10];
  for (int i = 0; i < depth; ++i) local[i] = i;
  out[threadIdx.x] = local[depth - 1];
}

// Right in ascending order of the threads, wrong in any other: a barrier is missing.
extern "C" __global__ void missing_barrier(int* out, int salt) {
  __shared__ int last[32];
  last[threadIdx.x] = salt + threadIdx.x;
  out[threadIdx.x] = threadIdx.x ? last[threadIdx.x - 1] : 0;
}
