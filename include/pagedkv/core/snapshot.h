// Snapshot: an immutable copy of a manager's whole state, for readers on other threads.
// SnapshotCell: where the owner thread puts the newest snapshot and readers pick it up.
//
// The manager itself is never shared. Its owner calls snapshot() when it likes and stores the
// result; a reader keeps what it loaded for as long as it holds the pointer, whatever the owner
// does meanwhile.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pagedkv/core/types.h"

namespace pagedkv {

struct Snapshot {
  std::uint64_t version = 0;  // rises with every snapshot of one manager
  std::int32_t block_size = 0;
  Statistics statistics;
  std::vector<std::int32_t> ref_counts;      // [num_blocks]
  std::vector<BlockState> states;            // [num_blocks]
  std::vector<SeqId> seq_ids;                // [num_sequences]
  std::vector<std::int64_t> seq_num_tokens;  // [num_sequences]
  std::vector<std::int64_t> seq_start_loc;   // [num_sequences + 1], into block_ids
  std::vector<BlockId> block_ids;            // block tables one after another
};

// Thread safety: store() by one thread, load() by any number. Neither waits for the other beyond a
// few instructions.
class SnapshotCell {
 public:
  SnapshotCell() = default;
  SnapshotCell(const SnapshotCell&) = delete;
  SnapshotCell& operator=(const SnapshotCell&) = delete;

  void store(std::shared_ptr<const Snapshot> snapshot) {
    newest_.store(std::move(snapshot), std::memory_order_release);
  }
  // Null before the first store.
  std::shared_ptr<const Snapshot> load() const { return newest_.load(std::memory_order_acquire); }

 private:
  std::atomic<std::shared_ptr<const Snapshot>> newest_;
};

}  // namespace pagedkv
