// PrefixGrouper: the rule against values computed by hand, and against an exhaustive search.

#include <algorithm>
#include <random>
#include <stdexcept>

#include "check.h"
#include "pagedkv/core/prefix_groups.h"

namespace pagedkv {

std::ostream& operator<<(std::ostream& out, const PrefixGroup& group) {
  return out << "{" << group.first_seq << ", " << group.num_seqs << ", " << group.num_prefix_blocks
             << "}";
}

namespace {

using Groups = std::vector<PrefixGroup>;
using Order = std::vector<std::int64_t>;
constexpr BlockId kUnread = -77;  // in entries that no sequence's full blocks reach

// Sequences with these tables, 4 tokens a block, all blocks full and one token more.
struct Tables {
  std::vector<std::vector<BlockId>> rows;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int64_t> query_lens;
  std::vector<BlockId> entries;
  std::int64_t width = 0;

  explicit Tables(std::vector<std::vector<BlockId>> tables) : rows(std::move(tables)) {
    for (const std::vector<BlockId>& row : rows) {
      width = std::max(width, static_cast<std::int64_t>(row.size()) + 1);
      seq_lens.push_back(static_cast<std::int32_t>(4 * row.size() + 1));
      query_lens.push_back(1);
    }
    for (const std::vector<BlockId>& row : rows) {
      entries.insert(entries.end(), row.begin(), row.end());
      entries.resize(entries.size() + static_cast<std::size_t>(width) - row.size(), kUnread);
    }
  }
  PrefixBatch batch() const {
    return {.block_tables = entries.data(),
            .num_block_table_rows = static_cast<std::int64_t>(rows.size()),
            .max_num_blocks = width,
            .block_table_stride = width,
            .slots = {},
            .seq_lens = seq_lens,
            .query_lens = query_lens};
  }
};

PrefixGrouper grouper(const PrefixCosts& costs = {}, std::int64_t max_query_len = 1,
                      std::int64_t window = 0) {
  return PrefixGrouper(4, max_query_len, window, costs);
}

TEST(PrefixGrouper, finds_the_longest_common_run_of_neighbours) {
  const Tables tables({{1, 2, 3}, {1, 2, 4}, {1, 2, 3, 9}, {7, 8}, {5}, {5}, {6}});
  // {0..2} share two blocks: 2 * 8 keys saved. {5, 5} share one: 4 keys.
  EXPECT_EQ(grouper().find(tables.batch()), (Groups{{0, 3, 2}, {4, 2, 1}}));
}

TEST(PrefixGrouper, does_not_join_over_a_stranger_unless_it_may_reorder) {
  const Tables tables({{1, 2}, {5, 6}, {1, 2}, {5, 6}, {9, 9}});
  EXPECT_EQ(grouper().find(tables.batch()), Groups{});
  Order order;
  EXPECT_EQ(grouper().arrange(tables.batch(), order), (Groups{{0, 2, 2}, {2, 2, 2}}));
  EXPECT_EQ(order, (Order{0, 2, 1, 3, 4}));
}

TEST(PrefixGrouper, of_nested_groups_takes_what_saves_most) {
  // All four share 1 block: 3 * 4 = 12. Two pairs share 3 blocks: 2 * 12 = 24.
  const Tables pairs({{1, 2, 3}, {1, 2, 3}, {1, 4, 5}, {1, 4, 5}});
  EXPECT_EQ(grouper().find(pairs.batch()), (Groups{{0, 2, 3}, {2, 2, 3}}));
  // All four share 2 blocks: 3 * 8 = 24. One pair shares 3: 12.
  const Tables level({{1, 2, 3}, {1, 2, 3}, {1, 2, 4}, {1, 2, 5}});
  EXPECT_EQ(grouper().find(level.batch()), (Groups{{0, 4, 2}}));
  // Equal: 3 * 4 = 12 and 12. The level is taken.
  const Tables equal({{1, 2, 3}, {1, 2, 3}, {1, 4}, {1, 5}});
  EXPECT_EQ(grouper().find(equal.batch()), (Groups{{0, 4, 1}}));
}

TEST(PrefixGrouper, weighs_rows_products_and_whole_tiles) {
  // Three sequences over 4 blocks, 16 keys: 2 * 16 - 3 * per_row - m * 16 * per_row_key.
  const Tables tables({{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}});
  const Groups all{{0, 3, 4}};
  EXPECT_EQ(grouper({.per_row = 10.6}).find(tables.batch()), all);       // saves 0.2
  EXPECT_EQ(grouper({.per_row = 10.7}).find(tables.batch()), Groups{});  // loses 0.1
  EXPECT_EQ(grouper({.per_row_key = 0.66}).find(tables.batch()), all);   // m = 3: saves 0.32
  EXPECT_EQ(grouper({.per_row_key = 0.67}).find(tables.batch()), Groups{});
  EXPECT_EQ(grouper({.per_row_key = 0.49, .seqs_per_tile = 4}).find(tables.batch()), all);
  EXPECT_EQ(grouper({.per_row_key = 0.51, .seqs_per_tile = 4}).find(tables.batch()), Groups{});
}

TEST(PrefixGrouper, weighs_the_launches_against_all_groups_together) {
  // 8 + 4 keys saved.
  const Tables tables({{1, 2}, {1, 2}, {3}, {3}});
  EXPECT_EQ(grouper({.per_step = 11.9}).find(tables.batch()), (Groups{{0, 2, 2}, {2, 2, 1}}));
  EXPECT_EQ(grouper({.per_step = 12.0}).find(tables.batch()), Groups{});
}

TEST(PrefixGrouper, never_reaches_past_what_the_first_query_sees) {
  Tables tables({{1, 2, 3}, {1, 2, 3}});
  tables.seq_lens = {12, 12};  // the last block is full: its last token is the query itself
  EXPECT_EQ(grouper().find(tables.batch()), (Groups{{0, 2, 3}}));
  tables.seq_lens = {12, 11};
  EXPECT_EQ(grouper().find(tables.batch()), (Groups{{0, 2, 2}}));
  tables.seq_lens = {12, 13};
  tables.query_lens = {1, 3};  // the first of three queries sees 11 keys
  EXPECT_EQ(grouper({}, 3).find(tables.batch()), (Groups{{0, 2, 2}}));
  tables.seq_lens = {3, 12};
  EXPECT_EQ(grouper({}, 3).find(tables.batch()), Groups{});
}

TEST(PrefixGrouper, leaves_out_prefill_padding_and_what_a_window_cuts) {
  Tables tables({{1, 2}, {1, 2}, {1, 2}, {1, 2}});
  tables.query_lens = {1, 1, 2, 1};
  EXPECT_EQ(grouper().find(tables.batch()), (Groups{{0, 2, 2}}));  // a prefill between them
  Order order;
  EXPECT_EQ(grouper().arrange(tables.batch(), order), (Groups{{0, 3, 2}}));
  EXPECT_EQ(order, (Order{0, 1, 3, 2}));
  EXPECT_EQ(grouper({}, 2).find(tables.batch()), (Groups{{0, 4, 2}}));  // it sees 8 keys
  tables.query_lens = {1, 0, 1, 1};
  tables.seq_lens = {9, 0, 9, 10};
  EXPECT_EQ(grouper().find(tables.batch()), (Groups{{2, 2, 2}}));
  EXPECT_EQ(grouper({}, 1, 10).find(tables.batch()), (Groups{{2, 2, 2}}));
  EXPECT_EQ(grouper({}, 1, 9).find(tables.batch()), Groups{});
}

TEST(PrefixGrouper, leaves_out_sequences_whose_first_blocks_are_freed) {
  const Tables tables({{kFreedBlock, 2, 3}, {kFreedBlock, 2, 3}, {1, 2}, {1, 2}});
  EXPECT_EQ(grouper().find(tables.batch()), (Groups{{2, 2, 2}}));
}

TEST(PrefixGrouper, reads_tables_through_slots) {
  const Tables tables({{1, 2}, {3, 4}, {1, 2}});
  PrefixBatch batch = tables.batch();
  const Order slots = {2, 0, 1};
  batch.slots = slots;
  EXPECT_EQ(grouper().find(batch), (Groups{{0, 2, 2}}));
}

TEST(PrefixGrouper, compares_each_shared_entry_about_once) {
  constexpr std::int64_t kSeqs = 1024;
  constexpr std::int64_t kShared = 128;
  std::vector<std::vector<BlockId>> rows;
  for (BlockId s = 0; s < kSeqs; ++s) {
    rows.emplace_back();
    for (BlockId i = 0; i < kShared; ++i) rows.back().push_back(i);
    for (BlockId i = 0; i < 8; ++i) rows.back().push_back(1000 + 8 * s + i);
  }
  const Tables tables(rows);
  PrefixGrouper once = grouper();
  EXPECT_EQ(once.find(tables.batch()), (Groups{{0, kSeqs, kShared}}));
  EXPECT_LT(once.num_entries_compared(), kSeqs * (kShared + 2));
}

TEST(PrefixGrouper, stops_at_its_deepest_level) {
  // A chain: sequence i shares i blocks with the next one. Deeper levels are not looked at.
  std::vector<std::vector<BlockId>> rows;
  constexpr BlockId kSeqs = 100;
  for (BlockId s = 0; s < kSeqs; ++s) {
    rows.emplace_back();
    for (BlockId i = 0; i < s; ++i) rows.back().push_back(i);
    rows.back().push_back(1000 + s);
  }
  PrefixGrouper chain = grouper();
  const Groups groups = chain.find(Tables(rows).batch());
  ASSERT_EQ(groups.size(), std::size_t{1});
  EXPECT_EQ(groups[0],
            (PrefixGroup{PrefixGrouper::kMaxLevels - 1, kSeqs - PrefixGrouper::kMaxLevels + 1,
                         PrefixGrouper::kMaxLevels - 1}));
}

std::size_t shared_blocks(const std::vector<BlockId>& a, const std::vector<BlockId>& b) {
  std::size_t shared = 0;
  while (shared < a.size() && shared < b.size() && a[shared] == b[shared]) ++shared;
  return shared;
}

// The most that groups of neighbours can save, each as long as its prefix allows: all ways to cut
// the batch into such groups and single sequences.
double best_by_search(const std::vector<std::vector<BlockId>>& rows, const PrefixCosts& costs) {
  std::vector<double> best(rows.size() + 1, 0.0);
  for (std::size_t end = 1; end <= rows.size(); ++end) {
    best[end] = best[end - 1];
    std::size_t common = rows[end - 1].size();
    for (std::size_t begin = end - 1; begin-- > 0;) {
      common = std::min(common, shared_blocks(rows[begin], rows[begin + 1]));
      const bool goes_on = (begin > 0 && shared_blocks(rows[begin - 1], rows[begin]) >= common) ||
                           (end < rows.size() && shared_blocks(rows[end - 1], rows[end]) >= common);
      if (common == 0 || goes_on) continue;
      const auto n = static_cast<double>(end - begin);
      const double length = 4.0 * static_cast<double>(common);
      const double saved = (n - 1) * length - n * costs.per_row - n * length * costs.per_row_key;
      best[end] = std::max(best[end], best[begin] + saved);
    }
  }
  return best[rows.size()];
}

TEST(PrefixGrouper, saves_as_much_as_an_exhaustive_search) {
  std::mt19937 random(5);
  const PrefixCosts costs{.per_row = 1.5, .per_row_key = 0.1};
  for (int round = 0; round < 500; ++round) {
    std::vector<std::vector<BlockId>> rows(1 + random() % 9);
    for (std::vector<BlockId>& row : rows) {
      row.resize(random() % 6);
      for (BlockId& block : row) block = static_cast<BlockId>(random() % 2);
    }
    const Tables tables(rows);
    double saved = 0.0;
    std::int32_t reached = 0;
    for (const PrefixGroup& group : grouper(costs).find(tables.batch())) {
      EXPECT_LE(reached, group.first_seq);
      reached = group.first_seq + group.num_seqs;
      for (std::int32_t s = group.first_seq; s < reached; ++s) {
        const std::vector<BlockId>& head = rows[static_cast<std::size_t>(group.first_seq)];
        const std::vector<BlockId>& row = rows[static_cast<std::size_t>(s)];
        ASSERT_TRUE(static_cast<std::size_t>(group.num_prefix_blocks) <= row.size());
        EXPECT_TRUE(std::equal(head.begin(), head.begin() + group.num_prefix_blocks, row.begin()));
      }
      const double n = group.num_seqs;
      const double length = 4.0 * group.num_prefix_blocks;
      saved += (n - 1) * length - n * costs.per_row - n * length * costs.per_row_key;
    }
    EXPECT_LT(std::abs(saved - best_by_search(rows, costs)), 1e-9);
  }
}

TEST(PrefixGrouper, arranged_sequences_save_at_least_as_much_and_none_is_lost) {
  std::mt19937 random(6);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::vector<BlockId>> rows(1 + random() % 12);
    for (std::vector<BlockId>& row : rows) {
      row.resize(random() % 5);
      for (BlockId& block : row) block = static_cast<BlockId>(random() % 3);
    }
    const Tables tables(rows);
    Order order;
    const Groups groups = grouper().arrange(tables.batch(), order);
    Order sorted = order;
    std::ranges::sort(sorted);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(sorted[i], static_cast<std::int64_t>(i));
    }
    std::vector<std::vector<BlockId>> arranged;
    for (const std::int64_t seq : order) arranged.push_back(rows[static_cast<std::size_t>(seq)]);
    EXPECT_EQ(grouper().find(Tables(arranged).batch()), groups);
    EXPECT_LE(best_by_search(rows, {}), best_by_search(arranged, {}));
  }
}

