// The instructions of compute capability 9.0 that a product of matrices is made of, one function each.
//
//   barriers           mbarriers in shared memory: some threads arrive, others wait; copies count their bytes down on one
//   boxes              the tensor memory accelerator copies a box of a matrix to shared memory or back, edges clipped, rows of
//                      128 bytes swizzled: of row r the 16 bytes number c lie at place c ^ (r % 8)
//   multiply_add       wgmma: 128 threads multiply what lies in shared memory and sum up in their registers
//
// Compiled for sm_90a only. On the CPU the shim has functions of the same names.

#pragma once

#ifndef SAMEBITS_HOST

struct alignas(64) TensorMap {
  unsigned long long words[16];  // the driver's: cuTensorMapEncodeTiled
};

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// ---- blocks of a cluster ----

__device__ __forceinline__ unsigned rank_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Every thread of every block of the cluster arrives and waits; what was written before is seen after.
__device__ __forceinline__ void cluster_sync() { asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory"); }

// ---- threads of a block ----

// Some warps of the block meet: number 1 and up, 0 is __syncthreads.
__device__ __forceinline__ void group_sync(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
// A warp group gives registers to the others of its block, or takes some, for the rest of the kernel.
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- barriers ----

using Barrier = unsigned long long;

__device__ __forceinline__ void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// At the barrier that lies at this place in another block of the cluster.
__device__ __forceinline__ void barrier_arrive_in(Barrier* b, unsigned rank) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
               ::"r"(shared_address(b)), "r"(rank) : "memory");
}
// Arrives, and lets the phase end only when copies have brought so many bytes more.
__device__ __forceinline__ void barrier_expect(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// Until the phase of this parity is over; before the first one, that of parity 1 is.
__device__ __forceinline__ void barrier_wait(Barrier* b, unsigned parity) {
  asm volatile(
      "{ .reg .pred over; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1; @over bra.uni OVER; bra.uni AGAIN; OVER: }"
      ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// ---- boxes ----

__device__ __forceinline__ void load_box(void* to, const TensorMap& from, Barrier* done, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared_address(to)), "l"(&from), "r"(shared_address(done)), "r"(column), "r"(row) : "memory");
}
// To the same place in the first two blocks of the cluster; each block's own barrier counts.
__device__ __forceinline__ void load_box_to_both(void* to, const TensorMap& from, Barrier* done, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(shared_address(to)), "l"(&from), "r"(shared_address(done)), "r"(column), "r"(row), "h"(static_cast<unsigned short>(3)) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap& to, const void* from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(&to), "r"(shared_address(from)), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void stores_begin() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the stores of this thread no longer read shared memory; until they are done.
__device__ __forceinline__ void stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void stores_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What threads wrote to shared memory is what a copy that begins later reads.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- products ----

// Rows of 64 halves, 128 bytes, swizzled, eight rows after eight rows; the first begins at a multiple of 1,024 bytes.
using MatrixView = unsigned long long;
__device__ __forceinline__ MatrixView view_of(const void* tile) {
  constexpr unsigned long long EIGHT_ROWS = 1024 >> 4, SWIZZLE_128_BYTES = 1;
  return (shared_address(tile) & 0x3ffff) >> 4 | 1ull << 16 | EIGHT_ROWS << 32 | SWIZZLE_128_BYTES << 62;
}
// From the column on that is 16 * i further right.
__device__ __forceinline__ MatrixView columns_from(MatrixView view, int i) { return view + 2 * i; }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last N groups are done.
template <int N> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// sums = a b^T (+ sums, if `add`): a (64, 16), b (256, 16), sums (64, 256) in fp32. Thread t of the warp group has of row
// 16 * (t / 32) + t % 32 / 4, and of the row 8 below, the columns 8 * j + t % 4 * 2 and the next one, in sums[4 * j] to sums[4 * j + 3].
#define EIGHT(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SIXTY_FOUR(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24), EIGHT(i + 32), EIGHT(i + 40), EIGHT(i + 48), EIGHT(i + 56)
__device__ __forceinline__ void multiply_add(float (&sums)[128], MatrixView a, MatrixView b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
      " %128, %129, add, 1, 1, 0, 0; }"
      : SIXTY_FOUR(0), SIXTY_FOUR(64) : "l"(a), "l"(b), "r"(add));
}
#undef SIXTY_FOUR
#undef EIGHT

#endif
