// StepTables: a batch's tables, written into the caller's buffers in one call.
//
// Row i of a batch is sequence ids[i], which has query_lens[i] tokens in this step, its last ones
// (append comes first). With n = num_tokens of the sequence and q = its query_len, its tokens have
// positions n - q .. n - 1, and
//
//   slot_mapping = block_table[position / block_size] * block_size + position % block_size
//   seq_lens[i] = n,  query_start_loc[i + 1] = query_start_loc[i] + q
//
// block_tables has a row per *slot*, the caller's stable place for a sequence in the device's
// state, not per row of the batch. Entries past the end of a sequence's table, and those of blocks
// given back behind its window, are not touched, and hold anything; no kernel may read them.
//
// Owns: the memory of what it last wrote into each slot of each block-table buffer, up to
// kMaxBuffers buffers (a pinned pair used alternately needs two). The buffers are the caller's. A
// buffer is known by its address: whoever gives its memory back, or writes into it himself, must
// call forget().
//
// A write happens whole or throws and changes nothing. Errors: std::invalid_argument,
// UnknownSequence, and InvariantViolation for I5, nothing writes a block that is shared, published
// or given back. Thread safety: none; the manager's owner thread uses it.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {

// Caller-owned memory, uninitialised or not.
struct StepBuffers {
  BlockId* block_tables =
      nullptr;  // [num_block_table_rows, max_num_blocks], rows block_table_stride apart
  std::int64_t num_block_table_rows = 0;
  std::int64_t block_table_stride = 0;      // elements, >= max_num_blocks
  std::span<std::int64_t> slot_mapping;     // [>= num_tokens]
  std::span<std::int64_t> positions;        // [>= num_tokens]
  std::span<std::int32_t> seq_lens;         // [>= num_seqs]
  std::span<std::int32_t> query_start_loc;  // [>= num_seqs + 1]
  // [>= num_seqs] or empty: the entry of each sequence's table from which on it was written now; up
  // to its end, or its number of blocks where nothing was.
  std::span<std::int32_t> first_written = {};
};

class StepTables {
 public:
  static constexpr std::size_t kMaxBuffers = 4;

  // REQUIRES: manager outlives this.
  StepTables(const BlockManager& manager, std::int64_t max_num_slots, std::int64_t max_num_blocks);
  StepTables(const StepTables&) = delete;
  StepTables& operator=(const StepTables&) = delete;

  std::int64_t max_num_slots() const { return max_num_slots_; }
  std::int64_t max_num_blocks() const { return max_num_blocks_; }

  // Returns the number of tokens. only_changed: entries that this block_tables buffer holds already
  // are not written.
  std::int64_t write(std::span<const SeqId> ids, std::span<const std::int64_t> query_lens,
                     std::span<const std::int64_t> slots, const StepBuffers& buffers,
                     bool only_changed);
  // What block_tables holds is not known any more.
  void forget(const BlockId* block_tables);
  // Block-table entries written so far: what only_changed saves can be counted.
  std::int64_t num_entries_written() const { return num_entries_written_; }

 private:
  // What a slot of a buffer holds: the first num_entries entries of the table with this stamp
  // (Sequence::table_stamp).
  struct Written {
    std::uint64_t table_stamp = 0;
    std::size_t num_entries = 0;
  };
  struct Buffer {
    const BlockId* address = nullptr;
    std::int64_t stride = 0;
    std::uint64_t last_use = 0;
    std::vector<Written> slots;  // [max_num_slots]
  };
  // A planned row.
  struct Row {
    const Sequence* sequence;
    std::int64_t query_len;
  };

  std::int64_t plan(std::span<const SeqId> ids, std::span<const std::int64_t> query_lens,
                    std::span<const std::int64_t> slots, const StepBuffers& buffers);
  void find_row(std::size_t i, SeqId id, std::int64_t slot, std::int64_t num_rows);
  void check_row(std::size_t i) const;
  void check_writable(const Sequence& sequence, std::int64_t first_position) const;
  Buffer& buffer_at(const BlockId* address, std::int64_t stride);

  const BlockManager& manager_;
  std::int64_t max_num_slots_;
  std::int64_t max_num_blocks_;
  std::vector<Buffer> buffers_;
  std::vector<std::uint64_t> slot_marks_;  // [max_num_slots]: the last write that named the slot
  std::vector<std::uint64_t>
      sequence_marks_;  // by the manager's slot: the last write that named the sequence
  std::uint64_t last_mark_ = 0;
  std::vector<Row> rows_;  // scratch
  std::int64_t num_entries_written_ = 0;
};

}  // namespace pagedkv
