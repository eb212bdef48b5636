// Kinds of fault that other systems had in their block managers, each provoked here, each check
// named for what is right. They run on the cache model, so "reads its own content" is literal.

#include <set>

#include "cache_model.h"
#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::joined;
using testing::ModelEngine;
using testing::table;
using testing::tokens;
using Ids = std::vector<SeqId>;
using Request = ModelEngine::Request;

constexpr std::int64_t kBlockSize = 4;

ModelEngine make(std::int64_t num_blocks, std::int64_t num_cpu_blocks = 0,
                 std::int64_t hash_bits = 128) {
  return ModelEngine({.num_blocks = num_blocks,
                      .block_size = kBlockSize,
                      .num_cpu_blocks = num_cpu_blocks,
                      .watermark = 0.0,
                      .hash_bits = hash_bits,
                      .shuffle_seed = 11});
}

TEST(Faults, a_fully_cached_prompt_still_computes_its_last_token) {
  for (std::int64_t num_blocks = 1; num_blocks <= 3; ++num_blocks) {
    ModelEngine engine = make(16);
    engine.prefill(0, tokens(num_blocks * kBlockSize));
    Request again = engine.start(1, tokens(num_blocks * kBlockSize));
    EXPECT_EQ(again.num_computed, (num_blocks - 1) * kBlockSize);
    engine.compute(again);  // into a block of its own: StepTables would refuse a shared one
    engine.publish(again);
    EXPECT_EQ(table(engine.manager, 1), table(engine.manager, 0));  // one content, one block
    Request third =
        engine.start(2, tokens(num_blocks * kBlockSize), "", 1);  // after a chunk limit too
    EXPECT_LE(third.num_computed, num_blocks * kBlockSize - 1);
  }
}

TEST(Faults, a_reused_block_is_not_found_under_its_old_content) {
  ModelEngine engine = make(4);
  engine.prefill(0, tokens(16));
  engine.manager.free(0);
  engine.prefill(1, tokens(16, 500));
  EXPECT_EQ(engine.manager.match(tokens(16)), 0);
  engine.manager.free(1);
  EXPECT_EQ(engine.start(2, tokens(16)).num_computed, 0);
}

TEST(Faults, taking_and_hitting_blocks_in_turn_never_returns_a_block_owned_elsewhere) {
  ModelEngine engine = make(6);
  const Request owner = engine.prefill(-1, tokens(9, 7));
  const std::vector<BlockId> owned = table(engine.manager, -1);
  for (int round = 0; round < 1000; ++round) {
    Request fresh =
        engine.prefill(2 * round, tokens(9, static_cast<TokenId>(1000 + round)));  // evicts
    engine.manager.free(fresh.id);
    Request found =
        engine.start(2 * round + 1, tokens(9, static_cast<TokenId>(1000 + round - round % 2)));
    engine.compute(found);
    engine.publish(found);
    for (const BlockId block : table(engine.manager, found.id)) {
      EXPECT_TRUE(std::find(owned.begin(), owned.end(), block) == owned.end());
    }
    engine.manager.free(found.id);
    engine.verify(owner);
    engine.manager.check_invariants();
  }
  EXPECT_EQ(engine.manager.statistics().num_referenced, 3);
  EXPECT_LT(500, engine.manager.statistics().num_evictions);
}

TEST(Faults, after_a_reset_every_block_can_be_reused_under_another_prefix) {
  ModelEngine engine = make(8);
  engine.prefill(0, tokens(16));
  engine.manager.free(0);
  engine.manager.reset_prefix_cache();
  EXPECT_EQ(engine.manager.statistics().num_free, 8);
  engine.prefill(1, tokens(32, 300));
  EXPECT_EQ(engine.manager.match(tokens(16)), 0);
  EXPECT_EQ(engine.manager.match(tokens(32, 300)), 28);
}

TEST(Faults, idle_hits_are_not_counted_as_blocks_to_take) {
  // Five blocks can be taken, two of which are the hits, and four more are needed.
  ModelEngine engine = make(8);
  engine.prefill(0, tokens(8));
  engine.manager.free(0);
  engine.prefill(1, tokens(12, 100));  // held
  EXPECT_EQ(engine.manager.num_allocatable_blocks(), 5);
  const std::vector<TokenId> prompt = joined(tokens(8), tokens(16, 200));
  EXPECT_EQ(engine.manager.can_allocate(prompt), CanAllocate::kLater);
  EXPECT_REFUSED(engine.manager, engine.manager.allocate(2, prompt), OutOfBlocks,
                 "allocate needs 4 blocks, 3 of 8 can be taken");
}

