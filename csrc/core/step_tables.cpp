// StepTables: check every row first, then write without a way to fail.

#include "pagedkv/core/step_tables.h"

#include <algorithm>
#include <string>

namespace pagedkv {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_capacity(const char* name, std::size_t has, std::int64_t needs) {
  if (static_cast<std::int64_t>(has) < needs) {
    refuse(std::string(name) + " has " + std::to_string(has) + " entries, the step needs " +
           std::to_string(needs));
  }
}

void check_bound(const char* name, std::int64_t value, std::int64_t high) {
  if (value < 1 || value > high) {
    refuse(std::string(name) + " must be between 1 and " + std::to_string(high) + ", got " +
           std::to_string(value));
  }
}

}  // namespace

StepTables::StepTables(const BlockManager& manager, std::int64_t max_num_slots,
                       std::int64_t max_num_blocks)
    : manager_(manager), max_num_slots_(max_num_slots), max_num_blocks_(max_num_blocks) {
  check_bound("max_num_slots", max_num_slots, std::int64_t{1} << 24);
  check_bound("max_num_blocks", max_num_blocks, kMaxSeqLen);
  slot_marks_.resize(static_cast<std::size_t>(max_num_slots));
}

void StepTables::check_writable(const Sequence& sequence, std::int64_t first_position) const {
  const std::int64_t block_size = manager_.block_size();
  if (first_position < sequence.num_published * block_size) {
    throw InvariantViolation(
        "I5: seq_id " + std::to_string(sequence.id) + " would write position " +
        std::to_string(first_position) + ", but its first " +
        std::to_string(sequence.num_published * block_size) + " positions are published");
  }
  if (first_position < sequence.num_freed * block_size) {
    throw InvariantViolation("I5: seq_id " + std::to_string(sequence.id) +
                             " would write position " + std::to_string(first_position) +
                             ", but its first " + std::to_string(sequence.num_freed * block_size) +
                             " positions lie behind the window and were given back");
  }
  // From the back, where nearly always the only block to write is the last one.
  std::int64_t block_start = sequence.num_tokens + sequence.num_unused;
  for (std::size_t i = sequence.table.size(); block_start > first_position; --i) {
    block_start -= block_size;
    const BlockId block = sequence.table[i - 1];
    if (manager_.ref_count(block) > 1) {
      throw InvariantViolation("I5: seq_id " + std::to_string(sequence.id) + " would write block " +
                               std::to_string(block) + ", which has ref count " +
                               std::to_string(manager_.ref_count(block)) +
                               "; append makes it a copy");
    }
  }
}

// Finds the sequence of row i and refuses a slot or a sequence that stands twice.
void StepTables::find_row(std::size_t i, SeqId id, std::int64_t slot, std::int64_t num_slots) {
  if (slot < 0 || slot >= num_slots) {
    refuse("slots[" + std::to_string(i) + "] must be between 0 and " +
           std::to_string(num_slots - 1) + ", got " + std::to_string(slot));
  }
  const std::int32_t sequence_slot = manager_.sequences().slot(id);
  const Sequence& sequence = manager_.sequences().at(sequence_slot);
  __builtin_prefetch(&sequence);
  std::uint64_t& slot_mark = slot_marks_[static_cast<std::size_t>(slot)];
  std::uint64_t& sequence_mark = sequence_marks_[static_cast<std::size_t>(sequence_slot)];
  if (slot_mark == last_mark_) refuse("slot " + std::to_string(slot) + " stands twice in one step");
  if (sequence_mark == last_mark_) {
    refuse("seq_id " + std::to_string(id) + " stands twice in one step");
  }
  slot_mark = sequence_mark = last_mark_;
  rows_[i].sequence = &sequence;
}

void StepTables::check_row(std::size_t i) const {
  const Sequence& sequence = *rows_[i].sequence;
  const std::int64_t query_len = rows_[i].query_len;
  const auto name = [&] { return "seq_id " + std::to_string(sequence.id); };
  if (query_len < 0 || query_len > sequence.num_tokens) {
    refuse("query_lens[" + std::to_string(i) + "] must be between 0 and the " +
           std::to_string(sequence.num_tokens) + " tokens of " + name() + ", got " +
           std::to_string(query_len));
  }
  if (sequence.is_swapped) refuse(name() + " is swapped out; it cannot be in a step");
  if (static_cast<std::int64_t>(sequence.table.size()) > max_num_blocks_) {
    refuse(name() + " has " + std::to_string(sequence.table.size()) +
           " blocks, the tables hold max_num_blocks = " + std::to_string(max_num_blocks_));
  }
  if (query_len > 0) check_writable(sequence, sequence.num_tokens - query_len);
}