TEST(PrefixGrouper, refuses_by_name_and_value) {
  using Bad = std::invalid_argument;
  EXPECT_THROW(PrefixGrouper(0, 1, 0, {}), Bad, "block_size must be between 1 and 65536, got 0");
  EXPECT_THROW(PrefixGrouper(4, 0, 0, {}), Bad, "max_query_len must be between 1 and");
  EXPECT_THROW(PrefixGrouper(4, 1, -1, {}), Bad, "window must be between 0 and 2147483647, got -1");
  EXPECT_THROW(grouper({.per_row = -1.0}), Bad, "per_row must be a finite number of at least 0");
  EXPECT_THROW(grouper({.seqs_per_tile = 0}), Bad, "seqs_per_tile must be between 1 and");
  const Tables tables({{1, 2}, {1, 2}});
  PrefixBatch batch = tables.batch();
  const Order slots = {0, 2};
  batch.slots = slots;
  EXPECT_THROW(grouper().find(batch), Bad, "slots[1] must be between 0 and 1, got 2");
  batch = tables.batch();
  batch.max_num_blocks = 1;
  EXPECT_THROW(grouper().find(batch), Bad, "seq_lens[0] is 9, block_tables has rows of 1 blocks");
  batch = tables.batch();
  batch.num_block_table_rows = 1;
  EXPECT_THROW(grouper().find(batch), Bad, "block_tables has 1 rows for 2 sequences");
  batch = tables.batch();
  batch.query_lens = {};
  EXPECT_THROW(grouper().find(batch), Bad, "query_lens has 0 and slots 0 entries for 2 sequences");
}

}  // namespace
}  // namespace pagedkv
