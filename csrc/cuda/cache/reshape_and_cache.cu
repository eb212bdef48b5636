// reshape_and_cache: the step's keys and values into their slots.
//
// Grid: one block of threads for a token, or for several when a token is small: x walks a head's
// vectors, y the heads, z the tokens. A thread's loads of the slot, the key and the value do not
// wait for each other. Must move T * 2 * G * D elements in and out.
// Instantiations: 3 activation types x 3 cache types x {16-byte, single} accesses = 18.
#include "cuda/cache/cache_alignment.h"
#include "cuda/cache/cache_write.cuh"
#include "cuda/device/overlapped_launch.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMinThreads = 128;  // of a block that has several tokens

template <class T, class C, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    reshape_and_cache_kernel(const __grid_constant__ ReshapeAndCacheParams params) {
  begin_overlapped_kernel();
  const KvCache& cache = params.cache;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (token >= params.num_tokens) return;
  const int64_t slot = params.slot_mapping[token];
  const T* key = static_cast<const T*>(params.key) + token * params.key_stride_token;
  const T* value = static_cast<const T*>(params.value) + token * params.value_stride_token;
  for (int64_t head = threadIdx.y; head < cache.num_kv_heads; head += blockDim.y) {
    for (int64_t d = threadIdx.x * kVec; d < cache.head_dim; d += blockDim.x * kVec) {
      const Vec<T, kVec> new_key = load_vec<kVec>(key + head * params.key_stride_head + d);
      const Vec<T, kVec> new_value = load_vec<kVec>(value + head * params.value_stride_head + d);
      const HeadStore<T, C> key_store(cache.k_scale, cache.k_scale_stride, head);
      const HeadStore<T, C> value_store(cache.v_scale, cache.v_scale_stride, head);
      const SlotOffsets at = slot_offsets(cache, slot);
      if (!at.written) return;
      key_store.store(static_cast<C*>(cache.key) + at.key + head * cache.key_stride_head + d,
                      new_key);
      value_store.store(
          static_cast<C*>(cache.value) + at.value + head * cache.value_stride_head + d, new_value);
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
      const bool wide =
          cache.head_dim % kWide == 0 && cache_aligned_to(kWide, sizeof(C), cache) &&
          aligned_to(16, {params.key, params.value},
                     {params.key_stride_token * kElement, params.key_stride_head * kElement,
                      params.value_stride_token * kElement, params.value_stride_head * kElement});
      const int64_t vecs = min(int64_t{kMaxThreads}, cache.head_dim / (wide ? kWide : 1));
      const int64_t heads = min(cache.num_kv_heads, kMaxThreads / vecs);
      const int64_t tokens = max(int64_t{1}, min(kMinThreads / (vecs * heads), kMaxBlockDepth));
      const dim3 block(static_cast<unsigned>(vecs), static_cast<unsigned>(heads),
                       static_cast<unsigned>(tokens));
      launch_overlapped(
          "reshape_and_cache",
          wide ? reshape_and_cache_kernel<T, C, kWide> : reshape_and_cache_kernel<T, C, 1>,
          grid_size(ceil_div(params.num_tokens, tokens)), block, static_cast<cudaStream_t>(stream),
          params);
    });
  });
}

}  // namespace pagedkv::cuda
