// Tensor maps of the cache, which the copies of sm_90 need: made on the host at every launch.
#pragma once

#include <cuda.h>

#include "cuda/device/launch.h"
#include "pagedkv/kernels/attention_params.h"

namespace pagedkv::cuda {

// cuTensorMapEncodeTiled, found through the runtime: the driver's library is not linked.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder();

// Keys of a box of a kernel that takes `keys` at a time: divides both them and block_size.
int map_box_rows(const ConstKvCache& cache, int keys);

// Boxes of 64 columns and box_rows tokens of one head of one block; columns past head_dim read as
// 0. Of 16-bit elements; strides in elements.
CUtensorMap cache_map(const void* data, const ConstKvCache& cache, int64_t stride_block,
                      int64_t stride_head, int64_t stride_token, int box_rows);

// Boxes of box_rows tokens of one head of one block, cut in columns of 128 bytes, each column
// [box_rows, 128 bytes], swizzled. whole_columns: dimensions are (element of a column, token,
// column, head, block) and a box has all columns, which head_dim must fill; else (element, token,
// 1, head, block), a box has one column, and elements past head_dim read as 0.
// Strides in elements.
CUtensorMap columns_map(const void* data, const ConstKvCache& cache, uint64_t element_bytes,
                        int64_t stride_block, int64_t stride_head, int64_t stride_token,
                        int box_rows, bool whole_columns);

}  // namespace pagedkv::cuda
