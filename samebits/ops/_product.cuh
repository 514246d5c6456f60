// y = finish(x w^T + bias), bf16 in and out, sums in fp32: a product of matrices whose tiles are finished before they leave the chip.
//
// The sums have the bits of the library's product: each element is summed up by the same instruction over 16 columns after 16 columns,
// from the first to the last, and rounded to bf16 once, after the bias. (Where the library splits the columns among blocks it sums in
// another order; such shapes the gate refuses.) What finishes a tile is what eager computes from the rounded product.
//
// A block takes tiles of 128 rows and 256 columns, one after another; its 12 warps have three parts, which work at the same time:
//
//   warp 0         loads: x and w come in stages of 64 columns; two neighbouring blocks, a cluster, share the half of what they load
//   warps 4 to 11  multiply, two groups of 64 rows; they add the bias, round, and put the tile into shared memory
//   warps 1 to 3   finish the tile there and store it, while the others multiply the next one
//
// Macros: BIAS 0 or 1; WEIGHTS 1, or 2: a tile then has 128 columns of each product, and the first 128 are what is stored;
// CLUSTER 2, or 1 where a block shares nothing; SIDE_BY_SIDE 1 where the blocks of a cluster take neighbouring columns and share rows
// of x, 0 where they take neighbouring rows and share rows of w; GROUP how many rows of cluster tiles are taken together, column by
// column, so that what they read stays in the L2.

#pragma once

#include "_hopper.cuh"
#include "_numerics.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, STAGES = 3;
constexpr int STEP = 64;        // columns of x and w in a stage: rows of 128 bytes
constexpr int HALF_ROWS = 64;   // of a tile: one group's
constexpr int OUT_COLUMNS = TILE_COLUMNS / WEIGHTS;
constexpr int CLUSTER_ROWS = TILE_ROWS * (SIDE_BY_SIDE ? 1 : CLUSTER), CLUSTER_COLUMNS = OUT_COLUMNS * (SIDE_BY_SIDE ? CLUSTER : 1);
constexpr int LANES = 128;      // threads of a group of four warps
constexpr int FINISHERS = 96;   // threads of warps 1 to 3
constexpr int PRODUCT_THREADS = 3 * LANES;

using Half = __nv_bfloat16;
constexpr int X_TILE = TILE_ROWS * STEP, W_TILE = TILE_COLUMNS * STEP;  // elements of a stage
constexpr int STAGE_BYTES = (X_TILE + W_TILE) * 2;
constexpr int CHUNK = HALF_ROWS * STEP;      // 64 columns of a half tile, rows of 128 bytes swizzled
constexpr int HALF_TILE = HALF_ROWS * TILE_COLUMNS;  // of 16-bit results, chunk after chunk

// Shared memory, from a multiple of 1,024 bytes on; what a kernel needs besides lies behind it.
struct Shared {
  Half stages[STAGES][X_TILE + W_TILE];
  Half tiles[2][HALF_TILE];
  Barrier full[STAGES], empty[STAGES];  // a stage was loaded; it was read, by every group that it was loaded for
  Barrier placed[2], stored[2];         // a half tile was put into `tiles`; it was stored
};

__device__ __forceinline__ Shared& shared_memory(unsigned char* raw) {
  return *reinterpret_cast<Shared*>(raw + (-shared_address(raw) & 1023));
}

// Where a block's tile begins.
struct Tile {
  int row, column;
};

struct Tiles {
  int down, across;  // of clusters
  int rank;          // of this block in its cluster

  __device__ __forceinline__ int count() const { return down * across; }
  __device__ __forceinline__ Tile tile_at(int number) const {
    const int first = number / (GROUP * across) * GROUP, height = min(GROUP, down - first), inside = number - first * across;
    return Tile{(first + inside % height) * CLUSTER_ROWS + (SIDE_BY_SIDE ? 0 : rank * TILE_ROWS),
                inside / height * CLUSTER_COLUMNS + (SIDE_BY_SIDE ? rank * OUT_COLUMNS : 0)};
  }
};

