// One small kernel for each thing that the shim promises. The GPU ring runs the same file on a GPU and compares.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define THREAD (blockIdx.x * blockDim.x + threadIdx.x)

// ---- conversions: one value a thread ----------------------------------------------------------------------------

extern "C" __global__ void float_to_halves(const float* __restrict__ x, unsigned short* bf16, unsigned short* fp16, int n) {
  const int i = THREAD;
  if (i >= n) return;
  bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
  fp16[i] = __half_as_ushort(__float2half_rn(x[i]));
}

extern "C" __global__ void halves_to_float(const unsigned short* __restrict__ x, float* from_bf16, float* from_fp16, int n) {
  const int i = THREAD;
  if (i >= n) return;
  from_bf16[i] = __bfloat162float(__ushort_as_bfloat16(x[i]));
  from_fp16[i] = __half2float(__ushort_as_half(x[i]));
}

// ---- arithmetic: one pair (or triple) a thread, each operation into its own row of the result ---------------------

extern "C" __global__ void float_arithmetic(const float* a, const float* b, const float* c, float* results, int n) {
  const int i = THREAD;
  if (i >= n) return;
  results[0 * n + i] = __fadd_rn(a[i], b[i]);
  results[1 * n + i] = __fsub_rn(a[i], b[i]);
  results[2 * n + i] = __fmul_rn(a[i], b[i]);
  results[3 * n + i] = __fdiv_rn(a[i], b[i]);
  results[4 * n + i] = __fmaf_rn(a[i], b[i], c[i]);
  results[5 * n + i] = __frcp_rn(a[i]);
  results[6 * n + i] = __fsqrt_rn(a[i]);
  results[7 * n + i] = fminf(a[i], b[i]);
  results[8 * n + i] = fmaxf(a[i], b[i]);
}

template <class Pair>
__device__ __forceinline__ Pair pair_from(unsigned bits) {
  return *reinterpret_cast<Pair*>(&bits);
}
template <class Pair>
__device__ __forceinline__ unsigned bits_of(Pair pair) {
  return *reinterpret_cast<unsigned*>(&pair);
}

template <class Pair>
__device__ __forceinline__ void pair_arithmetic(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* results, int n) {
  const int i = THREAD;
  if (i >= n) return;
  const Pair x = pair_from<Pair>(a[i]), y = pair_from<Pair>(b[i]), z = pair_from<Pair>(c[i]);
  results[0 * n + i] = bits_of(__hadd2_rn(x, y));
  results[1 * n + i] = bits_of(__hsub2_rn(x, y));
  results[2 * n + i] = bits_of(__hmul2_rn(x, y));
  results[3 * n + i] = bits_of(__hfma2(x, y, z));
}

extern "C" __global__ void bf16_arithmetic(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* results, int n) {
  pair_arithmetic<__nv_bfloat162>(a, b, c, results, n);
}

extern "C" __global__ void fp16_arithmetic(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* results, int n) {
  pair_arithmetic<__half2>(a, b, c, results, n);
}

extern "C" __global__ void pack(const float* a, const float* b, unsigned* bf16, unsigned* fp16, int n) {
  const int i = THREAD;
  if (i >= n) return;
  bf16[i] = bits_of(__floats2bfloat162_rn(a[i], b[i]));
  fp16[i] = bits_of(__floats2half2_rn(a[i], b[i]));
}

extern "C" __global__ void reciprocal_roots(const float* x, float* y, int n) {
  const int i = THREAD;
  if (i < n) y[i] = rsqrtf(x[i]);
}

// ---- warps --------------------------------------------------------------------------------------------------------

// Every shuffle of the lane's own number: 4 kinds x 5 widths x 32 operands x 32 lanes.
extern "C" __global__ void shuffles(int* results) {
  const int lane = threadIdx.x;
  for (int power = 0; power < 5; ++power) {
    const int width = 32 >> power;
    for (int operand = 0; operand < 32; ++operand) {
      int* out = results + (power * 32 + operand) * 4 * 32 + lane;
      out[0 * 32] = __shfl_sync(0xFFFFFFFFu, lane, operand, width);
      out[1 * 32] = __shfl_up_sync(0xFFFFFFFFu, lane, operand, width);
      out[2 * 32] = __shfl_down_sync(0xFFFFFFFFu, lane, operand, width);
      out[3 * 32] = __shfl_xor_sync(0xFFFFFFFFu, lane, operand, width);
    }
  }
}

