// Where the kernels over shared prefixes leave the parts of tiles that several workers share, in
// the workspace behind the decode kernel's own part of it.
//
// In order, for workers w of W, whose warps have kTileRows rows each of a tile:
//   parts     [2 W, kPrefixTileWarps]: 2 w: of the tile that began before w's range,
//             2 w + 1: of the one that begins in it and goes on
//   lse       fp32 [T, H], of the rows' own keys, where the caller wants none
// and at the workspace's end
//   counters  uint64 [W, kPrefixTileWarps], of the tile that begins in w and goes on: warps that
//             have left their part (arrive_at_counter in partial_states.cuh)
// A part is the sums of a warp's rows as the products' fragments hold them, not normalised, float4
// [head_dim / 8, 32], and of each row the reference (base 2) and the sum of weights, float2 [16].
// Reference -inf: no key was seen.
#pragma once

#include "cuda/attention/partial_states.cuh"
#include "cuda/attention/prefix_plan.cuh"
#include "pagedkv/kernels/attention_workspace.h"

namespace pagedkv::cuda {

constexpr int kPrefixTileWarps = static_cast<int>(kPrefixTileRows) / kTileRows;
static_assert(kPrefixTileWarps * sizeof(uint64_t) == kPrefixCounterBytes);

// A warp's part. Of float8 caches fragments come in pairs, head_dim is a multiple of 16.
struct PrefixPart {
  float4* sums;
  float2* totals;
};

struct PrefixStates {
  char* parts;
  float* lse;
  uint64_t* counters;
  int head_dim;

  __device__ uint64_t* counter(unsigned worker, int warp) const {
    return counters + worker * kPrefixTileWarps + static_cast<unsigned>(warp);
  }
  // Piece `piece` of the tile that begins in worker `first`.
  __device__ PrefixPart part(unsigned first, int piece, int warp) const {
    const unsigned worker = first + static_cast<unsigned>(piece);
    const unsigned tile = 2 * worker + static_cast<unsigned>(piece == 0);
    const unsigned index = tile * kPrefixTileWarps + static_cast<unsigned>(warp);
    auto* sums =
        reinterpret_cast<float4*>(parts + index * kTileRows * partial_state_bytes(head_dim));
    return {sums, reinterpret_cast<float2*>(sums + head_dim / 8 * 32)};
  }
};

__host__ __device__ inline PrefixStates prefix_states(const PagedAttentionParams& params) {
  PagedAttentionWorkspaceShape shape{.num_tokens = params.num_tokens,
                                     .num_heads = params.num_heads,
                                     .head_dim = params.cache.head_dim,
                                     .num_splits = params.num_splits,
                                     .num_prefix_groups = params.num_prefix_groups,
                                     .num_workers = params.num_workers};
  auto* workspace = static_cast<char*>(params.workspace);
  PrefixStates states{};
  states.counters = reinterpret_cast<uint64_t*>(workspace + paged_attention_workspace_bytes(shape));
  shape.num_prefix_groups = 0;
  states.parts = workspace + paged_attention_workspace_bytes(shape);
  states.lse = reinterpret_cast<float*>(states.parts + 2 * num_prefix_workers(params.num_workers) *
                                                           kPrefixTileRows *
                                                           partial_state_bytes(shape.head_dim));
  states.head_dim = static_cast<int>(shape.head_dim);
  return states;
}

}  // namespace pagedkv::cuda
