// BlockManager: evicted content moves to the CPU pool and comes back for a hit. On the cache model,
// so that a block which reads or overwrites the wrong place is seen.

#include <random>

#include "cache_model.h"
#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::ModelEngine;
using testing::prefill;
using testing::table;
using testing::tokens;
using Ids = std::vector<SeqId>;
using Request = ModelEngine::Request;

BlockManagerConfig config(std::int64_t num_blocks, std::int64_t num_cpu_blocks) {
  return {.num_blocks = num_blocks,
          .block_size = 4,
          .num_cpu_blocks = num_cpu_blocks,
          .watermark = 0.0,
          // Not drawn anew: in so small a pool two evicted contents may share the place that
          // remembers them, and the miss of the first is then told as never seen.
          .hash_secret = "0123456789abcdef",
          .shuffle_seed = 3,
          .enable_kv_offloading = true};
}

// Computes a prompt and lets it go: its full blocks are cached.
void warm(ModelEngine& engine, SeqId id, const std::vector<TokenId>& prompt,
          const std::string& extra_key = {}) {
  const Request request = engine.prefill(id, prompt, extra_key);
  engine.manager.free(request.id);
}

// Every block of the pool holds other cached content than before.
void displace_all(ModelEngine& engine, SeqId id) {
  warm(engine, id,
       tokens(engine.manager.num_blocks() * 4, static_cast<TokenId>(100000 + 1000 * id)));
}

void end_a_step(BlockManager& manager) {
  manager.take_moves();
  manager.end_step(manager.begin_step());
}

TEST(Offloading, evicted_content_moves_out_and_comes_back_for_a_hit) {
  ModelEngine engine(config(4, 8));
  warm(engine, 0, tokens(16));
  displace_all(engine, 1);
  const Statistics away = engine.manager.statistics();
  EXPECT_EQ(away.num_evictions, 4);
  EXPECT_EQ(away.num_offloaded, 4);
  EXPECT_EQ(away.num_cpu_cached_idle, 4);
  EXPECT_EQ(away.num_cpu_free, 4);
  EXPECT_EQ(engine.manager.match(tokens(16)), 12);
  const Request again = engine.start(2, tokens(16));  // start verifies what it holds
  EXPECT_EQ(again.num_computed, 12);
  const Statistics back = engine.manager.statistics();
  EXPECT_EQ(back.prefix_cache_cpu_hits, 12);
  EXPECT_EQ(back.prefix_cache_hits, 12);
  EXPECT_EQ(back.num_onloaded, 3);
  EXPECT_EQ(back.num_offload_drops, 0);
  EXPECT_EQ(engine.manager.match(tokens(16)), 12);  // found in the pool now
}

TEST(Offloading, a_working_set_three_times_the_pool_is_read_back_right) {
  ModelEngine engine(config(8, 16));
  std::mt19937_64 random(5);
  for (SeqId id = 0; id < 400; ++id) {
    const auto which = static_cast<TokenId>(random() % 6);
    Request request = engine.prefill(id, tokens(17, 1000 * which));
    engine.decode(request, 7);
    engine.manager.free(id);
  }
  const Statistics s = engine.manager.statistics();
  EXPECT_LT(200 * 16, s.prefix_cache_hits);
  EXPECT_LT(100 * 16, s.prefix_cache_cpu_hits);
  EXPECT_LT(s.prefix_cache_cpu_hits, s.prefix_cache_hits);
}

// All moves of a step run together, those out first: no block of one may be the place of another.
TEST(Offloading, moves_of_several_prompts_in_one_step_do_not_meet) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    ModelEngine engine(config(8, 6));
    std::mt19937_64 random(seed);
    SeqId next = 0;
    for (int step = 0; step < 12; ++step) {
      std::vector<Request> started;
      for (int i = 0; i < 3; ++i) {
        const auto which = static_cast<TokenId>(random() % 4);
        Request request;
        request.id = next++;
        request.tokens = tokens(5 + static_cast<std::int64_t>(random() % 5), 100 * which);
        try {
          request.num_computed = engine.manager.allocate(request.id, request.tokens);
        } catch (const OutOfBlocks&) {
          continue;
        }
        engine.manager.check_invariants();
        if (random() % 4 == 0) {
          engine.manager.free(request.id);  // given up before its step was launched
        } else {
          started.push_back(request);
        }
      }
      const Moves moves = engine.manager.take_moves();
      std::vector<BlockId> cpu_blocks, arrived;
      for (const BlockCopy& move : moves.out) cpu_blocks.push_back(move.destination);
      for (const BlockCopy& move : moves.in) arrived.push_back(move.destination);
      for (auto* blocks : {&cpu_blocks, &arrived}) {
        std::sort(blocks->begin(), blocks->end());
        EXPECT_TRUE(std::adjacent_find(blocks->begin(), blocks->end()) == blocks->end());
      }
      engine.cache.swap_out(moves.out);
      engine.cache.swap_in(moves.in);
      for (Request& request : started) engine.verify(request);
      for (Request& request : started) {
        engine.compute(request);
        engine.publish(request);
      }
      for (const Request& request : started) engine.manager.free(request.id);
    }
  }
}

