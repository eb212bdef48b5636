// BlockManager: swapping out and in.

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::prefill;
using testing::table;
using testing::tokens;
using Ids = std::vector<SeqId>;

BlockManager make(std::int64_t num_blocks, std::int64_t num_cpu_blocks, bool is_cached = true) {
  return BlockManager({.num_blocks = num_blocks,
                       .block_size = 4,
                       .num_cpu_blocks = num_cpu_blocks,
                       .watermark = 0.0,
                       .enable_prefix_caching = is_cached});
}

TEST(Swap, moves_a_sequence_out_and_back_in_logical_order) {
  BlockManager manager = make(8, 4, false);
  manager.allocate(0, tokens(10));
  const std::vector<BlockId> before = table(manager, 0);
  EXPECT_EQ(manager.num_swap_out_blocks(Ids{0}), 3);
  const std::vector<BlockCopy> out = manager.swap_out(Ids{0});
  ASSERT_EQ(out.size(), 3);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(out[i].source, before[i]);
    EXPECT_EQ(table(manager, 0)[i], -1 - out[i].destination);
  }
  EXPECT_TRUE(manager.sequence(0).is_swapped);
  EXPECT_EQ(manager.num_allocatable_blocks(), 8);
  EXPECT_EQ(manager.statistics().num_cpu_free, 1);
  EXPECT_EQ(manager.statistics().num_tokens, 0);
  manager.check_invariants();

  EXPECT_EQ(manager.num_swap_in_blocks(Ids{0}), 3);
  const std::vector<BlockCopy> in = manager.swap_in(Ids{0});
  ASSERT_EQ(in.size(), 3);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(in[i].source, out[i].destination);
    EXPECT_EQ(table(manager, 0)[i], in[i].destination);
  }
  EXPECT_EQ(manager.statistics().num_cpu_free, 4);
  EXPECT_EQ(manager.statistics().num_tokens, 10);
  EXPECT_EQ(manager.statistics().num_swapped_out, 3);
  EXPECT_EQ(manager.statistics().num_swapped_in, 3);
  manager.append(0, 3);
  manager.check_invariants();
}

TEST(Swap, shared_blocks_stay_with_their_references) {
  BlockManager manager = make(8, 8);
  manager.allocate(0, tokens(10));
  manager.fork(0, 1);
  manager.append(1);  // its last block is its own now
  const std::vector<BlockId> parent = table(manager, 0);
  const std::vector<BlockCopy> out = manager.swap_out(Ids{1});
  EXPECT_EQ(out.size(), 1);
  EXPECT_EQ(table(manager, 1)[0], parent[0]);
  EXPECT_EQ(table(manager, 1)[1], parent[1]);
  EXPECT_LT(table(manager, 1)[2], 0);
  EXPECT_EQ(manager.ref_count(parent[0]), 2);
  manager.check_invariants();
  manager.free(0);
  EXPECT_EQ(manager.ref_count(parent[0]), 1);
  EXPECT_EQ(manager.swap_in(Ids{1}).size(), 1);
  manager.check_invariants();
}

TEST(Swap, a_group_moves_its_common_blocks_once) {
  BlockManager manager = make(8, 8);
  manager.allocate(0, tokens(10));
  manager.fork_batch(Ids{0, 0}, Ids{1, 2});
  EXPECT_EQ(manager.num_swap_out_blocks(Ids{0, 1}), 0);  // sequence 2 holds them too
  EXPECT_EQ(manager.swap_out(Ids{0, 1, 2}).size(), 3);
  EXPECT_EQ(manager.statistics().num_cpu_free, 5);
  EXPECT_EQ(table(manager, 0), table(manager, 2));
  manager.check_invariants();
  EXPECT_EQ(manager.swap_in(Ids{0, 1, 2}).size(), 3);
  EXPECT_EQ(table(manager, 0), table(manager, 2));
  EXPECT_EQ(manager.ref_count(table(manager, 0)[0]), 3);
  EXPECT_EQ(manager.append(1).size(), 1);  // still copy-on-write
  manager.check_invariants();
}

TEST(Swap, a_part_of_a_group_can_come_back_alone) {
  BlockManager manager = make(8, 8);
  manager.allocate(0, tokens(6));
  manager.fork(0, 1);
  manager.swap_out(Ids{0, 1});
  EXPECT_EQ(manager.swap_in(Ids{1}).size(), 2);
  EXPECT_TRUE(manager.sequence(0).is_swapped);
  EXPECT_EQ(manager.statistics().num_cpu_free, 6);  // sequence 0 still holds them
  manager.check_invariants();
  EXPECT_EQ(manager.swap_in(Ids{0}).size(), 2);
  EXPECT_EQ(manager.statistics().num_cpu_free, 8);
  manager.check_invariants();
}

TEST(Swap, a_swapped_sequence_can_fork_and_end) {
  BlockManager manager = make(8, 8);
  manager.allocate(0, tokens(6));
  manager.swap_out(Ids{0});
  manager.fork(0, 1);
  EXPECT_TRUE(manager.sequence(1).is_swapped);
  manager.check_invariants();
  manager.free(0);
  EXPECT_EQ(manager.statistics().num_cpu_free, 6);
  manager.free(1);
  EXPECT_EQ(manager.statistics().num_cpu_free, 8);
  manager.check_invariants();
}

