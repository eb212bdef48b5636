// What only the CPU can check for free: that slots, block ids, lengths and positions, which are
// data, lie inside what they index. A bad one is an error here, never a write somewhere else.
// On a GPU the same ids are the caller's promise, as reading them would wait for the device.
#pragma once

#include <cmath>
#include <vector>

#include "ops/operand_checks.h"
#include "pagedkv/kernels/attention_params.h"
#include "pagedkv/kernels/cache_params.h"
#include "pagedkv/kernels/layer_params.h"

namespace pagedkv::ops {

template <class Pointer>
void check_scale_values(const char* op, const KvCacheView<Pointer>& cache) {
  const auto check_one = [&](const char* name, const float* scales, int64_t stride) {
    if (scales == nullptr) return;
    const int64_t count = stride == 0 ? 1 : cache.num_kv_heads;
    for (int64_t i = 0; i < count; ++i) {
      const float scale = scales[i * stride];
      STD_TORCH_CHECK(std::isfinite(scale) && scale > 0.0f, op, ": ", name, "[", i, "] is ", scale,
                      ", expected a finite number above 0");
    }
  };
  check_one("k_scale", cache.k_scale, cache.k_scale_stride);
  check_one("v_scale", cache.v_scale, cache.v_scale_stride);
}

inline void check_slots(const char* op, const ReshapeAndCacheParams& params) {
  const int64_t num_slots = params.cache.num_blocks * params.cache.block_size;
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    STD_TORCH_CHECK(params.slot_mapping[t] < num_slots, op, ": slot_mapping[", t, "] is ",
                    params.slot_mapping[t], ", expected below ", num_slots,
                    " (num_blocks * block_size)");
  }
  check_scale_values(op, params.cache);
}

// The first ceil(num_tokens / block_size) entries of one sequence's table, from first_block on.
inline void check_table(const char* op, const int32_t* table, int64_t max_num_blocks, int64_t seq,
                        int64_t num_tokens, const ConstKvCache& cache, int64_t first_block = 0) {
  const int64_t used = (num_tokens + cache.block_size - 1) / cache.block_size;
  STD_TORCH_CHECK(used <= max_num_blocks, op, ": sequence ", seq, " has ", num_tokens,
                  " tokens in ", used, " blocks, expected at most the ", max_num_blocks,
                  " columns of block_tables");
  for (int64_t i = first_block; i < used; ++i) {
    STD_TORCH_CHECK(0 <= table[i] && table[i] < cache.num_blocks, op, ": block_tables[", seq, ", ",
                    i, "] is ", table[i], ", expected 0 to ", cache.num_blocks - 1);
  }
}

// Offsets rise from 0 and end within the rows there are.
inline void check_start_loc(const char* op, const char* name, const int32_t* start_loc,
                            int64_t num_seqs, int64_t num_tokens) {
  STD_TORCH_CHECK(start_loc[0] == 0, op, ": ", name, "[0] is ", start_loc[0], ", expected 0");
  for (int64_t i = 0; i < num_seqs; ++i) {
    STD_TORCH_CHECK(start_loc[i] <= start_loc[i + 1], op, ": ", name, "[", i + 1, "] is ",
                    start_loc[i + 1], ", expected at least ", start_loc[i], ", the entry before");
  }
  STD_TORCH_CHECK(start_loc[num_seqs] <= num_tokens, op, ": ", name, "[", num_seqs, "] is ",
                  start_loc[num_seqs], ", expected at most the ", num_tokens, " tokens there are");
}

inline void check_gather(const GatherBlocksParams& params) {
  constexpr const char* kOp = "pagedkv::gather_blocks";
  check_start_loc(kOp, "seq_start_loc", params.seq_start_loc, params.num_seqs, params.num_tokens);
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    check_table(kOp, params.block_tables + s * params.block_tables_stride, params.max_num_blocks, s,
                params.seq_start_loc[s + 1] - params.seq_start_loc[s], params.cache);
  }
  check_scale_values(kOp, params.cache);
}

// The block of the first key that a sequence's first query row sees: entries before it are not
// read.
inline int64_t first_seen_block(const PagedAttentionParams& params, int64_t seq) {
  if (params.window == 0) return 0;
  const int64_t query_len = params.query_start_loc[seq + 1] - params.query_start_loc[seq];
  const int64_t first = params.seq_lens[seq] - query_len - params.window + 1;
  return std::max<int64_t>(first, 0) / params.cache.block_size;
}

