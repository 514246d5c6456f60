// What hopper.h promises, for the fibres of block.h: barriers with phases, boxes copied and swizzled, products of tiles.
#pragma once

#include <algorithm>

#include "block.h"
#include "hopper.h"

namespace samebits {

// After fail(): the fibre is left for good.
[[noreturn]] inline void leave() {
  wait(State::finished);
  __builtin_unreachable();
}

}  // namespace samebits

// ---- threads ------------------------------------------------------------------------------------------------------

void cluster_sync() { samebits::wait(samebits::State::at_cluster); }

void group_sync(int number, int threads) {
  using namespace samebits;
  const size_t all = here().fibres.size();
  if (number < 1 || number >= Block::groups_count || threads < 32 || threads % 32 || static_cast<size_t>(threads) > all) {
    fail("group_sync(%d, %d): expected a number from 1 to %d and some warps' threads, of the %zu that the block has", number, threads,
         Block::groups_count - 1, all);
    leave();
  }
  Group& group = here().groups[number];
  if (group.arrived && group.threads != static_cast<uint32_t>(threads)) {
    fail("group_sync(%d, %d): others wait there for %u threads", number, threads, group.threads);
    leave();
  }
  group.threads = static_cast<uint32_t>(threads);
  running().group = number;
  wait(State::at_group);
}

// ---- barriers -----------------------------------------------------------------------------------------------------

namespace samebits {

constexpr int most_pending = (1 << 20) - 1;  // arrivals or bytes

inline void check_made(const Barrier& barrier, const char* what) {
  if (barrier.made == 1) return;
  fail("%s: nobody has made this barrier", what);
  leave();
}

inline void arrive(Barrier& barrier, const char* what) {
  check_made(barrier, what);
  if (!barrier.pending) {
    fail("%s: all %u arrivals of this phase are there, and it still waits for %d bytes", what, unsigned{barrier.arrivals},
         static_cast<int>(barrier.bytes));
    leave();
  }
  --barrier.pending;
}

inline void add_bytes(Barrier& barrier, int64_t bytes) {
  const int64_t sum = barrier.bytes + bytes;
  if (sum < -most_pending || sum > most_pending)
    return fail("a barrier counts up to %d bytes, and this would be %lld", most_pending, static_cast<long long>(sum));
  barrier.bytes = sum;
}

// After something arrived: the phase may be over, and then the next one begins.
inline void check_phase(Barrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.parity = !barrier.parity;
  barrier.pending = barrier.arrivals;
  for (Fibre& fibre : here().fibres)
    if (fibre.state == State::at_phase && fibre.barrier == &barrier) fibre.state = State::ready;
}

}  // namespace samebits

void barrier_init(Barrier* barrier, int arrivals) {
  if (arrivals < 1 || arrivals > samebits::most_pending) {
    samebits::fail("barrier_init: expected 1 to %d arrivals, got %d", samebits::most_pending, arrivals);
    samebits::leave();
  }
  *barrier = {1, 0, static_cast<uint64_t>(arrivals), static_cast<uint64_t>(arrivals), 0};
}

void barrier_arrive(Barrier* barrier) {
  samebits::arrive(*barrier, "barrier_arrive");
  samebits::check_phase(*barrier);
}

void barrier_arrive_in(Barrier* barrier, unsigned rank) {
  if (rank) {
    samebits::fail("barrier_arrive_in: block %u of the cluster is meant, and on the CPU a cluster has one block", rank);
    samebits::leave();
  }
  barrier_arrive(barrier);
}

void barrier_expect(Barrier* barrier, int bytes) {
  samebits::arrive(*barrier, "barrier_expect");
  samebits::add_bytes(*barrier, bytes);
  samebits::check_phase(*barrier);
}

void barrier_wait(Barrier* barrier, unsigned parity) {
  samebits::check_made(*barrier, "barrier_wait");
  samebits::running().barrier = barrier;
  samebits::running().parity = parity;
  // A thread that is late by two phases waits on, as it may on a GPU.
  while (barrier->parity == parity) samebits::wait(samebits::State::at_phase);
}

// ---- boxes --------------------------------------------------------------------------------------------------------

namespace samebits {

constexpr int box_columns = 64, box_row_bytes = 2 * box_columns;

inline void check_tile(const void* tile, const char* what) {
  const unsigned past = shared_address(tile) & 1023u;
  if (!past) return;
  fail("%s: the tile in shared memory lies %u bytes past a multiple of 1024, where the swizzle begins", what, past);
  leave();
}

// Of an element of a tile: of row r the 16 bytes number c lie at place c ^ (r % 8).
inline size_t swizzled(int64_t row, int column) {
  const int64_t place = (column / 8) ^ (row % 8);
  return row * box_row_bytes + place * 16 + column % 8 * 2;
}

// The element of the matrix, or nullptr where the box hangs over an edge.
inline unsigned char* element_of(const TensorMap& matrix, int64_t row, int64_t column) {
  const bool inside = row >= 0 && row < matrix.rows && column >= 0 && column < matrix.columns;
  return inside ? matrix.memory + row * matrix.row_bytes + column * 2 : nullptr;
}

inline void copy_to_memory(const Store& store) {
  for (int64_t row = 0; row < store.to.box_rows; ++row) {
    for (int column = 0; column < box_columns; ++column) {
      unsigned char* const to = element_of(store.to, store.row + row, int64_t{store.column} + column);
      if (to) std::memcpy(to, store.from + swizzled(row, column), 2);
    }
  }
}

void copy_to_shared(const Load& load) {
  for (int64_t row = 0; row < load.from.box_rows; ++row) {
    for (int column = 0; column < box_columns; ++column) {
      unsigned char* const to = load.to + swizzled(row, column);
      const unsigned char* const element = element_of(load.from, load.row + row, int64_t{load.column} + column);
      if (element) {
        std::memcpy(to, element, 2);
      } else {
        std::memset(to, 0, 2);
      }
    }
  }
  add_bytes(*load.done, -load.from.box_rows * box_row_bytes);  // what hangs over an edge counts as well
  check_phase(*load.done);
}

}  // namespace samebits

