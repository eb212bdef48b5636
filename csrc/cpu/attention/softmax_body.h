// One step of the online softmax over a row of scores: logits in units of ln 2, maximum, weights,
// sum. About 12 vector operations for kWidth scores, against 4 * head_dim / 2 of the products.
// Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;
inline constexpr float kMinusInfinity = -__builtin_inff();

// From a product q.k to a logit in units of ln 2: first scale, then soft_cap, then slope.
struct LogitRule {
  float scale;     // without soft_cap in units of ln 2
  float soft_cap;  // 0: none
  bool is_plain;   // scale > 0 alone: the maximum commutes with it
};

// 2^x for x <= about 0, to 2e-7 relative, 1 for 0; 0 below 2^-126; NaN stays.
// 2^r on [-1/2, 1/2] is a polynomial fitted for this project (weighted least squares, minimax
// weights), error 9e-8.
inline Vec exp2_nonpositive(Vec x) {
  const Vec lowest = broadcast(-126.0f);
  const Vec clamped = max(lowest, x);
  const Vec n = round(clamped);
  const Vec r = clamped - n;
  Vec p = broadcast(1.326472731e-3f);
  p = fma(p, r, broadcast(9.671512991e-3f));
  p = fma(p, r, broadcast(5.550733581e-2f));
  p = fma(p, r, broadcast(2.402224243e-1f));
  p = fma(p, r, broadcast(6.931470037e-1f));
  p = fma(p, r, broadcast(1.0f));
  return select_less(x, lowest, zero(), scale_exp2(p, n));
}

// The scores of columns [begin, end) alone; -inf elsewhere. column is the first lane's.
inline Vec only_visible(Vec scores, int64_t column, int64_t begin, int64_t end) {
  const Vec lane = iota() + broadcast(static_cast<float>(column));
  const Vec hidden = broadcast(kMinusInfinity);
  const Vec from_begin = select_less(lane, broadcast(static_cast<float>(begin)), hidden, scores);
  return select_less(lane, broadcast(static_cast<float>(end)), from_begin, hidden);
}

// Calls f(column, whole) for the vectors that cover columns [begin, end); whole: none is outside.
template <class F>
inline void for_each_vector(int64_t begin, int64_t end, const F& f) {
  int64_t column = round_down(begin, kWidth);
  if (column < begin) {
    f(column, false);
    column += kWidth;
  }
  for (; column + kWidth <= end; column += kWidth) f(column, true);
  if (column < end) f(column, false);
}

// Scores of columns [begin, end) to logits. distance = key - position at column 0.
inline void apply_rule(float* row, int64_t begin, int64_t end, const LogitRule& rule, float slope,
                       int64_t distance) {
  const Vec scale = broadcast(rule.scale);
  for_each_vector(begin, end, [&](int64_t column, bool) {
    Vec x = load(row + column) * scale;
    if (rule.soft_cap > 0.0f) {
      const Vec cap = broadcast(rule.soft_cap);
      x = cap * tanh(x / cap) * broadcast(kLog2E);
    }
    if (slope != 0.0f) {
      const Vec away = iota() + broadcast(static_cast<float>(column + distance));
      x = fma(away, broadcast(slope), x);
    }
    store(row + column, x);
  });
}

inline float largest_score(const float* row, int64_t begin, int64_t end) {
  Vec largest = broadcast(kMinusInfinity);
  Vec others = largest;
  int64_t column = round_down(begin, kWidth);
  if (column < begin) {
    largest = only_visible(load(row + column), column, begin, end);
    column += kWidth;
  }
  // Two chains hide the latency.
  for (; column + 2 * kWidth <= end; column += 2 * kWidth) {
    largest = max(largest, load(row + column));
    others = max(others, load(row + column + kWidth));
  }
  for (; column < end; column += kWidth) {
    largest = max(largest, only_visible(load(row + column), column, begin, end));
  }
  return reduce_max(max(largest, others));
}

// Rows of one row panel share the columns [first, last), multiples of kWidth, that their product
// with the values runs over; the row's own are [begin, end). Turns scores into weights and updates
// the row's maximum and sum; returns what its output has to be multiplied with.
template <class Product>
inline float weigh_row(float* row, int64_t begin, int64_t end, int64_t first, int64_t last,
                       const LogitRule& rule, float slope, int64_t distance, float* maximum,
                       float* sum) {
  float rescale = 1.0f;
  int64_t covered_begin = last;
  int64_t covered_end = last;
  if (begin < end) {
    float scale = rule.scale;
    if (!rule.is_plain) {
      apply_rule(row, begin, end, rule, slope, distance);
      scale = 1.0f;
    }
    const float here = largest_score(row, begin, end) * scale;
    const float before = *maximum;
    const float after = here > before ? here : before;
    // All logits -inf: weights 0, not NaN.
    const float base = after == kMinusInfinity ? 0.0f : after;
    const Vec scales = broadcast(scale);
    const Vec minus_base = broadcast(-base);
    Vec total = zero();
    for_each_vector(begin, end, [&](int64_t column, bool whole) {
      Vec x = fma(load(row + column), scales, minus_base);
      if (!whole) x = only_visible(x, column, begin, end);
      const Vec weights = exp2_nonpositive(x);
      total = total + weights;
      Product::store_weights(row, column, weights);
    });
    if (after != before) rescale = __builtin_exp2f(before - base);
    *maximum = after;
    *sum = *sum * rescale + reduce_add(total);
    covered_begin = round_down(begin, kWidth);
    covered_end = round_up(end, kWidth);
  }
  for (int64_t c = first; c < covered_begin; c += kWidth) Product::store_weights(row, c, zero());
  for (int64_t c = covered_end; c < last; c += kWidth) Product::store_weights(row, c, zero());
  return rescale;
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
