// The vector interface of vec.h in plain C++: 8 lanes in an array, which the compiler vectorises
// for whatever the build's baseline is. Included by vec.h only.
#pragma once

namespace pagedkv::cpu::scalar {

inline constexpr int kWidth = 8;

struct Vec {
  float v[kWidth];
};

// by_lane(f).v[i] = f(i)
template <class F>
inline Vec by_lane(F f) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out.v[i] = f(i);
  return out;
}

inline Vec zero() {
  return by_lane([](int) { return 0.0f; });
}
inline Vec broadcast(float x) {
  return by_lane([=](int) { return x; });
}
inline Vec operator+(Vec a, Vec b) {
  return by_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return by_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return by_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return by_lane([&](int i) { return a.v[i] / b.v[i]; });
}
// Two roundings: a fused multiply-add without hardware for it is a slow library call.
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// As maxps and minps: the second operand when either is NaN.
inline Vec max(Vec a, Vec b) {
  return by_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return by_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec abs(Vec a) {
  return by_lane([&](int i) { return __builtin_fabsf(a.v[i]); });
}
inline Vec sqrt(Vec a) {
  return by_lane([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
inline Vec round(Vec a) {
  return by_lane([&](int i) { return __builtin_rintf(a.v[i]); });
}
inline Vec swap_neighbours(Vec a) {
  return by_lane([&](int i) { return a.v[i ^ 1]; });
}
inline float reduce_add(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline float reduce_max(Vec a) {
  float largest = a.v[0];
  for (int i = 1; i < kWidth; ++i) largest = largest > a.v[i] ? largest : a.v[i];
  return largest;
}
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return by_lane([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
inline Vec scale_exp2(Vec x, Vec n) {
  return by_lane([&](int i) {
    const uint32_t exponent = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127);
    return x.v[i] * std::bit_cast<float>(exponent << 23);
  });
}

template <class T>
inline Vec load(const T* p) {
  return by_lane([&](int i) { return to_float(p[i]); });
}
template <class T>
inline Vec load_first(const T* p, int n) {
  return by_lane([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
}
template <class T>
inline void store(T* p, Vec x) {
  for (int i = 0; i < kWidth; ++i) from_float(x.v[i], p + i);
}
template <class T>
inline void store_first(T* p, Vec x, int n) {
  for (int i = 0; i < n; ++i) from_float(x.v[i], p + i);
}

}  // namespace pagedkv::cpu::scalar
