// CPU adapter of advance_step. Slots, lengths and offsets are data: a bad one is an error here; on
// a GPU, where reading them would wait for the device, they are the caller's promise.
#include <torch/csrc/stable/library.h>

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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("advance_step", TORCH_BOX(&advance_step));
}

}  // namespace pagedkv::ops
