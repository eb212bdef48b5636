// CPU adapters of the ops on the cache: check, fill params, check ids, launch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ops/cache_adapters.h"
#include "ops/cpu_bounds.h"
#include "ops/cpu_thread_pool.h"
#include "ops/pool_adapters.h"
#include "pagedkv/kernels/cpu_launchers.h"

namespace pagedkv::ops {
namespace {

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const ReshapeAndCacheParams params = reshape_and_cache_params(
      key, value, {key_cache, value_cache, k_scale, v_scale}, slot_mapping);
  check_slots("pagedkv::reshape_and_cache", params);
  cpu::launch_reshape_and_cache(params, torch_thread_pool());
}

// Queries in place, keys and values in memory of its own, multiplied by the scales of their rows
// and with the bias added, for as long as it lives; nothing if there are none.
class FinishedProjection {
 public:
  FinishedProjection(const Tensor& query, const Tensor& key, const Tensor& value,
                     const BareProjection& bare, FusedRotaryReshapeAndCacheParams& params) {
    if (!bare.is_bare()) return;
    key_ = torch::stable::clone(key);
    value_ = torch::stable::clone(value);
    const auto* bias = static_cast<const char*>(bare.bias);
    for (const Tensor& heads : {query, *key_, *value_}) {
      cpu::launch_scale_heads({.heads = heads.mutable_data_ptr(),
                               .bias = bias,
                               .scales = bare.scales,
                               .type = params.write.type,
                               .num_tokens = heads.size(0),
                               .num_heads = heads.size(1),
                               .head_dim = heads.size(2),
                               .stride_token = heads.stride(0),
                               .stride_head = heads.stride(1)},
                              torch_thread_pool());
      if (bias != nullptr) {
        bias += heads.size(1) * heads.size(2) * element_bytes(params.write.type);
      }
    }
    params.write.key = key_->const_data_ptr();
    params.write.key_stride_token = key_->stride(0);
    params.write.key_stride_head = key_->stride(1);
    params.write.value = value_->const_data_ptr();
    params.write.value_stride_token = value_->stride(0);
    params.write.value_stride_head = value_->stride(1);
  }

  // The keys to go on with.
  const Tensor& key_or(const Tensor& key) const { return key_.has_value() ? *key_ : key; }

 private:
  std::optional<Tensor> key_;
  std::optional<Tensor> value_;
};

void fused_rotary_reshape_and_cache(const Tensor& positions, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const Tensor& cos_sin_cache,
                                    const Tensor& key_cache, const Tensor& value_cache,
                                    const Tensor& slot_mapping, bool is_neox,
                                    const std::optional<Tensor>& residual, double residual_epsilon,
                                    const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& k_scale,
                                    const std::optional<Tensor>& v_scale) {
  constexpr const char* kOp = "pagedkv::fused_rotary_reshape_and_cache";
  auto [params, bare] = fused_rotary_reshape_and_cache_params(
      kOp, positions, query, key, value, cos_sin_cache, {key_cache, value_cache, k_scale, v_scale},
      slot_mapping, is_neox, {{residual, residual_epsilon}, bias});
  check_slots(kOp, params.write);
  check_positions(kOp, params.positions, params.write.num_tokens, params.max_position);
  const FinishedProjection finished(query, key, value, bare, params);
  cpu::launch_fused_rotary_reshape_and_cache(params, torch_thread_pool());
}

// Norms every head [T, heads, D] in place.
void norm_heads(const Tensor& heads, const void* weight, ElementType type, float epsilon) {
  auto* data = static_cast<char*>(heads.mutable_data_ptr());
  for (int64_t head = 0; head < heads.size(1); ++head) {
    void* at = data + head * heads.stride(1) * element_bytes(type);
    cpu::launch_rms_norm({.out = at,
                          .input = at,
                          .weight = weight,
                          .type = type,
                          .num_tokens = heads.size(0),
                          .hidden_size = heads.size(2),
                          .out_stride_token = heads.stride(0),
                          .input_stride_token = heads.stride(0),
                          .epsilon = epsilon},
                         torch_thread_pool());
  }
}

// The norms by themselves, of the keys in memory of their own, then the op without norms.
void fused_norm_rotary_reshape_and_cache(
    const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& query_norm, const Tensor& key_norm, double epsilon, const Tensor& cos_sin_cache,
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping, bool is_neox,
    const std::optional<Tensor>& residual, double residual_epsilon,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  auto [params, bare] = fused_norm_rotary_reshape_and_cache_params(
      positions, query, key, value, {query_norm, key_norm, epsilon}, cos_sin_cache,
      {key_cache, value_cache, k_scale, v_scale}, slot_mapping, is_neox,
      {{residual, residual_epsilon}, bias});
  constexpr const char* kOp = "pagedkv::fused_norm_rotary_reshape_and_cache";
  check_slots(kOp, params.write);
  check_positions(kOp, params.positions, params.write.num_tokens, params.max_position);
  const FinishedProjection finished(query, key, value, bare, params);
  const Tensor normed = torch::stable::clone(finished.key_or(key));
  norm_heads(query, params.query_norm, params.write.type, params.epsilon);
  norm_heads(normed, params.key_norm, params.write.type, params.epsilon);
  params.write.key = normed.const_data_ptr();
  params.write.key_stride_token = normed.stride(0);
  params.write.key_stride_head = normed.stride(1);
  cpu::launch_fused_rotary_reshape_and_cache(params, torch_thread_pool());
}

void gather_blocks(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                   const Tensor& value_cache, const Tensor& block_tables,
                   const Tensor& seq_start_loc, const std::optional<Tensor>& k_scale,
                   const std::optional<Tensor>& v_scale) {
  const GatherBlocksParams params = gather_blocks_params(
      key, value, {key_cache, value_cache, k_scale, v_scale}, block_tables, seq_start_loc);
  check_gather(params);
  cpu::launch_gather_blocks(params, torch_thread_pool());
}

void copy_blocks(const Tensor& kv_cache, const Tensor& pairs) {
  OperandChecks("pagedkv::copy_blocks").on_cpu({"kv_cache", kv_cache});
  cpu::launch_copy_blocks(copy_blocks_params(kv_cache, pairs), torch_thread_pool());
}

void swap_blocks(const Tensor& source, const Tensor& destination, const Tensor& pairs) {
  OperandChecks("pagedkv::swap_blocks").devices({{"source", source}, {"destination", destination}});
  cpu::launch_swap_blocks(swap_blocks_params(source, destination, pairs), torch_thread_pool());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  library.impl("fused_rotary_reshape_and_cache", TORCH_BOX(&fused_rotary_reshape_and_cache));
  library.impl("fused_norm_rotary_reshape_and_cache",
               TORCH_BOX(&fused_norm_rotary_reshape_and_cache));
  library.impl("gather_blocks", TORCH_BOX(&gather_blocks));
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&swap_blocks));
}

}  // namespace pagedkv::ops
