// Storage types of 16-bit and 8-bit floats, and their exact scalar conversions. Arithmetic is fp32
// everywhere; these types are only loaded and stored. Rounding is to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace pagedkv::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

inline constexpr float kMaxFloat8E4M3 = 448.0f;
inline constexpr float kMaxFloat8E5M2 = 57344.0f;

// The magnitude bits of a small float (kMantissa fraction bits, exponent bias kBias) as fp32. Does
// not depend on the processor's denormal mode. Infinity and NaN are the caller's.
template <int kMantissa, int kBias>
inline float widen_magnitude(uint32_t magnitude) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  if (magnitude >> kMantissa != 0) {
    return std::bit_cast<float>((magnitude << (23 - kMantissa)) + kRebias);
  }
  constexpr float kQuantum = std::bit_cast<float>(static_cast<uint32_t>(128 - kBias - kMantissa)
                                                  << 23);  // 2^(1 - kBias - kMantissa)
  return static_cast<float>(magnitude) * kQuantum;
}

// The reverse for a finite magnitude that is in range. Below the smallest normal number, adding a
// power of two whose last place is the target's quantum makes the adder do the rounding.
template <int kMantissa, int kBias>
inline uint32_t narrow_magnitude(float magnitude) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;
  constexpr uint32_t kMagic = static_cast<uint32_t>(128 - kBias + kShift) << 23;
  uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  if (bits < kMinNormal) {
    return std::bit_cast<uint32_t>(magnitude + std::bit_cast<float>(kMagic)) - kMagic;
  }
  bits += ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1);
  return (bits - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

inline float with_sign(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

inline float to_float(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const bool negative = (x.bits & 0x8000u) != 0;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>((static_cast<uint32_t>(negative) << 31) | 0x7f800000u |
                                ((magnitude & 0x3ffu) << 13));
  }
  return with_sign(widen_magnitude<10, 15>(magnitude), negative);
}
inline float to_float(Float8E5M2 x) {
  return to_float(Float16{static_cast<uint16_t>(x.bits << 8)});
}
inline float to_float(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(0x7fc00000u);
  return with_sign(widen_magnitude<3, 7>(magnitude), (x.bits & 0x80u) != 0);
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, BFloat16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) {
    out->bits = 0x7fc0u;
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline void from_float(float x, Float16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  uint32_t half = 0x7e00u;                    // NaN
  if (magnitude >= 65520.0f) half = 0x7c00u;  // rounds to infinity
  if (magnitude < 65520.0f) half = narrow_magnitude<10, 15>(magnitude);
  out->bits = static_cast<uint16_t>(sign | half);
}
// Saturating: whatever is beyond the largest finite number, infinity too, becomes that number.
inline void from_float(float x, Float8E4M3* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  uint32_t narrow = 0x7fu;  // NaN
  if (magnitude >= kMaxFloat8E4M3) narrow = 0x7eu;
  if (magnitude < kMaxFloat8E4M3) narrow = narrow_magnitude<3, 7>(magnitude);
  out->bits = static_cast<uint8_t>(((bits >> 24) & 0x80u) | narrow);
}
inline void from_float(float x, Float8E5M2* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  uint32_t narrow = 0x7fu;  // NaN
  if (magnitude >= kMaxFloat8E5M2) narrow = 0x7bu;
  if (magnitude < kMaxFloat8E5M2) narrow = narrow_magnitude<2, 15>(magnitude);
  out->bits = static_cast<uint8_t>(((bits >> 24) & 0x80u) | narrow);
}

}  // namespace pagedkv::cpu
