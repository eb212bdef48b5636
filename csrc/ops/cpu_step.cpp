// CPU adapters of advance_step and advance_edits. Slots, lengths and offsets are data: a bad one is
// an error here; on a GPU, where reading them would wait for the device, they are the caller's
// promise.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "ops/cpu_bounds.h"
#include "ops/step_adapters.h"
#include "pagedkv/kernels/step_launchers.h"

namespace pagedkv::ops {
namespace {

constexpr const char* kOp = "pagedkv::advance_step";

void check_rows(const AdvanceStepParams& p) {
  const int64_t num_rows = p.counts[0];
  const int64_t num_pending = p.counts[1];
  STD_TORCH_CHECK(0 <= num_rows && num_rows <= p.num_rows, kOp, ": counts[0] is ", num_rows,
                  ", expected 0 to the ", p.num_rows, " rows there are");
  STD_TORCH_CHECK(0 <= num_pending, kOp, ": counts[1] is ", num_pending, ", expected at least 0");
  check_start_loc(kOp, "query_start_loc", p.query_start_loc, p.num_rows, p.num_tokens);
  check_start_loc(kOp, "sample_start_loc", p.sample_start_loc, p.num_rows, p.num_samples);
  const int64_t longest = p.block_tables_width * p.block_size;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t slot = p.slots[row];
    STD_TORCH_CHECK(0 <= slot && slot < p.num_slots, kOp, ": slots[", row, "] is ", slot,
                    ", expected 0 to ", p.num_slots - 1);
    const int64_t query_len = p.query_start_loc[row + 1] - p.query_start_loc[row];
    STD_TORCH_CHECK(0 <= p.lens[slot] && p.lens[slot] + query_len <= longest, kOp, ": lens[", slot,
                    "] is ", p.lens[slot], ", expected 0 to ", longest - query_len,
                    " (what block_tables holds, less the step's tokens)");
  }
  const int64_t num_known = p.query_start_loc[num_rows] - num_pending;
  STD_TORCH_CHECK(num_known <= p.num_token_ids, kOp, ": token_ids has ", p.num_token_ids,
                  " ids, expected at least ", num_known);
}

void advance_step(const Tensor& lens, const Tensor& tokens, const Tensor& block_tables,
                  const Tensor& seq_lens, const Tensor& samples, const Tensor& filters,
                  const Tensor& inverse_temperatures, const Tensor& counts, const Tensor& slots,
                  const Tensor& query_start_loc, const Tensor& sample_start_loc,
                  const Tensor& tables, const Tensor& draws, const Tensor& params,
                  const Tensor& latest, const Tensor& token_ids, int64_t block_size) {
  const AdvanceStepParams made = advance_step_params(
      {lens, tokens, block_tables, seq_lens, samples, filters, inverse_temperatures, counts, slots,
       query_start_loc, sample_start_loc, tables, draws, params, latest, token_ids},
      block_size);
  if (made.num_rows == 0) return;
  check_rows(made);
  cpu::launch_advance_step(made);
}

// A list lies in what it comes from, and its next one has room for it and for one more id.
void check_edit_rows(const AdvanceEditsParams& p) {
  constexpr const char* kEdits = "pagedkv::advance_edits";
  STD_TORCH_CHECK(p.start_loc[0] == 0, kEdits, ": start_loc[0] is ", p.start_loc[0],
                  ", expected 0");
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const EditRow& row = p.rows[r];
    const int64_t begin = p.start_loc[r];
    const int64_t end = p.start_loc[r + 1];
    STD_TORCH_CHECK(begin <= end && end <= p.num_edits, kEdits, ": start_loc[", r + 1, "] is ", end,
                    ", expected ", begin, " to ", p.num_edits);
    const bool is_sent = row.source < 0;
    const int64_t source = is_sent ? -1 - int64_t{row.source} : row.source;
    const int64_t most = std::min(end - begin, (is_sent ? p.num_sent : p.num_last) - source);
    STD_TORCH_CHECK(0 <= row.source_len && row.source_len <= most, kEdits, ": rows[", r, "] has ",
                    row.source_len, " entries, expected 0 to ", std::max<int64_t>(most, 0));
    STD_TORCH_CHECK(-1 <= row.slot && row.slot < p.num_slots, kEdits, ": rows[", r,
                    "] counts the token of slot ", row.slot, ", expected -1 to ", p.num_slots - 1);
    if (row.slot < 0) continue;
    const int64_t token = p.latest[row.slot];
    STD_TORCH_CHECK(0 <= token && token < kNoEditId, kEdits, ": latest[", row.slot, "] is ", token,
                    ", expected 0 to ", kNoEditId - 1);
    bool has_place = p.is_limited[r] != 0 || row.source_len < end - begin;
    for (int64_t i = row.source_len; i-- > 0 && !has_place;) {
      const int32_t id = edit_before(p, row, i).id;
      has_place = id == kNoEditId || id == token;
    }
    STD_TORCH_CHECK(has_place, kEdits, ": rows[", r, "] has no place for token ", token,
                    " among its ", end - begin, " entries, expected one more");
  }
}

void advance_edits(const Tensor& ids, const Tensor& counts, const Tensor& values,
                   const Tensor& start_loc, const Tensor& is_limited, const Tensor& rows,
                   const Tensor& latest, const Tensor& last_ids, const Tensor& last_counts,
                   const Tensor& last_values, const Tensor& sent) {
  const AdvanceEditsParams made =
      advance_edits_params({ids, counts, values, start_loc, is_limited, rows, latest, last_ids,
                            last_counts, last_values, sent});
  check_edit_rows(made);
  cpu::launch_advance_edits(made);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("advance_step", TORCH_BOX(&advance_step));
  library.impl("advance_edits", TORCH_BOX(&advance_edits));
}

}  // namespace pagedkv::ops
