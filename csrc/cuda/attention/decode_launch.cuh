// The launch of the decode instantiations. Each file of decode_instances/ defines some of them.
#pragma once

#include "cuda/attention/decode_kernel.cuh"
#include "cuda/attention/decode_merge.h"
#include "cuda/attention/decode_small_kernel.cuh"
#include "cuda/attention/launch.h"
#include "cuda/attention/tensor_map.h"
#include "cuda/device/launch.h"

namespace pagedkv::cuda {

// What both kernels need; blocks: of the grid, warps: those of the grid that multiply.
template <class Traits, class C>
DecodeSetup decode_setup(const PagedAttentionParams& params, int64_t blocks, int64_t warps,
                         bool hopper) {
  const ConstKvCache& cache = params.cache;
  DecodeSetup setup{};
  setup.box_rows = map_box_rows(cache, Traits::kUnitKeys);
  // The columns of one box lie together, which suits a box of all keys of a unit.
  const bool whole_columns =
      cache.head_dim % Traits::kColumnElements == 0 && setup.box_rows == Traits::kUnitKeys;
  setup.box_columns = whole_columns ? Traits::kColumns : 1;
  setup.group = Reciprocal::of(params.num_heads / cache.num_kv_heads);
  setup.kv_heads = Reciprocal::of(cache.num_kv_heads);
  setup.block_spans = Reciprocal::of(cache.block_size / 8);
  setup.blocks = Reciprocal::of(blocks);
  setup.ranges = Reciprocal::of(warps);
  setup.window = static_cast<int>(min(params.window, int64_t{INT32_MAX / 2}));
  setup.logit_factor =
      params.soft_cap > 0.0f ? params.scale / params.soft_cap : params.scale * kLog2E;
  if (hopper) {
    setup.key =
        columns_map(cache.key, cache, sizeof(C), cache.key_stride_block, cache.key_stride_head,
                    cache.key_stride_token, setup.box_rows, whole_columns);
    setup.value = columns_map(cache.value, cache, sizeof(C), cache.value_stride_block,
                              cache.value_stride_head, cache.value_stride_token, setup.box_rows,
                              whole_columns);
  }
  return setup;
}

// One launch of a decode kernel: it waits inside for what comes before it, if it is Hopper's.
template <class Kernel>
void start_decode(const Kernel& kernel, int64_t blocks, int threads, int shared_bytes, bool hopper,
                  const PagedAttentionParams& params, const DecodeSetup& setup,
                  cudaStream_t stream) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "paged_attention (decode): shared memory");
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_size(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = hopper ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params, setup), "paged_attention (decode)");
}

template <class T, class C, int kDim, int kRowTiles, bool kHopper>
void launch_decode_on(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = DecodeTraits<T, C, kDim, kRowTiles, kHopper>;
  const int blocks = params.decode_multiprocessors > 0
                         ? static_cast<int>(params.decode_multiprocessors)
                         : num_multiprocessors();
  check_decode_workspace(params, params.num_splits == 0 ? RangeStates<Traits>::bytes(blocks) : 0);
  start_decode(decode_attention_kernel<T, C, kDim, kRowTiles>, blocks, Traits::kAllThreads,
               Traits::kSharedBytes, kHopper, params,
               decode_setup<Traits, C>(params, blocks,
                                       static_cast<int64_t>(blocks) * Traits::kWarps, kHopper),
               stream);
  launch_decode_merge(params, stream);
}

// Small batches have a kernel of their own, where its code is Hopper's: few sequences, eight packed
// rows of each at most. Says whether this is one, and launches.
template <class T, class C, int kDim>
bool launch_decode_small(const PagedAttentionParams& params, cudaStream_t stream) {
  using Traits = SmallTraits<T, C, kDim>;
  const int64_t kv_heads = params.cache.num_kv_heads;
  const int64_t blocks = num_multiprocessors() * (params.num_seqs == 1 ? 1 : 2);
  const int64_t slots = blocks / kv_heads;
  const bool small = params.num_seqs <= kSmallSeqs && params.num_splits == 0 &&
                     params.num_prefix_groups == 0 && slots > 0 &&
                     params.num_heads / kv_heads * params.max_query_len <= Traits::kRows &&
                     SmallStates<Traits>::bytes(kv_heads, slots) <= params.workspace_bytes;
  if (!small) return false;
  DecodeSetup setup = decode_setup<Traits, C>(params, slots * kv_heads, 1, true);
  setup.slots = static_cast<unsigned>(slots);
  start_decode(decode_small_kernel<T, C, kDim>, slots * kv_heads, Traits::kThreads,
               Traits::kSharedBytes, true, params, setup, stream);
  return true;
}

// Which code the kernel has on this device: what it was compiled for decides, not the device.
template <class T, class C, int kDim, int kRowTiles>
void launch_decode(const PagedAttentionParams& params, cudaStream_t stream) {
  cudaFuncAttributes compiled{};
  check_cuda(cudaFuncGetAttributes(&compiled, decode_attention_kernel<T, C, kDim, kRowTiles>),
             "paged_attention (decode): attributes");
  if (compiled.ptxVersion >= 90) {
    if constexpr (kRowTiles == 1 && (kDim == 64 || kDim == 128)) {
      if (launch_decode_small<T, C, kDim>(params, stream)) return;
    }
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
