// When memory runs out inside a call, the call changes nothing (I6): every mutating call is tried
// with every n at which it allocates.

#include <new>

#include "failing_memory.h"
#include "manager_state.h"
#include "step_buffers.h"

namespace pagedkv {
namespace {

using testing::num_until_failure;
using testing::prefill;
using testing::tokens;
using Ids = std::vector<SeqId>;
using Counts = std::vector<std::int64_t>;

struct Manager {
  Manager() {
    prefill(manager, 0, tokens(10), "a");
    manager.fork(0, 1);
    prefill(manager, 2, tokens(9, 100));
    manager.free(2);
    prefill(manager, 3, tokens(6, 200), "b");
    manager.swap_out(Ids{3});
  }
  BlockManager manager{{.num_blocks = 12, .block_size = 4, .num_cpu_blocks = 12, .watermark = 0.0}};
};

// Of a pool full of cached content, half of it on the CPU, and a swapped sequence.
struct OffloadingManager {
  OffloadingManager() {
    for (SeqId id = 0; id < 3; ++id) {
      prefill(manager, id, tokens(16, static_cast<TokenId>(100 * id + 1)));
      manager.free(id);
    }
    prefill(manager, 3, tokens(6, 700));
    manager.swap_out(Ids{3});
    prefill(manager, 4, tokens(5, 800));
    manager.take_moves();
    manager.end_step(manager.begin_step());
  }
  BlockManager manager{{.num_blocks = 8,
                        .block_size = 4,
                        .num_cpu_blocks = 12,
                        .watermark = 0.0,
                        .enable_kv_offloading = true}};
};

// Runs call on a fresh manager, failing its 1st, 2nd, ... allocation until it gets through.
template <class Fresh = Manager, class Call>
void expect_whole_or_nothing(const char* name, Call call) {
  int num_failed = 0;
  for (long n = 0;; ++n) {
    Fresh fresh;
    const std::string before = testing::state_of(fresh.manager);
    bool has_failed = false;
    num_until_failure = n;
    try {
      call(fresh.manager);
    } catch (const std::bad_alloc&) {
      has_failed = true;
    }
    num_until_failure = -1;
    fresh.manager.check_invariants();
    if (!has_failed) break;
    ++num_failed;
    if (testing::state_of(fresh.manager) != before) {
      check::fail(name, static_cast<int>(n), "a call that ran out of memory changed the manager");
    }
    call(fresh.manager);  // and it still works
    fresh.manager.check_invariants();
    if (n > 1000) check::fail(name, 0, "never gets through");
  }
  EXPECT_LT(0, num_failed);
}

TEST(MemoryFailure, leaves_the_manager_as_it_was_in_every_call) {
  const std::vector<TokenId> prompt = tokens(30, 700);
  const Ids ids = {0, 1};
  const Ids third = {3};
  const Ids children = {20, 21, 22, 23, 24, 25, 26, 27, 28};
  const Ids parents(children.size(), 0);
  const Counts counts = {24, 1};
  const Counts known = {10, 10};
  const Counts many(2, 300);
  const std::vector<TokenId> generated = tokens(600);
  const std::string key = "an extra key that is longer than a small string may be";
  expect_whole_or_nothing("allocate",
                          [&](BlockManager& m) { m.allocate(7, prompt, std::nullopt, key); });
  expect_whole_or_nothing("append_batch", [&](BlockManager& m) { m.append_batch(ids, counts); });
  expect_whole_or_nothing("fork_batch", [&](BlockManager& m) { m.fork_batch(parents, children); });
  expect_whole_or_nothing("publish_batch",
                          [&](BlockManager& m) { m.publish_batch(ids, generated, many, known); });
  expect_whole_or_nothing("swap_out", [&](BlockManager& m) { m.swap_out(ids); });
  expect_whole_or_nothing("reset_prefix_cache", [](BlockManager& m) { m.reset_prefix_cache(); });
  expect_whole_or_nothing("swap_in", [&](BlockManager& m) { m.swap_in(third); });
}

TEST(MemoryFailure, leaves_moves_between_the_pools_as_they_were_in_every_call) {
  const std::vector<TokenId> cached = tokens(17);
  const Ids swapped = {3};
  const Ids running = {4};
  const Counts counts = {20};
  {
    OffloadingManager fresh;
    EXPECT_EQ(fresh.manager.allocate(7, cached), 16);
    EXPECT_LT(0, TestAccess::moves(fresh.manager).in.size());
    EXPECT_LT(0, TestAccess::moves(fresh.manager).out.size());
  }
  const auto expect = [](const char* name, auto call) {
    expect_whole_or_nothing<OffloadingManager>(name, call);
  };
  expect("allocate", [&](BlockManager& m) { m.allocate(7, cached); });
  expect("append_batch", [&](BlockManager& m) { m.append_batch(running, counts); });
  expect("swap_in", [&](BlockManager& m) { m.swap_in(swapped); });
  expect("swap_out", [&](BlockManager& m) { m.swap_out(running); });
}

TEST(MemoryFailure, ending_sequences_and_steps_needs_no_memory) {
  Manager fresh;
  const Ids ids = {0, 1, 3};
  const Counts counts = {1, 1, 1};
  fresh.manager.publish_batch(ids, tokens(3), counts,
                              Counts{10, 10, 6});  // the scratch list grows to the batch
  const Ids running = {0, 1};
  const Counts first_needed = {8, 8};
  num_until_failure = 0;
  const StepId step = fresh.manager.begin_step();
  const std::int64_t num_freed = fresh.manager.free_behind_batch(running, first_needed);
  fresh.manager.free_batch(ids);
  fresh.manager.end_step(step);
  const bool has_allocated = num_until_failure != 0;
  num_until_failure = -1;
  EXPECT_FALSE(has_allocated);
  EXPECT_LT(0, num_freed);
  EXPECT_EQ(fresh.manager.num_allocatable_blocks(), 12);
  fresh.manager.check_invariants();
}

TEST(MemoryFailure, leaves_step_tables_and_buffers_as_they_were) {
  for (long n = 0;; ++n) {
    Manager fresh;
    testing::PoisonedBuffers buffers(2, 8, 16, 2);
    const testing::PoisonedBuffers untouched = buffers;
    StepTables tables(fresh.manager, 2, 8);
    fresh.manager.append(1);
    const Ids ids = {1};
    const Counts one = {1};
    bool has_failed = false;
    num_until_failure = n;
    try {
      tables.write(ids, one, one, buffers.view(), true);
    } catch (const std::bad_alloc&) {
      has_failed = true;
    }
    num_until_failure = -1;
    if (!has_failed) {
      EXPECT_LT(0, n);
      break;
    }
    EXPECT_TRUE(buffers == untouched);
    EXPECT_EQ(tables.write(ids, one, one, buffers.view(), true), 1);
  }
}

}  // namespace
}  // namespace pagedkv
