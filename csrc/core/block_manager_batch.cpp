// BlockManager: append, fork and free. Each call first plans (throws, or leaves the caller room for
// all it does), then acts without a way to fail.

#include <algorithm>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {
namespace {

void check_same_size(const char* name, std::size_t got, std::size_t num_ids) {
  if (got != num_ids) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(got) +
                                " entries for " + std::to_string(num_ids) + " sequences");
  }
}

}  // namespace

void BlockManager::begin_batch(std::size_t num_ids) const {
  if (marks_.size() < sequences_.num_slots()) marks_.resize(sequences_.num_slots());
  ++last_mark_;
  slots_.clear();
  slots_.reserve(num_ids);
}

void BlockManager::resolve(std::span<const SeqId> ids) const {
  begin_batch(ids.size());
  for (const SeqId id : ids) {
    const std::int32_t slot = sequences_.slot(id);
    __builtin_prefetch(&sequences_.at(slot));
    if (!is_first_in_batch(slot)) {
      throw std::invalid_argument("seq_id " + std::to_string(id) + " stands twice in one batch");
    }
    slots_.push_back(slot);
  }
}

// Blocks that the appends take. Leaves the sequences' slots in slots_.
std::int64_t BlockManager::plan_append(std::span<const SeqId> ids,
                                       std::span<const std::int64_t> counts) const {
  check_same_size("counts", counts.size(), ids.size());
  resolve(ids);
  blocks_.clear();
  std::int64_t num_needed = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Sequence& sequence = sequences_.at(slots_[i]);
    const std::int64_t count = counts[i];
    if (count < 0 || count > kMaxSeqLen - sequence.num_tokens) {
      throw std::invalid_argument("seq_id " + std::to_string(ids[i]) + " of " +
                                  std::to_string(sequence.num_tokens) + " tokens cannot grow by " +
                                  std::to_string(count) + "; a count is between 0 and " +
                                  std::to_string(kMaxSeqLen - sequence.num_tokens));
    }
    if (sequence.is_swapped) {
      throw std::invalid_argument("seq_id " + std::to_string(ids[i]) +
                                  " is swapped out; swap it in before it grows");
    }
    if (count > sequence.num_unused) {
      num_needed += num_blocks_for(count - sequence.num_unused);
      __builtin_prefetch(sequence.table.data() + sequence.table.size(), 1);  // will be written
    }
    if (sequence.may_share_last && count > 0 && sequence.num_unused > 0 &&
        pool_.ref_count(sequence.table.back()) > 1) {
      blocks_.push_back(sequence.table.back());
    }
  }
  return num_needed + num_copies_of_shared();
}

// blocks_ has a shared last block once per sequence that is about to write it. Each of these copies
// it, except that the last holder left writes the block itself.
std::int64_t BlockManager::num_copies_of_shared() const {
  std::sort(blocks_.begin(), blocks_.end());
  std::int64_t num_copies = 0;
  for (auto at = blocks_.begin(); at != blocks_.end();) {
    const auto end = std::upper_bound(at, blocks_.end(), *at);
    num_copies += std::min<std::int64_t>(end - at, pool_.ref_count(*at) - 1);
    at = end;
  }
  return num_copies;
}

// Blocks that row i of the planned appends takes; a copy that its last holder is spared included.
std::int64_t BlockManager::num_blocks_taken(std::size_t i,
                                            std::span<const std::int64_t> counts) const {
  const Sequence& sequence = sequences_.at(slots_[i]);
  if (counts[i] == 0) return 0;
  const bool is_copied = sequence.may_share_last && sequence.num_unused > 0 &&
                         pool_.ref_count(sequence.table.back()) > 1;
  const std::int64_t num_grown = std::max<std::int64_t>(counts[i] - sequence.num_unused, 0);
  return num_blocks_for(num_grown) + is_copied;
}

std::int64_t BlockManager::num_blocks_needed(std::span<const SeqId> ids,
                                             std::span<const std::int64_t> counts) const {
  return plan_append(ids, counts);
}

