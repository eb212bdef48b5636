// Elements in registers: vectors of N elements that load and store as one access, and their
// conversion from and to fp32. Float8 is rounded to nearest even and saturated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

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

template <int N, class T>
__device__ Vec<T, N> load_vec(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <int N, class T>
__device__ void store_vec(T* to, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(to) = x;
}

template <class T, int N>
__device__ Vec<float, N> widen(const Vec<T, N>& x) {
  Vec<float, N> y;
#pragma unroll
  for (int i = 0; i < N; ++i) y.data[i] = to_float(x.data[i]);
  return y;
}

template <class T, int N>
__device__ Vec<T, N> narrow(const Vec<float, N>& x) {
  Vec<T, N> y;
#pragma unroll
  for (int i = 0; i < N; ++i) y.data[i] = from_float<T>(x.data[i]);
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
