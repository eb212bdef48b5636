// The step of OnlineSoftmax in prefill. Nearly every step has keys that all rows see, and no
// soft-cap or ALiBi: it has nothing but maximum, exponential and sum; for the others the logits are
// made first, each rule in a loop of its own, so that no branch stands between the registers.
#pragma once

#include "cuda/attention/softmax.cuh"
#include "cuda/device/wgmma.cuh"

namespace pagedkv::cuda {

// As OnlineSoftmax::weigh; the logit is score * factor, factor > 0.
template <int kTiles>
__device__ __forceinline__ bool weigh_visible(OnlineSoftmax& softmax, float (&scores)[kTiles][4],
                                              float factor, float (&rescale)[2]) {
  float highest[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // Two chains a row, so that they need not wait for one another.
    float even = fmaxf(scores[0][2 * row], scores[0][2 * row + 1]);
    float odd = fmaxf(scores[1][2 * row], scores[1][2 * row + 1]);
#pragma unroll
    for (int n = 2; n < kTiles; n += 2) {
      even = fmaxf(even, fmaxf(scores[n][2 * row], scores[n][2 * row + 1]));
      odd = fmaxf(odd, fmaxf(scores[n + 1][2 * row], scores[n + 1][2 * row + 1]));
    }
    highest[row] = fmaxf(even, odd);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    highest[row] = fmaxf(highest[row], __shfl_xor_sync(0xffffffffu, highest[row], 1));
    highest[row] = fmaxf(highest[row], __shfl_xor_sync(0xffffffffu, highest[row], 2));
    highest[row] *= factor;
  }
  const bool moved = __any_sync(0xffffffffu, highest[0] > softmax.reference[0] + kSlack ||
                                                 highest[1] > softmax.reference[1] + kSlack);
  if (moved) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float next = fmaxf(softmax.reference[row], highest[row]);
      rescale[row] =
          softmax.reference[row] == -INFINITY ? 0.0f : exp2_fast(softmax.reference[row] - next);
      softmax.reference[row] = next;
      softmax.sum[row] *= rescale[row];
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float base = softmax.reference[row] == -INFINITY ? 0.0f : softmax.reference[row];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 2 * row; i < 2 * row + 2; ++i) {
        scores[n][i] = exp2_fast(fmaf(scores[n][i], factor, -base));
        sums[i % 2] += scores[n][i];
      }
    }
    softmax.sum[row] += sums[0] + sums[1];
  }
  return moved;
}

// Weights relative to the present reference, whatever the scores: no maximum, so the exponentials
// start at once. False if one may be too large (for T, or for the sums): the scores are lost then,
// and the step must be made again and go through weigh_visible. For rows that have seen a key.
template <class T, int kTiles>
__device__ __forceinline__ bool weigh_boldly(OnlineSoftmax& softmax, float (&scores)[kTiles][4],
                                             float factor) {
  constexpr float kMost = std::is_same_v<T, __half> ? 0x1p14f : 0x1p60f;
  float sums[2][2] = {};
  write_out<4 * kTiles>([&](int i) {
    const int row = i % 4 / 2;
    float& score = scores[i / 4][i % 4];
    score = exp2_fast(fmaf(score, factor, -softmax.reference[row]));
    sums[row][i % 2] += score;
  });
  const float low = sums[0][0] + sums[0][1];
  const float high = sums[1][0] + sums[1][1];
  if (__any_sync(0xffffffffu, !(low <= kMost && high <= kMost))) return false;
  softmax.sum[0] += low;
  softmax.sum[1] += high;
  return true;
}

// Any step: hides keys and applies soft-cap and ALiBi as needed.
template <int kTiles>
__device__ __forceinline__ bool weigh_any(OnlineSoftmax& softmax, float (&scores)[kTiles][4],
                                          const LogitScale& scale, const TileRows& rows,
                                          bool has_alibi, int first, int quad,
                                          float (&rescale)[2]) {
  float factor = scale.factor;
  if (scale.cap > 0.0f || has_alibi || factor <= 0.0f) {
    if (scale.cap > 0.0f) {
      write_out<4 * kTiles>(
          [&](int i) { scores[i / 4][i % 4] = scale.fast_logit(scores[i / 4][i % 4]); });
    } else {
      write_out<4 * kTiles>([&](int i) { scores[i / 4][i % 4] *= factor; });
    }
    factor = 1.0f;
    if (has_alibi) {
      write_out<4 * kTiles>([&](int i) {
        const int row = i % 4 / 2;
        const int key = first + i / 4 * 8 + 2 * quad + i % 2;
        scores[i / 4][i % 4] += rows.slope[row] * static_cast<float>(key - rows.position[row]);
      });
    }
  }
  if (first < rows.all_first || first + 8 * kTiles > rows.all_end) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int hidden = rows.keys[row].first - first - 2 * quad;
      const int seen = rows.keys[row].end - first - 2 * quad;
      write_out<2 * kTiles>([&](int i) {
        const int key = i / 2 * 8 + i % 2;
        if (key < hidden || key >= seen) scores[i / 2][2 * row + i % 2] = -INFINITY;
      });
    }
  }
  return weigh_visible(softmax, scores, factor, rescale);
}

}  // namespace pagedkv::cuda
