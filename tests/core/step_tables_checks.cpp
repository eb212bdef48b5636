// StepTables: a batch's tables into caller-owned buffers.

#include "manager_state.h"
#include "step_buffers.h"

namespace pagedkv {
namespace {

using testing::kPoison;
using testing::PoisonedBuffers;
using testing::table;
using testing::tokens;
using Ids = std::vector<SeqId>;
using Counts = std::vector<std::int64_t>;

// A table's first entries, the rest poison.
std::vector<BlockId> padded(std::vector<BlockId> entries, std::int64_t size) {
  entries.resize(static_cast<std::size_t>(size), kPoison);
  return entries;
}

TEST(StepTables, writes_every_table_of_a_mixed_batch_and_nothing_else) {
  BlockManager manager({.num_blocks = 16, .block_size = 4, .shuffle_seed = 5});
  manager.allocate(10, tokens(6));
  manager.append(10);                    // a decode: position 6
  manager.allocate(11, tokens(9, 100));  // a prefill
  const std::vector<BlockId> decode = table(manager, 10);
  const std::vector<BlockId> prefill = table(manager, 11);
  StepTables tables(manager, 4, 5);
  PoisonedBuffers buffers(4, 5, 12, 4);
  EXPECT_EQ(tables.write(Ids{10, 11}, Counts{1, 9}, Counts{3, 1}, buffers.view(), false), 10);
  EXPECT_EQ(buffers.row(3), padded(decode, 5));
  EXPECT_EQ(buffers.row(1), padded(prefill, 5));
  EXPECT_EQ(buffers.row(0), padded({}, 5));
  EXPECT_EQ(buffers.seq_lens, (std::vector<std::int32_t>{7, 9, kPoison, kPoison}));
  EXPECT_EQ(buffers.query_start_loc, (std::vector<std::int32_t>{0, 1, 10, kPoison, kPoison}));
  std::vector<std::int64_t> positions = {6};
  std::vector<std::int64_t> slots = {decode[1] * 4 + 2};
  for (std::int64_t position = 0; position < 9; ++position) {
    positions.push_back(position);
    slots.push_back(prefill[static_cast<std::size_t>(position / 4)] * 4 + position % 4);
  }
  positions.insert(positions.end(), 2, kPoison);
  slots.insert(slots.end(), 2, kPoison);
  EXPECT_EQ(buffers.positions, positions);
  EXPECT_EQ(buffers.slot_mapping, slots);
}

TEST(StepTables, a_chunk_starts_anywhere_in_a_block) {
  for (std::int64_t begin = 0; begin < 12; ++begin) {
    for (std::int64_t end = begin; end <= 12; ++end) {
      BlockManager manager({.num_blocks = 8, .block_size = 4, .shuffle_seed = 9});
      manager.allocate(0, tokens(12), end);
      StepTables tables(manager, 1, 3);
      PoisonedBuffers buffers(1, 3, 12, 1);
      EXPECT_EQ(tables.write(Ids{0}, Counts{end - begin}, Counts{0}, buffers.view(), false),
                end - begin);
      for (std::int64_t i = 0; i < end - begin; ++i) {
        const std::int64_t position = begin + i;
        EXPECT_EQ(buffers.positions[i], position);
        EXPECT_EQ(buffers.slot_mapping[i], table(manager, 0)[position / 4] * 4 + position % 4);
      }
    }
  }
}

TEST(StepTables, slots_of_top_block_ids_need_64_bits) {
  BlockManager manager({.num_blocks = 40000, .block_size = 65536, .enable_prefix_caching = false});
  for (SeqId id = 0; id < 39999; ++id) manager.allocate(id, tokens(1));
  manager.allocate(50000, tokens(1));
  StepTables tables(manager, 1, 1);
  PoisonedBuffers buffers(1, 1, 1, 1);
  tables.write(Ids{50000}, Counts{1}, Counts{0}, buffers.view(), false);
  EXPECT_EQ(buffers.slot_mapping[0], std::int64_t{39999} * 65536);
}

TEST(StepTables, only_changed_writes_an_entry_only_when_it_is_new) {
  BlockManager manager({.num_blocks = 32, .block_size = 4});
  manager.allocate(0, tokens(9));
  StepTables tables(manager, 2, 8);
  PoisonedBuffers buffers(2, 8, 16, 2);
  tables.write(Ids{0}, Counts{9}, Counts{1}, buffers.view(), true);
  EXPECT_EQ(tables.num_entries_written(), 3);
  for (int i = 0; i < 8; ++i) {
    manager.append(0);
    tables.write(Ids{0}, Counts{1}, Counts{1}, buffers.view(), true);
  }
  EXPECT_EQ(tables.num_entries_written(), 5);  // positions 12 and 16 began blocks
  EXPECT_EQ(buffers.row(1), padded(table(manager, 0), 8));
  tables.write(Ids{0}, Counts{1}, Counts{1}, buffers.view(), false);
  EXPECT_EQ(tables.num_entries_written(), 10);
}

TEST(StepTables, first_written_is_where_a_table_was_written_from) {
  BlockManager manager({.num_blocks = 32, .block_size = 4});
  manager.allocate(0, tokens(9));
  manager.allocate(1, tokens(4, 100));
  StepTables tables(manager, 2, 8);
  PoisonedBuffers buffers(2, 8, 16, 2);
  std::vector<std::int32_t> first(3, kPoison);
  const auto write = [&](Counts lens) {
    StepBuffers view = buffers.view();
    view.first_written = first;
    tables.write(Ids{0, 1}, lens, Counts{1, 0}, view, true);
    return first;
  };
  EXPECT_EQ(write({9, 4}), (std::vector<std::int32_t>{0, 0, kPoison}));
  manager.append(0);
  manager.append(1);
  EXPECT_EQ(write({1, 1}), (std::vector<std::int32_t>{3, 1, kPoison}));  // nothing; its second
  manager.fork(1, 2);
  manager.append(1);  // the second is a copy now
  EXPECT_EQ(write({1, 1}), (std::vector<std::int32_t>{3, 0, kPoison}));
  first.resize(1);
  EXPECT_THROW(write({1, 1}), std::invalid_argument,
               "first_written has 1 entries, the step needs 2");
}

TEST(StepTables, only_changed_notices_copies_swaps_shared_duplicates_and_other_sequences) {
  BlockManager manager({.num_blocks = 32, .block_size = 4, .num_cpu_blocks = 8});
  StepTables tables(manager, 2, 8);
  PoisonedBuffers buffers(2, 8, 16, 2);
  const auto check = [&](SeqId id, std::int64_t query_len) {
    tables.write(Ids{id}, Counts{query_len}, Counts{0}, buffers.view(), true);
    const std::vector<BlockId> row = buffers.row(0);
    const std::vector<BlockId> wanted = table(manager, id);
    EXPECT_EQ(
        std::vector<BlockId>(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(wanted.size())),
        wanted);
  };
  manager.allocate(0, tokens(10));
  check(0, 10);
  manager.fork(0, 1);
  manager.append(0);  // copy-on-write in the middle of the row's life
  check(0, 1);
  manager.swap_out(Ids{0});
  manager.allocate(7, tokens(4, 900));  // so that it comes back elsewhere
  manager.swap_in(Ids{0});
  check(0, 1);
  manager.publish(1, {}, 10);
  manager.publish(0, tokens(1, 50), 10);  // a duplicate of what 1 published
  check(0, 1);
  check(1, 1);  // the slot changes hands
  manager.free(0);
  manager.allocate(0, tokens(10, 300));  // the id lives again
  check(0, 10);
}

TEST(StepTables, alternating_buffers_are_remembered_apart) {
  BlockManager manager({.num_blocks = 32, .block_size = 1});
  manager.allocate(0, tokens(1));
  StepTables tables(manager, 1, 20);
  std::vector<PoisonedBuffers> pair(2, PoisonedBuffers(1, 20, 4, 1));
  for (int step = 0; step < 10; ++step) {
    manager.append(0);
    tables.write(Ids{0}, Counts{1}, Counts{0}, pair[step % 2].view(), true);
    EXPECT_EQ(pair[step % 2].row(0), padded(table(manager, 0), 20));
  }
  EXPECT_EQ(tables.num_entries_written(), 11 + 10);  // each buffer got each entry once
}

TEST(StepTables, a_forgotten_or_displaced_buffer_is_written_whole) {
  BlockManager manager({.num_blocks = 32, .block_size = 4});
  manager.allocate(0, tokens(12));
  StepTables tables(manager, 1, 4);
  std::vector<PoisonedBuffers> many(StepTables::kMaxBuffers + 1, PoisonedBuffers(1, 4, 12, 1));
  const auto write = [&](PoisonedBuffers& buffers) {
    const std::int64_t before = tables.num_entries_written();
    tables.write(Ids{0}, Counts{12}, Counts{0}, buffers.view(), true);
    return tables.num_entries_written() - before;
  };
  EXPECT_EQ(write(many[0]), 3);
  EXPECT_EQ(write(many[0]), 0);
  tables.forget(many[0].block_tables.data());
  EXPECT_EQ(write(many[0]), 3);
  for (PoisonedBuffers& buffers : many) write(buffers);
  EXPECT_EQ(write(many[0]), 3);  // the one used longest ago made room
  EXPECT_EQ(write(many[StepTables::kMaxBuffers]), 0);
}

TEST(StepTables, nothing_writes_a_shared_or_published_block) {
  BlockManager manager({.num_blocks = 16, .block_size = 4});
  testing::prefill(manager, 0, tokens(9));
  StepTables tables(manager, 2, 8);
  PoisonedBuffers buffers(2, 8, 16, 2);
  const PoisonedBuffers untouched = buffers;
  EXPECT_THROW(tables.write(Ids{0}, Counts{2}, Counts{0}, buffers.view(), false),
               InvariantViolation,
               "I5: seq_id 0 would write position 7, but its first 8 positions are published");
  manager.fork(0, 1);
  EXPECT_THROW(tables.write(Ids{1}, Counts{1}, Counts{0}, buffers.view(), false),
               InvariantViolation,
               "I5: seq_id 1 would write block 2, which has ref count 2; append makes it a copy");
  EXPECT_TRUE(buffers == untouched);
  manager.append(1);
  EXPECT_EQ(tables.write(Ids{1}, Counts{1}, Counts{0}, buffers.view(), false), 1);
}

TEST(StepTables, refuses_bad_input_and_writes_nothing) {
  BlockManager manager({.num_blocks = 16, .block_size = 4, .num_cpu_blocks = 4});
  for (SeqId id = 0; id < 3; ++id) manager.allocate(id, tokens(6, static_cast<TokenId>(100 * id)));
  manager.swap_out(Ids{2});
  StepTables tables(manager, 4, 2);
  PoisonedBuffers buffers(3, 2, 8, 2);
  const PoisonedBuffers untouched = buffers;
  const auto refused = [&](Ids ids, Counts lens, Counts slots, const char* part) {
    EXPECT_THROW(tables.write(ids, lens, slots, buffers.view(), false), std::invalid_argument,
                 part);
    EXPECT_TRUE(buffers == untouched);
  };
  refused({0, 1}, {1}, {0, 1}, "query_lens has 1 and slots 2 entries for 2 sequences");
  refused({0, 1}, {1, 1}, {0}, "query_lens has 2 and slots 1 entries for 2 sequences");
  refused({0}, {1}, {3}, "slots[0] must be between 0 and 2, got 3");  // the buffer has three rows
  refused({0}, {1}, {-1}, "slots[0] must be between 0 and 2, got -1");
  refused({0, 1}, {1, 1}, {1, 1}, "slot 1 stands twice in one step");
  refused({0, 0}, {1, 1}, {0, 1}, "seq_id 0 stands twice in one step");
  refused({0}, {7}, {0}, "query_lens[0] must be between 0 and the 6 tokens of seq_id 0, got 7");
  refused({0}, {-1}, {0}, "got -1");
  refused({2}, {1}, {0}, "seq_id 2 is swapped out; it cannot be in a step");
  refused({0, 1}, {6, 3}, {0, 1}, "slot_mapping has 8 entries, the step needs 9");
  EXPECT_THROW(tables.write(Ids{9}, Counts{1}, Counts{0}, buffers.view(), false), UnknownSequence,
               "seq_id 9");
  manager.append(0, 3);
  refused({0}, {1}, {0}, "seq_id 0 has 3 blocks, the tables hold max_num_blocks = 2");

  const auto too_small = [&](auto shrink, const char* part) {
    StepBuffers view = buffers.view();
    shrink(view);
    EXPECT_THROW(tables.write(Ids{1}, Counts{6}, Counts{0}, view, false), std::invalid_argument,
                 part);
    EXPECT_TRUE(buffers == untouched);
  };
  too_small([](StepBuffers& b) { b.positions = b.positions.first(5); },
            "positions has 5 entries, the step needs 6");
  too_small([](StepBuffers& b) { b.seq_lens = b.seq_lens.first(0); }, "seq_lens has 0 entries");
  too_small([](StepBuffers& b) { b.query_start_loc = b.query_start_loc.first(1); },
            "query_start_loc has 1 entries");
  too_small([](StepBuffers& b) { b.block_table_stride = 1; }, "block_tables has rows of 1 entries");
  EXPECT_THROW(StepTables(manager, 0, 2), std::invalid_argument,
               "max_num_slots must be between 1 and");
  EXPECT_THROW(StepTables(manager, 2, -1), std::invalid_argument,
               "max_num_blocks must be between 1 and");
}

TEST(StepTables, a_row_without_tokens_writes_no_block_and_may_share_all) {
  BlockManager manager({.num_blocks = 4, .block_size = 4});
  manager.allocate(0, tokens(6));
  manager.fork(0, 1);
  StepTables tables(manager, 1, 2);
  PoisonedBuffers buffers(1, 2, 1, 1);
  EXPECT_EQ(tables.write(Ids{1}, Counts{0}, Counts{0}, buffers.view(), false), 0);
  EXPECT_EQ(buffers.row(0), table(manager, 1));
  EXPECT_EQ(buffers.slot_mapping[0], kPoison);
}

TEST(StepTables, an_empty_step_is_one_zero) {
  BlockManager manager({.num_blocks = 2, .block_size = 4});
  StepTables tables(manager, 1, 1);
  PoisonedBuffers buffers(1, 1, 1, 1);
  EXPECT_EQ(tables.write({}, {}, {}, buffers.view(), true), 0);
  EXPECT_EQ(buffers.query_start_loc, (std::vector<std::int32_t>{0, kPoison}));
}

}  // namespace
}  // namespace pagedkv