TEST(Faults, swapping_in_counts_no_block_twice) {
  ModelEngine engine = make(6, 6);
  Request swapped = engine.prefill(0, tokens(16));
  engine.cache.swap_out(engine.manager.swap_out(Ids{0}));
  engine.prefill(1, tokens(12, 100));
  EXPECT_EQ(engine.manager.num_allocatable_blocks(), 3);
  EXPECT_REFUSED(engine.manager, engine.manager.swap_in(Ids{0}), OutOfBlocks,
                 "swap_in needs 4 blocks, 3 of 6");
  engine.manager.free(1);
  engine.cache.swap_in(engine.manager.swap_in(Ids{0}));
  engine.verify(swapped);
}

TEST(Faults, many_requests_with_one_prefix_in_a_tiny_pool_wait_and_all_finish) {
  ModelEngine engine = make(9);
  std::vector<Request> running;
  SeqId next = 0;
  int num_done = 0;
  for (int step = 0; num_done < 512 && step < 20000; ++step) {
    const std::vector<TokenId> prompt =
        joined(tokens(10), tokens(3, static_cast<TokenId>(100 + next)));
    if (next < 512 && engine.manager.can_allocate(prompt) == CanAllocate::kOk) {
      running.push_back(engine.start(next++, prompt));
      EXPECT_LE(running.back().num_computed, 12);
      engine.compute(running.back());
      engine.publish(running.back());
      continue;
    }
    engine.manager.free(running.front().id);
    running.erase(running.begin());
    ++num_done;
  }
  EXPECT_EQ(num_done, 512);
  EXPECT_LT(400 * 8, engine.manager.statistics().prefix_cache_hits);
}

TEST(Faults, a_block_is_not_found_before_its_content_is_computed) {
  ModelEngine engine = make(16);
  Request first = engine.start(0, tokens(13), "", 8);  // mid-chunk
  Request second = engine.start(1, tokens(13));        // the same prompt in the same step
  EXPECT_EQ(second.num_computed, 0);
  engine.compute(first);
  EXPECT_EQ(engine.manager.match(tokens(13)), 0);  // the step runs
  engine.publish(first);
  EXPECT_EQ(engine.manager.match(tokens(13)), 8);
  engine.compute(second);
  engine.publish(second);
  EXPECT_EQ(engine.manager.match(tokens(13)), 12);
}

TEST(Faults, aborting_between_chunks_leaves_only_whole_computed_blocks_behind) {
  for (int num_chunks = 0; num_chunks < 5; ++num_chunks) {
    ModelEngine engine = make(12);
    Request request = engine.start(0, tokens(20), "", 5);
    for (int i = 0; i < num_chunks; ++i) {
      engine.compute(request);
      engine.publish(request);
      if (request.num_computed < 20) engine.manager.append(0, 5);
    }
    engine.manager.free(0);
    engine.manager.check_invariants();
    for (SeqId id = 1; id < 4; ++id) {  // churn
      engine.prefill(id, tokens(16, static_cast<TokenId>(100 * id)));
      engine.manager.free(id);
    }
    engine.prefill(9, tokens(20));
    EXPECT_EQ(engine.manager.statistics().num_referenced, 5);
  }
}

TEST(Faults, a_held_match_is_never_handed_out) {
  ModelEngine engine = make(8);
  engine.prefill(0, tokens(12));
  engine.manager.free(0);
  Request holder = engine.start(1, tokens(13));
  const std::vector<BlockId> held = table(engine.manager, 1);
  for (SeqId id = 2;; ++id) {
    if (engine.manager.can_allocate(tokens(4, static_cast<TokenId>(50 * id))) != CanAllocate::kOk)
      break;
    engine.manager.allocate(id, tokens(4, static_cast<TokenId>(50 * id)));
    const BlockId block = table(engine.manager, id)[0];
    EXPECT_TRUE(std::find(held.begin(), held.end(), block) == held.end());
  }
  EXPECT_EQ(engine.manager.num_allocatable_blocks(), 0);
  engine.verify(holder);
}

TEST(Faults, two_equal_cold_prompts_end_with_one_copy_and_no_dangling_table) {
  ModelEngine engine = make(12);
  Request first = engine.start(0, tokens(10));
  Request second = engine.start(1, tokens(10));
  engine.compute(first);
  engine.compute(second);
  const StepId step = engine.manager.begin_step();
  engine.publish(first);
  engine.publish(second);
  EXPECT_EQ(table(engine.manager, 0)[0], table(engine.manager, 1)[0]);
  EXPECT_EQ(table(engine.manager, 0)[1], table(engine.manager, 1)[1]);
  EXPECT_NE(table(engine.manager, 0)[2], table(engine.manager, 1)[2]);
  EXPECT_EQ(engine.manager.statistics().num_draining,
            2);  // the launched step may still read the duplicates
  engine.manager.end_step(step);
  engine.manager.free(1);
  for (SeqId id = 2; id < 6; ++id) {
    engine.decode(first, static_cast<TokenId>(id));
    engine.prefill(id, tokens(8, static_cast<TokenId>(100 * id)));
    engine.verify(first);
    engine.manager.free(id);
  }
}

