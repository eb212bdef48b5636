// The vector interface of vec.h on AVX-512 (F, BW, DQ, VL): 16 lanes. Included by vec.h only, for
// avx512 and again for avx512_bf16.
#pragma once

// GCC 12's own AVX-512 header passes deliberately undefined registers as pass-through operands,
// and warns about it at every caller.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace pagedkv::cpu::PAGEDKV_ISA {

inline constexpr int kWidth = 16;

struct Vec {
  __m512 v;
};

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec swap_neighbours(Vec a) { return {_mm512_permute_ps(a.v, 0b10110001)}; }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline Vec scale_exp2(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

// ---- widening: raw lanes to fp32 ----

inline Vec widen_bfloat16(__m256i raw) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec widen_float16(__m256i raw) { return {_mm512_cvtph_ps(raw)}; }
// e5m2 is the upper half of an fp16.
inline Vec widen_float8_e5m2(__m128i raw) {
  return widen_float16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(raw), 8));
}
// e4m3 placed into the bits of an fp16 is 2^8 too small, subnormals included; only NaN is special.
inline Vec widen_float8_e4m3(__m128i raw) {
  const __m256i wide = _mm256_cvtepu8_epi16(raw);
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
  __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
  half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
}

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const BFloat16* p) {
  return widen_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load(const Float16* p) {
  return widen_float16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load(const Float8E4M3* p) {
  return widen_float8_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const Float8E5M2* p) {
  return widen_float8_e5m2(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline Vec load_first(const BFloat16* p, int n) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline Vec load_first(const Float16* p, int n) {
  return widen_float16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline Vec load_first(const Float8E4M3* p, int n) {
  return widen_float8_e4m3(_mm_maskz_loadu_epi8(first_lanes(n), p));
}
inline Vec load_first(const Float8E5M2* p, int n) {
  return widen_float8_e5m2(_mm_maskz_loadu_epi8(first_lanes(n), p));
}

// ---- narrowing: fp32 to raw lanes, to nearest even ----

inline __m256i narrow_bfloat16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}
inline __m256i narrow_float16(Vec x) {
  return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// narrow_magnitude of element.h in every lane; kNan and the saturation are the float8 formats'.
template <int kMantissa, int kBias>
inline __m128i narrow_float8(Vec x, float largest) {
  constexpr int kShift = 23 - kMantissa;
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512 magnitude = _mm512_min_ps(_mm512_set1_ps(largest), _mm512_abs_ps(x.v));
  const __m512i whole = _mm512_castps_si512(magnitude);
  const __m512i magic = _mm512_set1_epi32((128 - kBias + kShift) << 23);
  const __m512i small = _mm512_sub_epi32(
      _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_castsi512_ps(magic))), magic);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(whole, kShift), _mm512_set1_epi32(1));
  const __m512i offset = _mm512_set1_epi32((1 << (kShift - 1)) - 1 - ((127 - kBias) << 23));
  const __m512i normal =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(whole, offset), odd), kShift);
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(whole, _mm512_set1_epi32((128 - kBias) << 23));
  __m512i narrow = _mm512_mask_mov_epi32(normal, is_small, small);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  narrow = _mm512_mask_mov_epi32(narrow, nan, _mm512_set1_epi32(0x7f));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(narrow, sign));
}
inline __m128i narrow_float8_e4m3(Vec x) { return narrow_float8<3, 7>(x, kMaxFloat8E4M3); }
inline __m128i narrow_float8_e5m2(Vec x) { return narrow_float8<2, 15>(x, kMaxFloat8E5M2); }

inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(BFloat16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bfloat16(x));
}
inline void store(Float16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_float16(x));
}
inline void store(Float8E4M3* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_float8_e4m3(x));
}
inline void store(Float8E5M2* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_float8_e5m2(x));
}
inline void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline void store_first(BFloat16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bfloat16(x));
}
inline void store_first(Float16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_float16(x));
}
inline void store_first(Float8E4M3* p, Vec x, int n) {
  _mm_mask_storeu_epi8(p, first_lanes(n), narrow_float8_e4m3(x));
}
inline void store_first(Float8E5M2* p, Vec x, int n) {
  _mm_mask_storeu_epi8(p, first_lanes(n), narrow_float8_e5m2(x));
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
