// fused_rotary_reshape_and_cache and fused_norm_rotary_reshape_and_cache: rotates queries in place
// and keys on their way into the cache, both normed head by head before if asked for, and writes
// the values there. All three may be a projection's bare result, that is multiplied by the scale of
// its row and gets its bias first.
//
// Grid: one block a token. Where all of a head is rotated, halves against each other, in aligned
// memory, a thread owns the same two vectors of several heads (queries, keys and values alike), so
// that all of a token's loads are in flight and its cosines are read once; anything else goes
// element by element. Must move T * (H + 2 G) * D elements in and out, and T * hidden in for
// scales. Instantiations: 3 activation types x 3 cache types x {vectors {plain, normed} x {as they
// are, bare}, elements} = 45. The norm's own registers made the form without it 5 % slower when
// both were one kernel.
#include <bit>

#include "cuda/cache/cache_alignment.h"
#include "cuda/cache/cache_write.cuh"
#include "cuda/device/global_store.cuh"
#include "cuda/device/overlapped_launch.cuh"
#include "cuda/layers/rotation.cuh"
#include "cuda/layers/row_scale.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {
namespace {

using Params = FusedRotaryReshapeAndCacheParams;

constexpr int kElementThreads = 128;

// One token's rows and slots by head.
template <class T, class C>
struct TokenRows {
  const Params& params;
  int64_t token;
  SlotOffsets slot;

  __device__ T* query(int64_t head) const {
    return static_cast<T*>(params.query) + token * params.query_stride_token +
           head * params.query_stride_head;
  }
  __device__ const T* key(int64_t head) const {
    return static_cast<const T*>(params.write.key) + token * params.write.key_stride_token +
           head * params.write.key_stride_head;
  }
  __device__ const T* value(int64_t head) const {
    return static_cast<const T*>(params.write.value) + token * params.write.value_stride_token +
           head * params.write.value_stride_head;
  }
  __device__ C* key_slot(int64_t head) const {
    return static_cast<C*>(params.write.cache.key) + slot.key +
           head * params.write.cache.key_stride_head;
  }
  __device__ C* value_slot(int64_t head) const {
    return static_cast<C*>(params.write.cache.value) + slot.value +
           head * params.write.cache.value_stride_head;
  }
  __device__ HeadStore<T, C> key_store(int64_t head) const {
    return {params.write.cache.k_scale, params.write.cache.k_scale_stride, head};
  }
  __device__ HeadStore<T, C> value_store(int64_t head) const {
    return {params.write.cache.v_scale, params.write.cache.v_scale_stride, head};
  }
};

// Norms a head whose two halves lie in the vectors x and y of blockDim.x neighbouring lanes, a
// power of two; all of them are here. weight: this thread's first element of the first half.
template <class T, int kVec>
__device__ void norm_wide(Vec<float, kVec>& a, Vec<float, kVec>& b, const T* weight, int half,
                          float epsilon) {
  const Vec<float, kVec> first = widen(load_vec<kVec>(weight));
  const Vec<float, kVec> second = widen(load_vec<kVec>(weight + half));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += a.data[i] * a.data[i] + b.data[i] * b.data[i];
  const int lanes = static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) % 32;
  const unsigned mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (lane & -lanes);
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(mask, sum, offset);
  }
  const float factor = rsqrtf(sum / static_cast<float>(2 * half) + epsilon);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    a.data[i] *= factor * first.data[i];
    b.data[i] *= factor * second.data[i];
  }
}

template <class T, int kVec>
__device__ void norm_halves(Vec<T, kVec>& x, Vec<T, kVec>& y, const T* weight, int half,
                            float epsilon) {
  Vec<float, kVec> a = widen(x);
  Vec<float, kVec> b = widen(y);
  norm_wide(a, b, weight, half, epsilon);
  x = narrow<T>(a);
  y = narrow<T>(b);
}

// x <- x * scale + bias; bias may be null.
template <class T, int kVec>
__device__ void finish_product(Vec<float, kVec>& x, float scale, const T* bias) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) x.data[i] *= scale;
  if (bias == nullptr) return;
  const Vec<float, kVec> more = widen(load_vec<kVec>(bias));
#pragma unroll
  for (int i = 0; i < kVec; ++i) x.data[i] += more.data[i];
}

