// Params of paged attention and of the merge of two attention states, and the size of the
// workspace: the one formula that Python, the adapters' checks and the kernels share.
//
// Words as in cache_params.h, and H query heads, H = G * group. Strides count elements.
//
// Semantics of paged attention. Sequence s has the query rows query_start_loc[s] ..
// query_start_loc[s + 1]; its last row is at position seq_lens[s] - 1, so row i of query_len stands
// at p = seq_lens[s] - query_len + i. Key j is visible to p iff j < seq_lens[s], and j <= p when
// causal, and p - window < j when window > 0 (then causal is required). The logit is
// scale * q.k * k_scale, then soft_cap * tanh(logit / soft_cap) if soft_cap > 0, then
// + alibi_slope[h] * (j - p), then the mask. A row that sees no key is 0 with lse -inf.
// Query rows outside every sequence are left as they are.
//
// Invariants checked by the adapters: those of cache_params.h; H % G == 0; 1 <= D <= 256,
// 1 <= B <= 256; query_start_loc starts at 0, does not decrease and ends at or below T; on the CPU
// also query_len <= max_query_len and <= seq_len (or seq_len 0), tables wide enough, ids in range.
// Only the first ceil(seq_len / B) entries of a table are ever read.
#pragma once

#include <cstdint>

#include "pagedkv/kernels/cache_params.h"

namespace pagedkv {

inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxBlockSize = 256;
inline constexpr int64_t kMaxNumSplits = 256;
inline constexpr int64_t kWorkspaceAlignment = 16;  // bytes

struct PagedAttentionParams {
  void* out;                       // [T, H, D] type
  float* lse;                      // fp32 [T, H], natural log; or null
  const void* query;               // [T, H, D] type
  ConstKvCache cache;              // k_scale, v_scale included
  const int32_t* block_tables;     // int32 [S, max_num_blocks], last stride 1
  const int32_t* seq_lens;         // int32 [S], this step's tokens included; 0: padding
  const int32_t* query_start_loc;  // int32 [S + 1]
  const float* alibi_slopes;       // fp32 [H]; or null
  const int32_t* prefix_groups;    // int32 [num_prefix_groups, 3] (first_seq, num_seqs,
                                   // num_prefix_blocks), contiguous; or null
  void* workspace;                 // uint8 [workspace_bytes], 16-byte aligned, any contents
  int64_t workspace_bytes;         // >= paged_attention_workspace_bytes(...)
  int64_t num_workers;             // what the workspace is laid out for
  ElementType type;                // of out and query
  int64_t num_tokens;              // T
  int64_t num_seqs;                // S
  int64_t num_heads;               // H
  int64_t max_num_blocks;          // width of block_tables
  int64_t num_prefix_groups;
  int64_t max_query_len;
  int64_t num_splits;              // 0: chosen by the kernel, 1: one pass, n: n pieces
  int64_t decode_multiprocessors;  // of a GPU, that decode may use; 0: all. Set by the launcher
  int64_t window;                  // 0: unlimited
  float scale;
  float soft_cap;  // 0: none
  bool causal;
  int64_t out_stride_token;
  int64_t out_stride_head;
  int64_t lse_stride_token;
  int64_t lse_stride_head;
  int64_t query_stride_token;
  int64_t query_stride_head;
  int64_t block_tables_stride;  // elements between sequences
  int64_t alibi_slopes_stride;
};

// out = the softmax-weighted union of two disjoint sets of keys; a state with lse -inf is empty,
// and its out is not read into the result. Both empty: 0 and -inf. out may be out_a or out_b.
struct MergeAttentionStatesParams {
  void* out;           // [T, H, D] type
  float* lse;          // fp32 [T, H]; or null
  const void* out_a;   // [T, H, D] type
  const float* lse_a;  // fp32 [T, H]
  const void* out_b;   // [T, H, D] type
  const float* lse_b;  // fp32 [T, H]
  ElementType type;
  int64_t num_tokens;  // T
  int64_t num_heads;   // H
  int64_t head_dim;    // D
  int64_t out_stride_token, out_stride_head;
  int64_t lse_stride_token, lse_stride_head;
  int64_t out_a_stride_token, out_a_stride_head;
  int64_t lse_a_stride_token, lse_a_stride_head;
  int64_t out_b_stride_token, out_b_stride_head;
  int64_t lse_b_stride_token, lse_b_stride_head;
};

// What the workspace depends on. num_workers is what runs at once: the pool's threads on the CPU,
// the fixed grid on a GPU (cuda::paged_attention_num_workers).
struct PagedAttentionWorkspaceShape {
  int64_t num_tokens;  // T
  int64_t num_heads;   // H
  int64_t head_dim;    // D
  int64_t num_splits;
  int64_t num_prefix_groups;
  int64_t num_workers;
};

// Most rows (query token x query head of one KV head) of a tile whose keys the CPU cuts over
// workers, and rows that the workspace has for each end of a worker's range. On a GPU such tiles
// have 16 rows, but their states are padded (head_dim 8 takes the room of 64), and what they leave
// lets the kernel of small batches serve up to a hundred KV heads.
constexpr int64_t kMaxSplitTileRows = 64;
// Likewise, for sequences that share a prefix on a GPU: of a tile over the prefix.
constexpr int64_t kPrefixTileRows = 128;
constexpr int64_t kPrefixRecordBytes = 16;

// Workers over the prefix, where num_workers are two blocks a multiprocessor: one each.
constexpr int64_t num_prefix_workers(int64_t num_workers) { return (num_workers + 1) / 2; }

// A partial state of one row is fp32 [D] (not normalised or normalised, as the kernel likes) and
// its maximum and sum, fp32 [2].
constexpr int64_t partial_state_bytes(int64_t head_dim) { return (head_dim + 2) * 4; }

// Bytes of workspace, the same for every batch and length when num_splits is 0 or 1 without
// prefix groups, so that a captured graph never outgrows it.
//   num_splits 0: a worker owns a contiguous range of all keys; only the tiles cut by the two ends
//     of a range leave partial states: 2 * num_workers * kMaxSplitTileRows.
//   num_splits n > 1: T * H * n.     num_splits 1: none.
//   prefix groups, behind those: a record for every group, two states for every row, the prefix's
//     and its own keys' (on a GPU the lse of those), and two tiles a worker, whose range may cut
//     them.
constexpr int64_t paged_attention_prefix_states(const PagedAttentionWorkspaceShape& shape) {
  return 2 * (shape.num_tokens * shape.num_heads +
              num_prefix_workers(shape.num_workers) * kPrefixTileRows);
}

constexpr int64_t paged_attention_workspace_bytes(const PagedAttentionWorkspaceShape& shape) {
  const int64_t rows = shape.num_tokens * shape.num_heads;
  int64_t states = 0;
  if (shape.num_splits == 0) states = 2 * shape.num_workers * kMaxSplitTileRows;
  if (shape.num_splits > 1) states = rows * shape.num_splits;
  const auto aligned = [](int64_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  const int64_t bytes = aligned(states * partial_state_bytes(shape.head_dim));
  if (shape.num_prefix_groups == 0) return bytes;
  return bytes +
         aligned(shape.num_prefix_groups * kPrefixRecordBytes +
                 paged_attention_prefix_states(shape) * partial_state_bytes(shape.head_dim));
}

}  // namespace pagedkv
