// Params of advance_edits: from the edits of logits of one step to those of the next. Lists go on
// from where they were, or come from the host; the token that a row chose last is counted in its
// own. n rows, m entries of them together, m0 of the last step, k sent.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PAGEDKV_ON_BOTH __host__ __device__
#else
#define PAGEDKV_ON_BOTH
#endif

namespace pagedkv {

// The id of an entry that edits nothing: lists end with some, so that they have room to grow.
inline constexpr int32_t kNoEditId = INT32_MAX;

// How often an id stands in the answer; 0: only in the prompt. Beside that:
inline constexpr int32_t kUnseenCount = -1;            // nowhere: without penalties
inline constexpr int32_t kForbiddenCount = INT32_MIN;  // it may not come next, however often it did

// Of one row. Its list is entries source .. source + source_len of the last step's or, if source is
// negative, entries -1 - source .. of those sent.
struct EditRow {
  int32_t source;
  int32_t source_len;
  int32_t slot;      // whose latest token is counted; -1: none
  float repetition;  // factor of ids that have been seen
  double frequency;  // taken for each time in the answer
  double presence;   // taken if it is there
};
static_assert(sizeof(EditRow) == 8 * sizeof(int32_t));

struct SentEdit {
  int32_t id;
  int32_t count;
  float bias;
};
static_assert(sizeof(SentEdit) == 3 * sizeof(int32_t));

// Row i's list becomes entries start_loc[i] .. start_loc[i + 1], ids ascending, filled up with
// kNoEditId. A token that is not in it yet is put in, unless the row is limited to what is there.
struct AdvanceEditsParams {
  int32_t* ids;     // int32 [m]
  int32_t* counts;  // int32 [m]
  float* values;    // fp32 [m, 3]: bias, factor, taken, as sample_tokens has them

  const int32_t* start_loc;   // int32 [n + 1]
  const int32_t* is_limited;  // int32 [n]
  const EditRow* rows;        // [n]
  const int64_t* latest;      // int64 [num_slots]

  const int32_t* last_ids;     // int32 [m0]
  const int32_t* last_counts;  // int32 [m0]
  const float* last_values;    // fp32 [m0, 3], of which the bias is read
  const SentEdit* sent;        // [k]

  int64_t num_rows;   // n
  int64_t num_edits;  // m
  int64_t num_slots;
  int64_t num_last;  // m0
  int64_t num_sent;  // k
};

// Entry i of a row's list as it was, i < row.source_len.
PAGEDKV_ON_BOTH inline SentEdit edit_before(const AdvanceEditsParams& p, const EditRow& row,
                                            int64_t i) {
  if (row.source < 0) return p.sent[-1 - int64_t{row.source} + i];
  const int64_t at = row.source + i;
  return {.id = p.last_ids[at], .count = p.last_counts[at], .bias = p.last_values[3 * at]};
}

// Entry i as it becomes: `token` is counted, if not negative; is_new: it was not in the list, and
// is put in before the first larger id.
PAGEDKV_ON_BOTH inline SentEdit edit_after(const AdvanceEditsParams& p, const EditRow& row,
                                           int64_t i, int32_t token, bool is_new) {
  constexpr SentEdit kNothing{.id = kNoEditId, .count = kUnseenCount, .bias = 0.0f};
  SentEdit own = i < row.source_len ? edit_before(p, row, i) : kNothing;
  if (is_new) {
    const int32_t before = i == 0                   ? -1
                           : i - 1 < row.source_len ? edit_before(p, row, i - 1).id
                                                    : kNoEditId;
    if (before > token) return i - 1 < row.source_len ? edit_before(p, row, i - 1) : kNothing;
    if (own.id > token) return {.id = token, .count = 1, .bias = 0.0f};
  } else if (own.id == token && own.count != kForbiddenCount) {
    own.count = own.count < 0 ? 1 : own.count + 1;
  }
  return own;
}

// What is subtracted from the logit of an id that was seen, in the host's own arithmetic: nothing
// is fused.
PAGEDKV_ON_BOTH inline float taken_of(const EditRow& row, int32_t count) {
#ifdef __CUDA_ARCH__
  const double often = __dmul_rn(row.frequency, static_cast<double>(count));
  return static_cast<float>(__dadd_rn(often, count > 0 ? row.presence : 0.0));
#else
  const double often = row.frequency * static_cast<double>(count);
  return static_cast<float>(often + (count > 0 ? row.presence : 0.0));
#endif
}

PAGEDKV_ON_BOTH inline void write_edit(const AdvanceEditsParams& p, const EditRow& row, int64_t at,
                                       const SentEdit& edit) {
  const bool is_seen = edit.count >= 0;
  p.ids[at] = edit.id;
  p.counts[at] = edit.count;
  p.values[3 * at] = edit.bias;
  p.values[3 * at + 1] = is_seen ? row.repetition : 1.0f;
  p.values[3 * at + 2] = is_seen                         ? taken_of(row, edit.count)
                         : edit.count == kForbiddenCount ? __builtin_huge_valf()
                                                         : 0.0f;
}

}  // namespace pagedkv
