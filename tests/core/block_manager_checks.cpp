// BlockManager: sequences that grow, fork and end.

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::table;
using testing::tokens;

BlockManager make(std::int64_t num_blocks, std::int64_t block_size = 4) {
  return BlockManager({.num_blocks = num_blocks, .block_size = block_size, .watermark = 0.0});
}

TEST(BlockManager, a_sequence_takes_a_block_only_when_it_reaches_it) {
  BlockManager manager({.num_blocks = 4, .block_size = 4});
  manager.allocate(1, tokens(4));
  EXPECT_EQ(table(manager, 1).size(), 1);
  EXPECT_EQ(manager.append(1).size(), 0);
  EXPECT_EQ(table(manager, 1).size(), 2);
  for (int i = 0; i < 3; ++i) manager.append(1);
  EXPECT_EQ(table(manager, 1).size(), 2);
  manager.append(1, 8);
  EXPECT_EQ(table(manager, 1).size(), 4);
  EXPECT_EQ(manager.sequence(1).num_tokens, 16);
  EXPECT_EQ(manager.num_allocatable_blocks(), 0);
  manager.check_invariants();
}

TEST(BlockManager, any_block_size_works) {
  for (const std::int64_t block_size : {1, 2, 3, 16, 100}) {
    BlockManager manager({.num_blocks = 32, .block_size = block_size});
    manager.allocate(0, tokens(7));
    manager.append(0, 6);
    EXPECT_EQ(table(manager, 0).size(), (13 + block_size - 1) / block_size);
    manager.publish(0, tokens(6, 50), 13);
    manager.free(0);
    EXPECT_EQ(manager.match(tokens(7)), 6 / block_size * block_size);
    manager.check_invariants();
  }
}

TEST(BlockManager, a_batch_of_appends_is_the_appends_one_by_one) {
  BlockManager batch({.num_blocks = 32, .block_size = 4});
  BlockManager single({.num_blocks = 32, .block_size = 4});
  for (BlockManager* manager : {&batch, &single}) {
    for (SeqId id = 0; id < 3; ++id) manager->allocate(id, tokens(3 + id));
  }
  const std::vector<SeqId> ids = {2, 0, 1};
  const std::vector<std::int64_t> counts = {5, 1, 0};
  const std::int64_t num_needed = batch.num_blocks_needed(ids, counts);
  const std::int64_t num_before = batch.num_allocatable_blocks();
  EXPECT_EQ(batch.append_batch(ids, counts).size(), 0);
  EXPECT_EQ(num_before - batch.num_allocatable_blocks(), num_needed);
  for (std::size_t i = 0; i < ids.size(); ++i) single.append(ids[i], counts[i]);
  for (const SeqId id : ids) EXPECT_EQ(table(batch, id), table(single, id));
  batch.check_invariants();
}

TEST(BlockManager, a_fork_shares_every_block_and_takes_none) {
  BlockManager manager = make(8);
  manager.allocate(0, tokens(10));
  manager.fork(0, 1);
  EXPECT_EQ(table(manager, 1), table(manager, 0));
  EXPECT_EQ(manager.statistics().num_referenced, 3);
  EXPECT_EQ(manager.statistics().num_shared, 3);
  EXPECT_EQ(manager.statistics().num_tokens, 10);  // counted once
  manager.check_invariants();
}

TEST(BlockManager, the_first_write_to_a_shared_block_copies_that_block_alone) {
  BlockManager manager = make(8);
  manager.allocate(0, tokens(10));
  manager.fork(0, 1);
  const BlockId shared = table(manager, 0).back();
  const std::vector<BlockCopy> copies = manager.append(1);
  ASSERT_EQ(copies.size(), 1);
  EXPECT_EQ(copies[0].source, shared);
  EXPECT_EQ(copies[0].destination, table(manager, 1).back());
  EXPECT_EQ(table(manager, 0).back(), shared);
  EXPECT_EQ(manager.statistics().num_shared, 2);
  EXPECT_EQ(manager.statistics().num_tokens, 8 + 2 + 3);
  EXPECT_EQ(manager.append(0).size(), 0);  // the last holder writes in place
  manager.check_invariants();
}

