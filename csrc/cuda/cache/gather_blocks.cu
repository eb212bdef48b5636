// gather_blocks: blocks of several sequences into contiguous rows of real values.
//
// Grid: one block for one row (token). Its sequence is found by binary search in seq_start_loc.
// Must move T * 2 * G * D elements in and out. Instantiations: as reshape_and_cache, 18.
#include "cuda/cache/cache_alignment.h"
#include "cuda/device/global_store.cuh"
#include "cuda/device/launch.h"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

constexpr int kMaxThreads = 256;

// The sequence i with seq_start_loc[i] <= row < seq_start_loc[i + 1], or -1. Empty sequences own
// no row: the last start that is <= row is the owner's.
__device__ int64_t sequence_of_row(const GatherBlocksParams& params, int64_t row) {
  int64_t low = 0;
  int64_t high = params.num_seqs;  // the answer is in [low, high)
  if (row < params.seq_start_loc[0] || row >= params.seq_start_loc[params.num_seqs]) return -1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (params.seq_start_loc[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T, class C, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    gather_blocks_kernel(const __grid_constant__ GatherBlocksParams params) {
  const ConstKvCache& cache = params.cache;
  const int64_t row = blockIdx.x;
  const int64_t seq = sequence_of_row(params, row);
  if (seq < 0) return;
  const int64_t token = row - params.seq_start_loc[seq];
  const int64_t block =
      params.block_tables[seq * params.block_tables_stride + token / cache.block_size];
  const int64_t offset = token % cache.block_size;
  const C* key_from = static_cast<const C*>(cache.key) + block * cache.key_stride_block +
                      offset * cache.key_stride_token;
  const C* value_from = static_cast<const C*>(cache.value) + block * cache.value_stride_block +
                        offset * cache.value_stride_token;
  T* key_to = static_cast<T*>(params.key) + row * params.key_stride_token;
  T* value_to = static_cast<T*>(params.value) + row * params.value_stride_token;
  const unsigned head_vecs = static_cast<unsigned>(cache.head_dim) / kVec;
  const unsigned vecs = static_cast<unsigned>(cache.num_kv_heads) * head_vecs;
  for (unsigned v = threadIdx.x; v < vecs; v += blockDim.x) {
    const int64_t head = v / head_vecs;
    const int64_t d = static_cast<int64_t>(v % head_vecs) * kVec;
    const Vec<C, kVec> key = load_vec<kVec>(key_from + head * cache.key_stride_head + d);
    const Vec<C, kVec> value = load_vec<kVec>(value_from + head * cache.value_stride_head + d);
    T* key_at = key_to + head * params.key_stride_head + d;
    T* value_at = value_to + head * params.value_stride_head + d;
    if constexpr (std::is_same_v<T, C>) {
      store_global<kVec>(key_at, key);
      store_global<kVec>(value_at, value);
    } else {
      Vec<float, kVec> k = widen(key);
      Vec<float, kVec> x = widen(value);
      const float k_scale = cache.k_scale[head * cache.k_scale_stride];
      const float v_scale = cache.v_scale[head * cache.v_scale_stride];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        k.data[j] *= k_scale;
        x.data[j] *= v_scale;
      }
      store_global<kVec>(key_at, narrow<T>(k));
      store_global<kVec>(value_at, narrow<T>(x));
    }
  }
}

}  // namespace

void launch_gather_blocks(const GatherBlocksParams& params, StreamHandle stream) {
  if (params.num_tokens == 0 || params.num_seqs == 0) return;
  const ConstKvCache& cache = params.cache;
  with_activation_type(params.type, [&]<class T>(std::type_identity<T>) {
    with_cache_type<T>(cache.type, [&]<class C>(std::type_identity<C>) {
      constexpr int kWide = kVecElements<T>;
      constexpr int64_t kElement = sizeof(T);
      const bool wide =
          cache.head_dim % kWide == 0 &&
          aligned_to(16, {params.key, params.value},
                     {params.key_stride_token * kElement, params.key_stride_head * kElement,
                      params.value_stride_token * kElement, params.value_stride_head * kElement}) &&
          cache_aligned_to(kWide, sizeof(C), cache);
      const int64_t vecs = cache.num_kv_heads * cache.head_dim / (wide ? kWide : 1);
      const auto threads =
          static_cast<unsigned>(min(int64_t{kMaxThreads}, ceil_div(vecs, 32) * 32));
      const auto at = static_cast<cudaStream_t>(stream);
      const unsigned blocks = grid_size(params.num_tokens);
      if (wide) {
        gather_blocks_kernel<T, C, kWide><<<blocks, threads, 0, at>>>(params);
      } else {
        gather_blocks_kernel<T, C, 1><<<blocks, threads, 0, at>>>(params);
      }
    });
  });
  check_launch("gather_blocks");
}

}  // namespace pagedkv::cuda
