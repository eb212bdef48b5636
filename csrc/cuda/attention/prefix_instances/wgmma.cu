// The wgmma kernel over shared prefixes: 2 types x 2 padded head sizes = 4 kernels.
#include "cuda/attention/prefill_wgmma_launch.cuh"
#include "cuda/attention/prefix_instances/prefix_instances.h"
#include "cuda/attention/prefix_work.cuh"
#include "cuda/device/overlapped_launch.cuh"

namespace pagedkv::cuda {
namespace {

template <class T, int kDim>
void launch(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = WgmmaTraits<kDim>;
  const CacheMaps maps = cache_maps<Traits>(params.cache);
  auto* kernel = prefill_wgmma_kernel<T, kDim, PrefixWork>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (prefix): shared memory");
  launch_overlapped("paged_attention (prefix)", kernel,
                    dim3(grid_size(num_prefix_workers(params.num_workers))), dim3(Traits::kThreads),
                    Traits::kSharedBytes, stream, params, maps.key, maps.value, maps.box_rows,
                    nullptr);
}

}  // namespace

void launch_prefix_wgmma(const PagedAttentionParams& params, cudaStream_t stream) {
  const bool short_heads = params.cache.head_dim <= 64;
  if (params.type == ElementType::kBFloat16) {
    if (short_heads) return launch<__nv_bfloat16, 64>(params, stream);
    return launch<__nv_bfloat16, 128>(params, stream);
  }
  if (short_heads) return launch<__half, 64>(params, stream);
  return launch<__half, 128>(params, stream);
}

}  // namespace pagedkv::cuda
