// Products of one 16-row tile with one unit of keys and values, as tensor-core fragments:
// scores = Q K^T and out += P V, for 16-bit caches and for float8 caches (widened to fp16).
//
// Float8 has no transposing 8-bit load, and needs none: the order of head_dim within a product may
// be permuted as long as Q and K agree, and the order of the output's columns is undone at the end.
//   keys: an 8-byte load gives a lane head_dim elements 32 s + 8 q .. + 7 of one key, which serve
//   as
//     the k indices (2q, 2q + 1, 2q + 8, 2q + 9) of products 2 s and 2 s + 1; Q is loaded likewise;
//   values: ldmatrix moves pairs of elements as if they were one, so a lane gets columns 2 r and
//     2 r + 1 of its keys; even columns form one product's B, odd ones the next one's.
#pragma once

#include <cuda_fp8.h>

#include "cuda/attention/fragment_traits.cuh"
#include "cuda/device/mma.cuh"

namespace pagedkv::cuda {

// Two float8 (the low 16 bits) as two fp16, exactly.
template <class C>
__device__ inline uint32_t widen_pair(uint32_t pair) {
  static_assert(std::is_same_v<C, __nv_fp8_e4m3> || std::is_same_v<C, __nv_fp8_e5m2>);
  const auto narrow = static_cast<uint16_t>(pair);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t wide;
  if constexpr (std::is_same_v<C, __nv_fp8_e4m3>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(narrow));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(narrow));
  }
  return wide;
#else
  // Older architectures have no instruction for it.
  constexpr auto kFormat = std::is_same_v<C, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(narrow, kFormat);
  return static_cast<uint32_t>(wide.x) | static_cast<uint32_t>(wide.y) << 16;
#endif
}

// head_dim index of a lane's first element (of two) of A register 0 or 2 of product k.
template <class Traits>
__device__ constexpr int query_dim(int product, int half, int quad) {
  if constexpr (Traits::kFloat8) {
    return product / 2 * 32 + 8 * quad + 4 * (product % 2) + 2 * half;
  }
  return product * 16 + 8 * half + 2 * quad;
}

// head_dim index of element `column` (0 or 1) of a lane's C fragment n.
template <class Traits>
__device__ constexpr int out_dim(int n, int column, int quad) {
  if constexpr (Traits::kFloat8) return n / 2 * 16 + 4 * quad + 2 * column + n % 2;
  return n * 8 + 2 * quad + column;
}

// scores[n] (keys 8 n .. 8 n + 7) = Q K^T. query(k) gives the A fragment of product k.
template <class Traits, class C, class Query>
__device__ inline void multiply_keys(float (&scores)[Traits::kUnitKeys / 8][4], const Query& query,
                                     uint32_t stage, int lane) {
#pragma unroll
  for (auto& score : scores) score[0] = score[1] = score[2] = score[3] = 0.0f;
  if constexpr (Traits::kFloat8) {
#pragma unroll
    for (int segment = 0; segment < Traits::kDim / 32; ++segment) {
      uint32_t a0[4];
      uint32_t a1[4];
      query(2 * segment, a0);
      query(2 * segment + 1, a1);
#pragma unroll
      for (int n = 0; n < Traits::kUnitKeys / 8; ++n) {
        const int row = n * 8 + lane / 4;
        const uint32_t address = stage + Traits::key_offset(row, 2 * segment) + 8 * (lane % 4);
        uint32_t low;
        uint32_t high;
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];\n"
                     : "=r"(low), "=r"(high)
                     : "r"(address)
                     : "memory");
        mma_m16n8k16<__half>(scores[n], a0, widen_pair<C>(low), widen_pair<C>(low >> 16));
        mma_m16n8k16<__half>(scores[n], a1, widen_pair<C>(high), widen_pair<C>(high >> 16));
      }
    }
  } else {
    const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < Traits::kDim / 16; ++k) {
      uint32_t a[4];
      query(k, a);
#pragma unroll
      for (int n = 0; n < Traits::kUnitKeys / 8; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, stage + Traits::key_offset(8 * n + row, 2 * k + lane / 8 % 2));
        mma_m16n8k16<typename Traits::Product>(scores[n], a, b[0], b[1]);
        mma_m16n8k16<typename Traits::Product>(scores[n + 1], a, b[2], b[3]);
      }
    }
  }
}

// out[n] += P V; weights[j] is the A fragment of keys 16 j .. 16 j + 15.
template <class Traits, class C>
__device__ inline void multiply_values(float (&out)[Traits::kDim / 8][4],
                                       const uint32_t (&weights)[Traits::kUnitKeys / 16][4],
                                       uint32_t stage, int lane) {
  if constexpr (Traits::kFloat8) {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kRowChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < Traits::kUnitKeys / 16; j += 2) {
        uint32_t v[4];  // keys 16 j + 8 i .. 16 j + 8 i + 7
        ldmatrix_x4_transposed(v, stage + Traits::value_offset(16 * j + lane, chunk));
        uint32_t even[4];
        uint32_t odd[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pairs = __byte_perm(v[i], 0, 0x3120);
          even[i] = widen_pair<C>(pairs);
          odd[i] = widen_pair<C>(pairs >> 16);
        }
        mma_m16n8k16<__half>(out[2 * chunk], weights[j], even[0], even[1]);
        mma_m16n8k16<__half>(out[2 * chunk + 1], weights[j], odd[0], odd[1]);
        mma_m16n8k16<__half>(out[2 * chunk], weights[j + 1], even[2], even[3]);
        mma_m16n8k16<__half>(out[2 * chunk + 1], weights[j + 1], odd[2], odd[3]);
      }
    }
  } else {
    const int row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < Traits::kUnitKeys / 16; ++j) {
#pragma unroll
      for (int chunk = 0; chunk < Traits::kRowChunks; chunk += 2) {
        uint32_t v[4];
        ldmatrix_x4_transposed(v, stage + Traits::value_offset(16 * j + row, chunk + lane / 16));
        mma_m16n8k16<typename Traits::Product>(out[chunk], weights[j], v[0], v[1]);
        mma_m16n8k16<typename Traits::Product>(out[chunk + 1], weights[j], v[2], v[3]);
      }
    }
  }
}

// Scores that have become weights, as A fragments of the product with V.
template <class Traits>
__device__ inline void pack_weights(uint32_t (&weights)[Traits::kUnitKeys / 16][4],
                                    const float (&scores)[Traits::kUnitKeys / 8][4]) {
  using Product = typename Traits::Product;
#pragma unroll
  for (int j = 0; j < Traits::kUnitKeys / 16; ++j) {
    weights[j][0] = pack<Product>(scores[2 * j][0], scores[2 * j][1]);
    weights[j][1] = pack<Product>(scores[2 * j][2], scores[2 * j][3]);
    weights[j][2] = pack<Product>(scores[2 * j + 1][0], scores[2 * j + 1][1]);
    weights[j][3] = pack<Product>(scores[2 * j + 1][2], scores[2 * j + 1][3]);
  }
}

}  // namespace pagedkv::cuda
