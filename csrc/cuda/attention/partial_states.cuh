// What the decode kernel leaves in the workspace where a tile's keys are cut, and where.
//
// num_splits 0 (block b of W):
//   counters     uint64 [W, kFragments], for the tile that begins in block b and ends in a later
//   one block states [2 W]: 2 b: b's part of a tile that began earlier; 2 b + 1: of one that goes
//   on A tile's state is [kFragments] of a FragmentState, which one warp writes and reads.
// num_splits n > 1: one state a row, (token * H + head) * n + piece: all fp32 sums
//   [T * H * n, head_dim], then all float2 totals.
// A state's sums are not normalised; its totals are (reference, sum of weights): weights are
// 2^(logit - reference).
//
// Counters may start with any contents: a counter counts only while its upper 48 bits are
// kCounterMark, which its first user sets. The last arrival leaves it at zero again.
#pragma once

#include "cuda/attention/decode_traits.cuh"
#include "cuda/attention/sequence.cuh"

namespace pagedkv::cuda {

// A fragment of the sums and the totals of its rows, as the products hold them
// (decode_products.cuh, OutSums): totals[q] is (reference, sum) of rows 2 q and 2 q + 1 of the
// fragment's row tile.
struct FragmentState {
  float4 sums[32];
  float4 totals[4];
};

template <class Traits>
struct RangeStates {
  static constexpr int kFragments = Traits::kDim / 16 * Traits::kRowTiles;

  static constexpr int64_t bytes(int64_t blocks) {
    return blocks * kFragments * static_cast<int64_t>(8 + 2 * sizeof(FragmentState));
  }
  static __device__ uint64_t* counter(const PagedAttentionParams& params, unsigned block,
                                      int fragment) {
    return static_cast<uint64_t*>(params.workspace) + block * kFragments + fragment;
  }
  static __device__ FragmentState* block_state(const PagedAttentionParams& params, unsigned index,
                                               int fragment) {
    // An even number of counters keeps the states 16-byte aligned.
    static_assert(kFragments % 2 == 0);
    auto* states = reinterpret_cast<FragmentState*>(counter(params, gridDim.x, 0));
    return states + index * kFragments + fragment;
  }
};

struct PieceStates {
  float* sums;     // [T * H * n, head_dim]
  float2* totals;  // [T * H * n]
};

__device__ inline PieceStates piece_states(const PagedAttentionParams& params) {
  auto* sums = static_cast<float*>(params.workspace);
  const int64_t count = params.num_tokens * params.num_heads * params.num_splits;
  return {sums, reinterpret_cast<float2*>(sums + count * params.cache.head_dim)};
}

__device__ inline int64_t piece_state(const PagedAttentionParams& params, int64_t token,
                                      int64_t head, int64_t piece) {
  return (token * params.num_heads + head) * params.num_splits + piece;
}

constexpr unsigned long long kCounterMark = 0x5061676564000000ull >> 16 << 16;
constexpr unsigned long long kCounterBits = 0xffff;

// Counts an arrival; returns how many came before. By one thread. Orders what it has seen of other
// threads' writes before, and theirs before the arrivals that it sees (acquire and release).
__device__ inline int arrive_at_counter(uint64_t* address) {
  auto* counter = reinterpret_cast<unsigned long long*>(address);
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;\n"
               : "=l"(before)
               : "l"(counter)
               : "memory");
  if ((before & ~kCounterBits) == kCounterMark) return static_cast<int>(before & kCounterBits);
  // This workspace's first use: whoever comes first replaces what was there.
  unsigned long long seen = before + 1;
  while (true) {
    const unsigned long long count =
        (seen & ~kCounterBits) == kCounterMark ? seen & kCounterBits : 0;
    unsigned long long prior;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;\n"
                 : "=l"(prior)
                 : "l"(counter), "l"(seen), "l"(kCounterMark | (count + 1))
                 : "memory");
    if (prior == seen) return static_cast<int>(count);
    seen = prior;
  }
}

__device__ inline void reset_counter(uint64_t* address) { *address = kCounterMark; }

}  // namespace pagedkv::cuda
