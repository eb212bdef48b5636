// reshape_and_cache: the step's keys and values into their slots.
//
// Grid: one block for kTokens tokens. A thread holds the same 16 bytes of all of them, so that
// 2 * kTokens loads are in flight. Must move T * 2 * G * D elements in and out.
// Instantiations: 3 activation types x 3 cache types x {16-byte, single} accesses = 18.
#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kTokens = 4;
constexpr int kMaxThreads = 256;

template <class T, class C, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    reshape_and_cache_kernel(const __grid_constant__ ReshapeAndCacheParams params) {
  const KvCache& cache = params.cache;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTokens;
  // Offsets of the slots, computed once a token: the division is slow. -1: writes nothing.
  __shared__ int64_t key_offsets[kTokens];
  __shared__ int64_t value_offsets[kTokens];
  if (threadIdx.x < kTokens) {
    const int64_t token = first_token + threadIdx.x;
    const int64_t slot = token < params.num_tokens ? params.slot_mapping[token] : -1;
    const int64_t block = slot / cache.block_size;
    const int64_t offset = slot % cache.block_size;
    key_offsets[threadIdx.x] =
        slot < 0 ? -1 : block * cache.key_stride_block + offset * cache.key_stride_token;
    value_offsets[threadIdx.x] =
        slot < 0 ? -1 : block * cache.value_stride_block + offset * cache.value_stride_token;
  }
  __syncthreads();

  const auto* key = static_cast<const T*>(params.key);
  const auto* value = static_cast<const T*>(params.value);
  auto* key_cache = static_cast<C*>(cache.key);
  auto* value_cache = static_cast<C*>(cache.value);
  const unsigned head_vecs = static_cast<unsigned>(cache.head_dim) / kVec;
  const unsigned vecs = static_cast<unsigned>(cache.num_kv_heads) * head_vecs;
  for (unsigned v = threadIdx.x; v < vecs; v += blockDim.x) {
    const int64_t head = v / head_vecs;
    const int64_t d = static_cast<int64_t>(v % head_vecs) * kVec;
    Vec<T, kVec> keys[kTokens];
    Vec<T, kVec> values[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (key_offsets[i] < 0) continue;
      const int64_t token = first_token + i;
      keys[i] =
          load_vec<kVec>(key + token * params.key_stride_token + head * params.key_stride_head + d);
      values[i] = load_vec<kVec>(value + token * params.value_stride_token +
                                 head * params.value_stride_head + d);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (key_offsets[i] < 0) continue;
      C* key_to = key_cache + key_offsets[i] + head * cache.key_stride_head + d;
      C* value_to = value_cache + value_offsets[i] + head * cache.value_stride_head + d;
      if constexpr (std::is_same_v<T, C>) {
        store_vec<kVec>(key_to, keys[i]);
        store_vec<kVec>(value_to, values[i]);
      } else {
        Vec<float, kVec> k = widen(keys[i]);
        Vec<float, kVec> x = widen(values[i]);
        const float k_scale = cache.k_scale[head * cache.k_scale_stride];
        const float v_scale = cache.v_scale[head * cache.v_scale_stride];
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          k.data[j] /= k_scale;
          x.data[j] /= v_scale;
        }
        store_vec<kVec>(key_to, narrow<C>(k));
        store_vec<kVec>(value_to, narrow<C>(x));
      }
    }
  }
}

}  // namespace

void launch_reshape_and_cache(const ReshapeAndCacheParams& params, StreamHandle stream) {
  if (params.num_tokens == 0) return;
  const KvCache& cache = params.cache;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    with_cache_type<T>(cache.type, [&]<class C>(std::type_identity<C>) {
      constexpr int kWide = kVecElements<T>;
      constexpr int64_t kElement = sizeof(T);
      constexpr int64_t kStored = sizeof(C);
      const bool wide =
          cache.head_dim % kWide == 0 &&
          aligned_to(16, {params.key, params.value},
                     {params.key_stride_token * kElement, params.key_stride_head * kElement,
                      params.value_stride_token * kElement, params.value_stride_head * kElement}) &&
          aligned_to(kWide * kStored, {cache.key, cache.value},
                     {cache.key_stride_block * kStored, cache.key_stride_head * kStored,
                      cache.key_stride_token * kStored, cache.value_stride_block * kStored,
                      cache.value_stride_head * kStored, cache.value_stride_token * kStored});
      const int64_t vecs = cache.num_kv_heads * cache.head_dim / (wide ? kWide : 1);
      const auto threads =
          static_cast<unsigned>(std::min<int64_t>(kMaxThreads, ceil_div(vecs, 32) * 32));
      const unsigned blocks = grid_size(ceil_div(params.num_tokens, kTokens));
      const auto at = static_cast<cudaStream_t>(stream);
      if (wide) {
        reshape_and_cache_kernel<T, C, kWide><<<blocks, threads, 0, at>>>(params);
      } else {
        reshape_and_cache_kernel<T, C, 1><<<blocks, threads, 0, at>>>(params);
      }
    });
  });
  check_launch("reshape_and_cache");
}

}  // namespace pagedkv::cuda
