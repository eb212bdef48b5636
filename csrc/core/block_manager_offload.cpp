// BlockManager: the CPU pool as the second level of the prefix cache. What moves where, and which
// CPU blocks must be left alone until it has moved.

#include <algorithm>
#include <cmath>

#include "pagedkv/core/block_manager.h"

namespace pagedkv {

void BlockManager::set_swap_in_cost(double cost) {
  if (!(std::isfinite(cost) && cost >= 0.0)) {
    throw std::invalid_argument("swap_in_cost must be at least 0 and finite, got " +
                                std::to_string(cost));
  }
  swap_in_cost_ = cost;
}

Moves BlockManager::take_moves() {
  Moves taken = std::move(moves_);
  moves_ = Moves{};
  return taken;
}

// Room for moves, and for held CPU blocks, so that nothing below can fail.
void BlockManager::reserve_moves(std::int64_t num_out, std::int64_t num_held) {
  if (!has_offloading_) return;
  const auto reserve = [](auto& vector, std::int64_t num_more) {
    const std::size_t size = vector.size() + static_cast<std::size_t>(num_more);
    if (size > vector.capacity()) vector.reserve(std::max(size, 2 * vector.capacity()));
  };
  reserve(moves_.out, num_out);
  reserve(moves_.in, num_held);
  reserve(held_cpu_blocks_, num_held);
}

// A move of the step being built reads or writes it.
void BlockManager::hold_cpu_block(BlockId cpu_block) {
  cpu_pool_.add_ref(cpu_block);
  held_cpu_blocks_.push_back(cpu_block);
}

// How many of the hits in blocks_ to take: where the sum of what they save, one each, less what
// bringing them back costs is largest.
std::size_t BlockManager::worthwhile_hits() const {
  if (swap_in_cost_ < 1.0) return blocks_.size();
  double saved = 0.0;
  double most = 0.0;
  std::size_t num_hits = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    saved += is_cpu_node(blocks_[i]) ? 1.0 - swap_in_cost_ : 1.0;
    if (saved <= most) continue;
    most = saved;
    num_hits = i + 1;
  }
  return num_hits;
}

// An idle block gives up its content, to the CPU pool if that has or can make room.
void BlockManager::evict(BlockId victim, SeqId for_whom) {
  // What arrives only in the step being built cannot leave in it.
  if (!has_offloading_ || swap_in_cost_ >= 1.0 || is_arriving(victim) || !make_cpu_room(for_whom)) {
    return drop(victim, for_whom);
  }
  if (!cache_->is_published(victim)) return;  // what was dropped there had it below it
  const BlockId cpu_block = cpu_pool_.allocate();
  held_cpu_blocks_.push_back(cpu_block);  // the ref count that allocate gave
  moves_.out.push_back({.source = victim, .destination = cpu_block});
  note_eviction({.block = victim,
                 .seq_id = for_whom,
                 .idle_steps = pool_.idle_steps(victim),
                 .cpu_block = cpu_block});
  cache_->move(victim, cpu_node(cpu_block));
  cpu_pool_.set_findable(cpu_block);
  pool_.forget(victim);
  moved_in_[static_cast<std::size_t>(cpu_node(cpu_block))] =
      static_cast<std::uint32_t>(pool_.next_step());
  ++num_evictions_;
  ++num_offloaded_;
}

// Whether a CPU block is free, after dropping the least recently used content there if need be.
bool BlockManager::make_cpu_room(SeqId for_whom) {
  if (cpu_pool_.num_free() > 0) return true;
  const auto oldest = cpu_pool_.oldest_idle();
  if (!oldest) return false;
  drop(cpu_node(*oldest), for_whom);
  return true;
}

// Gives up cached content, and with it what lies below, wherever that is.
void BlockManager::drop(NodeId node, SeqId for_whom) {
  cache_->erase(node, [&](NodeId at, const Hash128& key) {
    evicted_hashes_->remember(key, pool_.next_step(), for_whom);
    if (is_cpu_node(at)) {
      const BlockId cpu_block = cpu_block_of(at);
      note_eviction({.block = -1,
                     .seq_id = for_whom,
                     .idle_steps = cpu_pool_.idle_steps(cpu_block),
                     .cpu_block = cpu_block});
      cpu_pool_.forget(cpu_block);
      ++num_offload_drops_;
    } else {
      note_eviction({.block = at, .seq_id = for_whom, .idle_steps = pool_.idle_steps(at)});
      pool_.forget(at);
      ++num_evictions_;
    }
  });
}

// Puts the hits [first, ..) of blocks_ into a sequence's table and holds them, so that none is
// evicted or dropped; one that is in the CPU pool stands there as its node for now.
void BlockManager::hold_hits(Sequence& sequence, std::int32_t first) {
  for (std::size_t i = static_cast<std::size_t>(first); i < blocks_.size(); ++i) {
    const NodeId node = blocks_[i];
    sequence.table.push_back(node);
    if (is_cpu_node(node)) {
      hold_cpu_block(cpu_block_of(node));
    } else {
      if (pool_.ref_count(node) == 0) num_tokens_ += block_size_;
      pool_.add_ref(node);
    }
  }
}

// Gives each hit in the CPU pool a block. REQUIRES: make_room.
void BlockManager::bring_back_hits(Sequence& sequence, std::int32_t first) {
  if (!has_offloading_) return;
  for (std::size_t i = static_cast<std::size_t>(first); i < sequence.table.size(); ++i) {
    const NodeId node = sequence.table[i];
    if (!is_cpu_node(node)) continue;
    const BlockId cpu_block = cpu_block_of(node);
    const BlockId block = take_block();
    forget_arrival(block);
    sequence.table[i] = block;
    moves_.in.push_back({.source = cpu_block, .destination = block});
    moved_in_[static_cast<std::size_t>(block)] = static_cast<std::uint32_t>(pool_.next_step());
    pool_.mark_in_transit(block);
    num_tokens_ += block_size_;
    num_cpu_hits_ += block_size_;
    ++num_onloaded_;
    // Behind a window what lies above it may have been dropped meanwhile, and it with it.
    if (!cache_->is_published(node)) continue;
    cache_->move(node, block);
    cpu_pool_.forget(cpu_block);
    pool_.set_findable(block);
  }
}

// A block that was given up and taken again since something was to arrive in it: the one move must
// not run beside the other.
void BlockManager::forget_arrival(BlockId block) {
  if (!is_arriving(block)) return;
  std::erase_if(moves_.in, [block](const BlockCopy& move) { return move.destination == block; });
}

// What was moved in this step or later, which may have been moved on from there.
void BlockManager::forget_moves_of(StepId step) {
  const auto num_nodes = static_cast<NodeId>(moved_in_.size());
  for (NodeId node = 0; node < num_nodes; ++node) {
    const std::uint32_t moved_in = moved_in_[static_cast<std::size_t>(node)];
    const bool is_older =
        static_cast<std::int32_t>(moved_in - static_cast<std::uint32_t>(step)) < 0;
    if (is_older || !cache_->is_published(node)) continue;
    cache_->erase(node, [this](NodeId at, const Hash128&) {
      is_cpu_node(at) ? cpu_pool_.forget(cpu_block_of(at)) : pool_.forget(at);
    });
  }
}

}  // namespace pagedkv
