// A warp's 16 packed rows of a tile over a shared prefix: what they see of it, and their end: the
// pieces of the tile and the rows' own keys, which decode has attended to, become rows of out and
// lse.
//
// Of a tile that several workers share, the last to arrive with its part of a warp's rows adds all
// up, always in the order of the keys: results repeat bit for bit.
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/prefix_groups.cuh"
#include "cuda/attention/prefix_states.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

// The sequence that a token of a group lies in. What a sequence of one token needs, the common
// case, is read together.
__device__ inline Sequence find_sequence(const PagedAttentionParams& params, int64_t token) {
  const Sequence guess = load_sequence(params, min(token, params.num_seqs - 1));
  if (guess.query_start == token && guess.query_len == 1) return guess;
  return load_sequence(params, sequence_of_token(params, token));
}

// Where a row stands is only looked up if it matters: without ALiBi and window all rows of the tile
// see the whole prefix.
__device__ inline TileRows prefix_tile_rows(const PagedAttentionParams& params,
                                            const TilePart& part, int group, int lane) {
  const int prefix_len = part.sequence.seq_len;
  TileRows rows{};
  rows.keys[0] = rows.keys[1] = KeyRange{0, prefix_len};
  rows.all_first = params.window > 0 ? prefix_len : 0;
  rows.all_end = prefix_len;
  if (params.window == 0 && params.alibi_slopes == nullptr) return rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int packed = part.first_row + min(lane / 4 + 8 * i, part.num_rows - 1);
    const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
    const int64_t token = part.sequence.query_start + packed / group;
    const Sequence sequence = find_sequence(params, token);
    rows.position[i] = sequence.position(static_cast<int>(token - sequence.query_start));
    rows.keys[i].first = visible_keys(params, prefix_len, rows.position[i]).first;
    if (params.alibi_slopes != nullptr) {
      rows.slope[i] = params.alibi_slopes[head * params.alibi_slopes_stride] * kLog2E;
    }
  }
  return rows;
}

// Leaves a warp's sums in the workspace as its piece of the tile; whether all pieces are there now.
// softmax is finished.
template <int kDim>
__device__ inline bool leave_piece(const PrefixStates& states, PrefixPiece piece, int warp,
                                   const OnlineSoftmax& softmax, const float (&out)[kDim / 8][4],
                                   int lane) {
  const unsigned first = blockIdx.x - static_cast<unsigned>(piece.number);
  const PrefixPart mine = states.part(first, piece.number, warp);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    if (n < states.head_dim / 8) {
      mine.sums[n * 32 + lane] = make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
    }
  }
  if (lane % 4 == 0) {
    mine.totals[lane / 4] = make_float2(softmax.reference[0], softmax.sum[0]);
    mine.totals[lane / 4 + 8] = make_float2(softmax.reference[1], softmax.sum[1]);
  }
  __syncwarp();
  bool last = false;
  if (lane == 0) {
    uint64_t* counter = states.counter(first, warp);
    last = arrive_at_counter(counter) == piece.count - 1;
    if (last) reset_counter(counter);
  }
  __syncwarp();
  return __shfl_sync(0xffffffffu, static_cast<int>(last), 0) != 0;
}

// The sums of all pieces.
template <int kDim>
__device__ inline void add_pieces(const PrefixStates& states, PrefixPiece piece, int warp,
                                  OnlineSoftmax& softmax, float (&out)[kDim / 8][4], int lane) {
  const unsigned first = blockIdx.x - static_cast<unsigned>(piece.number);
  softmax = OnlineSoftmax{};
#pragma unroll 1
  for (int p = 0; p < piece.count; ++p) {
    const float2* totals = states.part(first, p, warp).totals;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      softmax.reference[i] = fmaxf(softmax.reference[i], totals[lane / 4 + 8 * i].x);
    }
  }
#pragma unroll
  for (auto& sums : out) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll 1
  for (int p = 0; p < piece.count; ++p) {
    const PrefixPart part = states.part(first, p, warp);
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 total = part.totals[lane / 4 + 8 * i];
      // No key seen: -inf - -inf must not become NaN.
      weight[i] = total.x == -INFINITY ? 0.0f : exp2_fast(total.x - softmax.reference[i]);
      softmax.sum[i] += weight[i] * total.y;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (n >= states.head_dim / 8) continue;
      const float4 x = part.sums[n * 32 + lane];
      out[n][0] += weight[0] * x.x;
      out[n][1] += weight[0] * x.y;
      out[n][2] += weight[1] * x.z;
      out[n][3] += weight[1] * x.w;
    }
  }
}

// Where a row of out and lse is, in elements; out -1: it takes no part in the group of the tile.
struct RowEnd {
  int64_t out;
  int64_t lse;
};

