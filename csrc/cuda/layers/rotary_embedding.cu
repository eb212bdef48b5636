// rotary_embedding: rotates the first rotary_dim elements of each query and key head in place.
//
// Grid: one block a token. A thread rotates kPairs pairs of one head: with NeoX pairing two
// vectors, half a rotary_dim apart; with GPT-J pairing neighbours. Must move 2 * (H + G) *
// rotary_dim elements. Instantiations: 3 types x {NeoX wide, NeoX single, GPT-J} = 9.
#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kMaxThreads = 256;

// (x, y) becomes (x c - y s, y c + x s).
__device__ inline void rotate(float& x, float& y, float cosine, float sine) {
  const float rotated = x * cosine - y * sine;
  y = y * cosine + x * sine;
  x = rotated;
}

template <class T, int kPairs, bool kNeox>
__global__ void __launch_bounds__(kMaxThreads)
    rotary_embedding_kernel(const __grid_constant__ RotaryEmbeddingParams params) {
  const int64_t token = blockIdx.x;
  const int64_t half = params.rotary_dim / 2;
  const float* cosines = params.cos_sin_cache + params.positions[token] * params.cos_sin_stride;
  const float* sines = cosines + half;
  const auto head_items = static_cast<unsigned>(half / kPairs);
  const auto items = static_cast<unsigned>(params.num_heads + params.num_kv_heads) * head_items;
  for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
    const int64_t head = item / head_items;
    const int64_t pair = static_cast<int64_t>(item % head_items) * kPairs;
    const bool is_query = head < params.num_heads;
    T* row = is_query ? static_cast<T*>(params.query) + token * params.query_stride_token +
                            head * params.query_stride_head
                      : static_cast<T*>(params.key) + token * params.key_stride_token +
                            (head - params.num_heads) * params.key_stride_head;
    if constexpr (kNeox) {
      Vec<float, kPairs> x = widen(load_vec<kPairs>(row + pair));
      Vec<float, kPairs> y = widen(load_vec<kPairs>(row + half + pair));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        rotate(x.data[i], y.data[i], cosines[pair + i], sines[pair + i]);
      }
      store_vec<kPairs>(row + pair, narrow<T>(x));
      store_vec<kPairs>(row + half + pair, narrow<T>(y));
    } else {
      float x = to_float(row[2 * pair]);
      float y = to_float(row[2 * pair + 1]);
      rotate(x, y, cosines[pair], sines[pair]);
      row[2 * pair] = from_float<T>(x);
      row[2 * pair + 1] = from_float<T>(y);
    }
  }
}

}  // namespace

void launch_rotary_embedding(const RotaryEmbeddingParams& params, StreamHandle stream) {
  if (params.num_tokens == 0) return;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    constexpr int kWide = kVecElements<T>;
    constexpr int64_t kElement = sizeof(T);
    const int64_t half = params.rotary_dim / 2;
    const bool wide =
        params.is_neox && half % kWide == 0 &&
        aligned_to(16, {params.query, params.key},
                   {params.query_stride_token * kElement, params.query_stride_head * kElement,
                    params.key_stride_token * kElement, params.key_stride_head * kElement});
    const int64_t items = (params.num_heads + params.num_kv_heads) * half / (wide ? kWide : 1);
    if (items == 0) return;
    const auto threads =
        static_cast<unsigned>(std::min<int64_t>(kMaxThreads, ceil_div(items, 32) * 32));
    const unsigned blocks = grid_size(params.num_tokens);
    const auto at = static_cast<cudaStream_t>(stream);
    if (wide) {
      rotary_embedding_kernel<T, kWide, true><<<blocks, threads, 0, at>>>(params);
    } else if (params.is_neox) {
      rotary_embedding_kernel<T, 1, true><<<blocks, threads, 0, at>>>(params);
    } else {
      rotary_embedding_kernel<T, 1, false><<<blocks, threads, 0, at>>>(params);
    }
  });
  check_launch("rotary_embedding");
}

}  // namespace pagedkv::cuda
