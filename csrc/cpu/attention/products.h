// The two ways of multiplying: fp32 with fused multiply-add, and pairs of bf16 with the dot product
// of AVX512_BF16. A cell is 32 bits: one fp32, or two neighbouring bf16 (the lower one first),
// moved as a float whose value nobody looks at. A dot product over head_dim runs over dimension
// cells; the product with the values runs over key cells. Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

struct Fp32Product {
  static constexpr int kCell = 1;  // elements of a cell

  static Vec multiply_add(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }

  // kWidth cells of stored elements; those from the n-th element on are 0.
  template <class Stored>
  static Vec load_cells(const Stored* p) {
    return load(p);
  }
  template <class Stored>
  static Vec load_first_cells(const Stored* p, int n) {
    return load_first(p, n);
  }
  // Weights of keys [column, column + kWidth) into their row of cells.
  static void store_weights(float* row, int64_t column, Vec weights) {
    store(row + column, weights);
  }
};

#if defined(PAGEDKV_SIMD_AVX512_BF16)

inline __m512bh as_pairs(Vec x) { return (__m512bh)x.v; }
inline Vec as_cells(__m512i x) { return {_mm512_castsi512_ps(x)}; }

struct Bf16Product {
  static constexpr int kCell = 2;

  static Vec multiply_add(Vec a, Vec b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, as_pairs(a), as_pairs(b))};
  }

  static Vec load_cells(const BFloat16* p) { return as_cells(_mm512_loadu_si512(p)); }
  static Vec load_first_cells(const BFloat16* p, int n) {
    return as_cells(_mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, p));
  }
  // Every float8 is a bf16.
  template <class Float8>
  static Vec load_cells(const Float8* p) {
    return join(load(p), load(p + kWidth));
  }
  template <class Float8>
  static Vec load_first_cells(const Float8* p, int n) {
    const Vec low = n < kWidth ? load_first(p, n) : load(p);
    return join(low, n > kWidth ? load_first(p + kWidth, n - kWidth) : zero());
  }
  static Vec join(Vec low, Vec high) { return {(__m512)_mm512_cvtne2ps_pbh(high.v, low.v)}; }
  static void store_weights(float* row, int64_t column, Vec weights) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(row) + column),
                        (__m256i)_mm512_cvtneps_pbh(weights.v));
  }

  // From two keys' cells of 32 dimensions to key cells of the first and the last 16 of them.
  static Vec pair_low(Vec even, Vec odd) {
    const __m512i order =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return pair(even, order, odd);
  }
  static Vec pair_high(Vec even, Vec odd) {
    const __m512i order =
        _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                         22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return pair(even, order, odd);
  }
  static Vec pair(Vec even, __m512i order, Vec odd) {
    return as_cells(
        _mm512_permutex2var_epi16(_mm512_castps_si512(even.v), order, _mm512_castps_si512(odd.v)));
  }
};

#endif

// A number known at compile time.
template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// f(Count of min(n, kMost)), n >= 1.
template <int kMost, class F>
inline void with_count(int64_t n, const F& f) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, f);
  }
  f(Count<kMost>{});
}

// acc[r][v] += sum over depth cells of a[r, k] * b[k, v]. Rows of a are kRowStride apart; b's rows
// follow one another.
template <class Product, int kRows, int kVecs>
inline void multiply_panel(const float* a, const float* b, int64_t depth,
                           Vec (&acc)[kRows][kVecs]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec column[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) column[v] = load(b + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec element = broadcast(a[r * kRowStride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = Product::multiply_add(element, column[v], acc[r][v]);
      }
    }
    ++a;
    b += kVecs * kWidth;
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
