// SequenceTable: the sequences and the dense map from the caller's ids to them.
//
// Owns every Sequence, each in a slot that is reused after it is freed, and remembers the
// kNumFreedRemembered ids freed last, so that freeing one again is told apart from an id that never
// was. It knows nothing of pools and hashes.
//
// Thread safety: none; one thread owns it.

#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "pagedkv/core/prefix_cache.h"
#include "pagedkv/core/types.h"

namespace pagedkv {

// The first cache line has what every step looks at; a step of a thousand sequences visits each
// three times.
struct alignas(64) Sequence {
  SeqId id = 0;
  // Logical block -> block id; while swapped out, -1 - block id of the CPU pool; kFreedBlock in the
  // first num_freed entries and nowhere else.
  std::vector<BlockId> table;
  // Positions held, computed or not.
  std::int64_t num_tokens = 0;
  // Unique over all tables ever; new when an entry changes that was there before, but for one that
  // becomes kFreedBlock.
  std::uint64_t table_stamp = 0;
  // Free positions in the last block.
  std::int32_t num_unused = 0;
  // Leading blocks that are published; the next one to publish has this index.
  std::int32_t num_published = 0;
  // Of the prefix cache, if can_publish was ever true.
  NodeId root = kNoNode;
  // False only if the last block has no other holder.
  bool may_share_last = false;
  bool is_swapped = false;
  // False without prefix caching, and once the chain of published blocks is broken.
  bool can_publish = false;
  // Leading blocks that were given back behind a sliding window. Below num_published, if that is
  // not 0, while can_publish: the parent of the next block to publish stays held.
  std::int32_t num_freed = 0;

  // Leading token ids that have been given to allocate and publish.
  std::int64_t num_known = 0;
  // Known ids that are not in published blocks: those from position num_published * block_size on
  // are tokens[tokens_begin..]. What lies before tokens_begin is published and waits to be cut off.
  std::size_t tokens_begin = 0;
  std::vector<TokenId> tokens;
};

class SequenceTable {
 public:
  static constexpr std::size_t kNumFreedRemembered = 4096;
  // A block can be held by every sequence, and its ref count has 27 bits.
  static constexpr std::size_t kMaxNumSequences = (std::size_t{1} << 27) - 1;

  SequenceTable();
  SequenceTable(const SequenceTable&) = delete;
  SequenceTable& operator=(const SequenceTable&) = delete;

  std::int64_t size() const { return num_sequences_; }
  std::size_t num_slots() const { return slots_.size(); }

  // Slot of a live sequence, if id is one.
  std::optional<std::int32_t> find(SeqId id) const {
    const std::int32_t value = places_[place_of(id)].value;
    if (value < 0) return std::nullopt;
    return value;
  }
  // As find, but throws UnknownSequence.
  std::int32_t slot(SeqId id) const {
    const std::int32_t value = places_[place_of(id)].value;
    if (value < 0) [[unlikely]]
      throw_unknown(id);
    return value;
  }
  bool was_freed(SeqId id) const { return places_[place_of(id)].value <= kFreed; }

  Sequence& at(std::int32_t slot) { return slots_[static_cast<std::size_t>(slot)]; }
  const Sequence& at(std::int32_t slot) const { return slots_[static_cast<std::size_t>(slot)]; }

  // Makes room for n more sequences, so that add() cannot fail afterwards. Throws
  // std::invalid_argument beyond kMaxNumSequences.
  void reserve(std::size_t n);
  // The record that the i-th add() from now will return, so that its vectors can be given room
  // before.
  Sequence& upcoming(std::size_t i) { return at(free_slots_[free_slots_.size() - 1 - i]); }
  // A fresh sequence with this id. REQUIRES: room by reserve(), id is not live.
  Sequence& add(SeqId id);
  // Forgets a live sequence, keeping its id among the freed ones. Its slot's memory is kept if
  // small.
  void remove(std::int32_t slot);

  // Slots of the live sequences in rising order.
  std::vector<std::int32_t> live_slots() const;

 private:
  static constexpr std::int32_t kEmpty = -1;
  static constexpr std::int32_t kFreed = -2;  // -2 - i: freed, remembered at freed_[i]
  struct Place {
    SeqId id = 0;
    std::int32_t value = kEmpty;
  };

  std::size_t home(SeqId id) const {
    return static_cast<std::size_t>((static_cast<std::uint64_t>(id) * 0x9e3779b97f4a7c15ULL) >>
                                    shift_);
  }
  // Where id stands, or the empty place where it would.
  std::size_t place_of(SeqId id) const {
    std::size_t at = home(id);
    while (places_[at].value != kEmpty && places_[at].id != id)
      at = (at + 1) & (places_.size() - 1);
    return at;
  }
  [[noreturn]] void throw_unknown(SeqId id) const;
  void remember_freed(SeqId id, std::size_t place);
  void erase_place(std::size_t hole);
  void grow_places(std::size_t num_wanted);

  std::vector<Place> places_;  // open addressing, at most half full
  int shift_;                  // 64 - log2(places_.size())
  std::size_t num_used_ = 0;   // live and remembered ids
  std::vector<Sequence> slots_;
  std::vector<bool> is_live_;
  std::vector<std::int32_t> free_slots_;
  std::int64_t num_sequences_ = 0;
  std::vector<SeqId> freed_;  // a ring of the ids freed last
  std::size_t next_freed_ = 0;
};

}  // namespace pagedkv
