// CUDA adapters of sample_tokens and score_tokens.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ops/cuda_context.h"
#include "ops/sampling_adapters.h"

namespace pagedkv::ops {
namespace {

Tensor with_workspace(LogitRows& rows, const Tensor& logits) {
  const Tensor workspace = call_workspace(logits, logit_rows_workspace_bytes(rows));
  rows.workspace = workspace.mutable_data_ptr();
  return workspace;
}

void sample_tokens(const Tensor& token_ids, const std::optional<Tensor>& cuts, const Tensor& logits,
                   const Tensor& inverse_temperatures, const Tensor& top_k, const Tensor& top_p,
                   const Tensor& min_p, const Tensor& seeds, const Tensor& positions,
                   const Tensor& draws, const std::optional<Tensor>& edit_start_loc,
                   const std::optional<Tensor>& edit_ids, const std::optional<Tensor>& edit_values,
                   const std::optional<Tensor>& is_limited) {
  SampleTokensParams params = sample_tokens_params(
      {token_ids, cuts, logits, inverse_temperatures, top_k, top_p, min_p, seeds, positions, draws,
       edit_start_loc, edit_ids, edit_values, is_limited});
  const CudaContext context(logits);
  const Tensor held = with_workspace(params.rows, logits);
  cuda::launch_sample_tokens(params, context.stream());
}

void score_tokens(const Tensor& logprobs, const Tensor& ranks, const Tensor& top_ids,
                  const Tensor& top_logprobs, const Tensor& logits, const Tensor& token_ids) {
  ScoreTokensParams params =
      score_tokens_params(logprobs, ranks, top_ids, top_logprobs, logits, token_ids);
  const CudaContext context(logits);
  const Tensor held = with_workspace(params.rows, logits);
  cuda::launch_score_tokens(params, context.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("sample_tokens", TORCH_BOX(&sample_tokens));
  library.impl("score_tokens", TORCH_BOX(&score_tokens));
}

}  // namespace pagedkv::ops
