// Shared-prefix attention with mma.sync: the keys of a group's prefix, once for all its rows, for
// every type and head size; on Hopper the wgmma kernel takes over what it can.
//
// Grid: one block a multiprocessor; which tiles of 128 packed rows of a (group, KV head), and which
// of their keys, is planned in prefix_plan.cuh. A block's 8 warps hold 16 rows each and share tiles
// of 64 keys (32 of long heads), the next one in flight (cp.async). No row hides a key of the
// prefix, unless by a window. Leaves partial states (prefix_states.cuh). Starts while the
// kernel before it still runs, of which it reads nothing.
// FLOPs: 4 * rows * prefix * head_dim. Reads the prefix once per 128 rows, mostly from the L2.
#pragma once

#include "cuda/attention/prefill_mma_kernel.cuh"
#include "cuda/attention/prefix_rows.cuh"

namespace pagedkv::cuda {

template <class T, class C, int kDim>
__global__ void __launch_bounds__(PrefillTraits<T, C, kDim>::kThreads, 1)
    prefix_mma_kernel(const __grid_constant__ PagedAttentionParams params) {
  using Traits = PrefillTraits<T, C, kDim>;
  static_assert(Traits::kRows == kPrefixTileRows);
  extern __shared__ __align__(128) char ring[];
  __shared__ int64_t scratch[Traits::kThreads / 32 + 2];
  allow_next_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  auto cursor = plan_prefix<Traits::kThreads, Traits::kRows, Traits::kUnitKeys>(
      params, scratch, [&](int64_t g, int64_t begin, int tile_length, int range_length) {
        prefix_states(params).records[g] = PrefixRecord{begin, tile_length, range_length};
      });
  const uint32_t stages = shared_address(ring);
  TilePart part;
  while (cursor.next(part)) {
    __syncthreads();  // nobody reads the part before any more
    TileLoader<Traits, C> loader(params, part);
    loader.issue(stages);

    // This warp's 16 of the block's rows; none if the group ends before them.
    TilePart mine = part;
    mine.first_row += warp * kTileRows;
    mine.num_rows = min(kTileRows, part.num_rows - warp * kTileRows);
    const bool active = mine.num_rows > 0;
    mine.num_rows = max(mine.num_rows, 1);
    mine.first_row = active ? mine.first_row : part.first_row;
    TileQuery<Traits, T> query;
    query.load(params, mine, group, lane);
    const TileRows rows = prefix_tile_rows(params, mine, group, lane);
    const LogitScale scale = logit_scale(params, part.kv_head);
    OnlineSoftmax softmax;
    float out[Traits::kDim / 8][4] = {};
    for (int step = 0; step < part.num_steps; ++step) {
      wait_copies<0>();
      __syncthreads();  // the tile is there, and nobody reads the one before it any more
      if (step + 1 < part.num_steps) {
        loader.issue(stages + (step + 1) % Traits::kStages * Traits::kStageBytes);
      }
      if (!active) continue;
      const uint32_t unit = stages + step % Traits::kStages * Traits::kStageBytes;
      float scores[Traits::kUnitKeys / 8][4];
      multiply_keys<Traits, C>(scores, query, unit, lane);
      float rescale[2];
      if (softmax.weigh(scores, scale, rows, params.alibi_slopes != nullptr,
                        part.base_key + step * Traits::kUnitKeys, lane % 4, rescale)) {
#pragma unroll
        for (auto& sums : out) {
          sums[0] *= rescale[0];
          sums[1] *= rescale[0];
          sums[2] *= rescale[1];
          sums[3] *= rescale[1];
        }
      }
      uint32_t weights[Traits::kUnitKeys / 16][4];
      pack_weights<Traits>(weights, scores);
      multiply_values<Traits, C>(out, weights, unit, lane);
    }
    if (active) write_prefix_states<Traits>(params, part, mine, group, softmax, out, lane);
  }
  wait_previous_kernel();  // the own keys' kernel: the merge waits for this one only
}

}  // namespace pagedkv::cuda
