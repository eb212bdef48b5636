// What attention needs beyond cpu/simd/vec.h, in plain C++. Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Rows and vectors of a product's register tile, small enough for 16 registers of 128 bits.
inline constexpr int kPanelRows = 4;
inline constexpr int kPanelRowStep = 4;
inline constexpr int kPanelVecs = 1;
inline constexpr int kStreamRows = 1;

inline Vec held(Vec x) { return x; }

inline Vec iota() {
  return by_lane([](int i) { return static_cast<float>(i); });
}

// out[i] = sum of the lanes of the i-th vector.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  out[0] = reduce_add(a);
  out[1] = reduce_add(b);
  out[2] = reduce_add(c);
  out[3] = reduce_add(d);
}

// x[i][j] <-> x[j][i]
inline void transpose(Vec (&x)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float held = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = held;
    }
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
