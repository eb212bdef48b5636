// The launch of one wgmma prefill instantiation, and the tensor maps that its copies need.
#pragma once

#include <numeric>

#include "cuda/attention/prefill_wgmma_kernel.cuh"
#include "cuda/attention/prefill_work.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/device/launch.h"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {

// Boxes of 64 columns and box_rows tokens of one head of one block; columns past head_dim read as
// 0.
inline CUtensorMap cache_map(const void* data, const ConstKvCache& cache, int64_t stride_block,
                             int64_t stride_head, int64_t stride_token, int box_rows) {
  constexpr uint64_t kElement = 2;
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(cache.head_dim), static_cast<cuuint64_t>(cache.block_size),
      static_cast<cuuint64_t>(cache.num_kv_heads), static_cast<cuuint64_t>(cache.num_blocks)};
  const cuuint64_t strides[] = {stride_token * kElement, stride_head * kElement,
                                stride_block * kElement};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map{};
  // Bits are moved as they are: both 16-bit types travel as one.
  const CUresult status = tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("pagedkv: no tensor map for a cache of " +
                             std::to_string(cache.num_blocks) + " blocks, strides " +
                             std::to_string(stride_block) + ", " + std::to_string(stride_head) +
                             ", " + std::to_string(stride_token) + ": CUDA driver error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
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
  const ConstKvCache& cache = params.cache;
  const int box_rows =
      static_cast<int>(std::gcd<int64_t, int64_t>(cache.block_size, Traits::kKeys));
  const CUtensorMap key_map = cache_map(cache.key, cache, cache.key_stride_block,
                                        cache.key_stride_head, cache.key_stride_token, box_rows);
  const CUtensorMap value_map =
      cache_map(cache.value, cache, cache.value_stride_block, cache.value_stride_head,
                cache.value_stride_token, box_rows);
  auto* kernel = prefill_wgmma_kernel<T, kDim, PrefillWork>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (prefill): shared memory");
  unsigned* counter = tile_counter(params);
  if (counter != nullptr) {
    check_cuda(cudaMemsetAsync(counter, 0, sizeof(unsigned), stream),
               "paged_attention (prefill): tile counter");
  }
  const int64_t blocks =
      std::min<int64_t>(num_multiprocessors(), prefill_blocks(params, Traits::kRows));
  kernel<<<grid_size(blocks), Traits::kThreads, Traits::kSharedBytes, stream>>>(
      params, key_map, value_map, box_rows, counter);
  check_launch("paged_attention (prefill)");
}

}  // namespace pagedkv::cuda
