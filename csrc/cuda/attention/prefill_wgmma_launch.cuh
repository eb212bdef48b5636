// The launch of one wgmma prefill instantiation, and the tensor maps that its copies need.
#pragma once

#include "cuda/attention/prefill_wgmma_kernel.cuh"
#include "cuda/attention/prefill_work.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/device/launch.h"
#include "cuda/device/overlapped_launch.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {

// What the kernel's copies need of the cache.
struct CacheMaps {
  CUtensorMap key;
  CUtensorMap value;
  int box_rows;
};

template <class Traits>
CacheMaps cache_maps(const ConstKvCache& cache) {
  const int rows = map_box_rows(cache, Traits::kKeys);
  return {cache_map(cache.key, cache, cache.key_stride_block, cache.key_stride_head,
                    cache.key_stride_token, rows),
          cache_map(cache.value, cache, cache.value_stride_block, cache.value_stride_head,
                    cache.value_stride_token, rows),
          rows};
}

// The last bytes of what the workspace has for tiles cut over workers: decode's tiles have fewer
// rows than are reserved. Without such a part there is no counter.
inline unsigned* tile_counter(const PagedAttentionParams& params) {
  static_assert(kTileRows < kMaxSplitTileRows);
  if (params.num_splits != 0) return nullptr;
  const int64_t bytes = paged_attention_workspace_bytes(
      {.num_tokens = params.num_tokens,
       .num_heads = params.num_heads,
       .head_dim = params.cache.head_dim,
       .num_splits = 0,
       .num_prefix_groups = 0,
       .num_workers = paged_attention_num_workers(current_device())});
  return reinterpret_cast<unsigned*>(static_cast<char*>(params.workspace) + bytes -
                                     kWorkspaceAlignment);
}

template <class T, int kDim>
void launch_prefill_wgmma(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = WgmmaTraits<kDim>;
  const CacheMaps maps = cache_maps<Traits>(params.cache);
  auto* kernel = prefill_wgmma_kernel<T, kDim, PrefillWork>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (prefill): shared memory");
  unsigned* counter = tile_counter(params);
  const int64_t blocks = min(int64_t{num_multiprocessors()}, prefill_blocks(params, Traits::kRows));
  const dim3 grid(grid_size(blocks));
  if (counter == nullptr) {
    kernel<<<grid, Traits::kThreads, Traits::kSharedBytes, stream>>>(params, maps.key, maps.value,
                                                                     maps.box_rows, counter);
    return check_launch("paged_attention (prefill)");
  }
  // May start beside decode, which was launched just before it.
  launch_overlapped("paged_attention (prefill)", kernel, grid, dim3(Traits::kThreads),
                    Traits::kSharedBytes, stream, params, maps.key, maps.value, maps.box_rows,
                    counter);
}

}  // namespace pagedkv::cuda
