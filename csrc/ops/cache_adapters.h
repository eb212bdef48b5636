// From tensors to params for the ops on the cache: one function per op, used by the CPU and the
// CUDA adapter alike. Reads no tensor data: ids and slots are checked in cpu_bounds.h, on the CPU.
#pragma once

#include <optional>

#include "ops/operand_checks.h"
#include "ops/row_scale_checks.h"
#include "pagedkv/kernels/cache_params.h"

namespace pagedkv::ops {

inline constexpr const char* kCacheForm = "[num_blocks, num_kv_heads, block_size, head_dim]";
inline constexpr const char* kPoolForm =
    "[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]";
inline constexpr const char* kPairsForm = "[num_pairs, 2]";

// One layer's cache and its scales, as they came to an op.
struct CacheOperands {
  const Tensor& key_cache;
  const Tensor& value_cache;
  const std::optional<Tensor>& k_scale;
  const std::optional<Tensor>& v_scale;
};

// The dtypes of a cache that is used with activations of the dtype of `activation`.
inline ElementType checked_cache_type(const OperandChecks& check, const CacheOperands& cache,
                                      const Operand& activation) {
  const Operand key{"key_cache", cache.key_cache};
  const ElementType type = check.cache_type(key);
  check.same_dtype(key, {{"value_cache", cache.value_cache}});
  STD_TORCH_CHECK(
      is_float8(type) || cache.key_cache.scalar_type() == activation.tensor().scalar_type(),
      check.op(), ": key_cache has dtype ", dtype_name(cache.key_cache.scalar_type()),
      ", expected ", dtype_name(activation.tensor().scalar_type()), " as ", activation.name(),
      ", or a float8");
  for (const Operand& scale :
       {Operand("k_scale", cache.k_scale), Operand("v_scale", cache.v_scale)}) {
    STD_TORCH_CHECK(scale.present() == is_float8(type), check.op(), ": ", scale.name(),
                    is_float8(type) ? " is missing, expected a scale with a cache of dtype "
                                    : " is given, expected none with a cache of dtype ",
                    element_name(type));
  }
  check.dtypes(ScalarType::Float, {{"k_scale", cache.k_scale}, {"v_scale", cache.v_scale}});
  return type;
}

inline void check_cache_layout(const OperandChecks& check, const CacheOperands& cache,
                               bool written) {
  for (const Operand& operand :
       {Operand("key_cache", cache.key_cache), Operand("value_cache", cache.value_cache)}) {
    check.rows(operand, kCacheForm);
    if (written) check.no_overlap(operand);
  }
  check.rank({"k_scale", cache.k_scale}, "[1 or num_kv_heads]");
  check.rank({"v_scale", cache.v_scale}, "[1 or num_kv_heads]");
}

// The view, after the checks of shape. Layouts and dtypes are checked already.
template <class Pointer>
KvCacheView<Pointer> checked_cache_view(const OperandChecks& check, const CacheOperands& cache,
                                        ElementType type) {
  const Tensor& key = cache.key_cache;
  const Tensor& value = cache.value_cache;
  const int64_t num_kv_heads = key.size(1);
  check.at_least("num_kv_heads", num_kv_heads, 1);
  check.at_least("block_size", key.size(2), 1);
  check.at_least("head_dim", key.size(3), 1);
  check.shape({"value_cache", value}, {key.size(0), key.size(1), key.size(2), key.size(3)},
              kCacheForm);
  KvCacheView<Pointer> view{};
  view.key = const_cast<void*>(key.const_data_ptr());
  view.value = const_cast<void*>(value.const_data_ptr());
  for (const Operand& scale :
       {Operand("k_scale", cache.k_scale), Operand("v_scale", cache.v_scale)}) {
    if (!scale.present()) continue;
    const int64_t count = scale.tensor().size(0);
    STD_TORCH_CHECK(count == 1 || count == num_kv_heads, check.op(), ": ", scale.name(),
                    " has shape ", list_text(scale.tensor().sizes()), ", expected [1] or [",
                    num_kv_heads, "] (num_kv_heads)");
  }
  if (cache.k_scale.has_value()) {
    view.k_scale = cache.k_scale->const_data_ptr<float>();
    view.k_scale_stride = cache.k_scale->size(0) == 1 ? 0 : cache.k_scale->stride(0);
  }
  if (cache.v_scale.has_value()) {
    view.v_scale = cache.v_scale->const_data_ptr<float>();
    view.v_scale_stride = cache.v_scale->size(0) == 1 ? 0 : cache.v_scale->stride(0);
  }
  view.type = type;
  view.num_blocks = key.size(0);
  view.num_kv_heads = num_kv_heads;
  view.block_size = key.size(2);
  view.head_dim = key.size(3);
  view.key_stride_block = key.stride(0);
  view.key_stride_head = key.stride(1);
  view.key_stride_token = key.stride(2);
  view.value_stride_block = value.stride(0);
  view.value_stride_head = value.stride(1);
  view.value_stride_token = value.stride(2);
  return view;
}

// Of operands that are checked.
inline ReshapeAndCacheParams reshape_and_cache_fields(const Tensor& key, const Tensor& value,
                                                      const KvCache& cache, ElementType type,
                                                      const Tensor& slot_mapping) {
  return {.key = key.const_data_ptr(),
          .value = value.const_data_ptr(),
          .slot_mapping = slot_mapping.const_data_ptr<int64_t>(),
          .cache = cache,
          .type = type,
          .num_tokens = slot_mapping.size(0),
          .key_stride_token = key.stride(0),
          .key_stride_head = key.stride(1),
          .value_stride_token = value.stride(0),
          .value_stride_head = value.stride(1)};
}

inline ReshapeAndCacheParams reshape_and_cache_params(const Tensor& key, const Tensor& value,
                                                      const CacheOperands& cache,
                                                      const Tensor& slot_mapping) {
  constexpr const char* kForm = "[num_tokens, num_kv_heads, head_dim]";
  const OperandChecks check("pagedkv::reshape_and_cache");
  check.devices({{"key", key},
                 {"value", value},
                 {"key_cache", cache.key_cache},
                 {"value_cache", cache.value_cache},
                 {"slot_mapping", slot_mapping},
                 {"k_scale", cache.k_scale},
                 {"v_scale", cache.v_scale}});
  const ElementType type = check.activation_type({"key", key});
  check.same_dtype({"key", key}, {{"value", value}});
  const ElementType cache_type = checked_cache_type(check, cache, {"key", key});
  check.dtypes(ScalarType::Long, {{"slot_mapping", slot_mapping}});
  check.rows({"key", key}, kForm);
  check.rows({"value", value}, kForm);
  check_cache_layout(check, cache, /*written=*/true);
  check.rows({"slot_mapping", slot_mapping}, "[num_tokens]");
  const KvCache view = checked_cache_view<void*>(check, cache, cache_type);
  const int64_t num_tokens = slot_mapping.size(0);
  check.shape({"key", key}, {kAnySize, view.num_kv_heads, view.head_dim}, kForm);
  check.shape({"value", value}, {key.size(0), view.num_kv_heads, view.head_dim}, kForm);
  STD_TORCH_CHECK(num_tokens <= key.size(0), check.op(), ": slot_mapping has shape ",
                  list_text(slot_mapping.sizes()), ", expected at most the ", key.size(0),
                  " tokens of key");
  for (const Operand& written :
       {Operand("key_cache", cache.key_cache), Operand("value_cache", cache.value_cache)}) {
    check.apart(written, {{"key", key},
                          {"value", value},
                          {"slot_mapping", slot_mapping},
                          {"k_scale", cache.k_scale},
                          {"v_scale", cache.v_scale}});
  }
  check.apart({"key_cache", cache.key_cache}, {{"value_cache", cache.value_cache}});
  return reshape_and_cache_fields(key, value, view, type, slot_mapping);
}

// What comes before all else to the result of a projection.
struct ProjectionOperands {
  RowScaleOperands scales;
  const std::optional<Tensor>& bias;
};

struct FusedRotaryOperands {
  FusedRotaryReshapeAndCacheParams params;
  BareProjection bare;
};

inline FusedRotaryOperands fused_rotary_reshape_and_cache_params(
    const char* op, const Tensor& positions, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& cos_sin_cache, const CacheOperands& cache,
    const Tensor& slot_mapping, bool is_neox, const ProjectionOperands& projection) {
  constexpr const char* kBiasForm = "[(num_heads + 2 * num_kv_heads) * head_dim]";
  constexpr const char* kForm = "[num_tokens, num_kv_heads, head_dim]";
  const OperandChecks check(op);
  const Operand residual = projection.scales.operand();
  const Operand bias("bias", projection.bias);
  check.devices({{"query", query},
                 {"key", key},
                 {"value", value},
                 {"positions", positions},
                 {"cos_sin_cache", cos_sin_cache},
                 {"key_cache", cache.key_cache},
                 {"value_cache", cache.value_cache},
                 {"slot_mapping", slot_mapping},
                 residual,
                 bias,
                 {"k_scale", cache.k_scale},
                 {"v_scale", cache.v_scale}});
  const ElementType type = check.activation_type({"query", query});
  check.same_dtype({"query", query}, {{"key", key}, {"value", value}, residual, bias});
  const ElementType cache_type = checked_cache_type(check, cache, {"query", query});
  check.dtypes(ScalarType::Long, {{"positions", positions}, {"slot_mapping", slot_mapping}});
  check.dtypes(ScalarType::Float, {{"cos_sin_cache", cos_sin_cache}});
  check.written_rows({"query", query}, "[num_tokens, num_heads, head_dim]");
  check.rows({"key", key}, kForm);
  check.rows({"value", value}, kForm);
  check.rows({"positions", positions}, "[num_tokens]");
  check.rows({"cos_sin_cache", cos_sin_cache}, "[max_position, rotary_dim]");
  check_cache_layout(check, cache, /*written=*/true);
  check.rows({"slot_mapping", slot_mapping}, "[num_tokens]");
  check.rows(residual, "[num_tokens, hidden]");
  check.rows(bias, kBiasForm);
  const KvCache view = checked_cache_view<void*>(check, cache, cache_type);
  const int64_t num_tokens = query.size(0);
  const int64_t rotary_dim = cos_sin_cache.size(1);
  check.shape({"query", query}, {num_tokens, kAnySize, view.head_dim},
              "[num_tokens, num_heads, head_dim]");
  check.shape({"key", key}, {num_tokens, view.num_kv_heads, view.head_dim}, kForm);
  check.shape({"value", value}, {num_tokens, view.num_kv_heads, view.head_dim}, kForm);
  check.shape({"positions", positions}, {num_tokens}, "[num_tokens]");
  check.shape({"slot_mapping", slot_mapping}, {num_tokens}, "[num_tokens]");
  check.rotary_dim(rotary_dim, view.head_dim);
  check.shape(bias, {(query.size(1) + 2 * view.num_kv_heads) * view.head_dim}, kBiasForm);
  const RowScales scales = checked_row_scales(check, projection.scales, num_tokens);
  for (const Operand& written : {Operand("query", query), Operand("key_cache", cache.key_cache),
                                 Operand("value_cache", cache.value_cache)}) {
    check.apart(written, {{"key", key},
                          {"value", value},
                          {"positions", positions},
                          {"cos_sin_cache", cos_sin_cache},
                          {"slot_mapping", slot_mapping},
                          residual,
                          bias,
                          {"k_scale", cache.k_scale},
                          {"v_scale", cache.v_scale}});
  }
  check.apart({"query", query},
              {{"key_cache", cache.key_cache}, {"value_cache", cache.value_cache}});
  check.apart({"key_cache", cache.key_cache}, {{"value_cache", cache.value_cache}});
  return {.params = {.write = reshape_and_cache_fields(key, value, view, type, slot_mapping),
                     .positions = positions.const_data_ptr<int64_t>(),
                     .query = query.mutable_data_ptr(),
                     .cos_sin_cache = cos_sin_cache.const_data_ptr<float>(),
                     .is_neox = is_neox,
                     .num_heads = query.size(1),
                     .rotary_dim = rotary_dim,
                     .max_position = cos_sin_cache.size(0),
                     .query_stride_token = query.stride(0),
                     .query_stride_head = query.stride(1),
                     .cos_sin_stride = cos_sin_cache.stride(0),
                     .query_norm = nullptr,
                     .key_norm = nullptr,
                     .epsilon = 0.0f},
          .bare = {.scales = scales,
                   .bias = bias.present() ? bias.tensor().const_data_ptr() : nullptr}};
}

struct HeadNorms {
  const Tensor& query;
  const Tensor& key;
  double epsilon;
};

inline FusedRotaryOperands fused_norm_rotary_reshape_and_cache_params(
    const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& value,
    const HeadNorms& norms, const Tensor& cos_sin_cache, const CacheOperands& cache,
    const Tensor& slot_mapping, bool is_neox, const ProjectionOperands& projection) {
  constexpr const char* kOp = "pagedkv::fused_norm_rotary_reshape_and_cache";
  const OperandChecks check(kOp);
  const Operand query_norm("query_norm", norms.query);
  const Operand key_norm("key_norm", norms.key);
  check.devices({{"query", query}, query_norm, key_norm});
  FusedRotaryOperands operands = fused_rotary_reshape_and_cache_params(
      kOp, positions, query, key, value, cos_sin_cache, cache, slot_mapping, is_neox, projection);
  check.same_dtype({"query", query}, {query_norm, key_norm});
  for (const Operand& norm : {query_norm, key_norm}) {
    check.rows(norm, "[head_dim]");
    check.shape(norm, {query.size(2)}, "[head_dim]");
  }
  for (const Operand& written : {Operand("query", query), Operand("key_cache", cache.key_cache),
                                 Operand("value_cache", cache.value_cache)}) {
    check.apart(written, {query_norm, key_norm});
  }
  operands.params.query_norm = norms.query.const_data_ptr();
  operands.params.key_norm = norms.key.const_data_ptr();
  operands.params.epsilon = check.finite("epsilon", norms.epsilon, 0.0);
  return operands;
}

inline GatherBlocksParams gather_blocks_params(const Tensor& key, const Tensor& value,
                                               const CacheOperands& cache,
                                               const Tensor& block_tables,
                                               const Tensor& seq_start_loc) {
  constexpr const char* kForm = "[num_tokens, num_kv_heads, head_dim]";
  const OperandChecks check("pagedkv::gather_blocks");
  check.devices({{"key", key},
                 {"value", value},
                 {"key_cache", cache.key_cache},
                 {"value_cache", cache.value_cache},
                 {"block_tables", block_tables},
                 {"seq_start_loc", seq_start_loc},
                 {"k_scale", cache.k_scale},
                 {"v_scale", cache.v_scale}});
  const ElementType type = check.activation_type({"key", key});
  check.same_dtype({"key", key}, {{"value", value}});
  const ElementType cache_type = checked_cache_type(check, cache, {"key", key});
  check.dtypes(ScalarType::Int, {{"block_tables", block_tables}, {"seq_start_loc", seq_start_loc}});
  check.written_rows({"key", key}, kForm);
  check.written_rows({"value", value}, kForm);
  check_cache_layout(check, cache, /*written=*/false);
  check.rows({"block_tables", block_tables}, "[num_seqs, max_num_blocks]");
  check.rows({"seq_start_loc", seq_start_loc}, "[num_seqs + 1]");
  const ConstKvCache view = checked_cache_view<const void*>(check, cache, cache_type);
  const int64_t num_seqs = block_tables.size(0);
  check.shape({"key", key}, {kAnySize, view.num_kv_heads, view.head_dim}, kForm);
  check.shape({"value", value}, {key.size(0), view.num_kv_heads, view.head_dim}, kForm);
  check.shape({"seq_start_loc", seq_start_loc}, {num_seqs + 1}, "[num_seqs + 1]");
  for (const Operand& written : {Operand("key", key), Operand("value", value)}) {
    check.apart(written, {{"key_cache", cache.key_cache},
                          {"value_cache", cache.value_cache},
                          {"block_tables", block_tables},
                          {"seq_start_loc", seq_start_loc},
                          {"k_scale", cache.k_scale},
                          {"v_scale", cache.v_scale}});
  }
  check.apart({"key", key}, {{"value", value}});
  return {.key = key.mutable_data_ptr(),
          .value = value.mutable_data_ptr(),
          .block_tables = block_tables.const_data_ptr<int32_t>(),
          .seq_start_loc = seq_start_loc.const_data_ptr<int32_t>(),
          .cache = view,
          .type = type,
          .num_tokens = key.size(0),
          .num_seqs = num_seqs,
          .max_num_blocks = block_tables.size(1),
          .block_tables_stride = block_tables.stride(0),
          .key_stride_token = key.stride(0),
          .key_stride_head = key.stride(1),
          .value_stride_token = value.stride(0),
          .value_stride_head = value.stride(1)};
}

}  // namespace pagedkv::ops
