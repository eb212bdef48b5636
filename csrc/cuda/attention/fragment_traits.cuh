// Compile-time sizes of the mma.sync kernels and the addresses of their shared memory.
//
// A unit is what one warp multiplies at a time: kUnitKeys keys and their values.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pagedkv::cuda {

// A row of kChunks 16-byte chunks: where chunk c of a row lies, such that 8 neighbouring rows'
// chunk c fall into different banks (ldmatrix).
template <int kChunks>
__device__ constexpr int swizzled_chunk(int row, int chunk) {
  if constexpr (kChunks % 8 == 0) return chunk ^ (row & 7);
  if constexpr (kChunks % 8 == 4) return chunk ^ ((row >> 1) & 3);
  static_assert(kChunks % 8 == 0 || kChunks % 8 == 4 || kChunks % 4 == 2);
  return chunk ^ ((row >> 2) & 1);
}

// Likewise in 32-byte segments, for 8-byte loads of 4 neighbouring rows (float8 keys).
template <int kSegments>
__device__ constexpr int swizzled_segment(int row, int segment) {
  if constexpr (kSegments % 4 == 0) return segment ^ (row & 3);
  if constexpr (kSegments % 4 == 2) return segment ^ ((row >> 1) & 1);
  return segment;
}

// What tile products with kUnitKeys keys at a time need to know. T: activations' type (of the
// products: T, or fp16 with a float8 cache); C: the cache's type; kHeadDim: head_dim, padded.
template <class T, class C, int kHeadDim, int kKeys>
struct UnitTraits {
  static constexpr bool kFloat8 = sizeof(C) == 1;
  using Product = std::conditional_t<kFloat8, __half, T>;
  static constexpr int kDim = kHeadDim;
  static constexpr int kUnitKeys = kKeys;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(C));
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kTensorBytes = kUnitKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kTensorBytes;
  static constexpr bool kQueryInRegisters = kDim <= 128;

  // Byte offsets of 16-byte chunk c of a row, in the keys' and in the values' part of a stage.
  __device__ static constexpr int key_offset(int row, int chunk) {
    if constexpr (kFloat8) {
      return row * kRowBytes + swizzled_segment<kRowChunks / 2>(row, chunk / 2) * 32 +
             chunk % 2 * 16;
    }
    return row * kRowBytes + swizzled_chunk<kRowChunks>(row, chunk) * 16;
  }
  __device__ static constexpr int value_offset(int row, int chunk) {
    return kTensorBytes + row * kRowBytes + swizzled_chunk<kRowChunks>(row, chunk) * 16;
  }
};

}  // namespace pagedkv::cuda
