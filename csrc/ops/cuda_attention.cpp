// CUDA adapters of paged_attention and merge_attention_states.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ops/attention_adapters.h"
#include "ops/cuda_context.h"

namespace pagedkv::ops {
namespace {

void paged_attention(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                     const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                     const Tensor& seq_lens, const Tensor& query_start_loc, int64_t max_query_len,
                     double scale, bool causal, int64_t window,
                     const std::optional<Tensor>& alibi_slopes, double soft_cap,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                     int64_t num_splits, const std::optional<Tensor>& prefix_groups,
                     const std::optional<Tensor>& workspace) {
  PagedAttentionParams params =
      paged_attention_params({.out = out,
                              .lse = lse,
                              .query = query,
                              .cache = {key_cache, value_cache, k_scale, v_scale},
                              .block_tables = block_tables,
                              .seq_lens = seq_lens,
                              .query_start_loc = query_start_loc,
                              .max_query_len = max_query_len,
                              .scale = scale,
                              .causal = causal,
                              .window = window,
                              .alibi_slopes = alibi_slopes,
                              .soft_cap = soft_cap,
                              .num_splits = num_splits,
                              .prefix_groups = prefix_groups,
                              .workspace = workspace});
  const CudaContext context(query);
  const int64_t num_workers = cuda::paged_attention_num_workers(context.device_index());
  const Tensor held = set_workspace(params, workspace, num_workers,
                                    [&](int64_t bytes) { return call_workspace(query, bytes); });
  cuda::launch_paged_attention(params, context.stream());
}

void merge_attention_states(const Tensor& out, const std::optional<Tensor>& lse,
                            const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                            const Tensor& lse_b) {
  const MergeAttentionStatesParams params =
      merge_attention_states_params(out, lse, out_a, lse_a, out_b, lse_b);
  const CudaContext context(out);
  cuda::launch_merge_attention_states(params, context.stream());
}

int64_t paged_attention_num_workers(int64_t device_index) {
  return cuda::paged_attention_num_workers(static_cast<int>(device_index));
}

}  // namespace

// Only this library knows the grid; Python asks it for paged_attention_workspace_size.
STABLE_TORCH_LIBRARY_FRAGMENT(pagedkv, library) {
  library.def("paged_attention_num_workers(int device_index) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CompositeExplicitAutograd, library) {
  library.impl("paged_attention_num_workers", TORCH_BOX(&paged_attention_num_workers));
}

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("merge_attention_states", TORCH_BOX(&merge_attention_states));
}

}  // namespace pagedkv::ops
