// Instructions of sm_90a that only products of many rows need, by name: the widest product, copies
// into all blocks of a cluster, stores of boxes. The others are in device/wgmma.cuh.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/linear/matrix_copy.cuh"

namespace pagedkv::cuda {

#define PAGEDKV_SUM(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define PAGEDKV_SUMS_4(n) \
  PAGEDKV_SUM(n), PAGEDKV_SUM((n) + 1), PAGEDKV_SUM((n) + 2), PAGEDKV_SUM((n) + 3)
#define PAGEDKV_SUMS_16(n) \
  PAGEDKV_SUMS_4(n), PAGEDKV_SUMS_4((n) + 4), PAGEDKV_SUMS_4((n) + 8), PAGEDKV_SUMS_4((n) + 12)
#define PAGEDKV_PRODUCT(element, type)                                                         \
  template <class T>                                                                           \
    requires(std::is_same_v<T, element>)                                                       \
  __device__ inline void multiply_rows(float (&c)[32][4], uint64_t a, uint64_t b, bool add) {  \
    asm volatile(                                                                              \
        "{.reg .pred p; setp.ne.b32 p, %130, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                           \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
        "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64," \
        "%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
        "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,"    \
        "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"     \
        "%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0;}\n"                   \
        : PAGEDKV_SUMS_16(0), PAGEDKV_SUMS_16(16)                                              \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                         \
  }
// c (+)= A B^T, A 64 x 16 and B 256 x 16 in shared memory, rows of the product's k.
PAGEDKV_PRODUCT(__nv_bfloat16, "bf16")
PAGEDKV_PRODUCT(__half, "f16")
#undef PAGEDKV_PRODUCT
#undef PAGEDKV_SUMS_16
#undef PAGEDKV_SUMS_4
#undef PAGEDKV_SUM

// A box of a 3-dimensional tensor into shared memory; its bytes arrive at the barrier.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, int x0, int x1, int x2,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2,%3,%4}], [%5];\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier)
      : "memory");
}

// The same into each block of the cluster whose bit is set, at these addresses of each.
__device__ inline void copy_box_to(uint16_t blocks, uint32_t shared, const CUtensorMap* map, int x0,
                                   int x1, int x2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2,%3,%4}], [%5], %6;\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier), "h"(blocks)
      : "memory");
}

// A box of shared memory, which publish_shared_writes() made visible, into a 2-dimensional tensor;
// what lies outside of it is not written. Part of this thread's next group of stores.
__device__ inline void store_box(const CUtensorMap* map, int x0, int x1, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1,%2}], [%3];\n" ::"l"(
          map),
      "r"(x0), "r"(x1), "r"(shared)
      : "memory");
}
// The same, but adds; the map says of what type the elements are.
__device__ inline void add_box(const CUtensorMap* map, int x0, int x1, uint32_t shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1,%2}], "
      "[%3];\n" ::"l"(map),
      "r"(x0), "r"(x1), "r"(shared)
      : "memory");
}
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until all but kPending of the groups that this thread committed have read shared memory; until
// all are done.
template <int kPending>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

// 1 / x, the hardware's approximation.
__device__ inline float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Barriers that were initialised are so for the cluster's other blocks, once they have met.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// At a barrier of any block of the cluster, whose address cluster_address() gave. Orders reads by
// wgmma, which are over, not this thread's writes: as a release to the cluster it is two fences.
__device__ inline void arrive_at_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

}  // namespace pagedkv::cuda
