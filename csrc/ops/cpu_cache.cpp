// CPU adapters of the ops on the cache: check, fill params, check ids, launch.
#include <torch/csrc/stable/library.h>

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
  const FusedRotaryReshapeAndCacheParams params = fused_rotary_reshape_and_cache_params(
      positions, query, key, value, cos_sin_cache, {key_cache, value_cache, k_scale, v_scale},
      slot_mapping, is_neox);
  constexpr const char* kOp = "pagedkv::fused_rotary_reshape_and_cache";
  check_slots(kOp, params.write);
  check_positions(kOp, params.positions, params.write.num_tokens, params.max_position);
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
  library.impl("gather_blocks", TORCH_BOX(&gather_blocks));
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&swap_blocks));
}

}  // namespace pagedkv::ops
