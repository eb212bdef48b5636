// BlockManager: construction, admission and what concerns the whole. Batches, swaps and the proof
// of the invariants have files of their own. The contract is in the header.

#include "pagedkv/core/block_manager.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pagedkv {
namespace {

std::int64_t checked(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " must be between " + std::to_string(low) +
                                " and " + std::to_string(high) + ", got " + std::to_string(value));
  }
  return value;
}

std::int64_t checked_watermark(const BlockManagerConfig& config) {
  if (!(config.watermark >= 0.0 && config.watermark < 1.0)) {  // refuses NaN too
    throw std::invalid_argument("watermark must be at least 0 and below 1, got " +
                                std::to_string(config.watermark));
  }
  return static_cast<std::int64_t>(
      std::floor(config.watermark * static_cast<double>(config.num_blocks)));
}

void check_prompt(std::span<const TokenId> tokens, std::string_view what) {
  if (tokens.empty()) throw std::invalid_argument(std::string(what) + ": token_ids is empty");
  const auto negative =
      std::find_if(tokens.begin(), tokens.end(), [](TokenId token) { return token < 0; });
  if (negative != tokens.end()) {
    throw std::invalid_argument(std::string(what) + ": token_ids[" +
                                std::to_string(negative - tokens.begin()) + "] is " +
                                std::to_string(*negative) + "; ids are not negative");
  }
}

}  // namespace

BlockManager::BlockManager(const BlockManagerConfig& config)
    : block_size_(
          static_cast<std::int32_t>(checked("block_size", config.block_size, 1, kMaxBlockSize))),
      watermark_blocks_(checked_watermark(config)),
      pool_(checked("num_blocks", config.num_blocks, 1, kMaxNumBlocks), config.shuffle_seed),
      cpu_pool_(checked("num_cpu_blocks", config.num_cpu_blocks, 0, kMaxNumBlocks),
                config.shuffle_seed),
      has_offloading_(config.enable_kv_offloading) {
  const auto bits = static_cast<std::int32_t>(checked("hash_bits", config.hash_bits, 1, 128));
  if (config.hash_secret && config.hash_secret->size() < kMinHashSecretBytes) {
    throw std::invalid_argument("hash_secret must have at least " +
                                std::to_string(kMinHashSecretBytes) + " bytes, got " +
                                std::to_string(config.hash_secret->size()));
  }
  if (has_offloading_ && (!config.enable_prefix_caching || cpu_pool_.num_blocks() == 0)) {
    throw std::invalid_argument(
        "enable_kv_offloading needs enable_prefix_caching and at least 1 of num_cpu_blocks, got " +
        std::to_string(cpu_pool_.num_blocks()) + " with prefix caching " +
        (config.enable_prefix_caching ? "on" : "off"));
  }
  if (has_offloading_) {
    moved_in_.resize(static_cast<std::size_t>(pool_.num_blocks() + cpu_pool_.num_blocks()));
  }
  if (config.enable_prefix_caching) {
    const std::int32_t num_nodes =
        pool_.num_blocks() + (has_offloading_ ? cpu_pool_.num_blocks() : 0);
    cache_.emplace(num_nodes, block_size_, config.hash_secret, bits);
    evicted_hashes_.emplace(config.num_blocks);
    evicted_.resize(kMaxEvictionsKept);
  }
}

std::int64_t BlockManager::max_match_blocks(std::size_t num_tokens) const {
  return (static_cast<std::int64_t>(num_tokens) - 1) / block_size_;
}

std::int64_t BlockManager::match(std::span<const TokenId> tokens,
                                 std::string_view extra_key) const {
  check_prompt(tokens, "match");
  if (!cache_) return 0;
  blocks_.clear();
  cache_->match(extra_key, tokens, max_match_blocks(tokens.size()), blocks_);
  return static_cast<std::int64_t>(worthwhile_hits()) * block_size_;
}

