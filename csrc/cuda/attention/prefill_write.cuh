// The end of a tile of the wgmma prefill kernel: a warp's 16 rows of out and lse. The rows go
// through shared memory, where the tile's queries were, so that a warp writes whole rows at a time.
#pragma once

#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tile_part.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/wgmma.cuh"

namespace pagedkv::cuda {

// Where row `row` of the warp's rows is, in elements of out and of lse.
struct RowPlace {
  int64_t out;
  int64_t lse;
};

__device__ inline RowPlace row_place(const PagedAttentionParams& params, const TilePart& part,
                                     int group, int packed) {
  const int64_t token = part.sequence.query_start + packed / group;
  const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
  return {token * params.out_stride_token + head * params.out_stride_head,
          token * params.lse_stride_token + head * params.lse_stride_head};
}

// rows: shared address of the warp's 16 rows, 128 bytes of a row in each slab, swizzled. Row r of
// them is packed row first + r; of them num_rows are written.
template <class Traits, class T>
__device__ __forceinline__ void write_warp_rows(const PagedAttentionParams& params,
                                                const TilePart& part, int group, int first,
                                                int num_rows, OnlineSoftmax& softmax,
                                                const float (&out)[Traits::kDim / 8][4],
                                                uint32_t rows, int lane) {
  constexpr int kChunks = Traits::kDim / 8;  // of 16 bytes
  constexpr int kRowsAtOnce = 32 / kChunks;
  softmax.finish();
  const float v_scale = value_scale(params, part.kv_head);
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) factor[i] = softmax.sum[i] > 0.0f ? v_scale / softmax.sum[i] : 0.0f;
  const auto address = [&](int row, int chunk) {
    return rows + chunk / 8 * Traits::kQuerySlabBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  };
  write_out<kChunks / 2>([&](int pair) {
    const auto& a = out[2 * pair];
    const auto& b = out[2 * pair + 1];
    stmatrix_x4(
        address(lane % 16, 2 * pair + lane / 16),
        {pack<T>(a[0] * factor[0], a[1] * factor[0]), pack<T>(a[2] * factor[1], a[3] * factor[1]),
         pack<T>(b[0] * factor[0], b[1] * factor[0]), pack<T>(b[2] * factor[1], b[3] * factor[1])});
  });
  const RowPlace place = row_place(params, part, group, first + min(lane % 16, num_rows - 1));
  if (params.lse != nullptr) {
    // Lanes 4 r hold rows r and r + 8.
    const float lse[2] = {(softmax.reference[0] + log2f(softmax.sum[0])) * kLn2,
                          (softmax.reference[1] + log2f(softmax.sum[1])) * kLn2};
    const float low =
        __shfl_sync(0xffffffffu, softmax.sum[0] > 0.0f ? lse[0] : -INFINITY, lane % 8 * 4);
    const float high =
        __shfl_sync(0xffffffffu, softmax.sum[1] > 0.0f ? lse[1] : -INFINITY, lane % 8 * 4);
    if (lane < num_rows) params.lse[place.lse] = lane < 8 ? low : high;
  }
  __syncwarp();
  const int chunk = lane % kChunks;
#pragma unroll
  for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + lane / kChunks;
    const int64_t at = __shfl_sync(0xffffffffu, place.out, row);
    const uint4 piece = load_shared_16(address(row, chunk));
    if (row < num_rows && chunk * 8 < static_cast<int>(params.cache.head_dim)) {
      *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + at + chunk * 8) = piece;
    }
  }
}

// Rows that see no key. Not unrolled: they are rare, and the feeding warp has code enough.
template <class T>
__device__ void write_empty_rows(const PagedAttentionParams& params, const TilePart& part,
                                 int group, int first, int num_rows, int lane) {
#pragma unroll 1
  for (int row = 0; row < num_rows; ++row) {
    const RowPlace place = row_place(params, part, group, first + row);
#pragma unroll 1
    for (int d = 8 * lane; d < static_cast<int>(params.cache.head_dim); d += 8 * 32) {
      *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + place.out + d) =
          make_uint4(0, 0, 0, 0);
    }
    if (params.lse != nullptr && lane == 0) params.lse[place.lse] = -INFINITY;
  }
}

}  // namespace pagedkv::cuda
