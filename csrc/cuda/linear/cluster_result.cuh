// From the sums of a cluster's product to out: bias, gate or sum, rounding.
#pragma once

#include "cuda/device/global_store.cuh"
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

// stmatrix_x4 of the matrices' transposes.
__device__ inline void store_transposed_x4(uint32_t address, const uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}

// Elements between rows of a block's own results in shared memory: 16 bytes more than a multiple of
// 32, so that the eight rows of a matrix lie in different banks.
__host__ __device__ inline int own_result_pitch(int pass_groups) {
  return pass_groups * 8 + (pass_groups % 2 == 0 ? 8 : 0);
}

// What becomes of a block's own sums: rounded in the registers that they are in, put in order in
// shared memory, and stored from there in whole sectors of the L2, by code that is short: what runs
// once has to be read from memory.
template <class T, int kRows>
class OwnResult {
 public:
  // memory: [kRows, pitch] T, 16-byte aligned.
  __device__ OwnResult(const StreamedLinearParams& params, const ClusterSetup& setup, char* memory)
      : params_(params),
        setup_(setup),
        memory_(reinterpret_cast<T*>(memory)),
        pitch_(own_result_pitch(setup.pass_groups)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        columns_(static_cast<int>(setup.gated() ? params.out_features / 2 : params.out_features)) {}

  // Every thread that multiplies.
  __device__ void store(const ClusterSums<kRows>& sums, int first_group) const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    sync_threads(1, ClusterTraits::kThreads);  // memory is free
    write_out<ClusterTraits::kTiles>([&](int i) {
      const int tile = i * ClusterTraits::kWarpgroups + warpgroup;
      const int row = tile * ClusterTraits::kTileRows + warp * 16;  // the warp's first, in the pass
      if (row >= setup_.pass_rows()) return;
      if (setup_.gated()) {
        round_gated(sums.at[i], first_group * 8, row / 2);
      } else {
        round_half(sums.at[i], 0, first_group * 8, row);
        if (row + 8 < setup_.pass_rows()) round_half(sums.at[i], 2, first_group * 8, row + 8);
      }
    });
    sync_threads(1, ClusterTraits::kThreads);
    const int columns = min(setup_.pass_groups * 8, columns_ - first_group * 8);
    if (setup_.whole) {
      copy_out<8>(first_group * 8, columns);
    } else {
      copy_out<1>(first_group * 8, columns);
    }
  }

 private:
  // Of row `row` of the matrix, or of its last one behind that: nothing is stored of those.
  __device__ float bias(int row) const {
    const T* bias = static_cast<const T*>(params_.bias);
    const auto last = static_cast<int>(params_.out_features) - 1;
    return bias == nullptr ? 0.0f : to_float(bias[min(row, last)]);
  }

  // column: the first of eight, in the pass, whose first is first_column.
  __device__ void round_gated(const float (&sums)[kRows / 8][4], int first_column,
                              int column) const {
    const int own = first_column + column + lane_ / 4;
    const float gate_bias = bias(own), up_bias = bias(columns_ + own);
    put<kRows / 32>(column, [&](int n, int i) {
      const float gate = to_float(from_float<T>(sums[n][i] + gate_bias));
      const float up = to_float(from_float<T>(sums[n][2 + i] + up_bias));
      return from_float<T>(gated(gate, up));
    });
  }

  // The sums c[first], c[first + 1] of mma.cuh.
  __device__ void round_half(const float (&sums)[kRows / 8][4], int first, int first_column,
                             int column) const {
    const float own_bias = bias(first_column + column + lane_ / 4);
    put<kRows / 32>(column,
                    [&](int n, int i) { return from_float<T>(sums[n][first + i] + own_bias); });
  }

  // result(n, i): of token 8 n + lane % 4 * 2 + i and column lane / 4 of eight.
  template <int kTimes, class Result>
  __device__ void put(int column, const Result& result) const {
    if constexpr (kTimes == 0) {
      write_out<kRows / 8>([&](int n) {
        write_out<2>([&](int i) {
          memory_[(n * 8 + lane_ % 4 * 2 + i) * pitch_ + column + lane_ / 4] = result(n, i);
        });
      });
    } else {
      const uint32_t to = shared_address(memory_ + lane_ * pitch_ + column);
      write_out<kTimes>([&](int k) {
        uint32_t pairs[4];
        write_out<4>([&](int j) {
          const Vec<T, 2> pair{{result(k * 4 + j, 0), result(k * 4 + j, 1)}};
          pairs[j] = __builtin_bit_cast(uint32_t, pair);
        });
        store_transposed_x4(to + k * 32 * pitch_ * 2, pairs);
      });
    }
  }

  template <int kVec>
  __device__ void copy_out(int first_column, int columns) const {
    const bool adds = params_.epilogue == LinearEpilogue::kAdd;
    const int lanes = pitch_ / kVec;
    T* out = static_cast<T*>(params_.out) + first_column;
    int token = static_cast<int>(threadIdx.x) / lanes;
    int column = static_cast<int>(threadIdx.x) % lanes * kVec;
    const int tokens = ClusterTraits::kThreads / lanes,
              rest = ClusterTraits::kThreads % lanes * kVec;
#pragma unroll 2
    for (; token < params_.num_tokens; token += tokens) {
      if (column < columns) {
        Vec<T, kVec> y = load_vec<kVec>(memory_ + token * pitch_ + column);
        T* to = out + token * params_.out_stride_token + column;
        if (adds) {
          const Vec<T, kVec> old = load_vec<kVec>(to);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            y.data[i] = from_float<T>(to_float(y.data[i]) + to_float(old.data[i]));
          }
        }
        store_global<kVec>(to, y);
      }
      column += rest;
      if (column >= pitch_) {
        column -= pitch_;
        ++token;
      }
    }
  }

  const StreamedLinearParams& params_;
  const ClusterSetup& setup_;
  T* memory_;
  int pitch_;
  int lane_;
  int columns_;  // of out
};

// Elements between rows of sums: no two lanes of a store meet in a bank.
__host__ __device__ inline int cluster_sums_pitch(int pass_rows) {
  return (pass_rows + 15) / 16 * 16 + 4;
}

}  // namespace pagedkv::cuda
