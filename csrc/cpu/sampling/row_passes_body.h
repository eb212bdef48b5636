// The passes of sample_tokens over a whole row: widening, the largest, and the weights. What comes
// between them is in sample_tokens.cpp.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

inline void widen_logits(float* out, const void* logits, ElementType type, int64_t n) {
  dispatch_activation_type(type, [&](auto element) {
    using T = decltype(element);
    const T* from = static_cast<const T*>(logits);
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(out + i, load(from + i));
    if (i < n) {
      const int rest = static_cast<int>(n - i);
      store_first(out + i, load_first(from + i, rest), rest);
    }
  });
}

// The largest of x [n], n > 0; infinity if one of them is that or NaN.
inline float largest_logit(const float* x, int64_t n) {
  const Vec infinity = broadcast(__builtin_inff());
  Vec largest = broadcast(-__builtin_inff());
  Vec num_bad = zero();
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec some = load(x + i);
    const Vec usable = select_less(some, infinity, some, broadcast(-__builtin_inff()));
    largest = max(largest, usable);
    num_bad = num_bad + select_less(some, infinity, zero(), broadcast(1.0f));
  }
  float found = reduce_max(largest);
  bool is_bad = reduce_add(num_bad) > 0.0f;
  for (; i < n; ++i) {
    is_bad = is_bad || !(x[i] < __builtin_inff());
    found = x[i] > found ? x[i] : found;
  }
  return is_bad ? __builtin_inff() : found;
}

// x <- e^((x - largest) * scale). The difference comes first: a tiny temperature makes 0, not NaN.
inline void logit_weights(float* x, int64_t n, float largest, float scale) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store(x + i, exp((load(x + i) - broadcast(largest)) * broadcast(scale)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const Vec some = (load_first(x + i, rest) - broadcast(largest)) * broadcast(scale);
    store_first(x + i, exp(some), rest);
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
