// The words of the C++ core: ids, states, limits, errors. No behaviour lives here.
//
// Every other header of the core includes this one. Ids are plain integers, since they index arrays
// and travel to Python and to kernels unchanged; the limits below keep every product of them inside
// 64 bits.

#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace pagedkv {

using BlockId = std::int32_t;  // index into the pool; in a block table, -1 - id stands for a block
                               // of the CPU pool, kFreedBlock for one that free_behind gave back
using SeqId = std::int64_t;    // chosen by the caller, any value
using TokenId = std::int32_t;  // not negative
using StepId = std::int64_t;   // 1, 2, 3, ... in the order of launch

inline constexpr BlockId kFreedBlock = std::numeric_limits<BlockId>::min();
inline constexpr std::int64_t kMaxNumBlocks = std::int64_t{1} << 26;
inline constexpr std::int64_t kMaxBlockSize = std::int64_t{1} << 16;
inline constexpr std::int64_t kMaxSeqLen =
    std::numeric_limits<std::int32_t>::max();  // seq_lens are int32
inline constexpr std::int64_t kMaxStepsInFlight = 16;

// A block is in exactly one state (I1).
enum class BlockState : std::uint8_t {
  kFree = 0,        // on the free list
  kCachedIdle = 1,  // ref count 0, its content findable; an allocation may evict it
  kReferenced = 2,  // held by at least one block table
  kInTransit = 3,   // being swapped out (ref count 0) or in (ref count > 0) beside a launched step
  kDraining = 4,    // ref count 0, but a launched step may still touch it
};
inline constexpr int kNumBlockStates = 5;

enum class CanAllocate : std::uint8_t { kOk, kLater, kNever };

// A copy for the caller to run. In one pool for copy-on-write; between the pools for a swap.
struct BlockCopy {
  BlockId source;
  BlockId destination;
  friend bool operator==(const BlockCopy&, const BlockCopy&) = default;
};

// Cached content that left its block for an allocation: moved to the CPU pool or given up.
struct Eviction {
  BlockId block = 0;            // -1: it was in the CPU pool already, and is given up there
  SeqId seq_id = 0;             // for which sequence
  std::int64_t idle_steps = 0;  // steps launched since its last holder let go of it
  BlockId cpu_block = -1;       // where it went, or was; -1: nowhere
  friend bool operator==(const Eviction&, const Eviction&) = default;
};

// Why the cached prefix of a prompt ends where it does.
enum class MissReason : std::uint8_t {
  kNone = 0,         // nothing is missing but what has to be computed in any case
  kNeverCached = 1,  // as far as is remembered; under another extra key counts as never
  kEvicted = 2,      // it was cached once
  kCachingOff = 3,
  kOnCpu = 4,  // it is in the CPU pool, and bringing it back would cost more than computing it
};
struct PrefixMiss {
  MissReason reason = MissReason::kNone;
  StepId evicted_in = 0;  // kEvicted: the step that was being built,
  SeqId evicted_for = 0;  // and the sequence that needed the block
  friend bool operator==(const PrefixMiss&, const PrefixMiss&) = default;
};

// A bad argument (a negative count, a duplicate id, ...) is std::invalid_argument. These are the
// other refusals:
class OutOfBlocks : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class UnknownSequence : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class DoubleFree : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class InvariantViolation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One consistent set of counters. num_free + num_cached_idle + num_referenced + num_in_transit +
// num_draining = num_blocks.
struct Statistics {
  std::int64_t num_blocks = 0;
  std::int64_t num_free = 0;
  std::int64_t num_cached_idle = 0;
  std::int64_t num_referenced = 0;
  std::int64_t num_shared = 0;  // ref count >= 2, whatever the state
  std::int64_t num_in_transit = 0;
  std::int64_t num_draining = 0;
  std::int64_t num_cpu_blocks = 0;
  std::int64_t num_cpu_free = 0;
  std::int64_t num_cpu_cached_idle = 0;  // evicted content that can be found, or dropped for a swap
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;            // positions held in the pool, a shared block counted once
  double token_occupancy = 0.0;           // num_tokens / (num_blocks * block_size)
  double block_occupancy = 0.0;           // (referenced + in transit + draining) / num_blocks
  std::int64_t prefix_cache_queries = 0;  // tokens looked up by allocate
  std::int64_t prefix_cache_hits = 0;     // tokens found by allocate
  std::int64_t prefix_cache_cpu_hits = 0;   // of these, tokens that came back from the CPU pool
  std::int64_t prefix_cache_misses = 0;     // the others
  std::int64_t prefix_cache_evictions = 0;  // cached tokens given up for an allocation
  std::int64_t num_evictions = 0;           // their blocks
  std::int64_t num_offloaded = 0;           // of these, moved to the CPU pool
  std::int64_t num_onloaded = 0;            // and of those, brought back
  std::int64_t num_offload_drops = 0;       // or given up there
  std::int64_t num_copies = 0;              // copy-on-write
  std::int64_t num_swapped_out = 0;         // blocks
  std::int64_t num_swapped_in = 0;          // blocks
};

}  // namespace pagedkv
