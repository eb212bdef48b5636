// Prefill attention by wgmma: 2 types x 2 padded head sizes = 4 kernels.
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefill_wgmma_launch.cuh"

namespace pagedkv::cuda {

bool has_prefill_wgmma(const PagedAttentionParams& params) {
  return params.cache.head_dim <= 128 && params.cache.type == params.type &&
         device_attribute(cudaDevAttrComputeCapabilityMajor, current_device()) == 9;
}

void launch_prefill_wgmma(const PagedAttentionParams& params, cudaStream_t stream) {
  const bool short_heads = params.cache.head_dim <= 64;
  if (params.type == ElementType::kBFloat16) {
    if (short_heads) return launch_prefill_wgmma<__nv_bfloat16, 64>(params, stream);
    return launch_prefill_wgmma<__nv_bfloat16, 128>(params, stream);
  }
  if (short_heads) return launch_prefill_wgmma<__half, 64>(params, stream);
  return launch_prefill_wgmma<__half, 128>(params, stream);
}

}  // namespace pagedkv::cuda