TEST(Faults, swapped_content_comes_back_whole_under_pressure) {
  // Working set three times the pool, every block tagged, verified after each swap.
  ModelEngine engine = make(8, 16);
  std::vector<Request> requests;
  for (SeqId id = 0; id < 6; ++id) {
    requests.push_back(engine.prefill(id, tokens(13, static_cast<TokenId>(100 * id))));
    engine.cache.swap_out(engine.manager.swap_out(Ids{id}));
    if (engine.manager.statistics().num_cpu_free < 4) break;
  }
  for (int round = 0; round < 200; ++round) {
    Request& request =
        requests[static_cast<std::size_t>(round * 7 % static_cast<int>(requests.size()))];
    engine.cache.swap_in(engine.manager.swap_in(Ids{request.id}));
    engine.manager.check_invariants();
    engine.verify(request);
    if (request.tokens.size() < 16) engine.decode(request, 5);
    engine.cache.swap_out(engine.manager.swap_out(Ids{request.id}));
    for (const Request& any : requests) engine.verify(any);
  }
}

TEST(Faults, a_sequence_dropped_before_its_step_is_published_leaves_nothing_behind) {
  ModelEngine engine = make(6);
  for (SeqId id = 0; id < 10000; ++id) {
    engine.manager.allocate(id, tokens(11, static_cast<TokenId>(id % 50)));
    const StepId step = engine.manager.begin_step();
    engine.manager.free(id);  // aborted; its update never comes
    engine.manager.end_step(step);
  }
  EXPECT_EQ(engine.manager.statistics().num_free, 6);
  engine.manager.check_invariants();
}

TEST(Faults, a_large_crowd_on_one_prefix_fits_in_just_enough_blocks) {
  ModelEngine engine = make(3 + 256);
  engine.prefill(1000, tokens(12));
  engine.manager.free(1000);
  for (SeqId id = 0; id < 256; ++id)
    engine.start(id, joined(tokens(12), {static_cast<TokenId>(900 + id)}));
  EXPECT_EQ(engine.manager.num_allocatable_blocks(), 0);
  EXPECT_EQ(engine.manager.ref_count(table(engine.manager, 0)[0]), 256);
  EXPECT_EQ(engine.manager.can_allocate(tokens(13)), CanAllocate::kLater);
}

TEST(Faults, forks_drop_each_shared_block_once_and_a_double_free_changes_nothing) {
  ModelEngine engine = make(32);
  engine.prefill(0, tokens(10));
  engine.manager.fork_batch(Ids{0, 0, 0}, Ids{1, 2, 3});
  for (int i = 0; i < 6 * kBlockSize; ++i) {
    for (SeqId id = 0; id < 4; ++id) engine.cache.copy(engine.manager.append(id));
  }
  for (SeqId id = 0; id < 4; ++id) {
    const std::vector<BlockId> blocks = table(engine.manager, id);
    EXPECT_EQ(std::set<BlockId>(blocks.begin(), blocks.end()).size(), blocks.size());
    engine.manager.free(id);
    EXPECT_REFUSED(engine.manager, engine.manager.free(id), DoubleFree, "was freed before");
  }
  EXPECT_EQ(engine.manager.num_allocatable_blocks(), 32);
}

TEST(Faults, a_batch_of_warm_and_cold_prompts_gives_both_their_tables) {
  ModelEngine engine = make(16);
  engine.prefill(0, tokens(9));
  engine.manager.free(0);
  const Request warm = engine.start(1, tokens(9));
  const Request cold = engine.start(2, tokens(9, 700));
  StepTables tables(engine.manager, 2, 4);
  testing::PoisonedBuffers buffers(2, 4, 10, 2);
  tables.write(Ids{1, 2}, std::vector<std::int64_t>{1, 9}, std::vector<std::int64_t>{0, 1},
               buffers.view(), true);
  EXPECT_EQ(warm.num_computed, 8);
  EXPECT_EQ(cold.num_computed, 0);
  for (const SeqId id : {1, 2}) {
    const std::vector<BlockId> row = buffers.row(id - 1);
    const std::vector<BlockId> wanted = table(engine.manager, id);
    EXPECT_EQ(std::vector<BlockId>(row.begin(), row.begin() + 3), wanted);
  }
  EXPECT_EQ(buffers.positions[0], 8);  // positions of a hit start behind it
}

