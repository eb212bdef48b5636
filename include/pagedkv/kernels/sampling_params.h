// Params of sample_tokens: one token of each row of logits, by argmax or by one uniform number and
// the inverse of the cumulative distribution that temperature, min_p, top_k and top_p leave.
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

struct SampleTokensParams {
  int64_t* token_ids;  // int64 [n], -1 where the row's largest logit is not finite, or one is NaN
  float* cuts;         // fp32 [n] or null: smallest logit that could be chosen; NaN beside a -1
  const void* logits;  // [n, vocab_size] type
  ElementType type;
  int64_t num_rows;    // n
  int64_t vocab_size;  // 1 to kMaxVocabSize
  int64_t num_chunks;  // of kChunkLogits, of a row
  int64_t logits_stride_row;
  const float* inverse_temperatures;  // fp32 [n], 0 takes the largest logit
  const int64_t* top_k;               // int64 [n], 0 keeps all
  const double* top_p;                // fp64 [n], 1 keeps all
  const double* min_p;                // fp64 [n], 0 keeps all
  const int64_t* seeds;               // int64 [n], the bits of an unsigned number
  const int64_t* positions;           // int64 [n]
  const int64_t* draws;               // int64 [n]
  LogitEdits edits;
  void* workspace;  // fp32 [n, num_chunks, 2]; CUDA only
};

// Of the workspace.
constexpr int64_t sample_tokens_workspace_bytes(const SampleTokensParams& params) {
  return params.num_rows * params.num_chunks * 2 * 4;
}

}  // namespace pagedkv
