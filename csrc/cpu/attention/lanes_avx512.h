// What attention needs of AVX-512 beyond cpu/simd/vec.h. Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Rows and vectors of a product's register tile: 24 accumulators, 2 operands, 1 broadcast.
inline constexpr int kPanelRows = 12;
inline constexpr int kPanelRowStep = 4;
inline constexpr int kPanelVecs = 2;
// Rows of a streaming step: 4 keys x 4 rows of accumulators.
inline constexpr int kStreamRows = 4;

// x, out of the compiler's sight: GCC would rather load an operand again for each of its uses than
// keep it in a register, and loads are what the streaming loops have too many of.
inline Vec held(Vec x) {
  asm("" : "+v"(x.v));
  return x;
}

inline Vec iota() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

// out[i] = sum of the lanes of the i-th vector. Blends, which run on every port, take the place of
// every second shuffle.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  // Lanes of 128 bits: a0 + a2, a1 + a3, b2 + b0, b3 + b1.
  const __m512 ab = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a.v, b.v),
                                  _mm512_shuffle_ps(a.v, b.v, _MM_SHUFFLE(1, 0, 3, 2)));
  const __m512 cd = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, c.v, d.v),
                                  _mm512_shuffle_ps(c.v, d.v, _MM_SHUFFLE(1, 0, 3, 2)));
  // a, c, b, d.
  const __m512 swapped = _mm512_permute_ps(_mm512_mask_blend_ps(0xaaaa, cd, ab), 0xb1);
  const __m512 acbd = _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, ab, cd), swapped);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(acbd), _mm512_extractf32x8_ps(acbd, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_storeu_ps(out, _mm_permute_ps(sums, _MM_SHUFFLE(3, 1, 2, 0)));
}

// x[i][j] <-> x[j][i]: pairs of rows, pairs of pairs, then the 4x4 lanes of 128 bits.
inline void transpose(Vec (&x)[16]) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i].v = _mm512_shuffle_ps(t[i], t[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    x[i + 1].v = _mm512_shuffle_ps(t[i], t[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    x[i + 2].v = _mm512_shuffle_ps(t[i + 1], t[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    x[i + 3].v = _mm512_shuffle_ps(t[i + 1], t[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(x[i].v, x[i + 4].v, 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(x[i].v, x[i + 4].v, 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(x[i + 8].v, x[i + 12].v, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(x[i + 8].v, x[i + 12].v, 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    x[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    x[i + 4].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    x[i + 12].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