TEST(Faults, a_hit_over_shuffled_blocks_reads_them_in_logical_order) {
  ModelEngine engine = make(64);
  for (SeqId id = 0; id < 20; ++id) {  // leaves holes
    engine.prefill(id, tokens(8, static_cast<TokenId>(100 * id)));
    if (id % 3 == 0) engine.manager.free(id);
  }
  engine.prefill(100, tokens(41, 5000));
  engine.manager.free(100);
  Request again = engine.start(101, joined(tokens(41, 5000), {1, 2}));
  EXPECT_EQ(again.num_computed, 40);
  engine.compute(again);
}

TEST(Faults, usable_blocks_are_all_blocks_and_one_token_more_is_never) {
  for (const std::int64_t num_blocks : {1, 2, 7}) {
    ModelEngine engine = make(num_blocks);
    const std::int64_t capacity = num_blocks * kBlockSize;
    EXPECT_EQ(engine.manager.can_allocate(tokens(capacity + 1)), CanAllocate::kNever);
    EXPECT_EQ(engine.manager.can_allocate(tokens(capacity), std::nullopt, 1), CanAllocate::kNever);
    EXPECT_EQ(engine.manager.can_allocate(tokens(1), std::nullopt, capacity), CanAllocate::kNever);
    EXPECT_EQ(engine.manager.can_allocate(tokens(capacity)), CanAllocate::kOk);
    engine.prefill(0, tokens(capacity));
    engine.manager.free(0);
    engine.prefill(1, tokens(1));
  }
}

TEST(Faults, what_changes_the_content_keeps_equal_tokens_apart) {
  ModelEngine engine = make(16);
  engine.prefill(0, tokens(9), "fp8");
  engine.prefill(1, tokens(9), "bf16");
  EXPECT_EQ(engine.start(2, tokens(9), "fp8").num_computed, 8);
  EXPECT_EQ(table(engine.manager, 2)[0], table(engine.manager, 0)[0]);
  EXPECT_NE(table(engine.manager, 2)[0], table(engine.manager, 1)[0]);
}

TEST(Faults, exhausted_cpu_blocks_refuse_that_swap_alone) {
  ModelEngine engine = make(16, 2);
  Request request = engine.prefill(0, tokens(6));
  for (SeqId id = 1; id < 8; ++id) engine.manager.fork(0, id);
  for (SeqId id = 0; id < 8; ++id) engine.cache.copy(engine.manager.append(id));
  EXPECT_REFUSED(engine.manager, engine.manager.swap_out(Ids{0, 1, 2}), OutOfBlocks,
                 "swap_out needs 3 CPU blocks, 2 of 2 can be taken");
  engine.cache.swap_out(engine.manager.swap_out(Ids{0, 1}));
  engine.manager.free(2);  // recomputed instead
  engine.verify(request);
  engine.manager.check_invariants();
}

TEST(Faults, placing_a_prompt_evicts_as_many_blocks_as_it_needs_and_looks_at_no_other) {
  BlockManager manager({.num_blocks = 100000, .block_size = 1, .watermark = 0.0});
  for (SeqId id = 0; id < 100; ++id) {
    testing::prefill(manager, id, tokens(1000, static_cast<TokenId>(2000 * id)));
    manager.free(id);
  }
  EXPECT_EQ(manager.statistics().num_cached_idle, 100000);
  const std::vector<BlockId> oldest = [&] {
    std::vector<BlockId> found;
    TestAccess::cache(manager).match("", tokens(1000, 0), 1000, found);
    return found;
  }();
  manager.allocate(1000, tokens(1000, 900000));
  EXPECT_EQ(manager.statistics().num_evictions, 1000);
  std::vector<BlockId> evicted;
  for (const Eviction& one : manager.take_evicted()) evicted.push_back(one.block);
  std::reverse(evicted.begin(), evicted.end());  // tail first
  EXPECT_EQ(evicted, oldest);
}

TEST(Faults, a_weak_hash_slows_look_ups_and_serves_no_foreign_content) {
  ModelEngine engine = make(40, 8, 4);
  for (int round = 0; round < 300; ++round) {
    const auto first = static_cast<TokenId>(round * 37 % 5);
    Request request =
        engine.prefill(round, tokens(9 + round % 5, first), round % 2 == 0 ? "a" : "b");
    engine.decode(request, 3);
    engine.manager.free(round);
  }
  EXPECT_LT(0, engine.manager.statistics().prefix_cache_hits);
}

}  // namespace
}  // namespace pagedkv
