// Snapshots: immutable, consistent, and read beside the owner thread (the thread-sanitizer build
// watches this one).

#include <atomic>
#include <thread>

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::tokens;

TEST(Snapshot, is_the_state_at_its_moment_whatever_comes_later) {
  BlockManager manager({.num_blocks = 8, .block_size = 4, .num_cpu_blocks = 4});
  testing::prefill(manager, 3, tokens(6));
  manager.fork(3, 4);
  const auto taken = manager.snapshot();
  manager.free_batch(std::vector<SeqId>{3, 4});
  const auto later = manager.snapshot();
  EXPECT_LT(taken->version, later->version);
  EXPECT_EQ(taken->block_size, 4);
  EXPECT_EQ(taken->seq_ids, (std::vector<SeqId>{3, 4}));
  EXPECT_EQ(taken->seq_num_tokens, (std::vector<std::int64_t>{6, 6}));
  EXPECT_EQ(taken->seq_start_loc, (std::vector<std::int64_t>{0, 2, 4}));
  EXPECT_EQ(taken->block_ids, (std::vector<BlockId>{0, 1, 0, 1}));
  EXPECT_EQ(taken->ref_counts[0], 2);
  EXPECT_EQ(taken->statistics.num_shared, 2);
  EXPECT_EQ(later->seq_ids.size(), 0);
  EXPECT_EQ(later->states[0], BlockState::kCachedIdle);
}

TEST(Snapshot, a_cell_keeps_only_the_newest_alive) {
  SnapshotCell cell;
  std::vector<std::weak_ptr<const Snapshot>> stored;
  for (int i = 0; i < 40; ++i) {
    auto snapshot = std::make_shared<const Snapshot>();
    stored.push_back(snapshot);
    cell.store(std::move(snapshot));
  }
  for (int i = 0; i < 39; ++i) EXPECT_TRUE(stored[i].expired());
  EXPECT_TRUE(cell.load() == stored[39].lock());
}

// True if the parts of one snapshot agree with each other.
bool is_consistent(const Snapshot& snapshot) {
  std::vector<std::int32_t> num_holders(snapshot.ref_counts.size());
  for (const BlockId block : snapshot.block_ids) {
    if (block >= 0) ++num_holders[static_cast<std::size_t>(block)];
  }
  std::int64_t num_free = 0;
  for (const BlockState state : snapshot.states) num_free += state == BlockState::kFree;
  return num_holders == snapshot.ref_counts && num_free == snapshot.statistics.num_free &&
         snapshot.seq_start_loc.back() == static_cast<std::int64_t>(snapshot.block_ids.size());
}

TEST(Snapshot, readers_on_other_threads_see_whole_states_while_the_owner_goes_on) {
  SnapshotCell cell;
  EXPECT_TRUE(cell.load() == nullptr);
  std::atomic<bool> is_done = false;
  std::atomic<int> num_read = 0;
  std::atomic<int> num_bad = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      std::uint64_t last = 0;
      while (!is_done) {
        const auto snapshot = cell.load();
        if (!snapshot) continue;
        num_bad += !is_consistent(*snapshot) || snapshot->version < last;
        last = snapshot->version;
        ++num_read;
      }
    });
  }
  BlockManager manager({.num_blocks = 64, .block_size = 2});
  for (SeqId id = 0; id < 600 || num_read < 100; ++id) {
    manager.allocate(id, tokens(5, static_cast<TokenId>(id % 7)));
    manager.fork(id, -1 - id);
    manager.append(id);
    manager.publish(id, tokens(1), 5);
    if (id >= 4) manager.free_batch(std::vector<SeqId>{id - 4, -1 - (id - 4)});
    cell.store(manager.snapshot());
  }
  is_done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(num_bad.load(), 0);
}

}  // namespace
}  // namespace pagedkv
