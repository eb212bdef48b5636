// The vector interface of vec.h on AVX2, FMA and F16C: 8 lanes. Included by vec.h only.
#pragma once

namespace pagedkv::cpu::avx2 {

inline constexpr int kWidth = 8;

struct Vec {
  __m256 v;
};

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec swap_neighbours(Vec a) { return {_mm256_permute_ps(a.v, 0b10110001)}; }
inline float reduce_add(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float reduce_max(Vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec scale_exp2(Vec x, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

// ---- widening: raw lanes to fp32 ----

inline Vec widen_bfloat16(__m128i raw) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline Vec widen_float16(__m128i raw) { return {_mm256_cvtph_ps(raw)}; }
// e5m2 is the upper half of an fp16. Of the raw register, the lower 8 bytes count.
inline Vec widen_float8_e5m2(__m128i raw) {
  return widen_float16(_mm_slli_epi16(_mm_cvtepu8_epi16(raw), 8));
}
// e4m3 placed into the bits of an fp16 is 2^8 too small, subnormals included; only NaN is special.
inline Vec widen_float8_e4m3(__m128i raw) {
  const __m128i wide = _mm_cvtepu8_epi16(raw);
  const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  __m128i half = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));
  half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
  return {_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f))};
}

// Lanes 0 .. n - 1 all ones.
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m128i load_first_bytes(const void* p, int bytes) {
  alignas(16) unsigned char buffer[16] = {};
  std::memcpy(buffer, p, static_cast<size_t>(bytes));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
inline void store_first_bytes(void* p, __m128i raw, int bytes) {
  alignas(16) unsigned char buffer[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), raw);
  std::memcpy(p, buffer, static_cast<size_t>(bytes));
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const BFloat16* p) {
  return widen_bfloat16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const Float16* p) {
  return widen_float16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const Float8E4M3* p) {
  return widen_float8_e4m3(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const Float8E5M2* p) {
  return widen_float8_e5m2(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_first(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
inline Vec load_first(const BFloat16* p, int n) {
  return widen_bfloat16(load_first_bytes(p, 2 * n));
}
inline Vec load_first(const Float16* p, int n) { return widen_float16(load_first_bytes(p, 2 * n)); }
inline Vec load_first(const Float8E4M3* p, int n) {
  return widen_float8_e4m3(load_first_bytes(p, n));
}
inline Vec load_first(const Float8E5M2* p, int n) {
  return widen_float8_e5m2(load_first_bytes(p, n));
}

// ---- narrowing: fp32 to raw lanes, to nearest even ----

// The low 16 bits of eight 32-bit lanes (each at most 0xffff), in order.
inline __m128i pack_low16(__m256i lanes) {
  return _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}
inline __m128i narrow_bfloat16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  return pack_low16(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan));
}
inline __m128i narrow_float16(Vec x) {
  return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// narrow_magnitude of element.h in every lane; the result is in the lower 8 bytes.
template <int kMantissa, int kBias>
inline __m128i narrow_float8(Vec x, float largest) {
  constexpr int kShift = 23 - kMantissa;
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const __m256 magnitude = _mm256_min_ps(_mm256_set1_ps(largest), abs(x).v);
  const __m256i whole = _mm256_castps_si256(magnitude);
  const __m256i magic = _mm256_set1_epi32((128 - kBias + kShift) << 23);
  const __m256i small = _mm256_sub_epi32(
      _mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_castsi256_ps(magic))), magic);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(whole, kShift), _mm256_set1_epi32(1));
  const __m256i offset = _mm256_set1_epi32((1 << (kShift - 1)) - 1 - ((127 - kBias) << 23));
  const __m256i normal =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(whole, offset), odd), kShift);
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - kBias) << 23), whole);
  __m256i narrow = _mm256_blendv_epi8(normal, small, is_small);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  narrow = _mm256_blendv_epi8(narrow, _mm256_set1_epi32(0x7f), nan);
  const __m128i words = pack_low16(_mm256_or_si256(narrow, sign));
  return _mm_packus_epi16(words, words);
}
inline __m128i narrow_float8_e4m3(Vec x) { return narrow_float8<3, 7>(x, kMaxFloat8E4M3); }
inline __m128i narrow_float8_e5m2(Vec x) { return narrow_float8<2, 15>(x, kMaxFloat8E5M2); }

inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(BFloat16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bfloat16(x));
}
inline void store(Float16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_float16(x));
}
inline void store(Float8E4M3* p, Vec x) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), narrow_float8_e4m3(x));
}
inline void store(Float8E5M2* p, Vec x) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), narrow_float8_e5m2(x));
}
inline void store_first(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x.v); }
inline void store_first(BFloat16* p, Vec x, int n) {
  store_first_bytes(p, narrow_bfloat16(x), 2 * n);
}
inline void store_first(Float16* p, Vec x, int n) {
  store_first_bytes(p, narrow_float16(x), 2 * n);
}
inline void store_first(Float8E4M3* p, Vec x, int n) {
  store_first_bytes(p, narrow_float8_e4m3(x), n);
}
inline void store_first(Float8E5M2* p, Vec x, int n) {
  store_first_bytes(p, narrow_float8_e5m2(x), n);
}

}  // namespace pagedkv::cpu::avx2
