// Decode attention of small batches, where what comes before and after the keys takes as long as
// they do: at most kSmallSeqs sequences of 8 packed rows at most, on sm_90. Short code, few
// barriers.
//
// Grid: two blocks a multiprocessor, one for a single sequence. A block takes pieces of the keys of
// one KV head (decode_small_plan.cuh), each warp every kWarps-th unit of them, through a ring of
// tensor copies of its own. A row's parts are merged by one warp: over the warps in shared memory,
// then, by whoever comes last, over the pieces in the workspace; always in the order of the keys:
// results repeat bit for bit.
//
// Must move: K and V once per KV head, 2 * length * G * D * size bytes a sequence.
#pragma once

#include "cuda/attention/decode_small_load.cuh"
#include "cuda/attention/decode_softmax.cuh"
#include "cuda/attention/partial_states.cuh"

namespace pagedkv::cuda {

// What cut sequences leave in the workspace: of each row of a piece, sums that are not normalised
// and their totals (reference, sum of weights); and a counter for each row of the batch.
template <class Traits>
struct SmallStates {
  uint64_t* counters;  // [kSmallSeqs, G, kRows]
  float2* totals;      // [slots + kSmallSeqs, G, kRows]
  float* sums;         // [slots + kSmallSeqs, G, kRows, kDim]

  static constexpr int64_t bytes(int64_t kv_heads, int64_t slots) {
    return kv_heads * Traits::kRows *
           (kSmallSeqs * 8 + (slots + kSmallSeqs) * (8 + Traits::kDim * 4));
  }
  __device__ SmallStates(const PagedAttentionParams& params, unsigned slots)
      : counters(static_cast<uint64_t*>(params.workspace)) {
    const int64_t rows = params.cache.num_kv_heads * Traits::kRows;
    totals = reinterpret_cast<float2*>(counters + rows * kSmallSeqs);
    sums = reinterpret_cast<float*>(totals + rows * (slots + kSmallSeqs));
  }
};

// A row of the sums of several parts, relative to `reference`: a lane's kVec elements.
template <int kVec>
struct RowSum {
  float reference;
  float total;
  Vec<float, kVec> sums;
};

// Parts 0 .. num_parts - 1 (at most 32) of a row, in order, kAtOnce read together: part p's
// elements begin at sums + p * stride, its totals are totals[p * totals_stride].
template <int kVec, int kAtOnce>
__device__ RowSum<kVec> merge_row(const float* sums, int64_t stride, const float2* totals,
                                  int64_t totals_stride, int num_parts, int lane) {
  const float2 mine = totals[min(lane, num_parts - 1) * totals_stride];
  Vec<float, kVec> x[kAtOnce];
  const auto read = [&](int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      // Past the end the last part is read again, with weight 0: no branch between the loads.
      x[j] = *reinterpret_cast<const Vec<float, kVec>*>(
          sums + min(first + j, num_parts - 1) * stride + kVec * lane);
    }
  };
  read(0);  // together with the totals
  RowSum<kVec> row{};
  row.reference = warp_max(mine.x);
  // All parts empty: -inf - -inf must not become NaN.
  const float base = row.reference == -INFINITY ? 0.0f : row.reference;
  const float weight = lane < num_parts ? exp2_fast(mine.x - base) : 0.0f;
  row.total = warp_sum(weight * mine.y);
#pragma unroll 1
  for (int first = 0;;) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float w = __shfl_sync(0xffffffffu, weight, first + j);
#pragma unroll
      for (int i = 0; i < kVec; ++i) row.sums.data[i] += w * x[j].data[i];
    }
    first += kAtOnce;
    if (first >= num_parts) return row;
    read(first);
  }
}

// A warp's position in its ring.
struct SmallRing {
  uint32_t stages;
  uint32_t full;  // barriers, one a stage
  int stage = 0;
  int parity = 0;
};

