// The end of a tile in the decode kernel: the sums of its parts, in the order of the keys, become
// rows of out and lse, or a state that a later merge reads. The order of all additions is fixed,
// so results repeat bit for bit.
//
// States keep the sums as the products' fragments hold them, and the fragments of a tile are
// independent: one warp merges fragment f of all parts, within the block and then over the blocks.
#pragma once

#include "cuda/attention/decode_products.cuh"
#include "cuda/attention/decode_softmax.cuh"
#include "cuda/attention/partial_states.cuh"

namespace pagedkv::cuda {

// Rows 8 t + 2 q and + 1: reference and sum of weights of each.
template <class Traits>
__device__ float4 totals_of(const DecodeSoftmax<Traits>& softmax, int t) {
  return make_float4(softmax.reference[t][0], softmax.sum[t][0], softmax.reference[t][1],
                     softmax.sum[t][1]);
}

// A warp's sums and totals as a tile's state [kFragments] in shared memory. `softmax` is finished.
template <class Traits>
__device__ void store_state(FragmentState* state, const OutSums<Traits>& out,
                            const DecodeSoftmax<Traits>& softmax, int lane) {
#pragma unroll
  for (int t = 0; t < Traits::kRowTiles; ++t) {
    const float4 totals = totals_of(softmax, t);
#pragma unroll
    for (int m = 0; m < OutSums<Traits>::kFragments; ++m) {
      const auto& x = out.at[m][t];
      FragmentState& fragment = state[m * Traits::kRowTiles + t];
      fragment.sums[lane] = make_float4(x[0], x[1], x[2], x[3]);
      if (lane < 4) fragment.totals[lane] = totals;
    }
  }
}

// Adds a later part of the tile, left as a state, to a warp's own; both are finished.
template <class Traits>
__device__ void add_state(OutSums<Traits>& out, DecodeSoftmax<Traits>& softmax,
                          const FragmentState* state, int lane) {
#pragma unroll
  for (int t = 0; t < Traits::kRowTiles; ++t) {
    const float4 totals = state[t].totals[lane % 4];
    float mine[2];
    float other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float reference = i == 0 ? totals.x : totals.z;
      const float highest = fmaxf(softmax.reference[t][i], reference);
      // Empty so far: -inf - -inf must not become NaN.
      const float base = highest == -INFINITY ? 0.0f : highest;
      mine[i] = exp2_fast(softmax.reference[t][i] - base);
      other[i] = exp2_fast(reference - base);
      softmax.reference[t][i] = highest;
      softmax.sum[t][i] = mine[i] * softmax.sum[t][i] + other[i] * (i == 0 ? totals.y : totals.w);
    }
#pragma unroll
    for (int m = 0; m < OutSums<Traits>::kFragments; ++m) {
      const float4 sums = state[m * Traits::kRowTiles + t].sums[lane];
      auto& x = out.at[m][t];
      x[0] = mine[0] * x[0] + other[0] * sums.x;
      x[1] = mine[1] * x[1] + other[1] * sums.y;
      x[2] = mine[0] * x[2] + other[0] * sums.z;
      x[3] = mine[1] * x[3] + other[1] * sums.w;
    }
  }
}

// Where a lane writes its row 8 t + r of the output, and whether it has one.
template <class T>
struct RowTarget {
  T* out;  // head_dim 0
  bool valid;
};

template <class Traits, class T>
__device__ RowTarget<T> row_target(const DecodePlan<Traits>& plan, const DecodePart& part, int t,
                                   int lane) {
  const PagedAttentionParams& params = plan.params();
  const int row = 8 * t + lane / 4;
  const auto place = plan.place_of(part, row);
  T* out = static_cast<T*>(params.out) +
           (part.sequence.query_start + place.token) * params.out_stride_token +
           place.head * params.out_stride_head;
  return {out, row < part.num_rows};
}

// 1 / sum of the weights of a lane's two rows, times v_scale.
template <class Traits>
__device__ float2 out_factors(const DecodePlan<Traits>& plan, const DecodePart& part,
                              float4 totals) {
  const float scale = value_scale(plan.params(), part.kv_head);
  return make_float2(totals.y > 0.0f ? __fdividef(scale, totals.y) : 0.0f,
                     totals.w > 0.0f ? __fdividef(scale, totals.w) : 0.0f);
}

// A fragment's finished sums x (elements as in OutSums) to out.
template <class Traits, class T>
__device__ void write_fragment(const RowTarget<T>& target, int head_dim, int m, float4 x,
                               float2 factors, int lane) {
  // Transposed, a lane has row r and two neighbouring rows of the fragment.
  const uint32_t low = transpose_matrix(pack<T>(x.x * factors.x, x.y * factors.y));
  const uint32_t high = transpose_matrix(pack<T>(x.z * factors.x, x.w * factors.y));
  if (!target.valid) return;
  if constexpr (Traits::kFloat8) {  // head_dim 4 q, 4 q + 2 and 4 q + 1, 4 q + 3
    const int d = 16 * m + 4 * (lane % 4);
    if (d >= head_dim) return;
    *reinterpret_cast<uint2*>(target.out + d) =
        make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
  } else {
    const int d = 16 * m + 2 * (lane % 4);
    if (d < head_dim) *reinterpret_cast<uint32_t*>(target.out + d) = low;
    if (d + 8 < head_dim) *reinterpret_cast<uint32_t*>(target.out + d + 8) = high;
  }
}

