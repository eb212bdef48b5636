// Hopper's warpgroup matrix instructions, mbarriers and tensor copies, by name (sm_90a).
//
// A warpgroup (4 warps) multiplies 64 rows; warp w holds rows 16 w .. 16 w + 15 of the sums, in the
// fragment layout of mma.cuh, c[n] for columns 8 n .. 8 n + 7. Tiles in shared memory lie in slabs
// of 64 columns, rows of 128 bytes, 16-byte chunks swizzled by row % 8, slabs 1024-byte aligned.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pagedkv::cuda {

// Descriptor of a swizzled tile at this shared address. leading: bytes between slabs (used where
// the columns are the outer dimension of the product, V); groups of 8 rows are 1024 bytes apart.
__device__ inline uint64_t tile_descriptor(uint32_t address, uint32_t leading) {
  return (static_cast<uint64_t>(address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 |
         static_cast<uint64_t>(1) << 62;
}

__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of sums across the wait before which they are in flight.
template <int kTiles>
__device__ inline void pin(float (&c)[kTiles][4]) {
#pragma unroll
  for (auto& x : c) asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])::"memory");
}

#define PAGEDKV_ROW(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])

// c (+)= A B^T, A 64 x 16 and B n x 16 both in shared memory, rows of the product's k.
template <class T>
__device__ inline void multiply_rows_n128(float (&c)[16][4], uint64_t a, uint64_t b,
                                          bool accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, p, 1, 1, 0, 0;}\n"
        : PAGEDKV_ROW(c[0]), PAGEDKV_ROW(c[1]), PAGEDKV_ROW(c[2]), PAGEDKV_ROW(c[3]),
          PAGEDKV_ROW(c[4]), PAGEDKV_ROW(c[5]), PAGEDKV_ROW(c[6]), PAGEDKV_ROW(c[7]),
          PAGEDKV_ROW(c[8]), PAGEDKV_ROW(c[9]), PAGEDKV_ROW(c[10]), PAGEDKV_ROW(c[11]),
          PAGEDKV_ROW(c[12]), PAGEDKV_ROW(c[13]), PAGEDKV_ROW(c[14]), PAGEDKV_ROW(c[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, p, 1, 1, 0, 0;}\n"
        : PAGEDKV_ROW(c[0]), PAGEDKV_ROW(c[1]), PAGEDKV_ROW(c[2]), PAGEDKV_ROW(c[3]),
          PAGEDKV_ROW(c[4]), PAGEDKV_ROW(c[5]), PAGEDKV_ROW(c[6]), PAGEDKV_ROW(c[7]),
          PAGEDKV_ROW(c[8]), PAGEDKV_ROW(c[9]), PAGEDKV_ROW(c[10]), PAGEDKV_ROW(c[11]),
          PAGEDKV_ROW(c[12]), PAGEDKV_ROW(c[13]), PAGEDKV_ROW(c[14]), PAGEDKV_ROW(c[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

// c += A B, A 64 x 16 in registers, B 16 x n in shared memory, rows of n.
template <class T>
__device__ inline void accumulate_columns(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
        : PAGEDKV_ROW(c[0]), PAGEDKV_ROW(c[1]), PAGEDKV_ROW(c[2]), PAGEDKV_ROW(c[3]),
          PAGEDKV_ROW(c[4]), PAGEDKV_ROW(c[5]), PAGEDKV_ROW(c[6]), PAGEDKV_ROW(c[7]),
          PAGEDKV_ROW(c[8]), PAGEDKV_ROW(c[9]), PAGEDKV_ROW(c[10]), PAGEDKV_ROW(c[11]),
          PAGEDKV_ROW(c[12]), PAGEDKV_ROW(c[13]), PAGEDKV_ROW(c[14]), PAGEDKV_ROW(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
        : PAGEDKV_ROW(c[0]), PAGEDKV_ROW(c[1]), PAGEDKV_ROW(c[2]), PAGEDKV_ROW(c[3]),
          PAGEDKV_ROW(c[4]), PAGEDKV_ROW(c[5]), PAGEDKV_ROW(c[6]), PAGEDKV_ROW(c[7]),
          PAGEDKV_ROW(c[8]), PAGEDKV_ROW(c[9]), PAGEDKV_ROW(c[10]), PAGEDKV_ROW(c[11]),
          PAGEDKV_ROW(c[12]), PAGEDKV_ROW(c[13]), PAGEDKV_ROW(c[14]), PAGEDKV_ROW(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

template <class T>
__device__ inline void accumulate_columns(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
        : PAGEDKV_ROW(c[0]), PAGEDKV_ROW(c[1]), PAGEDKV_ROW(c[2]), PAGEDKV_ROW(c[3]),
          PAGEDKV_ROW(c[4]), PAGEDKV_ROW(c[5]), PAGEDKV_ROW(c[6]), PAGEDKV_ROW(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
        : PAGEDKV_ROW(c[0]), PAGEDKV_ROW(c[1]), PAGEDKV_ROW(c[2]), PAGEDKV_ROW(c[3]),
          PAGEDKV_ROW(c[4]), PAGEDKV_ROW(c[5]), PAGEDKV_ROW(c[6]), PAGEDKV_ROW(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef PAGEDKV_ROW

// mbarriers: a phase ends when `count` arrivals (and the announced bytes) have come.
__device__ inline void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Until the phase of this parity has ended.
__device__ inline void wait_barrier(uint32_t barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Ordinary writes to shared memory before it are seen by wgmma after it (and a barrier).
__device__ inline void publish_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// A box of a 4-dimensional tensor into shared memory; its bytes arrive at the barrier.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, int x0, int x1, int x2,
                                int x3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2,%3,%4,%5}], [%6];\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}

// Barrier 1 .. 15 among `threads` threads.
__device__ inline void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as an arrival at such a barrier, and goes on.
__device__ inline void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace pagedkv::cuda
