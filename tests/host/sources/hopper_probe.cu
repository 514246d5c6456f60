// One small kernel for each thing that _hopper.cuh promises, and some that are wrong in one way each. To be compiled beside _hopper.cuh.
#include <cuda_bf16.h>

#include "_hopper.cuh"

extern __shared__ unsigned char raw[];
__device__ __forceinline__ unsigned char* tile_memory() { return raw + (-shared_address(raw) & 1023); }

// ---- boxes --------------------------------------------------------------------------------------------------------

// The bytes of a box as they lie in shared memory.
extern "C" __global__ void box_in(const __grid_constant__ TensorMap matrix, unsigned* out, int column, int row, int bytes, int expected) {
  unsigned char* tile = tile_memory();
  Barrier* done = reinterpret_cast<Barrier*>(tile + bytes);
  if (threadIdx.x == 0) {
    barrier_init(done, 1);
    barriers_are_made();
    barrier_expect(done, expected);
    load_box(tile, matrix, done, column, row);
  }
  __syncthreads();
  barrier_wait(done, 0);
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = reinterpret_cast<unsigned*>(tile)[i];
}

// Eight rows, read with or without waiting for them.
extern "C" __global__ void hurried_load(const __grid_constant__ TensorMap matrix, unsigned* out, bool wait) {
  unsigned char* tile = tile_memory();
  __shared__ Barrier done;
  if (threadIdx.x == 0) {
    barrier_init(&done, 1);
    barriers_are_made();
    barrier_expect(&done, 1024);
    load_box(tile, matrix, &done, 0, 0);
  }
  __syncthreads();
  if (wait) barrier_wait(&done, 0);
  for (int i = threadIdx.x; i < 1024 / 4; i += blockDim.x) out[i] = reinterpret_cast<unsigned*>(tile)[i];
  barrier_wait(&done, 0);
}

// A box to memory, of bytes that lie in shared memory as given.
extern "C" __global__ void box_out(const __grid_constant__ TensorMap matrix, const unsigned* in, int column, int row, int bytes, int shift) {
  unsigned char* tile = tile_memory() + shift;
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) reinterpret_cast<unsigned*>(tile)[i] = in[i];
  show_to_copies();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(matrix, tile, column, row);
    stores_begin();
    stores_are_done();
  }
}

// The tile is written again, with or without waiting until the store has read it.
extern "C" __global__ void overwritten_store(const __grid_constant__ TensorMap matrix, int bytes, bool wait) {
  unsigned char* tile = tile_memory();
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = 1;
  show_to_copies();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(matrix, tile, 0, 0);
    stores_begin();
    if (wait) stores_have_read();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = 2;
  __syncthreads();
  if (threadIdx.x == 0) stores_are_done();
}

// ---- barriers -----------------------------------------------------------------------------------------------------

// Two warps hand values to and fro through one place of shared memory.
extern "C" __global__ void ring(int* out, int rounds) {
  __shared__ Barrier full, empty;
  __shared__ int place[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(&full, 32);
    barrier_init(&empty, 32);
    barriers_are_made();
  }
  __syncthreads();
  for (int round = 0; round < rounds; round++) {
    if (threadIdx.x < 32) {
      barrier_wait(&empty, round & 1 ^ 1);  // before the first phase that of parity 1 is over
      place[lane] = 100 * round + lane;
      barrier_arrive(&full);
    } else {
      barrier_wait(&full, round & 1);
      out[32 * round + lane] = place[31 - lane];
      barrier_arrive_in(&empty, rank_in_cluster());
    }
  }
}

// What of a barrier of two arrivals keeps a phase open: out[0] is 1 after the phase, and 2 after the next one.
extern "C" __global__ void open_phase(const __grid_constant__ TensorMap matrix, int* out, int arrivals, int expected, int loads, int later) {
  unsigned char* tile = tile_memory();
  __shared__ Barrier done;
  if (threadIdx.x == 0) {
    barrier_init(&done, 2);
    barriers_are_made();
    for (int i = 0; i < loads; i++) load_box(tile, matrix, &done, 0, 0);  // before the bytes are expected, which may be
    if (expected >= 0) barrier_expect(&done, expected);
    for (int i = 0; i < arrivals; i++) barrier_arrive(&done);
  }
  __syncthreads();
  barrier_wait(&done, 0);
  out[0] = 1;
  if (threadIdx.x == 0)
    for (int i = 0; i < later; i++) barrier_arrive(&done);
  barrier_wait(&done, 1);
  out[0] = 2;
}

extern "C" __global__ void barrier_of_nobody(int* out) {
  __shared__ Barrier other;
  Barrier* barrier = reinterpret_cast<Barrier*>(raw);
  if (threadIdx.x == 0) barrier_init(&other, 1);
  barrier_arrive(barrier);
  out[0] = 1;
}

extern "C" __global__ void arrives_elsewhere(int* out) {
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_arrive_in(&barrier, 1);
  }
  out[0] = 1;
}

