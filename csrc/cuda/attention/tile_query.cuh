// A warp's 16 packed rows: their query fragments, their positions and what they see.
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tile_part.cuh"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

// Where a lane's two rows of Q are, and their fragments.
template <class Traits, class T>
class TileQuery {
 public:
  static constexpr int kProducts = Traits::kDim / 16;
  static constexpr int kHeld = Traits::kQueryInRegisters ? kProducts : 1;

  __device__ void load(const PagedAttentionParams& params, const TilePart& part, int group,
                       int lane) {
    head_dim_ = static_cast<int>(params.cache.head_dim);
    quad_ = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i;
      const int packed = part.first_row + min(row, part.num_rows - 1);
      const int64_t token = part.sequence.query_start + packed / group;
      const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
      rows_[i] = static_cast<const T*>(params.query) + token * params.query_stride_token +
                 head * params.query_stride_head;
      valid_[i] = row < part.num_rows;
    }
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int k = 0; k < kProducts; ++k) read(k, held_[k]);
    }
  }

  __device__ void operator()(int product, uint32_t (&a)[4]) const {
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held_[product][i];
    } else {
      read(product, a);
    }
  }

 private:
  __device__ void read(int product, uint32_t (&a)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = query_dim<Traits>(product, half, quad_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pair = 0;
        if (valid_[i] && d < head_dim_) {
          // Volatile: hoisted out of the loop over keys, the fragments would spill.
          asm volatile("ld.global.b32 %0, [%1];\n" : "=r"(pair) : "l"(rows_[i] + d));
        }
        if constexpr (!std::is_same_v<T, typename Traits::Product>) {
          const auto wide = reinterpret_cast<const Vec<T, 2>&>(pair);
          pair = pack<typename Traits::Product>(to_float(wide.data[0]), to_float(wide.data[1]));
        }
        a[2 * half + i] = pair;
      }
    }
  }

  const T* rows_[2];
  bool valid_[2];
  int head_dim_;
  int quad_;
  uint32_t held_[kHeld][4];
};

__device__ inline TileRows tile_rows(const PagedAttentionParams& params, const TilePart& part,
                                     int group, int lane) {
  TileRows rows{};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int packed = part.first_row + min(lane / 4 + 8 * i, part.num_rows - 1);
    const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
    rows.position[i] = part.sequence.position(packed / group);
    rows.keys[i] = visible_keys(params, part.sequence.seq_len, rows.position[i]);
    if (params.alibi_slopes != nullptr) {
      rows.slope[i] = params.alibi_slopes[head * params.alibi_slopes_stride] * kLog2E;
    }
  }
  const int last = (part.first_row + part.num_rows - 1) / group;
  rows.all_first = visible_keys(params, part.sequence.seq_len, part.sequence.position(last)).first;
  rows.all_end =
      visible_keys(params, part.sequence.seq_len, part.sequence.position(part.first_row / group))
          .end;
  return rows;
}

}  // namespace pagedkv::cuda
