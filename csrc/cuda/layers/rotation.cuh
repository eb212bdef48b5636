// The rotation of pairs of elements, by the same operations in every kernel that rotates, so that
// fused and plain ops agree bit for bit.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

// (x, y) becomes (x c - y s, y c + x s).
__device__ inline void rotate(float& x, float& y, float cosine, float sine) {
  const float rotated = fmaf(-y, sine, x * cosine);
  y = fmaf(y, cosine, x * sine);
  x = rotated;
}

// Cosines and sines of N neighbouring pairs at one position. N is a multiple of 4.
template <int N>
struct Angles {
  float cosines[N];
  float sines[N];
};

// table_row: the position's cosines, then its sines; 16-byte aligned, as is every offset.
template <int N>
__device__ Angles<N> load_angles(const float* table_row, int half, int pair) {
  Angles<N> angles;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const Vec<float, 4> cosines = load_vec<4>(table_row + pair + i);
    const Vec<float, 4> sines = load_vec<4>(table_row + half + pair + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      angles.cosines[i + j] = cosines.data[j];
      angles.sines[i + j] = sines.data[j];
    }
  }
  return angles;
}

// Pairs of x and y, halves of a head against each other.
template <int N>
__device__ void rotate_wide(Vec<float, N>& x, Vec<float, N>& y, const Angles<N>& angles) {
#pragma unroll
  for (int i = 0; i < N; ++i) rotate(x.data[i], y.data[i], angles.cosines[i], angles.sines[i]);
}

template <class T, int N>
__device__ void rotate_halves(Vec<T, N>& x, Vec<T, N>& y, const Angles<N>& angles) {
  Vec<float, N> a = widen(x);
  Vec<float, N> b = widen(y);
  rotate_wide(a, b, angles);
  x = narrow<T>(a);
  y = narrow<T>(b);
}

constexpr int kRotationThreads = 256;  // of a block, at most
constexpr int kRotationHeads = 2;      // that a thread has in flight

// Whether the table and half a head can be read 16 bytes at a time by one block.
template <class T>
bool rotation_fits_vectors(int64_t half, const float* table, int64_t table_stride) {
  constexpr int64_t kWide = kVecElements<T>;
  return half % kWide == 0 && half / kWide <= kRotationThreads &&
         aligned_to(16, {table}, {table_stride * 4, half * 4});
}

// x: the vectors of half a head, y: heads, as many as make kRotationHeads a thread.
template <class T>
dim3 rotation_block(int64_t half, int64_t total_heads) {
  const int64_t vectors = half / kVecElements<T>;
  const int64_t heads = min(ceil_div(total_heads, kRotationHeads), kRotationThreads / vectors);
  return dim3(static_cast<unsigned>(vectors), static_cast<unsigned>(heads));
}

}  // namespace pagedkv::cuda
