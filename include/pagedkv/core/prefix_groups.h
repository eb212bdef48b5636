// PrefixGrouper: which sequences of a batch share a prefix that is worth attending to once.
//
// Sequences whose block tables begin with the same P blocks may take one group {first_seq,
// num_seqs, P}, the form of paged_attention's prefix_groups: attention then reads those keys once,
// and merges what it found with what each sequence finds in its own keys. A group is a run of
// neighbouring sequences of the batch; arrange() first brings together those that share.
//
// The rule. Costs are counted in keys read: 1 is the time to read one token's K and V of one layer
// where another sequence reads them at the same time. A group of n sequences over a prefix of L
// tokens saves n - 1 readings of it,
//   saved = (n - 1) * L - n * per_row - m * L * per_row_key
// where per_row is what a sequence's partial states cost, and per_row_key one product of a sequence
// with one key, which the reading does not hide any more; products are made for m sequences, n
// rounded up to a multiple of seqs_per_tile. Of nested groups (some sequences share
// more than others) the level or the set of deeper groups that saves most is taken, the level if
// equal; kMaxLevels levels are looked at. No group is made at all unless all of them together save
// more than per_step, the cost of the launches.
//
// A sequence takes part if it has 1 to max_query_len query tokens (prefill is bound by products:
// sharing saves it nothing), its first block is a block (not kFreedBlock), and all its keys are
// within the window of its last query, or there is no window. Its part is at most the full blocks
// that its first query sees, seq_len - query_len + 1 tokens.
//
// Operations: each entry of a table that is part of a common prefix is compared about once, so the
// work is O(sequences * shared blocks), plus one pass over a run's sequences at each level.
//
// Owns: scratch memory. Errors: std::invalid_argument; nothing is changed by a call but scratch.
// Thread safety: none.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagedkv/core/types.h"

namespace pagedkv {

struct PrefixCosts {
  double per_step = 0.0;
  double per_row = 0.0;
  double per_row_key = 0.0;
  std::int64_t seqs_per_tile = 1;
};

struct PrefixGroup {
  std::int32_t first_seq;
  std::int32_t num_seqs;
  std::int32_t num_prefix_blocks;
  friend bool operator==(const PrefixGroup&, const PrefixGroup&) = default;
};

// A batch: sequence i has its table in row slots[i] of block_tables, or in row i without slots.
struct PrefixBatch {
  const BlockId* block_tables = nullptr;  // [num_block_table_rows, max_num_blocks]
  std::int64_t num_block_table_rows = 0;
  std::int64_t max_num_blocks = 0;
  std::int64_t block_table_stride = 0;       // elements between rows
  std::span<const std::int64_t> slots;       // [num_seqs], or empty
  std::span<const std::int32_t> seq_lens;    // [num_seqs], this step's tokens included
  std::span<const std::int64_t> query_lens;  // [num_seqs]
};

class PrefixGrouper {
 public:
  static constexpr std::int64_t kMaxLevels = 32;

  // window: how many keys a query sees, 0 for all.
  PrefixGrouper(std::int64_t block_size, std::int64_t max_query_len, std::int64_t window,
                const PrefixCosts& costs);

  // Groups among neighbours, by first_seq.
  std::vector<PrefixGroup> find(const PrefixBatch& batch);

  // Also says how to order the sequences: place i takes sequence order[i]. Those that can take part
  // come first, those that share together, the others behind them as they were. The groups count
  // places.
  std::vector<PrefixGroup> arrange(const PrefixBatch& batch, std::vector<std::int64_t>& order);

  // Table entries compared so far.
  std::int64_t num_entries_compared() const { return num_entries_compared_; }

 private:
  // A sequence that can take part.
  struct Member {
    const BlockId* table;
    std::int64_t seq;
    std::int64_t num_blocks;  // at most
  };
  void collect(const PrefixBatch& batch);
  std::vector<PrefixGroup> choose(bool may_reorder);
  template <class Key>
  void gather(std::size_t begin, std::size_t end, const Key& key);
  double plan_run(std::size_t begin, std::size_t end, std::int64_t depth, std::int64_t levels,
                  bool may_reorder);
  std::int64_t common_blocks(std::size_t begin, std::size_t end, std::int64_t depth);
  double saved(std::int64_t num_seqs, std::int64_t num_blocks) const;

  std::int64_t block_size_;
  std::int64_t max_query_len_;
  std::int64_t window_;
  PrefixCosts costs_;
  std::vector<Member> members_;
  std::vector<PrefixGroup> chosen_;
  std::int64_t num_entries_compared_ = 0;
};

}  // namespace pagedkv
