// The launch of one mma.sync prefill instantiation. Each file of prefill_instances/ defines some.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/prefill_mma_kernel.cuh"
#include "cuda/device/launch.h"

namespace pagedkv::cuda {

template <class T, class C, int kDim>
void launch_prefill_mma(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = PrefillTraits<T, C, kDim>;
  auto* kernel = prefill_mma_kernel<T, C, kDim>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (prefill): shared memory");
  kernel<<<grid_size(prefill_blocks(params, Traits::kRows)), Traits::kThreads, Traits::kSharedBytes,
           stream>>>(params);
  check_launch("paged_attention (prefill)");
}

// By padded head_dim.
template <class T, class C>
void launch_prefill_mma_any_dim(const PagedAttentionParams& params, cudaStream_t stream) {
  with_padded_head_dim(params.cache.head_dim,
                       [&](auto dim) { launch_prefill_mma<T, C, dim>(params, stream); });
}

}  // namespace pagedkv::cuda
