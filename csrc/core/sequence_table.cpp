// Ids to slots: open addressing with erasure by shifting back, as in the prefix cache's table.

#include "pagedkv/core/sequence_table.h"

#include <bit>
#include <string>

namespace pagedkv {
namespace {

// A slot keeps the memory of its last sequence up to this many table entries and tokens; a long
// context gives it back.
constexpr std::size_t kMaxKept = 4096;

template <class T>
void empty_out(std::vector<T>& vector) {
  if (vector.capacity() > kMaxKept) {
    std::vector<T>().swap(vector);
  } else {
    vector.clear();
  }
}

}  // namespace

SequenceTable::SequenceTable() : places_(1024), shift_(64 - std::countr_zero(places_.size())) {
  freed_.reserve(kNumFreedRemembered);
}

void SequenceTable::reserve(std::size_t n) {
  if (n > kMaxNumSequences - static_cast<std::size_t>(num_sequences_)) {
    throw std::invalid_argument(std::to_string(n) + " more sequences beside " +
                                std::to_string(num_sequences_) + " are too many, at most " +
                                std::to_string(kMaxNumSequences) + " are allowed");
  }
  if (2 * (num_used_ + n) > places_.size()) grow_places(num_used_ + n);
  if (free_slots_.size() >= n) return;
  const std::size_t num_new = n - free_slots_.size();
  free_slots_.reserve(slots_.size() +
                      num_new);  // room for every slot, so that remove() never allocates
  is_live_.reserve(slots_.size() + num_new);
  const std::size_t num_before = slots_.size();
  slots_.resize(num_before + num_new);
  is_live_.resize(slots_.size());
  for (std::size_t slot = slots_.size(); slot > num_before; --slot) {
    free_slots_.push_back(static_cast<std::int32_t>(slot - 1));
  }
}

Sequence& SequenceTable::add(SeqId id) {
  Place& place = places_[place_of(id)];
  if (place.value == kEmpty) ++num_used_;
  const std::int32_t slot = free_slots_.back();
  free_slots_.pop_back();
  place = {.id = id, .value = slot};
  ++num_sequences_;
  is_live_[static_cast<std::size_t>(slot)] = true;
  Sequence& sequence = at(slot);
  sequence.id = id;
  return sequence;
}

void SequenceTable::remove(std::int32_t slot) {
  Sequence& sequence = at(slot);
  remember_freed(sequence.id, place_of(sequence.id));
  empty_out(sequence.table);
  empty_out(sequence.tokens);
  sequence = Sequence{.table = std::move(sequence.table), .tokens = std::move(sequence.tokens)};
  is_live_[static_cast<std::size_t>(slot)] = false;
  free_slots_.push_back(slot);
  --num_sequences_;
}

void SequenceTable::remember_freed(SeqId id, std::size_t place) {
  const std::size_t at = next_freed_;
  next_freed_ = (next_freed_ + 1) % kNumFreedRemembered;
  places_[place].value = kFreed - static_cast<std::int32_t>(at);
  if (at == freed_.size()) {
    freed_.push_back(id);
    return;
  }
  const SeqId oldest = freed_[at];
  freed_[at] = id;
  // The oldest id may live again or have been freed again since; then its place does not point
  // here.
  const std::size_t of_oldest = place_of(oldest);
  if (oldest != id && places_[of_oldest].value == kFreed - static_cast<std::int32_t>(at))
    erase_place(of_oldest);
}

void SequenceTable::erase_place(std::size_t hole) {
  const std::size_t mask = places_.size() - 1;
  for (std::size_t at = (hole + 1) & mask; places_[at].value != kEmpty; at = (at + 1) & mask) {
    if (((at - home(places_[at].id)) & mask) >= ((at - hole) & mask)) {
      places_[hole] = places_[at];
      hole = at;
    }
  }
  places_[hole] = Place{};
  --num_used_;
}

void SequenceTable::grow_places(std::size_t num_wanted) {
  std::vector<Place> old(std::bit_ceil(4 * num_wanted));
  old.swap(places_);
  shift_ = 64 - std::countr_zero(places_.size());
  for (const Place& place : old) {
    if (place.value != kEmpty) places_[place_of(place.id)] = place;
  }
}

std::vector<std::int32_t> SequenceTable::live_slots() const {
  std::vector<std::int32_t> slots;
  slots.reserve(static_cast<std::size_t>(num_sequences_));
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (is_live_[slot]) slots.push_back(static_cast<std::int32_t>(slot));
  }
  return slots;
}

void SequenceTable::throw_unknown(SeqId id) const {
  throw UnknownSequence("seq_id " + std::to_string(id) +
                        (was_freed(id) ? " was freed" : " is not known"));
}

}  // namespace pagedkv
