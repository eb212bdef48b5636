// rotary_embedding: rotates the first rotary_dim elements of each query and key head in place.
//
// Grid: one block a token. With NeoX pairing in aligned memory a thread owns the same two vectors,
// half a rotary_dim apart, of several heads, and reads their cosines once; anything else goes
// element by element. Must move 2 * T * (H + G) * rotary_dim elements.
// Instantiations: 3 types x {vectors, elements} = 6.
#include "cuda/device/global_store.cuh"
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/layers/rotation.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

using Params = RotaryEmbeddingParams;

constexpr int kElementThreads = 128;

// Heads [0, H) are queries, [H, H + G) keys.
template <class T>
__device__ T* head_row(const Params& params, int64_t token, int64_t head) {
  if (head < params.num_heads) {
    return static_cast<T*>(params.query) + token * params.query_stride_token +
           head * params.query_stride_head;
  }
  return static_cast<T*>(params.key) + token * params.key_stride_token +
         (head - params.num_heads) * params.key_stride_head;
}

template <class T>
__global__ void __launch_bounds__(kRotationThreads)
    rotate_vectors_kernel(const __grid_constant__ Params params) {
  constexpr int kVec = kVecElements<T>;
  constexpr int kHeads = kRotationHeads;
  begin_overlapped_kernel();
  const int64_t token = blockIdx.x;
  const int64_t position = params.positions[token];
  const int half = static_cast<int>(params.rotary_dim) / 2;
  const int pair = static_cast<int>(threadIdx.x) * kVec;
  const int end = static_cast<int>(params.num_heads + params.num_kv_heads);
  const int step = static_cast<int>(blockDim.y);
  for (int first = static_cast<int>(threadIdx.y); first < end; first += kHeads * step) {
    Vec<T, kVec> x[kHeads];
    Vec<T, kVec> y[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (first + i * step >= end) continue;
      const T* row = head_row<T>(params, token, first + i * step);
      x[i] = load_vec<kVec>(row + pair);
      y[i] = load_vec<kVec>(row + half + pair);
    }
    // Behind the loads: they do not need the position.
    const Angles<kVec> angles =
        load_angles<kVec>(params.cos_sin_cache + position * params.cos_sin_stride, half, pair);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (first + i * step >= end) continue;
      T* row = head_row<T>(params, token, first + i * step);
      rotate_halves(x[i], y[i], angles);
      store_global<kVec>(row + pair, x[i]);
      store_global<kVec>(row + half + pair, y[i]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kElementThreads)
    rotate_elements_kernel(const __grid_constant__ Params params) {
  begin_overlapped_kernel();
  const int64_t token = blockIdx.x;
  const float* cosines = params.cos_sin_cache + params.positions[token] * params.cos_sin_stride;
  const int64_t half = params.rotary_dim / 2;
  const int64_t pairs = (params.num_heads + params.num_kv_heads) * half;
  for (int64_t item = threadIdx.x; item < pairs; item += blockDim.x) {
    const int64_t pair = item % half;
    T* row = head_row<T>(params, token, item / half);
    T* first = row + (params.is_neox ? pair : 2 * pair);
    T* second = row + (params.is_neox ? half + pair : 2 * pair + 1);
    float x = to_float(*first);
    float y = to_float(*second);
    rotate(x, y, cosines[pair], cosines[half + pair]);
    *first = from_float<T>(x);
    *second = from_float<T>(y);
  }
}

}  // namespace

void launch_rotary_embedding(const RotaryEmbeddingParams& params, StreamHandle stream) {
  const int64_t heads = params.num_heads + params.num_kv_heads;
  if (params.num_tokens == 0 || heads == 0) return;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    constexpr int64_t kElement = sizeof(T);
    const int64_t half = params.rotary_dim / 2;
    const bool vectors =
        params.is_neox &&
        rotation_fits_vectors<T>(half, params.cos_sin_cache, params.cos_sin_stride) &&
        aligned_to(16, {params.query, params.key},
                   {params.query_stride_token * kElement, params.query_stride_head * kElement,
                    params.key_stride_token * kElement, params.key_stride_head * kElement});
    const unsigned blocks = grid_size(params.num_tokens);
    const auto at = static_cast<cudaStream_t>(stream);
    if (vectors) {
      launch_overlapped("rotary_embedding", rotate_vectors_kernel<T>, blocks,
                        rotation_block<T>(half, heads), at, params);
    } else {
      launch_overlapped("rotary_embedding", rotate_elements_kernel<T>, blocks, kElementThreads, at,
                        params);
    }
  });
}

}  // namespace pagedkv::cuda
