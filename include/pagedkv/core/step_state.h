// StepState: what a device knows of the running sequences, as an image of its memory, and the words
// of it that a step changes.
//
// The device keeps num_words int32 words, all zero at first. Each step update() brings the image to
// where the device has to be when the step begins, remembers each word that differs as (index,
// value), and then counts the step's tokens into the image as the device does itself (op
// advance_step). So a word is sent only where the device does not know it by itself: a decode that
// goes on in its row and in its last block sends nothing.
//
// Sections of the image, each at a multiple of four words. A slot is the stable place of a
// sequence, a row its place in one step.
//
//   tables            [max_num_slots, max_num_blocks]  block tables, by slot
//   lens              [max_num_slots]      tokens of the slot's sequence, steps so far included
//   draws             [max_num_slots]      the draw of its first sample
//   params            [max_num_slots, 8]   how its tokens are drawn (kParamWords)
//   slots             [max_num_slots]      by row
//   query_start_loc   [max_num_slots + 1]  by row: its tokens in the step
//   sample_start_loc  [max_num_slots + 1]  by row: its samples
//   prefix_groups     [max_num_slots / 2, 3]
//   counts            [2]  rows of the step; leading tokens that the step before chooses
//
// Owns the image and the changes. The block tables in it are written by whoever has the sequences
// (StepTables, with only_changed), who says from which entry on a row's table was written.
//
// A call happens whole or throws std::invalid_argument and changes nothing. Thread safety: none.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "pagedkv/core/types.h"

namespace pagedkv {

// One step of num_rows rows. Row r is the sequence at slots[r], whose last query_lens[r] of
// seq_lens[r] tokens are in the step, and whose table was written from entry first_written[r] on.
// Its samples are neighbours in sample_rows, which ascends; their draws count up from the first
// one's.
struct StateStep {
  std::span<const std::int64_t> slots;
  std::span<const std::int64_t> query_lens;
  std::span<const std::int32_t> seq_lens;
  std::span<const std::int32_t> first_written;
  std::span<const std::int64_t> sample_rows;   // [num_samples]
  std::span<const std::int64_t> sample_draws;  // [num_samples]
  const std::int32_t* params = nullptr;        // [max_num_slots, kParamWords]
  const TokenId* token_ids = nullptr;          // [max_num_slots, max_model_len]; kPendingToken
  std::int64_t max_model_len = 0;
  // Rows of padding follow up to num_padded rows, at least num_rows, and num_padded_tokens tokens:
  // each has one of these and one sample, as far as there are so many, the last all that are left.
  // Samples are as many as rows then. Without such rows num_padded_tokens is the step's, or 0.
  std::int64_t num_padded = 0;
  std::int64_t num_padded_tokens = 0;
};

class StepState {
 public:
  static constexpr std::int64_t kParamWords = 8;
  // Of a token that the step before chooses, on the device.
  static constexpr TokenId kPendingToken = -1;

  enum Section : std::size_t {
    kTables,
    kLens,
    kDraws,
    kParams,
    kSlots,
    kQueryStartLoc,
    kSampleStartLoc,
    kPrefixGroups,
    kCounts,
    kNumSections,
  };
  static constexpr std::array<std::string_view, kNumSections> kNames = {
      "tables",           "lens",          "draws", "params", "slots", "query_start_loc",
      "sample_start_loc", "prefix_groups", "counts"};

  StepState(std::int64_t max_num_slots, std::int64_t max_num_blocks, std::int64_t block_size);
  StepState(const StepState&) = delete;
  StepState& operator=(const StepState&) = delete;

  std::int64_t max_num_slots() const { return max_num_slots_; }
  std::int64_t max_num_blocks() const { return max_num_blocks_; }
  std::int64_t num_words() const { return static_cast<std::int64_t>(image_.size()); }
  // First word and number of words.
  std::int64_t begin_of(Section section) const { return begins_[section]; }
  std::int64_t size_of(Section section) const { return sizes_[section]; }
  std::span<std::int32_t> image() { return image_; }

  void update(const StateStep& step);
  // The section's first words.
  void tell(Section section, std::span<const std::int32_t> values);

  // Since take(): words to be sent, each once, and token ids of the step from the first one on that
  // is known; kPendingToken among them where the step before chooses.
  std::span<const std::int64_t> indices() const { return indices_; }
  std::span<const std::int32_t> values() const { return values_; }
  std::span<const TokenId> token_ids() const { return token_ids_; }
  // They are on their way.
  void take();
  // The device is all zeros again.
  void forget();

 private:
  void check(const StateStep& step) const;
  void set(std::int64_t index, std::int32_t value) {
    std::int32_t& word = image_[static_cast<std::size_t>(index)];
    if (word == value) return;
    word = value;
    push(index, value);
  }
  void push(std::int64_t index, std::int32_t value) {
    indices_.push_back(index);
    values_.push_back(value);
  }
  void set_row(const StateStep& step, std::size_t row);
  void set_draws(const StateStep& step, std::int64_t slot, std::int64_t first_draw);
  // num_tokens, num_samples: of the rows before.
  void set_padding(const StateStep& step, std::int32_t num_tokens, std::int32_t num_samples);
  void add_token_ids(const TokenId* from, std::int64_t count);

  std::int64_t max_num_slots_;
  std::int64_t max_num_blocks_;
  std::int64_t block_size_;
  std::array<std::int64_t, kNumSections> begins_{};
  std::array<std::int64_t, kNumSections> sizes_{};
  std::vector<std::int32_t> image_;
  std::vector<std::int64_t> indices_;
  std::vector<std::int32_t> values_;
  std::vector<TokenId> token_ids_;
  std::int64_t num_pending_ = 0;  // before the first of token_ids_
};

}  // namespace pagedkv
