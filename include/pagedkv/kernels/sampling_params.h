// Params of the ops on rows of logits. sample_tokens: one token of each row, by argmax or by one
// uniform number and the inverse of the cumulative distribution that temperature, min_p, top_k and
// top_p leave. score_tokens: log-probabilities and ranks of given tokens, and the most likely ones.
// Strides count elements; rows of logits have stride 1 inside.
#pragma once

#include <cstdint>

#include "pagedkv/kernels/element_type.h"

namespace pagedkv {

// Elements of a row that the CUDA kernels know the largest and the sum of; see
// csrc/cuda/sampling/chunk.cuh.
inline constexpr int64_t kChunkLogits = 512;
inline constexpr int64_t kMaxVocabSize = int64_t{1} << 20;

constexpr int64_t num_logit_chunks(int64_t vocab_size) {
  return (vocab_size + kChunkLogits - 1) / kChunkLogits;
}

// Changes of single logits, a sparse list a row: entries start_loc[i] to start_loc[i + 1] are row
// i's, their ids ascending. An entry (bias, factor, taken) makes of the logit x: y = x + bias, then
// (y > 0 ? y / factor : y * factor) - taken. Absent: start_loc is null.
struct LogitEdits {
  const int32_t* start_loc;   // int32 [n + 1]
  const int32_t* ids;         // int32 [num_edits]
  const float* values;        // fp32 [num_edits, 3]
  const int32_t* is_limited;  // int32 [n]: not 0, ids without an entry are never chosen
};

struct LogitRows {
  const void* logits;  // [n, vocab_size] type
  ElementType type;
  int64_t num_rows;    // n
  int64_t vocab_size;  // 1 to kMaxVocabSize
  int64_t num_chunks;  // of kChunkLogits, of a row
  int64_t stride_row;
  LogitEdits edits;
  void* workspace;  // fp32 [n, num_chunks, 2]; CUDA only
};

// Of the workspace.
constexpr int64_t logit_rows_workspace_bytes(const LogitRows& rows) {
  return rows.num_rows * rows.num_chunks * 2 * 4;
}

struct SampleTokensParams {
  int64_t* token_ids;  // int64 [n], -1 where the row's largest logit is not finite, or one is NaN
  float* cuts;         // fp32 [n] or null: smallest logit that could be chosen; NaN beside a -1
  LogitRows rows;
  const float* inverse_temperatures;  // fp32 [n], 0 takes the largest logit
  const int64_t* top_k;               // int64 [n], 0 keeps all
  const double* top_p;                // fp64 [n], 1 keeps all
  const double* min_p;                // fp64 [n], 0 keeps all
  const int64_t* seeds;               // int64 [n], the bits of an unsigned number
  const int64_t* positions;           // int64 [n]
  const int64_t* draws;               // int64 [n]
};

inline constexpr int64_t kMaxTopTokens = 512;

struct ScoreTokensParams {
  double* logprobs;  // fp64 [n]; -inf of ids that have no logit; NaN in rows as above
  int64_t* ranks;    // int64 [n], 1 + number of larger logits; 0 in rows as above
  int64_t* top_ids;  // int64 [n, num_top], best first, of equals the lower id; -1 in rows as above
  double* top_logprobs;      // fp64 [n, num_top]
  LogitRows rows;            // without edits
  const int64_t* token_ids;  // int64 [n]
  int64_t num_top;           // 0 to kMaxTopTokens and vocab_size
  int64_t top_ids_stride_row;
  int64_t top_logprobs_stride_row;
};

}  // namespace pagedkv
