// Products of a tile's rows with one unit of keys and values, transposed, so that a tile need not
// have more than 8 rows: scores^T = K Q^T (keys x rows) and out^T += V^T P^T (head_dim x rows). K
// and V are the tensor core's A operand, Q and the weights its B operand (mma.cuh has the layouts).
// Float8 keys and values are widened to fp16, exactly.
//
// Float8 has no transposing 8-bit load, and needs none: the order of head_dim within a product may
// be permuted as long as Q and K agree, and the order of the output's rows is undone at the end.
//   keys: ldmatrix gives a lane head_dim elements 16 k + 4 q .. + 3 of one key, which serve as the
//     k indices (2q, 2q + 1, 2q + 8, 2q + 9) of product k; Q is loaded likewise;
//   values: ldmatrix moves pairs of elements as if they were one, so a lane gets elements 2 r and
//     2 r + 1 of its keys, which serve as rows r and r + 8 of the output's fragment.
#pragma once

#include <cuda_fp8.h>

#include "cuda/attention/decode_plan.cuh"
#include "cuda/attention/decode_traits.cuh"
#include "cuda/device/held.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

// Four float8 as four fp16, exactly.
template <class C>
__device__ inline void widen_four(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same_v<C, __nv_fp8_e4m3>) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    const auto widen = [](uint32_t pair) {
      const __half2_raw wide =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
      return wide.x | static_cast<uint32_t>(wide.y) << 16;
    };
    low = widen(four & 0xffff);
    high = widen(four >> 16);
#else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}\n"
        : "=r"(low), "=r"(high)
        : "r"(four));
#endif
  } else {
    static_assert(std::is_same_v<C, __nv_fp8_e5m2>);
    // e5m2 is fp16 cut off behind 8 bits.
    low = __byte_perm(four, 0, 0x1404);
    high = __byte_perm(four, 0, 0x3424);
  }
}

// The 8x8 matrix of 16-bit elements that a warp holds as a fragment, transposed.
__device__ inline uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// The B fragments of Q^T: packed row 8 t + r for each row tile t.
template <class Traits, class T>
struct DecodeQuery {
  static constexpr int kProducts = Traits::kDim / 16;
  uint32_t held[kProducts][Traits::kRowTiles][2];

  // A lane's elements of its row in global memory, from where on they are on their way; past
  // head_dim 0. To be converted once they are needed. kRowTiles 1.
  __device__ void read(const T* row, int head_dim, int lane) {
    const int first = Traits::kFloat8 ? 4 * (lane % 4) : 2 * (lane % 4);
    constexpr int kSecond = Traits::kFloat8 ? 2 : 8;
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = 16 * k + kSecond * half + first;
        uint32_t pair = 0;
        // Volatile: not to be put off until the copies of keys and values are ahead of it.
        if (d < head_dim) asm volatile("ld.global.b32 %0, [%1];\n" : "=r"(pair) : "l"(row + d));
        held[k][0][half] = pair;
      }
    }
  }
  __device__ void convert() {
#pragma unroll
    for (auto& product : held) {
#pragma unroll
      for (uint32_t& pair : product[0]) pair = converted(pair);
    }
  }

  // From the rows in shared memory.
  __device__ void load(uint32_t rows, int num_rows, int head_dim, int lane) {
    // A lane's elements of product k: 16 k + first and 16 k + second, and the ones behind them.
    const int first = Traits::kFloat8 ? 4 * (lane % 4) : 2 * (lane % 4);
    constexpr int kSecond = Traits::kFloat8 ? 2 : 8;
#pragma unroll
    for (int t = 0; t < Traits::kRowTiles; ++t) {
      const int row = 8 * t + lane / 4;
      const uint32_t from = rows + row * Traits::kQueryPitch + first * 2;
      const int valid_dims = row < num_rows ? head_dim - first : 0;
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = 16 * k + kSecond * half;
          uint32_t pair;
          asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(pair) : "r"(from + d * 2) : "memory");
          if (d >= valid_dims) pair = 0;
          held[k][t][half] = converted(pair);
        }
      }
    }
  }

  // Two elements in the products' type.
  static __device__ uint32_t converted(uint32_t pair) {
    if constexpr (!std::is_same_v<T, typename Traits::Product>) {
      const auto wide = reinterpret_cast<const Vec<T, 2>&>(pair);
      pair = pack<typename Traits::Product>(to_float(wide.data[0]), to_float(wide.data[1]));
    }
    return pair;
  }
};

// Scores of a unit: [key tile][row tile][4]; element i is key 16 j + r + 8 (i / 2), row
// 8 t + 2 q + i % 2.
template <class Traits>
struct UnitScores {
  static constexpr int kKeyTiles = Traits::kUnitKeys / 16;
  float at[kKeyTiles][Traits::kRowTiles][4];