TEST(Swap, refuses_what_it_cannot_do_and_changes_nothing) {
  BlockManager manager = make(6, 2);
  manager.allocate(0, tokens(12));
  manager.allocate(1, tokens(8, 50));
  EXPECT_REFUSED(manager, manager.swap_out(Ids{0}), OutOfBlocks,
                 "swap_out needs 3 CPU blocks, 2 of 2 can be taken");
  EXPECT_REFUSED(manager, manager.swap_out(Ids{1, 1}), std::invalid_argument,
                 "seq_id 1 stands twice");
  EXPECT_REFUSED(manager, manager.swap_out(Ids{1, 5}), UnknownSequence, "seq_id 5 is not known");
  EXPECT_REFUSED(manager, manager.swap_in(Ids{1}), std::invalid_argument,
                 "seq_id 1 is not swapped out");
  manager.swap_out(Ids{1});
  EXPECT_REFUSED(manager, manager.swap_out(Ids{1}), std::invalid_argument,
                 "seq_id 1 is swapped out already");
  EXPECT_REFUSED(manager, manager.append(1), std::invalid_argument,
                 "seq_id 1 is swapped out; swap it in");
  EXPECT_REFUSED(manager, manager.num_blocks_needed(Ids{1}, std::vector<std::int64_t>{1}),
                 std::invalid_argument, "seq_id 1 is swapped out");
  manager.append(0, 8);
  EXPECT_REFUSED(manager, manager.swap_in(Ids{1}), OutOfBlocks,
                 "swap_in needs 2 blocks, 1 of 6 can be taken");
}

TEST(Swap, without_a_cpu_pool_every_swap_is_refused) {
  BlockManager manager = make(4, 0);
  manager.allocate(0, tokens(3));
  EXPECT_REFUSED(manager, manager.swap_out(Ids{0}), OutOfBlocks,
                 "swap_out needs 1 CPU blocks, 0 of 0 can be taken");
}

TEST(Swap, a_published_chain_stays_findable_and_is_published_again_afterwards) {
  BlockManager manager = make(8, 8);
  prefill(manager, 0, tokens(10));
  manager.swap_out(Ids{0});
  EXPECT_EQ(manager.match(tokens(10)), 8);  // the pool's copies are idle now
  EXPECT_EQ(manager.statistics().num_cached_idle, 2);
  manager.allocate(1, tokens(32, 100));  // evicts them
  EXPECT_EQ(manager.match(tokens(10)), 0);
  manager.free(1);
  manager.swap_in(Ids{0});
  manager.check_invariants();
  EXPECT_EQ(manager.match(tokens(10)), 0);  // not before a step has succeeded
  manager.publish(0, {}, 10);
  EXPECT_EQ(manager.match(tokens(10)), 8);
  manager.check_invariants();
}

TEST(Swap, a_sequence_that_comes_back_beside_its_cached_blocks_shares_them_again) {
  BlockManager manager = make(8, 8);
  prefill(manager, 0, tokens(10));
  const std::vector<BlockId> before = table(manager, 0);
  manager.swap_out(Ids{0});
  manager.swap_in(Ids{0});
  manager.publish(0, {}, 10);
  EXPECT_EQ(table(manager, 0)[0], before[0]);
  EXPECT_EQ(table(manager, 0)[1], before[1]);
  EXPECT_EQ(manager.statistics().num_referenced, 3);
  EXPECT_EQ(manager.statistics().num_cached_idle, 0);
  manager.check_invariants();
}

TEST(Swap, publishing_while_swapped_out_waits_for_the_return) {
  BlockManager manager = make(8, 8);
  manager.allocate(0, tokens(8));
  manager.swap_out(Ids{0});  // scheduled while its step ran; the step's update comes now
  manager.publish(0, tokens(1, 90), 8);
  EXPECT_EQ(manager.match(tokens(9)), 0);
  manager.swap_in(Ids{0});
  manager.publish(0, {}, 8);
  EXPECT_EQ(manager.match(tokens(9)), 8);
  manager.check_invariants();
}

TEST(Swap, beside_a_step_both_sides_stay_in_transit_until_it_ends) {
  BlockManager manager = make(8, 2, false);
  manager.allocate(0, tokens(8));
  const StepId first = manager.begin_step();
  manager.swap_out(Ids{0});
  EXPECT_EQ(manager.statistics().num_in_transit, 2);
  EXPECT_EQ(manager.num_allocatable_blocks(), 6);
  manager.check_invariants();
  manager.end_step(first);
  EXPECT_EQ(manager.num_allocatable_blocks(), 8);

  const StepId second = manager.begin_step();
  manager.swap_in(Ids{0});
  EXPECT_EQ(manager.statistics().num_in_transit, 2);
  EXPECT_EQ(manager.statistics().num_cpu_free, 0);  // being read
  EXPECT_REFUSED(manager, manager.swap_out(Ids{0}), OutOfBlocks,
                 "swap_out needs 2 CPU blocks, 0 of 2 can be taken");
  manager.free(0);
  EXPECT_EQ(manager.statistics().num_draining, 2);
  manager.end_step(second);
  EXPECT_EQ(manager.num_allocatable_blocks(), 8);
  EXPECT_EQ(manager.statistics().num_cpu_free, 2);
  manager.check_invariants();
}

}  // namespace
}  // namespace pagedkv
