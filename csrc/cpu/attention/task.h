// What the planner (plan.cpp) hands to the kernels (attend_body.h): tasks, merges and scratch
// memory. Plain data, the same for every instruction set.
#pragma once

#include <cstdint>

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cpu {

// How many keys ahead a decode asks for memory; a multiple of a tile's panels.
inline constexpr int64_t kPrefetchKeys = 32;
// A row is one query head of one token. A task's rows share a KV head: token-major, heads within.
inline constexpr int64_t kMaxTileRows = 192;
// Rows of one sequence and KV head up to which keys are used where they lie (stream_body.h), not
// packed first (tile_body.h).
inline constexpr int64_t kMaxStreamRows = 8;
// Keys of one step of the online softmax. Steps begin at multiples of it, so that a row's rounding
// does not depend on which rows it shares a task with.
inline constexpr int64_t kTileKeys = 256;
// The same for large heads, so that a packed tile stays in the second-level cache.
inline constexpr int64_t kLargeHeadTileKeys = 128;
inline constexpr int64_t kLargeHeadDim = 128;
// Floats between rows of packed queries and of scores: room for the largest head_dim.
inline constexpr int64_t kRowStride = 256;

inline constexpr int64_t tile_keys(int64_t head_dim) {
  return head_dim > kLargeHeadDim ? kLargeHeadTileKeys : kTileKeys;
}
inline constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
inline constexpr int64_t round_down(int64_t x, int64_t step) { return x / step * step; }

// Keys [begin, end) that the query at `position` of a sequence sees.
struct VisibleKeys {
  int64_t begin;
  int64_t end;
};
inline VisibleKeys visible_keys(bool causal, int64_t window, int64_t seq_len, int64_t position) {
  if (seq_len == 0) return {0, 0};
  const int64_t begin = window > 0 && position >= window ? position - window + 1 : 0;
  return {begin, causal ? position + 1 : seq_len};
}

// Rows times keys of one KV head.
struct AttentionTask {
  int64_t token_begin;  // tokens [token_begin, token_end) of query and out,
  int64_t token_end;
  int64_t first_seq;  // the first of them in this sequence, the rest in it or in the next ones
  int64_t table_seq;  // whose block table gives the keys
  int64_t key_begin;  // keys [key_begin, key_end); none if equal
  int64_t key_end;
  int64_t first_state;  // of token_begin's head 0, heads adjacent; -1: the rows are final
  int64_t kv_head = 0;
  int64_t head_begin = 0;  // query heads [head_begin, head_end), all of kv_head
  int64_t head_end = 0;
  bool streaming = false;  // stream_body.h, else tile_body.h
};

// Rows whose states are summed in order: the shared prefix's, then those of the pieces.
struct MergeTask {
  int64_t token_begin;
  int64_t token_end;
  int64_t prefix_state;  // of token_begin's head 0; -1: none
  int64_t piece_state;   // of the first piece
  int64_t num_pieces;
};

// One row's softmax over some keys: output = sum of p_j v_j as stored (v_scale not applied),
// p_j = 2^(logit_j - maximum), logits in units of ln 2. No key: 0, -inf, 0.
// A state is fp32 [head_dim + 2]: output, maximum, sum.
inline constexpr int64_t state_floats(int64_t head_dim) { return head_dim + 2; }

// One worker's memory, 64-byte aligned; rows as many as the plan's largest task has, rounded up.
struct AttentionScratch {
  float* query;                // [rows, kRowStride]
  float* scores;               // [rows, kRowStride]
  float* output;               // [rows, round_up(head_dim, 32)]
  float* packed_keys;          // [tile_keys, round_up(head_dim, 2)]; tile tasks only
  float* packed_values;        // [tile_keys, round_up(head_dim, 32)]; tile tasks only
  float* maximum;              // [rows]
  float* sum;                  // [rows]
  float* rescale;              // [rows]
  float* slope;                // [rows], ALiBi, in units of ln 2
  int64_t* position;           // [rows]
  int64_t* visible_begin;      // [rows], keys
  int64_t* visible_end;        // [rows]
  const void** key_rows;       // [kTileKeys + kPrefetchKeys]
  const void** value_rows;     // [kTileKeys + kPrefetchKeys]
  const unsigned char* zeros;  // a row of zeros in any type
};

struct AttentionKernels {
  void (*attend)(const PagedAttentionParams&, const AttentionTask&, const AttentionScratch&,
                 float* states);
  void (*merge)(const PagedAttentionParams&, const MergeTask&, const float* states);
};

namespace scalar {
extern const AttentionKernels kAttentionKernels;
}
namespace avx2 {
extern const AttentionKernels kAttentionKernels;
}
namespace avx512 {
extern const AttentionKernels kAttentionKernels;
}
namespace avx512_bf16 {
extern const AttentionKernels kAttentionKernels;  // bf16 queries only
}

}  // namespace pagedkv::cpu
