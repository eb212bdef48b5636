// From tensors to params for paged_attention and merge_attention_states. One function per op, used
// by the CPU and the CUDA adapter alike. Reads no tensor data: lengths, tables and groups are
// checked in cpu_bounds.h, on the CPU.
#pragma once

#include <algorithm>
#include <optional>

#include "ops/cache_adapters.h"
#include "ops/operand_checks.h"
#include "pagedkv/kernels/attention_params.h"
#include "pagedkv/kernels/attention_workspace.h"

namespace pagedkv::ops {

// The operands and options of the schema, by its names.
struct PagedAttentionOperands {
  const Tensor& out;
  const std::optional<Tensor>& lse;
  const Tensor& query;
  CacheOperands cache;
  const Tensor& block_tables;
  const Tensor& seq_lens;
  const Tensor& query_start_loc;
  int64_t max_query_len;
  double scale;
  bool causal;
  int64_t window;
  const std::optional<Tensor>& alibi_slopes;
  double soft_cap;
  int64_t num_splits;
  const std::optional<Tensor>& prefix_groups;
  const std::optional<Tensor>& workspace;
};

inline constexpr const char* kQueryForm = "[num_tokens, num_heads, head_dim]";
inline constexpr const char* kLseForm = "[num_tokens, num_heads]";
inline constexpr const char* kGroupsForm = "[num_groups, 3]";

// Everything but the workspace; see set_workspace().
inline PagedAttentionParams paged_attention_params(const PagedAttentionOperands& in) {
  const OperandChecks check("pagedkv::paged_attention");
  const Operand query{"query", in.query};
  check.devices({query,
                 {"out", in.out},
                 {"lse", in.lse},
                 {"key_cache", in.cache.key_cache},
                 {"value_cache", in.cache.value_cache},
                 {"block_tables", in.block_tables},
                 {"seq_lens", in.seq_lens},
                 {"query_start_loc", in.query_start_loc},
                 {"alibi_slopes", in.alibi_slopes},
                 {"k_scale", in.cache.k_scale},
                 {"v_scale", in.cache.v_scale},
                 {"prefix_groups", in.prefix_groups},
                 {"workspace", in.workspace}});
  const ElementType type = check.activation_type(query);
  check.same_dtype(query, {{"out", in.out}});
  const ElementType cache_type = checked_cache_type(check, in.cache, query);
  check.dtypes(ScalarType::Float, {{"lse", in.lse}, {"alibi_slopes", in.alibi_slopes}});
  check.dtypes(ScalarType::Int, {{"block_tables", in.block_tables},
                                 {"seq_lens", in.seq_lens},
                                 {"query_start_loc", in.query_start_loc},
                                 {"prefix_groups", in.prefix_groups}});
  check.dtypes(ScalarType::Byte, {{"workspace", in.workspace}});

  check.written_rows({"out", in.out}, kQueryForm);
  check.rows(query, kQueryForm);
  check.rank({"lse", in.lse}, kLseForm);
  check.no_overlap({"lse", in.lse});
  check_cache_layout(check, in.cache, /*written=*/false);
  check.rows({"block_tables", in.block_tables}, "[num_seqs, max_num_blocks]");
  check.rows({"seq_lens", in.seq_lens}, "[num_seqs]");
  check.rows({"query_start_loc", in.query_start_loc}, "[num_seqs + 1]");
  check.rank({"alibi_slopes", in.alibi_slopes}, "[num_heads]");
  check.contiguous({"prefix_groups", in.prefix_groups}, kGroupsForm);
  check.contiguous({"workspace", in.workspace}, "[num_bytes]");

  const ConstKvCache cache = checked_cache_view<const void*>(check, in.cache, cache_type);
  const int64_t num_tokens = in.query.size(0);
  const int64_t num_heads = in.query.size(1);
  const int64_t num_seqs = in.seq_lens.size(0);
  check.in_range("block_size", cache.block_size, 1, kMaxBlockSize);
  check.in_range("head_dim", cache.head_dim, 1, kMaxHeadDim);
  check.shape(query, {num_tokens, num_heads, cache.head_dim}, kQueryForm);
  STD_TORCH_CHECK(num_heads >= 1 && num_heads % cache.num_kv_heads == 0, check.op(), ": query has ",
                  num_heads, " heads, expected a multiple of the cache's ", cache.num_kv_heads);
  check.shape({"out", in.out}, {num_tokens, num_heads, cache.head_dim}, kQueryForm);
  check.shape({"lse", in.lse}, {num_tokens, num_heads}, kLseForm);
  check.shape({"block_tables", in.block_tables}, {num_seqs, kAnySize},
              "[num_seqs, max_num_blocks]");
  check.shape({"query_start_loc", in.query_start_loc}, {num_seqs + 1}, "[num_seqs + 1]");
  check.shape({"alibi_slopes", in.alibi_slopes}, {num_heads}, "[num_heads]");
  check.shape({"prefix_groups", in.prefix_groups}, {kAnySize, 3}, kGroupsForm);

  const std::initializer_list<Operand> read = {query,
                                               {"key_cache", in.cache.key_cache},
                                               {"value_cache", in.cache.value_cache},
                                               {"block_tables", in.block_tables},
                                               {"seq_lens", in.seq_lens},
                                               {"query_start_loc", in.query_start_loc},
                                               {"alibi_slopes", in.alibi_slopes},
                                               {"k_scale", in.cache.k_scale},
                                               {"v_scale", in.cache.v_scale},
                                               {"prefix_groups", in.prefix_groups}};
  check.apart({"out", in.out}, read);
  check.apart({"lse", in.lse}, read);
  check.apart({"workspace", in.workspace}, read);
  check.apart({"out", in.out}, {{"lse", in.lse}, {"workspace", in.workspace}});
  check.apart({"lse", in.lse}, {{"workspace", in.workspace}});

  check.at_least("max_query_len", in.max_query_len, 0);
  check.at_least("window", in.window, 0);
  STD_TORCH_CHECK(in.window == 0 || in.causal, check.op(), ": window is ", in.window,
                  ", expected 0 (none) when causal is false");
  check.in_range("num_splits", in.num_splits, 0, kMaxNumSplits);

  PagedAttentionParams params{};
  params.out = in.out.mutable_data_ptr();
  params.query = in.query.const_data_ptr();
  params.cache = cache;
  params.block_tables = in.block_tables.const_data_ptr<int32_t>();
  params.seq_lens = in.seq_lens.const_data_ptr<int32_t>();
  params.query_start_loc = in.query_start_loc.const_data_ptr<int32_t>();
  params.type = type;
  params.num_tokens = num_tokens;
  params.num_seqs = num_seqs;
  params.num_heads = num_heads;
  params.max_num_blocks = in.block_tables.size(1);
  params.max_query_len = in.max_query_len;
  params.num_splits = in.num_splits;
  params.window = in.window;
  params.scale = check.finite("scale", in.scale);
  params.soft_cap = check.finite("soft_cap", in.soft_cap, 0.0);
  params.causal = in.causal;
  params.out_stride_token = in.out.stride(0);
  params.out_stride_head = in.out.stride(1);
  params.query_stride_token = in.query.stride(0);
  params.query_stride_head = in.query.stride(1);
  params.block_tables_stride = in.block_tables.stride(0);
  if (in.lse.has_value()) {
    params.lse = in.lse->mutable_data_ptr<float>();
    params.lse_stride_token = in.lse->stride(0);
    params.lse_stride_head = in.lse->stride(1);
  }
  if (in.alibi_slopes.has_value()) {
    params.alibi_slopes = in.alibi_slopes->const_data_ptr<float>();
    params.alibi_slopes_stride = in.alibi_slopes->stride(0);
  }
  if (in.prefix_groups.has_value() && in.prefix_groups->size(0) > 0) {
    params.prefix_groups = in.prefix_groups->const_data_ptr<int32_t>();
    params.num_prefix_groups = in.prefix_groups->size(0);
  }
  return params;
}

inline int64_t required_workspace_bytes(const PagedAttentionParams& params, int64_t num_workers) {
  return whole_workspace_bytes({.num_tokens = params.num_tokens,
                                .num_heads = params.num_heads,
                                .head_dim = params.cache.head_dim,
                                .num_splits = params.num_splits,
                                .num_prefix_groups = params.num_prefix_groups,
                                .num_workers = num_workers});
}

// Points the params at the caller's workspace, or at the one that `allocate(bytes)` makes, a
// uint8 Tensor that the adapter keeps until the kernel is enqueued.
template <class Allocate>
Tensor set_workspace(PagedAttentionParams& params, const std::optional<Tensor>& workspace,
                     int64_t num_workers, const Allocate& allocate) {
  const int64_t required = required_workspace_bytes(params, num_workers);
  const Tensor used = workspace.has_value() ? *workspace : allocate(required);
  STD_TORCH_CHECK(used.numel() >= required, "pagedkv::paged_attention: workspace has ",
                  used.numel(), " bytes, expected at least ", required,
                  " (paged_attention_workspace_size)");
  params.workspace = used.mutable_data_ptr();
  params.workspace_bytes = used.numel();
  params.num_workers = num_workers;
  const auto address = reinterpret_cast<uintptr_t>(params.workspace);
  STD_TORCH_CHECK(address % kWorkspaceAlignment == 0, "pagedkv::paged_attention: workspace starts ",
                  address % kWorkspaceAlignment, " bytes after a multiple of ", kWorkspaceAlignment,
                  ", expected an aligned tensor");
  return used;
}

inline MergeAttentionStatesParams merge_attention_states_params(
    const Tensor& out, const std::optional<Tensor>& lse, const Tensor& out_a, const Tensor& lse_a,
    const Tensor& out_b, const Tensor& lse_b) {
  const OperandChecks check("pagedkv::merge_attention_states");
  const Operand first{"out", out};
  check.devices({first,
                 {"lse", lse},
                 {"out_a", out_a},
                 {"lse_a", lse_a},
                 {"out_b", out_b},
                 {"lse_b", lse_b}});
  const ElementType type = check.activation_type(first);
  check.same_dtype(first, {{"out_a", out_a}, {"out_b", out_b}});
  check.dtypes(ScalarType::Float, {{"lse", lse}, {"lse_a", lse_a}, {"lse_b", lse_b}});
  check.written_rows(first, kQueryForm);
  check.rows({"out_a", out_a}, kQueryForm);
  check.rows({"out_b", out_b}, kQueryForm);
  for (const Operand& operand :
       {Operand("lse", lse), Operand("lse_a", lse_a), Operand("lse_b", lse_b)}) {
    check.rank(operand, kLseForm);
  }
  check.no_overlap({"lse", lse});
  const int64_t num_tokens = out.size(0);
  const int64_t num_heads = out.size(1);
  for (const Operand& operand : {Operand("out_a", out_a), Operand("out_b", out_b)}) {
    check.shape(operand, {num_tokens, num_heads, out.size(2)}, kQueryForm);
  }
  for (const Operand& operand :
       {Operand("lse", lse), Operand("lse_a", lse_a), Operand("lse_b", lse_b)}) {
    check.shape(operand, {num_tokens, num_heads}, kLseForm);
  }
  check.apart(first, {{"lse", lse}, {"lse_a", lse_a}, {"lse_b", lse_b}},
              /*in_place=*/{{"out_a", out_a}, {"out_b", out_b}});
  check.apart({"lse", lse}, {{"out_a", out_a}, {"out_b", out_b}},
              /*in_place=*/{{"lse_a", lse_a}, {"lse_b", lse_b}});
  MergeAttentionStatesParams params{};
  params.out = out.mutable_data_ptr();
  params.out_a = out_a.const_data_ptr();
  params.lse_a = lse_a.const_data_ptr<float>();
  params.out_b = out_b.const_data_ptr();
  params.lse_b = lse_b.const_data_ptr<float>();
  params.type = type;
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.head_dim = out.size(2);
  params.out_stride_token = out.stride(0);
  params.out_stride_head = out.stride(1);
  params.out_a_stride_token = out_a.stride(0);
  params.out_a_stride_head = out_a.stride(1);
  params.lse_a_stride_token = lse_a.stride(0);
  params.lse_a_stride_head = lse_a.stride(1);
  params.out_b_stride_token = out_b.stride(0);
  params.out_b_stride_head = out_b.stride(1);
  params.lse_b_stride_token = lse_b.stride(0);
  params.lse_b_stride_head = lse_b.stride(1);
  if (lse.has_value()) {
    params.lse = lse->mutable_data_ptr<float>();
    params.lse_stride_token = lse->stride(0);
    params.lse_stride_head = lse->stride(1);
  }
  return params;
}

}  // namespace pagedkv::ops