BlockManager::Plan BlockManager::plan(std::span<const TokenId> tokens,
                                      std::optional<std::int64_t> max_new_tokens,
                                      std::string_view extra_key, std::int64_t window) const {
  Plan plan;
  blocks_.clear();
  if (cache_)
    plan.missed = cache_->match(extra_key, tokens, max_match_blocks(tokens.size()), blocks_);
  const std::size_t num_hits = worthwhile_hits();
  plan.is_on_cpu = num_hits < blocks_.size();
  blocks_.resize(num_hits);
  const auto num_cached = static_cast<std::int64_t>(blocks_.size()) * block_size_;
  const std::int64_t num_rest = static_cast<std::int64_t>(tokens.size()) - num_cached;
  plan.num_tokens = num_cached + std::min(num_rest, max_new_tokens.value_or(num_rest));
  plan.num_new_blocks = num_blocks_for(plan.num_tokens) - static_cast<std::int64_t>(blocks_.size());
  plan.num_freed_hits = num_hits_behind(window);
  for (std::size_t i = static_cast<std::size_t>(plan.num_freed_hits); i < blocks_.size(); ++i) {
    if (is_cpu_node(blocks_[i])) {
      ++plan.num_cpu_hits;
    } else {
      plan.num_idle_hits += pool_.state(blocks_[i]) == BlockState::kCachedIdle;
    }
  }
  plan.num_new_blocks += plan.num_cpu_hits;
  return plan;
}

CanAllocate BlockManager::can_allocate(std::span<const TokenId> tokens,
                                       std::optional<std::int64_t> max_new_tokens,
                                       std::int64_t reserve_tokens, std::string_view extra_key,
                                       std::int64_t window) const {
  check_prompt(tokens, "can_allocate");
  checked("reserve_tokens", reserve_tokens, 0, kMaxSeqLen);
  checked("window", window, 0, kMaxSeqLen);
  if (max_new_tokens) checked("max_new_tokens", *max_new_tokens, 0, kMaxSeqLen);
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  std::int64_t num_at_most = num_blocks_for(num_tokens + reserve_tokens);
  if (window > 0) {
    num_at_most =
        std::min(num_at_most, max_window_blocks(window, max_new_tokens.value_or(num_tokens)));
  }
  if (num_tokens + reserve_tokens > kMaxSeqLen || num_at_most > num_blocks()) {
    return CanAllocate::kNever;
  }
  // With nothing else alive there is nobody to keep blocks for: a prompt that only fits in the
  // whole pool gets it.
  const std::int64_t num_left = sequences_.size() == 0 ? 0 : watermark_blocks_;
  if (num_allocatable_blocks() - num_blocks_for(num_tokens) >= num_left)
    return CanAllocate::kOk;  // needs no match
  const Plan needed = plan(tokens, max_new_tokens, extra_key, window);
  // A hit on an idle block takes it from those that can be allocated, just as a new block does.
  const bool fits =
      num_allocatable_blocks() - needed.num_new_blocks - needed.num_idle_hits >= num_left;
  return fits ? CanAllocate::kOk : CanAllocate::kLater;
}