// Halves of a warp go different ways and meet again.
extern "C" __global__ void split_warps(int* results) {
  const int lane = threadIdx.x & 31;
  int value = lane;
  if (lane < 16) {
    value += __shfl_xor_sync(0x0000FFFFu, value, 1);
  } else {
    value -= __shfl_xor_sync(0xFFFF0000u, value, 8);
    value += __shfl_xor_sync(0xFFFF0000u, value, 2);
  }
  __syncwarp();
  results[threadIdx.x] = value + 1000 * __shfl_sync(0xFFFFFFFFu, value, 31 - lane) + 100000 * __popc(__ballot_sync(0xFFFFFFFFu, lane & 1));
}

extern "C" __global__ void shuffle_types(const float* x, double* wide, unsigned short* narrow, unsigned* pairs) {
  const int lane = threadIdx.x;
  wide[lane] = __shfl_down_sync(0xFFFFFFFFu, static_cast<double>(x[lane]) / 3, 5);
  narrow[lane] = __half_as_ushort(__shfl_xor_sync(0xFFFFFFFFu, __float2half_rn(x[lane]), 3));
  pairs[lane] = bits_of(__shfl_up_sync(0xFFFFFFFFu, __floats2bfloat162_rn(x[lane], -x[lane]), 7));
}

// ---- blocks -------------------------------------------------------------------------------------------------------

// A sum over a block of 8 warps, in a fixed tree, through static and dynamic shared memory and in two rounds, so that
// a barrier that lets a thread through too early or too late shows.
extern "C" __global__ void __launch_bounds__(256) block_sum(const float* __restrict__ x, float* y, int rounds) {
  extern __shared__ float rows[];
  __shared__ float of_warp[8];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread & 31, warp = thread >> 5;
  float total = 0;
  for (int round = 0; round < rounds; ++round) {
    rows[thread] = __fmul_rn(x[blockIdx.x * 256 + thread], static_cast<float>(round + 1));
    __syncthreads();
    float sum = rows[255 - thread];
    for (int offset = 16; offset > 0; offset >>= 1) sum = __fadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, offset));
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    if (thread == 0)
      for (int other = 0; other < 8; ++other) total = __fadd_rn(total, of_warp[other]);
    __syncthreads();
  }
  if (thread == 0) y[blockIdx.x] = total;
}

// Threads that return early are not waited for.
extern "C" __global__ void early_return(int* results, int keep) {
  if (threadIdx.x >= keep) return;
  __shared__ int last;
  if (threadIdx.x == keep - 1) last = threadIdx.x;
  __syncthreads();
  results[threadIdx.x] = last;
}

extern "C" __global__ void where(uint3* threads, uint3* blocks, dim3* sizes) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int at = block * blockDim.x * blockDim.y * blockDim.z + thread;
  threads[at] = threadIdx;
  blocks[at] = blockIdx;
  if (at == 0) {
    sizes[0] = gridDim;
    sizes[1] = blockDim;
  }
}

extern "C" __global__ void count(int* counter, unsigned long long* wide, float* sum) {
  atomicAdd(counter, 1);
  atomicAdd(wide, 1ull << 33);
  atomicAdd(sum, 0.5f);
}

// Every type that a parameter may have, between pointers.
extern "C" __global__ void arguments(bool b, double* out, signed char c, unsigned char uc, short s, unsigned short us, int i, unsigned u,
                                     long long l, unsigned long long* big, unsigned long long ul, float f, double d) {
  out[0] = b;
  out[1] = c;
  out[2] = uc;
  out[3] = s;
  out[4] = us;
  out[5] = i;
  out[6] = u;
  out[7] = f;
  out[8] = d;
  big[0] = static_cast<unsigned long long>(l);
  big[1] = ul;
}
