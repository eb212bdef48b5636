// BlockManager: the whole memory policy of a paged KV cache, as arithmetic on ids.
//
// It owns the pool, the CPU pool, the prefix cache and every sequence's block table. It launches
// nothing: copy-on-write and swaps are *returned* as (source, destination) pairs, an ordered
// program that the caller runs in the order in which the calls returned them, before the kernels of
// the step being built. (A block that one pair reads may be the target of a later pair, never of an
// earlier one.)
//
// Every mutating call happens whole or throws and changes nothing (I6), memory exhaustion included.
// Batch calls are one call: an error in any row changes no row. In a batch, each sequence may stand
// once.
//
// Steps. While launched steps are in flight (begin_step .. end_step), a block that loses its last
// holder is draining and cannot be taken; a block swapped out or in is in transit. Both last until
// all steps launched before have ended. A caller that never begins a step gets blocks back at once.
//
// Publishing. A full block becomes findable when publish() says that its K/V is computed before any
// step launched from then on runs, never earlier. If equal content is findable already (two equal
// cold prompts), the sequence's entry changes to that block and its own copy is released: one
// content, one block. So a table entry can change in place, in publish and in copy-on-write;
// StepTables notices.
//
// Sliding windows. Where every layer sees only the last `window` tokens, free_behind() gives back
// the blocks wholly before them; the table keeps its logical positions, with kFreedBlock in theirs.
// What was published of them stays findable until it is evicted, oldest first, and with it what
// lies below. A prefix is found from the first token on, as without a window, but a hit holds only
// the blocks that the window still needs.
//
// Offloading (enable_kv_offloading). The CPU pool is a second level of the prefix cache: an evicted
// block's content moves to a CPU block, least recently used content there making room, and is found
// as before; a hit brings it back to a fresh block, as far as swap_in_cost says that this is
// cheaper. Content is in one place at a time. Swapped sequences come first: swap_out drops what the
// prefix cache has there. These moves are returned by take_moves(), for the step being built, and
// begin_step demands that they were taken: of the step's pairs run first all into the CPU pool,
// then all out of it, then the copies. A CPU block that one of them touches, or that swap_in reads,
// is used for nothing else until that step has ended, so the caller must begin and end steps.
//
// Errors: std::invalid_argument for bad arguments, OutOfBlocks, UnknownSequence, DoubleFree
// (types.h). Thread safety: none, and no locks: one thread owns a manager. Others read snapshots.
//
// Invariants, proven by check_invariants() over everything the manager holds:
//   I1   the states' counts add up to the pool (and so for the CPU pool)
//   I2   a block's ref count is the number of block tables that hold it
//   I3   the free list has no duplicates and no block that a table holds
//   I4   a published block is found under the hash of its tokens and parent; a sequence's published
//   prefix is a chain I7   only a swapped sequence's table has CPU blocks I9   without sequences,
//   all ref counts are 0 I10  a published block's parent is published
// I5 (nothing writes a block that is shared or published) is checked by StepTables when a step is
// built; I6 and the scheduler's I8 by their tests.

#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pagedkv/core/block_allocator.h"
#include "pagedkv/core/evicted_hashes.h"
#include "pagedkv/core/prefix_cache.h"
#include "pagedkv/core/sequence_table.h"
#include "pagedkv/core/snapshot.h"
#include "pagedkv/core/types.h"

namespace pagedkv {

inline constexpr std::size_t kMinHashSecretBytes = 16;  // as wide as the hash

struct BlockManagerConfig {
  std::int64_t num_blocks = 0;   // 1..kMaxNumBlocks
  std::int64_t block_size = 16;  // tokens, 1..kMaxBlockSize
  std::int64_t num_cpu_blocks = 0;
  double watermark = 0.01;  // fraction of the pool that admission leaves allocatable, [0, 1)
  bool enable_prefix_caching = true;
  // At least kMinHashSecretBytes; none: random, one per process.
  std::optional<std::string> hash_secret = std::nullopt;
  std::int64_t hash_bits = 128;                              // fewer weaken the hash, for tests
  std::optional<std::uint64_t> shuffle_seed = std::nullopt;  // initial order of the free list
  bool enable_kv_offloading = false;                         // needs CPU blocks and prefix caching
};

// Content that the prefix cache moves between the pools, in the order to run it.
struct Moves {
  std::vector<BlockCopy> out;  // (block, CPU block)
  std::vector<BlockCopy> in;   // (CPU block, block), after all of out
};

class BlockManager {
 public:
  explicit BlockManager(const BlockManagerConfig& config);
  BlockManager(const BlockManager&) = delete;
  BlockManager& operator=(const BlockManager&) = delete;

