// StepState: which words of the device's image a step changes.

#include "check.h"
#include "pagedkv/core/step_state.h"

namespace pagedkv {
namespace {

using Counts = std::vector<std::int64_t>;
using Lens = std::vector<std::int32_t>;

constexpr std::int64_t kSlots = 4;
constexpr std::int64_t kBlocks = 3;
constexpr std::int64_t kBlockSize = 4;
constexpr std::int64_t kMaxLen = 12;

// A step over four slots of three blocks, and what it reads.
struct Step {
  Counts slots, query_lens;
  Lens seq_lens, first_written;
  Counts sample_rows, sample_draws;
  std::vector<std::int32_t> params = std::vector<std::int32_t>(kSlots * StepState::kParamWords);
  std::vector<TokenId> token_ids = std::vector<TokenId>(kSlots * kMaxLen, 50);
  std::int64_t num_padded = static_cast<std::int64_t>(slots.size());
  std::int64_t num_padded_tokens = 0;

  StateStep view() const {
    return {.slots = slots,
            .query_lens = query_lens,
            .seq_lens = seq_lens,
            .first_written = first_written,
            .sample_rows = sample_rows,
            .sample_draws = sample_draws,
            .params = params.data(),
            .token_ids = token_ids.data(),
            .max_model_len = kMaxLen,
            .num_padded = num_padded,
            .num_padded_tokens = num_padded_tokens};
  }
};

// Where a sequence of seq_len tokens decodes in slot 2, alone; its table was not written.
Step decode(std::int32_t seq_len) {
  Step step{{2}, {1}, {seq_len}, {3}, {0}, {0}};
  step.token_ids[static_cast<std::size_t>(2 * kMaxLen + seq_len - 1)] = StepState::kPendingToken;
  return step;
}

std::vector<std::int64_t> changed(StepState& state, const Step& step) {
  state.take();
  state.update(step.view());
  return {state.indices().begin(), state.indices().end()};
}

std::int64_t word(const StepState& state, StepState::Section section, std::int64_t i = 0) {
  return state.begin_of(section) + i;
}

TEST(StepState, sections_lie_one_behind_the_other_at_multiples_of_four_words) {
  const StepState state(5, 3, 4);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < StepState::kNumSections; ++i) {
    const auto section = static_cast<StepState::Section>(i);
    EXPECT_EQ(state.begin_of(section), end);
    end += (state.size_of(section) + 3) / 4 * 4;
  }
  EXPECT_EQ(state.num_words(), end);
  EXPECT_EQ(state.size_of(StepState::kTables), 15);
  EXPECT_EQ(state.size_of(StepState::kPrefixGroups), 6);
}

TEST(StepState, a_decode_that_goes_on_changes_nothing) {
  StepState state(kSlots, kBlocks, kBlockSize);
  EXPECT_FALSE(changed(state, decode(5)).empty());
  EXPECT_TRUE(changed(state, decode(6)).empty());
  EXPECT_TRUE(state.token_ids().empty());
  EXPECT_EQ(state.image()[word(state, StepState::kLens, 2)], 6);
  EXPECT_EQ(state.image()[word(state, StepState::kCounts, 0)], 1);
  EXPECT_EQ(state.image()[word(state, StepState::kCounts, 1)], 1);
}

TEST(StepState, entries_that_were_written_are_told_up_to_the_table_s_end) {
  StepState state(kSlots, kBlocks, kBlockSize);
  changed(state, decode(8));
  Step step = decode(9);
  step.first_written = {2};
  state.image()[word(state, StepState::kTables, 2 * kBlocks + 2)] = 77;
  EXPECT_EQ(changed(state, step), Counts{word(state, StepState::kTables, 2 * kBlocks + 2)});
  EXPECT_EQ(state.values()[0], 77);
}

TEST(StepState, a_length_that_the_device_does_not_expect_is_told_as_it_was_before_the_step) {
  StepState state(kSlots, kBlocks, kBlockSize);
  changed(state, decode(5));
  EXPECT_EQ(changed(state, decode(9)), Counts{word(state, StepState::kLens, 2)});
  EXPECT_EQ(state.values()[0], 8);
  EXPECT_TRUE(changed(state, decode(10)).empty());
}

TEST(StepState, how_tokens_are_drawn_is_told_with_the_first_row_that_samples) {
  StepState state(kSlots, kBlocks, kBlockSize);
  changed(state, decode(5));
  Step step = decode(6);
  step.params[2 * StepState::kParamWords + 3] = 9;
  step.sample_rows = step.sample_draws = {};
  EXPECT_EQ(changed(state, step), Counts{word(state, StepState::kSampleStartLoc, 1)});
  step = decode(7);
  step.params[2 * StepState::kParamWords + 3] = 9;
  step.sample_draws = {6};
  EXPECT_EQ(changed(state, step),
            (Counts{word(state, StepState::kSampleStartLoc, 1), word(state, StepState::kDraws, 2),
                    word(state, StepState::kParams, 2 * 8 + 3)}));
}

TEST(StepState, token_ids_are_sent_from_the_first_known_one_on) {
  StepState state(kSlots, kBlocks, kBlockSize);
  Step step{{2, 0, 3}, {1, 3, 2}, {6, 3, 4}, {3, 3, 3}, {0, 1, 1}, {0, 4, 5}};
  step.token_ids[2 * kMaxLen + 5] = StepState::kPendingToken;
  step.token_ids[3 * kMaxLen + 3] = StepState::kPendingToken;
  changed(state, step);
  EXPECT_EQ(Lens(state.token_ids().begin(), state.token_ids().end()), (Lens{50, 50, 50, 50, -1}));
  EXPECT_EQ(state.image()[word(state, StepState::kCounts, 1)], 1);
  for (int row = 0; row < 4; ++row) {
    EXPECT_EQ(state.image()[word(state, StepState::kQueryStartLoc, row)], (Lens{0, 1, 4, 6}[row]));
    EXPECT_EQ(state.image()[word(state, StepState::kSampleStartLoc, row)], (Lens{0, 1, 3, 3}[row]));
  }
}

TEST(StepState, padding_has_a_token_and_a_sample_each) {
  StepState state(kSlots, kBlocks, kBlockSize);
  Step step = decode(5);
  step.num_padded = step.num_padded_tokens = 4;
  changed(state, step);
  for (int row = 0; row <= 4; ++row) {
    EXPECT_EQ(state.image()[word(state, StepState::kQueryStartLoc, row)], row);
    EXPECT_EQ(state.image()[word(state, StepState::kSampleStartLoc, row)], row);
  }
  EXPECT_EQ(state.image()[word(state, StepState::kCounts)], 1);
}

TEST(StepState, the_last_row_of_padding_has_all_that_is_left) {
  StepState state(kSlots, kBlocks, kBlockSize);
  Step step{{2}, {3}, {6}, {3}, {}, {}};
  step.num_padded = 3;
  step.num_padded_tokens = 9;
  changed(state, step);
  for (int row = 0; row < 4; ++row) {
    EXPECT_EQ(state.image()[word(state, StepState::kQueryStartLoc, row)], (Lens{0, 3, 4, 9}[row]));
    EXPECT_EQ(state.image()[word(state, StepState::kSampleStartLoc, row)], (Lens{0, 0, 1, 3}[row]));
  }
  step.num_padded_tokens = 3;
  changed(state, step);
  EXPECT_EQ(state.image()[word(state, StepState::kQueryStartLoc, 2)], 3);
  EXPECT_EQ(state.image()[word(state, StepState::kQueryStartLoc, 3)], 3);
}

TEST(StepState, what_was_forgotten_is_all_told_again) {
  StepState state(kSlots, kBlocks, kBlockSize);
  const std::vector<std::int64_t> first = changed(state, decode(5));
  state.tell(StepState::kPrefixGroups, Lens{0, 2, 1});
  EXPECT_EQ(state.indices().size(), first.size() + 2);  // a 0 was one before
  state.forget();
  EXPECT_TRUE(state.indices().empty());
  EXPECT_EQ(changed(state, decode(5)), first);
}

TEST(StepState, refuses_bad_input_and_changes_nothing) {
  StepState state(kSlots, kBlocks, kBlockSize);
  changed(state, decode(5));
  state.take();
  const std::vector<std::int32_t> before(state.image().begin(), state.image().end());
  const auto refused = [&](auto change, const char* part) {
    Step step = decode(6);
    change(step);
    EXPECT_THROW(state.update(step.view()), std::invalid_argument, part);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), state.image().begin()));
    EXPECT_TRUE(state.indices().empty());
  };
  refused([](Step& s) { s.query_lens = {}; }, "query_lens has 0 entries, expected 1");
  refused([](Step& s) { s.seq_lens = {5, 5}; }, "seq_lens has 2 entries, expected 1");
  refused([](Step& s) { s.first_written = {}; }, "first_written has 0 entries, expected 1");
  refused([](Step& s) { s.sample_draws = {}; }, "sample_draws has 0 entries, expected 1");
  refused([](Step& s) { s.slots = {4}; }, "slots[0] must be between 0 and 3, got 4");
  refused([](Step& s) { s.seq_lens = {13}; }, "seq_lens[0] must be between 0 and 12, got 13");
  refused([](Step& s) { s.query_lens = {7}; }, "query_lens[0] must be between 0 and 6, got 7");
  refused([](Step& s) { s.first_written = {-1}; }, "first_written[0] must be between 0 and 3");
  refused([](Step& s) { s.sample_rows = {1}; }, "sample_rows[0] must be between 0 and 0, got 1");
  refused([](Step& s) { s.sample_draws = {-1}; }, "sample_draws[0] must be between 0 and");
  refused(
      [](Step& s) {
        s.sample_rows = {0, 0};
        s.sample_draws = {3, 5};
      },
      "sample_draws[1] must be between 4 and 4, got 5");
  refused([](Step& s) { s.num_padded = 0; }, "num_padded must be between 1 and 4, got 0");
  refused([](Step& s) { s.num_padded = 5; }, "num_padded must be between 1 and 4, got 5");
  refused([](Step& s) { s.num_padded = 2; }, "num_padded_tokens must be between 1 and");
  refused([](Step& s) { s.num_padded_tokens = 2; }, "num_padded_tokens must be between 1 and 1");
  refused(
      [](Step& s) {
        s.num_padded = s.num_padded_tokens = 2;
        s.sample_rows = {0, 0, 0};
        s.sample_draws = {0, 1, 2};
      },
      "the number of samples must be between 0 and 2, got 3");
  EXPECT_THROW(state.tell(StepState::kCounts, Lens{1, 2, 3}), std::invalid_argument,
               "counts has 2 words, got 3");
  EXPECT_THROW(StepState(0, 1, 1), std::invalid_argument, "max_num_slots must be between 1 and");
  EXPECT_THROW(StepState(1, 0, 1), std::invalid_argument, "max_num_blocks must be between 1 and");
  EXPECT_THROW(StepState(1, 1, 0), std::invalid_argument, "block_size must be between 1 and");
}

}  // namespace
}  // namespace pagedkv
