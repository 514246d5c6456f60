// What ops/_hopper.cuh has for compute capability 9.0, under the same names: barriers that count arrivals and bytes, copies of boxes of
// a matrix, products of tiles. A cluster is one block here. What threads wait for each other at is in asynchronous.h.
//
// On the GPU a copy or product is done at some time between its start and the wait for it. Here a store and a product are done at the
// wait, which is as late as can be: memory that is written again too early shows in the results. A load is done at its start where the
// threads run in ascending order, and in any other order when no thread can go on without it: both ends of what may happen.
#pragma once

#include <cstdint>

#include "halves.h"

// A matrix of 16-bit elements for copies of boxes of 64 columns. samebits/host/tensor_map.py writes these bytes.
struct alignas(64) TensorMap {
  unsigned char* memory;
  int64_t rows, columns;
  int64_t row_bytes;  // from a row to the next one
  int64_t box_rows;
  int64_t unused[11];
};
static_assert(sizeof(TensorMap) == 128, "as large as the driver's");

// 64 bits in shared memory, as mbarrier is.
struct Barrier {
  uint64_t made : 2;      // 1, which memory that nobody wrote is not
  uint64_t parity : 1;    // of the phase that is going on
  uint64_t arrivals : 20; // of every phase
  uint64_t pending : 20;  // of this phase
  int64_t bytes : 21;     // that copies have still to bring
};
static_assert(sizeof(Barrier) == 8, "as large as the GPU's");

// Rows of 64 halves, swizzled, and the column to begin at.
struct MatrixView {
  const unsigned char* tile;
  int column;
};

// Only the low bits are asked for: they tell the alignment.
inline unsigned shared_address(const void* p) { return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p)); }

// ---- threads ----

inline unsigned rank_in_cluster() { return 0; }
void cluster_sync();
void group_sync(int number, int threads);
template <int N>
void give_registers() {}
template <int N>
void take_registers() {}

// ---- barriers ----

void barrier_init(Barrier* barrier, int arrivals);
inline void barriers_are_made() {}
void barrier_arrive(Barrier* barrier);
void barrier_arrive_in(Barrier* barrier, unsigned rank);
void barrier_expect(Barrier* barrier, int bytes);
void barrier_wait(Barrier* barrier, unsigned parity);

// ---- boxes ----

void load_box(void* to, const TensorMap& from, Barrier* done, int column, int row);
void load_box_to_both(void* to, const TensorMap& from, Barrier* done, int column, int row);
void store_box(const TensorMap& to, const void* from, int column, int row);
void stores_begin();
void stores_have_read();
inline void stores_are_done() { stores_have_read(); }
inline void show_to_copies() {}

// ---- products ----

MatrixView view_of(const void* tile);
inline MatrixView columns_from(MatrixView view, int i) { return {view.tile, view.column + 16 * i}; }

namespace samebits {
void wait_for_products(size_t but_the_last);
}

// The sums are in fp32, one column after another. The GPU's tensor core rounds its inner sums in its own way: the bits are the GPU's
// where every sum is exact in whatever order, as it is for small integers.
void multiply_add(float (&sums)[128], MatrixView a, MatrixView b, int add);
inline void products_begin() {}
void products_end();
template <int N>
void products_wait() {
  samebits::wait_for_products(N);
}
