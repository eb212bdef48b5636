// BlockManager: admission, prefix hits, publishing and eviction.

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::joined;
using testing::prefill;
using testing::table;
using testing::tokens;
using Ids = std::vector<SeqId>;
using Counts = std::vector<std::int64_t>;

BlockManager make(std::int64_t num_blocks, double watermark = 0.0) {
  // A random secret may put two evicted contents into the one place that remembers evictions.
  return BlockManager({.num_blocks = num_blocks,
                       .block_size = 4,
                       .watermark = watermark,
                       .hash_secret = "0123456789abcdef"});
}

std::vector<BlockId> evicted_blocks(BlockManager& manager) {
  std::vector<BlockId> blocks;
  for (const Eviction& one : manager.take_evicted()) blocks.push_back(one.block);
  return blocks;
}

TEST(Admission, is_never_only_for_what_the_whole_pool_cannot_hold) {
  BlockManager manager = make(4);
  EXPECT_EQ(manager.can_allocate(tokens(16)), CanAllocate::kOk);
  EXPECT_EQ(manager.can_allocate(tokens(17)), CanAllocate::kNever);
  EXPECT_EQ(manager.can_allocate(tokens(10), std::nullopt, 6), CanAllocate::kOk);
  EXPECT_EQ(manager.can_allocate(tokens(10), std::nullopt, 7), CanAllocate::kNever);
  EXPECT_EQ(manager.can_allocate(tokens(10), 1, 7), CanAllocate::kNever);
  manager.allocate(0, tokens(16));
  EXPECT_EQ(manager.can_allocate(tokens(1)), CanAllocate::kLater);
  EXPECT_EQ(manager.can_allocate(tokens(17)), CanAllocate::kNever);
}

TEST(Admission, leaves_the_watermark_while_others_live) {
  BlockManager manager = make(10, 0.3);
  manager.allocate(0, tokens(8));  // 2 of 10
  EXPECT_EQ(manager.can_allocate(tokens(20, 50)), CanAllocate::kOk);
  EXPECT_EQ(manager.can_allocate(tokens(21, 50)), CanAllocate::kLater);
  EXPECT_EQ(manager.can_allocate(tokens(21, 50), 20), CanAllocate::kOk);  // its first chunk fits
  manager.allocate(1, tokens(24, 50));  // allocate itself looks at no watermark
  manager.free_batch(std::vector<SeqId>{0, 1});
  EXPECT_EQ(manager.can_allocate(tokens(40)),
            CanAllocate::kOk);  // alone, a prompt may have everything
}

TEST(Admission, agrees_with_allocate) {
  for (std::int64_t num_held = 0; num_held <= 8; ++num_held) {
    for (std::int64_t len = 1; len <= 40; ++len) {
      BlockManager manager = make(8);
      prefill(manager, 0, tokens(13));
      manager.free(0);  // three idle blocks
      if (num_held > 0) manager.allocate(1, tokens(4 * num_held, 500));
      const CanAllocate answer = manager.can_allocate(tokens(len));
      bool has_worked = true;
      try {
        manager.allocate(2, tokens(len));
      } catch (const OutOfBlocks&) {
        has_worked = false;
      }
      EXPECT_EQ(has_worked, answer == CanAllocate::kOk);
      manager.check_invariants();
    }
  }
}

TEST(Admission, refuses_bad_prompts_and_changes_nothing) {
  BlockManager manager = make(4);
  manager.allocate(0, tokens(3));
  EXPECT_REFUSED(manager, manager.allocate(1, {}), std::invalid_argument,
                 "allocate: token_ids is empty");
  EXPECT_REFUSED(manager, manager.match({}), std::invalid_argument, "match: token_ids is empty");
  EXPECT_REFUSED(manager, manager.can_allocate({}), std::invalid_argument,
                 "can_allocate: token_ids is empty");
  const std::vector<TokenId> negative = {1, 2, -3};
  EXPECT_REFUSED(manager, manager.allocate(1, negative), std::invalid_argument,
                 "token_ids[2] is -3");
  EXPECT_REFUSED(manager, manager.allocate(0, tokens(3)), std::invalid_argument,
                 "seq_id 0 exists already");
  EXPECT_REFUSED(manager, manager.allocate(1, tokens(3), -1), std::invalid_argument,
                 "max_new_tokens must be between 0 and 2147483647, got -1");
  EXPECT_REFUSED(manager, manager.can_allocate(tokens(3), std::nullopt, -1), std::invalid_argument,
                 "reserve_tokens must be between 0 and");
  EXPECT_REFUSED(manager, manager.allocate(1, tokens(17)), OutOfBlocks,
                 "allocate needs 5 blocks, 3 of 4 can be taken");
}

