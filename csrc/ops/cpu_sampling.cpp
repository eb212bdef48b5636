// CPU adapters of sample_tokens and score_tokens. Options and edits are data: a bad one is an error
// here; on a GPU, where reading them would wait for the device, they are the caller's promise.
#include <torch/csrc/stable/library.h>

#include "ops/cpu_thread_pool.h"
#include "ops/sampling_adapters.h"
#include "pagedkv/kernels/cpu_launchers.h"
#include "pagedkv/kernels/edit_params.h"

namespace pagedkv::ops {
namespace {

constexpr const char* kOp = "pagedkv::sample_tokens";

void check_options(const SampleTokensParams& params) {
  for (int64_t i = 0; i < params.rows.num_rows; ++i) {
    const float inverse = params.inverse_temperatures[i];
    STD_TORCH_CHECK(inverse >= 0.0f && std::isfinite(inverse), kOp, ": inverse_temperatures[", i,
                    "] is ", inverse, ", expected a finite number of at least 0");
    STD_TORCH_CHECK(params.top_k[i] >= 0, kOp, ": top_k[", i, "] is ", params.top_k[i],
                    ", expected at least 0");
    STD_TORCH_CHECK(params.top_p[i] > 0.0 && params.top_p[i] <= 1.0, kOp, ": top_p[", i, "] is ",
                    params.top_p[i], ", expected above 0, at most 1");
    STD_TORCH_CHECK(params.min_p[i] >= 0.0 && params.min_p[i] <= 1.0, kOp, ": min_p[", i, "] is ",
                    params.min_p[i], ", expected 0 to 1");
  }
}

void check_edits(const SampleTokensParams& params, int64_t num_edits) {
  const LogitEdits& edits = params.rows.edits;
  STD_TORCH_CHECK(edits.start_loc[0] == 0, kOp, ": edit_start_loc[0] is ", edits.start_loc[0],
                  ", expected 0");
  for (int64_t i = 0; i < params.rows.num_rows; ++i) {
    const int64_t begin = edits.start_loc[i];
    const int64_t end = edits.start_loc[i + 1];
    STD_TORCH_CHECK(begin <= end && end <= num_edits, kOp, ": edit_start_loc[", i + 1, "] is ", end,
                    ", expected ", begin, " to ", num_edits);
    for (int64_t at = begin; at < end; ++at) {
      if (edits.ids[at] == kNoEditId) continue;  // so are those behind it, or they do not ascend
      const int64_t lowest = at == begin ? 0 : int64_t{edits.ids[at - 1]} + 1;
      STD_TORCH_CHECK(lowest <= edits.ids[at] && edits.ids[at] < params.rows.vocab_size, kOp,
                      ": edit_ids[", at, "] is ", edits.ids[at], ", expected ", lowest, " to ",
                      params.rows.vocab_size - 1, ", ascending in row ", i);
    }
  }
}

void sample_tokens(const Tensor& token_ids, const std::optional<Tensor>& cuts, const Tensor& logits,
                   const Tensor& inverse_temperatures, const Tensor& top_k, const Tensor& top_p,
                   const Tensor& min_p, const Tensor& seeds, const Tensor& positions,
                   const Tensor& draws, const std::optional<Tensor>& edit_start_loc,
                   const std::optional<Tensor>& edit_ids, const std::optional<Tensor>& edit_values,
                   const std::optional<Tensor>& is_limited) {
  const SampleTokensParams params = sample_tokens_params(
      {token_ids, cuts, logits, inverse_temperatures, top_k, top_p, min_p, seeds, positions, draws,
       edit_start_loc, edit_ids, edit_values, is_limited});
  check_options(params);
  if (params.rows.edits.start_loc != nullptr) check_edits(params, edit_ids->size(0));
  cpu::launch_sample_tokens(params, torch_thread_pool());
}

void score_tokens(const Tensor& logprobs, const Tensor& ranks, const Tensor& top_ids,
                  const Tensor& top_logprobs, const Tensor& logits, const Tensor& token_ids) {
  cpu::launch_score_tokens(
      score_tokens_params(logprobs, ranks, top_ids, top_logprobs, logits, token_ids),
      torch_thread_pool());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("sample_tokens", TORCH_BOX(&sample_tokens));
  library.impl("score_tokens", TORCH_BOX(&score_tokens));
}

}  // namespace pagedkv::ops
