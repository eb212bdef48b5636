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
  std::vector<BlockState> cpu_states;        // [num_cpu_blocks]
  std::vector<SeqId> seq_ids;                // [num_sequences]
  std::vector<std::int64_t> seq_num_tokens;  // [num_sequences]
  std::vector<std::int64_t> seq_start_loc;   // [num_sequences + 1], into block_ids
  std::vector<BlockId> block_ids;            // block tables one after another
};

// Thread safety: store() by one thread, load() by any number. A load never waits for a store. A
// store waits only while kNumSlots - 1 readers are all in the middle of a load, a few instructions
// each.
//
// (std::atomic<std::shared_ptr> would say the same in one line; libstdc++ 12 has a data race in
// it.)
class SnapshotCell {
 public:
  static constexpr int kNumSlots = 16;

  SnapshotCell() = default;
  SnapshotCell(const SnapshotCell&) = delete;
  SnapshotCell& operator=(const SnapshotCell&) = delete;

  void store(std::shared_ptr<const Snapshot> snapshot) {
    // A slot that is not the newest and has no reader: a reader that comes to it now sees that it
    // is not the newest and turns away without a look at the pointer.
    const int newest = newest_.load();
    for (int at = (newest + 1) % kNumSlots;; at = (at + 1) % kNumSlots) {
      if (at == newest || slots_[at].num_readers.load() != 0) continue;
      slots_[at].snapshot = std::move(snapshot);
      newest_.store(at);
      break;
    }
    for (int at = 0; at < kNumSlots; ++at) {  // let go of older ones
      if (at != newest_.load() && slots_[at].num_readers.load() == 0) slots_[at].snapshot.reset();
    }
  }
  // Null before the first store.
  std::shared_ptr<const Snapshot> load() const {
    for (;;) {
      const int at = newest_.load();
      slots_[at].num_readers.fetch_add(1);
      std::shared_ptr<const Snapshot> snapshot;
      const bool is_newest = newest_.load() == at;
      if (is_newest) snapshot = slots_[at].snapshot;
      slots_[at].num_readers.fetch_sub(1);
      if (is_newest) return snapshot;
    }
  }

 private:
  struct Slot {
    std::shared_ptr<const Snapshot>
        snapshot;  // written by the owner while num_readers is 0 and it is not the newest
    mutable std::atomic<int> num_readers = 0;
  };
  Slot slots_[kNumSlots];
  std::atomic<int> newest_ = 0;
};

}  // namespace pagedkv
