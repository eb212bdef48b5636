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

void fused_rotary_reshape_and_cache(const Tensor& positions, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const Tensor& cos_sin_cache,
                                    const Tensor& key_cache, const Tensor& value_cache,
                                    const Tensor& slot_mapping, bool is_neox,
                                    const std::optional<Tensor>& k_scale,
                                    const std::optional<Tensor>& v_scale) {
  constexpr const char* kOp = "pagedkv::fused_rotary_reshape_and_cache";
  const FusedRotaryReshapeAndCacheParams params = fused_rotary_reshape_and_cache_params(
      kOp, positions, query, key, value, cos_sin_cache, {key_cache, value_cache, k_scale, v_scale},
      slot_mapping, is_neox);
  check_slots(kOp, params.write);
  check_positions(kOp, params.positions, params.write.num_tokens, params.max_position);
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
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  FusedRotaryReshapeAndCacheParams params = fused_norm_rotary_reshape_and_cache_params(
      positions, query, key, value, {query_norm, key_norm, epsilon}, cos_sin_cache,
      {key_cache, value_cache, k_scale, v_scale}, slot_mapping, is_neox);
  constexpr const char* kOp = "pagedkv::fused_norm_rotary_reshape_and_cache";
  check_slots(kOp, params.write);
  check_positions(kOp, params.positions, params.write.num_tokens, params.max_position);
  const Tensor normed = torch::stable::clone(key);
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
