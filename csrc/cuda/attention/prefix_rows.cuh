// A warp's 16 packed rows of a tile over a shared prefix: what they see of it, and their states.
#pragma once

#include "cuda/attention/prefix_states.cuh"

namespace pagedkv::cuda {

// Position of the query token `token`, which lies in some sequence, in that sequence.
__device__ inline int position_of_token(const PagedAttentionParams& params, int64_t token) {
  const Sequence sequence = load_sequence(params, sequence_of_token(params, token));
  return sequence.position(static_cast<int>(token - sequence.query_start));
}

// Where a row stands is only looked up if it matters: without ALiBi and window all rows of the tile
// see the whole prefix.
__device__ inline TileRows prefix_tile_rows(const PagedAttentionParams& params,
                                            const TilePart& part, int group, int lane) {
  const int prefix_len = part.sequence.seq_len;
  TileRows rows{};
  rows.keys[0] = rows.keys[1] = KeyRange{0, prefix_len};
  rows.all_first = params.window > 0 ? prefix_len : 0;
  rows.all_end = prefix_len;
  if (params.window == 0 && params.alibi_slopes == nullptr) return rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int packed = part.first_row + min(lane / 4 + 8 * i, part.num_rows - 1);
    const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
    rows.position[i] = position_of_token(params, part.sequence.query_start + packed / group);
    rows.keys[i].first = visible_keys(params, prefix_len, rows.position[i]).first;
    if (params.alibi_slopes != nullptr) {
      rows.slope[i] = params.alibi_slopes[head * params.alibi_slopes_stride] * kLog2E;
    }
  }
  return rows;
}

// The states of the rows of `mine`, some of the rows of the tile `part`.
template <class Traits>
__device__ void write_prefix_states(const PagedAttentionParams& params, const TilePart& part,
                                    const TilePart& mine, int group, OnlineSoftmax& softmax,
                                    const float (&out)[Traits::kDim / 8][4], int lane) {
  const PrefixStates states = prefix_states(params);
  write_states<Traits>(params, states, mine, group, softmax, out, lane,
                       [&](int64_t token, int64_t head, int packed) {
                         if (part.piece < 0) return token * params.num_heads + head;
                         return cut_rows(states.cut_prefix, blockIdx.x, part.piece,
                                         kPrefixTileRows) +
                                packed - part.first_row;
                       });
}

}  // namespace pagedkv::cuda
