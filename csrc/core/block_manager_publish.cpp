// BlockManager: which computed blocks become findable, and what happens when equal content is
// findable already.

#include <algorithm>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {

// Throws, or the batch can be published. Leaves the sequences' slots in slots_.
void BlockManager::check_publish(std::span<const SeqId> ids, std::span<const TokenId> tokens,
                                 std::span<const std::int64_t> counts,
                                 std::span<const std::int64_t> num_computed) const {
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
    __builtin_prefetch(sequence.tokens.data() + sequence.tokens.size(), 1);  // will be written
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
}

void BlockManager::publish_batch(std::span<const SeqId> ids, std::span<const TokenId> tokens,
                                 std::span<const std::int64_t> counts,
                                 std::span<const std::int64_t> num_computed) {
  check_publish(ids, tokens, counts, num_computed);
  due_.clear();
  due_.reserve(ids.size());
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
      if (counts[i] == 1) {
        sequence.tokens.push_back(*next);
      } else {
        sequence.tokens.insert(sequence.tokens.end(), next, next + counts[i]);
      }
      // A decoding sequence completes a block now and then; seen without a division.
      if (num_computed[i] >= (sequence.num_published + std::int64_t{1}) * block_size_) {
        due_.push_back(i);
        const std::int32_t at = sequence.num_published;
        if (at > 0 && sequence.table[at - 1] >= 0) cache_->prefetch(sequence.table[at - 1]);
      }
    }
    next += counts[i];
  }
  publish_due(num_computed);
}

// Publishes the rows due_, some at a time: first the hashes of each one's next blocks, which bring
// the memory they lead to on its way, then the blocks.
void BlockManager::publish_due(std::span<const std::int64_t> num_computed) {
  constexpr std::size_t kGroup = 16;
  PrefixCache::Run runs[kGroup];
  for (std::size_t begin = 0; begin < due_.size(); begin += kGroup) {
    const std::span<const std::size_t> group(due_.data() + begin,
                                             std::min(kGroup, due_.size() - begin));
    for (std::size_t i = 0; i < group.size(); ++i) {
      const Sequence& sequence = sequences_.at(slots_[group[i]]);
      runs[i].num_blocks = prepare_run(sequence, num_computed[group[i]] / block_size_, runs[i]);
    }
    for (std::size_t i = 0; i < group.size(); ++i) {
      Sequence& sequence = sequences_.at(slots_[group[i]]);
      publish_blocks(sequence, num_computed[group[i]] / block_size_, runs[i]);
    }
  }
}

// Prepares the next blocks that can be published; returns how many. None if the chain is broken, or
// the next block is on the CPU: it is published after swap_in.
std::int32_t BlockManager::prepare_run(const Sequence& sequence, std::int64_t num_full,
                                       PrefixCache::Run& run) const {
  const std::int32_t first = sequence.num_published;
  const NodeId parent = first == 0 ? sequence.root : sequence.table[first - 1];
  if (first > 0 && (parent < 0 || !cache_->is_published(parent))) return 0;
  const auto wanted =
      static_cast<std::int32_t>(std::min<std::int64_t>(num_full - first, PrefixCache::kMaxRun));
  std::int32_t num_blocks = 0;
  while (num_blocks < wanted && sequence.table[first + num_blocks] >= 0) {
    pool_.prefetch(sequence.table[first + num_blocks]);
    cache_->prefetch(sequence.table[first + num_blocks]);
    cache_->prefetch_row(sequence.table[first + num_blocks]);
    ++num_blocks;
  }
  cache_->prepare(parent, sequence.tokens.data() + sequence.tokens_begin, num_blocks, run);
  return num_blocks;
}

// Publishes the blocks [num_published, num_full) as far as they are in the pool. run is prepared.
void BlockManager::publish_blocks(Sequence& sequence, std::int64_t num_full,
                                  PrefixCache::Run& run) {
  while (sequence.can_publish && run.num_blocks > 0) {
    const std::int32_t first = sequence.num_published;
    NodeId parent = first == 0 ? sequence.root : sequence.table[first - 1];
    for (std::int32_t i = 0; i < run.num_blocks && sequence.can_publish; ++i) {
      parent = publish_block(sequence, parent, run.keys[i]);
    }
    run.num_blocks = sequence.num_published < num_full && sequence.can_publish
                         ? prepare_run(sequence, num_full, run)
                         : 0;
  }
  if (sequence.can_publish && sequence.num_published < num_full &&
      sequence.table[sequence.num_published] >= 0) {
    stop_publishing(sequence);  // what lies before has been forgotten
    return;
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
    pool_.set_findable(entry);
  } else if (is_cpu_node(*found)) {
    // Computed again though the CPU pool has it. Content is in one place: in the pool, then.
    if (cache_->is_published(entry)) {
      stop_publishing(sequence);  // as above
      return entry;
    }
    cache_->move(*found, entry);
    cpu_pool_.forget(cpu_block_of(*found));
    pool_.set_findable(entry);
  } else if (*found != entry) {
    // Computed twice. Keeping both would let the findable one be evicted while blocks below it are
    // held.
    if (pool_.ref_count(*found) == 0) num_tokens_ += block_size_;
    pool_.add_ref(*found);
    if (pool_.release(entry)) num_tokens_ -= block_size_;
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
