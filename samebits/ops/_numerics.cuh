// Device functions that reproduce ATen's arithmetic, one rounding at a time.
//
// Every function here stands for something eager PyTorch computes on the GPU: a cast, a product in its own kernel, a
// step of Welford's recurrence, a fold of a reduction tree. Sums and products are spelled with the `_rn` intrinsics,
// which the compiler may neither contract nor reorder; an FMA appears only where ATen's own machine code has one.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr unsigned ALL_LANES = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------------------------
// Elements: fp32, fp16 and bf16, alone and in pairs.
//
// Eager widens a half-precision element to fp32, computes, and rounds once (to nearest even). Packed arithmetic on
// pairs gives the same bits with half the instructions: a product of two halves is exact in fp32, and a sum rounded
// first to fp32 and then to half equals the sum rounded once, since fp32 carries at least 2p + 2 bits (p = 11 or 8).
// ---------------------------------------------------------------------------------------------------------------------

template <class E> struct PairOf;
template <> struct PairOf<float> { using type = float2; };
template <> struct PairOf<__half> { using type = __half2; };
template <> struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };
template <class E> using Pair = typename PairOf<E>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float2 widen(float2 p) { return p; }
__device__ __forceinline__ float2 widen(__half2 p) { return __half22float2(p); }
__device__ __forceinline__ float2 widen(__nv_bfloat162 p) { return __bfloat1622float2(p); }

// One rounding from fp32 to the element type: ATen's cast.
template <class E> __device__ __forceinline__ E round_to(float x);
template <> __device__ __forceinline__ float round_to<float>(float x) { return x; }
template <> __device__ __forceinline__ __half round_to<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 round_to<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <class E> __device__ __forceinline__ Pair<E> round_pair(float lo, float hi);
template <> __device__ __forceinline__ float2 round_pair<float>(float lo, float hi) { return make_float2(lo, hi); }
template <> __device__ __forceinline__ __half2 round_pair<__half>(float lo, float hi) { return __floats2half2_rn(lo, hi); }
template <> __device__ __forceinline__ __nv_bfloat162 round_pair<__nv_bfloat16>(float lo, float hi) { return __floats2bfloat162_rn(lo, hi); }

// ATen's elementwise `a * b` and `a + b` on tensors: fp32 inside, one rounding to the element type.
__device__ __forceinline__ float2 product(float2 a, float2 b) { return make_float2(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y)); }
__device__ __forceinline__ __half2 product(__half2 a, __half2 b) { return __hmul2_rn(a, b); }
__device__ __forceinline__ __nv_bfloat162 product(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmul2_rn(a, b); }

__device__ __forceinline__ float2 sum(float2 a, float2 b) { return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)); }
__device__ __forceinline__ __half2 sum(__half2 a, __half2 b) { return __hadd2_rn(a, b); }
__device__ __forceinline__ __nv_bfloat162 sum(__nv_bfloat162 a, __nv_bfloat162 b) { return __hadd2_rn(a, b); }

// ATen's `1 + a`: the scalar joins in fp32, one rounding.
template <class E> __device__ __forceinline__ Pair<E> one_plus(Pair<E> a) { return sum(round_pair<E>(1.0f, 1.0f), a); }

// `clip(-65504, 65504)`: infinities become the largest half, NaN stays.
template <class E> __device__ __forceinline__ Pair<E> clip_to_half(Pair<E> p) {
  const float2 f = widen(p);
  return round_pair<E>(f.x != f.x ? f.x : fminf(fmaxf(f.x, -65504.0f), 65504.0f),
                       f.y != f.y ? f.y : fminf(fmaxf(f.y, -65504.0f), 65504.0f));
}

// N consecutive elements, loaded or stored with one instruction of N * sizeof(E) bytes (at most 16).
template <class E, int N> struct alignas(sizeof(E) * N) Vector {
  Pair<E> pair[N / 2];
};

// The words that one memory instruction moves. Copying a Vector member by member would make an instruction a pair.
template <int BYTES> struct WordsOf;
template <> struct WordsOf<4> { using type = unsigned; };
template <> struct WordsOf<8> { using type = uint2; };
template <> struct WordsOf<16> { using type = uint4; };
template <class V> using Words = typename WordsOf<sizeof(V)>::type;

template <class V> __device__ __forceinline__ Words<V>& words(V& v) { return *reinterpret_cast<Words<V>*>(&v); }

// From global or shared memory.
template <class E, int N> __device__ __forceinline__ Vector<E, N> load(const E* p) {
  Vector<E, N> v;
  words(v) = *reinterpret_cast<const Words<Vector<E, N>>*>(p);
  return v;
}

// The compiler likes to keep elements widened in registers from one use of them to the next. Told to forget, it widens them again,
// and the registers are free for what is on its way from memory.
template <class E, int N> __device__ __forceinline__ void forget_widened(Vector<E, N>& v) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(E) == 2) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) asm volatile("" : "+r"(reinterpret_cast<unsigned&>(v.pair[k])));
  }
#endif
}

// To global memory. Left to itself the compiler may split a store into words; the intrinsic is one instruction.
template <class E, int N> __device__ __forceinline__ void store(E* p, Vector<E, N> v) {
#ifdef __CUDA_ARCH__
  __stwb(reinterpret_cast<Words<Vector<E, N>>*>(p), words(v));
#else
  *reinterpret_cast<Words<Vector<E, N>>*>(p) = words(v);
#endif
}

// From global memory, of what nobody reads again soon: it is the first to leave the L2 and makes room there for what is written.
template <class E, int N> __device__ __forceinline__ Vector<E, N> load_last(const E* p) {
#ifdef __CUDA_ARCH__
  Vector<E, N> v;
  words(v) = __ldcs(reinterpret_cast<const Words<Vector<E, N>>*>(p));
  return v;
#else
  return load<E, N>(p);
#endif
}