// The warp's units of a piece: its part of the rows' sums to `sums` [kRows, kPartPitch] and
// `totals` [kRows], in shared memory.
template <class Traits, class T, class C>
__device__ void multiply_piece(const DecodePlan<Traits>& plan, const DecodePart& part,
                               SmallRing& ring, float* sums, float2* totals, int warp, int lane) {
  const PagedAttentionParams& params = plan.params();
  const int count = (part.unit_end - part.unit_begin - warp + Traits::kWarps - 1) / Traits::kWarps;
  DecodeSoftmax<Traits> softmax;
  softmax.reset();
  OutSums<Traits> out;
  out.reset();
  if (count > 0) {
    DecodeQuery<Traits, T> query;
    const auto place = plan.place_of(part, min(lane / 4, part.num_rows - 1));
    query.read(static_cast<const T*>(params.query) +
                   (part.sequence.query_start + place.token) * params.query_stride_token +
                   place.head * params.query_stride_head,
               lane / 4 < part.num_rows ? static_cast<int>(params.cache.head_dim) : 0, lane);
    SmallLoader<Traits> loader(plan, part, warp, lane);
    int stage = ring.stage;
#pragma unroll 1
    for (int i = 0; i < Traits::kStages && i < count; ++i) {
      loader.copy(i, ring.stages + stage * Traits::kStageBytes, ring.full + stage * 8);
      if (++stage == Traits::kStages) stage = 0;
    }
    query.convert();
    DecodeRows<Traits> rows;
    rows.load(plan, part, lane);
    int first = part.base_key + (part.unit_begin + warp) * Traits::kUnitKeys;
    char* values_of_ring = reinterpret_cast<char*>(sums) + Traits::kTensorBytes;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const uint32_t unit = ring.stages + ring.stage * Traits::kStageBytes;
      const uint32_t full = ring.full + ring.stage * 8;
      const auto at = unit_address<Traits>(unit, lane);
      wait_barrier(full, ring.parity);
      if (first < part.first_key || first + Traits::kUnitKeys > part.sequence.seq_len) {
        zero_hidden_values<Traits>(values_of_ring + ring.stage * Traits::kStageBytes,
                                   part.first_key - first, part.sequence.seq_len - first, lane);
      }
      UnitFragments<Traits> keys;
      UnitFragments<Traits> values;
      load_keys(keys, at.keys);
      load_values(values, at.values);
      UnitScores<Traits> scores;
      multiply_keys<Traits, C>(scores, query, keys);
      __syncwarp();  // the unit is in registers
      if (i + Traits::kStages < count) loader.copy(i + Traits::kStages, unit, full);
      if (++ring.stage == Traits::kStages) {
        ring.stage = 0;
        ring.parity ^= 1;
      }
      softmax.weigh(scores, out, plan, part, rows, first, lane);
      multiply_values<Traits, C>(out, scores, values);
      first += Traits::kWarps * Traits::kUnitKeys;
    }
    softmax.finish();
    __syncwarp();
  }
  // Elements as in OutSums.
  const int pair = lane % 4;
#pragma unroll
  for (int m = 0; m < OutSums<Traits>::kFragments; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = 16 * m + (Traits::kFloat8 ? 2 * (lane / 4) + i / 2 : lane / 4 + 8 * (i / 2));
      sums[(2 * pair + i % 2) * Traits::kPartPitch + d] = out.at[m][0][i];
    }
  }
  if (lane < 4) {
    totals[2 * lane] = make_float2(softmax.reference[0][0], softmax.sum[0][0]);
    totals[2 * lane + 1] = make_float2(softmax.reference[0][1], softmax.sum[0][1]);
  }
}

// Leaves a row of a piece; in the warp that is the last of the tile's to do so, the row of all
// pieces. Others: false.
template <class Traits, int kVec>
__device__ bool merge_pieces(const DecodePlan<Traits>& plan, const SmallPiece& piece, int row,
                             RowSum<kVec>& sum, int lane) {
  const SmallStates<Traits> states(plan.params(), plan.setup().slots);
  const int64_t stride = static_cast<int64_t>(plan.kv_heads()) * Traits::kRows;
  const int64_t of_head = piece.part.kv_head * Traits::kRows + row;
  const int64_t first = piece.first * stride + of_head;
  const int64_t mine = first + piece.number * stride;
  *reinterpret_cast<Vec<float, kVec>*>(states.sums + mine * Traits::kDim + kVec * lane) = sum.sums;
  if (lane == 0) states.totals[mine] = make_float2(sum.reference, sum.total);
  __syncwarp();
  bool last = false;
  if (lane == 0) {
    uint64_t* counter = states.counters + piece.part.seq * stride + of_head;
    last = arrive_at_counter(counter) == piece.count - 1;
    if (last) reset_counter(counter);
  }
  __syncwarp();
  if (__shfl_sync(0xffffffffu, static_cast<int>(last), 0) == 0) return false;
  sum = merge_row<kVec, 16>(states.sums + first * Traits::kDim, stride * Traits::kDim,
                            states.totals + first, stride, piece.count, lane);
  return true;
}

