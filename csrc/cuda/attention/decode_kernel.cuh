// Decode attention: the rows of sequences with few query tokens, 16 packed rows a tile.
//
// Grid: fixed, kBlocksPerMultiprocessor blocks a multiprocessor; what each does is planned in
// decode_plan.cuh. The four warps of a block take the units of a step in turn, each through its own
// ring of kStages units (cp.async, no block barrier), with its own online softmax; they are merged
// through shared memory at the end of a tile's part, always in warp order, so results repeat bit
// for bit. While a tile ends, the next one's units are already on their way.
//
// Must move: K and V once per KV head and 16 rows, 2 * length * G * D * size bytes a sequence.
#pragma once

#include "cuda/attention/decode_load.cuh"
#include "cuda/attention/decode_plan.cuh"
#include "cuda/attention/fragments.cuh"
#include "cuda/attention/partial_states.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tile_query.cuh"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

// The warps' references and sums of a part, in shared memory.
template <class Traits>
struct PartTotals {
  float reference[Traits::kWarps][kTileRows];
  float sum[Traits::kWarps][kTileRows];
};

// Where float `d` of a row of fp32 sums lies in a stage.
template <class Traits>
__device__ constexpr int sum_index(int row, int d) {
  return row * Traits::kDim + ((d / 8) ^ (row & 3)) * 8 + d % 8;
}

// Merges the warps' sums of a part and writes rows of out, or the part's state. All threads.
// `ring` is the block's shared memory; `stage` the one whose unit every warp has used up.
template <class Traits, class T>
__device__ void finish_part(const PagedAttentionParams& params, const TilePart& part, int group,
                            OnlineSoftmax& softmax, const float (&out)[Traits::kDim / 8][4],
                            PartTotals<Traits>& totals, char* ring, int stage, int warp, int lane) {
  softmax.finish();
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      totals.reference[warp][lane / 4 + 8 * i] = softmax.reference[i];
      totals.sum[warp][lane / 4 + 8 * i] = softmax.sum[i];
    }
  }
  const auto warp_sums = [&](int w) {
    return reinterpret_cast<float*>(ring + (w * Traits::kStages + stage) * Traits::kStageBytes);
  };
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane / 4 + 8 * i;
    if (row >= part.num_rows) continue;
#pragma unroll
    for (int n = 0; n < Traits::kDim / 8; ++n) {
      float* sums = warp_sums(warp);
      sums[sum_index<Traits>(row, out_dim<Traits>(n, 0, lane % 4))] = out[n][2 * i];
      sums[sum_index<Traits>(row, out_dim<Traits>(n, 1, lane % 4))] = out[n][2 * i + 1];
    }
  }
  __syncthreads();

  const bool whole = params.num_splits == 0 ? part.step_end - part.step_begin == part.num_steps
                                            : params.num_splits == 1;
  const float v_scale = value_scale(params, part.kv_head);
  const int head_dim = static_cast<int>(params.cache.head_dim);
  constexpr int kRowThreads = Traits::kDim / 2;  // two elements each
  for (int item = static_cast<int>(threadIdx.x); item < part.num_rows * kRowThreads;
       item += Traits::kThreads) {
    const int row = item / kRowThreads;
    const int d = item % kRowThreads * 2;
    if (d >= head_dim) continue;
    float reference = -INFINITY;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) reference = fmaxf(reference, totals.reference[w][row]);
    float x = 0.0f;
    float y = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      const float of_warp = totals.reference[w][row];
      if (of_warp == -INFINITY) continue;
      const float weight = exp2_fast(of_warp - reference);
      const auto pair = *reinterpret_cast<const float2*>(warp_sums(w) + sum_index<Traits>(row, d));
      x += weight * pair.x;
      y += weight * pair.y;
      sum += weight * totals.sum[w][row];
    }
    const int packed = part.first_row + row;
    const int64_t token = part.sequence.query_start + packed / group;
    const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
    if (whole) {
      const float factor = sum > 0.0f ? v_scale / sum : 0.0f;
      T* to = static_cast<T*>(params.out) + token * params.out_stride_token +
              head * params.out_stride_head + d;
      *reinterpret_cast<uint32_t*>(to) = pack<T>(x * factor, y * factor);
      if (params.lse != nullptr && d == 0) {
        params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
            sum > 0.0f ? (reference + log2f(sum)) * kLn2 : -INFINITY;
      }
    } else {
      const int64_t state =
          params.num_splits == 0
              ? tile_state(2 * static_cast<int64_t>(blockIdx.x) + (part.step_begin == 0), row)
              : piece_state(params, token, head, part.piece);
      const PartialStates states = partial_states(params, gridDim.x);
      *reinterpret_cast<float2*>(states.sums + state * head_dim + d) = make_float2(x, y);
      if (d == 0) states.totals[state] = make_float2(reference, sum);
    }
  }
  __syncthreads();  // the stage and the totals are free again
}

template <class T, class C, int kDim>
__global__ void __launch_bounds__(DecodeTraits<T, C, kDim>::kThreads,
                                  DecodeTraits<T, C, kDim>::kBlocksPerMultiprocessor)
    decode_attention_kernel(const __grid_constant__ PagedAttentionParams params) {
  using Traits = DecodeTraits<T, C, kDim>;
  using Plan = DecodePlan<Traits::kStepKeys, Traits::kUnitKeys>;
  extern __shared__ __align__(128) char ring[];
  __shared__ int64_t scratch[Traits::kThreads + 4];
  __shared__ PartTotals<Traits> totals;
  __shared__ TilePart parts[Traits::kWarps][kPartsAhead];
  allow_next_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Plan plan(params);
  const WorkerRange range = plan_worker<Traits::kThreads>(plan, scratch);
  if (params.num_splits == 0 && threadIdx.x == 0) merge_records(params)[blockIdx.x].count = 0;
  if (range.begin >= range.end) return;

  UnitLoader<Traits, C, Plan> loader(plan, range, parts[warp], warp, lane);
  const uint32_t stages =
      shared_address(ring) + static_cast<uint32_t>(warp * Traits::kStages * Traits::kStageBytes);
  int ahead = 0;  // units on their way or waiting
  int fill = 0;   // the stage that the next copy takes
  int stage = 0;  // the stage of the next unit to be used
  for (int number = 0; number < loader.num_parts(); ++number) {
    const TilePart& part = parts[warp][number % kPartsAhead];
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
        query.load(params, part, plan.group(), lane);
        rows = tile_rows(params, part, plan.group(), lane);
        scale = logit_scale(params, part.kv_head);
      }
      wait_copies<Traits::kStages - 2>();
      __syncwarp();
      const int first = part.base_key + step * Traits::kStepKeys + warp * Traits::kUnitKeys;
      if (first < part.sequence.seq_len) {
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
      }
      --ahead;
      stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
    }
    const int used = stage == 0 ? Traits::kStages - 1 : stage - 1;
    finish_part<Traits, T>(params, part, plan.group(), softmax, out, totals, ring, used, warp,
                           lane);
    if (params.num_splits == 0 && threadIdx.x == 0 && part.step_begin == 0 &&
        part.step_end < part.num_steps) {
      // The workers up to the one whose range reaches the tile's end hold the other parts.
      const int64_t last = (part.tile_end + range.length - 1) / range.length - 1;
      merge_records(params)[blockIdx.x] =
          MergeRecord{static_cast<int>(last) - static_cast<int>(blockIdx.x) + 1,
                      part.sequence.query_start,
                      part.kv_head,
                      part.first_row,
                      part.num_rows,
                      {}};
    }
  }
  wait_copies<0>();
}

}  // namespace pagedkv::cuda
