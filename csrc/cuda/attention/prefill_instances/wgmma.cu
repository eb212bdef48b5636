// Prefill attention by wgmma: 2 types x 2 padded head sizes = 4 kernels.
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefill_wgmma_launch.cuh"

namespace pagedkv::cuda {
namespace {

// Has shared memory where its code was compiled for 9.0a, and none where it was compiled for
// plain 9.0 or for another architecture; it is never launched.
__global__ void wgmma_probe_kernel(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ int present[32];
  present[threadIdx.x % 32] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = present[(threadIdx.x + 1) % 32];
#endif
}

// Whether the code that this device runs has wgmma in it. A library built for 9.0 without the `a`
// does without: its prefill kernels would hold nothing.
bool has_wgmma_code() {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, wgmma_probe_kernel), "paged_attention (prefill)");
  return attributes.sharedSizeBytes > 0;
}

}  // namespace

bool has_prefill_wgmma(const PagedAttentionParams& params) {
  return params.cache.head_dim <= 128 && params.cache.type == params.type &&
         device_attribute(cudaDevAttrComputeCapabilityMajor, current_device()) == 9 &&
         has_wgmma_code();
}

bool prepare_prefill_wgmma(const PagedAttentionParams& params, cudaStream_t stream) {
  unsigned* counter = tile_counter(params);
  if (counter == nullptr) return false;
  check_cuda(cudaMemsetAsync(counter, 0, sizeof(unsigned), stream),
             "paged_attention (prefill): tile counter");
  return true;
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