TEST(BlockManager, a_fork_at_a_block_boundary_copies_nothing) {
  BlockManager manager = make(8);
  manager.allocate(0, tokens(8));
  manager.fork(0, 1);
  EXPECT_EQ(manager.append(1).size(), 0);
  EXPECT_EQ(manager.append(0).size(), 0);
  EXPECT_NE(table(manager, 0).back(), table(manager, 1).back());
  EXPECT_EQ(manager.statistics().num_copies, 0);
  manager.check_invariants();
}

TEST(BlockManager, in_a_batch_the_last_holder_left_writes_without_a_copy) {
  BlockManager manager = make(16);
  manager.allocate(0, tokens(6));
  manager.fork_batch(std::vector<SeqId>{0, 0, 0}, std::vector<SeqId>{1, 2, 3});
  const std::vector<SeqId> ids = {0, 1, 2, 3};
  const std::vector<std::int64_t> counts(4, 1);
  EXPECT_EQ(manager.num_blocks_needed(ids, counts), 3);
  EXPECT_EQ(manager.append_batch(ids, counts).size(), 3);
  EXPECT_EQ(manager.statistics().num_copies, 3);
  EXPECT_EQ(manager.statistics().num_shared, 1);
  manager.check_invariants();
}

TEST(BlockManager, a_fork_outlives_its_parent) {
  BlockManager manager = make(4);
  manager.allocate(0, tokens(6));
  manager.fork(0, 1);
  const std::vector<BlockId> blocks = table(manager, 0);
  manager.free(0);
  EXPECT_EQ(table(manager, 1), blocks);
  EXPECT_EQ(manager.append(1).size(), 0);  // nobody shares the last block any more
  EXPECT_EQ(manager.statistics().num_shared, 0);
  manager.free(1);
  EXPECT_EQ(manager.num_allocatable_blocks(), 4);
  manager.check_invariants();
}

TEST(BlockManager, freeing_all_leaves_no_reference) {
  BlockManager manager = make(16);
  for (SeqId id = 0; id < 3; ++id) testing::prefill(manager, id, tokens(9));
  manager.fork(1, 7);
  manager.free_batch(std::vector<SeqId>{2, 7, 0, 1});
  const Statistics s = manager.statistics();
  EXPECT_EQ(s.num_referenced, 0);
  EXPECT_EQ(s.num_tokens, 0);
  EXPECT_EQ(s.num_free + s.num_cached_idle, 16);
  manager.check_invariants();
}

TEST(BlockManager, a_freed_id_can_live_again) {
  BlockManager manager = make(4);
  manager.allocate(0, tokens(3));
  manager.free(0);
  manager.allocate(0, tokens(5));
  EXPECT_EQ(manager.sequence(0).num_tokens, 5);
  manager.fork(0, 1);
  manager.free(1);
  manager.fork(0, 1);
  manager.check_invariants();
}

TEST(BlockManager, refuses_bad_batches_and_changes_nothing) {
  BlockManager manager = make(6);
  manager.allocate(0, tokens(6));
  manager.allocate(1, tokens(6));
  manager.fork(0, 2);
  using Ids = std::vector<SeqId>;
  using Counts = std::vector<std::int64_t>;
  EXPECT_REFUSED(manager, manager.append_batch(Ids{0, 9}, Counts{1, 1}), UnknownSequence,
                 "seq_id 9 is not known");
  EXPECT_REFUSED(manager, manager.append_batch(Ids{0, 1, 0}, Counts{1, 1, 1}),
                 std::invalid_argument, "seq_id 0 stands twice in one batch");
  EXPECT_REFUSED(manager, manager.append_batch(Ids{0, 1}, Counts{1}), std::invalid_argument,
                 "counts has 1 entries for 2 sequences");
  EXPECT_REFUSED(manager, manager.append_batch(Ids{0, 1}, Counts{1, -1}), std::invalid_argument,
                 "seq_id 1 of 6 tokens cannot grow by -1; a count is between 0 and 2147483641");
  EXPECT_REFUSED(manager, manager.append(0, INT64_MAX), std::invalid_argument,
                 "cannot grow by 9223372036854775807");
  EXPECT_REFUSED(manager, manager.append_batch(Ids{0, 1}, Counts{1, 8}), OutOfBlocks,
                 "append needs 3 blocks, 2 of 6 can be taken");
  EXPECT_REFUSED(manager, manager.fork_batch(Ids{0, 0}, Ids{5, 1}), std::invalid_argument,
                 "seq_id 1 exists already");
  EXPECT_REFUSED(manager, manager.fork_batch(Ids{0, 0}, Ids{5, 5}), std::invalid_argument,
                 "seq_id 5 stands twice in one batch");
  EXPECT_REFUSED(manager, manager.fork_batch(Ids{0, 8}, Ids{5, 6}), UnknownSequence,
                 "seq_id 8 is not known");
  EXPECT_REFUSED(manager, manager.fork_batch(Ids{0}, Ids{5, 6}), std::invalid_argument,
                 "child_ids has 2 entries");
  EXPECT_REFUSED(manager, manager.free_batch(Ids{1, 9}), UnknownSequence, "seq_id 9 is not known");
  EXPECT_REFUSED(manager, manager.free_batch(Ids{1, 0, 1}), DoubleFree, "seq_id 1 stands twice");
  manager.free(2);
  EXPECT_REFUSED(manager, manager.free_batch(Ids{0, 2}), DoubleFree, "seq_id 2 was freed before");
  EXPECT_REFUSED(manager, manager.sequence(2), UnknownSequence, "seq_id 2 was freed");
}

