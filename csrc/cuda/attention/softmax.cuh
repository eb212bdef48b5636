// Online softmax of a warp's 16-row tile, base 2. A lane holds rows r and r + 8 (r = lane / 4).
//
// Invariants: reference is what the row's weights 2^(logit - reference) are relative to, -inf until
// a key has been seen; it lags behind the true maximum by at most kSlack, so that the sums are
// rescaled rarely (weights stay below 2^kSlack, safe in fp16); sum is this lane's part only.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/device/mma.cuh"

namespace pagedkv::cuda {

constexpr float kSlack = 8.0f;

// What a lane knows about its two rows.
struct TileRows {
  float slope[2];  // ALiBi, times log2(e)
  int position[2];
  KeyRange keys[2];  // visible
  int all_first;     // keys [all_first, all_end) are visible to all rows of the tile
  int all_end;
};

struct OnlineSoftmax {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};

  // Scores (fragments of keys first .. first + 8 kTiles) to weights, in place; returns through
  // `rescale` the factors that older sums must take, and whether they differ from 1.
  template <int kTiles>
  __device__ bool weigh(float (&scores)[kTiles][4], const LogitScale& scale, const TileRows& rows,
                        bool has_alibi, int first, int quad, float (&rescale)[2]) {
    const bool masked = first < rows.all_first || first + 8 * kTiles > rows.all_end;
    // Without soft-cap and ALiBi the scale is left to the exponent's multiply-add.
    const bool bare = scale.cap <= 0.0f && !has_alibi && scale.factor > 0.0f;
    const float factor = bare ? scale.factor : 1.0f;
    if (!bare) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = scale.fast_logit(scores[n][i]);
      }
    }
    if (has_alibi || masked) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = i / 2;
          const int key = first + n * 8 + 2 * quad + i % 2;
          scores[n][i] += rows.slope[row] * static_cast<float>(key - rows.position[row]);
          if (key < rows.keys[row].first || key >= rows.keys[row].end) scores[n][i] = -INFINITY;
        }
      }
    }
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) highest[i / 2] = fmaxf(highest[i / 2], scores[n][i]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      highest[row] = fmaxf(highest[row], __shfl_xor_sync(0xffffffffu, highest[row], 1));
      highest[row] = fmaxf(highest[row], __shfl_xor_sync(0xffffffffu, highest[row], 2));
      highest[row] *= factor;
    }
    const bool moved = __any_sync(
        0xffffffffu, highest[0] > reference[0] + kSlack || highest[1] > reference[1] + kSlack);
    if (moved) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float next = fmaxf(reference[row], highest[row]);
        rescale[row] = reference[row] == -INFINITY ? 0.0f : exp2_fast(reference[row] - next);
        reference[row] = next;
        sum[row] *= rescale[row];
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // All keys hidden so far: every logit is -inf, and -inf - -inf must not become NaN.
      const float base = reference[row] == -INFINITY ? 0.0f : reference[row];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 2 * row; i < 2 * row + 2; ++i) {
          scores[n][i] = exp2_fast(fmaf(scores[n][i], factor, -base));
          sum[row] += scores[n][i];
        }
      }
    }
    return moved;
  }

  // The rows' sums over the four lanes that share them, in all four.
  __device__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
    }
  }
};

}  // namespace pagedkv::cuda
