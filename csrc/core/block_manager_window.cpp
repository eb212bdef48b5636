// BlockManager: what a sliding window lets go of. Blocks wholly before the window are given back as
// a sequence grows, and a prefix hit never takes them.

#include <algorithm>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {

// Tokens before the next one to compute whose blocks stay held: those that it sees, and in any case
// the last published block, which is the parent of the next.
std::int64_t BlockManager::kept_tokens(std::int64_t window) const {
  return std::max<std::int64_t>(window - 1, block_size_);
}

// The kept tokens and num_tokens new ones, without a gap; at worst the first of them is the last of
// its block: 1 + ceil((n - 1) / block_size) blocks for n tokens.
std::int64_t BlockManager::max_window_blocks(std::int64_t window, std::int64_t num_tokens) const {
  if (window < 1 || window > kMaxSeqLen || num_tokens < 0 || num_tokens > kMaxSeqLen) {
    throw std::invalid_argument("window must be between 1 and " + std::to_string(kMaxSeqLen) +
                                " and num_tokens between 0 and " + std::to_string(kMaxSeqLen) +
                                ", got " + std::to_string(window) + " and " +
                                std::to_string(num_tokens));
  }
  return 1 + num_blocks_for(kept_tokens(window) + num_tokens - 1);
}

// Of the hits in blocks_: those that a sequence which goes on after them does not need any more.
std::int32_t BlockManager::num_hits_behind(std::int64_t window) const {
  if (window == 0) return 0;
  const std::int64_t num_cached = static_cast<std::int64_t>(blocks_.size()) * block_size_;
  return static_cast<std::int32_t>(std::max<std::int64_t>(num_cached - kept_tokens(window), 0) /
                                   block_size_);
}

// The first num_hits hits in blocks_ count as used, though nobody holds them: the head last, so
// that it is evicted after what lies below it.
void BlockManager::touch_hits_behind(std::int32_t num_hits) {
  for (std::int32_t i = num_hits; i-- > 0;) {
    const NodeId node = blocks_[static_cast<std::size_t>(i)];
    is_cpu_node(node) ? cpu_pool_.touch(cpu_block_of(node)) : pool_.touch(node);
  }
}

std::int64_t BlockManager::free_behind_batch(std::span<const SeqId> ids,
                                             std::span<const std::int64_t> first_needed) {
  if (first_needed.size() != ids.size()) {
    throw std::invalid_argument("first_needed_tokens has " + std::to_string(first_needed.size()) +
                                " entries for " + std::to_string(ids.size()) + " sequences");
  }
  resolve(ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Sequence& sequence = sequences_.at(slots_[i]);
    if (first_needed[i] < 0 || first_needed[i] > sequence.num_tokens) {
      throw std::invalid_argument(
          "first_needed_token of seq_id " + std::to_string(ids[i]) + " must be between 0 and its " +
          std::to_string(sequence.num_tokens) + " tokens, got " + std::to_string(first_needed[i]));
    }
    if (sequence.is_swapped) {
      throw std::invalid_argument("seq_id " + std::to_string(ids[i]) +
                                  " is swapped out; swap it in before its blocks are freed");
    }
  }
  std::int64_t num_freed = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    num_freed += free_leading_blocks(sequences_.at(slots_[i]),
                                     static_cast<std::int32_t>(first_needed[i] / block_size_));
  }
  return num_freed;
}

// Gives back the blocks [num_freed, end), all of them full.
std::int64_t BlockManager::free_leading_blocks(Sequence& sequence, std::int32_t end) {
  if (end <= sequence.num_freed) return 0;
  if (sequence.can_publish && end > sequence.num_published) {
    stop_publishing(sequence);  // the chain would have a gap
  } else if (sequence.can_publish && end == sequence.num_published) {
    --end;
  }
  const std::int32_t begin = sequence.num_freed;
  // The last one first, as in release_table.
  for (std::int32_t i = end; i-- > begin;) {
    BlockId& entry = sequence.table[static_cast<std::size_t>(i)];
    if (pool_.release(entry)) num_tokens_ -= block_size_;
    entry = kFreedBlock;
  }
  sequence.num_freed = end;
  return end - begin;
}

}  // namespace pagedkv
