// StepState: check the whole step first, then go through its rows once.

#include "pagedkv/core/step_state.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pagedkv {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

[[noreturn]] void refuse_bound(const std::string& name, std::int64_t value, std::int64_t low,
                               std::int64_t high) {
  refuse(name + " must be between " + std::to_string(low) + " and " + std::to_string(high) +
         ", got " + std::to_string(value));
}

void check_bound(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) refuse_bound(name, value, low, high);
}

// Of entry i; a step has thousands, so the words are put together for a bad one only.
void check_entry(const char* name, std::size_t i, std::int64_t value, std::int64_t low,
                 std::int64_t high) {
  if (value < low || value > high) [[unlikely]] {
    refuse_bound(std::string(name) + "[" + std::to_string(i) + "]", value, low, high);
  }
}

void check_size(const char* name, std::size_t has, std::size_t needs) {
  if (has != needs) {
    refuse(std::string(name) + " has " + std::to_string(has) + " entries, expected " +
           std::to_string(needs));
  }
}

}  // namespace

StepState::StepState(std::int64_t max_num_slots, std::int64_t max_num_blocks,
                     std::int64_t block_size)
    : max_num_slots_(max_num_slots), max_num_blocks_(max_num_blocks), block_size_(block_size) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  check_bound("max_num_slots", max_num_slots, 1, kMost);
  check_bound("max_num_blocks", max_num_blocks, 1, kMaxSeqLen);
  check_bound("block_size", block_size, 1, kMaxBlockSize);
  sizes_[kTables] = max_num_slots * max_num_blocks;
  sizes_[kLens] = sizes_[kDraws] = sizes_[kSlots] = max_num_slots;
  sizes_[kParams] = max_num_slots * kParamWords;
  sizes_[kQueryStartLoc] = sizes_[kSampleStartLoc] = max_num_slots + 1;
  sizes_[kPrefixGroups] = max_num_slots / 2 * 3;
  sizes_[kCounts] = 2;
  std::int64_t end = 0;
  for (std::size_t section = 0; section < kNumSections; ++section) {
    begins_[section] = end;
    end += (sizes_[section] + 3) / 4 * 4;
  }
  image_.resize(static_cast<std::size_t>(end));
}

void StepState::check(const StateStep& step) const {
  const std::size_t num_rows = step.slots.size();
  check_size("query_lens", step.query_lens.size(), num_rows);
  check_size("seq_lens", step.seq_lens.size(), num_rows);
  check_size("first_written", step.first_written.size(), num_rows);
  check_size("sample_draws", step.sample_draws.size(), step.sample_rows.size());
  check_bound("num_padded", step.num_padded, static_cast<std::int64_t>(num_rows), max_num_slots_);
  const std::int64_t longest = std::min(step.max_model_len, max_num_blocks_ * block_size_);
  std::int64_t num_tokens = 0;
  for (std::size_t r = 0; r < num_rows; ++r) {
    check_entry("slots", r, step.slots[r], 0, max_num_slots_ - 1);
    check_entry("seq_lens", r, step.seq_lens[r], 0, longest);
    check_entry("query_lens", r, step.query_lens[r], 0, step.seq_lens[r]);
    check_entry("first_written", r, step.first_written[r], 0, max_num_blocks_);
    num_tokens += step.query_lens[r];
  }
  check_bound("the number of tokens", num_tokens, 0, kMaxSeqLen);
  if (step.num_padded > static_cast<std::int64_t>(num_rows)) {
    check_bound("num_padded_tokens", step.num_padded_tokens, num_tokens, kMaxSeqLen);
    check_bound("the number of samples", static_cast<std::int64_t>(step.sample_rows.size()), 0,
                step.num_padded);
  } else if (step.num_padded_tokens != 0) {  // no row would have those that are left
    check_bound("num_padded_tokens", step.num_padded_tokens, num_tokens, num_tokens);
  }
  for (std::size_t s = 0; s < step.sample_rows.size(); ++s) {
    const std::int64_t before = s == 0 ? 0 : step.sample_rows[s - 1];
    check_entry("sample_rows", s, step.sample_rows[s], before,
                static_cast<std::int64_t>(num_rows) - 1);
    const bool is_next = s > 0 && step.sample_rows[s] == before;
    check_entry("sample_draws", s, step.sample_draws[s], is_next ? step.sample_draws[s - 1] + 1 : 0,
                is_next ? step.sample_draws[s - 1] + 1 : INT32_MAX);
  }
}

