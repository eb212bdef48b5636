// CUDA adapters of the ops on the cache: check, fill params, launch on the current stream.
#include <torch/csrc/stable/library.h>

#include "ops/cache_adapters.h"
#include "ops/cuda_context.h"
#include "ops/pool_adapters.h"

namespace pagedkv::ops {
namespace {

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const ReshapeAndCacheParams params = reshape_and_cache_params(
      key, value, {key_cache, value_cache, k_scale, v_scale}, slot_mapping);
  const CudaContext context(key);
  cuda::launch_reshape_and_cache(params, context.stream());
}

void fused_rotary_reshape_and_cache(const Tensor& positions, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const Tensor& cos_sin_cache,
                                    const Tensor& key_cache, const Tensor& value_cache,
                                    const Tensor& slot_mapping, bool is_neox,
                                    const std::optional<Tensor>& residual, double residual_epsilon,
                                    const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& k_scale,
                                    const std::optional<Tensor>& v_scale) {
  const FusedRotaryOperands operands = fused_rotary_reshape_and_cache_params(
      "pagedkv::fused_rotary_reshape_and_cache", positions, query, key, value, cos_sin_cache,
      {key_cache, value_cache, k_scale, v_scale}, slot_mapping, is_neox,
      {{residual, residual_epsilon}, bias});
  const CudaContext context(query);
  cuda::launch_fused_rotary_reshape_and_cache(operands.params, operands.bare, context.stream());
}

void fused_norm_rotary_reshape_and_cache(
    const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& query_norm, const Tensor& key_norm, double epsilon, const Tensor& cos_sin_cache,
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping, bool is_neox,
    const std::optional<Tensor>& residual, double residual_epsilon,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  const FusedRotaryOperands operands = fused_norm_rotary_reshape_and_cache_params(
      positions, query, key, value, {query_norm, key_norm, epsilon}, cos_sin_cache,
      {key_cache, value_cache, k_scale, v_scale}, slot_mapping, is_neox,
      {{residual, residual_epsilon}, bias});
  const CudaContext context(query);
  cuda::launch_fused_rotary_reshape_and_cache(operands.params, operands.bare, context.stream());
}

void gather_blocks(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                   const Tensor& value_cache, const Tensor& block_tables,
                   const Tensor& seq_start_loc, const std::optional<Tensor>& k_scale,
                   const std::optional<Tensor>& v_scale) {
  const GatherBlocksParams params = gather_blocks_params(
      key, value, {key_cache, value_cache, k_scale, v_scale}, block_tables, seq_start_loc);
  const CudaContext context(key);
  cuda::launch_gather_blocks(params, context.stream());
}

void copy_blocks(const Tensor& kv_cache, const Tensor& pairs) {
  const CopyBlocksParams params = copy_blocks_params(kv_cache, pairs);
  const CudaContext context(kv_cache);
  cuda::launch_copy_blocks(params, context.stream());
}

// Between a device and the CPU, either way, or within one device.
void swap_blocks(const Tensor& source, const Tensor& destination, const Tensor& pairs) {
  const SwapBlocksParams params = swap_blocks_params(source, destination, pairs);
  const Tensor& on_device = source.is_cuda() ? source : destination;
  for (const Operand& operand : {Operand("source", source), Operand("destination", destination)}) {
    STD_TORCH_CHECK(operand.tensor().is_cpu() ||
                        operand.tensor().get_device_index() == on_device.get_device_index(),
                    "pagedkv::swap_blocks: ", operand.name(), " is on ",
                    device_name(operand.tensor()), ", expected cpu or ", device_name(on_device));
  }
  const CudaContext context(on_device);
  cuda::launch_swap_blocks(params, context.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CUDA, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  library.impl("fused_rotary_reshape_and_cache", TORCH_BOX(&fused_rotary_reshape_and_cache));
  library.impl("fused_norm_rotary_reshape_and_cache",
               TORCH_BOX(&fused_norm_rotary_reshape_and_cache));
  library.impl("gather_blocks", TORCH_BOX(&gather_blocks));
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&swap_blocks));
}

}  // namespace pagedkv::ops
