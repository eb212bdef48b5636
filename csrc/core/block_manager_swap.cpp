// BlockManager: swapping between the pool and the CPU pool. As in the batches: plan first, then act
// without a way to fail.

#include <algorithm>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {
namespace {

// Where a block moves to; found by binary search, since a swap's own work (hashing aside) is a sort
// already.
struct Move {
  BlockId source;
  BlockId destination = kNoNode;  // kNoNode: not moved yet
};

std::vector<Move> moves_of(const std::vector<BlockId>& sorted) {
  std::vector<Move> moves;
  moves.reserve(sorted.size());
  for (const BlockId block : sorted) moves.push_back({.source = block});
  return moves;
}

Move* find_move(std::vector<Move>& moves, BlockId source) {
  const auto at =
      std::lower_bound(moves.begin(), moves.end(), source,
                       [](const Move& move, BlockId block) { return move.source < block; });
  return at != moves.end() && at->source == source ? &*at : nullptr;
}

}  // namespace

std::int64_t BlockManager::num_tokens_in(const Sequence& sequence, std::size_t index) const {
  return index + 1 < sequence.table.size() ? block_size_ : block_size_ - sequence.num_unused;
}

// Blocks all of whose holders are among slots_, in rising order; not those whose content comes from
// the CPU pool only in the step being built.
std::vector<BlockId> BlockManager::held_alone() const {
  std::vector<BlockId> blocks;
  for (const std::int32_t slot : slots_) {
    const Sequence& sequence = sequences_.at(slot);
    if (sequence.is_swapped) {
      throw std::invalid_argument("seq_id " + std::to_string(sequence.id) +
                                  " is swapped out already");
    }
    blocks.insert(blocks.end(), sequence.table.begin() + sequence.num_freed, sequence.table.end());
  }
  std::sort(blocks.begin(), blocks.end());
  std::size_t num_kept = 0;
  for (std::size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
    while (end < blocks.size() && blocks[end] == blocks[begin]) ++end;
    if (static_cast<std::int64_t>(end - begin) == pool_.ref_count(blocks[begin]) &&
        !is_arriving(blocks[begin]))
      blocks[num_kept++] = blocks[begin];
  }
  blocks.resize(num_kept);
  return blocks;
}

// CPU blocks that slots_ hold, each once, in rising order.
std::vector<BlockId> BlockManager::cpu_blocks() const {
  std::vector<BlockId> blocks;
  for (const std::int32_t slot : slots_) {
    const Sequence& sequence = sequences_.at(slot);
    if (!sequence.is_swapped) {
      throw std::invalid_argument("seq_id " + std::to_string(sequence.id) + " is not swapped out");
    }
    for (std::size_t i = static_cast<std::size_t>(sequence.num_freed); i < sequence.table.size();
         ++i) {
      if (sequence.table[i] < 0) blocks.push_back(-1 - sequence.table[i]);
    }
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  return blocks;
}

std::int64_t BlockManager::num_swap_out_blocks(std::span<const SeqId> ids) const {
  resolve(ids);
  return static_cast<std::int64_t>(held_alone().size());
}

std::int64_t BlockManager::num_swap_in_blocks(std::span<const SeqId> ids) const {
  resolve(ids);
  return static_cast<std::int64_t>(cpu_blocks().size());
}

// The ids of a sequence's blocks [first, num_published), which the cache has, and those that
// follow.
std::vector<TokenId> BlockManager::tokens_from(const Sequence& sequence, std::int32_t first) const {
  std::vector<TokenId> tokens;
  tokens.reserve(static_cast<std::size_t>(sequence.num_published - first) *
                     static_cast<std::size_t>(block_size_) +
                 sequence.tokens.size() - sequence.tokens_begin);
  for (std::int32_t i = first; i < sequence.num_published; ++i) {
    const TokenId* of_block = cache_->tokens(sequence.table[i]);
    tokens.insert(tokens.end(), of_block, of_block + block_size_);
  }
  tokens.insert(tokens.end(),
                sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.tokens_begin),
                sequence.tokens.end());
  return tokens;
}