TEST(Offloading, a_cpu_block_that_moves_is_in_transit_until_its_step_has_ended) {
  ModelEngine engine(config(4, 4));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16));
  prefill(manager, 1, tokens(8, 500));  // two go out
  EXPECT_EQ(manager.statistics().num_cpu_cached_idle, 0);
  EXPECT_EQ(manager.statistics().num_cpu_free, 2);
  Moves moves = manager.take_moves();
  ASSERT_EQ(moves.out.size(), 2);
  StepId step = manager.begin_step();
  manager.check_invariants();
  for (const BlockCopy& move : moves.out)
    EXPECT_EQ(manager.cpu_state(move.destination), BlockState::kInTransit);
  manager.end_step(step);
  for (const BlockCopy& move : moves.out)
    EXPECT_EQ(manager.cpu_state(move.destination), BlockState::kCachedIdle);
  manager.free(1);

  EXPECT_EQ(manager.allocate(2, tokens(16)), 12);
  moves = manager.take_moves();
  ASSERT_EQ(moves.in.size(), 1);  // of the two that are away the last is not a hit
  const BlockId source = moves.in[0].source;
  for (const BlockCopy& move : moves.out) EXPECT_FALSE(move.destination == source);
  step = manager.begin_step();
  EXPECT_EQ(manager.cpu_state(source), BlockState::kInTransit);
  manager.free(2);  // an abort on the way
  manager.check_invariants();
  manager.end_step(step);
  EXPECT_EQ(manager.cpu_state(source), BlockState::kFree);
  EXPECT_EQ(manager.match(tokens(16)), 12);
  manager.check_invariants();
}

TEST(Offloading, a_step_begins_only_when_its_moves_were_taken) {
  ModelEngine engine(config(4, 4));
  warm(engine, 0, tokens(16));
  engine.manager.allocate(1, tokens(8, 500));
  EXPECT_REFUSED(engine.manager, engine.manager.begin_step(), std::invalid_argument,
                 "2 moves out and 0 moves in were not taken");
  engine.manager.take_moves();
  engine.manager.begin_step();
}

TEST(Offloading, the_cpu_pool_gives_up_what_was_used_least_recently) {
  ModelEngine engine(config(4, 4));
  warm(engine, 0, tokens(9));
  warm(engine, 1, tokens(9, 100));
  displace_all(engine, 2);
  engine.manager.take_evicted();
  const std::int64_t num_drops = engine.manager.statistics().num_offload_drops;
  const std::int64_t num_offloaded = engine.manager.statistics().num_offloaded;
  EXPECT_EQ(engine.manager.statistics().num_cpu_free, 0);
  const Request first = engine.start(3, tokens(5));  // a hit counts as a use
  engine.manager.free(first.id);
  displace_all(engine, 4);
  EXPECT_LT(0, engine.manager.statistics().num_offload_drops);
  std::int64_t num_out = 0, num_dropped = 0;
  for (const Eviction& one : engine.manager.take_evicted()) {
    num_out += one.block >= 0 && one.cpu_block >= 0;
    num_dropped += one.block == -1;
  }
  EXPECT_EQ(num_dropped, engine.manager.statistics().num_offload_drops - num_drops);
  EXPECT_EQ(num_out, engine.manager.statistics().num_offloaded - num_offloaded);
  engine.manager.allocate(5, tokens(9, 100));
  EXPECT_EQ(engine.manager.last_miss().reason, MissReason::kEvicted);
  engine.manager.check_invariants();
}