// kBare: queries, keys and values come without their row's scale and their bias, and are rounded
// for the first time when both, norm and rotation are done.
template <class T, class C, bool kNormed, bool kBare>
__global__ void __launch_bounds__(kRotationThreads)
    rotate_and_cache_vectors_kernel(const __grid_constant__ Params params,
                                    const __grid_constant__ BareProjection bare) {
  constexpr int kVec = kVecElements<T>;
  constexpr int kHeads = kRotationHeads;
  allow_next_kernel();  // attention, which waits for this kernel's end
  wait_previous_kernel();
  const int64_t token = blockIdx.x;
  const int64_t position = params.positions[token];
  const int64_t slot = params.write.slot_mapping[token];
  const int half = static_cast<int>(params.rotary_dim) / 2;
  const int pair = static_cast<int>(threadIdx.x) * kVec;
  // Heads [0, first_key) are queries, [first_key, first_value) keys, [first_value, end) values.
  const auto first_key = static_cast<int>(params.num_heads);
  const int first_value = first_key + static_cast<int>(params.write.cache.num_kv_heads);
  const int end = first_value + static_cast<int>(params.write.cache.num_kv_heads);
  const int step = static_cast<int>(blockDim.y);
  TokenRows<T, C> rows{params, token, {}};
  Vec<T, kVec> x[kHeads];
  Vec<T, kVec> y[kHeads];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * step;
      if (head >= end) continue;
      const T* from = head < first_key     ? rows.query(head)
                      : head < first_value ? rows.key(head - first_key)
                                           : rows.value(head - first_value);
      x[i] = load_vec<kVec>(from + pair);
      y[i] = load_vec<kVec>(from + half + pair);
    }
  };
  float scale = 1.0f;
  if constexpr (kBare) {
    __shared__ float scratch[32];
    load(static_cast<int>(threadIdx.y));  // on their way meanwhile
    scale = row_scale<kVec>(bare.scales, std::type_identity<T>{}, token,
                            static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x),
                            static_cast<int>(blockDim.x * blockDim.y), scratch);
  }
  for (int first = static_cast<int>(threadIdx.y); first < end; first += kHeads * step) {
    if (!kBare || first >= step) load(first);
    // Behind the loads: they need neither the position nor the slot.
    const Angles<kVec> angles =
        load_angles<kVec>(params.cos_sin_cache + position * params.cos_sin_stride, half, pair);
    rows.slot = slot_offsets(params.write.cache, slot);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * step;
      if (head >= end) continue;
      const T* norm = static_cast<const T*>(head < first_key ? params.query_norm : params.key_norm);
      if constexpr (kBare) {
        Vec<float, kVec> a = widen(x[i]);
        Vec<float, kVec> b = widen(y[i]);
        const T* bias = static_cast<const T*>(bare.bias);
        if (bias != nullptr) bias += static_cast<int64_t>(head) * 2 * half + pair;
        finish_product(a, scale, bias);
        finish_product(b, scale, bias == nullptr ? bias : bias + half);
        if (head < first_value) {
          if constexpr (kNormed) norm_wide(a, b, norm + pair, half, params.epsilon);
          rotate_wide(a, b, angles);
        }
        x[i] = narrow<T>(a);
        y[i] = narrow<T>(b);
      } else if (head < first_value) {
        if constexpr (kNormed) norm_halves(x[i], y[i], norm + pair, half, params.epsilon);
        rotate_halves(x[i], y[i], angles);
      }
      if (head < first_key) {
        T* query = rows.query(head);
        store_global<kVec>(query + pair, x[i]);
        store_global<kVec>(query + half + pair, y[i]);
      } else if (rows.slot.written) {
        const bool is_key = head < first_value;
        const int kv_head = head - (is_key ? first_key : first_value);
        const HeadStore<T, C> store = is_key ? rows.key_store(kv_head) : rows.value_store(kv_head);
        C* to = is_key ? rows.key_slot(kv_head) : rows.value_slot(kv_head);
        store.store(to + pair, x[i]);
        store.store(to + half + pair, y[i]);
      }
    }
  }
}