std::int64_t BlockManager::allocate(SeqId id, std::span<const TokenId> tokens,
                                    std::optional<std::int64_t> max_new_tokens,
                                    std::string_view extra_key, std::int64_t window) {
  check_prompt(tokens, "allocate");
  if (max_new_tokens) checked("max_new_tokens", *max_new_tokens, 0, kMaxSeqLen);
  checked("window", window, 0, kMaxSeqLen);
  checked("the number of token_ids", static_cast<std::int64_t>(tokens.size()), 1, kMaxSeqLen);
  if (contains(id)) throw std::invalid_argument("seq_id " + std::to_string(id) + " exists already");
  const Plan needed = plan(tokens, max_new_tokens, extra_key, window);
  const std::int64_t num_there = num_allocatable_blocks() - needed.num_idle_hits;
  if (needed.num_new_blocks > num_there)
    throw_out_of_blocks("allocate", needed.num_new_blocks, num_there);
  const auto num_hits = static_cast<std::int32_t>(blocks_.size());
  const std::size_t num_cached = blocks_.size() * static_cast<std::size_t>(block_size_);

  // Memory first: nothing below the root can fail.
  sequences_.reserve(1);
  Sequence& room = sequences_.upcoming(0);
  room.table.reserve(blocks_.size() + static_cast<std::size_t>(needed.num_new_blocks));
  if (cache_) room.tokens.reserve(tokens.size() - num_cached);
  reserve_moves(needed.num_new_blocks, needed.num_new_blocks + needed.num_cpu_hits);
  const NodeId root = cache_ ? cache_->acquire_root(extra_key) : kNoNode;

  last_miss_ = why_missed(needed);  // before evictions of its own
  Sequence& sequence = sequences_.add(id);
  sequence.table_stamp = next_stamp();
  sequence.num_tokens = needed.num_tokens;
  sequence.num_known = static_cast<std::int64_t>(tokens.size());
  sequence.num_published = num_hits;
  sequence.root = root;
  sequence.can_publish = cache_.has_value();
  if (cache_)
    sequence.tokens.assign(tokens.begin() + static_cast<std::ptrdiff_t>(num_cached), tokens.end());
  // Hits first, so that none of them is evicted for a new block.
  touch_hits_behind(needed.num_freed_hits);
  sequence.num_freed = needed.num_freed_hits;
  sequence.table.assign(static_cast<std::size_t>(needed.num_freed_hits), kFreedBlock);
  hold_hits(sequence, needed.num_freed_hits);
  make_room(needed.num_new_blocks, [id](std::int64_t) { return id; });
  bring_back_hits(sequence, needed.num_freed_hits);
  const std::int64_t num_fresh = needed.num_new_blocks - needed.num_cpu_hits;
  for (std::int64_t i = 0; i < num_fresh; ++i) sequence.table.push_back(take_block());
  num_tokens_ += needed.num_tokens - static_cast<std::int64_t>(num_cached);
  sequence.num_unused = static_cast<std::int32_t>(
      static_cast<std::int64_t>(sequence.table.size()) * block_size_ - needed.num_tokens);
  if (cache_) {
    num_queries_ += static_cast<std::int64_t>(tokens.size());
    num_hits_ += static_cast<std::int64_t>(num_cached);
  }
  return static_cast<std::int64_t>(num_cached);
}

void BlockManager::note_eviction(const Eviction& eviction) {
  evicted_[num_noted_++ % kMaxEvictionsKept] = eviction;
}

PrefixMiss BlockManager::why_missed(const Plan& plan) const {
  if (!cache_) return {.reason = MissReason::kCachingOff};
  if (plan.is_on_cpu) return {.reason = MissReason::kOnCpu};
  if (!plan.missed) return {};
  const auto eviction = evicted_hashes_->find(*plan.missed);
  if (!eviction) return {.reason = MissReason::kNeverCached};
  return {.reason = MissReason::kEvicted,
          .evicted_in = eviction->step,
          .evicted_for = eviction->seq_id};
}

void BlockManager::throw_out_of_blocks(const char* what, std::int64_t num_needed,
                                       std::int64_t num_there) const {
  throw OutOfBlocks(std::string(what) + " needs " + std::to_string(num_needed) + " blocks, " +
                    std::to_string(num_there) + " of " + std::to_string(num_blocks()) +
                    " can be taken");
}

StepId BlockManager::begin_step() {
  if (!moves_.out.empty() || !moves_.in.empty()) {
    throw std::invalid_argument("the step's " + std::to_string(moves_.out.size()) +
                                " moves out and " + std::to_string(moves_.in.size()) +
                                " moves in were not taken; call take_moves and run them first");
  }
  const StepId step = pool_.begin_step();
  cpu_pool_.begin_step();  // the pools' steps run in lockstep, so this cannot fail where the first
                           // did not
  // What its moves touch is in transit until it ends.
  for (const BlockId cpu_block : held_cpu_blocks_) cpu_pool_.release_in_transit(cpu_block);
  held_cpu_blocks_.clear();
  return step;
}

void BlockManager::end_step(StepId step, bool has_failed) {
  pool_.end_step(step);
  cpu_pool_.end_step(step);
  if (has_failed) forget_moves_of(step);
}

