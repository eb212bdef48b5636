// BlockManager: sliding windows. What lies behind one is given back, once per holder; everything
// else goes on as without it.

#include <set>

#include "cache_model.h"
#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::ModelEngine;
using testing::PoisonedBuffers;
using testing::prefill;
using testing::table;
using testing::tokens;
using Ids = std::vector<SeqId>;
using Counts = std::vector<std::int64_t>;
using Request = ModelEngine::Request;

BlockManager make(std::int64_t num_blocks, std::int64_t num_cpu_blocks = 0, bool is_cached = true) {
  return BlockManager({.num_blocks = num_blocks,
                       .block_size = 4,
                       .num_cpu_blocks = num_cpu_blocks,
                       .watermark = 0.0,
                       .enable_prefix_caching = is_cached});
}

ModelEngine make_engine(std::int64_t num_blocks, std::int64_t num_cpu_blocks = 0) {
  return ModelEngine({.num_blocks = num_blocks,
                      .block_size = 4,
                      .num_cpu_blocks = num_cpu_blocks,
                      .watermark = 0.0,
                      .shuffle_seed = 3});
}

TEST(Window, gives_back_the_blocks_wholly_before_a_position_and_keeps_the_others_places) {
  BlockManager manager = make(8, 0, false);
  manager.allocate(0, tokens(14));
  const std::vector<BlockId> before = table(manager, 0);
  EXPECT_EQ(manager.free_behind(0, 3), 0);
  EXPECT_EQ(manager.free_behind(0, 11), 2);
  const std::vector<BlockId> after = {kFreedBlock, kFreedBlock, before[2], before[3]};
  EXPECT_EQ(table(manager, 0), after);
  EXPECT_EQ(manager.sequence(0).num_tokens, 14);
  EXPECT_EQ(manager.statistics().num_tokens, 6);
  EXPECT_EQ(manager.num_allocatable_blocks(), 6);
  EXPECT_EQ(manager.snapshot()->block_ids, after);
  manager.check_invariants();
  EXPECT_EQ(manager.free_behind(0, 11), 0);  // a second time, and an older position
  EXPECT_EQ(manager.free_behind(0, 4), 0);
  manager.append(0, 3);
  EXPECT_EQ(table(manager, 0).size(), 5);
  EXPECT_EQ(manager.free_behind(0, 17), 2);
  manager.check_invariants();
  manager.free(0);
  EXPECT_EQ(manager.statistics().num_free, 8);
  manager.check_invariants();
}

TEST(Window, a_refused_call_frees_nothing) {
  BlockManager manager = make(8, 8);
  manager.allocate(0, tokens(10));
  manager.allocate(1, tokens(10, 50));
  manager.allocate(2, tokens(4, 90));
  manager.free(2);
  EXPECT_REFUSED(manager, manager.free_behind(0, 11), std::invalid_argument,
                 "first_needed_token of seq_id 0 must be between 0 and its 10 tokens, got 11");
  EXPECT_REFUSED(manager, manager.free_behind(0, -1), std::invalid_argument, "got -1");
  EXPECT_REFUSED(manager, manager.free_behind(2, 0), UnknownSequence, "seq_id 2 was freed");
  EXPECT_REFUSED(manager, manager.free_behind_batch(Ids{0, 0}, Counts{8, 8}), std::invalid_argument,
                 "stands twice");
  EXPECT_REFUSED(manager, manager.free_behind_batch(Ids{0, 1}, Counts{8, 11}),
                 std::invalid_argument, "seq_id 1");
  EXPECT_REFUSED(manager, manager.free_behind_batch(Ids{0, 1}, Counts{8}), std::invalid_argument,
                 "first_needed_tokens has 1 entries for 2 sequences");
  manager.swap_out(Ids{1});
  EXPECT_REFUSED(manager, manager.free_behind_batch(Ids{0, 1}, Counts{8, 8}), std::invalid_argument,
                 "seq_id 1 is swapped out");
}

