// What the checks need around a manager: prompts, its whole state as text (to show that a refused
// call changed nothing), and TestAccess, which reaches inside to corrupt it (to show that
// check_invariants notices).

#pragma once

#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "pagedkv/core/block_manager.h"

namespace pagedkv {

// Friend of the core's classes.
struct TestAccess {
  static BlockAllocator& pool(BlockManager& manager) { return manager.pool_; }
  static BlockAllocator& cpu_pool(BlockManager& manager) { return manager.cpu_pool_; }
  static PrefixCache& cache(BlockManager& manager) { return *manager.cache_; }
  static const std::optional<PrefixCache>& cache(const BlockManager& manager) {
    return manager.cache_;
  }
  static SequenceTable& sequences(BlockManager& manager) { return manager.sequences_; }
  static Sequence& sequence(BlockManager& manager, SeqId id) {
    return manager.sequences_.at(manager.sequences_.slot(id));
  }
  static std::int64_t& num_tokens(BlockManager& manager) { return manager.num_tokens_; }

  static const Moves& moves(const BlockManager& manager) { return manager.moves_; }
  static const auto& held_cpu_blocks(const BlockManager& manager) {
    return manager.held_cpu_blocks_;
  }
  static auto& held_cpu_blocks(BlockManager& manager) { return manager.held_cpu_blocks_; }
  static std::size_t num_evicted(const BlockManager& manager) { return manager.num_noted_; }

  static auto& meta(BlockAllocator& pool, BlockId block) { return pool.meta_[block]; }
  static auto& free_list(BlockAllocator& pool) { return pool.free_; }
  static auto& num_in(BlockAllocator& pool, BlockState state) {
    return pool.num_in_[static_cast<int>(state)];
  }
  static auto& num_shared(BlockAllocator& pool) { return pool.num_shared_; }
  static auto& num_returning(BlockAllocator& pool) { return pool.num_returning_; }
  // As though so many steps had ended.
  static void skip_steps(BlockAllocator& pool, StepId num_steps) {
    pool.first_step_ += num_steps;
    pool.next_step_ += num_steps;
  }

  static auto& entry(PrefixCache& cache, BlockId block) { return cache.entries_[block]; }
  static auto& token(PrefixCache& cache, BlockId block, int offset) {
    return cache.tokens_[static_cast<std::size_t>(block) * cache.block_size_ + offset];
  }
  static NodeId num_nodes(const PrefixCache& cache) {
    return static_cast<NodeId>(cache.entries_.size());
  }
  static auto& places(PrefixCache& cache) { return cache.places_; }
  static std::size_t num_roots(const PrefixCache& cache) { return cache.roots_by_key_.size(); }
  static std::int64_t num_roots(const BlockManager& manager) {
    return manager.cache_ ? static_cast<std::int64_t>(num_roots(*manager.cache_)) : 0;
  }
};

namespace testing {

// first, first + 1, ...
inline std::vector<TokenId> tokens(std::int64_t count, TokenId first = 1) {
  std::vector<TokenId> made(static_cast<std::size_t>(count));
  std::iota(made.begin(), made.end(), first);
  return made;
}

inline std::vector<TokenId> joined(std::vector<TokenId> head, const std::vector<TokenId>& tail) {
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

inline std::vector<BlockId> table(const BlockManager& manager, SeqId id) {
  return manager.sequence(id).table;
}

// Allocates and, as if a step had run, publishes the whole prompt.
inline std::int64_t prefill(BlockManager& manager, SeqId id, const std::vector<TokenId>& prompt,
                            std::string_view extra_key = {}) {
  const std::int64_t num_cached = manager.allocate(id, prompt, std::nullopt, extra_key);
  manager.publish(id, {}, static_cast<std::int64_t>(prompt.size()));
  return num_cached;
}

// Everything a caller can see and everything that decides what it will see next.
inline std::string state_of(const BlockManager& manager) {
  std::ostringstream out;
  const Statistics s = manager.statistics();
  out << s.num_free << ' ' << s.num_cached_idle << ' ' << s.num_referenced << ' ' << s.num_shared
      << ' ' << s.num_in_transit << ' ' << s.num_draining << ' ' << s.num_cpu_free << ' '
      << s.num_sequences << ' ' << s.num_tokens << ' ' << s.prefix_cache_queries << ' '
      << s.prefix_cache_hits << ' ' << s.num_evictions << ' ' << s.num_copies << ' '
      << s.num_swapped_out << ' ' << s.num_swapped_in << '\n';
  const PrefixMiss& miss = manager.last_miss();
  out << static_cast<int>(miss.reason) << ' ' << miss.evicted_in << ' ' << miss.evicted_for << ' '
      << TestAccess::num_evicted(manager) << '\n';
  out << s.num_cpu_cached_idle << ' ' << s.prefix_cache_cpu_hits << ' ' << s.num_offloaded << ' '
      << s.num_onloaded << ' ' << s.num_offload_drops << ' ' << manager.swap_in_cost() << ' '
      << check::show(TestAccess::moves(manager).out) << check::show(TestAccess::moves(manager).in)
      << check::show(TestAccess::held_cpu_blocks(manager)) << '\n';
  const auto snapshot = manager.snapshot();
  out << check::show(snapshot->ref_counts) << check::show(snapshot->states)
      << check::show(snapshot->cpu_states) << check::show(snapshot->seq_ids)
      << check::show(snapshot->block_ids) << check::show(snapshot->seq_start_loc) << '\n';
  for (const std::int32_t slot : manager.sequences().live_slots()) {
    const Sequence& q = manager.sequences().at(slot);
    out << q.id << ' ' << q.num_tokens << ' ' << q.num_known << ' ' << q.num_unused << ' '
        << q.num_published << ' ' << q.num_freed << ' ' << q.is_swapped << q.can_publish << ' '
        << q.root << ' ' << q.table_stamp << ' '
        << check::show(std::vector<TokenId>(
               q.tokens.begin() + static_cast<std::ptrdiff_t>(q.tokens_begin), q.tokens.end()))
        << '\n';
  }
  if (const auto& cache = TestAccess::cache(manager)) {
    out << cache->num_published() << " published, " << TestAccess::num_roots(*cache) << " roots:";
    for (NodeId node = 0; node < TestAccess::num_nodes(*cache); ++node)
      out << ' ' << cache->parent(node);
  }
  return out.str();
}

// A call that must be refused: the error with this text, the state as before, the invariants whole.
#define EXPECT_REFUSED(manager, statement, Error, part)                     \
  do {                                                                      \
    const std::string state_before = ::pagedkv::testing::state_of(manager); \
    EXPECT_THROW(statement, Error, part);                                   \
    EXPECT_EQ(::pagedkv::testing::state_of(manager), state_before);         \
    (manager).check_invariants();                                           \
  } while (false)

}  // namespace testing
}  // namespace pagedkv
