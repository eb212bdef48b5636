// Where the kernels over shared prefixes leave partial states, in the workspace behind the decode
// kernel's own part of it.
//
// In order: one PrefixRecord a group; then states, all their sums before all their totals:
//   prefix      token * H + head: the prefix, where one worker had all of it
//   cut prefix  (2 * worker + i) * kPrefixTileRows + row: rows of a tile that a worker's range
//               cuts; i 0: it began in an earlier worker, 1: it begins here and goes on
// and the lse of the rows' own keys, [T, H], where the caller wants none. A state is fp32
// [head_dim] sums, not normalised, and its reference (base 2) and sum of weights, fp32 [2].
// Reference -inf: no key was seen, the sums are not read.
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/prefix_plan.cuh"
#include "cuda/attention/softmax.cuh"

namespace pagedkv::cuda {

// What the merge must know of a group's line to find the parts of a row.
struct PrefixRecord {
  int64_t begin;
  int tile_length;
  int range_length;  // of every worker
};
static_assert(sizeof(PrefixRecord) == kPrefixRecordBytes);

struct PrefixStates {
  PrefixRecord* records;  // [num_prefix_groups]
  float* sums;            // [num_states, head_dim]
  float2* totals;         // [num_states] (reference, sum)
  float* lse;             // [T, H]
  int64_t cut_prefix;     // number of the first of its kind
};

__host__ __device__ inline PrefixStates prefix_states(const PagedAttentionParams& params) {
  const PagedAttentionWorkspaceShape shape{.num_tokens = params.num_tokens,
                                           .num_heads = params.num_heads,
                                           .head_dim = params.cache.head_dim,
                                           .num_splits = params.num_splits,
                                           .num_prefix_groups = 0,
                                           .num_workers = params.num_workers};
  const int64_t cut_prefix = params.num_tokens * params.num_heads;
  const int64_t num_states =
      cut_prefix + 2 * num_prefix_workers(params.num_workers) * kPrefixTileRows;
  char* begin = static_cast<char*>(params.workspace) + paged_attention_workspace_bytes(shape);
  PrefixStates states{};
  states.records = reinterpret_cast<PrefixRecord*>(begin);
  states.sums = reinterpret_cast<float*>(states.records + params.num_prefix_groups);
  states.totals = reinterpret_cast<float2*>(states.sums + num_states * params.cache.head_dim);
  states.lse = reinterpret_cast<float*>(states.totals + num_states);
  states.cut_prefix = cut_prefix;
  return states;
}

// A worker's states of the tile that its range cuts, from row 0 on.
__device__ inline int64_t cut_rows(int64_t first, int64_t worker, int i, int64_t rows_per_tile) {
  return first + (2 * worker + i) * rows_per_tile;
}

// The states of the rows of `mine` from a warp's fragments. number(token, head, packed row): of its
// state.
template <class Traits, class Number>
__device__ void write_states(const PagedAttentionParams& params, const PrefixStates& states,
                             const TilePart& mine, int group, OnlineSoftmax& softmax,
                             const float (&out)[Traits::kDim / 8][4], int lane,
                             const Number& number) {
  softmax.finish();
  const int head_dim = static_cast<int>(params.cache.head_dim);
  const int quad = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane / 4 + 8 * i;
    if (row >= mine.num_rows) continue;
    const int packed = mine.first_row + row;
    const int64_t token = mine.sequence.query_start + packed / group;
    const int64_t state = number(token, mine.kv_head * group + packed % group, packed);
    float* sums = states.sums + state * head_dim;
    const auto write = [&](int d, float x, float y) {
      if (d < head_dim) *reinterpret_cast<float2*>(sums + d) = make_float2(x, y);
    };
#pragma unroll
    for (int n = 0; n < Traits::kDim / 8; ++n) {
      if constexpr (!Traits::kFloat8) {
        write(out_dim<Traits>(n, 0, quad), out[n][2 * i], out[n][2 * i + 1]);
      } else if (n % 2 == 0) {  // neighbours in head_dim lie in neighbouring fragments
        write(out_dim<Traits>(n, 0, quad), out[n][2 * i], out[n + 1][2 * i]);
        write(out_dim<Traits>(n, 1, quad), out[n][2 * i + 1], out[n + 1][2 * i + 1]);
      }
    }
    if (quad == 0) states.totals[state] = make_float2(softmax.reference[i], softmax.sum[i]);
  }
}

}  // namespace pagedkv::cuda
