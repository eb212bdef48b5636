// Two attention states over disjoint keys into one: with weights w = e^(lse - max), normalised,
// out = w_a out_a + w_b out_b and lse = max + log(sum of the unnormalised weights). The out of an
// empty state (lse -inf) is not read, as it may hold anything. Three streams of D, per row.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// out = weight_a * a + weight_b * b over n elements.
template <class T>
inline void blend_rows(T* out, const T* a, const T* b, float weight_a, float weight_b, int64_t n) {
  const Vec wa = broadcast(weight_a);
  const Vec wb = broadcast(weight_b);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store(out + i, fma(wa, load(a + i), wb * load(b + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(out + i, fma(wa, load_first(a + i, rest), wb * load_first(b + i, rest)), rest);
  }
}

template <class T>
inline void merge_row(T* out, float* lse, const T* a, float lse_a, const T* b, float lse_b,
                      int64_t n) {
  constexpr float kEmpty = -__builtin_inff();
  if (lse_a == kEmpty && lse_b == kEmpty) {
    std::memset(out, 0, static_cast<size_t>(n) * sizeof(T));
    if (lse != nullptr) *lse = kEmpty;
    return;
  }
  // An empty side takes the other one's row, so that nothing of it is read.
  const T* row_a = lse_a == kEmpty ? b : a;
  const T* row_b = lse_b == kEmpty ? a : b;
  const float largest = lse_a > lse_b ? lse_a : lse_b;
  const float weight_a = __builtin_expf(lse_a - largest);
  const float weight_b = __builtin_expf(lse_b - largest);
  const float sum = weight_a + weight_b;
  blend_rows(out, row_a, row_b, weight_a / sum, weight_b / sum, n);
  if (lse != nullptr) *lse = largest + __builtin_logf(sum);
}

inline void merge_attention_states(const MergeAttentionStatesParams& p, const ThreadPool& pool) {
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    parallel_for(
        pool, 0, p.num_tokens, grain_rows(p.num_heads * p.head_dim),
        [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) {
            for (int64_t h = 0; h < p.num_heads; ++h) {
              T* out = static_cast<T*>(p.out) + t * p.out_stride_token + h * p.out_stride_head;
              const T* a = static_cast<const T*>(p.out_a) + t * p.out_a_stride_token +
                           h * p.out_a_stride_head;
              const T* b = static_cast<const T*>(p.out_b) + t * p.out_b_stride_token +
                           h * p.out_b_stride_head;
              const float lse_a = p.lse_a[t * p.lse_a_stride_token + h * p.lse_a_stride_head];
              const float lse_b = p.lse_b[t * p.lse_b_stride_token + h * p.lse_b_stride_head];
              float* lse = p.lse == nullptr
                               ? nullptr
                               : p.lse + t * p.lse_stride_token + h * p.lse_stride_head;
              merge_row(out, lse, a, lse_a, b, lse_b, p.head_dim);
            }
          }
        });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
