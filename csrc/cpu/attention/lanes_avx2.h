// What attention needs of AVX2 beyond cpu/simd/vec.h. Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Rows and vectors of a product's register tile: 12 accumulators, 2 operands, 1 broadcast.
inline constexpr int kPanelRows = 6;
inline constexpr int kPanelRowStep = 2;
inline constexpr int kPanelVecs = 2;
// Rows of a streaming step: 4 keys x 2 rows of accumulators.
inline constexpr int kStreamRows = 2;

// x, out of the compiler's sight: GCC would rather load an operand again for each of its uses than
// keep it in a register, and loads are what the streaming loops have too many of.
inline Vec held(Vec x) {
  asm("" : "+x"(x.v));
  return x;
}

inline Vec iota() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }

// out[i] = sum of the lanes of the i-th vector.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

// x[i][j] <-> x[j][i]: pairs of rows, pairs of pairs, then the halves.
inline void transpose(Vec (&x)[8]) {
  __m256 t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i].v, x[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  __m256 u[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    x[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
