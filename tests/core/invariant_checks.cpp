// check_invariants(): a manager corrupted in one place is found out, by the invariant's name.

#include "manager_state.h"

namespace pagedkv {
namespace {

using testing::prefill;
using testing::tokens;

// A manager with something in every state: two sequences that share a prefix, an idle chain, a
// swapped sequence, a block that drains and one in transit.
struct Lively {
  Lively() {
    prefill(manager, 0, tokens(10));
    manager.allocate(1, tokens(11));
    prefill(manager, 2, tokens(9, 100));
    manager.free(2);
    manager.allocate(3, tokens(6, 200));
    manager.swap_out(std::vector<SeqId>{3});
    manager.allocate(4, tokens(2, 300));
    manager.allocate(5, tokens(2, 400));
    manager.begin_step();
    manager.free(4);
    manager.swap_out(std::vector<SeqId>{5});
    manager.check_invariants();
  }
  BlockManager manager{{.num_blocks = 24, .block_size = 4, .num_cpu_blocks = 6, .watermark = 0.0}};
  BlockAllocator& pool = TestAccess::pool(manager);
  PrefixCache& cache = TestAccess::cache(manager);
};

template <class Corrupt>
void expect_found(Corrupt corrupt, const char* part) {
  Lively lively;
  corrupt(lively);
  EXPECT_THROW(lively.manager.check_invariants(), InvariantViolation, part);
}

BlockId block_in(const BlockManager& manager, BlockState state) {
  for (BlockId block = 0; block < manager.num_blocks(); ++block) {
    if (manager.state(block) == state) return block;
  }
  throw std::logic_error("no block in that state");
}

TEST(Invariants, the_lively_manager_has_every_state) {
  const Lively lively;
  for (int state = 0; state < kNumBlockStates; ++state)
    block_in(lively.manager, static_cast<BlockState>(state));
}

TEST(Invariants, I1_state_counts_add_up) {
  expect_found([](Lively& l) { ++TestAccess::num_in(l.pool, BlockState::kFree); }, "I1");
  expect_found(
      [](Lively& l) { --TestAccess::num_in(TestAccess::cpu_pool(l.manager), BlockState::kFree); },
      "I1");
  expect_found([](Lively& l) { --TestAccess::num_returning(l.pool); }, "I1: 2 blocks wait");
}

TEST(Invariants, I2_freed_entries_are_the_leading_ones) {
  const auto with = [](auto corrupt) {
    return [=](Lively& l) {
      l.manager.free_behind(1, 7);
      l.manager.check_invariants();
      corrupt(TestAccess::sequence(l.manager, 1));
    };
  };
  expect_found(with([](Sequence& s) { ++s.num_freed; }), "gave back 2 leading blocks");
  expect_found(with([](Sequence& s) { --s.num_freed; }), "its entry 0 says otherwise");
  expect_found(with([](Sequence& s) { s.num_freed = 9; }), "more than its table has");
  expect_found(with([](Sequence& s) { s.table.back() = kFreedBlock; }), "its entry 2");
  expect_found(with([](Sequence& s) { s.num_published = 1; }), "whose parent it does not hold");
}

TEST(Invariants, I2_ref_counts_are_holders) {
  expect_found(
      [](Lively& l) { ++TestAccess::meta(l.pool, testing::table(l.manager, 1).back()).ref_count; },
      "I2");
  expect_found([](Lively& l) { ++TestAccess::num_shared(l.pool); }, "I2");
  expect_found([](Lively& l) { ++TestAccess::num_tokens(l.manager); }, "I2: the pool holds");
  expect_found(
      [](Lively& l) {
        TestAccess::sequence(l.manager, 1).table[2] = testing::table(l.manager, 1)[1];
      },
      "I2: seq_id 1 holds a block twice");
  expect_found([](Lively& l) { ++TestAccess::sequence(l.manager, 1).num_tokens; },
               "I2: seq_id 1 holds 3 blocks for 12");
  expect_found([](Lively& l) { TestAccess::sequence(l.manager, 1).id = 77; },
               "I2: seq_id 77 is not found");
  expect_found(
      [](Lively& l) {
        const BlockId cpu_block = -1 - testing::table(l.manager, 3)[0];
        TestAccess::cpu_pool(l.manager).add_ref(cpu_block);
        TestAccess::num_shared(TestAccess::cpu_pool(l.manager)) = 1;
      },
      "I2: CPU block");
}

TEST(Invariants, I3_the_free_list_is_exactly_the_free_blocks) {
  expect_found(
      [](Lively& l) { TestAccess::free_list(l.pool).push_back(TestAccess::free_list(l.pool)[0]); },
      "I3");
  expect_found(
      [](Lively& l) { TestAccess::free_list(l.pool)[0] = testing::table(l.manager, 0)[0]; }, "I3");
  expect_found([](Lively& l) { TestAccess::free_list(l.pool).pop_back(); }, "is on no list");
}

TEST(Invariants, L1_lists_hold_their_states) {
  expect_found(
      [](Lively& l) {  // cut an idle block out of its list
        const auto meta = TestAccess::meta(l.pool, block_in(l.manager, BlockState::kCachedIdle));
        TestAccess::meta(l.pool, meta.previous).next = meta.next;
        TestAccess::meta(l.pool, meta.next).previous = meta.previous;
      },
      "L1");
}

TEST(Invariants, I4_published_content_is_what_it_says) {
  expect_found([](Lively& l) { ++TestAccess::token(l.cache, testing::table(l.manager, 0)[1], 2); },
               "I4: the hash");
  expect_found(
      [](Lively& l) { ++TestAccess::entry(l.cache, testing::table(l.manager, 0)[0]).key.high; },
      "I4: the hash");
  expect_found(
      [](Lively& l) {
        for (auto& place : TestAccess::places(l.cache)) {
          if (place.block == testing::table(l.manager, 0)[0]) place = {};
        }
      },
      "I4");
  expect_found(
      [](Lively& l) {
        l.cache.erase(block_in(l.manager, BlockState::kCachedIdle), [](BlockId, const Hash128&) {});
      },
      "is not published, and its record says otherwise");
  expect_found(
      [](Lively& l) {
        TestAccess::meta(l.pool, block_in(l.manager, BlockState::kCachedIdle)).is_findable = false;
      },
      "is not findable");
  expect_found(
      [](Lively& l) {
        TestAccess::meta(l.pool, block_in(l.manager, BlockState::kFree)).is_findable = true;
      },
      "is findable");
  expect_found([](Lively& l) { TestAccess::sequence(l.manager, 0).tokens.pop_back(); },
               "I4: seq_id 0 does not keep");
  expect_found([](Lively& l) { TestAccess::sequence(l.manager, 0).root = -5; },
               "I4: seq_id 0 has published block");
  expect_found([](Lively& l) { TestAccess::sequence(l.manager, 0).num_published = 3; },
               "I4: seq_id 0 published");
}

TEST(Invariants, I5_a_shared_last_block_is_known_to_need_a_copy) {
  expect_found(
      [](Lively& l) {
        l.manager.fork(1, 9);
        TestAccess::sequence(l.manager, 9).may_share_last = false;
      },
      "I5: seq_id 9");
}

TEST(Invariants, I7_only_swapped_sequences_hold_cpu_blocks) {
  expect_found([](Lively& l) { TestAccess::sequence(l.manager, 3).is_swapped = false; },
               "I7: seq_id 3");
}

BlockManager offloading() {
  return BlockManager({.num_blocks = 4,
                       .block_size = 4,
                       .num_cpu_blocks = 4,
                       .watermark = 0.0,
                       .enable_kv_offloading = true});
}

TEST(Invariants, I7_a_cpu_block_of_a_move_is_held) {
  BlockManager manager = offloading();
  testing::prefill(manager, 0, testing::tokens(16));
  manager.free(0);
  manager.allocate(1, testing::tokens(8, 500));  // two move out
  manager.check_invariants();
  TestAccess::held_cpu_blocks(manager)[0] = 3;
  EXPECT_THROW(manager.check_invariants(), InvariantViolation, "I7: CPU block");
}

TEST(Invariants, I7_a_swapped_sequence_and_the_cache_do_not_share_a_cpu_block) {
  BlockManager manager = offloading();
  testing::prefill(manager, 0, testing::tokens(16));
  manager.swap_out(std::vector<SeqId>{0});
  manager.check_invariants();
  const BlockId cpu_block = -1 - testing::table(manager, 0)[0];
  TestAccess::meta(TestAccess::cpu_pool(manager), cpu_block).is_findable = true;
  EXPECT_THROW(manager.check_invariants(), InvariantViolation, "I7: seq_id 0 holds a CPU block");
}

TEST(Invariants, I9_a_block_without_a_holder_state_has_no_holder) {
  // An idle block's count cannot be wrong: its place holds the time since when it is idle.
  for (const BlockState state : {BlockState::kFree, BlockState::kDraining}) {
    expect_found(
        [&](Lively& l) { TestAccess::meta(l.pool, block_in(l.manager, state)).ref_count = 1; },
        "I9");
  }
  expect_found(
      [](Lively& l) {
        TestAccess::meta(l.pool, testing::table(l.manager, 1).back()).ref_count = 0;
      },
      "I9");
}

TEST(Invariants, I10_every_published_block_hangs_on_its_root) {
  expect_found(
      [](Lively& l) {
        TestAccess::entry(l.cache, testing::table(l.manager, 0)[0]).first_child = kNoNode;
      },
      "I10");
  expect_found(
      [](Lively& l) {
        const BlockId other = block_in(l.manager, BlockState::kFree);
        TestAccess::entry(l.cache, testing::table(l.manager, 0)[1]).parent = other;
      },
      "I10: the parent");
  expect_found(
      [](Lively& l) {
        TestAccess::entry(l.cache, block_in(l.manager, BlockState::kFree)).first_child =
            testing::table(l.manager, 0)[1];
      },
      "I10: an unpublished block");
}

}  // namespace
}  // namespace pagedkv