TEST(PrefixSharing, a_prompt_reuses_the_blocks_of_an_equal_prefix) {
  BlockManager manager = make(16);
  prefill(manager, 0, tokens(10));
  EXPECT_EQ(manager.match(tokens(10)), 8);
  EXPECT_EQ(manager.allocate(1, joined(tokens(8), tokens(3, 77))), 8);
  EXPECT_EQ(table(manager, 1)[0], table(manager, 0)[0]);
  EXPECT_EQ(table(manager, 1)[1], table(manager, 0)[1]);
  EXPECT_NE(table(manager, 1)[2], table(manager, 0)[2]);
  EXPECT_EQ(manager.statistics().prefix_cache_hits, 8);
  EXPECT_EQ(manager.statistics().prefix_cache_queries, 21);
  manager.check_invariants();
}

TEST(PrefixSharing, matching_changes_and_counts_nothing) {
  BlockManager manager = make(8);
  prefill(manager, 0, tokens(9));
  const std::string before = testing::state_of(manager);
  EXPECT_EQ(manager.match(tokens(9)), 8);
  EXPECT_EQ(manager.match(tokens(9), "other"), 0);
  manager.can_allocate(tokens(9));
  EXPECT_EQ(testing::state_of(manager), before);
}

TEST(PrefixSharing, an_extra_key_separates_equal_tokens) {
  BlockManager manager = make(16);
  prefill(manager, 0, tokens(9), "tenant a");
  EXPECT_EQ(manager.match(tokens(9), "tenant b"), 0);
  EXPECT_EQ(manager.match(tokens(9)), 0);
  EXPECT_EQ(manager.match(tokens(9), "tenant a"), 8);
  EXPECT_EQ(prefill(manager, 1, tokens(9), "tenant b"), 0);
  EXPECT_EQ(manager.match(tokens(9), "tenant b"), 8);
  manager.check_invariants();
}

TEST(PrefixSharing, a_prompt_in_chunks_holds_only_its_first_chunk) {
  BlockManager manager = make(16);
  prefill(manager, 0, tokens(5));
  EXPECT_EQ(manager.allocate(1, tokens(20), 6), 4);
  EXPECT_EQ(manager.sequence(1).num_tokens, 10);
  manager.publish(1, {}, 10);
  EXPECT_EQ(manager.match(tokens(20)), 8);
  manager.append(1, 10);
  manager.publish(1, {}, 20);
  EXPECT_EQ(manager.match(joined(tokens(20), {1})), 20);
  EXPECT_EQ(manager.allocate(2, tokens(21), 0), 20);  // its hits and nothing yet
  EXPECT_EQ(manager.sequence(2).num_tokens, 20);
  EXPECT_EQ(manager.append(2, 1).size(), 0);
  manager.check_invariants();
}

TEST(PrefixSharing, generated_tokens_are_found_by_the_next_turn) {
  BlockManager manager = make(16);
  prefill(manager, 0, tokens(3));
  std::vector<TokenId> all = tokens(3);
  for (TokenId token = 100; token < 110; ++token) {
    manager.append(0);
    manager.publish(0, {&token, 1},
                    static_cast<std::int64_t>(all.size()));  // its K/V comes with the next step
    all.push_back(token);
  }
  EXPECT_EQ(manager.match(all), 12);
  manager.free(0);
  EXPECT_EQ(manager.match(joined(all, tokens(5))), 12);
  manager.check_invariants();
}

TEST(PrefixSharing, publishing_refuses_what_cannot_be_and_changes_nothing) {
  BlockManager manager = make(8);
  manager.allocate(0, tokens(6), 5);
  manager.allocate(1, tokens(6));
  using Ids = std::vector<SeqId>;
  using Counts = std::vector<std::int64_t>;
  EXPECT_REFUSED(manager, manager.publish(0, {}, 6), std::invalid_argument,
                 "num_computed_tokens of seq_id 0 must be between 0 and 5 (it holds 5 tokens and "
                 "knows 6 ids), got 6");
  EXPECT_REFUSED(manager, manager.publish(0, {}, -1), std::invalid_argument, "got -1");
  EXPECT_REFUSED(manager, manager.publish(7, {}, 0), UnknownSequence, "seq_id 7 is not known");
  EXPECT_REFUSED(manager, manager.publish_batch(Ids{0, 1}, tokens(3), Counts{1, 1}, Counts{5, 6}),
                 std::invalid_argument, "token_ids has 3 entries, counts add up to 2");
  EXPECT_REFUSED(manager, manager.publish_batch(Ids{0, 1}, tokens(3), Counts{1, 3}, Counts{5, 6}),
                 std::invalid_argument,
                 "counts[1] must be between 0 and the 2 token_ids left, got 3");
  EXPECT_REFUSED(manager, manager.publish_batch(Ids{0, 1}, tokens(3), Counts{4, -1}, Counts{5, 6}),
                 std::invalid_argument,
                 "counts[0] must be between 0 and the 3 token_ids left, got 4");
  EXPECT_REFUSED(manager, manager.publish_batch(Ids{0, 1}, {}, Counts{0}, Counts{5, 6}),
                 std::invalid_argument,
                 "counts has 1 and num_computed_tokens 2 entries for 2 sequences");
  EXPECT_REFUSED(manager, manager.publish_batch(Ids{0, 0}, {}, Counts{0, 0}, Counts{5, 5}),
                 std::invalid_argument, "seq_id 0 stands twice");
  const std::vector<TokenId> negative = {-7};
  EXPECT_REFUSED(manager, manager.publish(1, negative, 6), std::invalid_argument,
                 "token_ids[0] is -7");
  manager.append(1, 2);
  EXPECT_REFUSED(manager, manager.publish(1, {}, 8), std::invalid_argument,
                 "it holds 8 tokens and knows 6 ids");
}

