// The launch of one instantiation of the kernels over shared prefixes. Each file of
// prefix_instances/ defines some.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/prefill_instances/prefill_instances.h"
#include "cuda/attention/prefix_instances/prefix_instances.h"
#include "cuda/attention/prefix_mma_kernel.cuh"
#include "cuda/device/overlapped_launch.cuh"

namespace pagedkv::cuda {

template <class T, class C, int kDim>
void launch_prefix_mma(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = PrefillTraits<T, C, kDim>;
  auto* kernel = prefix_mma_kernel<T, C, kDim>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (prefix): shared memory");
  launch_overlapped("paged_attention (prefix)", kernel,
                    dim3(grid_size(num_prefix_workers(params.num_workers))), dim3(Traits::kThreads),
                    Traits::kSharedBytes, stream, params);
}

template <class T, class C, int kDim>
void launch_prefix(const PagedAttentionParams& params, cudaStream_t stream) {
  if (has_prefill_wgmma(params)) return launch_prefix_wgmma(params, stream);
  launch_prefix_mma<T, C, kDim>(params, stream);
}

// By padded head_dim.
template <class T, class C>
void launch_prefix_any_dim(const PagedAttentionParams& params, cudaStream_t stream) {
  with_padded_head_dim(params.cache.head_dim,
                       [&](auto dim) { launch_prefix<T, C, dim>(params, stream); });
}

}  // namespace pagedkv::cuda