  std::int64_t num_blocks() const { return pool_.num_blocks(); }
  std::int64_t block_size() const { return block_size_; }
  bool has_offloading() const { return has_offloading_; }
  // Free and idle blocks: what an allocation can take now.
  std::int64_t num_allocatable_blocks() const { return pool_.num_allocatable(); }
  // Blocks without a holder that an allocation can take once the launched steps have ended.
  std::int64_t num_returning_blocks() const { return pool_.num_returning(); }

  // -- admission
  // -----------------------------------------------------------------------------------------------------
  // tokens is the whole prompt, not empty. max_new_tokens: how many after the cached prefix get
  // blocks now (none: all).

  // window: a token sees the last window tokens, itself included, and no more; 0: all. Then the
  // caller computes max_new_tokens at a time and calls free_behind after each.

  // Tokens of a cached prefix, a multiple of block_size, at most size - 1: one token at least is
  // left to compute.
  std::int64_t match(std::span<const TokenId> tokens, std::string_view extra_key = {}) const;
  // kNever: size + reserve_tokens positions, or what a window needs of them at once
  // (max_window_blocks), do not fit in the whole pool. kLater: too few blocks can be taken now, or
  // fewer than the watermark would remain while other sequences live. Otherwise kOk.
  CanAllocate can_allocate(std::span<const TokenId> tokens,
                           std::optional<std::int64_t> max_new_tokens = std::nullopt,
                           std::int64_t reserve_tokens = 0, std::string_view extra_key = {},
                           std::int64_t window = 0) const;
  // Creates id with its cached prefix and blocks for up to max_new_tokens more; returns the cached
  // tokens. Looks at no watermark: whoever does not ask can_allocate may use the last block.
  std::int64_t allocate(SeqId id, std::span<const TokenId> tokens,
                        std::optional<std::int64_t> max_new_tokens = std::nullopt,
                        std::string_view extra_key = {}, std::int64_t window = 0);
  // The most blocks that a sequence holds at once which computes num_tokens at a time and calls
  // free_behind after each.
  std::int64_t max_window_blocks(std::int64_t window, std::int64_t num_tokens) const;

  // -- growing, sharing, ending: batches, and one sequence as a batch of one
  // -------------------------------------------
  std::int64_t num_blocks_needed(std::span<const SeqId> ids,
                                 std::span<const std::int64_t> counts) const;
  // Room for counts[i] more tokens of ids[i]; the copies to run before these are written.
  std::vector<BlockCopy> append_batch(std::span<const SeqId> ids,
                                      std::span<const std::int64_t> counts);
  std::vector<BlockCopy> append(SeqId id, std::int64_t num_tokens = 1) {
    return append_batch({&id, 1}, {&num_tokens, 1});
  }
  // children[i] is a new sequence that shares every block of parents[i].
  void fork_batch(std::span<const SeqId> parents, std::span<const SeqId> children);
  void fork(SeqId parent, SeqId child) { fork_batch({&parent, 1}, {&child, 1}); }
  void free_batch(std::span<const SeqId> ids);
  void free(SeqId id) { free_batch({&id, 1}); }
  // Gives back the blocks of ids[i] that lie wholly before position first_needed[i], which is at
  // most its number of tokens; returns how many. No step launched later may read them or write
  // there. The last published block stays while more can follow it, so a window shorter than a
  // block keeps one more. A block that was not published by now ends its sequence's publishing.
  std::int64_t free_behind_batch(std::span<const SeqId> ids,
                                 std::span<const std::int64_t> first_needed);
  std::int64_t free_behind(SeqId id, std::int64_t first_needed) {
    return free_behind_batch({&id, 1}, {&first_needed, 1});
  }
  // counts[i] of the concatenated tokens follow those that ids[i] is known to have (the prompt is
  // known from allocate); num_computed[i] positions of it have their K/V.
  void publish_batch(std::span<const SeqId> ids, std::span<const TokenId> tokens,
                     std::span<const std::int64_t> counts,
                     std::span<const std::int64_t> num_computed);
  void publish(SeqId id, std::span<const TokenId> tokens, std::int64_t num_computed) {
    const auto count = static_cast<std::int64_t>(tokens.size());
    publish_batch({&id, 1}, tokens, {&count, 1}, {&num_computed, 1});
  }

