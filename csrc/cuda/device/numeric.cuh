// Elements in registers: vectors of N elements that load and store as one access, and their
// conversion from and to fp32. Float8 is rounded to nearest even and saturated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace pagedkv::cuda {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T data[N];
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_fp8_e4m3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E4M3)));
}
__device__ inline float to_float(__nv_fp8_e5m2 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E5M2)));
}

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) {
  __nv_fp8_e4m3 y;
  y.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return y;
}
template <>
__device__ inline __nv_fp8_e5m2 from_float<__nv_fp8_e5m2>(float x) {
  __nv_fp8_e5m2 y;
  y.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
  return y;
}

// A vector's bytes as one word: the compiler keeps them together. Vectors of 16-bit and 8-bit
// classes it may otherwise store element by element.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = uint8_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

template <int N, class T>
__device__ Vec<T, N> load_vec(const T* from) {
  using Word = typename WordOf<sizeof(T) * N>::Type;
  Vec<T, N> x;
  *reinterpret_cast<Word*>(&x) = *reinterpret_cast<const Word*>(from);
  return x;
}

template <int N, class T>
__device__ void store_vec(T* to, const Vec<T, N>& x) {
  using Word = typename WordOf<sizeof(T) * N>::Type;
  *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(&x);
}

template <class T, int N>
__device__ Vec<float, N> widen(const Vec<T, N>& x) {
  Vec<float, N> y;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    // By words: element by element the compiler widens early and holds twice the registers.
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(&x.data[i]);
      y.data[i] = __uint_as_float(pair << 16);
      y.data[i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) y.data[i] = to_float(x.data[i]);
  }
  return y;
}

// Two values by one instruction, where there is one.
template <class T>
__device__ void from_float_pair(float first, float second, T* to) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    to[0] = pair.x;
    to[1] = pair.y;
  } else if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    to[0] = pair.x;
    to[1] = pair.y;
  } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3> || std::is_same_v<T, __nv_fp8_e5m2>) {
    constexpr auto kFormat = std::is_same_v<T, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    const __nv_fp8x2_storage_t pair =
        __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kFormat);
    to[0].__x = static_cast<__nv_fp8_storage_t>(pair & 0xff);
    to[1].__x = static_cast<__nv_fp8_storage_t>(pair >> 8);
  } else {
    to[0] = from_float<T>(first);
    to[1] = from_float<T>(second);
  }
}

template <class T, int N>
__device__ Vec<T, N> narrow(const Vec<float, N>& x) {
  Vec<T, N> y;
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) from_float_pair(x.data[i], x.data[i + 1], &y.data[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) y.data[i] = from_float<T>(x.data[i]);
  }
  return y;
}

// Elements of T in a 16-byte access.
template <class T>
constexpr int kVecElements = 16 / static_cast<int>(sizeof(T));

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

}  // namespace pagedkv::cuda