template <class E, int N> __device__ __forceinline__ void store_shared(E* p, Vector<E, N> v) { *reinterpret_cast<Words<Vector<E, N>>*>(p) = words(v); }

// ---------------------------------------------------------------------------------------------------------------------
// Activations, in fp32 as ATen's kernels compute them.
// ---------------------------------------------------------------------------------------------------------------------

// `F.silu`: a true division by 1 + exp(-x).
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x))); }

// `x.tanh()`, rounded once.
template <class E> __device__ __forceinline__ Pair<E> tanh_of(Pair<E> x) {
  const float2 f = widen(x);
  return round_pair<E>(tanhf(f.x), tanhf(f.y));
}

// `F.gelu(approximate="tanh")`: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), the inner sum an FMA.
__device__ __forceinline__ float one_plus_gelu_tanh(float x) {
  const float cube = __fmul_rn(__fmul_rn(x, x), x);
  const float inner = __fmul_rn(0.79788456080286535588f, __fmaf_rn(0.044715f, cube, x));
  return __fadd_rn(1.0f, tanhf(inner));
}
__device__ __forceinline__ float gelu_tanh(float x) { return __fmul_rn(__fmul_rn(0.5f, x), one_plus_gelu_tanh(x)); }

// ---------------------------------------------------------------------------------------------------------------------
// Rows in shared memory. A row is read twice, for its statistics and for its result, and the two want different shapes:
// the first follows ATen's threads, the second the widest memory instruction. Copied there without passing through a
// register, every row that a multiprocessor owns can be in flight at once.
// ---------------------------------------------------------------------------------------------------------------------

// Start copying N elements, 8 or 16 bytes, from global to shared memory.
template <class E, int N> __device__ __forceinline__ void copy_async(E* shared, const E* global) {
#ifdef __CUDA_ARCH__
  constexpr int BYTES = N * sizeof(E);
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
#else
  store_shared<E, N>(shared, load<E, N>(global));
#endif
}

// Wait until this thread's own copies have arrived; another thread's need a barrier after it.
__device__ __forceinline__ void wait_for_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Welford's recurrence as ATen's LayerNorm runs it (vectorized_layer_norm_kernel).
// ---------------------------------------------------------------------------------------------------------------------

struct Welford {
  float mean;
  float m2;  // the sum of squared distances from the mean
};

// One more value; `reciprocal` is 1 / (count including it), correctly rounded. Both updates are FMAs in ATen's code.
__device__ __forceinline__ void welford_push(Welford& w, float x, float reciprocal) {
  const float delta = __fsub_rn(x, w.mean);
  const float mean = __fmaf_rn(delta, reciprocal, w.mean);
  w.m2 = __fmaf_rn(delta, __fsub_rn(x, mean), w.m2);
  w.mean = mean;
}

// Two partial results become one. `lower` is the thread that keeps the result, `upper` the one it takes in; the
// formula is not symmetric in them. Counts are whole numbers in fp32, as in ATen.
__device__ __forceinline__ Welford welford_combine(Welford lower, Welford upper, float n_lower, float n_upper) {
  // Plain operators, so that the compiler folds them where the counts are constants (it never folds the intrinsics).
  const float n = n_lower + n_upper;
  if (n == 0.0f) return Welford{0.0f, 0.0f};
  const float reciprocal = 1.0f / n;  // a correctly rounded division
  const float weight_upper = n_upper * reciprocal, weight_lower = n_lower * reciprocal;
  const float delta = __fsub_rn(lower.mean, upper.mean);
  const float spread = __fmul_rn(__fmul_rn(delta, delta), n_upper);
  return Welford{__fmaf_rn(weight_upper, upper.mean, __fmul_rn(weight_lower, lower.mean)),
                 __fmaf_rn(weight_lower, spread, __fadd_rn(upper.m2, lower.m2))};
}

__device__ __forceinline__ Welford shuffle_down(Welford w, int offset, int width = 32) {
  return Welford{__shfl_down_sync(ALL_LANES, w.mean, offset, width), __shfl_down_sync(ALL_LANES, w.m2, offset, width)};
}

// `rsqrt(variance + eps)`: two eager kernels, two roundings.
__device__ __forceinline__ float reciprocal_deviation(float variance, float eps) { return rsqrtf(__fadd_rn(variance, eps)); }

// ---------------------------------------------------------------------------------------------------------------------
// Sums as ATen's reduce_kernel folds them.
// ---------------------------------------------------------------------------------------------------------------------

// The factor with which ATen turns a sum into a mean: outputs over inputs, both converted to fp32 before the division, so
// from 2^24 elements on not always the number nearest to 1 / width.
__device__ __forceinline__ float mean_factor(long long rows, int width) { return __fdiv_rn((float)rows, (float)(rows * width)); }

// Fold over `width` neighbouring lanes by halves: offsets width/2, ..., 2, 1. ATen shuffles down and keeps lane 0;
// since a + b = b + a in every bit, the butterfly leaves lane 0's sum in every lane.
__device__ __forceinline__ float fold_lanes(float a, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) a = __fadd_rn(a, __shfl_xor_sync(ALL_LANES, a, offset));
  return a;
}

// A thread's own accumulators, in order: ((a0 + a1) + a2) + ...
template <int N> __device__ __forceinline__ float fold_accumulators(const float (&a)[N]) {
  float total = a[0];
#pragma unroll
  for (int i = 1; i < N; i++) total = __fadd_rn(total, a[i]);
  return total;
}
