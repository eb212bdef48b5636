// The launch of one decode instantiation. Each file of decode_instances/ defines some of them.
#pragma once

#include "cuda/attention/decode_kernel.cuh"
#include "cuda/attention/decode_merge.h"
#include "cuda/device/launch.h"

namespace pagedkv::cuda {

template <class T, class C, int kDim>
void launch_decode(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = DecodeTraits<T, C, kDim>;
  auto* kernel = decode_attention_kernel<T, C, kDim>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (decode): shared memory");
  const int workers = num_multiprocessors() * Traits::kBlocksPerMultiprocessor;
  kernel<<<workers, Traits::kThreads, Traits::kSharedBytes, stream>>>(params);
  check_launch("paged_attention (decode)");
  launch_decode_merge(params, workers, stream);
}

// By padded head_dim.
template <class T, class C>
void launch_decode_any_dim(const PagedAttentionParams& params, cudaStream_t stream) {
  const int64_t head_dim = params.cache.head_dim;
  if (head_dim <= 64) return launch_decode<T, C, 64>(params, stream);
  if (head_dim <= 96) return launch_decode<T, C, 96>(params, stream);
  if (head_dim <= 128) return launch_decode<T, C, 128>(params, stream);
  if (head_dim <= 192) return launch_decode<T, C, 192>(params, stream);
  return launch_decode<T, C, 256>(params, stream);
}

}  // namespace pagedkv::cuda