template <class Traits>
__device__ void write_lse(const DecodePlan<Traits>& plan, const DecodePart& part, int t,
                          float4 totals, int lane) {
  const PagedAttentionParams& params = plan.params();
  if (params.lse == nullptr || lane >= 4) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * t + 2 * lane + i;
    const float reference = i == 0 ? totals.x : totals.z;
    const float sum = i == 0 ? totals.y : totals.w;
    if (row >= part.num_rows) continue;
    const auto place = plan.place_of(part, row);
    params.lse[(part.sequence.query_start + place.token) * params.lse_stride_token +
               place.head * params.lse_stride_head] =
        sum > 0.0f ? (reference + log2f(sum)) * kLn2 : -INFINITY;
  }
}

// A tile that one warp has whole, from its registers. `softmax` is finished.
template <class Traits, class T>
__device__ void write_tile(const DecodePlan<Traits>& plan, const DecodePart& part,
                           const OutSums<Traits>& out, const DecodeSoftmax<Traits>& softmax,
                           int lane) {
  const int head_dim = static_cast<int>(plan.params().cache.head_dim);
#pragma unroll
  for (int t = 0; t < Traits::kRowTiles; ++t) {
    const float4 totals = totals_of(softmax, t);
    const float2 factors = out_factors(plan, part, totals);
    const RowTarget<T> target = row_target<Traits, T>(plan, part, t, lane);
#pragma unroll
    for (int m = 0; m < OutSums<Traits>::kFragments; ++m) {
      const auto& x = out.at[m][t];
      write_fragment<Traits>(target, head_dim, m, make_float4(x[0], x[1], x[2], x[3]), factors,
                             lane);
    }
    write_lse(plan, part, t, totals, lane);
  }
}

// A fragment of the sums of several parts, and their totals.
struct MergedFragment {
  float4 sums;
  float4 totals;
};

// The sums so far, relative to `reference` of the lane's two rows.
struct MergeState {
  float2 reference = make_float2(-INFINITY, -INFINITY);
  float2 total = make_float2(0.0f, 0.0f);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  __device__ MergedFragment merged() const {
    return {sums, make_float4(reference.x, total.x, reference.y, total.y)};
  }
};

// Adds parts 0 .. num_parts - 1 of a fragment, in order, kAtOnce read together; part(i) is where
// its state is.
template <int kAtOnce, class Part>
__device__ void add_parts(MergeState& merge, int num_parts, int lane, const Part& part) {
#pragma unroll 1
  for (int first = 0; first < num_parts; first += kAtOnce) {
    // Past the end the last part is read again, with weight 0: no branch between the loads.
    float4 totals[kAtOnce];
    float4 sums[kAtOnce];
    float2 highest = merge.reference;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const FragmentState* state = part(min(first + j, num_parts - 1));
      totals[j] = state->totals[lane % 4];
      sums[j] = state->sums[lane];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      highest.x = fmaxf(highest.x, totals[j].x);
      highest.y = fmaxf(highest.y, totals[j].z);
    }
    // Empty so far: -inf - -inf must not become NaN.
    const float2 base = make_float2(highest.x == -INFINITY ? 0.0f : highest.x,
                                    highest.y == -INFINITY ? 0.0f : highest.y);
    const auto add = [&](float weight0, float weight1, const float4& x, float total0,
                         float total1) {
      merge.sums.x += weight0 * x.x;
      merge.sums.y += weight1 * x.y;
      merge.sums.z += weight0 * x.z;
      merge.sums.w += weight1 * x.w;
      merge.total.x += weight0 * total0;
      merge.total.y += weight1 * total1;
    };
    const MergeState older = merge;
    merge = MergeState{};
    add(exp2_fast(older.reference.x - base.x), exp2_fast(older.reference.y - base.y), older.sums,
        older.total.x, older.total.y);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const bool used = first + j < num_parts;
      add(used ? exp2_fast(totals[j].x - base.x) : 0.0f,
          used ? exp2_fast(totals[j].z - base.y) : 0.0f, sums[j], totals[j].y, totals[j].w);
    }
    merge.reference = highest;
  }
}

// A merged fragment, all keys done, to out and lse.
template <class Traits, class T>
__device__ void write_merged(const DecodePlan<Traits>& plan, const DecodePart& part, int fragment,
                             const MergedFragment& merged, int lane) {
  const int t = fragment % Traits::kRowTiles;
  const int m = fragment / Traits::kRowTiles;
  write_fragment<Traits>(row_target<Traits, T>(plan, part, t, lane),
                         static_cast<int>(plan.params().cache.head_dim), m, merged.sums,
                         out_factors(plan, part, merged.totals), lane);
  if (m == 0) write_lse(plan, part, t, merged.totals, lane);
}

// A piece's fragment to the workspace, row by row (num_splits n > 1).
template <class Traits>
__device__ void write_piece(const DecodePlan<Traits>& plan, const DecodePart& part, int piece,
                            int fragment, const MergedFragment& merged, int lane) {
  const int t = fragment % Traits::kRowTiles;
  const int m = fragment / Traits::kRowTiles;
  const PagedAttentionParams& params = plan.params();
  const int head_dim = static_cast<int>(params.cache.head_dim);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * t + 2 * (lane % 4) + i;
    if (row >= part.num_rows) continue;
    const auto place = plan.place_of(part, row);
    const int64_t number =
        piece_state(params, part.sequence.query_start + place.token, place.head, piece);
    float* sums = piece_states(params).sums + number * head_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = 16 * m + (Traits::kFloat8 ? 2 * (lane / 4) + half : lane / 4 + 8 * half);
      const float x = half == 0 ? (i == 0 ? merged.sums.x : merged.sums.y)
                                : (i == 0 ? merged.sums.z : merged.sums.w);
      if (d < head_dim) sums[d] = x;
    }
    if (m == 0 && lane < 4) {
      piece_states(params).totals[number] = i == 0 ? make_float2(merged.totals.x, merged.totals.y)
                                                   : make_float2(merged.totals.z, merged.totals.w);
    }
  }
}

}  // namespace pagedkv::cuda
