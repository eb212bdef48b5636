// The bytes of one block in two pools, as nested loops over contiguous runs: which dimensions may
// be walked as one run depends on both pools' strides. Shared by copy_blocks and swap_blocks.
#pragma once

#include <array>
#include <cstdint>

#include "pagedkv/kernels/cache_params.h"

namespace pagedkv::cuda {

constexpr int kBlockDims = 4;  // token, head, keys/values, layer, from the inside

struct BlockGeometry {
  int64_t run_bytes;                                    // contiguous in both pools
  std::array<int64_t, kBlockDims> sizes;                // of what is not in the run; 1 for what is
  std::array<int64_t, kBlockDims> source_strides;       // bytes
  std::array<int64_t, kBlockDims> destination_strides;  // bytes
  int64_t source_block_stride;                          // bytes
  int64_t destination_block_stride;                     // bytes

  int64_t num_runs() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
};

template <class SourceView, class DestinationView>
BlockGeometry block_geometry(const SourceView& source, const DestinationView& destination,
                             int64_t num_layers, int64_t num_kv_heads, int64_t block_size,
                             int64_t head_dim, int64_t element_bytes) {
  BlockGeometry made{};
  made.run_bytes = head_dim * element_bytes;
  made.sizes = {block_size, num_kv_heads, 2, num_layers};
  made.source_strides = {source.stride_token, source.stride_head, source.stride_kv,
                         source.stride_layer};
  made.destination_strides = {destination.stride_token, destination.stride_head,
                              destination.stride_kv, destination.stride_layer};
  for (int64_t& stride : made.source_strides) stride *= element_bytes;
  for (int64_t& stride : made.destination_strides) stride *= element_bytes;
  made.source_block_stride = source.stride_block * element_bytes;
  made.destination_block_stride = destination.stride_block * element_bytes;
  // A dimension joins the run while it continues it in both pools; size 1 always does. The order of
  // tokens and heads in memory may be swapped (token-major pools), so both orders are tried.
  bool joined = true;
  while (joined) {
    joined = false;
    for (int i = 0; i < kBlockDims; ++i) {
      if (made.sizes[i] == 1) continue;
      if (made.source_strides[i] == made.run_bytes &&
          made.destination_strides[i] == made.run_bytes) {
        made.run_bytes *= made.sizes[i];
        made.sizes[i] = 1;
        joined = true;
      }
    }
  }
  return made;
}

}  // namespace pagedkv::cuda
