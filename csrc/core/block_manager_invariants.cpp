// BlockManager::check_invariants: recomputes from the block tables what the counters and lists
// claim.

#include <algorithm>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {
namespace {

[[noreturn]] void fail(const std::string& what) { throw InvariantViolation(what); }

void check_ref_counts(const BlockAllocator& pool, const std::vector<std::int32_t>& num_holders,
                      const char* name) {
  for (BlockId block = 0; block < pool.num_blocks(); ++block) {
    if (pool.ref_count(block) != num_holders[block]) {
      fail("I2: " + std::string(name) + " block " + std::to_string(block) + " has ref count " +
           std::to_string(pool.ref_count(block)) + " and " + std::to_string(num_holders[block]) +
           " holders");
    }
  }
}

}  // namespace

void BlockManager::check_invariants() const {
  pool_.check();
  cpu_pool_.check();
  if (cache_) cache_->check();

  std::vector<std::int32_t> num_holders(static_cast<std::size_t>(pool_.num_blocks()));
  std::vector<std::int32_t> num_cpu_holders(static_cast<std::size_t>(cpu_pool_.num_blocks()));
  std::vector<bool> is_counted(num_holders.size());
  std::int64_t num_tokens = 0;
  const std::vector<std::int32_t> slots = sequences_.live_slots();
  if (static_cast<std::int64_t>(slots.size()) != sequences_.size()) fail("I2: sequences are lost");
  for (const std::int32_t slot : slots) {
    const Sequence& sequence = sequences_.at(slot);
    const std::string name = "seq_id " + std::to_string(sequence.id);
    if (sequences_.find(sequence.id) != slot) fail("I2: " + name + " is not found under its id");
    if (static_cast<std::int64_t>(sequence.table.size()) * block_size_ !=
            sequence.num_tokens + sequence.num_unused ||
        sequence.num_unused < 0 || sequence.num_unused >= block_size_) {
      fail("I2: " + name + " holds " + std::to_string(sequence.table.size()) + " blocks for " +
           std::to_string(sequence.num_tokens) + " tokens and " +
           std::to_string(sequence.num_unused) + " unused");
    }
    check_freed(sequence, name);
    const auto num_freed = static_cast<std::size_t>(sequence.num_freed);
    std::vector<BlockId> sorted(sequence.table.begin() + sequence.num_freed, sequence.table.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      fail("I2: " + name + " holds a block twice");
    for (std::size_t i = num_freed; i < sequence.table.size(); ++i) {
      const BlockId entry = sequence.table[i];
      if (entry < 0) {
        if (!sequence.is_swapped) fail("I7: " + name + " is not swapped out and has CPU blocks");
        ++num_cpu_holders[static_cast<std::size_t>(-1 - entry)];
        if (cpu_pool_.is_findable(-1 - entry))
          fail("I7: " + name + " holds a CPU block that can be found, as if it were full for good");
        continue;
      }
      ++num_holders[static_cast<std::size_t>(entry)];
      if (is_counted[static_cast<std::size_t>(entry)]) continue;
      is_counted[static_cast<std::size_t>(entry)] = true;
      num_tokens += num_tokens_in(sequence, i);
    }
    if (!sequence.may_share_last && !sequence.table.empty() && sequence.num_unused > 0 &&
        sequence.table.back() >= 0 && pool_.ref_count(sequence.table.back()) > 1) {
      fail("I5: " + name + " would write its shared last block without a copy");
    }
    check_published(sequence, name);
  }
  for (const BlockId cpu_block : held_cpu_blocks_)
    ++num_cpu_holders[static_cast<std::size_t>(cpu_block)];
  for (const BlockCopy& move : moves_.out) check_is_held(move.destination);
  for (const BlockCopy& move : moves_.in) check_is_held(move.source);
  check_ref_counts(pool_, num_holders, "pool");
  check_ref_counts(cpu_pool_, num_cpu_holders, "CPU");
  if (num_tokens != num_tokens_) {
    fail("I2: the pool holds " + std::to_string(num_tokens) + " tokens, counted " +
         std::to_string(num_tokens_));
  }
  const auto check_findable = [&](const BlockAllocator& pool, BlockId block, NodeId node) {
    const bool is_published = cache_ && node != kNoNode && cache_->is_published(node);
    if (pool.is_findable(block) == is_published) return;
    fail("I4: " + std::string(&pool == &pool_ ? "" : "CPU ") + "block " + std::to_string(block) +
         (is_published ? " is" : " is not") + " published, and its record says otherwise");
  };
  for (BlockId block = 0; block < pool_.num_blocks(); ++block) check_findable(pool_, block, block);
  for (BlockId block = 0; block < cpu_pool_.num_blocks(); ++block)
    check_findable(cpu_pool_, block, has_offloading_ ? cpu_node(block) : kNoNode);
}

void BlockManager::check_is_held(BlockId cpu_block) const {
  if (std::find(held_cpu_blocks_.begin(), held_cpu_blocks_.end(), cpu_block) ==
      held_cpu_blocks_.end()) {
    fail("I7: CPU block " + std::to_string(cpu_block) + " is part of a move and could be reused");
  }
}

// The entries behind the window are the leading ones, and what could be published next has its
// parent.
void BlockManager::check_freed(const Sequence& sequence, const std::string& name) const {
  const auto num_freed = static_cast<std::size_t>(sequence.num_freed);
  if (num_freed > sequence.table.size()) fail("I2: " + name + " gave back more than its table has");
  for (std::size_t i = 0; i < sequence.table.size(); ++i) {
    if ((sequence.table[i] == kFreedBlock) != (i < num_freed)) {
      fail("I2: " + name + " gave back " + std::to_string(num_freed) +
           " leading blocks, and its entry " + std::to_string(i) + " says otherwise");
    }
  }
  if (sequence.can_publish && num_freed > 0 && sequence.num_freed >= sequence.num_published) {
    fail("I4: " + name + " could publish a block whose parent it does not hold");
  }
}

void BlockManager::check_published(const Sequence& sequence, const std::string& name) const {
  const std::int64_t num_published_tokens =
      static_cast<std::int64_t>(sequence.num_published) * block_size_;
  if (num_published_tokens > sequence.num_tokens)
    fail("I4: " + name + " published blocks it does not fill");
  if (sequence.can_publish && num_published_tokens +
                                      static_cast<std::int64_t>(sequence.tokens.size()) -
                                      static_cast<std::int64_t>(sequence.tokens_begin) !=
                                  sequence.num_known) {
    fail("I4: " + name + " does not keep the ids that follow its published blocks");
  }
  for (std::int32_t i = sequence.num_freed; i < sequence.num_published; ++i) {
    const BlockId block = sequence.table[i];
    if (block < 0 || !pool_.is_findable(block))
      break;  // the chain was broken; the next publish finds out
    if (i > 0 && i == sequence.num_freed) continue;  // its parent is not held any more
    if (cache_->parent(block) != (i == 0 ? sequence.root : sequence.table[i - 1])) {
      fail("I4: " + name + " has published block " + std::to_string(block) +
           " below another parent");
    }
  }
}

}  // namespace pagedkv
