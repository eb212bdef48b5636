// CPU adapters of paged_attention and merge_attention_states, and the workspace's size.
#include <torch/csrc/stable/library.h>

#include "ops/attention_adapters.h"
#include "ops/cpu_bounds.h"
#include "ops/cpu_thread_pool.h"
#include "pagedkv/kernels/cpu_launchers.h"

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
  check_attention(params);
  const ThreadPool pool = torch_thread_pool();
  const Tensor held = set_workspace(params, workspace, pool.num_threads, [](int64_t bytes) {
    return torch::stable::empty({bytes}, ScalarType::Byte);
  });
  cpu::launch_paged_attention(params, pool);
}

void merge_attention_states(const Tensor& out, const std::optional<Tensor>& lse,
                            const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                            const Tensor& lse_b) {
  cpu::launch_merge_attention_states(
      merge_attention_states_params(out, lse, out_a, lse_a, out_b, lse_b), torch_thread_pool());
}

int64_t paged_attention_workspace_size(int64_t num_workers, int64_t num_tokens, int64_t num_heads,
                                       int64_t head_dim, int64_t num_splits,
                                       int64_t num_prefix_groups) {
  const OperandChecks check("pagedkv::paged_attention_workspace_size");
  check.at_least("num_workers", num_workers, 1);
  check.at_least("num_tokens", num_tokens, 0);
  check.at_least("num_heads", num_heads, 1);
  check.in_range("head_dim", head_dim, 1, kMaxHeadDim);
  check.in_range("num_splits", num_splits, 0, kMaxNumSplits);
  check.at_least("num_prefix_groups", num_prefix_groups, 0);
  return whole_workspace_bytes({.num_tokens = num_tokens,
                                .num_heads = num_heads,
                                .head_dim = head_dim,
                                .num_splits = num_splits,
                                .num_prefix_groups = num_prefix_groups,
                                .num_workers = num_workers});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("merge_attention_states", TORCH_BOX(&merge_attention_states));
}

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CompositeExplicitAutograd, library) {
  library.impl("paged_attention_workspace_size", TORCH_BOX(&paged_attention_workspace_size));
}

}  // namespace pagedkv::ops
