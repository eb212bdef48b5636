// Params of advance_step: from what a device keeps of the running sequences to the inputs of one
// step, counting the step's tokens. R rows, T tokens, S samples, N slots, M max_num_blocks.
#pragma once

#include <cstdint>

namespace pagedkv {

// Of a token id: the step before chooses it.
inline constexpr int32_t kPendingTokenId = -1;

// How the tokens of a slot are drawn, as the state has it; see SampleTokensParams.
struct DrawParams {
  float inverse_temperature;
  int32_t top_k;
  double top_p;
  double min_p;
  int64_t seed;
};
static_assert(sizeof(DrawParams) == 8 * sizeof(int32_t));

// Row r < counts[0] is the sequence at slots[r]; the rows behind are padding, whose tokens are 0 at
// position 0 in no slot, and whose samples are greedy and nobody's (slot N). Token t < counts[1],
// and one whose id is kPendingTokenId, is the latest of its slot; the others are token_ids[t -
// counts[1]]. Tokens and samples behind the last row's are not written.
struct AdvanceStepParams {
  int32_t* lens;                // int32 [N]: of each sequence, this step's tokens added
  int64_t* input_ids;           // int64 [T]
  int64_t* positions;           // int64 [T]
  int64_t* slot_mapping;        // int64 [T]
  int32_t* block_tables;        // int32 [R, M'], M' <= M: entries that a sequence has
  int32_t* seq_lens;            // int32 [R]
  int64_t* logit_rows;          // int64 [S]: the last token of the sample's row
  int64_t* sample_slots;        // int64 [S]
  int64_t* top_k;               // int64 [S]
  int64_t* seeds;               // int64 [S]
  int64_t* sample_positions;    // int64 [S]: where the sampled token will be
  int64_t* sample_draws;        // int64 [S]: the slot's draw, counted up within a row
  double* top_p;                // fp64 [S]
  double* min_p;                // fp64 [S]
  float* inverse_temperatures;  // fp32 [S]

  const int32_t* counts;            // int32 [2]: rows; leading tokens that the step before chooses
  const int32_t* slots;             // int32 [R]
  const int32_t* query_start_loc;   // int32 [R + 1]
  const int32_t* sample_start_loc;  // int32 [R + 1]
  const int32_t* tables;            // int32 [N, M], contiguous
  const int32_t* draws;             // int32 [N]
  const DrawParams* params;         // [N]
  const int64_t* latest;            // int64 [N + 1]
  const int32_t* token_ids;         // int32 [num_token_ids]

  int64_t num_rows;     // R
  int64_t num_tokens;   // T
  int64_t num_samples;  // S
  int64_t num_slots;    // N
  int64_t max_num_blocks;
  int64_t num_token_ids;
  int64_t block_size;
  int64_t block_tables_width;  // M'
  int64_t block_tables_stride;
};

}  // namespace pagedkv
