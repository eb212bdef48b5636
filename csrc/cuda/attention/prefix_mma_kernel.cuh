// Shared-prefix attention with mma.sync: the keys of a group's prefix, once for all its rows, for
// every type and head size; on Hopper the wgmma kernel takes over what it can.
//
// Grid: one block a multiprocessor; which tiles of 128 packed rows of a (group, KV head), and which
// of their keys, is planned in prefix_plan.cuh. A block's 8 warps hold 16 rows each and share tiles
// of 64 keys (32 of long heads), the next one in flight (cp.async). No row hides a key of the
// prefix, unless by a window. Its rows' ends: prefix_rows.cuh. Starts while decode still runs.
// FLOPs: 4 * rows * prefix * head_dim. Reads the prefix once per 128 rows, mostly from the L2.
#pragma once

#include "cuda/attention/prefill_mma_kernel.cuh"
#include "cuda/attention/prefix_plan.cuh"
#include "cuda/attention/prefix_rows.cuh"

namespace pagedkv::cuda {

template <class T, class C, int kDim>
__global__ void __launch_bounds__(PrefillTraits<T, C, kDim>::kThreads, 1)
    prefix_mma_kernel(const __grid_constant__ PagedAttentionParams params) {
  if constexpr (kLeftToWgmma<T, C, kDim>) {
    __trap();
  } else {
    using Traits = PrefillTraits<T, C, kDim>;
    static_assert(Traits::kRows == kPrefixTileRows);
    extern __shared__ __align__(128) char ring[];
    __shared__ PrefixPlanScratch<Traits::kThreads> scratch;
    allow_next_kernel();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
    auto cursor = plan_prefix<Traits::kThreads, Traits::kRows, Traits::kUnitKeys>(params, scratch);
    TilePart part;
    while (cursor.next(part)) {
      __syncthreads();  // nobody reads the part before it any more
      multiply_part<Traits, T, C>(
          params, part, ring, group,
          [&](const TilePart& mine) { return prefix_tile_rows(params, mine, group, lane); },
          [&](const TilePart& mine, OnlineSoftmax& softmax, float (&out)[Traits::kDim / 8][4]) {
            finish_prefix_rows<Traits, T>(params, part,
                                          (mine.first_row - part.first_row) / kTileRows, group,
                                          softmax, out, lane);
          });
    }
    wait_previous_kernel();  // who comes next in the stream waits for this kernel only
  }
}

}  // namespace pagedkv::cuda
