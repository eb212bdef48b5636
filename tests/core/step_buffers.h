// Caller-owned buffers for StepTables, poisoned: what a write leaves alone is seen.

#pragma once

#include <vector>

#include "pagedkv/core/step_tables.h"

namespace pagedkv::testing {

inline constexpr std::int32_t kPoison = -7777;

struct PoisonedBuffers {
  PoisonedBuffers(std::int64_t num_rows, std::int64_t max_num_blocks, std::size_t num_tokens,
                  std::size_t num_seqs)
      : max_num_blocks(max_num_blocks),
        block_tables(static_cast<std::size_t>(num_rows * max_num_blocks), kPoison),
        slot_mapping(num_tokens, kPoison),
        positions(num_tokens, kPoison),
        seq_lens(num_seqs, kPoison),
        query_start_loc(num_seqs + 1, kPoison) {}

  StepBuffers view() {
    return {.block_tables = block_tables.data(),
            .num_block_table_rows = static_cast<std::int64_t>(block_tables.size()) / max_num_blocks,
            .block_table_stride = max_num_blocks,
            .slot_mapping = slot_mapping,
            .positions = positions,
            .seq_lens = seq_lens,
            .query_start_loc = query_start_loc};
  }
  std::vector<BlockId> row(std::int64_t slot) const {
    const auto begin = block_tables.begin() + slot * max_num_blocks;
    return {begin, begin + max_num_blocks};
  }
  friend bool operator==(const PoisonedBuffers&, const PoisonedBuffers&) = default;

  std::int64_t max_num_blocks;
  std::vector<BlockId> block_tables;
  std::vector<std::int64_t> slot_mapping;
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> query_start_loc;
};

}  // namespace pagedkv::testing