TEST(Window, a_block_given_back_beside_a_launched_step_drains) {
  BlockManager manager = make(4, 0, false);
  manager.allocate(0, tokens(16));
  const StepId step = manager.begin_step();
  EXPECT_EQ(manager.free_behind(0, 8), 2);
  EXPECT_EQ(manager.num_allocatable_blocks(), 0);
  EXPECT_EQ(manager.statistics().num_draining, 2);
  manager.check_invariants();
  manager.end_step(step);
  EXPECT_EQ(manager.num_allocatable_blocks(), 2);
  manager.check_invariants();
}

TEST(Window, other_holders_keep_what_one_gives_back) {
  BlockManager manager = make(8);
  prefill(manager, 0, tokens(13));
  const std::vector<BlockId> blocks = table(manager, 0);
  manager.fork(0, 1);
  manager.allocate(2, tokens(13));  // by the prefix cache
  EXPECT_EQ(manager.ref_count(blocks[0]), 3);
  EXPECT_EQ(manager.free_behind(0, 9), 2);
  EXPECT_EQ(manager.ref_count(blocks[0]), 2);
  EXPECT_EQ(table(manager, 1), blocks);
  manager.check_invariants();
  EXPECT_EQ(manager.free_behind_batch(Ids{1, 2}, Counts{9, 4}), 3);
  EXPECT_EQ(manager.ref_count(blocks[0]), 0);
  EXPECT_EQ(manager.ref_count(blocks[1]), 1);
  EXPECT_EQ(manager.state(blocks[0]), BlockState::kCachedIdle);
  manager.check_invariants();
  EXPECT_EQ(manager.append(1).size(), 1);  // copy-on-write of the last block, as ever
  manager.fork(1, 3);                      // shares what its parent still holds
  EXPECT_EQ(manager.sequence(3).num_freed, 2);
  EXPECT_EQ(manager.ref_count(blocks[2]), 4);
  manager.check_invariants();
  manager.free_batch(Ids{0, 1, 2, 3});
  EXPECT_EQ(manager.match(tokens(13)), 12);
  manager.check_invariants();
}

// Double free of shared blocks under sliding windows.
TEST(Window, forks_behind_one_window_drop_each_block_once_and_a_double_free_changes_nothing) {
  constexpr std::int64_t kWindow = 8;
  ModelEngine engine = make_engine(24);
  Request first = engine.prefill(0, tokens(6));
  first.window = kWindow;
  std::vector<Request> requests = {first, first, first, first};
  for (SeqId id = 1; id < 4; ++id) {
    engine.manager.fork(0, id);
    requests[static_cast<std::size_t>(id)].id = id;
  }
  for (TokenId i = 0; i < 24; ++i) {
    for (Request& request : requests) {
      engine.decode(request, 100 * static_cast<TokenId>(request.id) + i);
      engine.free_behind(request);
    }
    std::set<BlockId> held;
    std::size_t num_entries = 0;
    for (const Request& request : requests) {
      const Sequence& sequence = engine.manager.sequence(request.id);
      held.insert(sequence.table.begin() + sequence.num_freed, sequence.table.end());
      num_entries += sequence.table.size() - static_cast<std::size_t>(sequence.num_freed);
    }
    EXPECT_EQ(engine.manager.statistics().num_referenced, held.size());
    EXPECT_LE(num_entries, 4 * engine.manager.max_window_blocks(kWindow, 1));
  }
  engine.manager.free_batch(Ids{0, 1, 2, 3});
  engine.manager.check_invariants();
  EXPECT_EQ(engine.manager.num_allocatable_blocks(), 24);
  EXPECT_REFUSED(engine.manager, engine.manager.free(2), DoubleFree, "freed before");
  EXPECT_REFUSED(engine.manager, engine.manager.free_behind(2, 0), UnknownSequence, "was freed");
}

