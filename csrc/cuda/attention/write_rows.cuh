// Finished rows of out and lse from a warp's fragments, for the prefill kernels.
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tile_part.cuh"

namespace pagedkv::cuda {

// A warp's finished rows, from its fragments.
template <class Traits, class T>
__device__ void write_rows(const PagedAttentionParams& params, const TilePart& part, int group,
                           OnlineSoftmax& softmax, const float (&out)[Traits::kDim / 8][4],
                           int lane) {
  softmax.finish();
  const int quad = lane % 4;
  const float v_scale = value_scale(params, part.kv_head);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane / 4 + 8 * i;
    if (row >= part.num_rows) continue;
    const int packed = part.first_row + row;
    const int64_t token = part.sequence.query_start + packed / group;
    const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
    const float factor = softmax.sum[i] > 0.0f ? v_scale / softmax.sum[i] : 0.0f;
    T* to = static_cast<T*>(params.out) + token * params.out_stride_token +
            head * params.out_stride_head;
    const auto write = [&](int d, float x, float y) {
      if (d >= static_cast<int>(params.cache.head_dim)) return;
      *reinterpret_cast<uint32_t*>(to + d) = pack<T>(x * factor, y * factor);
    };
#pragma unroll
    for (int n = 0; n < Traits::kDim / 8; ++n) {
      if constexpr (!Traits::kFloat8) {
        write(out_dim<Traits>(n, 0, quad), out[n][2 * i], out[n][2 * i + 1]);
      } else if (n % 2 == 0) {  // neighbours in head_dim lie in neighbouring fragments
        write(out_dim<Traits>(n, 0, quad), out[n][2 * i], out[n + 1][2 * i]);
        write(out_dim<Traits>(n, 1, quad), out[n][2 * i + 1], out[n + 1][2 * i + 1]);
      }
    }
    if (params.lse != nullptr && quad == 0) {
      params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
          softmax.sum[i] > 0.0f ? (softmax.reference[i] + log2f(softmax.sum[i])) * kLn2 : -INFINITY;
    }
  }
}

}  // namespace pagedkv::cuda