TEST(Offloading, swapped_sequences_come_first) {
  ModelEngine engine(config(4, 4));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16));
  displace_all(engine, 1);
  EXPECT_EQ(manager.statistics().num_cpu_cached_idle, 4);
  Request request = engine.prefill(2, tokens(11, 500));
  EXPECT_EQ(manager.num_swap_out_blocks(Ids{2}), 3);
  const std::int64_t num_drops = manager.statistics().num_offload_drops;
  engine.cache.swap_out(manager.swap_out(Ids{2}));
  manager.check_invariants();
  engine.verify(request);
  EXPECT_EQ(manager.statistics().num_offload_drops, num_drops + 3);
  EXPECT_EQ(manager.statistics().num_cpu_cached_idle, 1);
  const std::vector<BlockCopy> in = manager.swap_in(Ids{2});
  engine.run_moves();
  engine.cache.swap_in(in);
  engine.verify(request);
  // What it came from cannot take other content in the same step.
  const std::vector<BlockId> held = TestAccess::held_cpu_blocks(manager);
  for (const BlockCopy& move : in)
    EXPECT_TRUE(std::find(held.begin(), held.end(), move.source) != held.end());
  EXPECT_REFUSED(manager, manager.swap_out(Ids{2}), OutOfBlocks, "swap_out needs 3 CPU blocks, ");
  manager.end_step(manager.begin_step());
  EXPECT_EQ(manager.statistics().num_cpu_free + manager.statistics().num_cpu_cached_idle, 4);
}

TEST(Offloading, a_prefix_ends_where_bringing_it_back_costs_more_than_it_saves) {
  ModelEngine engine(config(8, 8));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16));
  Request keeps = engine.prefill(1, tokens(12, 500));
  warm(engine, 2, tokens(20, 900));
  EXPECT_LT(0, manager.statistics().num_cpu_cached_idle);
  EXPECT_EQ(manager.match(tokens(17)), 16);
  manager.set_swap_in_cost(0.99);
  EXPECT_EQ(manager.match(tokens(17)), 16);
  manager.set_swap_in_cost(1.0);
  const std::int64_t num_matched = manager.match(tokens(17));
  EXPECT_LT(num_matched, 16);
  EXPECT_EQ(manager.allocate(3, tokens(13)), std::min<std::int64_t>(num_matched, 12));
  EXPECT_EQ(manager.last_miss().reason, MissReason::kOnCpu);
  EXPECT_EQ(manager.statistics().prefix_cache_cpu_hits, 0);
  manager.free(3);
  // Nothing moves out either: it would never come back.
  const std::int64_t num_offloaded = manager.statistics().num_offloaded;
  manager.free(keeps.id);
  manager.allocate(4, tokens(32, 2000));
  EXPECT_EQ(manager.statistics().num_offloaded, num_offloaded);
  for (const double bad :
       {-0.1, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_REFUSED(manager, manager.set_swap_in_cost(bad), std::invalid_argument,
                   "swap_in_cost must be at least 0 and finite");
  }
}

TEST(Offloading, a_dear_block_is_brought_back_for_the_cheap_ones_behind_it) {
  ModelEngine engine(config(6, 4));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16));
  // The head alone is away: the others were used later.
  auto& cache = TestAccess::cache(manager);
  std::vector<BlockId> hits;
  cache.match("", tokens(16), 4, hits);
  for (std::size_t i = 1; i < 4; ++i) TestAccess::pool(manager).touch(hits[i]);
  manager.allocate(1, tokens(12, 500));
  engine.run_moves();
  manager.end_step(manager.begin_step());
  EXPECT_EQ(manager.statistics().num_cpu_cached_idle, 1);
  manager.free(1);
  manager.set_swap_in_cost(2.5);
  EXPECT_EQ(manager.match(tokens(17)), 16);  // 3 blocks for the price of 1.5
  EXPECT_EQ(manager.match(tokens(9)), 0);
  const Request request = engine.start(2, tokens(17));
  EXPECT_EQ(request.num_computed, 16);
}

TEST(Offloading, content_that_was_computed_again_is_in_one_place) {
  ModelEngine engine(config(4, 8));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(12));
  displace_all(engine, 1);
  const std::int64_t num_away = manager.statistics().num_cpu_cached_idle;
  manager.set_swap_in_cost(5.0);
  Request again = engine.prefill(2, tokens(12));
  EXPECT_EQ(manager.statistics().num_cpu_cached_idle, num_away - 3);
  EXPECT_EQ(manager.match(tokens(13)), 12);  // in the pool, so at no cost
  engine.decode(again, 3);
  manager.free(again.id);
  EXPECT_EQ(engine.start(3, tokens(13)).num_computed, 12);
}