  // -- swap
  // ------------------------------------------------------------------------------------------------------------
  // The blocks that these sequences alone hold go to the CPU pool, one that several of them share
  // once; blocks with a holder outside stay referenced (I7). Pairs (block, CPU block). A published
  // block stays findable until evicted.
  std::vector<BlockCopy> swap_out(std::span<const SeqId> ids);
  // The way back; pairs (CPU block, block).
  std::vector<BlockCopy> swap_in(std::span<const SeqId> ids);
  // Blocks that swap_out would move, and that swap_in would take.
  std::int64_t num_swap_out_blocks(std::span<const SeqId> ids) const;
  std::int64_t num_swap_in_blocks(std::span<const SeqId> ids) const;

  // -- steps in flight
  // -------------------------------------------------------------------------------------------------
  StepId begin_step();
  // has_failed: nobody knows which of its moves have run, so what they moved is forgotten.
  void end_step(StepId step, bool has_failed = false);

  // -- offloading
  // ------------------------------------------------------------------------------------------------------
  // Moves since the last call; run them before the step that begin_step launches next.
  Moves take_moves();
  // What bringing a block back costs, as a multiple of what computing it costs; 0: nothing. From 1
  // on no block is moved out. A cached prefix ends where the next blocks would cost more than they
  // save.
  double swap_in_cost() const { return swap_in_cost_; }
  void set_swap_in_cost(double cost);

  // -- the whole
  // -------------------------------------------------------------------------------------------------------
  // Nothing published so far can be found any more, and no sequence alive now publishes again (its
  // K/V is as old as what was forgotten). Returns how many blocks were findable.
  std::int64_t reset_prefix_cache();
  Statistics statistics() const;
  std::shared_ptr<const Snapshot> snapshot() const;
  // Evictions since the last call, oldest first; of very many the last kMaxEvictionsKept.
  static constexpr std::size_t kMaxEvictionsKept = std::size_t{1} << 13;
  std::vector<Eviction> take_evicted();
  // Why the prefix that the last allocate found ends where it does.
  const PrefixMiss& last_miss() const { return last_miss_; }
  bool contains(SeqId id) const { return sequences_.find(id).has_value(); }
  const Sequence& sequence(SeqId id) const { return sequences_.at(sequences_.slot(id)); }
  const SequenceTable& sequences() const { return sequences_; }
  std::int32_t ref_count(BlockId block) const { return pool_.ref_count(block); }
  BlockState state(BlockId block) const { return pool_.state(block); }
  std::int64_t num_cpu_blocks() const { return cpu_pool_.num_blocks(); }
  BlockState cpu_state(BlockId cpu_block) const { return cpu_pool_.state(cpu_block); }
  // Brings a block's record into the CPU cache ahead of ref_count().
  void prefetch(BlockId block) const { pool_.prefetch(block); }
  // Throws InvariantViolation naming the invariant.
  void check_invariants() const;

 private:
  friend struct TestAccess;

