// Sums over a block, and what they are for: the scale of a row (RowScales), worked out by the block
// that reads a projection's result. The row is [hidden] elements, out of the L2.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"
#include "pagedkv/kernels/row_scales.h"

namespace pagedkv::cuda {

// Sum over a block of whole warps, the same in all its threads, which are all here. scratch: float
// [32], in shared memory.
__device__ inline float block_sum(float x, int thread, int num_threads, float* scratch) {
  x = warp_sum(x);
  if (thread % 32 == 0) scratch[thread / 32] = x;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < num_threads / 32; ++warp) sum += scratch[warp];
  return sum;
}

// What row `token` is multiplied by; 1 without rows. As block_sum in all else.
template <int kVec, class T>
__device__ float row_scale(const RowScales& scales, std::type_identity<T>, int64_t token,
                           int thread, int num_threads, float* scratch) {
  if (scales.rows == nullptr) return 1.0f;
  constexpr int kItems = 4;  // in flight
  const T* row = static_cast<const T*>(scales.rows) + token * scales.stride_token;
  const int64_t step = static_cast<int64_t>(num_threads) * kVec;
  float squares = 0.0f;
  for (int64_t first = thread * kVec; first < scales.hidden_size; first += kItems * step) {
    Vec<T, kVec> x[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (first + item * step < scales.hidden_size)
        x[item] = load_vec<kVec>(row + first + item * step);
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (first + item * step >= scales.hidden_size) continue;
      const Vec<float, kVec> wide = widen(x[item]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares += wide.data[i] * wide.data[i];
    }
  }
  const float sum = block_sum(squares, thread, num_threads, scratch);
  return rsqrtf(sum / static_cast<float>(scales.hidden_size) + scales.epsilon);
}

// Whether row_scale may read the rows 16 bytes at a time.
template <class T>
bool scales_fit_vectors(const RowScales& scales) {
  constexpr int64_t kElement = sizeof(T);
  return scales.rows == nullptr ||
         (scales.hidden_size % kVecElements<T> == 0 &&
          aligned_to(16, {scales.rows}, {scales.stride_token * kElement}));
}

}  // namespace pagedkv::cuda