TEST(PrefixSharing, eviction_takes_the_least_recently_used_and_a_tail_before_its_head) {
  BlockManager manager = make(6);
  prefill(manager, 0, tokens(12));
  prefill(manager, 1, tokens(12, 100));
  const std::vector<BlockId> first = table(manager, 0);
  const std::vector<BlockId> second = table(manager, 1);
  manager.free(0);
  manager.free(1);
  manager.allocate(2, tokens(5));  // touches the head of the first
  manager.free(2);
  EXPECT_EQ(evicted_blocks(manager),
            std::vector<BlockId>{first[2]});  // for the second block of sequence 2
  manager.allocate(3, tokens(12, 500));
  EXPECT_EQ(evicted_blocks(manager), (std::vector<BlockId>{first[1], second[2]}));
  EXPECT_EQ(manager.take_evicted().size(), 0);
  EXPECT_EQ(manager.match(tokens(12)), 4);
  EXPECT_EQ(manager.match(tokens(12, 100)), 8);
  EXPECT_EQ(manager.statistics().num_evictions, 3);
  EXPECT_EQ(manager.statistics().prefix_cache_evictions, 12);
  manager.check_invariants();
}

TEST(PrefixSharing, an_eviction_says_for_whom_and_how_long_the_block_was_idle) {
  BlockManager manager = make(6);
  prefill(manager, 0, tokens(12));
  const std::vector<BlockId> first = table(manager, 0);
  manager.allocate(1, tokens(4, 100));
  manager.allocate(2, tokens(3, 200));
  manager.allocate(3, tokens(4, 300));
  manager.free(0);
  for (int i = 0; i < 5; ++i) manager.end_step(manager.begin_step());
  manager.append_batch(Ids{1, 2, 3}, Counts{1, 1, 1});  // 2 needs no block
  EXPECT_EQ(manager.take_evicted(),
            (std::vector<Eviction>{{.block = first[2], .seq_id = 1, .idle_steps = 5},
                                   {.block = first[1], .seq_id = 3, .idle_steps = 5}}));
  // A draining block goes idle when its step ends.
  manager.free_batch(Ids{1, 2, 3});
  prefill(manager, 4, tokens(4, 400));
  const StepId step = manager.begin_step();
  manager.free(4);
  manager.end_step(step);
  manager.allocate(5, tokens(24, 500));
  const std::vector<Eviction> evicted = manager.take_evicted();
  ASSERT_EQ(evicted.size(), 2);
  EXPECT_EQ(evicted[0], (Eviction{.block = first[0], .seq_id = 5, .idle_steps = 6}));
  EXPECT_EQ(evicted[1].idle_steps, 0);
}

TEST(PrefixSharing, of_very_many_evictions_the_last_are_kept) {
  constexpr std::int64_t kNumBlocks = BlockManager::kMaxEvictionsKept + 100;
  BlockManager manager({.num_blocks = kNumBlocks, .block_size = 1, .watermark = 0.0});
  prefill(manager, 0, tokens(kNumBlocks));
  const std::vector<BlockId> held = table(manager, 0);
  manager.free(0);
  manager.allocate(1, tokens(kNumBlocks, 1000000));
  const std::vector<Eviction> evicted = manager.take_evicted();
  EXPECT_EQ(evicted.size(), BlockManager::kMaxEvictionsKept);
  // A chain goes from its end on, its head last.
  for (std::size_t i = 0; i < evicted.size(); ++i)
    EXPECT_EQ(evicted[i].block, held[evicted.size() - 1 - i]);
  EXPECT_EQ(manager.take_evicted().size(), 0);
  EXPECT_EQ(manager.statistics().num_evictions, kNumBlocks);
}