// A group's sequences all see its whole prefix, through equal tables, and are in no other group.
inline void check_prefix_groups(const PagedAttentionParams& params) {
  constexpr const char* kOp = "pagedkv::paged_attention";
  std::vector<bool> grouped(static_cast<size_t>(params.num_seqs), false);
  for (int64_t g = 0; g < params.num_prefix_groups; ++g) {
    const int64_t first = params.prefix_groups[3 * g];
    const int64_t count = params.prefix_groups[3 * g + 1];
    const int64_t num_blocks = params.prefix_groups[3 * g + 2];
    if (count == 0) continue;
    STD_TORCH_CHECK(0 <= first && 0 < count && first + count <= params.num_seqs, kOp,
                    ": prefix_groups[", g, "] has the sequences ", first, " to ", first + count - 1,
                    ", expected some of 0 to ", params.num_seqs - 1);
    STD_TORCH_CHECK(0 <= num_blocks, kOp, ": prefix_groups[", g, "] has ", num_blocks,
                    " blocks, expected at least 0");
    const int32_t* head = params.block_tables + first * params.block_tables_stride;
    // What any of them sees is read through the first one's table.
    int64_t first_of_group = num_blocks;
    for (int64_t s = first; s < first + count; ++s)
      first_of_group = std::min(first_of_group, first_seen_block(params, s));
    for (int64_t s = first; s < first + count; ++s) {
      STD_TORCH_CHECK(!grouped[static_cast<size_t>(s)], kOp, ": prefix_groups[", g,
                      "] has sequence ", s, ", expected no sequence in two groups");
      grouped[static_cast<size_t>(s)] = true;
      const int64_t query_len = params.query_start_loc[s + 1] - params.query_start_loc[s];
      const int64_t seen = params.causal ? params.seq_lens[s] - std::max<int64_t>(query_len, 1) + 1
                                         : params.seq_lens[s];
      STD_TORCH_CHECK(num_blocks * params.cache.block_size <= seen, kOp, ": prefix_groups[", g,
                      "] has a prefix of ", num_blocks * params.cache.block_size,
                      " tokens, expected at most the ", seen,
                      " that the first query row of sequence ", s, " sees");
      const int32_t* table = params.block_tables + s * params.block_tables_stride;
      // A sequence without query rows has not had its table checked.
      const int64_t first_block = s == first ? first_of_group : first_seen_block(params, s);
      check_table(kOp, table, params.max_num_blocks, s, num_blocks * params.cache.block_size,
                  params.cache, first_block);
      for (int64_t i = first_block; i < num_blocks; ++i) {
        STD_TORCH_CHECK(table[i] == head[i], kOp, ": prefix_groups[", g, "]: block_tables[", s,
                        ", ", i, "] is ", table[i], ", expected ", head[i], " as in sequence ",
                        first);
      }
    }
  }
}

inline void check_attention(const PagedAttentionParams& params) {
  constexpr const char* kOp = "pagedkv::paged_attention";
  check_start_loc(kOp, "query_start_loc", params.query_start_loc, params.num_seqs,
                  params.num_tokens);
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    const int64_t seq_len = params.seq_lens[s];
    const int64_t query_len = params.query_start_loc[s + 1] - params.query_start_loc[s];
    STD_TORCH_CHECK(seq_len >= 0, kOp, ": seq_lens[", s, "] is ", seq_len, ", expected at least 0");
    STD_TORCH_CHECK(query_len <= params.max_query_len, kOp, ": sequence ", s, " has ", query_len,
                    " query tokens, expected at most max_query_len = ", params.max_query_len);
    STD_TORCH_CHECK(seq_len == 0 || query_len <= seq_len, kOp, ": sequence ", s, " has ", query_len,
                    " query tokens, expected at most its length ", seq_len,
                    " (seq_lens counts this step's tokens), or length 0 for padding");
    if (query_len == 0) continue;
    check_table(kOp, params.block_tables + s * params.block_tables_stride, params.max_num_blocks, s,
                seq_len, params.cache, first_seen_block(params, s));
  }
  check_prefix_groups(params);
  check_scale_values(kOp, params.cache);
}

inline void check_positions(const char* op, const int64_t* positions, int64_t num_tokens,
                            int64_t max_position) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    STD_TORCH_CHECK(0 <= positions[t] && positions[t] < max_position, op, ": positions[", t,
                    "] is ", positions[t], ", expected 0 to ", max_position - 1,
                    " (rows of cos_sin_cache)");
  }
}

}  // namespace pagedkv::ops
