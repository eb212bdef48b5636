// The copy of a matrix's box into shared memory (sm_90). Those of more dimensions are in
// device/wgmma.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace pagedkv::cuda {

// A box of a 2-dimensional tensor into shared memory; its bytes arrive at the barrier.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, int x0, int x1,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2,%3}], [%4];\n" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(barrier)
      : "memory");
}

}  // namespace pagedkv::cuda
