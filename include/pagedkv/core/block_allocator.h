// BlockAllocator: one fixed pool of blocks, each with a ref count and a state.
//
// Owns: the free list, the list of idle cached blocks (least recently used first) and one list per
// launched step of the blocks that wait for its end. It knows nothing of tokens, hashes or
// sequences; whether a block's content is findable is told to it by its owner (the BlockManager),
// which asks the PrefixCache. Every operation is O(1).
//
// Life of a block (numbers are ref counts):
//
//   free 0                   --allocate--> referenced 1..
//   referenced 1..           --release to 0, a step in flight--> draining 0 or in transit 0
//                            --release to 0, none in flight--> settled
//                            --mark_in_transit, a step in flight--> in transit 1..
//   draining 0, in transit   --add_ref--> referenced, if it was 0
//                            --end_step--> referenced, if it is held; settled otherwise
//   settled                  is cached-idle 0 if its content is findable, free 0 if not
//   cached-idle 0            --add_ref--> referenced 1
//                            --forget--> free 0
//
// Thread safety: none; one thread owns it.
//
// Invariants (check() proves them and the manager adds those that need its tables):
//   I1  every block is in exactly one state, the states' counts add up to num_blocks
//   I3  the free list has no duplicate, and exactly the blocks in state free
//   I9  a block that is free, idle or draining has ref count 0
//   L1  the idle list has exactly the idle blocks; the steps' lists exactly the draining and
//   in-transit ones

#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "pagedkv/core/huge_pages.h"
#include "pagedkv/core/types.h"

namespace pagedkv {

class BlockAllocator {
 public:
  // shuffle_seed: initial order of the free list; without it blocks go out in rising order.
  BlockAllocator(std::int64_t num_blocks, std::optional<std::uint64_t> shuffle_seed);
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  std::int32_t num_blocks() const { return num_blocks_; }
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t num_in(BlockState state) const { return num_in_[static_cast<int>(state)]; }
  std::int32_t num_allocatable() const { return num_free() + num_in(BlockState::kCachedIdle); }
  // Blocks without a holder that wait for launched steps to end: allocatable after that.
  std::int32_t num_returning() const { return num_returning_; }
  std::int32_t num_shared() const { return num_shared_; }
  std::int32_t ref_count(BlockId block) const {
    return static_cast<std::int32_t>(num_holders(meta_[index(block)]));
  }
  BlockState state(BlockId block) const { return meta_[index(block)].state; }

  // Takes a block off the free list: ref count 1. Throws OutOfBlocks if the list is empty.
  BlockId allocate();
  // One more holder of a block that is held or, with ref count 0, still has content (idle,
  // draining, in transit). Throws std::invalid_argument for a free or foreign block.
  void add_ref(BlockId block);
  // One holder less. Returns true if that was the last holder. Throws DoubleFree for a block
  // without holders and std::invalid_argument for a foreign one, and changes nothing then.
  bool release(BlockId block) { return drop(block, BlockState::kDraining); }
  // As release, for a block whose content is being copied out.
  bool release_in_transit(BlockId block) { return drop(block, BlockState::kInTransit); }
  // A held block whose content is being copied in: in transit until the steps launched so far have
  // ended.
  void mark_in_transit(BlockId block);

  // The content of this held block can be found from now on: without holders it will be idle, not
  // free.
  void set_findable(BlockId block);
  // It cannot be found any more: an idle block becomes free.
  void forget(BlockId block);
  bool is_findable(BlockId block) const { return meta_[index(block)].is_findable; }
  // If it is idle, it counts as the one used last.
  void touch(BlockId block);
  // Least recently used idle block, if there is one.
  std::optional<BlockId> oldest_idle() const;

  // Steps launched since this block went idle, or was touched then, modulo 2^27; 0 if it is not
  // idle.
  std::int64_t idle_steps(BlockId block) const {
    const Meta& meta = meta_[block];
    if (meta.state != BlockState::kCachedIdle) return 0;
    return (static_cast<std::uint32_t>(next_step_) - meta.ref_count) & kCountMask;
  }

  StepId next_step() const { return next_step_; }
  bool has_step_in_flight() const { return first_step_ < next_step_; }
  StepId begin_step();
  // REQUIRES: step is the oldest in flight (std::invalid_argument otherwise).
  void end_step(StepId step);

  // Brings a block's record into the CPU cache ahead of its use; shuffled ids defeat the hardware's
  // prefetcher.
  void prefetch(BlockId block) const { __builtin_prefetch(&meta_[block]); }
  // A guess at the block that is evicted kLater evictions after this one. Wrong where blocks left
  // the idle list meanwhile, so good for a prefetch and for nothing else; always a block's id.
  static constexpr std::size_t kLater = 8;
  BlockId guess_later_idle(BlockId block) const { return meta_[block].later; }

  // Throws InvariantViolation.
  void check() const;

 private:
  friend struct TestAccess;
  // Four to a cache line: a record is what a visit to a block costs.
  struct Meta {
    // SequenceTable::kMaxNumSequences bounds it. An idle block has no holder to count: its bits are
    // next_step_ as it was when it went idle, since a record of its own for that would be one more
    // to fetch for each block that is freed or evicted.
    std::uint32_t ref_count : 27 = 0;
    BlockState state : 4 = BlockState::kFree;
    bool is_findable : 1 = false;
    BlockId previous = 0;  // neighbours on the idle list or on a step's list; lists are rings
    BlockId next = 0;      // closed by a sentinel
    BlockId later = 0;  // what went idle kLater blocks after this one, if both are where they were
  };
  static_assert(sizeof(Meta) == 16);
  static constexpr std::uint32_t kCountMask = (1U << 27) - 1;
  static std::uint32_t num_holders(const Meta& meta) {
    return meta.state == BlockState::kCachedIdle ? 0 : meta.ref_count;
  }

  std::int32_t index(BlockId block) const {
    if (block < 0 || block >= num_blocks_) throw_foreign(block);
    return block;
  }
  std::int32_t idle_list() const { return num_blocks_; }
  std::int32_t step_list(StepId step) const {
    return num_blocks_ + 1 + static_cast<std::int32_t>(step % kMaxStepsInFlight);
  }
  void set_state(Meta& meta, BlockState state) {
    --num_in_[static_cast<int>(meta.state)];
    ++num_in_[static_cast<int>(state)];
    meta.state = state;
  }
  void link_last(std::int32_t list, BlockId block);
  void link_idle(BlockId block);
  void unlink(BlockId block);
  void push_free(BlockId block);
  bool drop(BlockId block, BlockState while_in_flight);
  void settle(BlockId block);
  [[noreturn]] void throw_foreign(BlockId block) const;

  std::int32_t num_blocks_;
  HugeVector<Meta> meta_;  // [num_blocks + sentinels of the idle list and of each step's list]
  HugeVector<BlockId>
      free_;  // a stack: the block freed last is taken first, while its memory is warm
  std::int32_t num_in_[kNumBlockStates] = {};
  std::int32_t num_returning_ = 0;
  std::int32_t num_shared_ = 0;
  StepId first_step_ = 1;  // oldest in flight; steps [first_step_, next_step_) are in flight
  StepId next_step_ = 1;
  BlockId idle_last_[kLater] = {};  // the blocks that went idle last, a ring
  std::size_t num_went_idle_ = 0;
};

}  // namespace pagedkv