std::int64_t StepTables::plan(std::span<const SeqId> ids, std::span<const std::int64_t> query_lens,
                              std::span<const std::int64_t> slots, const StepBuffers& buffers) {
  if (query_lens.size() != ids.size() || slots.size() != ids.size()) {
    refuse("query_lens has " + std::to_string(query_lens.size()) + " and slots " +
           std::to_string(slots.size()) + " entries for " + std::to_string(ids.size()) +
           " sequences");
  }
  if (buffers.block_table_stride < max_num_blocks_) {
    refuse("block_tables has rows of " + std::to_string(buffers.block_table_stride) +
           " entries, max_num_blocks is " + std::to_string(max_num_blocks_));
  }
  ++last_mark_;
  if (sequence_marks_.size() < manager_.sequences().num_slots()) {
    sequence_marks_.resize(manager_.sequences().num_slots());
  }
  const std::int64_t num_slots = std::min(max_num_slots_, buffers.num_block_table_rows);
  rows_.resize(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    find_row(i, ids[i], slots[i], num_slots);
    rows_[i].query_len = query_lens[i];
  }
  // Each check follows sequence -> end of its table -> that block's record; two walkers ahead of it
  // fetch them, so that the misses of different rows overlap.
  constexpr std::size_t kFar = 16;
  constexpr std::size_t kNear = 8;
  std::int64_t num_tokens = 0;
  for (std::size_t i = 0; i < ids.size() + kFar; ++i) {
    if (i < ids.size()) {
      const std::vector<BlockId>& table = rows_[i].sequence->table;
      if (!table.empty()) __builtin_prefetch(&table.back());
    }
    if (i >= kFar - kNear && i - (kFar - kNear) < ids.size()) {
      const std::vector<BlockId>& table = rows_[i - (kFar - kNear)].sequence->table;
      if (!table.empty() && table.back() >= 0) manager_.prefetch(table.back());
    }
    if (i >= kFar) {
      check_row(i - kFar);
      num_tokens += query_lens[i - kFar];
    }
  }
  if (num_tokens > kMaxSeqLen) {
    refuse("the step has " + std::to_string(num_tokens) + " tokens, at most " +
           std::to_string(kMaxSeqLen) + " are allowed");
  }
  check_capacity("slot_mapping", buffers.slot_mapping.size(), num_tokens);
  check_capacity("positions", buffers.positions.size(), num_tokens);
  check_capacity("seq_lens", buffers.seq_lens.size(), static_cast<std::int64_t>(ids.size()));
  check_capacity("query_start_loc", buffers.query_start_loc.size(),
                 static_cast<std::int64_t>(ids.size()) + 1);
  if (!buffers.first_written.empty()) {
    check_capacity("first_written", buffers.first_written.size(),
                   static_cast<std::int64_t>(ids.size()));
  }
  return num_tokens;
}

std::int64_t StepTables::write(std::span<const SeqId> ids, std::span<const std::int64_t> query_lens,
                               std::span<const std::int64_t> slots, const StepBuffers& buffers,
                               bool only_changed) {
  const std::int64_t num_tokens = plan(ids, query_lens, slots, buffers);
  Buffer& buffer = buffer_at(buffers.block_tables, buffers.block_table_stride);
  const std::int64_t block_size = manager_.block_size();
  std::int64_t* slot_mapping = buffers.slot_mapping.data();
  std::int64_t* positions = buffers.positions.data();
  std::int64_t next_start = 0;
  buffers.query_start_loc[0] = 0;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Sequence& sequence = *rows_[i].sequence;
    const BlockId* table = sequence.table.data();
    const std::size_t num_blocks = sequence.table.size();

    Written& written = buffer.slots[static_cast<std::size_t>(slots[i])];
    const bool is_known = only_changed && written.table_stamp == sequence.table_stamp;
    const std::size_t first =
        std::max(is_known ? written.num_entries : 0, static_cast<std::size_t>(sequence.num_freed));
    if (first < num_blocks) {
      std::copy(table + first, table + num_blocks,
                buffers.block_tables + slots[i] * buffers.block_table_stride + first);
      num_entries_written_ += static_cast<std::int64_t>(num_blocks - first);
    }
    written = {.table_stamp = sequence.table_stamp, .num_entries = num_blocks};
    if (!buffers.first_written.empty()) {
      buffers.first_written[i] = static_cast<std::int32_t>(std::min(first, num_blocks));
    }

    buffers.seq_lens[i] = static_cast<std::int32_t>(sequence.num_tokens);
    next_start += rows_[i].query_len;
    buffers.query_start_loc[i + 1] = static_cast<std::int32_t>(next_start);

    if (rows_[i].query_len == 1) {  // a decode: the last position, found without a division
      *positions++ = sequence.num_tokens - 1;
      *slot_mapping++ =
          (table[num_blocks - 1] + std::int64_t{1}) * block_size - sequence.num_unused - 1;
      continue;
    }
    std::int64_t position = sequence.num_tokens - rows_[i].query_len;
    std::size_t block = static_cast<std::size_t>(position / block_size);
    std::int64_t offset = position % block_size;
    while (position < sequence.num_tokens) {
      const std::int64_t end = std::min(sequence.num_tokens, position + block_size - offset);
      for (std::int64_t slot = table[block++] * block_size + offset; position < end; ++position) {
        *positions++ = position;
        *slot_mapping++ = slot++;
      }
      offset = 0;
    }
  }
  return num_tokens;
}

StepTables::Buffer& StepTables::buffer_at(const BlockId* address, std::int64_t stride) {
  auto found = std::find_if(buffers_.begin(), buffers_.end(),
                            [&](const Buffer& buffer) { return buffer.address == address; });
  if (found == buffers_.end() || found->stride != stride) {
    std::vector<Written> slots(static_cast<std::size_t>(max_num_slots_));  // knows nothing yet
    if (found == buffers_.end() && buffers_.size() < kMaxBuffers) {
      buffers_.emplace_back();
      found = buffers_.end() - 1;
    } else if (found == buffers_.end()) {
      found = std::min_element(
          buffers_.begin(), buffers_.end(),
          [](const Buffer& a, const Buffer& b) { return a.last_use < b.last_use; });
    }
    *found = {.address = address, .stride = stride, .slots = std::move(slots)};
  }
  found->last_use = last_mark_;
  return *found;
}

void StepTables::forget(const BlockId* block_tables) {
  std::erase_if(buffers_, [&](const Buffer& buffer) { return buffer.address == block_tables; });
}

}  // namespace pagedkv
