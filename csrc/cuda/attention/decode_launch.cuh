// The launch of the decode instantiations. Each file of decode_instances/ defines some of them.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/attention/decode_kernel.cuh"
#include "cuda/attention/decode_merge.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/tensor_map.h"
#include "cuda/device/launch.h"

namespace pagedkv::cuda {

template <class T, class C, int kDim, int kRowTiles, bool kHopper>
void launch_decode_on(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = DecodeTraits<T, C, kDim, kRowTiles, kHopper>;
  auto* kernel = decode_attention_kernel<T, C, kDim, kRowTiles>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes),
             "paged_attention (decode): shared memory");
  const ConstKvCache& cache = params.cache;
  const int blocks = params.decode_multiprocessors > 0
                         ? static_cast<int>(params.decode_multiprocessors)
                         : num_multiprocessors();
  const int64_t needed = params.num_splits == 0 ? RangeStates<Traits>::bytes(blocks) : 0;
  if (needed > params.workspace_bytes) {
    throw std::runtime_error("pagedkv: decode needs a workspace of " + std::to_string(needed) +
                             " bytes, got " + std::to_string(params.workspace_bytes));
  }
  DecodeSetup setup{};
  setup.box_rows =
      static_cast<int>(std::gcd<int64_t, int64_t>(cache.block_size, Traits::kUnitKeys));
  // The columns of one box lie together, which suits a box of all keys of a unit.
  const bool whole_columns =
      cache.head_dim % Traits::kColumnElements == 0 && setup.box_rows == Traits::kUnitKeys;
  setup.box_columns = whole_columns ? Traits::kColumns : 1;
  setup.group = Reciprocal::of(params.num_heads / cache.num_kv_heads);
  setup.kv_heads = Reciprocal::of(cache.num_kv_heads);
  setup.block_spans = Reciprocal::of(cache.block_size / 8);
  setup.blocks = Reciprocal::of(blocks);
  setup.ranges = Reciprocal::of(static_cast<int64_t>(blocks) * Traits::kWarps);
  setup.window = static_cast<int>(std::min<int64_t>(params.window, INT32_MAX / 2));
  setup.logit_factor =
      params.soft_cap > 0.0f ? params.scale / params.soft_cap : params.scale * kLog2E;
  if (kHopper) {
    setup.key =
        columns_map(cache.key, cache, sizeof(C), cache.key_stride_block, cache.key_stride_head,
                    cache.key_stride_token, setup.box_rows, whole_columns);
    setup.value = columns_map(cache.value, cache, sizeof(C), cache.value_stride_block,
                              cache.value_stride_head, cache.value_stride_token, setup.box_rows,
                              whole_columns);
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Traits::kAllThreads);
  config.dynamicSmemBytes = Traits::kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kHopper ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params, setup), "paged_attention (decode)");
  launch_decode_merge(params, stream);
}

// Which code the kernel has on this device: what it was compiled for decides, not the device.
template <class T, class C, int kDim, int kRowTiles>
void launch_decode(const PagedAttentionParams& params, cudaStream_t stream) {
  cudaFuncAttributes compiled{};
  check_cuda(cudaFuncGetAttributes(&compiled, decode_attention_kernel<T, C, kDim, kRowTiles>),
             "paged_attention (decode): attributes");
  if (compiled.ptxVersion >= 90) {
    launch_decode_on<T, C, kDim, kRowTiles, true>(params, stream);
  } else {
    launch_decode_on<T, C, kDim, kRowTiles, false>(params, stream);
  }
}

// By padded head_dim and rows of a tile: 8 where one query token has no more and most sequences
// have one, else 16.
template <class T, class C, int kDim>
void launch_decode_any_rows(const PagedAttentionParams& params, cudaStream_t stream) {
  const int64_t group = params.num_heads / params.cache.num_kv_heads;
  const int64_t rows = group * params.max_query_len;
  const bool few = rows <= 8 || (group <= 8 && rows > kMaxDecodeRows);
  if (few) return launch_decode<T, C, kDim, 1>(params, stream);
  return launch_decode<T, C, kDim, 2>(params, stream);
}

template <class T, class C>
void launch_decode_any_dim(const PagedAttentionParams& params, cudaStream_t stream) {
  with_padded_head_dim(params.cache.head_dim,
                       [&](auto dim) { launch_decode_any_rows<T, C, dim>(params, stream); });
}

}  // namespace pagedkv::cuda
