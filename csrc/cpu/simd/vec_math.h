// Functions on vectors, written once over the interface of vec.h. Included by vec.h only.
// Polynomials were fitted for this project (weighted least squares, minimax weights).
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// e^x to 2e-7 relative (5e-6 above 88.3). 0 below -87.3 (no denormals), infinity above 88.72, NaN
// stays NaN.
inline Vec exp(Vec x) {
  const Vec lowest = broadcast(-87.33f);
  const Vec clamped = max(lowest, min(broadcast(89.0f), x));
  const Vec n = min(broadcast(127.0f), round(clamped * broadcast(1.44269504f)));
  // ln 2 in two parts; the first has so few bits that its product with n is exact.
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  // e^r = 1 + r + r^2 P(r) on [-ln 2 / 2, ln 2 / 2], error 3e-9.
  Vec p = broadcast(1.381454018e-3f);
  p = fma(p, r, broadcast(8.368745303e-3f));
  p = fma(p, r, broadcast(4.166839080e-2f));
  p = fma(p, r, broadcast(1.666652040e-1f));
  p = fma(p, r, broadcast(4.999999343e-1f));
  const Vec power = fma(p, r * r, r) + broadcast(1.0f);
  return select_less(x, lowest, zero(), scale_exp2(power, n));
}

inline Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  // Near 0 as x + x^3 P(x^2), error 7e-9; elsewhere 1 - 2 / (e^2x + 1) has no cancellation left.
  const Vec square = x * x;
  Vec p = broadcast(-5.515160189e-3f);
  p = fma(p, square, broadcast(2.046941644e-2f));
  p = fma(p, square, broadcast(-5.368802201e-2f));
  p = fma(p, square, broadcast(1.333083033e-1f));
  p = fma(p, square, broadcast(-3.333325985e-1f));
  const Vec near_zero = fma(p * square, x, x);
  const Vec one = broadcast(1.0f);
  const Vec large = one - broadcast(2.0f) / (exp(magnitude + magnitude) + one);
  const Vec signed_large = select_less(x, zero(), zero() - large, large);
  return select_less(magnitude, broadcast(0.625f), near_zero, signed_large);
}

// The standard normal distribution function, to 5e-6 relative also twelve sigmas into the left
// tail. Phi(-x) = erfc(x / sqrt 2) / 2 = e^(-x^2 / 2) q(x / sqrt 2) / 2 for x >= 0, where q(y) =
// e^(y^2) erfc(y) is a polynomial in t = 1 / (1 + 0.4 y), error 6e-9.
inline Vec normal_cdf(Vec x) {
  const Vec magnitude = abs(x);
  const Vec t = broadcast(1.0f) / fma(magnitude, broadcast(0.282842712f), broadcast(1.0f));
  Vec q = broadcast(-2.921498549e-2f);
  q = fma(q, t, broadcast(1.404460621e-1f));
  q = fma(q, t, broadcast(-2.355258772e-1f));
  q = fma(q, t, broadcast(1.375598092e-1f));
  q = fma(q, t, broadcast(-4.689405631e-2f));
  q = fma(q, t, broadcast(8.391592928e-2f));
  q = fma(q, t, broadcast(1.190084183e-1f));
  q = fma(q, t, broadcast(1.717392691e-1f));
  q = fma(q, t, broadcast(2.076137299e-1f));
  q = fma(q, t, broadcast(2.256758602e-1f));
  q = fma(q, t, broadcast(2.256758348e-1f));
  const Vec half = broadcast(0.5f);
  const Vec tail = half * q * t * exp(broadcast(-0.5f) * x * x);
  return select_less(x, zero(), tail, broadcast(1.0f) - tail);
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
