// One sequence of a batch as the kernels see it, and which keys its rows see. Shared by all
// attention kernels, so that planner and masks cannot disagree.
//
// Tile rows pack the query heads of one KV head: row m = i * group + g is query token i, query head
// kv_head * group + g. It stands at position p = seq_len - query_len + i.
#pragma once

#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

// Sequences with at most this many packed rows are decoded; longer ones are prefilled.
constexpr int kMaxDecodeRows = 64;

struct Sequence {
  int query_start;  // first query token
  int query_len;
  int seq_len;

  __device__ int position(int query_token) const { return seq_len - query_len + query_token; }
};

__device__ inline Sequence load_sequence(const PagedAttentionParams& params, int64_t seq) {
  const int start = params.query_start_loc[seq];
  return {start, params.query_start_loc[seq + 1] - start, params.seq_lens[seq]};
}

// Keys [first, end) that the row at this position sees; empty if end <= first.
struct KeyRange {
  int first;
  int end;
};

__device__ inline KeyRange visible_keys(const PagedAttentionParams& params, int seq_len,
                                        int position) {
  const int end = params.causal ? min(seq_len, position + 1) : seq_len;
  const int64_t first = params.window > 0 ? position - params.window + 1 : 0;
  return {first > 0 ? static_cast<int>(first) : 0, end};
}

// The sequence that owns a query token, or -1: query_start_loc[s] <= token < query_start_loc[s +
// 1].
__device__ inline int64_t sequence_of_token(const PagedAttentionParams& params, int64_t token) {
  if (params.num_seqs == 0 || token < params.query_start_loc[0] ||
      token >= params.query_start_loc[params.num_seqs]) {
    return -1;
  }
  int64_t low = 0;
  int64_t high = params.num_seqs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (params.query_start_loc[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Logits in the base-2 exponent that the kernels use: log2(e) is folded into every factor.
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

struct LogitScale {
  float factor;  // of q.k; with a soft-cap, to its argument
  float cap;     // soft_cap * log2(e); 0: none
  __device__ float logit(float dot) const {
    return cap > 0.0f ? cap * tanhf(dot * factor) : dot * factor;
  }
  // As exact as a product of 16-bit elements deserves: tanh(x) = 1 - 2 / (2^(2 x log2(e)) + 1),
  // whose error is about 1e-7 absolutely, not relatively.
  __device__ float fast_logit(float dot) const {
    if (cap <= 0.0f) return dot * factor;
    return cap - __fdividef(2.0f * cap, exp2f(dot * factor * (2.0f * kLog2E)) + 1.0f);
  }
};

__device__ inline LogitScale logit_scale(const PagedAttentionParams& params, int64_t kv_head) {
  float scale = params.scale;
  if (params.cache.k_scale != nullptr) {
    scale *= params.cache.k_scale[kv_head * params.cache.k_scale_stride];
  }
  return {params.soft_cap > 0.0f ? scale / params.soft_cap : scale * kLog2E,
          params.soft_cap * kLog2E};
}

__device__ inline float value_scale(const PagedAttentionParams& params, int64_t kv_head) {
  return params.cache.v_scale == nullptr
             ? 1.0f
             : params.cache.v_scale[kv_head * params.cache.v_scale_stride];
}

}  // namespace pagedkv::cuda
