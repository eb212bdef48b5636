// Tensor maps of matrices of 16-bit elements, for the copies of sm_90: made on the host, by launch.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/attention/tensor_map.h"

namespace pagedkv::cuda {

// Sizes and box in elements, strides (of all dimensions but the first) in bytes. Boxes are swizzled
// by 128 bytes; what lies outside of the sizes reads as 0.
template <int kRank>
CUtensorMap bits_map(const char* name, const void* data, const cuuint64_t (&sizes)[kRank],
                     const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  cuuint32_t ones[kRank];
  std::fill(ones, ones + kRank, 1u);
  CUtensorMap map{};
  const CUresult status = tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank, const_cast<void*>(data), sizes, strides, box,
      ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("pagedkv: no tensor map for " + std::string(name) + " of " +
                             std::to_string(sizes[1]) + " rows, " + std::to_string(strides[0]) +
                             " bytes apart: CUDA driver error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace pagedkv::cuda
