// PrefixGrouper: a walk down the tree of common prefixes, whose nodes are runs of members_.

#include "pagedkv/core/prefix_groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace pagedkv {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_bound(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    refuse(std::string(name) + " must be between " + std::to_string(low) + " and " +
           std::to_string(high) + ", got " + std::to_string(value));
  }
}

void check_cost(const char* name, double value) {
  if (!std::isfinite(value) || value < 0.0) {
    refuse(std::string(name) + " must be a finite number of at least 0, got " +
           std::to_string(value));
  }
}

}  // namespace

PrefixGrouper::PrefixGrouper(std::int64_t block_size, std::int64_t max_query_len,
                             std::int64_t window, const PrefixCosts& costs)
    : block_size_(block_size), max_query_len_(max_query_len), window_(window), costs_(costs) {
  check_bound("block_size", block_size, 1, kMaxBlockSize);
  check_bound("max_query_len", max_query_len, 1, kMaxSeqLen);
  check_bound("window", window, 0, kMaxSeqLen);
  check_cost("per_step", costs.per_step);
  check_cost("per_row", costs.per_row);
  check_cost("per_row_key", costs.per_row_key);
  check_bound("seqs_per_tile", costs.seqs_per_tile, 1, kMaxSeqLen);
}

std::vector<PrefixGroup> PrefixGrouper::find(const PrefixBatch& batch) {
  collect(batch);
  return choose(/*may_reorder=*/false);
}

std::vector<PrefixGroup> PrefixGrouper::arrange(const PrefixBatch& batch,
                                                std::vector<std::int64_t>& order) {
  collect(batch);
  std::vector<PrefixGroup> groups = choose(/*may_reorder=*/true);
  const std::size_t num_seqs = batch.seq_lens.size();
  std::vector<bool> placed(num_seqs, false);
  order.clear();
  order.reserve(num_seqs);
  for (const Member& member : members_) {
    order.push_back(member.seq);
    placed[static_cast<std::size_t>(member.seq)] = true;
  }
  for (std::size_t i = 0; i < num_seqs; ++i) {
    if (!placed[i]) order.push_back(static_cast<std::int64_t>(i));
  }
  return groups;
}

void PrefixGrouper::collect(const PrefixBatch& batch) {
  const std::size_t num_seqs = batch.seq_lens.size();
  if (batch.query_lens.size() != num_seqs ||
      (!batch.slots.empty() && batch.slots.size() != num_seqs)) {
    refuse("query_lens has " + std::to_string(batch.query_lens.size()) + " and slots " +
           std::to_string(batch.slots.size()) + " entries for " + std::to_string(num_seqs) +
           " sequences");
  }
  if (batch.slots.empty() && static_cast<std::int64_t>(num_seqs) > batch.num_block_table_rows) {
    refuse("block_tables has " + std::to_string(batch.num_block_table_rows) + " rows for " +
           std::to_string(num_seqs) + " sequences");
  }
  members_.clear();
  for (std::size_t i = 0; i < num_seqs; ++i) {
    const std::int64_t row = batch.slots.empty() ? static_cast<std::int64_t>(i) : batch.slots[i];
    if (row < 0 || row >= batch.num_block_table_rows) {
      refuse("slots[" + std::to_string(i) + "] must be between 0 and " +
             std::to_string(batch.num_block_table_rows - 1) + ", got " + std::to_string(row));
    }
    const std::int64_t query_len = batch.query_lens[i];
    const std::int64_t seq_len = batch.seq_lens[i];
    if (query_len < 1 || query_len > max_query_len_) continue;
    if (window_ > 0 && seq_len > window_) continue;
    const std::int64_t num_blocks = (seq_len - query_len + 1) / block_size_;
    if (num_blocks < 1) continue;
    if (num_blocks > batch.max_num_blocks) {
      refuse("seq_lens[" + std::to_string(i) + "] is " + std::to_string(seq_len) +
             ", block_tables has rows of " + std::to_string(batch.max_num_blocks) + " blocks of " +
             std::to_string(block_size_));
    }
    const BlockId* table = batch.block_tables + row * batch.block_table_stride;
    if (table[0] < 0) continue;
    members_.push_back(
        {.table = table, .seq = static_cast<std::int64_t>(i), .num_blocks = num_blocks});
  }
}