// Elements of a token's heads: of queries and keys normed if asked for.
template <class T, class C>
class HeadElements {
 public:
  // factors: of the heads, [H + G], in shared memory. Every thread of the block is here.
  __device__ HeadElements(const TokenRows<T, C>& rows, const BareProjection& bare, float* factors)
      : rows_(rows), bias_(static_cast<const T*>(bare.bias)), factors_(factors) {
    __shared__ float scratch[32];
    const Params& params = rows.params;
    const auto thread = static_cast<int>(threadIdx.x);
    scale_ = row_scale<1>(bare.scales, std::type_identity<T>{}, rows.token, thread, kElementThreads,
                          scratch);
    if (params.query_norm == nullptr) return;
    const auto dim = static_cast<int>(params.write.cache.head_dim);
    const auto heads = static_cast<int>(params.num_heads + params.write.cache.num_kv_heads);
    for (int head = thread / 32; head < heads; head += kElementThreads / 32) {
      float sum = 0.0f;
      for (int d = thread % 32; d < dim; d += 32) sum += product(head, d) * product(head, d);
      sum = warp_sum(sum);
      factors[head] = rsqrtf(sum / static_cast<float>(dim) + params.epsilon);
    }
    __syncthreads();  // the rows are read before they are written, too
  }

  // Heads [0, H) are queries, [H, H + G) keys, [H + G, H + 2 G) values.
  __device__ T at(int64_t head, int64_t d) const {
    const Params& params = rows_.params;
    const float x = product(head, d);
    const int64_t first_value = params.num_heads + params.write.cache.num_kv_heads;
    if (params.query_norm == nullptr || head >= first_value) return from_float<T>(x);
    const void* weight = head < params.num_heads ? params.query_norm : params.key_norm;
    return from_float<T>(x * (factors_[head] * to_float(static_cast<const T*>(weight)[d])));
  }

 private:
  // With its scale and bias.
  __device__ float product(int64_t head, int64_t d) const {
    const Params& params = rows_.params;
    const int64_t key = head - params.num_heads;
    const int64_t value = key - params.write.cache.num_kv_heads;
    const T* row = key < 0 ? rows_.query(head) : value < 0 ? rows_.key(key) : rows_.value(value);
    const float x = to_float(row[d]) * scale_;
    return bias_ == nullptr ? x : x + to_float(bias_[head * params.write.cache.head_dim + d]);
  }

  const TokenRows<T, C>& rows_;
  const T* bias_;  // of all heads, or null
  const float* factors_;
  float scale_;
};

template <class T, class C>
__global__ void __launch_bounds__(kElementThreads)
    rotate_and_cache_elements_kernel(const __grid_constant__ Params params,
                                     const __grid_constant__ BareProjection bare) {
  extern __shared__ float factors[];
  begin_overlapped_kernel();
  const KvCache& cache = params.write.cache;
  const int64_t token = blockIdx.x;
  const TokenRows<T, C> rows{params, token, slot_offsets(cache, params.write.slot_mapping[token])};
  const HeadElements<T, C> elements(rows, bare, factors);
  const float* cosines = params.cos_sin_cache + params.positions[token] * params.cos_sin_stride;
  const int64_t half = params.rotary_dim / 2;
  const int64_t heads = params.num_heads + (rows.slot.written ? cache.num_kv_heads : 0);
  for (int64_t item = threadIdx.x; item < heads * half; item += blockDim.x) {
    const int64_t head = item / half;
    const int64_t pair = item % half;
    const int64_t first = params.is_neox ? pair : 2 * pair;
    const int64_t second = params.is_neox ? half + pair : 2 * pair + 1;
    const bool is_query = head < params.num_heads;
    float x = to_float(elements.at(head, first));
    float y = to_float(elements.at(head, second));
    rotate(x, y, cosines[pair], cosines[half + pair]);
    if (is_query) {
      T* query = rows.query(head);
      query[first] = from_float<T>(x);
      query[second] = from_float<T>(y);
    } else {
      const int64_t kv_head = head - params.num_heads;
      const HeadStore<T, C> store = rows.key_store(kv_head);
      store.store(rows.key_slot(kv_head) + first, Vec<T, 1>{{from_float<T>(x)}});
      store.store(rows.key_slot(kv_head) + second, Vec<T, 1>{{from_float<T>(y)}});
    }
  }
  const int64_t rest = cache.head_dim - params.rotary_dim;
  if (params.query_norm != nullptr || bare.scales.rows != nullptr || bare.bias != nullptr) {
    for (int64_t item = threadIdx.x; item < params.num_heads * rest; item += blockDim.x) {
      const int64_t head = item / rest;
      const int64_t d = params.rotary_dim + item % rest;
      rows.query(head)[d] = elements.at(head, d);
    }
  }
  if (!rows.slot.written) return;
  for (int64_t item = threadIdx.x; item < cache.num_kv_heads * rest; item += blockDim.x) {
    const int64_t head = item / rest;
    const int64_t d = params.rotary_dim + item % rest;
    rows.key_store(head).store(rows.key_slot(head) + d,
                               Vec<T, 1>{{elements.at(params.num_heads + head, d)}});
  }
  for (int64_t item = threadIdx.x; item < cache.num_kv_heads * cache.head_dim; item += blockDim.x) {
    const int64_t head = item / cache.head_dim;
    const int64_t d = item % cache.head_dim;
    rows.value_store(head).store(
        rows.value_slot(head) + d,
        Vec<T, 1>{{elements.at(params.num_heads + cache.num_kv_heads + head, d)}});
  }
}