  // What an allocation takes; its hits are in blocks_ until the next call.
  struct Plan {
    std::int64_t num_tokens = 0;  // that the sequence will hold
    std::int64_t num_new_blocks = 0;
    std::int64_t num_idle_hits = 0;   // of those that it will hold
    std::int32_t num_freed_hits = 0;  // that lie behind the window
    std::int64_t num_cpu_hits = 0;    // that it will hold, each in a new block
    std::optional<Hash128> missed;    // hash of the first block that was not found
    bool is_on_cpu = false;           // the first that is not taken was found there
  };

  // block_manager.cpp
  Plan plan(std::span<const TokenId> tokens, std::optional<std::int64_t> max_new_tokens,
            std::string_view extra_key, std::int64_t window) const;
  std::int64_t max_match_blocks(std::size_t num_tokens) const;
  std::int64_t num_blocks_for(std::int64_t num_tokens) const {
    return (num_tokens + block_size_ - 1) / block_size_;
  }
  // Evicts until num_blocks blocks are free. The i-th block that becomes free is for sequence
  // for_whom(i). REQUIRES: so many can be allocated, and room by reserve_moves.
  template <class ForWhom>
  void make_room(std::int64_t num_blocks, ForWhom for_whom);
  BlockId take_block() { return pool_.allocate(); }  // after make_room
  void note_eviction(const Eviction& eviction);
  PrefixMiss why_missed(const Plan& plan) const;
  void throw_out_of_blocks(const char* what, std::int64_t num_needed, std::int64_t num_there) const;
  std::uint64_t next_stamp() { return ++last_stamp_; }

  // block_manager_batch.cpp
  // Slots of a batch's sequences, each of which must live and stand once; kept in slots_ until the
  // next batch.
  void resolve(std::span<const SeqId> ids) const;
  // Whether the batch that began with ++last_mark_ names this slot for the first time.
  bool is_first_in_batch(std::int32_t slot) const {
    std::uint64_t& mark = marks_[static_cast<std::size_t>(slot)];
    return std::exchange(mark, last_mark_) != last_mark_;
  }
  void begin_batch(std::size_t num_ids) const;
  std::int64_t plan_append(std::span<const SeqId> ids, std::span<const std::int64_t> counts) const;
  std::int64_t num_copies_of_shared() const;
  std::int64_t num_blocks_taken(std::size_t i, std::span<const std::int64_t> counts) const;
  void release_table(Sequence& sequence);

  // block_manager_offload.cpp
  // In the prefix cache, CPU block i is num_blocks + i.
  bool is_cpu_node(NodeId node) const { return node >= pool_.num_blocks(); }
  NodeId cpu_node(BlockId cpu_block) const { return pool_.num_blocks() + cpu_block; }
  BlockId cpu_block_of(NodeId node) const { return node - pool_.num_blocks(); }
  bool is_arriving(BlockId block) const {
    return has_offloading_ && moved_in_[block] == static_cast<std::uint32_t>(pool_.next_step());
  }
  void reserve_moves(std::int64_t num_out, std::int64_t num_held);
  void hold_cpu_block(BlockId cpu_block);
  std::size_t worthwhile_hits() const;
  void evict(BlockId victim, SeqId for_whom);
  bool make_cpu_room(SeqId for_whom);
  void drop(NodeId node, SeqId for_whom);
  void hold_hits(Sequence& sequence, std::int32_t first);
  void bring_back_hits(Sequence& sequence, std::int32_t first);
  void forget_arrival(BlockId block);
  void forget_moves_of(StepId step);

  // block_manager_window.cpp
  std::int64_t kept_tokens(std::int64_t window) const;
  std::int32_t num_hits_behind(std::int64_t window) const;
  void touch_hits_behind(std::int32_t num_hits);
  std::int64_t free_leading_blocks(Sequence& sequence, std::int32_t end);

  // block_manager_publish.cpp
  void check_publish(std::span<const SeqId> ids, std::span<const TokenId> tokens,
                     std::span<const std::int64_t> counts,
                     std::span<const std::int64_t> num_computed) const;
  void publish_due(std::span<const std::int64_t> num_computed);
  std::int32_t prepare_run(const Sequence& sequence, std::int64_t num_full,
                           PrefixCache::Run& run) const;
  void publish_blocks(Sequence& sequence, std::int64_t num_full, PrefixCache::Run& run);
  BlockId publish_block(Sequence& sequence, NodeId parent, const Hash128& key);
  void stop_publishing(Sequence& sequence);