TEST(Window, a_long_generation_stays_within_the_pool_of_its_window) {
  for (const std::int64_t window : {1, 3, 4, 5, 8, 11}) {
    const std::int64_t num_blocks = make(1).max_window_blocks(window, 1);
    ModelEngine engine = make_engine(num_blocks);
    Request request = engine.start(0, tokens(1), "", std::nullopt, window);
    engine.compute(request);
    std::int64_t peak = 0;
    for (TokenId i = 0; i < 200; ++i) {
      engine.publish(request);
      engine.free_behind(request);
      engine.decode(request, i);
      peak = std::max<std::int64_t>(peak, engine.manager.statistics().num_referenced);
    }
    EXPECT_EQ(peak, num_blocks);  // the bound is reached, and with it all there is
    EXPECT_EQ(table(engine.manager, 0).size(), 51);
  }
}

TEST(Window, the_most_blocks_of_a_window_cover_every_chunk_at_every_place) {
  BlockManager manager = make(64, 0, false);
  for (std::int64_t window = 5; window < 14; ++window) {
    for (std::int64_t chunk = 1; chunk < 11; ++chunk) {
      std::int64_t peak = 0;
      for (std::int64_t start = 0; start < 4; ++start) {
        manager.allocate(0, tokens(window + start + 8));
        for (int step = 0; step < 6; ++step) {
          const std::int64_t num_computed = manager.sequence(0).num_tokens;
          manager.free_behind(0, num_computed - window + 1);
          manager.append(0, chunk);
          peak = std::max<std::int64_t>(peak, manager.statistics().num_referenced);
        }
        manager.free(0);
      }
      const std::int64_t most = manager.max_window_blocks(window, chunk);
      EXPECT_LE(peak, most);
      EXPECT_LE(most, peak + (chunk % 4 == 0));  // a chunk of whole blocks skips the worst places
    }
  }
  EXPECT_THROW(manager.max_window_blocks(0, 1), std::invalid_argument, "window must be between 1");
  EXPECT_THROW(manager.max_window_blocks(1, -1), std::invalid_argument, "got 1 and -1");
}

TEST(Window, published_blocks_behind_it_are_found_again) {
  ModelEngine engine = make_engine(12);
  Request request = engine.prefill(0, tokens(9));
  request.window = 4;
  for (TokenId i = 10; i <= 30; ++i) {
    engine.decode(request, i);
    engine.free_behind(request);
  }
  engine.manager.free(0);
  EXPECT_EQ(engine.manager.match(tokens(30)), 28);
  // The hit is on the whole prefix, and only the blocks in the window are held.
  Request again = engine.start(1, tokens(30), "", std::nullopt, 6);
  EXPECT_EQ(again.num_computed, 28);
  EXPECT_EQ(engine.manager.sequence(1).num_freed, 5);
  EXPECT_EQ(engine.manager.statistics().num_referenced, 3);
  engine.compute(again);
  engine.publish(again);
  engine.free_behind(again);
  EXPECT_EQ(engine.manager.statistics().prefix_cache_hits, 28);
}

TEST(Window, a_hit_behind_it_needs_no_room_and_counts_as_used) {
  BlockManager manager = make(8);
  prefill(manager, 0, tokens(25));
  prefill(manager, 1, tokens(4, 500));
  manager.free(0);
  manager.free(1);  // all published blocks are idle, those of sequence 1 used last
  EXPECT_EQ(manager.statistics().num_cached_idle, 7);
  EXPECT_EQ(manager.can_allocate(tokens(28), std::nullopt, 0, "", 5), CanAllocate::kOk);
  EXPECT_EQ(manager.allocate(2, tokens(28), std::nullopt, "", 5), 24);
  EXPECT_EQ(manager.statistics().num_referenced, 2);
  EXPECT_EQ(manager.statistics().num_cached_idle, 6);
  manager.check_invariants();
  prefill(manager, 3, tokens(1, 700));  // evicts what was used longest ago: sequence 1's
  EXPECT_EQ(manager.match(tokens(5, 500)), 0);
  EXPECT_EQ(manager.match(tokens(25)), 24);
  manager.check_invariants();
}

