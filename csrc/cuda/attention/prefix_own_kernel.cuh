// Attention of sequences that share a prefix over their own keys, those behind it: decode in which
// every warp works alone, made for many short runs of keys.
//
// Grid: fixed, as many blocks as fit; each warp has its own range of 16-row tiles and keys
// (prefix_own_plan.cuh), its own ring of kStages units (cp.async, no block barrier) and its own
// online softmax, and leaves partial states (prefix_states.cuh). While a tile ends, the next one's
// units are already on their way.
//
// Must move: 2 * own keys * G * D * size bytes a sequence.
#pragma once

#include "cuda/attention/prefix_own_load.cuh"
#include "cuda/attention/tile_query.cuh"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

template <class T, class C, int kHeadDim>
struct OwnTraits : UnitTraits<T, C, kHeadDim, sizeof(C) == 1 ? 32 : 16> {
  using Unit = UnitTraits<T, C, kHeadDim, sizeof(C) == 1 ? 32 : 16>;
  static constexpr int kWarps = static_cast<int>(kOwnWarps);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kHeadDim == 64 ? 6 : kHeadDim == 96 ? 4 : 3;
  static constexpr int kSharedBytes = kWarps * kStages * Unit::kStageBytes;
  static constexpr int kBlocksPerMultiprocessor = kHeadDim <= 128 ? 2 : 1;
};

template <class T, class C, int kDim>
__global__ void __launch_bounds__(OwnTraits<T, C, kDim>::kThreads,
                                  OwnTraits<T, C, kDim>::kBlocksPerMultiprocessor)
    prefix_own_kernel(const __grid_constant__ PagedAttentionParams params) {
  using Traits = OwnTraits<T, C, kDim>;
  extern __shared__ __align__(128) char ring[];
  __shared__ int64_t scratch[3 * Traits::kWarps];
  __shared__ TilePart parts[Traits::kWarps][kOwnPartsAhead];
  allow_next_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  const PrefixStates states = prefix_states(params);
  const OwnRange range = plan_own<Traits::kWarps, Traits::kUnitKeys>(
      params, scratch, [&](int token, int64_t begin, int tile_length, int range_length) {
        states.own_records[token] = OwnRecord{begin, tile_length, range_length};
      });
  OwnLoader<Traits, C> loader(params, range, parts[warp], lane);
  const uint32_t stages =
      shared_address(ring) + static_cast<uint32_t>(warp * Traits::kStages * Traits::kStageBytes);
  int ahead = 0;  // units on their way or waiting
  int fill = 0;   // the stage that the next copy takes
  int stage = 0;  // the stage of the next unit to be used
  for (int number = 0; number < loader.num_parts(); ++number) {
    const TilePart& part = parts[warp][number % kOwnPartsAhead];
    TileQuery<Traits, T> query;
    TileRows rows;
    LogitScale scale;
    OnlineSoftmax softmax;
    float out[Traits::kDim / 8][4] = {};
    const int step_end = part.step_end;
    for (int step = part.step_begin; step < step_end; ++step) {
      __syncwarp();  // the stage used last is free
#pragma unroll 1
      for (; ahead < Traits::kStages - 1; ++ahead) {
        loader.issue(stages + fill * Traits::kStageBytes);
        fill = fill + 1 == Traits::kStages ? 0 : fill + 1;
      }
      if (step == part.step_begin) {  // behind the copies, so as not to delay them
        query.load(params, part, group, lane);
        rows = tile_rows(params, part, group, lane);
        scale = logit_scale(params, part.kv_head);
      }
      wait_copies<Traits::kStages - 2>();
      __syncwarp();
      const int first = part.base_key + step * Traits::kUnitKeys;
      const uint32_t unit = stages + stage * Traits::kStageBytes;
      float scores[Traits::kUnitKeys / 8][4];
      multiply_keys<Traits, C>(scores, query, unit, lane);
      float rescale[2];
      if (softmax.weigh(scores, scale, rows, params.alibi_slopes != nullptr, first, lane % 4,
                        rescale)) {
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
      --ahead;
      stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
    }
    const int64_t worker = static_cast<int64_t>(blockIdx.x) * Traits::kWarps + warp;
    write_states<Traits>(params, states, part, group, softmax, out, lane,
                         [&](int64_t token, int64_t head, int packed) {
                           if (part.piece < 0) return states.own + token * params.num_heads + head;
                           return cut_rows(states.cut_own, worker, part.piece, kTileRows) + packed -
                                  part.first_row;
                         });
  }
  wait_copies<0>();
  wait_previous_kernel();  // the decode kernel: the next one waits for this one only
}

}  // namespace pagedkv::cuda