double PrefixGrouper::saved(std::int64_t num_seqs, std::int64_t num_blocks) const {
  const auto n = static_cast<double>(num_seqs);
  const std::int64_t tile = costs_.seqs_per_tile;
  const auto m = static_cast<double>((num_seqs + tile - 1) / tile * tile);
  const auto length = static_cast<double>(num_blocks * block_size_);
  return (n - 1.0) * length - n * costs_.per_row - m * length * costs_.per_row_key;
}

std::vector<PrefixGroup> PrefixGrouper::choose(bool may_reorder) {
  chosen_.clear();
  double saved = 0.0;
  std::size_t begin = 0;
  while (begin < members_.size()) {
    std::size_t end = begin + 1;
    while (end < members_.size() &&
           (may_reorder || members_[end].seq == members_[end - 1].seq + 1)) {
      ++end;
    }
    saved += plan_run(begin, end, 0, kMaxLevels, may_reorder);
    begin = end;
  }
  if (saved <= costs_.per_step) chosen_.clear();
  return chosen_;
}

// How many blocks all of members_[begin, end) have in common, given that they share `depth`.
std::int64_t PrefixGrouper::common_blocks(std::size_t begin, std::size_t end, std::int64_t depth) {
  const Member& head = members_[begin];
  std::int64_t common = head.num_blocks;
  for (std::size_t i = begin + 1; i < end && common > depth; ++i) {
    const Member& member = members_[i];
    common = std::min(common, member.num_blocks);
    if (std::memcmp(head.table + depth, member.table + depth,
                    static_cast<std::size_t>(common - depth) * sizeof(BlockId)) != 0) {
      const auto differs =
          std::mismatch(head.table + depth, head.table + common, member.table + depth);
      common = differs.first - head.table;
    }
    num_entries_compared_ += common - depth + 1;
  }
  return common;
}

// Brings members with the same key together, in the order of the keys, each in its old order.
template <class Key>
void PrefixGrouper::gather(std::size_t begin, std::size_t end, const Key& key) {
  const auto at = [&](std::size_t i) { return members_.begin() + static_cast<std::ptrdiff_t>(i); };
  while (end - begin > 1) {
    const std::int64_t pivot = key(members_[begin + (end - begin) / 2]);
    const auto lower = std::stable_partition(
        at(begin), at(end), [&](const Member& member) { return key(member) < pivot; });
    const auto upper = std::stable_partition(
        lower, at(end), [&](const Member& member) { return key(member) == pivot; });
    gather(begin, static_cast<std::size_t>(lower - members_.begin()), key);
    begin = static_cast<std::size_t>(upper - members_.begin());
  }
}

// The members of a run share `depth` blocks. Appends the groups of the best plan to chosen_ and
// returns what they save.
double PrefixGrouper::plan_run(std::size_t begin, std::size_t end, std::int64_t depth,
                               std::int64_t levels, bool may_reorder) {
  const auto num_seqs = static_cast<std::int64_t>(end - begin);
  if (num_seqs < 2) return 0.0;
  const std::int64_t common = common_blocks(begin, end, depth);
  const std::size_t first_chosen = chosen_.size();
  double deeper = 0.0;
  if (levels > 1) {
    // By their next block; those that have none left come last.
    const auto key = [&](const Member& member) {
      return member.num_blocks > common ? std::int64_t{member.table[common]} : kMaxNumBlocks;
    };
    if (may_reorder) gather(begin, end, key);
    std::size_t run = begin;
    while (run < end) {
      const std::int64_t block = key(members_[run]);
      std::size_t run_end = run + 1;
      while (run_end < end && key(members_[run_end]) == block) ++run_end;
      if (block != kMaxNumBlocks) {
        deeper += plan_run(run, run_end, common + 1, levels - 1, may_reorder);
      }
      run = run_end;
    }
  }
  const double whole = common > 0 ? saved(num_seqs, common) : 0.0;
  if (whole <= 0.0 || whole < deeper) return deeper;
  chosen_.resize(first_chosen);
  const auto first = may_reorder ? static_cast<std::int64_t>(begin) : members_[begin].seq;
  chosen_.push_back({.first_seq = static_cast<std::int32_t>(first),
                     .num_seqs = static_cast<std::int32_t>(num_seqs),
                     .num_prefix_blocks = static_cast<std::int32_t>(common)});
  return whole;
}

}  // namespace pagedkv