void StepState::add_token_ids(const TokenId* from, std::int64_t count) {
  if (token_ids_.empty()) {  // still among those that the step before chooses
    const TokenId* known =
        std::find_if(from, from + count, [](TokenId id) { return id != kPendingToken; });
    num_pending_ += known - from;
    count -= known - from;
    from = known;
  }
  token_ids_.insert(token_ids_.end(), from, from + count);
}

void StepState::set_row(const StateStep& step, std::size_t row) {
  const std::int64_t slot = step.slots[row];
  const std::int32_t len = step.seq_lens[row];
  const auto query_len = static_cast<std::int32_t>(step.query_lens[row]);
  set(begins_[kSlots] + static_cast<std::int64_t>(row), static_cast<std::int32_t>(slot));
  const std::int64_t len_at = begins_[kLens] + slot;
  set(len_at, len - query_len);
  image_[static_cast<std::size_t>(len_at)] = len;  // as the device counts
  const std::int64_t table = begins_[kTables] + slot * max_num_blocks_;
  const std::int64_t num_blocks = (len + block_size_ - 1) / block_size_;
  for (std::int64_t i = step.first_written[row]; i < num_blocks; ++i) {
    push(table + i, image_[static_cast<std::size_t>(table + i)]);
  }
  add_token_ids(step.token_ids + slot * step.max_model_len + (len - query_len), query_len);
}

void StepState::set_draws(const StateStep& step, std::int64_t slot, std::int64_t first_draw) {
  set(begins_[kDraws] + slot, static_cast<std::int32_t>(first_draw));
  for (std::int64_t i = slot * kParamWords; i < (slot + 1) * kParamWords; ++i) {
    set(begins_[kParams] + i, step.params[i]);
  }
}

void StepState::set_padding(const StateStep& step, std::int32_t num_tokens,
                            std::int32_t num_samples) {
  const auto most_tokens = static_cast<std::int32_t>(step.num_padded_tokens);
  const auto most_samples = static_cast<std::int32_t>(step.num_padded);
  for (auto r = static_cast<std::int64_t>(step.slots.size()); r < step.num_padded; ++r) {
    const bool is_last = r + 1 == step.num_padded;
    num_tokens = is_last ? most_tokens : std::min(num_tokens + 1, most_tokens);
    num_samples = is_last ? most_samples : std::min(num_samples + 1, most_samples);
    set(begins_[kQueryStartLoc] + r + 1, num_tokens);
    set(begins_[kSampleStartLoc] + r + 1, num_samples);
  }
}

void StepState::update(const StateStep& step) {
  check(step);
  token_ids_.clear();
  num_pending_ = 0;
  const std::size_t num_rows = step.slots.size();
  const std::size_t num_samples = step.sample_rows.size();
  std::size_t sample = 0;
  std::int32_t num_tokens = 0;
  std::int64_t starts = begins_[kQueryStartLoc];
  std::int64_t samples = begins_[kSampleStartLoc];
  set(begins_[kCounts], static_cast<std::int32_t>(num_rows));
  set(starts, 0);
  set(samples, 0);
  constexpr std::size_t kAhead = 8;  // each row's token is in a cache line of its own
  for (std::size_t r = 0; r < num_rows; ++r) {
    if (r + kAhead < num_rows && step.seq_lens[r + kAhead] > 0) {
      __builtin_prefetch(step.token_ids + step.slots[r + kAhead] * step.max_model_len +
                         step.seq_lens[r + kAhead] - 1);
    }
    set_row(step, r);
    num_tokens += static_cast<std::int32_t>(step.query_lens[r]);
    set(++starts, num_tokens);
    const std::size_t first = sample;
    while (sample < num_samples && step.sample_rows[sample] == static_cast<std::int64_t>(r)) {
      ++sample;
    }
    set(++samples, static_cast<std::int32_t>(sample));
    if (sample > first) set_draws(step, step.slots[r], step.sample_draws[first]);
  }
  set_padding(step, num_tokens, static_cast<std::int32_t>(sample));
  set(begins_[kCounts] + 1, static_cast<std::int32_t>(num_pending_));
}

void StepState::tell(Section section, std::span<const std::int32_t> values) {
  if (static_cast<std::int64_t>(values.size()) > sizes_[section]) {
    refuse(std::string(kNames[section]) + " has " + std::to_string(sizes_[section]) +
           " words, got " + std::to_string(values.size()));
  }
  std::int64_t index = begins_[section];
  for (const std::int32_t value : values) set(index++, value);
}

void StepState::take() {
  indices_.clear();
  values_.clear();
}

void StepState::forget() {
  std::fill(image_.begin(), image_.end(), 0);
  take();
}

}  // namespace pagedkv
