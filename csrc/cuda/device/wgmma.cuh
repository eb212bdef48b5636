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
#include <utility>

namespace pagedkv::cuda {

// Descriptor of a swizzled tile at this shared address. leading: bytes between slabs (used where
// the columns are the outer dimension of the product, V); groups of 8 rows are 1024 bytes apart.
// Kept in halves: only the lower one differs between the products of a tile.
struct TileDescriptor {
  uint32_t low;

  __device__ TileDescriptor(uint32_t address, uint32_t leading)
      : low((address & 0x3ffff) >> 4 | (leading >> 4) << 16) {}
  __device__ uint64_t at(uint32_t offset) const {
    uint64_t whole;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(whole)
        : "r"(low + (offset >> 4)), "r"(0x40000000u | 1024 >> 4));
    return whole;
  }
};

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

// body(0), body(1), ..: written out. #pragma unroll alone gives up on loops in branches, and an
// array that a loop indexes lies in memory.
template <int kTimes, class Body>
__device__ __forceinline__ void write_out(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(i), ...);
  }(std::make_integer_sequence<int, kTimes>{});
}

// Keeps the compiler from moving uses of sums across the wait before which they are in flight.
template <int kTiles>
__device__ inline void pin(float (&c)[kTiles][4]) {
  write_out<kTiles>([&](int n) {
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
  });
}

// The product instructions. Sums c[n][4] (columns 8 n .. 8 n + 7) are a list of registers numbered
// from %0; i0 .. i4 are the numbers of the operands behind them.
#define PAGEDKV_SUMS_8                                                                      \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}, "
#define PAGEDKV_SUMS_16                                                                      \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
  "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
#define PAGEDKV_SUM(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define PAGEDKV_4(c, i) \
  PAGEDKV_SUM(c[i]), PAGEDKV_SUM(c[i + 1]), PAGEDKV_SUM(c[i + 2]), PAGEDKV_SUM(c[i + 3])
#define PAGEDKV_OPERANDS_8(c) PAGEDKV_4(c, 0), PAGEDKV_4(c, 4)
#define PAGEDKV_OPERANDS_16(c) PAGEDKV_OPERANDS_8(c), PAGEDKV_4(c, 8), PAGEDKV_4(c, 12)

// multiply_rows:      c (+)= A B^T, A 64 x 16 and B n x 16 in shared memory, rows of the product's
// k. accumulate_columns: c += A B, A 64 x 16 in registers, B 16 x n in shared memory, rows of n.
#define PAGEDKV_PRODUCTS(tiles, n, element, type, i0, i1, i2, i3, i4)                            \
  template <class T>                                                                             \
    requires(std::is_same_v<T, element>)                                                         \
  __device__ inline void multiply_rows(float (&c)[tiles][4], uint64_t a, uint64_t b, bool add) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " i2                                             \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type                  \
                 " " PAGEDKV_SUMS_##tiles i0 ", " i1 ", p, 1, 1, 0, 0;}\n"                       \
                 : PAGEDKV_OPERANDS_##tiles(c)                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                  \
  }                                                                                              \
  template <class T>                                                                             \
    requires(std::is_same_v<T, element>)                                                         \
  __device__ inline void accumulate_columns(float (&c)[tiles][4], const uint32_t (&a)[4],        \
                                            uint64_t b) {                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type                  \
                 " " PAGEDKV_SUMS_##tiles "{" i0 "," i1 "," i2 "," i3 "}, " i4 ", 1, 1, 1, 1;\n" \
                 : PAGEDKV_OPERANDS_##tiles(c)                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
  }
PAGEDKV_PRODUCTS(8, "64", __nv_bfloat16, "bf16", "%32", "%33", "%34", "%35", "%36")
PAGEDKV_PRODUCTS(8, "64", __half, "f16", "%32", "%33", "%34", "%35", "%36")
PAGEDKV_PRODUCTS(16, "128", __nv_bfloat16, "bf16", "%64", "%65", "%66", "%67", "%68")
PAGEDKV_PRODUCTS(16, "128", __half, "f16", "%64", "%65", "%66", "%67", "%68")
#undef PAGEDKV_PRODUCTS
#undef PAGEDKV_OPERANDS_16
#undef PAGEDKV_OPERANDS_8
#undef PAGEDKV_4
#undef PAGEDKV_SUM
#undef PAGEDKV_SUMS_16
#undef PAGEDKV_SUMS_8

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
// Counts as an arrival once this thread's cp.async copies so far have landed.
__device__ inline void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// Until the phase of this parity has ended.
__device__ inline void wait_barrier(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// The reverse of ldmatrix: four 8x8 matrices of 16-bit elements, a row's pairs in lanes 4 row ..
// 4 row + 3; lane 8 i + j gives the address of row j of matrix i.
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 d;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(address)
               : "memory");
  return d;
}

// Ordinary writes to shared memory before it are seen by wgmma after it (and a barrier).
__device__ inline void publish_shared_writes() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
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

// The same of a 5-dimensional tensor.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, int x0, int x1, int x2,
                                int x3, int x4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2,%3,%4,%5,%6}], [%7];\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier)
      : "memory");
}

// `bytes` in a row, a multiple of 16, both addresses too; they arrive at the barrier.
__device__ inline void copy_bytes(uint32_t shared, const void* global, int bytes,
                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
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