TEST(PrefixSharing, a_miss_says_whether_the_block_was_ever_there) {
  const auto reason = [](const BlockManager& manager) { return manager.last_miss().reason; };
  BlockManager manager = make(6);
  manager.allocate(0, tokens(3));
  EXPECT_EQ(reason(manager), MissReason::kNone);  // no full block before the last token
  manager.free(0);
  EXPECT_EQ(prefill(manager, 1, tokens(12)), 0);
  EXPECT_EQ(reason(manager), MissReason::kNeverCached);
  EXPECT_EQ(prefill(manager, 2, tokens(12)), 8);
  EXPECT_EQ(reason(manager), MissReason::kNone);  // the last token has to be computed
  manager.free_batch(Ids{1, 2});
  manager.end_step(manager.begin_step());
  manager.allocate(7, tokens(20, 500));  // evicts the second and the third
  manager.free(7);
  EXPECT_EQ(manager.allocate(3, tokens(12)), 4);
  EXPECT_EQ(manager.last_miss(),
            (PrefixMiss{.reason = MissReason::kEvicted, .evicted_in = 2, .evicted_for = 7}));
  // The same tokens under another key were never there, whatever happened to the first.
  manager.free(3);
  manager.allocate(4, tokens(12), std::nullopt, "salt");
  EXPECT_EQ(manager.last_miss(), PrefixMiss{.reason = MissReason::kNeverCached});
  manager.free(4);
  manager.reset_prefix_cache();
  manager.allocate(5, tokens(12));
  EXPECT_EQ(reason(manager), MissReason::kNeverCached);
  BlockManager off({.num_blocks = 4, .enable_prefix_caching = false});
  off.allocate(0, tokens(40));
  EXPECT_EQ(reason(off), MissReason::kCachingOff);
}

TEST(PrefixSharing, a_whole_prompt_that_was_evicted_is_remembered_with_its_salt) {
  BlockManager manager = make(3);
  prefill(manager, 0, tokens(8), "salt");
  manager.free(0);
  prefill(manager, 1, tokens(12, 500));  // evicts all of it: not even its root is left
  manager.free(1);
  manager.allocate(2, tokens(8), std::nullopt, "salt");
  EXPECT_EQ(manager.last_miss().reason, MissReason::kEvicted);
  EXPECT_EQ(manager.last_miss().evicted_for, 1);
}

TEST(PrefixSharing, free_blocks_are_taken_before_any_is_evicted) {
  BlockManager manager = make(6);
  prefill(manager, 0, tokens(12));
  manager.free(0);
  manager.allocate(1, tokens(12, 100));
  EXPECT_EQ(manager.statistics().num_evictions, 0);
  EXPECT_EQ(manager.match(tokens(13)), 12);
}

TEST(PrefixSharing, resetting_forgets_everything_and_stops_those_alive_from_publishing_the_past) {
  BlockManager manager = make(8);
  prefill(manager, 0, tokens(8));
  prefill(manager, 1, tokens(8, 100));
  manager.free(1);
  EXPECT_EQ(manager.reset_prefix_cache(), 4);
  EXPECT_EQ(manager.match(tokens(9)), 0);
  EXPECT_EQ(manager.statistics().num_free, 6);
  manager.append(0, 8);
  manager.publish(0, tokens(8, 50), 16);
  EXPECT_EQ(manager.match(joined(tokens(8), tokens(8, 50))), 0);
  manager.free(0);
  EXPECT_EQ(manager.statistics().num_free, 8);
  EXPECT_EQ(prefill(manager, 2, tokens(9)), 0);
  EXPECT_EQ(manager.match(tokens(9)), 8);  // who came after publishes again
  manager.check_invariants();
}

TEST(PrefixSharing, without_prefix_caching_nothing_is_ever_found) {
  BlockManager manager({.num_blocks = 8, .block_size = 4, .enable_prefix_caching = false});
  EXPECT_EQ(prefill(manager, 0, tokens(8)), 0);
  EXPECT_EQ(manager.match(tokens(9)), 0);
  EXPECT_EQ(manager.allocate(1, tokens(9)), 0);
  EXPECT_EQ(manager.reset_prefix_cache(), 0);
  EXPECT_REFUSED(manager, manager.publish(0, {}, 9), std::invalid_argument, "got 9");
  manager.free_batch(std::vector<SeqId>{0, 1});
  EXPECT_EQ(manager.statistics().num_free, 8);
  EXPECT_EQ(manager.statistics().prefix_cache_queries, 0);
  manager.check_invariants();
}

TEST(PrefixSharing, forks_publish_a_common_block_once) {
  BlockManager manager = make(8);
  manager.allocate(0, tokens(6));
  manager.fork(0, 1);
  manager.publish(0, {}, 6);
  manager.publish(1, {}, 6);
  EXPECT_EQ(table(manager, 0), table(manager, 1));
  EXPECT_EQ(manager.statistics().num_referenced, 2);
  manager.check_invariants();
}

}  // namespace
}  // namespace pagedkv
