// A row of logits as chunks of 512, each read by one warp: 16 of its elements are a lane's, in
// fp32, with the row's edits made. Keys: integers with the order of the logits.
#pragma once

#include <cfloat>

#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"
#include "pagedkv/kernels/sampling_params.h"

namespace pagedkv::cuda {

constexpr int kChunk = static_cast<int>(kChunkLogits);
constexpr int kLaneLogits = kChunk / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Largest of both; NaN if either is.
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Order of the values, NaN of positive sign above infinity; equals, -0 and 0 too, have one key.
__device__ inline int key_of(float x) {
  const int bits = __float_as_int(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ inline float value_of(int key) {
  return __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
}

// Low bits that are the same in all keys of one sign of values that were stored as T.
template <class T>
constexpr int kSpareBits = 0;
template <>
constexpr int kSpareBits<__nv_bfloat16> = 16;
template <>
constexpr int kSpareBits<__half> = 13;

template <class T>
struct LogitRow {
  static constexpr int kVec = kVecElements<T>;

  const T* logits;  // [vocab_size]
  int vocab_size;
  bool is_aligned;      // so that it is read by 16 bytes
  const int32_t* ids;   // of the row's edits, ascending
  const float* values;  // [num_edits, 3]
  int num_edits;
  bool is_limited;

  __device__ LogitRow(const LogitRows& rows, int64_t row)
      : logits(static_cast<const T*>(rows.logits) + row * rows.stride_row),
        vocab_size(static_cast<int>(rows.vocab_size)),
        is_aligned(reinterpret_cast<uintptr_t>(logits) % 16 == 0),
        ids(nullptr),
        values(nullptr),
        num_edits(0),
        is_limited(false) {
    if (rows.edits.start_loc == nullptr) return;
    const int64_t begin = rows.edits.start_loc[row];
    num_edits = rows.edits.start_loc[row + 1] - static_cast<int>(begin);
    ids = rows.edits.ids + begin;
    values = rows.edits.values + 3 * begin;
    is_limited = rows.edits.is_limited[row] != 0;
  }

  __device__ bool is_edited() const { return num_edits > 0 || is_limited; }

  // Place in its chunk of a lane's i-th element.
  __device__ static int place_of(int lane, int i) {
    return (i / kVec * 32 + lane) * kVec + i % kVec;
  }

  // A lane's elements of a chunk as they are stored: on their way while others are worked on.
  struct Stored {
    Vec<T, kVec> vectors[kLaneLogits / kVec];
  };

  // -inf beyond the vocabulary.
  __device__ Stored load(int chunk) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const T* from = logits + static_cast<int64_t>(chunk) * kChunk;
    const int size = vocab_size - chunk * kChunk;
    Stored stored;
    if (is_aligned && size >= kChunk) {
#pragma unroll
      for (int i = 0; i < kLaneLogits; i += kVec) {
        stored.vectors[i / kVec] = load_vec<kVec>(from + place_of(lane, i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneLogits; ++i) {
        const int place = place_of(lane, i);
        stored.vectors[i / kVec].data[i % kVec] =
            place < size ? from[place] : from_float<T>(-INFINITY);
      }
    }
    return stored;
  }

  // In fp32, with the row's edits.
  __device__ void widen_stored(int chunk, const Stored& stored, float (&x)[kLaneLogits]) const {
#pragma unroll
    for (int i = 0; i < kLaneLogits; i += kVec) {
      const Vec<float, kVec> some = widen(stored.vectors[i / kVec]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[i + j] = some.data[j];
    }
    if (is_edited()) edit(chunk, static_cast<int>(threadIdx.x) % 32, x);
  }

  __device__ void read(int chunk, float (&x)[kLaneLogits]) const {
    widen_stored(chunk, load(chunk), x);
  }

  __device__ void edit(int chunk, int lane, float (&x)[kLaneLogits]) const {
    const int first_id = chunk * kChunk;
    int low = 0;
    int high = num_edits;  // ids before low are smaller than first_id, those from high on are not
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ids[middle] < first_id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    unsigned listed = 0;
    for (int at = low; at < num_edits && ids[at] - first_id < kChunk; ++at) {
      const float bias = values[3 * at];
      const float factor = values[3 * at + 1];
      const float taken = values[3 * at + 2];
      const int place = ids[at] - first_id;
#pragma unroll
      for (int i = 0; i < kLaneLogits; ++i) {
        if (place_of(lane, i) != place) continue;
        const float biased = x[i] + bias;
        x[i] = __fsub_rn(biased > 0.0f ? biased / factor : __fmul_rn(biased, factor), taken);
        listed |= 1u << i;
      }
    }
    if (!is_limited) return;
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) {
      // Not NaN, nor infinity: they stay to be seen.
      if ((listed >> i & 1) == 0 && x[i] < INFINITY) x[i] = -INFINITY;
    }
  }
};

// Largest of a chunk in all lanes, as a key.
__device__ inline int chunk_max_key(const float (&x)[kLaneLogits]) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kLaneLogits; ++i) largest = max_or_nan(largest, x[i]);
  return __reduce_max_sync(kAllLanes, key_of(largest));
}

// e^((x - largest) / temperature), as 2^((x - largest) * scale): 1 for the largest. The difference
// comes first, so that a tiny temperature makes it 0, and never NaN.
__device__ inline float weight_of(float x, float largest, float scale) {
  return exp2_fast(__fmul_rn(x - largest, scale));
}

constexpr float kLog2E = 1.44269504f;

// Of weight_of. Finite, so that the largest logit, which is 0 from itself, always counts.
__device__ inline float scale_of(float inverse_temperature) {
  return fminf(inverse_temperature * kLog2E, FLT_MAX);
}

}  // namespace pagedkv::cuda
