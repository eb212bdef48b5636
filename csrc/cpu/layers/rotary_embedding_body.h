// Rotary position embedding, in place, of the first rotary_dim elements of every query and key
// head. Two streams; the cosines of a token are read once for all its heads.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// One head, halves against each other: (x_i, x_{i + r}) with r = rotary_dim / 2.
template <class T>
inline void rotate_halves(T* head, const float* cosines, const float* sines, int64_t r) {
  int64_t i = 0;
  for (; i + kWidth <= r; i += kWidth) {
    const Vec x = load(head + i);
    const Vec y = load(head + r + i);
    const Vec c = load(cosines + i);
    const Vec s = load(sines + i);
    store(head + i, x * c - y * s);
    store(head + r + i, fma(y, c, x * s));
  }
  if (i < r) {
    const int rest = static_cast<int>(r - i);
    const Vec x = load_first(head + i, rest);
    const Vec y = load_first(head + r + i, rest);
    const Vec c = load_first(cosines + i, rest);
    const Vec s = load_first(sines + i, rest);
    store_first(head + i, x * c - y * s, rest);
    store_first(head + r + i, fma(y, c, x * s), rest);
  }
}

// Pairs of cosines and sines that rotate_neighbours takes at once.
inline constexpr int64_t kPairChunk = 64;

// `count` pairs of neighbours (x_2i, x_2i+1). Lane by lane, out = x c + swapped(x) s with every
// cosine twice in `cosines` and (-sine, sine) in `sines`.
template <class T>
inline void rotate_neighbours(T* head, const float* cosines, const float* sines, int64_t count) {
  const int64_t n = 2 * count;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec x = load(head + i);
    store(head + i, fma(x, load(cosines + i), swap_neighbours(x) * load(sines + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const Vec x = load_first(head + i, rest);
    const Vec turned = swap_neighbours(x) * load_first(sines + i, rest);
    store_first(head + i, fma(x, load_first(cosines + i, rest), turned), rest);
  }
}

// f(head) for every query head and key head of token t.
template <class T, class F>
inline void for_each_head(const RotaryEmbeddingParams& p, int64_t t, const F& f) {
  T* query = static_cast<T*>(p.query) + t * p.query_stride_token;
  for (int64_t h = 0; h < p.num_heads; ++h) f(query + h * p.query_stride_head);
  T* key = static_cast<T*>(p.key) + t * p.key_stride_token;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) f(key + h * p.key_stride_head);
}

template <class T>
inline void rotate_token_neighbours(const RotaryEmbeddingParams& p, int64_t t, const float* cosines,
                                    const float* sines, int64_t r) {
  float doubled_cosines[2 * kPairChunk];
  float signed_sines[2 * kPairChunk];
  for (int64_t first = 0; first < r; first += kPairChunk) {
    const int64_t count = r - first < kPairChunk ? r - first : kPairChunk;
    for (int64_t i = 0; i < count; ++i) {
      doubled_cosines[2 * i] = doubled_cosines[2 * i + 1] = cosines[first + i];
      signed_sines[2 * i] = -sines[first + i];
      signed_sines[2 * i + 1] = sines[first + i];
    }
    for_each_head<T>(p, t, [&](T* head) {
      rotate_neighbours(head + 2 * first, doubled_cosines, signed_sines, count);
    });
  }
}

inline void rotary_embedding(const RotaryEmbeddingParams& p, const ThreadPool& pool) {
  const int64_t r = p.rotary_dim / 2;
  const int64_t grain = grain_rows((p.num_heads + p.num_kv_heads) * p.rotary_dim);
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    parallel_for(pool, 0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* cosines = p.cos_sin_cache + p.positions[t] * p.cos_sin_stride;
        const float* sines = cosines + r;
        if (p.is_neox) {
          for_each_head<T>(p, t, [&](T* head) { rotate_halves(head, cosines, sines, r); });
        } else {
          rotate_token_neighbours<T>(p, t, cosines, sines, r);
        }
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
