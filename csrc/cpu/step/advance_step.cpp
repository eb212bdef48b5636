// advance_step on the CPU, row by row; the inputs of a step are a few numbers a row.
#include <algorithm>

#include "pagedkv/kernels/step_launchers.h"

namespace pagedkv::cpu {
namespace {

void write_padding(const AdvanceStepParams& p, int64_t row) {
  p.seq_lens[row] = 0;
  for (int64_t t = p.query_start_loc[row]; t < p.query_start_loc[row + 1]; ++t) {
    p.input_ids[t] = p.positions[t] = 0;
    p.slot_mapping[t] = -1;
  }
  for (int64_t s = p.sample_start_loc[row]; s < p.sample_start_loc[row + 1]; ++s) {
    p.logit_rows[s] = p.top_k[s] = p.seeds[s] = p.sample_positions[s] = p.sample_draws[s] = 0;
    p.sample_slots[s] = p.num_slots;
    p.top_p[s] = 1.0;
    p.min_p[s] = 0.0;
    p.inverse_temperatures[s] = 0.0f;
  }
}

void write_tokens(const AdvanceStepParams& p, int64_t row, int64_t slot, int64_t first) {
  const int32_t* table = p.tables + slot * p.max_num_blocks;
  const int64_t begin = p.query_start_loc[row];
  for (int64_t t = begin; t < p.query_start_loc[row + 1]; ++t) {
    const int64_t known = t - p.counts[1];
    const int32_t id = known < 0 ? kPendingTokenId : p.token_ids[known];
    const int64_t position = first + t - begin;
    p.input_ids[t] = id == kPendingTokenId ? p.latest[slot] : id;
    p.positions[t] = position;
    p.slot_mapping[t] = table[position / p.block_size] * p.block_size + position % p.block_size;
  }
}

void write_samples(const AdvanceStepParams& p, int64_t row, int64_t slot, int64_t len) {
  const int64_t begin = p.sample_start_loc[row];
  const DrawParams& drawn = p.params[slot];
  for (int64_t s = begin; s < p.sample_start_loc[row + 1]; ++s) {
    p.logit_rows[s] = p.query_start_loc[row + 1] - 1;
    p.sample_slots[s] = slot;
    p.top_k[s] = drawn.top_k;
    p.seeds[s] = drawn.seed;
    p.sample_positions[s] = len;
    p.sample_draws[s] = p.draws[slot] + s - begin;
    p.top_p[s] = drawn.top_p;
    p.min_p[s] = drawn.min_p;
    p.inverse_temperatures[s] = drawn.inverse_temperature;
  }
}

}  // namespace

void launch_advance_step(const AdvanceStepParams& p) {
  for (int64_t row = 0; row < p.num_rows; ++row) {
    if (row >= p.counts[0]) {
      write_padding(p, row);
      continue;
    }
    const int64_t slot = p.slots[row];
    const int64_t first = p.lens[slot];
    const int64_t len = first + p.query_start_loc[row + 1] - p.query_start_loc[row];
    p.lens[slot] = p.seq_lens[row] = static_cast<int32_t>(len);
    const int32_t* table = p.tables + slot * p.max_num_blocks;
    std::copy(table, table + (len + p.block_size - 1) / p.block_size,
              p.block_tables + row * p.block_tables_stride);
    write_tokens(p, row, slot, first);
    write_samples(p, row, slot, len);
  }
}

}  // namespace pagedkv::cpu
