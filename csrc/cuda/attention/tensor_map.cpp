// Makes the tensor maps of the cache.
#include "cuda/attention/tensor_map.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pagedkv::cuda {
namespace {

// The map of a cache's keys or values: sizes and strides as the driver wants them (strides in
// bytes, of all dimensions but the first), boxes swizzled by 128 bytes. Bits are moved as they are:
// types of one size travel as one.
template <int kRank>
CUtensorMap encode_map(const void* data, const ConstKvCache& cache, uint64_t element_bytes,
                       const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                       const cuuint32_t (&box)[kRank]) {
  const auto type =
      element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  cuuint32_t steps[kRank];
  std::fill(steps, steps + kRank, 1u);
  CUtensorMap map{};
  const CUresult status =
      tensor_map_encoder()(&map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::string wanted;
    for (const cuuint64_t stride : strides) wanted += " " + std::to_string(stride);
    throw std::runtime_error("pagedkv: no tensor map for a cache of " +
                             std::to_string(cache.num_blocks) + " blocks, strides of" + wanted +
                             " bytes: CUDA driver error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  using Encoder = decltype(&cuTensorMapEncodeTiled);
  static const Encoder encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("pagedkv: the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<Encoder>(function);
  }();
  return encoder;
}

int map_box_rows(const ConstKvCache& cache, int keys) {
  return static_cast<int>(std::gcd<int64_t, int64_t>(cache.block_size, keys));
}

CUtensorMap cache_map(const void* data, const ConstKvCache& cache, int64_t stride_block,
                      int64_t stride_head, int64_t stride_token, int box_rows) {
  constexpr uint64_t kElement = 2;
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(cache.head_dim), static_cast<cuuint64_t>(cache.block_size),
      static_cast<cuuint64_t>(cache.num_kv_heads), static_cast<cuuint64_t>(cache.num_blocks)};
  const cuuint64_t strides[] = {stride_token * kElement, stride_head * kElement,
                                stride_block * kElement};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode_map<4>(data, cache, kElement, sizes, strides, box);
}

CUtensorMap columns_map(const void* data, const ConstKvCache& cache, uint64_t element_bytes,
                        int64_t stride_block, int64_t stride_head, int64_t stride_token,
                        int box_rows, bool whole_columns) {
  constexpr cuuint64_t kColumnBytes = 128;
  const cuuint64_t column = kColumnBytes / element_bytes;
  const auto head_dim = static_cast<cuuint64_t>(cache.head_dim);
  const cuuint64_t columns = whole_columns ? head_dim / column : 1;
  const cuuint64_t sizes[] = {
      whole_columns ? column : head_dim, static_cast<cuuint64_t>(cache.block_size), columns,
      static_cast<cuuint64_t>(cache.num_kv_heads), static_cast<cuuint64_t>(cache.num_blocks)};
  const cuuint64_t strides[] = {stride_token * element_bytes, kColumnBytes,
                                stride_head * element_bytes, stride_block * element_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(column), static_cast<cuuint32_t>(box_rows),
                            static_cast<cuuint32_t>(columns), 1, 1};
  return encode_map<5>(data, cache, element_bytes, sizes, strides, box);
}

}  // namespace pagedkv::cuda