void load_box(void* to, const TensorMap& from, Barrier* done, int column, int row) {
  using namespace samebits;
  check_tile(to, "load_box");
  check_made(*done, "load_box");
  const Load load{static_cast<unsigned char*>(to), from, done, column, row};
  if (here().loads_are_late) {
    here().loads.push_back(load);
  } else {
    copy_to_shared(load);
  }
}

void load_box_to_both(void*, const TensorMap&, Barrier*, int, int) {
  samebits::fail("load_box_to_both: on the CPU a cluster has one block");
  samebits::leave();
}

void store_box(const TensorMap& to, const void* from, int column, int row) {
  samebits::check_tile(from, "store_box");
  samebits::running().stores.push_back({to, static_cast<const unsigned char*>(from), column, row, false});
}

void stores_begin() {
  for (samebits::Store& store : samebits::running().stores) store.begun = true;
}

void stores_have_read() {
  std::vector<samebits::Store>& stores = samebits::running().stores;
  const auto begun = [](const samebits::Store& store) { return store.begun; };
  for (const samebits::Store& store : stores)
    if (store.begun) samebits::copy_to_memory(store);
  stores.erase(std::remove_if(stores.begin(), stores.end(), begun), stores.end());
}

// ---- products -----------------------------------------------------------------------------------------------------

MatrixView view_of(const void* tile) {
  samebits::check_tile(tile, "view_of");
  return {static_cast<const unsigned char*>(tile), 0};
}

void multiply_add(float (&sums)[128], MatrixView a, MatrixView b, int add) {
  samebits::running().products.push_back({sums, a, b, add != 0, samebits::running().groups_begun});
}

void products_end() { ++samebits::running().groups_begun; }

void samebits::wait_for_products(size_t but_the_last) {
  running().groups_left = but_the_last;
  wait(State::at_products);
}

namespace samebits {

constexpr int group_lanes = 128, product_rows = 64, product_columns = 256, product_depth = 16;

// Rows of a tile as floats, the column first: (product_depth, rows).
template <int rows>
void unpack(float (&to)[product_depth][rows], MatrixView view) {
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < product_depth; ++k) {
      uint16_t bits;
      std::memcpy(&bits, view.tile + swizzled(row, view.column + k), sizeof bits);
      to[k][row] = bf16_to_float(bits);
    }
  }
}

// Where thread `lane` of a warp group has the sum of a row and column: in sums[at].
template <class Visit>
void for_every_sum(Visit visit) {
  for (int lane = 0; lane < group_lanes; ++lane) {
    for (int at = 0; at < 128; ++at) {
      const int row = lane / 32 * 16 + lane % 32 / 4 + (at % 4 / 2) * 8;
      const int column = at / 4 * 8 + lane % 4 * 2 + at % 2;
      visit(lane, at, row, column);
    }
  }
}

// The product number `number` of each thread of a warp group, which is one product.
inline void multiply(Fibre* group, size_t number) {
  static thread_local float a[product_depth][product_rows], b[product_depth][product_columns];
  static thread_local float sums[product_rows][product_columns];
  const Product& first = group[0].products[number];
  unpack(a, first.a);
  unpack(b, first.b);
  for_every_sum([&](int lane, int at, int row, int column) {
    sums[row][column] = first.add ? group[lane].products[number].sums[at] : 0.0f;
  });
  for (int k = 0; k < product_depth; ++k)
    for (int row = 0; row < product_rows; ++row)
      for (int column = 0; column < product_columns; ++column) sums[row][column] += a[k][row] * b[k][column];
  for_every_sum([&](int lane, int at, int row, int column) {
    group[lane].products[number].sums[at] = canonical(sums[row][column]);
  });
}

// After a thread came to products_wait: once its whole warp group is there, the products are made.
void check_products(const Fibre& arrived) {
  const uint32_t first = arrived.number / group_lanes * group_lanes;
  if (first + group_lanes > here().fibres.size()) return fail("thread %u multiplies, but its warp group lacks threads", arrived.number);
  Fibre* const group = &here().fibres[first];
  for (int lane = 0; lane < group_lanes; ++lane)
    if (group[lane].state != State::at_products) return;
  const std::vector<Product>& products = group[0].products;
  for (int lane = 1; lane < group_lanes; ++lane) {
    const bool same = group[lane].products == products && group[lane].groups_begun == group[0].groups_begun &&
                      group[lane].groups_left == group[0].groups_left;
    if (!same) return fail("threads %u and %u of a warp group multiply different tiles", group[0].number, group[lane].number);
  }
  size_t done = 0;
  while (done < products.size() && products[done].group + group[0].groups_left < group[0].groups_begun) multiply(group, done++);
  for (int lane = 0; lane < group_lanes; ++lane) {
    std::vector<Product>& left = group[lane].products;
    left.erase(left.begin(), left.begin() + done);
    group[lane].state = State::ready;
  }
}

}  // namespace samebits