std::vector<BlockCopy> BlockManager::swap_out(std::span<const SeqId> ids) {
  resolve(ids);
  std::vector<Move> moves = moves_of(held_alone());
  if (static_cast<std::int64_t>(moves.size()) > cpu_pool_.num_allocatable()) {
    throw OutOfBlocks("swap_out needs " + std::to_string(moves.size()) + " CPU blocks, " +
                      std::to_string(cpu_pool_.num_allocatable()) + " of " +
                      std::to_string(cpu_pool_.num_blocks()) + " can be taken");
  }
  // A sequence publishes again from its first moved block on, when it is back: the block it comes
  // back to is another one, and its ids are needed then.
  struct Unpublished {
    std::int32_t first = 0;
    bool is_chain_whole = true;
    std::vector<TokenId> tokens;
  };
  std::vector<Unpublished> unpublished(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Sequence& sequence = sequences_.at(slots_[i]);
    Unpublished& of = unpublished[i];
    of.first = sequence.num_published;
    if (!sequence.can_publish) continue;
    for (std::int32_t j = sequence.num_published; j-- > sequence.num_freed;) {
      if (!cache_->is_published(sequence.table[j])) of.is_chain_whole = false;
      if (find_move(moves, sequence.table[j]) != nullptr) of.first = j;
    }
    // Behind a window the parent of the first block left is not held, so nothing could follow it.
    if (of.first == sequence.num_freed && of.first > 0) of.is_chain_whole = false;
    if (of.is_chain_whole && of.first < sequence.num_published)
      of.tokens = tokens_from(sequence, of.first);
  }
  std::vector<BlockCopy> copies;
  copies.reserve(moves.size());

  while (cpu_pool_.num_free() < static_cast<std::int32_t>(moves.size()))
    drop(cpu_node(cpu_pool_.oldest_idle().value()), ids.front());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_.at(slots_[i]);
    for (std::size_t j = static_cast<std::size_t>(sequence.num_freed); j < sequence.table.size();
         ++j) {
      BlockId& entry = sequence.table[j];
      Move* move = find_move(moves, entry);
      if (move == nullptr) continue;
      if (move->destination == kNoNode) {
        move->destination = cpu_pool_.allocate();
        copies.push_back({.source = entry, .destination = move->destination});
        num_tokens_ -= num_tokens_in(sequence, j);
      } else {
        cpu_pool_.add_ref(move->destination);
      }
      pool_.release_in_transit(entry);
      entry = -1 - move->destination;
    }
    sequence.is_swapped = true;
    sequence.table_stamp = next_stamp();
    if (!unpublished[i].is_chain_whole) {
      stop_publishing(sequence);
    } else if (unpublished[i].first < sequence.num_published) {
      sequence.num_published = unpublished[i].first;
      sequence.tokens = std::move(unpublished[i].tokens);
      sequence.tokens_begin = 0;
    }
  }
  num_swapped_out_ += static_cast<std::int64_t>(copies.size());
  return copies;
}

std::vector<BlockCopy> BlockManager::swap_in(std::span<const SeqId> ids) {
  resolve(ids);
  std::vector<Move> moves = moves_of(cpu_blocks());
  if (static_cast<std::int64_t>(moves.size()) > num_allocatable_blocks()) {
    throw_out_of_blocks("swap_in", static_cast<std::int64_t>(moves.size()),
                        num_allocatable_blocks());
  }
  std::vector<BlockCopy> copies;
  copies.reserve(moves.size());
  reserve_moves(static_cast<std::int64_t>(moves.size()),
                2 * static_cast<std::int64_t>(moves.size()));
  make_room(static_cast<std::int64_t>(moves.size()), [ids](std::int64_t) { return ids.front(); });

  for (const std::int32_t slot : slots_) {
    Sequence& sequence = sequences_.at(slot);
    for (std::size_t j = static_cast<std::size_t>(sequence.num_freed); j < sequence.table.size();
         ++j) {
      BlockId& entry = sequence.table[j];
      if (entry >= 0) continue;
      const BlockId cpu_block = -1 - entry;
      Move* move = find_move(moves, cpu_block);
      if (move->destination == kNoNode) {
        move->destination = take_block();
        forget_arrival(move->destination);
        pool_.mark_in_transit(move->destination);
        copies.push_back({.source = cpu_block, .destination = move->destination});
        if (has_offloading_) hold_cpu_block(cpu_block);
        num_tokens_ += num_tokens_in(sequence, j);
      } else {
        pool_.add_ref(move->destination);
      }
      cpu_pool_.release(cpu_block);
      entry = move->destination;
    }
    sequence.is_swapped = false;
    sequence.may_share_last = true;
    sequence.table_stamp = next_stamp();
  }
  num_swapped_in_ += static_cast<std::int64_t>(copies.size());
  return copies;
}

}  // namespace pagedkv
