// From the sums of a cluster's product to out: bias, gate or sum, rounding.
#pragma once

#include "cuda/device/numeric.cuh"
#include "cuda/linear/cluster_product.cuh"

namespace pagedkv::cuda {

__device__ inline float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Adds the sums of a cluster's two blocks and stores what becomes of them; each block does so for
// every other token.
template <class T>
class SharedResult {
 public:
  static constexpr int kVec = 4;
  static constexpr int kBlocks = 2;
  static constexpr int kItems = 4;  // at a time: the other block's memory is far away

  // sums: [kRows, pitch] fp32 at this address of each block's shared memory. first_group: of the
  // cluster.
  __device__ SharedResult(const StreamedLinearParams& params, const ClusterSetup& setup,
                          int first_group, uint32_t sums, int pitch)
      : params_(params),
        setup_(setup),
        first_column_(first_group * 8),
        pitch_(pitch),
        rank_(cluster_rank()),
        columns_(static_cast<int>(setup.gated() ? params.out_features / 2 : params.out_features)) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      sums_[i] = cluster_address(sums, i);
    }
  }

  __device__ void store() const {
    const int vecs = setup_.pass_groups * (8 / kVec);
    const int tokens = (static_cast<int>(params_.num_tokens) - rank_ + kBlocks - 1) / kBlocks;
    const int items = tokens * vecs;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x); first < items;
         first += kItems * ClusterTraits::kThreads) {
      Place places[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int own = first + i * ClusterTraits::kThreads;
        const int item = min(own, items - 1);
        places[i].token = rank_ + item / vecs * kBlocks;
        places[i].column = item % vecs * kVec;
        places[i].exists = own < items && first_column_ + places[i].column < columns_;
      }
      store(places);
    }
  }

 private:
  struct Place {
    int token;
    int column;  // of the pass
    bool exists;
  };

  __device__ void store(const Place (&places)[kItems]) const {
    const bool adds = params_.epilogue == LinearEpilogue::kAdd;
    Vec<T, kVec> old[kItems] = {};
    Vec<float, kVec> y[kItems], up[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (adds && places[i].exists) load(old[i], out(places[i]));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = places[i].column;
      y[i] = sum_at(places[i].token, setup_.gated() ? column / 8 * 16 + column % 8 : column);
      if (setup_.gated()) up[i] = sum_at(places[i].token, column / 8 * 16 + column % 8 + 8);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!places[i].exists) continue;
      const int column = first_column_ + places[i].column;
      round(y[i], column);
      if (setup_.gated()) {
        round(up[i], columns_ + column);
#pragma unroll
        for (int j = 0; j < kVec; ++j) y[i].data[j] = gated(y[i].data[j], up[i].data[j]);
      } else if (adds) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) y[i].data[j] += to_float(old[i].data[j]);
      }
      store(out(places[i]), narrow<T>(y[i]));
    }
  }

  __device__ T* out(const Place& place) const {
    return static_cast<T*>(params_.out) + place.token * params_.out_stride_token + first_column_ +
           place.column;
  }

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

  __device__ void store(T* to, const Vec<T, kVec>& result) const {
    if (setup_.wide) {
      store_vec<kVec>(to, result);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        to[i] = result.data[i];
      }
    }
  }

  // Of four rows of the weights; row: of the pass's.
  __device__ Vec<float, kVec> sum_at(int token, int row) const {
    const uint32_t at = (token * pitch_ + row) * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float4 x = load_cluster_16(sums_[i] + at);
      sum.x += x.x;
      sum.y += x.y;
      sum.z += x.z;
      sum.w += x.w;
    }
    return {{sum.x, sum.y, sum.z, sum.w}};
  }

  // y with its bias, rounded to T. row: of the matrix.
  __device__ void round(Vec<float, kVec>& y, int row) const {
    const T* bias = static_cast<const T*>(params_.bias);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (bias != nullptr) y.data[i] += to_float(bias[row + i]);
      y.data[i] = to_float(from_float<T>(y.data[i]));
    }
  }

  const StreamedLinearParams& params_;
  const ClusterSetup& setup_;
  int first_column_;
  int pitch_;
  int rank_;
  int columns_;  // of out
  uint32_t sums_[kBlocks];
};