template <class T, class C>
bool vectors_fit(const Params& params, const BareProjection& bare) {
  constexpr int64_t kElement = sizeof(T);
  const ReshapeAndCacheParams& write = params.write;
  // A norm's sum is taken among the lanes of a head, half a head's vectors; a scale's among whole
  // warps.
  const int64_t lanes = params.rotary_dim / 2 / kVecElements<T>;
  const bool sums_fit = (params.query_norm == nullptr && !bare.is_bare()) ||
                        (lanes <= 32 && std::has_single_bit(static_cast<uint64_t>(lanes)));
  return params.is_neox && params.rotary_dim == write.cache.head_dim && sums_fit &&
         aligned_to(16, {params.query_norm, params.key_norm, bare.bias}, {}) &&
         scales_fit_vectors<T>(bare.scales) &&
         rotation_fits_vectors<T>(params.rotary_dim / 2, params.cos_sin_cache,
                                  params.cos_sin_stride) &&
         cache_aligned_to(kVecElements<T>, sizeof(C), write.cache) &&
         aligned_to(16, {params.query, write.key, write.value},
                    {params.query_stride_token * kElement, params.query_stride_head * kElement,
                     write.key_stride_token * kElement, write.key_stride_head * kElement,
                     write.value_stride_token * kElement, write.value_stride_head * kElement});
}

}  // namespace

void launch_fused_rotary_reshape_and_cache(const FusedRotaryReshapeAndCacheParams& params,
                                           const BareProjection& bare, StreamHandle stream) {
  if (params.write.num_tokens == 0) return;
  with_activation_type(params.write.type, [&]<class T>(std::type_identity<T>) {
    with_cache_type<T>(params.write.cache.type, [&]<class C>(std::type_identity<C>) {
      const unsigned blocks = grid_size(params.write.num_tokens);
      const auto at = static_cast<cudaStream_t>(stream);
      if (vectors_fit<T, C>(params, bare)) {
        const int64_t heads = params.num_heads + 2 * params.write.cache.num_kv_heads;
        const bool normed = params.query_norm != nullptr;
        const auto plain = normed ? rotate_and_cache_vectors_kernel<T, C, true, false>
                                  : rotate_and_cache_vectors_kernel<T, C, false, false>;
        const auto finishing = normed ? rotate_and_cache_vectors_kernel<T, C, true, true>
                                      : rotate_and_cache_vectors_kernel<T, C, false, true>;
        dim3 block = rotation_block<T>(params.rotary_dim / 2, heads);
        if (bare.is_bare()) {  // whole warps
          const unsigned heads_a_warp = 32 / block.x;
          block.y = (block.y + heads_a_warp - 1) / heads_a_warp * heads_a_warp;
        }
        launch_overlapped("fused_rotary_reshape_and_cache", bare.is_bare() ? finishing : plain,
                          blocks, block, at, params, bare);
      } else {
        const int64_t heads = params.num_heads + params.write.cache.num_kv_heads;
        launch_overlapped("fused_rotary_reshape_and_cache", rotate_and_cache_elements_kernel<T, C>,
                          blocks, kElementThreads,
                          params.query_norm == nullptr ? 0 : static_cast<int>(heads * 4), at,
                          params, bare);
      }
    });
  });
}

}  // namespace pagedkv::cuda
