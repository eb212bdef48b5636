// EvictedHashes: a bounded memory of evicted content, so that a miss can say "evicted, then and for
// that sequence" and not only "not there".
//
// Keyed hashes in, nothing else: no tokens, no extra key. A prompt under another salt has other
// hashes, so it learns nothing of this one. A new eviction replaces an older one whose place it
// takes: what is remembered was evicted, what is not may have been. A false memory needs two keyed
// hashes that agree in 64 bits (or weakened ones, of tests).
//
// Thread safety: none; one thread owns it.

#pragma once

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "pagedkv/core/siphash.h"
#include "pagedkv/core/types.h"

namespace pagedkv {

class EvictedHashes {
 public:
  struct Eviction {
    StepId step = 0;   // steps launched by then
    SeqId seq_id = 0;  // for which sequence
  };

  // Remembers about as many as the pool has blocks, 2^10 to 2^16.
  explicit EvictedHashes(std::int64_t num_blocks)
      : places_(std::bit_ceil(
            static_cast<std::size_t>(std::clamp<std::int64_t>(num_blocks, 1 << 10, 1 << 16)))) {}
  EvictedHashes(const EvictedHashes&) = delete;
  EvictedHashes& operator=(const EvictedHashes&) = delete;

  void remember(const Hash128& key, StepId step, SeqId seq_id) {
    places_[place_of(key)] = {.check = key.high, .eviction = {.step = step, .seq_id = seq_id}};
  }
  std::optional<Eviction> find(const Hash128& key) const {
    const Place& place = places_[place_of(key)];
    if (place.eviction.step < 0 || place.check != key.high) return std::nullopt;
    return place.eviction;
  }
  void clear() { std::fill(places_.begin(), places_.end(), Place{}); }
  // Brings a hash's place into the CPU cache ahead of remember().
  void prefetch(const Hash128& key) const { __builtin_prefetch(&places_[place_of(key)], 1); }

 private:
  struct Place {
    std::uint64_t check = 0;
    Eviction eviction = {.step = -1};  // a step below 0: empty
  };
  std::size_t place_of(const Hash128& key) const {
    return static_cast<std::size_t>(key.low) & (places_.size() - 1);
  }
  std::vector<Place> places_;
};

}  // namespace pagedkv