  __device__ void reset() {
#pragma unroll
    for (auto& tile : at) {
#pragma unroll
      for (auto& x : tile) x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
  }
};

// A operands of a unit's keys or values as ldmatrix gives them. All are loaded before the first is
// used: one at a time, the products would wait for each.
template <class Traits>
struct UnitFragments {
  static constexpr int kLoads = Traits::kDim / 16;
  uint32_t at[kLoads][4];
};

// Where a lane's loads of a unit begin. Worked out anew for each unit, before it has arrived, from
// a lane that the compiler does not know: it would work all of the addresses out before the loop,
// more than it has registers for.
struct UnitAddress {
  uint32_t keys;
  uint32_t values;
};

template <class Traits>
__device__ inline UnitAddress unit_address(uint32_t stage, uint32_t any_lane) {
  const int lane = static_cast<int>(held(any_lane));
  const int row = Traits::kFloat8 ? lane : lane % 8 + lane / 16 * 8;
  return {held(stage + Traits::chunk_offset(lane % 16, lane / 16)),
          held(stage + Traits::kTensorBytes +
               Traits::chunk_offset(row, Traits::kFloat8 ? 0 : lane / 8 % 2))};
}

// Load n is chunks 2 (n / kKeyTiles) and + 1 of key tile n % kKeyTiles; its matrices are keys 0 - 7
// and 8 - 15 of the first, then of the second chunk.
template <class Traits>
__device__ inline void load_keys(UnitFragments<Traits>& keys, uint32_t base) {
  constexpr int kKeyTiles = UnitScores<Traits>::kKeyTiles;
#pragma unroll
  for (int n = 0; n < UnitFragments<Traits>::kLoads; ++n) {
    ldmatrix_x4(keys.at[n], Traits::next_chunk(base, n / kKeyTiles * 2) +
                                n % kKeyTiles * (16 * Traits::kColumnBytes));
  }
}

template <class Traits, class C, class T>
__device__ inline void multiply_keys(UnitScores<Traits>& scores,
                                     const DecodeQuery<Traits, T>& query,
                                     const UnitFragments<Traits>& keys) {
  using Product = typename Traits::Product;
  constexpr int kKeyTiles = UnitScores<Traits>::kKeyTiles;
  // Two sums, so that the chain of dependent products is half as long.
  UnitScores<Traits> odd;
  scores.reset();
  odd.reset();
#pragma unroll
  for (int n = 0; n < UnitFragments<Traits>::kLoads; ++n) {
    const int j = n % kKeyTiles;
    const int pair = n / kKeyTiles;
    const auto& loaded = keys.at[n];
    if constexpr (Traits::kFloat8) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        uint32_t a[4];
        widen_four<C>(loaded[2 * next], a[0], a[2]);
        widen_four<C>(loaded[2 * next + 1], a[1], a[3]);
#pragma unroll
        for (int t = 0; t < Traits::kRowTiles; ++t) {
          const auto& b = query.held[2 * pair + next][t];
          mma_m16n8k16<Product>(next == 0 ? scores.at[j][t] : odd.at[j][t], a, b[0], b[1]);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < Traits::kRowTiles; ++t) {
        const auto& b = query.held[pair][t];
        mma_m16n8k16<Product>(pair % 2 == 0 ? scores.at[j][t] : odd.at[j][t], loaded, b[0], b[1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int t = 0; t < Traits::kRowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores.at[j][t][i] += odd.at[j][t][i];
    }
  }
}

// Sums of the output: [fragment of 16 head_dim][row tile][4]; element i is of row 8 t + 2 q + i % 2
// and head_dim 16 m + r + 8 (i / 2), with a float8 cache 16 m + 2 r + i / 2.
template <class Traits>
struct OutSums {
  static constexpr int kFragments = Traits::kDim / 16;
  float at[kFragments][Traits::kRowTiles][4];

  __device__ void reset() {
#pragma unroll
    for (auto& fragment : at) {
#pragma unroll
      for (auto& x : fragment) x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
  }
};

// Load m is head_dim 16 m .. 16 m + 15; its matrices are, of 16-bit values, keys 0 - 7 of both
// halves, then keys 8 - 15; of float8 values, keys 8 i .. 8 i + 7.
template <class Traits>
__device__ inline void load_values(UnitFragments<Traits>& values, uint32_t base) {
#pragma unroll
  for (int m = 0; m < UnitFragments<Traits>::kLoads; ++m) {
    ldmatrix_x4_transposed(values.at[m], Traits::next_chunk(base, m * (Traits::kFloat8 ? 1 : 2)));
  }
}

// out += V^T P^T, the weights being the scores of softmax.
template <class Traits, class C>
__device__ inline void multiply_values(OutSums<Traits>& out, const UnitScores<Traits>& weights,
                                       const UnitFragments<Traits>& values) {
  using Product = typename Traits::Product;
  constexpr int kKeyTiles = UnitScores<Traits>::kKeyTiles;
  uint32_t b[kKeyTiles][Traits::kRowTiles][2];
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int t = 0; t < Traits::kRowTiles; ++t) {
      const auto& w = weights.at[j][t];
      b[j][t][0] = transpose_matrix(pack<Product>(w[0], w[1]));
      b[j][t][1] = transpose_matrix(pack<Product>(w[2], w[3]));
    }
  }
#pragma unroll
  for (int m = 0; m < OutSums<Traits>::kFragments; ++m) {
    uint32_t a[kKeyTiles][4];
    if constexpr (Traits::kFloat8) {
      static_assert(kKeyTiles == 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        widen_four<C>(__byte_perm(values.at[m][i], 0, 0x3120), a[i / 2][i % 2 * 2],
                      a[i / 2][i % 2 * 2 + 1]);
      }
    } else {
      static_assert(kKeyTiles == 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][i] = values.at[m][i];
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int t = 0; t < Traits::kRowTiles; ++t) {
        mma_m16n8k16<Product>(out.at[m][t], a[j], b[j][t][0], b[j][t][1]);
      }
    }
  }
}

}  // namespace pagedkv::cuda
