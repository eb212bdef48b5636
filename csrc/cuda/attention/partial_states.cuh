// What the decode kernel leaves in the workspace when a tile's keys are cut over workers or pieces,
// and where: written by the decode kernel, read by the merge.
//
// num_splits 0: one MergeRecord a worker, then two states of a whole tile a worker: state 2 w holds
//   worker w's first part if its tile began in an earlier worker, state 2 w + 1 its last part if
//   its tile goes on in the next one.
// num_splits n > 1: state (token * H + head) * n + piece.
// A state of one row: fp32 [head_dim] sums, not normalised, and its reference (base 2) and sum of
// weights, fp32 [2]. All sums lie together, before all totals, so that both are aligned.
#pragma once

#include "cuda/attention/decode_plan.cuh"

namespace pagedkv::cuda {

// A tile that begins in this worker and ends in a later one. count 0: there is none.
struct MergeRecord {
  int count;  // of parts: this worker's and those of count - 1 workers behind it
  int query_start;
  int kv_head;
  int first_row;
  int num_rows;
  int unused[3];
};

__device__ inline MergeRecord* merge_records(const PagedAttentionParams& params) {
  return static_cast<MergeRecord*>(params.workspace);
}

struct PartialStates {
  float* sums;     // [num_states, head_dim]
  float2* totals;  // [num_states] (reference, sum)
};

__device__ inline PartialStates partial_states(const PagedAttentionParams& params,
                                               int64_t num_workers) {
  const bool ranges = params.num_splits == 0;
  const int64_t num_states = ranges ? 2 * num_workers * kTileRows
                                    : params.num_tokens * params.num_heads * params.num_splits;
  float* sums = ranges ? reinterpret_cast<float*>(merge_records(params) + num_workers)
                       : static_cast<float*>(params.workspace);
  return {sums, reinterpret_cast<float2*>(sums + num_states * params.cache.head_dim)};
}

// Number of the state of row `row` of tile state `index` (num_splits 0).
__device__ inline int64_t tile_state(int64_t index, int row) { return index * kTileRows + row; }

// Number of the state of piece `piece` of a row (num_splits > 1).
__device__ inline int64_t piece_state(const PagedAttentionParams& params, int64_t token,
                                      int64_t head, int64_t piece) {
  return (token * params.num_heads + head) * params.num_splits + piece;
}

}  // namespace pagedkv::cuda