  // block_manager_swap.cpp
  std::vector<BlockId> held_alone() const;
  std::vector<BlockId> cpu_blocks() const;
  std::vector<TokenId> tokens_from(const Sequence& sequence, std::int32_t first) const;
  std::int64_t num_tokens_in(const Sequence& sequence, std::size_t index) const;

  // block_manager_invariants.cpp
  void check_is_held(BlockId cpu_block) const;
  void check_freed(const Sequence& sequence, const std::string& name) const;
  void check_published(const Sequence& sequence, const std::string& name) const;

  std::int32_t block_size_;
  std::int64_t watermark_blocks_;
  BlockAllocator pool_;
  BlockAllocator cpu_pool_;
  std::optional<PrefixCache> cache_;  // none: prefix caching is off
  SequenceTable sequences_;
  std::optional<EvictedHashes> evicted_hashes_;  // none: prefix caching is off
  std::vector<Eviction> evicted_;                // a ring: what take_evicted returns
  std::size_t num_noted_ = 0;                    // evictions since take_evicted
  PrefixMiss last_miss_;
  bool has_offloading_;
  double swap_in_cost_ = 0.0;
  Moves moves_;  // not yet taken
  // CPU blocks that moves of the step being built read or write, each with a ref count of its own.
  std::vector<BlockId> held_cpu_blocks_;
  std::vector<std::uint32_t> moved_in_;  // by node: the step being built when it was last moved to
  std::uint64_t last_stamp_ = 0;         // of Sequence::table_stamp
  mutable std::uint64_t last_version_ = 0;   // of Snapshot::version
  mutable std::vector<std::int32_t> slots_;  // scratch of the batch calls
  // By slot: the last batch call that named its sequence, which finds duplicates.
  mutable std::vector<std::uint64_t> marks_;
  mutable std::uint64_t last_mark_ = 0;
  std::vector<std::size_t> due_;         // scratch: rows of a publish that complete a block
  mutable std::vector<BlockId> blocks_;  // scratch
  std::int64_t num_tokens_ = 0;          // positions held in pool blocks, each block once
  std::int64_t num_queries_ = 0;
  std::int64_t num_hits_ = 0;
  std::int64_t num_cpu_hits_ = 0;
  std::int64_t num_offloaded_ = 0;
  std::int64_t num_onloaded_ = 0;
  std::int64_t num_offload_drops_ = 0;
  std::int64_t num_evictions_ = 0;
  std::int64_t num_copies_ = 0;
  std::int64_t num_swapped_out_ = 0;
  std::int64_t num_swapped_in_ = 0;
};

template <class ForWhom>
void BlockManager::make_room(std::int64_t num_blocks, ForWhom for_whom) {
  if (pool_.num_free() >= num_blocks) return;
  // An eviction touches records that nothing else has brought near: the block's own, its cache
  // entry and, by that entry's hash, its places in the table and among the evicted hashes. The
  // first two are fetched kLater evictions ahead, the others half as far.
  constexpr std::size_t kHalf = BlockAllocator::kLater / 2;
  BlockId soon[kHalf] = {};
  const std::int64_t num_free = pool_.num_free();
  for (std::size_t i = 0; pool_.num_free() < num_blocks; ++i) {
    const BlockId victim = pool_.oldest_idle().value();
    const BlockId later = pool_.guess_later_idle(victim);
    pool_.prefetch(later);
    cache_->prefetch(later);
    if (i >= kHalf) {
      cache_->prefetch_place(soon[i % kHalf]);
      evicted_hashes_->prefetch(cache_->key(soon[i % kHalf]));
    }
    soon[i % kHalf] = later;
    evict(victim, for_whom(pool_.num_free() - num_free));
  }
}

}  // namespace pagedkv