__device__ __forceinline__ Tiles tiles_of(int rows, int columns) {
  return Tiles{(rows + CLUSTER_ROWS - 1) / CLUSTER_ROWS, (columns + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS,
               CLUSTER == 2 ? static_cast<int>(rank_in_cluster()) : 0};
}

// The stage that comes next, and the parity of the phase that its barriers are in.
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// One thread: the stages of all tiles of this block.
__device__ __forceinline__ void load_tiles(Shared& shared, const TensorMap& x, const TensorMap& w, const TensorMap& w2, const Tiles& tiles, int width) {
  Turn turn;
  for (int number = blockIdx.x / CLUSTER; number < tiles.count(); number += gridDim.x / CLUSTER) {
    const Tile tile = tiles.tile_at(number);
    for (int k = 0; k < width; k += STEP, turn.next()) {
      Barrier* full = &shared.full[turn.stage];
      Half *x_to = shared.stages[turn.stage], *w_to = x_to + X_TILE;
      barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
      barrier_expect(full, STAGE_BYTES);
      // Halves of the tile of w: columns of the result that follow each other, or the same ones of both products.
      const int second = WEIGHTS == 2 ? tile.column : tile.column + TILE_COLUMNS / 2;
      const TensorMap& other = WEIGHTS == 2 ? w2 : w;
#if CLUSTER == 2 && SIDE_BY_SIDE
      load_box_to_both(x_to + tiles.rank * (X_TILE / 2), x, full, k, tile.row + tiles.rank * HALF_ROWS);
#else
      load_box(x_to, x, full, k, tile.row);
      load_box(x_to + X_TILE / 2, x, full, k, tile.row + HALF_ROWS);
#endif
#if CLUSTER == 2 && !SIDE_BY_SIDE
      load_box_to_both(w_to + tiles.rank * (W_TILE / 2), tiles.rank == 0 ? w : other, full, k, tiles.rank == 0 ? tile.column : second);
#else
      load_box(w_to, w, full, k, tile.column);
      load_box(w_to + W_TILE / 2, other, full, k, second);
#endif
    }
  }
}

// The group's threads say that they have read a stage, to every block that loads into it.
__device__ __forceinline__ void release(Shared& shared, int stage, int thread) {
#if CLUSTER == 2
  if (thread < CLUSTER) barrier_arrive_in(&shared.empty[stage], thread);
#else
  if (thread == 0) barrier_arrive(&shared.empty[stage]);
#endif
}

// 128 threads: the products of 64 rows, with the bias, rounded, chunk after chunk into shared.tiles[half].
__device__ __forceinline__ void multiply_tiles(Shared& shared, const Half* bias, const Tiles& tiles, int columns, int width, int half) {
  const int thread = threadIdx.x % LANES, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  Half* tile_to = shared.tiles[half];
  Turn turn;
  unsigned parity = 1;  // of shared.stored: nothing has to be stored before the first tile
  float sums[128];
  for (int number = blockIdx.x / CLUSTER; number < tiles.count(); number += gridDim.x / CLUSTER, parity ^= 1) {
    const Tile tile = tiles.tile_at(number);
    int before = 0;
    for (int k = 0; k < width; k += STEP, turn.next()) {
      barrier_wait(&shared.full[turn.stage], turn.parity);
      const MatrixView a = view_of(shared.stages[turn.stage] + half * (X_TILE / 2)), b = view_of(shared.stages[turn.stage] + X_TILE);
      products_begin();
#pragma unroll
      for (int i = 0; i < STEP / 16; i++) multiply_add(sums, columns_from(a, i), columns_from(b, i), k | i);
      products_end();
      products_wait<1>();
      if (k > 0) release(shared, before, thread);
      before = turn.stage;
    }
#if BIAS
    Pair<Half> biases[TILE_COLUMNS / 8];
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS / 8; j++) {
      const int at = tile.column + 8 * j + column;
      biases[j] = at < columns ? *reinterpret_cast<const Pair<Half>*>(bias + at) : Pair<Half>{};
    }
#endif
    barrier_wait(&shared.stored[half], parity);
    products_wait<0>();
    release(shared, before, thread);
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS / 8; j++) {
#pragma unroll
      for (int below = 0; below < 2; below++) {
        float2 f = make_float2(sums[4 * j + 2 * below], sums[4 * j + 2 * below + 1]);
#if BIAS
        f = sum(f, widen(biases[j]));
#endif
        const int sixteen_bytes = (j % 8) ^ (row % 8);
        Half* to = tile_to + j / 8 * CHUNK + (row + 8 * below) * STEP + sixteen_bytes * 8 + column;
        *reinterpret_cast<Pair<Half>*>(to) = round_pair<Half>(f.x, f.y);
      }
    }
    show_to_copies();
    barrier_arrive(&shared.placed[half]);
  }
}

// Threads 0 to 95 of the finishers: each half tile is finished in its place and stored.
template <class Finish>
__device__ __forceinline__ void finish_tiles(Shared& shared, const TensorMap& y, const Tiles& tiles, int thread, Finish finish) {
  unsigned parity = 0;
  for (int number = blockIdx.x / CLUSTER; number < tiles.count(); number += gridDim.x / CLUSTER, parity ^= 1) {
    const Tile tile = tiles.tile_at(number);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      barrier_wait(&shared.placed[half], parity);
      Half* results = shared.tiles[half];
#pragma unroll 2
      for (int at = thread * 8; at < HALF_ROWS * OUT_COLUMNS; at += FINISHERS * 8) finish.finish(results + at);
      show_to_copies();
      group_sync(1, FINISHERS);
      if (thread == 0) {
#pragma unroll
        for (int chunk = 0; chunk < OUT_COLUMNS / STEP; chunk++) {
          store_box(y, results + chunk * CHUNK, tile.column + chunk * STEP, tile.row + half * HALF_ROWS);
        }
        stores_begin();
        stores_have_read();
        barrier_arrive(&shared.stored[half]);
      }
    }
  }
  if (thread == 0) stores_are_done();
}

// The whole kernel. finish.finish(eight) replaces eight results in shared memory; those of the second product lie HALF_TILE / 2 further.
template <class Finish>
__device__ __forceinline__ void multiply_matrices(Shared& shared, const TensorMap& x, const TensorMap& w, const TensorMap& w2, const TensorMap& y,
                                                  const Half* bias, int rows, int columns, int width, Finish finish) {
  const Tiles tiles = tiles_of(rows, columns);
  const int group = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0), warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(&shared.full[s], 1), barrier_init(&shared.empty[s], 2 * CLUSTER);
    for (int half = 0; half < 2; half++) barrier_init(&shared.placed[half], LANES), barrier_init(&shared.stored[half], 1);
    barriers_are_made();
  }
  __syncthreads();
  cluster_sync();
  if (group == 0) {
    give_registers<88>();
    if (warp > 0) {
      finish_tiles(shared, y, tiles, threadIdx.x - 32, finish);
    } else if (threadIdx.x == 0) {
      load_tiles(shared, x, w, w2, tiles, width);
    }
  } else {
    take_registers<208>();
    multiply_tiles(shared, bias, tiles, columns, width, group - 1);
  }
  cluster_sync();  // a block must be there as long as another arrives at its barriers
}