std::vector<BlockCopy> BlockManager::append_batch(std::span<const SeqId> ids,
                                                  std::span<const std::int64_t> counts) {
  const std::int64_t num_needed = plan_append(ids, counts);
  if (num_needed > num_allocatable_blocks())
    throw_out_of_blocks("append", num_needed, num_allocatable_blocks());
  std::vector<BlockCopy> copies;
  copies.reserve(blocks_.size());
  reserve_moves(num_needed, num_needed);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_.at(slots_[i]);
    if (counts[i] <= sequence.num_unused) continue;
    const std::size_t size =
        sequence.table.size() +
        static_cast<std::size_t>(num_blocks_for(counts[i] - sequence.num_unused));
    if (size > sequence.table.capacity())
      sequence.table.reserve(std::max(size, 2 * sequence.table.capacity()));
  }
  // Free blocks count as the first rows', evicted ones as the later rows'.
  std::size_t row = 0;
  std::int64_t num_covered = -1;  // blocks that rows 0..row take; -1: not yet counted
  const std::int64_t num_free = pool_.num_free();
  make_room(num_needed, [&](std::int64_t num_freed) {
    if (num_covered < 0) num_covered = num_blocks_taken(0, counts);
    while (num_covered <= num_free + num_freed && row + 1 < ids.size())
      num_covered += num_blocks_taken(++row, counts);
    return ids[row];
  });
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_.at(slots_[i]);
    std::int64_t count = counts[i];
    if (count == 0) continue;
    if (sequence.may_share_last && sequence.num_unused > 0) {
      const BlockId last = sequence.table.back();
      if (pool_.ref_count(last) > 1) {
        const BlockId copy = take_block();
        copies.push_back({.source = last, .destination = copy});
        pool_.release(last);
        sequence.table.back() = copy;
        sequence.table_stamp = next_stamp();
        num_tokens_ += block_size_ - sequence.num_unused;
        ++num_copies_;
      }
    }
    sequence.may_share_last = false;
    sequence.num_tokens += count;
    num_tokens_ += count;
    while (count > sequence.num_unused) {
      count -= sequence.num_unused;
      sequence.table.push_back(take_block());
      sequence.num_unused = block_size_;
    }
    sequence.num_unused -= static_cast<std::int32_t>(count);
  }
  return copies;
}

void BlockManager::fork_batch(std::span<const SeqId> parents, std::span<const SeqId> children) {
  check_same_size("child_ids", children.size(), parents.size());
  slots_.clear();
  for (const SeqId id : parents) slots_.push_back(sequences_.slot(id));
  std::vector<SeqId> sorted(children.begin(), children.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (contains(sorted[i]))
      throw std::invalid_argument("seq_id " + std::to_string(sorted[i]) + " exists already");
    if (i > 0 && sorted[i] == sorted[i - 1]) {
      throw std::invalid_argument("seq_id " + std::to_string(sorted[i]) +
                                  " stands twice in one batch");
    }
  }
  sequences_.reserve(children.size());
  for (std::size_t i = 0; i < children.size(); ++i) {
    const Sequence& parent = sequences_.at(slots_[i]);
    sequences_.upcoming(i).table.reserve(parent.table.size() + 1);
    sequences_.upcoming(i).tokens.reserve(parent.tokens.size() - parent.tokens_begin + 1);
  }
  for (std::size_t i = 0; i < children.size(); ++i) {
    Sequence& child = sequences_.add(children[i]);
    Sequence& parent = sequences_.at(slots_[i]);
    parent.may_share_last = true;
    child.table_stamp = next_stamp();
    child.num_tokens = parent.num_tokens;
    child.num_known = parent.num_known;
    child.num_unused = parent.num_unused;
    child.num_published = parent.num_published;
    child.num_freed = parent.num_freed;
    child.may_share_last = true;
    child.is_swapped = parent.is_swapped;
    child.can_publish = parent.can_publish;
    child.root = parent.root;
    child.tokens.assign(parent.tokens.begin() + static_cast<std::ptrdiff_t>(parent.tokens_begin),
                        parent.tokens.end());
    child.table.assign(parent.table.begin(), parent.table.end());
    for (std::size_t j = static_cast<std::size_t>(child.num_freed); j < child.table.size(); ++j) {
      const BlockId block = child.table[j];
      block >= 0 ? pool_.add_ref(block) : cpu_pool_.add_ref(-1 - block);
    }
    if (child.root != kNoNode) cache_->add_root_holder(child.root);
  }
}

void BlockManager::free_batch(std::span<const SeqId> ids) {
  begin_batch(ids.size());
  for (const SeqId id : ids) {
    if (sequences_.was_freed(id)) {
      throw DoubleFree("seq_id " + std::to_string(id) + " was freed before");
    }
    const std::int32_t slot = sequences_.slot(id);
    if (!is_first_in_batch(slot)) {
      throw DoubleFree("seq_id " + std::to_string(id) + " stands twice in one batch to free");
    }
    slots_.push_back(slot);
  }
  for (const std::int32_t slot : slots_) {
    Sequence& sequence = sequences_.at(slot);
    release_table(sequence);
    if (sequence.root != kNoNode) cache_->release_root(sequence.root);
    sequences_.remove(slot);
  }
}

// Tail first: cached blocks go idle in this order, and the oldest idle one is evicted first.
void BlockManager::release_table(Sequence& sequence) {
  constexpr std::size_t kAhead = 12;
  const std::vector<BlockId>& table = sequence.table;
  const auto num_freed = static_cast<std::size_t>(sequence.num_freed);
  std::int64_t num_tokens = block_size_ - sequence.num_unused;  // in the block at hand
  for (std::size_t i = table.size(); i-- > num_freed; num_tokens = block_size_) {
    const BlockId block = table[i];
    if (i >= kAhead && table[i - kAhead] >= 0) pool_.prefetch(table[i - kAhead]);
    if (block < 0) {
      cpu_pool_.release(-1 - block);
    } else if (pool_.release(block)) {
      num_tokens_ -= num_tokens;
    }
  }
}

}  // namespace pagedkv
