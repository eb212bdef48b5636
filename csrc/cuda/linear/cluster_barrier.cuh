// Clusters of blocks by name: who one is, waiting for each other, reading each other's shared
// memory (sm_90).
#pragma once

#include <cstdint>

namespace pagedkv::cuda {

__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}

// All threads of the cluster that have not ended; what they wrote before is seen after.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;\n" ::
          : "memory");
}

// The same, without waiting for what they wrote: they have read what they wanted to.
__device__ inline void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait;\n" ::
          : "memory");
}

// The address, for load_cluster_16, of what lies at `address` in this block's shared memory in that
// of another block.
__device__ inline uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ inline float4 load_cluster_16(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace pagedkv::cuda
