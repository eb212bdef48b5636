// merge_attention_states: the softmax-weighted union of two attention states.
//
// Grid: one warp for one row (token, head). Must move 3 * T * H * D elements.
// Instantiations: 3 types x {16-byte, single} accesses = 6.
#include "cuda/device/global_store.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = kThreads / 32;

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
    merge_attention_states_kernel(const __grid_constant__ MergeAttentionStatesParams params) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32;
  if (row >= params.num_tokens * params.num_heads) return;
  const int64_t token = row / params.num_heads;
  const int64_t head = row % params.num_heads;
  const float lse_a =
      params.lse_a[token * params.lse_a_stride_token + head * params.lse_a_stride_head];
  const float lse_b =
      params.lse_b[token * params.lse_b_stride_token + head * params.lse_b_stride_head];
  // An empty state (-inf) has weight 0, and its out, which may be NaN, is not used at all.
  const float highest = fmaxf(lse_a, lse_b);
  const bool empty = highest == -INFINITY;
  const float exp_a = empty ? 0.0f : expf(lse_a - highest);
  const float exp_b = empty ? 0.0f : expf(lse_b - highest);
  const float sum = exp_a + exp_b;
  const float weight_a = empty ? 0.0f : exp_a / sum;
  const float weight_b = empty ? 0.0f : exp_b / sum;
  const bool use_a = lse_a != -INFINITY;
  const bool use_b = lse_b != -INFINITY;
  const T* out_a = static_cast<const T*>(params.out_a) + token * params.out_a_stride_token +
                   head * params.out_a_stride_head;
  const T* out_b = static_cast<const T*>(params.out_b) + token * params.out_b_stride_token +
                   head * params.out_b_stride_head;
  T* out =
      static_cast<T*>(params.out) + token * params.out_stride_token + head * params.out_stride_head;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t d = lane * kVec; d < params.head_dim; d += 32 * kVec) {
    const Vec<float, kVec> a = widen(load_vec<kVec>(out_a + d));
    const Vec<float, kVec> b = widen(load_vec<kVec>(out_b + d));
    Vec<float, kVec> merged;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      merged.data[i] =
          (use_a ? weight_a * a.data[i] : 0.0f) + (use_b ? weight_b * b.data[i] : 0.0f);
    }
    store_global<kVec>(out + d, narrow<T>(merged));
  }
  if (params.lse != nullptr && lane == 0) {
    params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
        empty ? -INFINITY : highest + logf(sum);
  }
}

}  // namespace

void launch_merge_attention_states(const MergeAttentionStatesParams& params, StreamHandle stream) {
  const int64_t rows = params.num_tokens * params.num_heads;
  if (rows == 0) return;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    constexpr int kWide = kVecElements<T>;
    constexpr int64_t kElement = sizeof(T);
    const bool wide =
        params.head_dim % kWide == 0 &&
        aligned_to(16, {params.out, params.out_a, params.out_b},
                   {params.out_stride_token * kElement, params.out_stride_head * kElement,
                    params.out_a_stride_token * kElement, params.out_a_stride_head * kElement,
                    params.out_b_stride_token * kElement, params.out_b_stride_head * kElement});
    const unsigned blocks = grid_size(ceil_div(rows, kRows));
    const auto at = static_cast<cudaStream_t>(stream);
    if (wide) {
      merge_attention_states_kernel<T, kWide><<<blocks, kThreads, 0, at>>>(params);
    } else {
      merge_attention_states_kernel<T, 1><<<blocks, kThreads, 0, at>>>(params);
    }
  });
  check_launch("merge_attention_states");
}

}  // namespace pagedkv::cuda
