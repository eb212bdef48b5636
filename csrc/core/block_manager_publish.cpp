// BlockManager: which computed blocks become findable, and what happens when equal content is
// findable already.

#include <algorithm>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {

void BlockManager::publish_batch(std::span<const SeqId> ids, std::span<const TokenId> tokens,
                                 std::span<const std::int64_t> counts,
                                 std::span<const std::int64_t> num_computed) {
  if (counts.size() != ids.size() || num_computed.size() != ids.size()) {
    throw std::invalid_argument("counts has " + std::to_string(counts.size()) +
                                " and num_computed_tokens " + std::to_string(num_computed.size()) +
                                " entries for " + std::to_string(ids.size()) + " sequences");
  }
  resolve(ids);
  std::int64_t num_left = static_cast<std::int64_t>(tokens.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Sequence& sequence = sequences_.at(slots_[i]);
    if (counts[i] < 0 || counts[i] > num_left) {
      throw std::invalid_argument("counts[" + std::to_string(i) + "] must be between 0 and the " +
                                  std::to_string(num_left) + " token_ids left, got " +
                                  std::to_string(counts[i]));
    }
    num_left -= counts[i];
    const std::int64_t num_known = sequence.num_known + counts[i];
    if (num_known > kMaxSeqLen) {
      throw std::invalid_argument("seq_id " + std::to_string(ids[i]) + " would know " +
                                  std::to_string(num_known) + " token ids, at most " +
                                  std::to_string(kMaxSeqLen) + " are allowed");
    }
    const std::int64_t limit = std::min(sequence.num_tokens, num_known);
    if (num_computed[i] < 0 || num_computed[i] > limit) {
      throw std::invalid_argument("num_computed_tokens of seq_id " + std::to_string(ids[i]) +
                                  " must be between 0 and " + std::to_string(limit) +
                                  " (it holds " + std::to_string(sequence.num_tokens) +
                                  " tokens and knows " + std::to_string(num_known) + " ids), got " +
                                  std::to_string(num_computed[i]));
    }
  }
  if (num_left != 0) {
    throw std::invalid_argument(
        "token_ids has " + std::to_string(tokens.size()) + " entries, counts add up to " +
        std::to_string(static_cast<std::int64_t>(tokens.size()) - num_left));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0) {
      throw std::invalid_argument("token_ids[" + std::to_string(i) + "] is " +
                                  std::to_string(tokens[i]) + "; ids are not negative");
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_.at(slots_[i]);
    const std::size_t size = sequence.tokens.size() + static_cast<std::size_t>(counts[i]);
    if (sequence.can_publish && size > sequence.tokens.capacity()) {
      sequence.tokens.reserve(std::max(size, 2 * sequence.tokens.capacity()));
    }
  }
  const TokenId* next = tokens.data();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_.at(slots_[i]);
    sequence.num_known += counts[i];
    if (sequence.can_publish) {
      sequence.tokens.insert(sequence.tokens.end(), next, next + counts[i]);
      // Most calls of a decoding sequence end here, without a division.
      if (num_computed[i] >= (sequence.num_published + std::int64_t{1}) * block_size_) {
        publish_blocks(sequence, num_computed[i] / block_size_);
      }
    }
    next += counts[i];
  }
}

// Publishes the blocks [num_published, num_full) as far as they are in the pool.
void BlockManager::publish_blocks(Sequence& sequence, std::int64_t num_full) {
  PrefixCache::Run run;
  while (sequence.num_published < num_full && sequence.can_publish) {
    const std::int32_t first = sequence.num_published;
    NodeId parent = first == 0 ? sequence.root : sequence.table[first - 1];
    if (parent >= 0 && !cache_->is_published(parent)) {
      stop_publishing(sequence);
      return;
    }
    const auto wanted =
        static_cast<std::int32_t>(std::min<std::int64_t>(num_full - first, PrefixCache::kMaxRun));
    std::int32_t num_blocks = 0;
    while (num_blocks < wanted && sequence.table[first + num_blocks] >= 0) {
      cache_->prefetch(sequence.table[first + num_blocks]);
      cache_->prefetch_row(sequence.table[first + num_blocks]);
      ++num_blocks;
    }
    if (num_blocks == 0) break;  // on the CPU; it is published after swap_in
    cache_->prepare(parent, sequence.tokens.data() + sequence.tokens_begin, num_blocks, run);
    for (std::int32_t i = 0; i < num_blocks && sequence.can_publish; ++i) {
      parent = publish_block(sequence, parent, run.keys[i]);
    }
  }
  // Cut off what is published once it is the larger part: each token moves at most once on average.
  if (2 * sequence.tokens_begin >= sequence.tokens.size()) {
    sequence.tokens.erase(
        sequence.tokens.begin(),
        sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.tokens_begin));
    sequence.tokens_begin = 0;
  }
}

// Publishes the next block of a sequence; returns the block that now stands for its content.
BlockId BlockManager::publish_block(Sequence& sequence, NodeId parent, const Hash128& key) {
  BlockId& entry = sequence.table[sequence.num_published];
  const TokenId* tokens = sequence.tokens.data() + sequence.tokens_begin;
  const auto found = cache_->find(parent, key, tokens);
  if (!found) {
    if (cache_->is_published(entry)) {
      // A fork published it below another parent that has gone from this table since.
      stop_publishing(sequence);
      return entry;
    }
    cache_->insert(entry, parent, key, tokens);
  } else if (*found != entry) {
    // Computed twice. Keeping both would let the findable one be evicted while blocks below it are
    // held.
    if (pool_.ref_count(*found) == 0) num_tokens_ += block_size_;
    pool_.add_ref(*found);
    if (pool_.release(entry, is_cached(entry))) num_tokens_ -= block_size_;
    entry = *found;
    sequence.table_stamp = next_stamp();
  }
  ++sequence.num_published;
  sequence.tokens_begin += static_cast<std::size_t>(block_size_);
  return entry;
}

void BlockManager::stop_publishing(Sequence& sequence) {
  sequence.can_publish = false;
  sequence.tokens.clear();
  sequence.tokens_begin = 0;
}

}  // namespace pagedkv
