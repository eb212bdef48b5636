// What the kernels that write new keys and values into the cache share: where a slot lies, and how
// real values become stored ones. reshape_and_cache and fused_rotary_reshape_and_cache are built on
// it.
#pragma once

#include <type_traits>

#include "cuda/device/global_store.cuh"
#include "pagedkv/kernels/cache_params.h"

namespace pagedkv::cuda {

// Elements from the start of each cache to a slot of head 0. A negative slot writes nothing.
struct SlotOffsets {
  bool written;
  int64_t key;
  int64_t value;
};

__device__ inline SlotOffsets slot_offsets(const KvCache& cache, int64_t slot) {
  if (slot < 0) return {false, 0, 0};
  int64_t block;
  int64_t offset;
  if (slot <= UINT32_MAX && cache.block_size <= UINT32_MAX) {  // a 64-bit division is 4x as long
    const auto small = static_cast<uint32_t>(slot);
    const auto size = static_cast<uint32_t>(cache.block_size);
    block = small / size;
    offset = small % size;
  } else {
    block = slot / cache.block_size;
    offset = slot % cache.block_size;
  }
  return {true, block * cache.key_stride_block + offset * cache.key_stride_token,
          block * cache.value_stride_block + offset * cache.value_stride_token};
}

// How real values of one head become stored ones of type C: as they are, or divided by the head's
// scale and rounded to a float8.
//
// The quotient is the exact one, by multiplications. With scale = m * 2^e and x = real / 2^e, both
// exact, r = 1 / m and q0 = x * r, one refinement q0 + (x - m * q0) * r is x / m correctly rounded
// if real has at most 11 significant bits (bf16, fp16; checked for all 2^10 * 2^23 mantissas), and
// two are for any float (Markstein's theorem: q1 is off by less than a last place, r is correctly
// rounded). Where x overflows or underflows, so does the float8: q0 itself saturates, or is a zero
// of the right sign.
template <class T, class C>
class HeadStore {
 public:
  // scales: of all heads, stride 0 for one of all; null unless C is a float8.
  __device__ HeadStore(const float* scales, int64_t stride, int64_t head) {
    if constexpr (!std::is_same_v<T, C>) {
      const float scale = scales[head * stride];
      // Subnormal scales count as 2^-126 times a small m.
      const int exponent = max(static_cast<int>(__float_as_uint(scale) >> 23), 1) - 127;
      power_ =
          exponent < 127 ? __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23) : 0x1p-127f;
      mantissa_ = scale * power_;
      reciprocal_ = 1.0f / mantissa_;
    }
  }

  template <int N>
  __device__ void store(C* to, const Vec<T, N>& real) const {
    if constexpr (std::is_same_v<T, C>) {
      store_global<N>(to, real);
    } else {
      Vec<float, N> x = widen(real);
#pragma unroll
      for (int i = 0; i < N; ++i) x.data[i] = quotient(x.data[i] * power_);
      store_global<N>(to, narrow<C>(x));
    }
  }

 private:
  __device__ float quotient(float x) const {
    const float q0 = x * reciprocal_;
    float q = fmaf(fmaf(-mantissa_, q0, x), reciprocal_, q0);
    if constexpr (std::is_same_v<T, float>) q = fmaf(fmaf(-mantissa_, q, x), reciprocal_, q);
    const float magnitude = fabsf(q0);
    return magnitude >= 0x1p-18f && magnitude < 0x1p17f ? q : q0;
  }

  float mantissa_;
  float power_;  // 2^-e
  float reciprocal_;
};

}  // namespace pagedkv::cuda
