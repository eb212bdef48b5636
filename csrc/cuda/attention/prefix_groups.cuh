// Groups of sequences that share a prefix, as the kernels see them: which sequences take part, and
// how many keys the prefix phase covers for them. Shared by the decode kernel, which leaves these
// out, and the kernels that have them, so that they cannot disagree.
//
// A sequence takes part in its group if it is decoded (at most kMaxDecodeRows packed rows) and its
// first query sees the whole prefix. Any other one, a padded one for instance, is attended to
// alone. Nothing else's table is read from its beginning: behind a window its entries may be
// anything.
#pragma once

#include "cuda/attention/sequence.cuh"

namespace pagedkv::cuda {

struct PrefixGroup {
  int first_seq;
  int num_seqs;
  int prefix_len;  // tokens; 0: not used
};

__device__ inline bool sees_prefix(const PagedAttentionParams& params, const Sequence& sequence,
                                   int64_t prefix_len) {
  const KeyRange keys = visible_keys(params, sequence.seq_len,
                                     sequence.position(0) - (sequence.query_len == 0 ? 1 : 0));
  return keys.first == 0 && prefix_len <= keys.end;
}

// An entry is used if two sequences or more share a block or more that the first, whose table
// serves all, sees.
__device__ inline PrefixGroup load_prefix_group(const PagedAttentionParams& params, int64_t index) {
  const int32_t* entry = params.prefix_groups + 3 * index;
  PrefixGroup group{entry[0], entry[1], 0};
  const int64_t prefix_len = entry[2] * params.cache.block_size;
  const bool used = group.num_seqs >= 2 && group.first_seq >= 0 &&
                    group.first_seq + static_cast<int64_t>(group.num_seqs) <= params.num_seqs &&
                    prefix_len > 0 &&
                    sees_prefix(params, load_sequence(params, group.first_seq), prefix_len);
  if (used) group.prefix_len = static_cast<int>(prefix_len);
  return group;
}

__device__ inline bool takes_part(const PagedAttentionParams& params, const Sequence& sequence,
                                  int prefix_len) {
  const int heads = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  return sequence.query_len * heads <= kMaxDecodeRows && sees_prefix(params, sequence, prefix_len);
}

// The group of a sequence that takes part in it, or -1.
__device__ inline int64_t prefix_group_of(const PagedAttentionParams& params, int64_t seq,
                                          const Sequence& sequence) {
  for (int64_t g = 0; g < params.num_prefix_groups; ++g) {
    const int64_t first = params.prefix_groups[3 * g];
    if (seq < first || seq >= first + params.prefix_groups[3 * g + 1]) continue;
    const PrefixGroup group = load_prefix_group(params, g);
    return group.prefix_len > 0 && takes_part(params, sequence, group.prefix_len) ? g : -1;
  }
  return -1;
}

// How many keys of a sequence are the prefix phase's: 0, or a multiple of block_size.
__device__ inline int shared_prefix(const PagedAttentionParams& params, int64_t seq,
                                    const Sequence& sequence) {
  const int64_t group = prefix_group_of(params, seq, sequence);
  return group < 0 ? 0 : load_prefix_group(params, group).prefix_len;
}

}  // namespace pagedkv::cuda
