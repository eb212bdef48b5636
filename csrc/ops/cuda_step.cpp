// CUDA adapters of advance_step and advance_edits.
#include <torch/csrc/stable/library.h>

#include "ops/cuda_context.h"
#include "ops/step_adapters.h"
#include "pagedkv/kernels/step_launchers.h"

namespace pagedkv::ops {
namespace {

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
  const CudaContext context(lens);
  cuda::launch_advance_step(made, context.stream());
}

void advance_edits(const Tensor& ids, const Tensor& counts, const Tensor& values,
                   const Tensor& start_loc, const Tensor& is_limited, const Tensor& rows,
                   const Tensor& latest, const Tensor& last_ids, const Tensor& last_counts,
                   const Tensor& last_values, const Tensor& sent) {
  const AdvanceEditsParams made =
      advance_edits_params({ids, counts, values, start_loc, is_limited, rows, latest, last_ids,
                            last_counts, last_values, sent});
  const CudaContext context(ids);
  cuda::launch_advance_edits(made, context.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("advance_step", TORCH_BOX(&advance_step));
  library.impl("advance_edits", TORCH_BOX(&advance_edits));
}

}  // namespace pagedkv::ops
