// Heads of a projection multiplied by the scales of their rows (RowScales), with the bias added.
// Must move T * H * D elements in and out.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// head <- head * scale + bias. bias may be null.
template <class T>
inline void scale_head(T* head, const T* bias, float scale, int64_t n) {
  const Vec factor = broadcast(scale);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store(head + i, fma(load(head + i), factor, bias == nullptr ? zero() : load(bias + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(head + i,
                fma(load_first(head + i, rest), factor,
                    bias == nullptr ? zero() : load_first(bias + i, rest)),
                rest);
  }
}

inline void scale_heads(const ScaleHeadsParams& p, const ThreadPool& pool) {
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    const T* bias = static_cast<const T*>(p.bias);
    const int64_t grain = grain_rows(p.scales.hidden_size + p.num_heads * p.head_dim);
    parallel_for(pool, 0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float scale = row_scale<T>(p.scales, t);
        T* row = static_cast<T*>(p.heads) + t * p.stride_token;
        for (int64_t h = 0; h < p.num_heads; ++h) {
          scale_head(row + h * p.stride_head, bias == nullptr ? nullptr : bias + h * p.head_dim,
                     scale, p.head_dim);
        }
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
