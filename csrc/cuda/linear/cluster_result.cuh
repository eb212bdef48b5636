// From the sums of a cluster's product to out: bias, gate or sum, rounding.
#pragma once

#include "cuda/device/numeric.cuh"
#include "cuda/linear/cluster_product.cuh"

namespace pagedkv::cuda {

__device__ inline float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Adds the sums of a cluster's blocks and stores what becomes of them; a block each kth token.
template <class T>
class SharedResult {
 public:
  static constexpr int kVec = 4;

  __device__ SharedResult(const StreamedLinearParams& params, const ClusterSetup& setup,
                          uint32_t sums, int pitch, int rank)
      : params_(params), setup_(setup), sums_(sums), pitch_(pitch), rank_(rank) {}

  __device__ void store(int first_group) const {
    const int vecs = setup_.pass_groups * (8 / kVec);
    const auto columns =
        static_cast<int>(setup_.gated() ? params_.out_features / 2 : params_.out_features);
    const int tokens =
        (static_cast<int>(params_.num_tokens) - rank_ + setup_.blocks - 1) / setup_.blocks;
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < tokens * vecs;
         item += ClusterTraits::kThreads) {
      const int token = rank_ + item / vecs * setup_.blocks;
      const int column = item % vecs * kVec;  // of the pass
      const int first = first_group * 8 + column;
      if (first >= columns) continue;
      T* out = static_cast<T*>(params_.out) + token * params_.out_stride_token + first;
      Vec<T, kVec> old{};
      if (params_.epilogue == LinearEpilogue::kAdd) load(old, out);
      Vec<float, kVec> y;
      if (setup_.gated()) {
        const int row = column / 8 * 16 + column % 8;
        y = sum_at(token, row, first);
        const Vec<float, kVec> up = sum_at(token, row + 8, columns + first);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          y.data[i] = gated(y.data[i], up.data[i]);
        }
      } else {
        y = sum_at(token, column, first);
        if (params_.epilogue == LinearEpilogue::kAdd) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) y.data[i] += to_float(old.data[i]);
        }
      }
      const Vec<T, kVec> result = narrow<T>(y);
      if (setup_.wide) {
        store_vec<kVec>(out, result);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          out[i] = result.data[i];
        }
      }
    }
  }

 private:
  __device__ void load(Vec<T, kVec>& to, const T* from) const {
    if (setup_.wide) {
      to = load_vec<kVec>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        to.data[i] = from[i];
      }
    }
  }

  // y of four rows of the weights, rounded to T. row: of the pass's; out_row: of the matrix.
  __device__ Vec<float, kVec> sum_at(int token, int row, int out_row) const {
    const uint32_t at = sums_ + (token * pitch_ + row) * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int block = 0; block < setup_.blocks; ++block) {
      const float4 x = load_cluster_16(cluster_address(at, block));
      sum.x += x.x;
      sum.y += x.y;
      sum.z += x.z;
      sum.w += x.w;
    }
    Vec<float, kVec> y{{sum.x, sum.y, sum.z, sum.w}};
    const T* bias = static_cast<const T*>(params_.bias);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (bias != nullptr) y.data[i] += to_float(bias[out_row + i]);
      y.data[i] = to_float(from_float<T>(y.data[i]));
    }
    return y;
  }

  const StreamedLinearParams& params_;
  const ClusterSetup& setup_;
  uint32_t sums_;  // [kRows, pitch] fp32 in each block's shared memory
  int pitch_;
  int rank_;
};

// Stores what becomes of a block's own sums, from the registers that they are in: eight lanes have
// eight columns in a row.
template <class T, int kRows>
class OwnResult {
 public:
  __device__ OwnResult(const StreamedLinearParams& params, const ClusterSetup& setup)
      : params_(params),
        setup_(setup),
        lane_(static_cast<int>(threadIdx.x) % 32),
        columns_(static_cast<int>(setup.gated() ? params.out_features / 2 : params.out_features)) {}

  __device__ void store(const ClusterSums<kRows>& sums, int first_group) const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    write_out<ClusterTraits::kTiles>([&](int i) {
      const int tile = i * ClusterTraits::kWarpgroups + warpgroup;
      const int row = tile * ClusterTraits::kTileRows + warp * 16;  // the warp's first, in the pass
      if (row >= setup_.pass_rows()) return;
      if (setup_.gated()) {
        store_gated(sums.at[i], first_group * 8 + row / 2 + lane_ / 4);
      } else {
        store_half(sums.at[i], 0, first_group * 8 + row + lane_ / 4);
        if (row + 8 < setup_.pass_rows()) {
          store_half(sums.at[i], 2, first_group * 8 + row + 8 + lane_ / 4);
        }
      }
    });
  }

 private:
  __device__ int token(int n, int i) const { return n * 8 + lane_ % 4 * 2 + i; }
  __device__ T* out(int token, int column) const {
    return static_cast<T*>(params_.out) + token * params_.out_stride_token + column;
  }
  __device__ float bias(int row) const {
    const T* bias = static_cast<const T*>(params_.bias);
    return bias == nullptr ? 0.0f : to_float(bias[row]);
  }

  __device__ void store_gated(const float (&sums)[kRows / 8][4], int column) const {
    if (column >= columns_) return;
    const float gate_bias = bias(column), up_bias = bias(columns_ + column);
    write_out<kRows / 8>([&](int n) {
      write_out<2>([&](int i) {
        if (token(n, i) >= params_.num_tokens) return;
        const float gate = to_float(from_float<T>(sums[n][i] + gate_bias));
        const float up = to_float(from_float<T>(sums[n][2 + i] + up_bias));
        *out(token(n, i), column) = from_float<T>(gated(gate, up));
      });
    });
  }

  // The sums c[first], c[first + 1] of mma.cuh.
  __device__ void store_half(const float (&sums)[kRows / 8][4], int first, int column) const {
    if (column >= columns_) return;
    const bool adds = params_.epilogue == LinearEpilogue::kAdd;
    const float own_bias = bias(column);
    T old[kRows / 8][2];
    write_out<kRows / 8>([&](int n) {
      write_out<2>([&](int i) {
        if (adds && token(n, i) < params_.num_tokens) old[n][i] = *out(token(n, i), column);
      });
    });
    write_out<kRows / 8>([&](int n) {
      write_out<2>([&](int i) {
        if (token(n, i) >= params_.num_tokens) return;
        float y = to_float(from_float<T>(sums[n][first + i] + own_bias));
        if (adds) y += to_float(old[n][i]);
        *out(token(n, i), column) = from_float<T>(y);
      });
    });
  }

  const StreamedLinearParams& params_;
  const ClusterSetup& setup_;
  int lane_;
  int columns_;  // of out
};

// Elements between rows of sums: no two lanes of a store meet in a bank.
__host__ __device__ inline int cluster_sums_pitch(int pass_rows) {
  return (pass_rows + 15) / 16 * 16 + 4;
}

}  // namespace pagedkv::cuda
