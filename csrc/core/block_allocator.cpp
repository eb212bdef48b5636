// The pool: ref counts, states and their lists. The contract is in the header.

#include "pagedkv/core/block_allocator.h"

#include <random>
#include <string>

namespace pagedkv {

namespace {
constexpr std::size_t kAhead = 12;  // how far ahead of its use a block's record is fetched
}

BlockAllocator::BlockAllocator(std::int64_t num_blocks, std::optional<std::uint64_t> shuffle_seed)
    : num_blocks_(static_cast<std::int32_t>(num_blocks)) {
  if (num_blocks < 0 || num_blocks > kMaxNumBlocks) {
    throw std::invalid_argument("num_blocks must be between 0 and " +
                                std::to_string(kMaxNumBlocks) + ", got " +
                                std::to_string(num_blocks));
  }
  meta_.resize(static_cast<std::size_t>(num_blocks + 1 + kMaxStepsInFlight));
  for (std::size_t list = static_cast<std::size_t>(num_blocks); list < meta_.size(); ++list) {
    meta_[list].previous = meta_[list].next = static_cast<BlockId>(list);
  }
  free_.resize(static_cast<std::size_t>(num_blocks));
  for (std::int32_t i = 0; i < num_blocks_; ++i) free_[i] = num_blocks_ - 1 - i;
  if (shuffle_seed) {
    // Fisher-Yates by hand: std::shuffle's draws differ between standard libraries, and a seed
    // should not.
    std::mt19937_64 random(*shuffle_seed);
    for (std::size_t i = free_.size(); i > 1; --i) std::swap(free_[i - 1], free_[random() % i]);
  }
  num_in_[static_cast<int>(BlockState::kFree)] = num_blocks_;
}

BlockId BlockAllocator::allocate() {
  if (free_.empty()) throw OutOfBlocks("no free block in a pool of " + std::to_string(num_blocks_));
  const BlockId block = free_.back();
  free_.pop_back();
  if (free_.size() > kAhead) prefetch(free_[free_.size() - kAhead]);
  Meta& meta = meta_[block];
  meta.ref_count = 1;
  set_state(meta, BlockState::kReferenced);
  return block;
}

void BlockAllocator::add_ref(BlockId block) {
  Meta& meta = meta_[index(block)];
  if (meta.state == BlockState::kFree) {
    throw std::invalid_argument("block " + std::to_string(block) +
                                " is free; only a block with content can be shared");
  }
  if (num_holders(meta) == 0) {
    if (meta.state != BlockState::kCachedIdle) --num_returning_;
    unlink(block);
    set_state(meta, BlockState::kReferenced);
    meta.ref_count = 1;
  } else if (++meta.ref_count == 2) {
    ++num_shared_;
  }
}

bool BlockAllocator::drop(BlockId block, BlockState while_in_flight) {
  Meta& meta = meta_[index(block)];
  if (num_holders(meta) == 0) {
    throw DoubleFree("block " + std::to_string(block) + " has no holder; it was freed before");
  }
  if (--meta.ref_count == 1) --num_shared_;
  if (meta.ref_count > 0) return false;
  if (meta.state == BlockState::kInTransit) unlink(block);
  if (has_step_in_flight()) {
    set_state(meta, while_in_flight);
    ++num_returning_;
    link_last(step_list(next_step_ - 1), block);
  } else {
    settle(block);
  }
  return true;
}

void BlockAllocator::mark_in_transit(BlockId block) {
  Meta& meta = meta_[index(block)];
  if (num_holders(meta) == 0) {
    throw std::invalid_argument("block " + std::to_string(block) +
                                " has no holder; nothing can be copied into it");
  }
  if (!has_step_in_flight()) return;
  if (meta.state == BlockState::kInTransit) unlink(block);
  set_state(meta, BlockState::kInTransit);
  link_last(step_list(next_step_ - 1), block);
}

void BlockAllocator::settle(BlockId block) {
  Meta& meta = meta_[block];
  if (meta.ref_count > 0) {
    set_state(meta, BlockState::kReferenced);
  } else if (meta.is_findable) {
    set_state(meta, BlockState::kCachedIdle);
    link_idle(block);
    // The links of the idle list lead from one cold record to the next; these lead far enough to
    // fetch ahead.
    BlockId& earlier = idle_last_[num_went_idle_++ % kLater];
    meta_[earlier].later = block;
    earlier = block;
  } else {
    push_free(block);
  }
}

void BlockAllocator::touch(BlockId block) {
  if (meta_[index(block)].state != BlockState::kCachedIdle) return;
  unlink(block);
  link_idle(block);
}

// REQUIRES: its state is kCachedIdle.
void BlockAllocator::link_idle(BlockId block) {
  meta_[block].ref_count = static_cast<std::uint32_t>(next_step_) & kCountMask;
  link_last(idle_list(), block);
}

std::optional<BlockId> BlockAllocator::oldest_idle() const {
  const BlockId block = meta_[idle_list()].next;
  if (block == idle_list()) return std::nullopt;
  return block;
}

void BlockAllocator::set_findable(BlockId block) {
  Meta& meta = meta_[index(block)];
  if (num_holders(meta) == 0) {
    throw std::invalid_argument("block " + std::to_string(block) +
                                " has no holder; only a held block's content can be published");
  }
  meta.is_findable = true;
}

void BlockAllocator::forget(BlockId block) {
  Meta& meta = meta_[index(block)];
  meta.is_findable = false;
  if (meta.state != BlockState::kCachedIdle) return;
  unlink(block);
  meta.ref_count = 0;
  push_free(block);
}

StepId BlockAllocator::begin_step() {
  if (next_step_ - first_step_ == kMaxStepsInFlight) {
    throw std::invalid_argument("at most " + std::to_string(kMaxStepsInFlight) +
                                " steps may be in flight; end step " + std::to_string(first_step_) +
                                " first");
  }
  return next_step_++;
}

void BlockAllocator::end_step(StepId step) {
  if (!has_step_in_flight() || step != first_step_) {
    const std::string allowed = has_step_in_flight()
                                    ? "the oldest step in flight is " + std::to_string(first_step_)
                                    : std::string("no step is in flight");
    throw std::invalid_argument("step_id " + std::to_string(step) + " cannot end: " + allowed);
  }
  const std::int32_t list = step_list(step);
  while (meta_[list].next != list) {
    const BlockId block = meta_[list].next;
    if (meta_[block].ref_count == 0) --num_returning_;
    unlink(block);
    settle(block);
  }
  ++first_step_;
}

void BlockAllocator::link_last(std::int32_t list, BlockId block) {
  const BlockId last = meta_[list].previous;
  meta_[block].previous = last;
  meta_[block].next = list;
  meta_[last].next = block;
  meta_[list].previous = block;
}

void BlockAllocator::unlink(BlockId block) {
  const Meta& meta = meta_[block];
  meta_[meta.previous].next = meta.next;
  meta_[meta.next].previous = meta.previous;
}

void BlockAllocator::push_free(BlockId block) {
  set_state(meta_[block], BlockState::kFree);
  free_.push_back(block);  // never grows: its capacity is the pool
}

void BlockAllocator::throw_foreign(BlockId block) const {
  throw std::invalid_argument("block " + std::to_string(block) +
                              " is not of this pool, whose ids are 0 to " +
                              std::to_string(num_blocks_ - 1));
}

void BlockAllocator::check() const {
  const auto fail = [](const std::string& what) { throw InvariantViolation(what); };
  std::int32_t num_in[kNumBlockStates] = {};
  std::int32_t num_shared = 0;
  std::int32_t num_returning = 0;
  for (BlockId block = 0; block < num_blocks_; ++block) {
    const Meta& meta = meta_[block];
    ++num_in[static_cast<int>(meta.state)];
    num_shared += num_holders(meta) >= 2;
    num_returning += num_holders(meta) == 0 &&
                     (meta.state == BlockState::kDraining || meta.state == BlockState::kInTransit);
    const bool may_be_held =
        meta.state == BlockState::kReferenced || meta.state == BlockState::kInTransit;
    if ((num_holders(meta) > 0 && !may_be_held) ||
        (num_holders(meta) == 0 && meta.state == BlockState::kReferenced)) {
      fail("I9: block " + std::to_string(block) + " in state " +
           std::to_string(static_cast<int>(meta.state)) + " has ref count " +
           std::to_string(meta.ref_count));
    }
  }
  for (BlockId block = 0; block < num_blocks_; ++block) {
    const BlockState state = meta_[block].state;
    if (meta_[block].is_findable ? state == BlockState::kFree : state == BlockState::kCachedIdle) {
      fail("I4: block " + std::to_string(block) + " in state " +
           std::to_string(static_cast<int>(state)) + " is " +
           (meta_[block].is_findable ? "findable" : "not findable"));
    }
  }
  for (int state = 0; state < kNumBlockStates; ++state) {
    if (num_in[state] != num_in_[state]) {
      fail("I1: " + std::to_string(num_in[state]) + " blocks are in state " +
           std::to_string(state) + ", counted " + std::to_string(num_in_[state]));
    }
  }
  if (num_returning != num_returning_) {
    fail("I1: " + std::to_string(num_returning) + " blocks wait for a step to end, counted " +
         std::to_string(num_returning_));
  }
  if (num_shared != num_shared_) {
    fail("I2: " + std::to_string(num_shared) + " blocks are shared, counted " +
         std::to_string(num_shared_));
  }
  std::vector<bool> is_listed(static_cast<std::size_t>(num_blocks_));
  const auto visit = [&](BlockId block, const char* list, auto is_allowed) {
    if (block < 0 || block >= num_blocks_ || is_listed[block] || !is_allowed(meta_[block].state)) {
      fail(std::string(list) + " has block " + std::to_string(block) +
           " twice or in a state of another list");
    }
    is_listed[block] = true;
  };
  for (const BlockId block : free_) {
    visit(block, "I3: the free list", [](BlockState state) { return state == BlockState::kFree; });
  }
  for (BlockId at = meta_[idle_list()].next; at != idle_list(); at = meta_[at].next) {
    visit(at, "L1: the idle list",
          [](BlockState state) { return state == BlockState::kCachedIdle; });
  }
  for (StepId step = first_step_; step < next_step_; ++step) {
    const std::int32_t list = step_list(step);
    for (BlockId at = meta_[list].next; at != list; at = meta_[at].next) {
      visit(at, "L1: a step's list", [](BlockState state) {
        return state == BlockState::kDraining || state == BlockState::kInTransit;
      });
    }
  }
  for (BlockId block = 0; block < num_blocks_; ++block) {
    if (is_listed[block] == (meta_[block].state == BlockState::kReferenced)) {
      fail("L1: block " + std::to_string(block) + " in state " +
           std::to_string(static_cast<int>(meta_[block].state)) +
           (is_listed[block] ? " is on a list" : " is on no list"));
    }
  }
}

}  // namespace pagedkv