// Row lane % 16 of `part`, a warp's rows.
__device__ inline RowEnd row_end(const PagedAttentionParams& params, const TilePart& part,
                                 int group, int lane) {
  const int row = lane % kTileRows;
  const int packed = part.first_row + min(row, part.num_rows - 1);
  const int64_t token = part.sequence.query_start + packed / group;
  const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
  const bool used = row < part.num_rows &&
                    takes_part(params, find_sequence(params, token), part.sequence.seq_len);
  return {used ? token * params.out_stride_token + head * params.out_stride_head : -1,
          token * params.lse_stride_token + head * params.lse_stride_head};
}

// Adds a warp's sums to its rows of out and lse, which decode has left; not if !is_real. Little
// code: to read it takes longer than to run it.
template <class Traits, class T>
__device__ inline void add_to_rows(const PagedAttentionParams& params, const RowEnd& end,
                                   bool is_real, int kv_head, const OnlineSoftmax& softmax,
                                   const float (&out)[Traits::kDim / 8][4], int lane) {
  constexpr int kPairs = Traits::kDim / 8;  // of a row's elements that a lane has
  const int head_dim = static_cast<int>(params.cache.head_dim);
  const auto dim_of = [&](int n) {  // of a float8 cache, neighbours lie in neighbouring fragments
    return Traits::kFloat8 ? out_dim<Traits>(n / 2 * 2, n % 2, lane % 4)
                           : out_dim<Traits>(n, 0, lane % 4);
  };
  // All reads, then all writes. A lane reads the lse of the row that it has found.
  T* rows[2];
  bool used[2];
  uint32_t own[2][kPairs];
  float* lse = params.lse + end.lse;
  const float own_lse = is_real && end.out >= 0 ? *lse : -INFINITY;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t at = __shfl_sync(0xffffffffu, end.out, lane / 4 + 8 * i);
    rows[i] = static_cast<T*>(params.out) + at;
    used[i] = is_real && at >= 0;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      own[i][n] = used[i] && dim_of(n) < head_dim
                      ? *reinterpret_cast<const uint32_t*>(rows[i] + dim_of(n))
                      : 0;
    }
  }
  const float v_scale = value_scale(params, kv_head);
  float new_lse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // The own keys' row is normalised and scaled: its weight is all that its sum of weights was.
    const float own_reference = __shfl_sync(0xffffffffu, own_lse, lane / 4 + 8 * i) / kLn2;
    const float reference = fmaxf(own_reference, softmax.reference[i]);
    const float base = reference == -INFINITY ? 0.0f : reference;
    const float own_weight = exp2_fast(own_reference - base);
    const float weight = exp2_fast(softmax.reference[i] - base);
    const float total = own_weight + weight * softmax.sum[i];
    const float own_factor = total > 0.0f ? own_weight / total : 0.0f;
    const float factor = total > 0.0f ? weight * v_scale / total : 0.0f;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float x = Traits::kFloat8 ? out[n / 2 * 2][2 * i + n % 2] : out[n][2 * i];
      const float y = Traits::kFloat8 ? out[n / 2 * 2 + 1][2 * i + n % 2] : out[n][2 * i + 1];
      const auto before = reinterpret_cast<const Vec<T, 2>&>(own[i][n]);
      const uint32_t pair = pack<T>(fmaf(x, factor, to_float(before.data[0]) * own_factor),
                                    fmaf(y, factor, to_float(before.data[1]) * own_factor));
      if (used[i] && dim_of(n) < head_dim) {
        *reinterpret_cast<uint32_t*>(rows[i] + dim_of(n)) = pair;
      }
    }
    new_lse[i] = total > 0.0f ? (base + log2f(total)) * kLn2 : -INFINITY;
  }
  const float low = __shfl_sync(0xffffffffu, new_lse[0], lane % 8 * 4);
  const float high = __shfl_sync(0xffffffffu, new_lse[1], lane % 8 * 4);
  if (is_real && end.out >= 0 && lane < kTileRows) *lse = lane < 8 ? low : high;
}

// The end of a warp's rows, number `warp` of the tile `part`.
template <class Traits, class T>
__device__ __forceinline__ void finish_prefix_rows(const PagedAttentionParams& params,
                                                   const TilePart& part, int warp, int group,
                                                   OnlineSoftmax& softmax,
                                                   float (&out)[Traits::kDim / 8][4], int lane) {
  TilePart mine = part;
  mine.first_row += warp * kTileRows;
  mine.num_rows = min(kTileRows, part.num_rows - warp * kTileRows);
  const RowEnd end = row_end(params, mine, group, lane);
  softmax.finish();
  const PrefixPiece piece = PrefixPiece::of(part);
  if (piece.count > 1) {
    const PrefixStates states = prefix_states(params);
    if (!leave_piece<Traits::kDim>(states, piece, warp, softmax, out, lane)) return;
    add_pieces<Traits::kDim>(states, piece, warp, softmax, out, lane);
  }
  // Twice, the first time for nothing: what takes longest of this short code is to be read, which
  // now happens while decode runs.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) wait_previous_kernel();
    add_to_rows<Traits, T>(params, end, pass == 1, part.kv_head, softmax, out, lane);
  }
}

}  // namespace pagedkv::cuda
