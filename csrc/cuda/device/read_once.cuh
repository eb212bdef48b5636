// Copies of tensor boxes into shared memory for what a launch reads once, as keys and values and
// the weights of few rows are: their lines leave the L2 before all others, and the copies are
// faster. Measured: benchmarks/results/2026-11-30-read-once.md.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace pagedkv::cuda {

// The policy that createpolicy.fractional.L2::evict_first makes for all lines.
constexpr uint64_t kLeavesFirst = 0x12F0000000000000;

// A box of a 5-dimensional tensor; its bytes arrive at the barrier.
__device__ inline void copy_box_once(uint32_t shared, const CUtensorMap* map, int x0, int x1,
                                     int x2, int x3, int x4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2,%3,%4,%5,%6}], [%7], %8;\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier), "l"(kLeavesFirst)
      : "memory");
}

// The same of a 3-dimensional tensor.
__device__ inline void copy_box_once(uint32_t shared, const CUtensorMap* map, int x0, int x1,
                                     int x2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2,%3,%4}], [%5], %6;\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier), "l"(kLeavesFirst)
      : "memory");
}

}  // namespace pagedkv::cuda
