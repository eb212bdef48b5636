// Online softmax of a warp's tile of keys x rows, base 2. A lane holds rows 8 t + 2 q and + 1
// (q = lane % 4) of each row tile t, for keys r and r + 8 (r = lane / 4) of each key tile.
//
// Invariants: reference is what the row's weights 2^(logit - reference) are relative to, -inf until
// a key has been seen, the same in all lanes of the row; it lags behind the true maximum by at most
// kSlack, so that the lanes seldom need to agree on a new one (weights stay below 2^kSlack, safe in
// fp16); sum is this lane's part only.
#pragma once

#include "cuda/attention/decode_products.cuh"
#include "cuda/attention/sequence.cuh"

namespace pagedkv::cuda {

constexpr float kDecodeSlack = 8.0f;

// What a lane knows about its rows.
template <class Traits>
struct DecodeRows {
  float slope[Traits::kRowTiles][2];  // ALiBi, times log2(e)
  LogitScale scale;
  bool bare;      // the logit is scale.factor * dot product, factor > 0
  int all_first;  // keys [all_first, all_end) are visible to all rows
  int all_end;

  // Whether some row does not see all of a unit's keys, from `first` on.
  __device__ bool masks(int first) const {
    return first < all_first || first + Traits::kUnitKeys > all_end;
  }
  // Row i of the lane's two of a row tile; the last one's for those behind it.
  static __device__ auto place_of(const DecodePlan<Traits>& plan, const DecodePart& part, int t,
                                  int i, int lane) {
    return plan.place_of(part, min(8 * t + 2 * (lane % 4) + i, part.num_rows - 1));
  }

  __device__ void load(const DecodePlan<Traits>& plan, const DecodePart& part, int lane) {
    const PagedAttentionParams& params = plan.params();
    scale = {plan.setup().logit_factor, params.soft_cap * kLog2E};
    if (params.cache.k_scale != nullptr) {
      scale.factor *= params.cache.k_scale[part.kv_head * params.cache.k_scale_stride];
    }
    const bool has_alibi = params.alibi_slopes != nullptr;
    bare = scale.cap <= 0.0f && !has_alibi && scale.factor > 0.0f;
#pragma unroll
    for (int t = 0; t < Traits::kRowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        slope[t][i] = 0.0f;
        if (has_alibi) {
          const int64_t head = place_of(plan, part, t, i, lane).head;
          slope[t][i] = params.alibi_slopes[head * params.alibi_slopes_stride] * kLog2E;
        }
      }
    }
    const int window = plan.setup().window;
    const int last = part.sequence.position(plan.place_of(part, part.num_rows - 1).token);
    all_first = window > 0 ? max(part.first_key, last - window + 1) : part.first_key;
    all_end = part.sequence.seq_len;
    if (params.causal) all_end = part.sequence.position(plan.place_of(part, 0).token) + 1;
  }
};

template <class Traits>
struct DecodeSoftmax {
  static constexpr int kTiles = Traits::kRowTiles;
  static constexpr int kKeyTiles = UnitScores<Traits>::kKeyTiles;
  float reference[kTiles][2];
  float sum[kTiles][2];

  __device__ void reset() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      reference[t][0] = reference[t][1] = -INFINITY;
      sum[t][0] = sum[t][1] = 0.0f;
    }
  }

  // Scores of keys first .. first + kUnitKeys to weights, in place; older output sums are rescaled.
  __device__ void weigh(UnitScores<Traits>& scores, OutSums<Traits>& out,
                        const DecodePlan<Traits>& plan, const DecodePart& part,
                        const DecodeRows<Traits>& rows, int first, int lane) {
    // A bare scale is left to the exponent's multiply-add.
    const float factor = rows.bare ? rows.scale.factor : 1.0f;
    if (!rows.bare || rows.masks(first)) {
      mask(scores, plan, part, rows, first, static_cast<int>(held(lane)));
    }
    float highest[kTiles][2];
    bool above = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        highest[t][i] = -INFINITY;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          highest[t][i] = fmaxf(highest[t][i], fmaxf(scores.at[j][t][i], scores.at[j][t][i + 2]));
        }
        highest[t][i] *= factor;
        above |= highest[t][i] > reference[t][i] + kDecodeSlack;
      }
    }
    if (__any_sync(0xffffffffu, above)) raise(highest, out);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // All keys hidden so far: every logit is -inf, and -inf - -inf must not become NaN.
        const float base = reference[t][i] == -INFINITY ? 0.0f : reference[t][i];
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int half = 0; half < 4; half += 2) {
            float& x = scores.at[j][t][i + half];
            x = exp2_fast(fmaf(x, factor, -base));
            sum[t][i] += x;
          }
        }
      }
    }
  }

  // The rows' sums over the eight lanes that share them, in all eight.
  __device__ void finish() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          sum[t][i] += __shfl_xor_sync(0xffffffffu, sum[t][i], offset);
        }
      }
    }
  }

 private:
  // Logits proper unless they are bare, -inf where the key is hidden from the row. Seldom needed by
  // most calls: what it takes to know is worked out here, from a `lane` that the compiler does not
  // know, or it would keep all of it in registers.
  __device__ static void mask(UnitScores<Traits>& scores, const DecodePlan<Traits>& plan,
                              const DecodePart& part, const DecodeRows<Traits>& rows, int first_key,
                              int lane) {
    const int window = plan.setup().window;
    const int key = first_key + lane / 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = DecodeRows<Traits>::place_of(plan, part, t, i, lane).token;
        const int position = part.sequence.position(token);
        const int end = plan.params().causal ? position + 1 : part.sequence.seq_len;
        const int first = window > 0 ? max(part.first_key, position - window + 1) : part.first_key;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = scores.at[j][t][i + 2 * half];
            const int at = key + 16 * j + 8 * half;
            if (!rows.bare) {
              x = rows.scale.fast_logit(x);
              x += rows.slope[t][i] * static_cast<float>(at - position);
            }
            if (at < first || at >= end) x = -INFINITY;
          }
        }
      }
    }
  }

  // Moves the references up to the highest logits seen.
  __device__ void raise(float (&highest)[kTiles][2], OutSums<Traits>& out) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float rescale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& high = highest[t][i];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, offset));
        }
        const float next = fmaxf(reference[t][i], high);
        rescale[i] = reference[t][i] == -INFINITY ? 0.0f : exp2_fast(reference[t][i] - next);
        reference[t][i] = next;
        sum[t][i] *= rescale[i];
      }
#pragma unroll
      for (int m = 0; m < OutSums<Traits>::kFragments; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out.at[m][t][i] *= rescale[i % 2];
      }
    }
  }
};

}  // namespace pagedkv::cuda