TEST(Offloading, extra_keys_stay_apart_and_a_reset_clears_both_pools) {
  ModelEngine engine(config(4, 8));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16), "one");
  displace_all(engine, 1);
  EXPECT_EQ(manager.match(tokens(16), "one"), 12);
  EXPECT_EQ(manager.match(tokens(16), "other"), 0);
  EXPECT_EQ(manager.match(tokens(16)), 0);
  const std::int64_t num_found =
      manager.statistics().num_cached_idle + manager.statistics().num_cpu_cached_idle;
  EXPECT_EQ(manager.reset_prefix_cache(), num_found);
  EXPECT_EQ(manager.match(tokens(16), "one"), 0);
  EXPECT_EQ(manager.statistics().num_free, 4);
  EXPECT_EQ(manager.statistics().num_cpu_free, 8);
  manager.check_invariants();
  // With moves on their way too.
  warm(engine, 2, tokens(16));
  manager.allocate(3, tokens(8, 500));
  manager.reset_prefix_cache();
  manager.check_invariants();
  end_a_step(manager);
  EXPECT_EQ(manager.statistics().num_cpu_free, 8);
}

TEST(Offloading, what_a_failed_step_moved_is_not_found_again) {
  for (const bool has_failed : {false, true}) {
    ModelEngine engine(config(4, 8));
    BlockManager& manager = engine.manager;
    warm(engine, 0, tokens(16));
    displace_all(engine, 1);
    manager.allocate(2, tokens(16));  // three come back, and as many go out
    const Moves moves = manager.take_moves();
    EXPECT_EQ(moves.in.size(), 3);
    EXPECT_LT(0, moves.out.size());
    const Statistics before = manager.statistics();
    const StepId step = manager.begin_step();
    manager.end_step(step, has_failed);
    manager.check_invariants();
    EXPECT_EQ(manager.match(tokens(16)), has_failed ? 0 : 12);
    manager.free(2);
    manager.check_invariants();
    const Statistics s = manager.statistics();
    EXPECT_EQ(s.num_evictions, before.num_evictions);  // forgotten, not evicted
    if (has_failed) {
      // What stayed where it was is still there, but for what lay below what was moved.
      EXPECT_EQ(s.num_cached_idle, 0);
      EXPECT_EQ(s.num_cpu_free + s.num_cpu_cached_idle, 8);
    }
  }
}

TEST(Offloading, what_arrives_in_a_step_does_not_leave_in_it) {
  ModelEngine engine(config(4, 8));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16));
  displace_all(engine, 1);
  manager.allocate(2, tokens(16));
  EXPECT_EQ(manager.num_swap_out_blocks(Ids{2}), 1);  // the new one
  manager.free(2);
  const std::int64_t num_offloaded = manager.statistics().num_offloaded;
  manager.allocate(3, tokens(16, 700));  // evicts what has not arrived yet
  EXPECT_EQ(manager.statistics().num_offloaded, num_offloaded);
  EXPECT_EQ(manager.match(tokens(16)), 0);
  manager.check_invariants();
}

TEST(Offloading, a_hit_behind_a_window_need_not_come_back) {
  ModelEngine engine(config(8, 8));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(32));
  displace_all(engine, 1);
  EXPECT_EQ(manager.match(tokens(33)), 32);
  const Request request = engine.start(2, tokens(33), {}, std::nullopt, 8);
  EXPECT_EQ(request.num_computed, 32);
  EXPECT_EQ(manager.statistics().num_onloaded, 2);
  EXPECT_EQ(table(manager, 2)[0], kFreedBlock);
}

TEST(Offloading, an_allocation_that_does_not_fit_moves_nothing) {
  ModelEngine engine(config(4, 8));
  BlockManager& manager = engine.manager;
  warm(engine, 0, tokens(16));
  displace_all(engine, 1);
  Request holds = engine.prefill(2, tokens(8, 900));
  EXPECT_EQ(manager.can_allocate(tokens(16)), CanAllocate::kLater);
  EXPECT_REFUSED(manager, manager.allocate(3, tokens(16)), OutOfBlocks, "allocate needs 4 blocks");
  EXPECT_EQ(manager.can_allocate(tokens(8)), CanAllocate::kOk);
  EXPECT_EQ(manager.allocate(3, tokens(8)), 4);
}

TEST(Offloading, needs_cpu_blocks_and_prefix_caching) {
  BlockManagerConfig none = config(4, 0);
  EXPECT_THROW(BlockManager{none}, std::invalid_argument, "enable_kv_offloading needs");
  BlockManagerConfig uncached = config(4, 4);
  uncached.enable_prefix_caching = false;
  EXPECT_THROW(BlockManager{uncached}, std::invalid_argument, "got 4 with prefix caching off");
}

}  // namespace
}  // namespace pagedkv