std::int64_t BlockManager::reset_prefix_cache() {
  if (!cache_) return 0;
  for (const std::int32_t slot : sequences_.live_slots()) stop_publishing(sequences_.at(slot));
  evicted_hashes_->clear();
  return cache_->clear([this](NodeId node, const Hash128&) {
    is_cpu_node(node) ? cpu_pool_.forget(cpu_block_of(node)) : pool_.forget(node);
  });
}

std::vector<Eviction> BlockManager::take_evicted() {
  const std::size_t num_taken = std::min(num_noted_, kMaxEvictionsKept);
  std::vector<Eviction> taken;
  taken.reserve(num_taken);
  for (std::size_t i = num_noted_ - num_taken; i < num_noted_; ++i)
    taken.push_back(evicted_[i % kMaxEvictionsKept]);
  num_noted_ = 0;
  return taken;
}

Statistics BlockManager::statistics() const {
  const std::int32_t num_held = pool_.num_in(BlockState::kReferenced) +
                                pool_.num_in(BlockState::kInTransit) +
                                pool_.num_in(BlockState::kDraining);
  const auto num_blocks = static_cast<double>(pool_.num_blocks());
  return {
      .num_blocks = pool_.num_blocks(),
      .num_free = pool_.num_free(),
      .num_cached_idle = pool_.num_in(BlockState::kCachedIdle),
      .num_referenced = pool_.num_in(BlockState::kReferenced),
      .num_shared = pool_.num_shared(),
      .num_in_transit = pool_.num_in(BlockState::kInTransit),
      .num_draining = pool_.num_in(BlockState::kDraining),
      .num_cpu_blocks = cpu_pool_.num_blocks(),
      .num_cpu_free = cpu_pool_.num_free(),
      .num_cpu_cached_idle = cpu_pool_.num_in(BlockState::kCachedIdle),
      .num_sequences = sequences_.size(),
      .num_tokens = num_tokens_,
      .token_occupancy = static_cast<double>(num_tokens_) / (num_blocks * block_size_),
      .block_occupancy = num_held / num_blocks,
      .prefix_cache_queries = num_queries_,
      .prefix_cache_hits = num_hits_,
      .prefix_cache_cpu_hits = num_cpu_hits_,
      .prefix_cache_misses = num_queries_ - num_hits_,
      .prefix_cache_evictions = num_evictions_ * block_size_,
      .num_evictions = num_evictions_,
      .num_offloaded = num_offloaded_,
      .num_onloaded = num_onloaded_,
      .num_offload_drops = num_offload_drops_,
      .num_copies = num_copies_,
      .num_swapped_out = num_swapped_out_,
      .num_swapped_in = num_swapped_in_,
  };
}

std::shared_ptr<const Snapshot> BlockManager::snapshot() const {
  auto made = std::make_shared<Snapshot>();
  made->version = ++last_version_;
  made->block_size = block_size_;
  made->statistics = statistics();
  made->ref_counts.reserve(static_cast<std::size_t>(num_blocks()));
  made->states.reserve(static_cast<std::size_t>(num_blocks()));
  for (BlockId block = 0; block < pool_.num_blocks(); ++block) {
    made->ref_counts.push_back(pool_.ref_count(block));
    made->states.push_back(pool_.state(block));
  }
  made->cpu_states.reserve(static_cast<std::size_t>(cpu_pool_.num_blocks()));
  for (BlockId cpu_block = 0; cpu_block < cpu_pool_.num_blocks(); ++cpu_block)
    made->cpu_states.push_back(cpu_pool_.state(cpu_block));
  made->seq_start_loc.push_back(0);
  for (const std::int32_t slot : sequences_.live_slots()) {
    const Sequence& sequence = sequences_.at(slot);
    made->seq_ids.push_back(sequence.id);
    made->seq_num_tokens.push_back(sequence.num_tokens);
    made->block_ids.insert(made->block_ids.end(), sequence.table.begin(), sequence.table.end());
    made->seq_start_loc.push_back(static_cast<std::int64_t>(made->block_ids.size()));
  }
  return made;
}

}  // namespace pagedkv
