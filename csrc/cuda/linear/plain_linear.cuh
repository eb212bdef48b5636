// streamed_linear of any size, type and alignment: a warp for each element of the result. It is
// right, not fast: what the stream of weights can take goes there.
//
// Grid: x walks the columns of out, kWarps a block, y the rows. A warp's lanes sum every 32nd
// product, then the lanes are summed. Instantiations: 3 types.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"
#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

constexpr int kPlainLinearWarps = 8;

// 1 / root mean square of the row; the same in all lanes.
template <class T>
__device__ float norm_factor(const StreamedLinearParams& params, const T* row, int lane) {
  float sum = 0.0f;
  for (int64_t k = lane; k < params.in_features; k += 32)
    sum += to_float(row[k]) * to_float(row[k]);
  return rsqrtf(warp_sum(sum) / static_cast<float>(params.in_features) + params.epsilon);
}

template <class T>
__device__ float linear_element(const StreamedLinearParams& params, const T* row, float factor,
                                int64_t column, int lane) {
  const T* weight = static_cast<const T*>(params.weight) + column * params.weight_stride_row;
  const T* norm = static_cast<const T*>(params.norm_weight);
  float sum = 0.0f;
  for (int64_t k = lane; k < params.in_features; k += 32) {
    float x = to_float(row[k]);
    if (norm != nullptr) x = to_float(from_float<T>(x * (factor * to_float(norm[k]))));
    sum += x * to_float(weight[k]);
  }
  sum = warp_sum(sum);
  if (params.bias != nullptr) sum += to_float(static_cast<const T*>(params.bias)[column]);
  return to_float(from_float<T>(sum));
}

template <class T>
__global__ void __launch_bounds__(kPlainLinearWarps * 32)
    plain_linear_kernel(const __grid_constant__ StreamedLinearParams params) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kPlainLinearWarps + threadIdx.x / 32;
  const bool gated = params.epilogue == LinearEpilogue::kSiluAndMul;
  const int64_t columns = gated ? params.out_features / 2 : params.out_features;
  if (column >= columns) return;
  for (int64_t token = blockIdx.y; token < params.num_tokens; token += gridDim.y) {
    const T* row = static_cast<const T*>(params.input) + token * params.input_stride_token;
    const float factor = params.norm_weight != nullptr ? norm_factor(params, row, lane) : 1.0f;
    float y = linear_element(params, row, factor, column, lane);
    T* out = static_cast<T*>(params.out) + token * params.out_stride_token + column;
    if (gated) {
      y = y / (1.0f + expf(-y)) * linear_element(params, row, factor, columns + column, lane);
    } else if (params.epilogue == LinearEpilogue::kAdd) {
      y += to_float(*out);
    }
    if (lane == 0) *out = from_float<T>(y);
  }
}

constexpr int64_t kMaxGridY = 65535;  // of any device

template <class T>
void launch_plain_linear(const StreamedLinearParams& params, cudaStream_t stream) {
  const bool gated = params.epilogue == LinearEpilogue::kSiluAndMul;
  const int64_t columns = gated ? params.out_features / 2 : params.out_features;
  const dim3 grid(grid_size(ceil_div(columns, kPlainLinearWarps)),
                  static_cast<unsigned>(min(params.num_tokens, int64_t{kMaxGridY})));
  plain_linear_kernel<T><<<grid, kPlainLinearWarps * 32, 0, stream>>>(params);
  check_launch("streamed_linear");
}

}  // namespace pagedkv::cuda