TEST(Window, admission_asks_for_the_window_and_a_chunk) {
  BlockManager manager = make(4, 0, false);
  EXPECT_EQ(manager.can_allocate(tokens(40), 4, 100), CanAllocate::kNever);
  EXPECT_EQ(manager.max_window_blocks(8, 4), 4);
  EXPECT_EQ(manager.can_allocate(tokens(40), 4, 100, "", 8), CanAllocate::kOk);
  EXPECT_EQ(manager.can_allocate(tokens(40), 8, 100, "", 8), CanAllocate::kNever);
  EXPECT_EQ(manager.can_allocate(tokens(40), std::nullopt, 0, "", 8), CanAllocate::kNever);
  EXPECT_EQ(manager.can_allocate(tokens(16), std::nullopt, 0, "", 8), CanAllocate::kOk);
  EXPECT_THROW(manager.can_allocate(tokens(4), 4, 0, "", -1), std::invalid_argument, "window");
  EXPECT_THROW(manager.allocate(0, tokens(4), 4, "", -1), std::invalid_argument, "window");
  manager.allocate(0, tokens(13));
  EXPECT_EQ(manager.can_allocate(tokens(40), 4, 0, "", 8), CanAllocate::kLater);
}

TEST(Window, shorter_than_a_block_it_keeps_the_parent_of_the_next_published_block) {
  ModelEngine engine = make_engine(8);
  Request request = engine.prefill(0, tokens(8));
  request.window = 1;
  engine.free_behind(request);
  EXPECT_EQ(engine.manager.sequence(0).num_freed, 1);
  for (TokenId i = 9; i <= 12; ++i) engine.decode(request, i);
  EXPECT_EQ(engine.manager.match(tokens(13)), 12);
}

TEST(Window, an_unpublished_block_behind_it_ends_the_publishing) {
  BlockManager manager = make(8);
  prefill(manager, 0, tokens(5));
  manager.append(0, 7);
  EXPECT_EQ(manager.free_behind(0, 9), 2);  // the second is full, and was not published
  manager.check_invariants();
  manager.publish(0, tokens(7, 6), 12);
  EXPECT_EQ(manager.match(tokens(12)), 4);
  manager.check_invariants();
}

TEST(Window, a_chain_cut_by_an_eviction_publishes_no_more_and_its_owner_reads_on) {
  ModelEngine engine = make_engine(5);
  Request request = engine.prefill(0, tokens(13));
  request.window = 5;
  engine.free_behind(request);
  EXPECT_EQ(engine.manager.match(tokens(13)), 12);
  Request other = engine.prefill(1, tokens(8, 500));  // one free block, so one is evicted
  EXPECT_EQ(engine.manager.match(tokens(13)), 4);     // the second block, and the third below it
  EXPECT_EQ(engine.manager.statistics().num_evictions, 2);
  engine.verify(request);
  engine.manager.free(other.id);
  for (TokenId i = 14; i < 40; ++i) {
    engine.decode(request, i);
    engine.free_behind(request);
  }
  EXPECT_LE(engine.manager.match(tokens(39)), 4);
}

TEST(Window, swaps_what_is_left_and_publishes_no_more_without_a_parent) {
  ModelEngine engine = make_engine(8, 4);
  Request request = engine.prefill(0, tokens(18));
  request.window = 6;
  engine.free_behind(request);
  EXPECT_EQ(engine.manager.sequence(0).num_freed, 3);
  EXPECT_EQ(engine.manager.num_swap_out_blocks(Ids{0}), 2);
  const std::vector<BlockCopy> out = engine.manager.swap_out(Ids{0});
  engine.cache.swap_out(out);
  EXPECT_EQ(out.size(), 2);
  EXPECT_EQ(table(engine.manager, 0)[2], kFreedBlock);
  engine.manager.check_invariants();
  engine.verify(request);
  engine.manager.fork(0, 1);  // of a swapped one, and gone again
  engine.manager.check_invariants();
  engine.manager.free(1);
  EXPECT_EQ(engine.manager.num_swap_in_blocks(Ids{0}), 2);
  engine.cache.swap_in(engine.manager.swap_in(Ids{0}));
  engine.manager.check_invariants();
  for (TokenId i = 19; i < 31; ++i) {
    engine.decode(request, i);
    engine.free_behind(request);
  }
  EXPECT_EQ(engine.manager.match(tokens(30)), 16);  // what it had published before
}

