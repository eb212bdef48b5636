// Compile-time sizes of the decode kernel and the addresses of its shared memory.
//
// A unit is what one warp multiplies at a time: kUnitKeys keys and their values. A stage holds one
// unit: the keys, then the values, each as columns of 128 bytes: column c of row r lies at
// c * kUnitKeys * 128 + r * 128, its 16-byte chunks swizzled by r % 8, which is what a tensor map
// with 128-byte swizzle writes and what ldmatrix reads without bank conflicts.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pagedkv::cuda {

// What the device code is compiled for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kCompiledForHopper = false;
#else
constexpr bool kCompiledForHopper = true;
#endif

// T: activations' type; C: the cache's type; kHeadDim: head_dim, padded; kTiles: row tiles of 8
// packed rows that share a pass over the keys; kHopper: on sm_90, else with the shared memory that
// every GPU from sm_80 on has.
template <class T, class C, int kHeadDim, int kTiles, bool kHopper>
struct DecodeTraits {
  static constexpr bool kFloat8 = sizeof(C) == 1;
  using Product = std::conditional_t<kFloat8, __half, T>;  // type of the tensor-core products
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowTiles = kTiles;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kUnitKeys = kFloat8 ? 32 : 16;
  static constexpr int kColumnBytes = 128;
  static constexpr int kColumns = (kDim * static_cast<int>(sizeof(C)) + 127) / 128;
  static constexpr int kColumnElements = 128 / static_cast<int>(sizeof(C));
  static constexpr int kTensorBytes = kUnitKeys * kColumns * kColumnBytes;
  static constexpr int kStageBytes = 2 * kTensorBytes;
  // Warps that multiply; each has a warp beside it that loads.
  static constexpr int kWarps =
      kHopper ? (kDim <= 128 ? 8 : 4) / kTiles : (kDim <= 128 && kTiles == 1 ? 3 : 1);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kAllThreads = 2 * kThreads;
  // Query rows beside a stage, for the part that begins in it; padded against bank conflicts.
  static constexpr int kQueryPitch = kDim * 2 + 16;
  static constexpr int kQueryBytes = kRows * kQueryPitch;
  // Deep rings do not pay: what waits in the memory's queues delays everything else.
  static constexpr int kStateBytes = kRows * kDim * 4 + kRows * 8 * (kDim / 16);
  static constexpr int kMaxStages =
      ((kHopper ? 210 : 96) * 1024 / kWarps - kStateBytes) / (kStageBytes + kQueryBytes);
  static constexpr int kStages = kMaxStages < 6 ? kMaxStages : 6;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kStatesBegin = kRingBytes + kWarps * kStages * kQueryBytes;
  static constexpr int kSharedBytes = kStatesBegin + kWarps * kStateBytes;
  // A ring's room is reused for a tile's state at the end of its range.
  static_assert(kStateBytes <= kStages * kStageBytes);
  static_assert(kStages >= 2);

  // Byte offset of 16-byte chunk `chunk` of a row within the keys or values of a stage.
  __device__ static constexpr int chunk_offset(int row, int chunk) {
    return chunk / 8 * (kUnitKeys * kColumnBytes) + row * kColumnBytes +
           (chunk % 8 ^ (row & 7)) * 16;
  }
  // From the offset of a row's chunk 0 or 1 to that `chunks` further: compile-time chunks, even if
  // `offset` is of chunk 1.
  __device__ static constexpr uint32_t next_chunk(uint32_t offset, int chunks) {
    return (offset ^ static_cast<uint32_t>(chunks % 8 * 16)) +
           static_cast<uint32_t>(chunks / 8 * (kUnitKeys * kColumnBytes));
  }
};

}  // namespace pagedkv::cuda