TEST(BlockManager, an_empty_batch_is_no_work) {
  BlockManager manager = make(2);
  EXPECT_EQ(manager.append_batch({}, {}).size(), 0);
  manager.fork_batch({}, {});
  manager.free_batch({});
  manager.publish_batch({}, {}, {}, {});
  EXPECT_EQ(manager.swap_out({}).size(), 0);
  EXPECT_EQ(manager.swap_in({}).size(), 0);
  manager.check_invariants();
}

TEST(BlockManager, refuses_an_impossible_configuration) {
  const auto refused = [](BlockManagerConfig config, const char* part) {
    EXPECT_THROW(BlockManager{config}, std::invalid_argument, part);
  };
  refused({.num_blocks = 0}, "num_blocks must be between 1 and 67108864, got 0");
  refused({.num_blocks = -1}, "got -1");
  refused({.num_blocks = INT64_MAX}, "got 9223372036854775807");
  refused({.num_blocks = 4, .block_size = 0}, "block_size must be between 1 and 65536, got 0");
  refused({.num_blocks = 4, .block_size = -16}, "got -16");
  refused({.num_blocks = 4, .num_cpu_blocks = -1}, "num_cpu_blocks must be between 0 and");
  refused({.num_blocks = 4, .watermark = 1.0}, "watermark must be at least 0 and below 1, got 1");
  refused({.num_blocks = 4, .watermark = std::numeric_limits<double>::quiet_NaN()},
          "watermark must be");
  refused({.num_blocks = 4, .hash_secret = ""}, "hash_secret must have at least 16 bytes, got 0");
  refused({.num_blocks = 4, .hash_secret = "fifteen bytes.."}, "at least 16 bytes, got 15");
  refused({.num_blocks = 4, .hash_bits = 0}, "hash_bits must be between 1 and 128, got 0");
}

TEST(BlockManager, blocks_freed_beside_a_step_return_when_it_ends) {
  BlockManager manager = make(4);
  testing::prefill(manager, 0, tokens(6));
  const StepId step = manager.begin_step();
  manager.free(0);
  EXPECT_EQ(manager.statistics().num_draining, 2);
  EXPECT_EQ(manager.num_allocatable_blocks(), 2);
  EXPECT_REFUSED(manager, manager.allocate(1, tokens(12, 50)), OutOfBlocks,
                 "needs 3 blocks, 2 of 4 can be taken");
  manager.end_step(step);
  EXPECT_EQ(manager.statistics().num_cached_idle, 1);  // the full block
  EXPECT_EQ(manager.num_allocatable_blocks(), 4);
  manager.check_invariants();
}

TEST(BlockManager, a_published_block_that_drains_can_be_hit) {
  BlockManager manager = make(4);
  testing::prefill(manager, 0, tokens(6));
  const BlockId block = table(manager, 0)[0];
  const StepId step = manager.begin_step();
  manager.free(0);
  EXPECT_EQ(manager.allocate(1, tokens(5)), 4);
  EXPECT_EQ(table(manager, 1)[0], block);
  manager.check_invariants();
  manager.end_step(step);
  EXPECT_EQ(manager.state(block), BlockState::kReferenced);
  manager.check_invariants();
}

}  // namespace
}  // namespace pagedkv