template <class T, int kVec>
__device__ void write_row(const PagedAttentionParams& params, int64_t token, int64_t head,
                          const RowSum<kVec>& sum, float v_scale, int lane) {
  const float factor = sum.total > 0.0f ? __fdividef(v_scale, sum.total) : 0.0f;
  if (kVec * lane < static_cast<int>(params.cache.head_dim)) {
    Vec<uint32_t, kVec / 2> packed;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      packed.data[i] = pack<T>(sum.sums.data[2 * i] * factor, sum.sums.data[2 * i + 1] * factor);
    }
    T* to = static_cast<T*>(params.out) + token * params.out_stride_token +
            head * params.out_stride_head + kVec * lane;
    *reinterpret_cast<Vec<uint32_t, kVec / 2>*>(to) = packed;
  }
  if (params.lse != nullptr && lane == 0) {
    params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
        sum.total > 0.0f ? (sum.reference + log2f(sum.total)) * kLn2 : -INFINITY;
  }
}

template <class T, class C, int kDim>
__global__ void __launch_bounds__(SmallTraits<T, C, kDim>::kThreads, 2)
    decode_small_kernel(const __grid_constant__ PagedAttentionParams params,
                        const __grid_constant__ DecodeSetup setup) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Traits = SmallTraits<T, C, kDim>;
  constexpr int kVec = kDim / 32;
  extern __shared__ __align__(1024) char rings[];
  __shared__ uint64_t barriers[Traits::kWarps][Traits::kStages];
  __shared__ float2 totals[Traits::kWarps][Traits::kRows];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  SmallRing ring{held(shared_address(rings) + warp * Traits::kRingBytes),
                 held(shared_address(barriers[warp]))};
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < Traits::kStages; ++stage) init_barrier(ring.full + stage * 8, 1);
    prefetch_maps(setup);
  }
  publish_shared_writes();
  __syncwarp();
  prefetch_operands(params);
  wait_previous_kernel();
  // Not before: kernels behind this one may start beside it and read what was written before it.
  allow_next_kernel();
  const DecodePlan<Traits> plan(params, setup);
  const SmallPlan<Traits> pieces(plan, lane);
  auto* parts = reinterpret_cast<float*>(rings);
#pragma unroll 1
  for (int number = pieces.first(); number < pieces.total();
       number += static_cast<int>(setup.slots)) {
    const SmallPiece piece = pieces.piece(number);
    const DecodePart& part = piece.part;
    // Before the copies: behind them it would wait for keys and values.
    const float v_scale = value_scale(params, part.kv_head);
    multiply_piece<Traits, T, C>(plan, part, ring, parts + warp * Traits::kPartFloats, totals[warp],
                                 warp, lane);
    __syncthreads();
#pragma unroll 1
    for (int row = warp; row < part.num_rows; row += Traits::kWarps) {
      auto sum =
          merge_row<kVec, Traits::kWarps>(parts + row * Traits::kPartPitch, Traits::kPartFloats,
                                          &totals[0][row], Traits::kRows, Traits::kWarps, lane);
      if (piece.count > 1 && !merge_pieces(plan, piece, row, sum, lane)) continue;
      const auto place = plan.place_of(part, row);
      write_row<T>(params, part.sequence.query_start + place.token, place.head, sum, v_scale, lane);
    }
    publish_shared_writes();  // the next piece's copies may take the rings
    __syncthreads();
  }
#else
  __trap();  // launch_decode_any_rows does not come here
#endif
}

}  // namespace pagedkv::cuda