extern "C" __global__ void loads_to_both(const __grid_constant__ TensorMap matrix, int* out) {
  __shared__ Barrier done;
  if (threadIdx.x == 0) {
    barrier_init(&done, 1);
    load_box_to_both(tile_memory(), matrix, &done, 0, 0);
  }
  out[0] = 1;
}

extern "C" __global__ void load_left_behind(const __grid_constant__ TensorMap matrix) {
  __shared__ Barrier done;
  if (threadIdx.x == 0) {
    barrier_init(&done, 1);
    load_box(tile_memory(), matrix, &done, 0, 0);
  }
}

extern "C" __global__ void store_left_behind(const __grid_constant__ TensorMap matrix) {
  if (threadIdx.x == 0) store_box(matrix, tile_memory(), 0, 0);
}

// ---- threads ------------------------------------------------------------------------------------------------------

// Warps 0 and 1 meet at number 1, warps 2 to 4 at number 2, each `rounds` times; warp 5 does nothing.
extern "C" __global__ void groups(int* out, int rounds) {
  __shared__ int places[160];
  const int thread = threadIdx.x, first = thread < 64 ? 0 : 64, count = first ? 96 : 64;
  if (thread >= 160) return;
  int value = thread;
  for (int round = 0; round < rounds; round++) {
    places[thread] = value;
    group_sync(first ? 2 : 1, count);
    value = places[first + (thread - first + 1) % count] + round;
    group_sync(first ? 2 : 1, count);
  }
  out[thread] = value;
}

extern "C" __global__ void group_of(int* out, int number, int expected, int come) {
  if (threadIdx.x < come) group_sync(number, expected);
  out[threadIdx.x] = 1;
}

extern "C" __global__ void groups_differ(int* out) {
  group_sync(1, threadIdx.x < 32 ? 96 : 64);
  out[threadIdx.x] = 1;
}

// Most lanes come straight to the end, the last one comes after it has written.
extern "C" __global__ void all_of_a_cluster(int* out) {
  __shared__ int written;
  if (threadIdx.x == blockDim.x - 1) written = 7;
  cluster_sync();
  out[threadIdx.x] = written;
}

extern "C" __global__ void two_kinds_of_barrier(int* out) {
  if (threadIdx.x < 32) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

// ---- products -----------------------------------------------------------------------------------------------------

// a (64, 64), b (256, 64): the thread's sums of `steps` times 16 columns from column 16 * first on, to sums (128, 128).
extern "C" __global__ void products(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out, int first, int steps,
                                    bool add) {
  unsigned char* tile = tile_memory();
  __shared__ Barrier done;
  if (threadIdx.x == 0) {
    barrier_init(&done, 1);
    barriers_are_made();
    barrier_expect(&done, (64 + 256) * 128);
    load_box(tile, a, &done, 0, 0);
    load_box(tile + 64 * 128, b, &done, 0, 0);
  }
  __syncthreads();
  barrier_wait(&done, 0);
  const MatrixView rows = view_of(tile), columns = view_of(tile + 64 * 128);
  float sums[128];
  for (int i = 0; i < 128; i++) sums[i] = 1000.0f;
  products_begin();
  for (int i = first; i < first + steps; i++) multiply_add(sums, columns_from(rows, i), columns_from(columns, i), add || i > first);
  products_end();
  products_wait<0>();
  for (int i = 0; i < 128; i++) out[threadIdx.x * 128 + i] = sums[i];
}

// Two groups of one product each, of ones; between them the tiles are written again with twos. products_wait<1> waits for the first alone.
extern "C" __global__ void two_products(float* out, bool wait) {
  unsigned char* tile = tile_memory();
  __nv_bfloat16* elements = reinterpret_cast<__nv_bfloat16*>(tile);
  for (int i = threadIdx.x; i < (64 + 256) * 64; i += blockDim.x) elements[i] = __float2bfloat16_rn(1.0f);
  show_to_copies();
  __syncthreads();
  const MatrixView rows = view_of(tile), columns = view_of(tile + 64 * 128);
  float sums[128];
  for (int product = 0; product < 2; product++) {
    products_begin();
    multiply_add(sums, rows, columns, product);
    products_end();
  }
  if (wait) {
    products_wait<0>();
  } else {
    products_wait<1>();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (64 + 256) * 64; i += blockDim.x) elements[i] = __float2bfloat16_rn(2.0f);
  show_to_copies();
  products_wait<0>();
  for (int i = 0; i < 128; i++) out[threadIdx.x * 128 + i] = sums[i];
}

extern "C" __global__ void products_differ(float* out) {
  unsigned char* tile = tile_memory();
  float sums[128];
  multiply_add(sums, columns_from(view_of(tile), threadIdx.x == 70), view_of(tile + 64 * 128), 0);
  products_end();
  products_wait<0>();
  out[threadIdx.x] = sums[0];
}

extern "C" __global__ void waits_alone(float* out) {
  unsigned char* tile = tile_memory();
  float sums[128];
  multiply_add(sums, view_of(tile), view_of(tile + 64 * 128), 0);
  products_end();
  if (threadIdx.x != 5) products_wait<0>();
  out[threadIdx.x] = 1;
}
