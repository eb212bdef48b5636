// BlockAllocator: the pool by itself.

#include <set>

#include "manager_state.h"

namespace pagedkv {
namespace {

TEST(BlockAllocator, hands_out_each_block_once_until_it_is_empty) {
  BlockAllocator pool(5, 7);
  std::set<BlockId> seen;
  for (int i = 0; i < 5; ++i) seen.insert(pool.allocate());
  EXPECT_EQ(seen.size(), 5);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 4);
  EXPECT_THROW(pool.allocate(), OutOfBlocks, "no free block in a pool of 5");
  pool.check();
}

TEST(BlockAllocator, a_seed_fixes_the_order_of_the_free_list) {
  const auto order = [](std::optional<std::uint64_t> seed) {
    BlockAllocator pool(64, seed);
    std::vector<BlockId> taken;
    for (int i = 0; i < 64; ++i) taken.push_back(pool.allocate());
    return taken;
  };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
  const std::vector<BlockId> rising = order(std::nullopt);
  EXPECT_TRUE(std::is_sorted(rising.begin(), rising.end()));
}

TEST(BlockAllocator, a_double_free_and_a_foreign_id_raise_and_change_nothing) {
  BlockAllocator pool(4, std::nullopt);
  const BlockId block = pool.allocate();
  pool.release(block);
  EXPECT_THROW(pool.release(block), DoubleFree, "block 0 has no holder; it was freed before");
  for (const BlockId foreign : {-1, 4, INT32_MAX, INT32_MIN}) {
    EXPECT_THROW(pool.release(foreign), std::invalid_argument,
                 "is not of this pool, whose ids are 0 to 3");
    EXPECT_THROW(pool.add_ref(foreign), std::invalid_argument, "is not of this pool");
    EXPECT_THROW(pool.ref_count(foreign), std::invalid_argument, "is not of this pool");
  }
  EXPECT_EQ(pool.num_free(), 4);
  pool.check();
}

TEST(BlockAllocator, a_free_block_cannot_be_shared_or_copied_into) {
  BlockAllocator pool(2, std::nullopt);
  EXPECT_THROW(pool.add_ref(1), std::invalid_argument, "block 1 is free");
  EXPECT_THROW(pool.set_findable(1), std::invalid_argument, "block 1 has no holder");
  EXPECT_THROW(pool.mark_in_transit(1), std::invalid_argument, "block 1 has no holder");
  pool.check();
}

TEST(BlockAllocator, a_block_is_free_only_after_its_last_holder_let_go) {
  BlockAllocator pool(2, std::nullopt);
  const BlockId block = pool.allocate();
  pool.add_ref(block);
  EXPECT_EQ(pool.num_shared(), 1);
  EXPECT_FALSE(pool.release(block));
  EXPECT_EQ(pool.state(block), BlockState::kReferenced);
  EXPECT_EQ(pool.num_shared(), 0);
  EXPECT_TRUE(pool.release(block));
  EXPECT_EQ(pool.state(block), BlockState::kFree);
  pool.check();
}

TEST(BlockAllocator, cached_blocks_go_idle_oldest_first_and_forgetting_frees_them) {
  BlockAllocator pool(3, std::nullopt);
  for (int i = 0; i < 3; ++i) pool.allocate();
  for (const BlockId block : {1, 2, 0}) {
    pool.set_findable(block);
    pool.release(block);
  }
  EXPECT_EQ(pool.oldest_idle(), std::optional<BlockId>(1));
  pool.add_ref(1);  // found again
  EXPECT_EQ(pool.state(1), BlockState::kReferenced);
  EXPECT_EQ(pool.oldest_idle(), std::optional<BlockId>(2));
  pool.release(1);  // now the youngest
  pool.forget(2);
  EXPECT_EQ(pool.state(2), BlockState::kFree);
  EXPECT_EQ(pool.oldest_idle(), std::optional<BlockId>(0));
  pool.forget(0);
  EXPECT_EQ(pool.oldest_idle(), std::optional<BlockId>(1));
  EXPECT_EQ(pool.num_allocatable(), 3);
  pool.check();
}

TEST(BlockAllocator, an_idle_block_has_no_holder_however_many_steps_it_is_idle_for) {
  const StepId kWrap = StepId{1} << 27;  // where the count of idle steps begins anew
  for (const StepId num_before : {StepId{0}, StepId{1}, kWrap - 2, kWrap - 1, 5 * kWrap + 3}) {
    BlockAllocator pool(1, std::nullopt);
    const BlockId block = pool.allocate();
    pool.set_findable(block);
    TestAccess::skip_steps(pool, num_before);
    pool.release(block);
    for (std::int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(pool.state(block), BlockState::kCachedIdle);
      EXPECT_EQ(pool.ref_count(block), 0);
      EXPECT_EQ(pool.num_shared(), 0);
      EXPECT_EQ(pool.idle_steps(block), i);
      EXPECT_THROW(pool.release(block), DoubleFree, "block 0 has no holder");
      EXPECT_THROW(pool.set_findable(block), std::invalid_argument, "has no holder");
      EXPECT_THROW(pool.mark_in_transit(block), std::invalid_argument, "has no holder");
      pool.check();
      pool.end_step(pool.begin_step());
    }
    pool.touch(block);  // idle anew
    EXPECT_EQ(pool.idle_steps(block), 0);
    pool.add_ref(block);
    EXPECT_EQ(pool.ref_count(block), 1);
    EXPECT_EQ(pool.num_shared(), 0);
    EXPECT_EQ(pool.idle_steps(block), 0);
    pool.check();
    EXPECT_TRUE(pool.release(block));
    pool.forget(block);
    EXPECT_EQ(pool.state(block), BlockState::kFree);
    EXPECT_EQ(pool.ref_count(block), 0);
    EXPECT_EQ(pool.allocate(), block);
    EXPECT_EQ(pool.ref_count(block), 1);
    pool.check();
  }
}

TEST(BlockAllocator, forgetting_leaves_a_held_block_with_its_holder) {
  BlockAllocator pool(1, std::nullopt);
  const BlockId block = pool.allocate();
  pool.forget(block);
  EXPECT_EQ(pool.state(block), BlockState::kReferenced);
  pool.check();
}

TEST(BlockAllocator, a_block_freed_beside_a_step_drains_until_that_step_ends) {
  BlockAllocator pool(2, std::nullopt);
  const BlockId early = pool.allocate();
  const BlockId late = pool.allocate();
  const StepId first = pool.begin_step();
  pool.release(early);
  const StepId second = pool.begin_step();
  pool.set_findable(late);
  pool.release(late);
  EXPECT_EQ(pool.state(early), BlockState::kDraining);
  EXPECT_EQ(pool.num_returning(), 2);
  EXPECT_THROW(pool.allocate(), OutOfBlocks, "no free block");
  pool.end_step(first);
  EXPECT_EQ(pool.state(early), BlockState::kFree);
  EXPECT_EQ(pool.num_returning(), 1);
  EXPECT_EQ(pool.state(late), BlockState::kDraining);
  pool.check();
  pool.end_step(second);
  EXPECT_EQ(pool.state(late), BlockState::kCachedIdle);
  pool.check();
}

TEST(BlockAllocator, a_draining_block_can_be_held_again) {
  BlockAllocator pool(1, std::nullopt);
  const BlockId block = pool.allocate();
  const StepId step = pool.begin_step();
  pool.set_findable(block);
  pool.release(block);
  pool.add_ref(block);
  EXPECT_EQ(pool.num_returning(), 0);
  pool.end_step(step);
  EXPECT_EQ(pool.state(block), BlockState::kReferenced);
  EXPECT_EQ(pool.ref_count(block), 1);
  pool.check();
}

TEST(BlockAllocator, a_block_copied_into_is_in_transit_until_the_step_ends) {
  BlockAllocator pool(2, std::nullopt);
  const BlockId kept = pool.allocate();
  const BlockId dropped = pool.allocate();
  pool.mark_in_transit(kept);
  EXPECT_EQ(pool.state(kept), BlockState::kReferenced);  // no step is in flight
  const StepId step = pool.begin_step();
  pool.mark_in_transit(kept);
  pool.mark_in_transit(dropped);
  EXPECT_EQ(pool.state(kept), BlockState::kInTransit);
  EXPECT_EQ(pool.num_returning(), 0);  // it has a holder
  pool.release(dropped);
  EXPECT_EQ(pool.state(dropped), BlockState::kDraining);
  pool.check();
  pool.end_step(step);
  EXPECT_EQ(pool.state(kept), BlockState::kReferenced);
  EXPECT_EQ(pool.state(dropped), BlockState::kFree);
  pool.check();
}

TEST(BlockAllocator, steps_end_in_order_and_each_once) {
  BlockAllocator pool(1, std::nullopt);
  EXPECT_THROW(pool.end_step(1), std::invalid_argument, "no step is in flight");
  const StepId first = pool.begin_step();
  const StepId second = pool.begin_step();
  EXPECT_THROW(pool.end_step(second), std::invalid_argument, "the oldest step in flight is 1");
  pool.end_step(first);
  EXPECT_THROW(pool.end_step(first), std::invalid_argument, "step_id 1 cannot end");
  pool.end_step(second);
  for (int i = 0; i < kMaxStepsInFlight; ++i) pool.begin_step();
  EXPECT_THROW(pool.begin_step(), std::invalid_argument,
               "at most 16 steps may be in flight; end step 3 first");
  pool.check();
}

TEST(BlockAllocator, refuses_a_pool_size_that_is_negative_or_beyond_the_limit) {
  EXPECT_THROW(BlockAllocator(-1, std::nullopt), std::invalid_argument,
               "num_blocks must be between 0 and");
  EXPECT_THROW(BlockAllocator(kMaxNumBlocks + 1, std::nullopt), std::invalid_argument,
               "got 67108865");
}

}  // namespace
}  // namespace pagedkv