TEST(Window, a_swap_that_leaves_a_parent_in_the_pool_publishes_on) {
  ModelEngine engine = make_engine(8, 4);
  Request request = engine.prefill(0, tokens(14));
  request.window = 9;
  engine.free_behind(request);
  EXPECT_EQ(engine.manager.sequence(0).num_freed, 1);
  engine.manager.allocate(1, tokens(9));  // holds the blocks 0 and 1 too
  engine.cache.swap_out(engine.manager.swap_out(Ids{0}));
  EXPECT_EQ(table(engine.manager, 0)[1], table(engine.manager, 1)[1]);
  engine.cache.swap_in(engine.manager.swap_in(Ids{0}));
  for (TokenId i = 15; i <= 17; ++i) engine.decode(request, i);
  EXPECT_EQ(engine.manager.match(tokens(17)), 16);
}

TEST(Window, a_reset_forgets_what_lies_behind_it) {
  BlockManager manager = make(8);
  prefill(manager, 0, tokens(13));
  manager.free_behind(0, 9);
  EXPECT_EQ(manager.statistics().num_cached_idle, 2);
  EXPECT_EQ(manager.reset_prefix_cache(), 3);
  EXPECT_EQ(manager.statistics().num_free, 6);
  manager.free_behind(0, 13);
  manager.append(0, 9);
  manager.publish(0, tokens(9, 14), 22);
  manager.check_invariants();
  EXPECT_EQ(manager.match(tokens(22)), 0);
}

TEST(Window, step_tables_leave_freed_entries_alone_and_write_none_of_their_positions) {
  BlockManager manager = make(8, 0, false);
  StepTables tables(manager, 2, 8);
  manager.allocate(0, tokens(14));
  manager.free_behind(0, 9);
  manager.append(0);
  PoisonedBuffers buffers(2, 8, 16, 1);
  EXPECT_EQ(tables.write(Ids{0}, Counts{1}, Counts{1}, buffers.view(), true), 1);
  const std::vector<BlockId> blocks = table(manager, 0);
  const std::vector<BlockId> expected = {testing::kPoison, testing::kPoison, blocks[2], blocks[3]};
  const std::vector<BlockId> row = buffers.row(1);
  EXPECT_EQ(std::vector<BlockId>(row.begin(), row.begin() + 4), expected);
  EXPECT_EQ(tables.num_entries_written(), 2);
  EXPECT_EQ(buffers.slot_mapping[0], blocks[3] * 4 + 2);
  EXPECT_EQ(buffers.positions[0], 14);
  EXPECT_EQ(buffers.seq_lens[0], 15);

  manager.append(0, 2);  // a new block; only its entry is new, whatever went from the head
  manager.free_behind(0, 13);
  EXPECT_EQ(tables.write(Ids{0}, Counts{2}, Counts{1}, buffers.view(), true), 2);
  EXPECT_EQ(tables.num_entries_written(), 3);
  EXPECT_EQ(buffers.row(1)[4], table(manager, 0)[4]);
  EXPECT_EQ(tables.write(Ids{0}, Counts{2}, Counts{1}, buffers.view(), false), 2);
  EXPECT_EQ(tables.num_entries_written(), 5);

  const PoisonedBuffers before = buffers;
  EXPECT_THROW(tables.write(Ids{0}, Counts{6}, Counts{1}, buffers.view(), true), InvariantViolation,
               "would write position 11, but its first 12 positions lie behind the window");
  EXPECT_TRUE(buffers == before);
}

}  // namespace
}  // namespace pagedkv
