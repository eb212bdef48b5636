// SequenceTable: ids to slots, and the memory of freed ids.

#include <map>
#include <random>

#include "manager_state.h"

namespace pagedkv {
namespace {

Sequence& add(SequenceTable& table, SeqId id) {
  table.reserve(1);
  return table.add(id);
}

TEST(SequenceTable, finds_any_int64_and_nothing_else) {
  SequenceTable table;
  const std::vector<SeqId> ids = {0, -1, 1, INT64_MIN, INT64_MAX, 1LL << 40};
  for (const SeqId id : ids) add(table, id);
  for (const SeqId id : ids) EXPECT_EQ(table.at(table.slot(id)).id, id);
  EXPECT_FALSE(table.find(2).has_value());
  EXPECT_THROW(table.slot(2), UnknownSequence, "seq_id 2 is not known");
  EXPECT_EQ(table.size(), 6);
}

TEST(SequenceTable, tells_a_freed_id_from_one_that_never_was) {
  SequenceTable table;
  add(table, 5);
  table.remove(table.slot(5));
  EXPECT_TRUE(table.was_freed(5));
  EXPECT_FALSE(table.was_freed(6));
  EXPECT_THROW(table.slot(5), UnknownSequence, "seq_id 5 was freed");
  add(table, 5);
  EXPECT_FALSE(table.was_freed(5));
}

TEST(SequenceTable, forgets_the_oldest_freed_ids_so_that_memory_stays_bounded) {
  SequenceTable table;
  constexpr SeqId kNum = 3 * SequenceTable::kNumFreedRemembered;
  for (SeqId id = 0; id < kNum; ++id) {
    add(table, id);
    table.remove(table.slot(id));
  }
  EXPECT_FALSE(table.was_freed(0));
  EXPECT_TRUE(table.was_freed(kNum - 1));
  EXPECT_TRUE(table.was_freed(kNum - static_cast<SeqId>(SequenceTable::kNumFreedRemembered)));
  EXPECT_FALSE(table.was_freed(kNum - static_cast<SeqId>(SequenceTable::kNumFreedRemembered) - 1));
  EXPECT_EQ(table.num_slots(), 1);
}

TEST(SequenceTable, agrees_with_a_map_over_random_adds_and_removals) {
  SequenceTable table;
  std::map<SeqId, int> model;
  std::mt19937 random(3);
  for (int i = 0; i < 60000; ++i) {
    const SeqId id = static_cast<SeqId>(random() % 6000) * 977;
    if (model.erase(id) > 0) {
      table.remove(table.slot(id));
    } else {
      add(table, id);
      model[id] = 1;
    }
  }
  EXPECT_EQ(table.size(), model.size());
  for (SeqId id = 0; id < 6000 * 977; id += 977)
    EXPECT_EQ(table.find(id).has_value(), model.count(id) == 1);
  EXPECT_EQ(table.live_slots().size(), model.size());
}

TEST(SequenceTable, refuses_more_sequences_than_a_ref_count_can_count) {
  SequenceTable table;
  add(table, 1);
  EXPECT_THROW(table.reserve(SequenceTable::kMaxNumSequences), std::invalid_argument,
               "134217727 more sequences beside 1 are too many, at most 134217727 are allowed");
}

TEST(SequenceTable, a_reused_slot_starts_fresh_and_gives_large_memory_back) {
  SequenceTable table;
  Sequence& sequence = add(table, 1);
  sequence.table.resize(100000);
  sequence.tokens.resize(10);
  sequence.num_tokens = 7;
  sequence.is_swapped = true;
  table.remove(table.slot(1));
  const Sequence& again = add(table, 2);
  EXPECT_EQ(again.num_tokens, 0);
  EXPECT_FALSE(again.is_swapped);
  EXPECT_EQ(again.table.size(), 0);
  EXPECT_EQ(again.table.capacity(), 0);
  EXPECT_EQ(again.tokens.size(), 0);
  EXPECT_LE(10, again.tokens.capacity());
}

}  // namespace
}  // namespace pagedkv