// An 8 x 8 matrix of 16-bit elements, a row's pairs in four lanes, becomes its transpose.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
  uint32_t other;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(other) : "r"(pair));
  return other;
}

// Stores what becomes of a block's own sums, from the registers that they are in. A lane has two
// tokens of a column; once they are rounded and transposed, two columns of a token.
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
        store_gated(sums.at[i], first_group * 8 + row / 2);
      } else {
        store_half(sums.at[i], 0, first_group * 8 + row);
        if (row + 8 < setup_.pass_rows()) store_half(sums.at[i], 2, first_group * 8 + row + 8);
      }
    });
  }

 private:
  using Pair = Vec<T, 2>;

  __device__ float bias(int row) const {
    const T* bias = static_cast<const T*>(params_.bias);
    return bias == nullptr ? 0.0f : to_float(bias[row]);
  }

  // column: the first of eight, as below.
  __device__ void store_gated(const float (&sums)[kRows / 8][4], int column) const {
    if (column >= columns_) return;
    const float gate_bias = bias(column + lane_ / 4), up_bias = bias(columns_ + column + lane_ / 4);
    for_eights(column, [&](int n, T* at, bool exists) {
      Pair y;
      write_out<2>([&](int i) {
        const float gate = to_float(from_float<T>(sums[n][i] + gate_bias));
        const float up = to_float(from_float<T>(sums[n][2 + i] + up_bias));
        y.data[i] = from_float<T>(gated(gate, up));
      });
      y = transposed(y);
      if (exists) store(at, y);
    });
  }

  // The sums c[first], c[first + 1] of mma.cuh.
  __device__ void store_half(const float (&sums)[kRows / 8][4], int first, int column) const {
    if (column >= columns_) return;
    const bool adds = params_.epilogue == LinearEpilogue::kAdd;
    const float own_bias = bias(column + lane_ / 4);
    Pair old[kRows / 8];
    for_eights(column, [&](int n, const T* at, bool exists) {
      if (adds && exists) load(old[n], at);
    });
    for_eights(column, [&](int n, T* at, bool exists) {
      Pair y;
      write_out<2>([&](int i) { y.data[i] = from_float<T>(sums[n][first + i] + own_bias); });
      y = transposed(y);
      if (adds) {
        write_out<2>([&](int i) {
          y.data[i] = from_float<T>(to_float(y.data[i]) + to_float(old[n].data[i]));
        });
      }
      if (exists) store(at, y);
    });
  }

  __device__ static Pair transposed(Pair pair) {
    return __builtin_bit_cast(Pair, transpose_8x8(__builtin_bit_cast(uint32_t, pair)));
  }

  // body(n, where this lane's two of eight columns are in out, whether there is its token) for each
  // eight tokens.
  template <class Body>
  __device__ void for_eights(int column, const Body& body) const {
    const int token = lane_ / 4;
    T* at =
        static_cast<T*>(params_.out) + token * params_.out_stride_token + column + lane_ % 4 * 2;
    write_out<kRows / 8>([&](int n) {
      body(n, at, n * 8 + token < params_.num_tokens);
      at += 8 * params_.out_stride_token;
      asm("" : "+l"(at));  // else all addresses are worked out first, and there is no room for them
    });
  }
  __device__ void load(Pair& to, const T* from) const {
    if (setup_.wide) {
      to = load_vec<2>(from);
    } else {
      write_out<2>([&](int i) { to.data[i] = from[i]; });
    }
  }
  __device__ void store(T* to, const Pair& pair) const {
    if (setup_.wide) {
      store_vec<2>(to, pair);
    } else {
      write_out<2>([&](int i) { to[i] = pair.data[i]; });
    }
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
