// Which packed rows a block of the prefill kernels takes, from the lengths on the device.
//
// Blocks are numbered kv_head fastest, then tiles of kRows rows, the batch's last tile first: in a
// causal sequence later rows see more keys, and long work should start early. The grid has as many
// blocks as a batch of these sizes can need: sum of ceil(rows / kRows) <= T * group / kRows + S.
#pragma once

#include "cuda/attention/tile_part.cuh"

namespace pagedkv::cuda {

template <int kRows>
__device__ inline int prefill_tiles(const Sequence& sequence, int group) {
  const int rows = sequence.query_len * group;
  return rows <= kMaxDecodeRows ? 0 : (rows + kRows - 1) / kRows;
}

// Blocks of the grid.
inline int64_t prefill_blocks(const PagedAttentionParams& params, int64_t rows_per_tile) {
  const int64_t group = params.num_heads / params.cache.num_kv_heads;
  return (params.num_tokens * group / rows_per_tile + params.num_seqs) * params.cache.num_kv_heads;
}

// Rows and keys of the sequence's tile `tile`; seq, sequence and kv_head are set.
template <int kRows, int kStepKeys>
__device__ inline void fill_prefill_part(const PagedAttentionParams& params, int tile, int group,
                                         TilePart& part) {
  part.first_row = tile * kRows;
  part.num_rows = min(kRows, part.sequence.query_len * group - part.first_row);
  const int first_token = part.first_row / group;
  const int last_token = (part.first_row + part.num_rows - 1) / group;
  const int seq_len = part.sequence.seq_len;
  part.first_key = visible_keys(params, seq_len, part.sequence.position(first_token)).first;
  const int end = visible_keys(params, seq_len, part.sequence.position(last_token)).end;
  part.base_key = part.first_key / kStepKeys * kStepKeys;
  part.num_steps = max(0, (end - part.base_key + kStepKeys - 1) / kStepKeys);
}

// All threads of the block call this; scratch is int64 [kThreads / 32 + 4] in shared memory. False
// if there is nothing for this block. Fills part: rows [first_row, first_row + num_rows) and the
// keys that they see, in num_steps steps of kStepKeys from base_key on.
template <int kThreads, int kRows, int kStepKeys>
__device__ bool plan_prefill_tile(const PagedAttentionParams& params, int64_t* scratch,
                                  TilePart& part) {
  constexpr int kWarps = kThreads / 32;
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t run = (params.num_seqs + kThreads - 1) / kThreads;
  const int64_t first = min(thread * run, params.num_seqs);
  const int64_t last = min(first + run, params.num_seqs);
  int64_t tiles = 0;
  for (int64_t seq = first; seq < last; ++seq) {
    tiles += prefill_tiles<kRows>(load_sequence(params, seq), group);
  }
  int64_t before = tiles;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, before, offset);
    if (thread % 32 >= offset) before += other;
  }
  if (thread % 32 == 31) scratch[thread / 32] = before;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < thread / 32) before += scratch[warp];
    total += scratch[warp];
  }
  before -= tiles;
  const int64_t kv_heads = params.cache.num_kv_heads;
  const int64_t number = total - 1 - blockIdx.x / kv_heads;
  if (number < 0) return false;  // the same in all threads
  if (before <= number && number < before + tiles) {
    int64_t at = before;
    for (int64_t seq = first; seq < last; ++seq) {
      const int count = prefill_tiles<kRows>(load_sequence(params, seq), group);
      if (number < at + count) {
        scratch[kWarps] = seq;
        scratch[kWarps + 1] = number - at;
        break;
      }
      at += count;
    }
  }
  __syncthreads();
  part.seq = static_cast<int>(scratch[kWarps]);
  part.sequence = load_sequence(params, part.seq);
  part.kv_head = static_cast<int>(blockIdx.x % kv_heads);
  fill_prefill_part<kRows, kStepKeys>(params, static_cast<int>(scratch[kWarps + 1]), group, part);
  return true;
}

}  // namespace pagedkv::cuda
