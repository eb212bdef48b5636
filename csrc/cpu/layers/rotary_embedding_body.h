// Rotary position embedding, in place, of the first rotary_dim elements of every query and key
// head. Two streams; the cosines of a token are read once for all its heads.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Where the rotated vectors of a head go: back into the head. `put` takes kWidth elements from i
// on, `put_first` only n of them.
template <class T>
struct HeadInPlace {
  T* out;

  void put(int64_t i, Vec x) const { store(out + i, x); }
  void put_first(int64_t i, Vec x, int n) const { store_first(out + i, x, n); }
};

// One head, halves against each other: (x_i, x_{i + r}) with r = rotary_dim / 2. A vector is put
// only when both that it is made of are read, so `out` may be the head.
template <class T, class Out>
inline void rotate_halves(const T* head, const Out& out, const float* cosines, const float* sines,
                          int64_t r) {
  int64_t i = 0;
  for (; i + kWidth <= r; i += kWidth) {
    const Vec x = load(head + i);
    const Vec y = load(head + r + i);
    const Vec c = load(cosines + i);
    const Vec s = load(sines + i);
    out.put(i, x * c - y * s);
    out.put(r + i, fma(y, c, x * s));
  }
  if (i < r) {
    const int rest = static_cast<int>(r - i);
    const Vec x = load_first(head + i, rest);
    const Vec y = load_first(head + r + i, rest);
    const Vec c = load_first(cosines + i, rest);
    const Vec s = load_first(sines + i, rest);
    out.put_first(i, x * c - y * s, rest);
    out.put_first(r + i, fma(y, c, x * s), rest);
  }
}

// Pairs of cosines and sines that rotate_neighbours takes at once.
inline constexpr int64_t kPairChunk = 64;

// Elements [first, first + n) of a head, pairs of neighbours (x_2i, x_2i+1). Lane by lane,
// out = x c + swapped(x) s with every cosine twice in `cosines` and (-sine, sine) in `sines`.
template <class T, class Out>
inline void rotate_neighbours(const T* head, const Out& out, const float* cosines,
                              const float* sines, int64_t first, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec x = load(head + first + i);
    out.put(first + i, fma(x, load(cosines + i), swap_neighbours(x) * load(sines + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const Vec x = load_first(head + first + i, rest);
    const Vec turned = swap_neighbours(x) * load_first(sines + i, rest);
    out.put_first(first + i, fma(x, load_first(cosines + i, rest), turned), rest);
  }
}

// Rotates all heads of one token. for_each_head(rotate) calls rotate(head, out) for each of them,
// always in the same order; it may be called several times.
template <class ForEachHead>
inline void rotate_token(const float* cosines, int64_t rotary_dim, bool is_neox,
                         const ForEachHead& for_each_head) {
  const int64_t r = rotary_dim / 2;
  const float* sines = cosines + r;
  if (is_neox) {
    for_each_head(
        [&](const auto* head, const auto& out) { rotate_halves(head, out, cosines, sines, r); });
    return;
  }
  float doubled_cosines[2 * kPairChunk];
  float signed_sines[2 * kPairChunk];
  for (int64_t first = 0; first < r; first += kPairChunk) {
    const int64_t count = r - first < kPairChunk ? r - first : kPairChunk;
    for (int64_t i = 0; i < count; ++i) {
      doubled_cosines[2 * i] = doubled_cosines[2 * i + 1] = cosines[first + i];
      signed_sines[2 * i] = -sines[first + i];
      signed_sines[2 * i + 1] = sines[first + i];
    }
    for_each_head([&](const auto* head, const auto& out) {
      rotate_neighbours(head, out, doubled_cosines, signed_sines, 2 * first, 2 * count);
    });
  }
}

inline void rotary_embedding(const RotaryEmbeddingParams& p, const ThreadPool& pool) {
  const int64_t grain = grain_rows((p.num_heads + p.num_kv_heads) * p.rotary_dim);
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    parallel_for(pool, 0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        T* query = static_cast<T*>(p.query) + t * p.query_stride_token;
        T* key = static_cast<T*>(p.key) + t * p.key_stride_token;
        rotate_token(p.cos_sin_cache + p.positions[t] * p.cos_sin_stride, p.rotary_dim, p.is_neox,
                     [&](const auto& rotate) {
                       for (int64_t h = 0; h < p.num_heads; ++h) {
                         T* head = query + h * p.query_stride_head;
                         rotate(head, HeadInPlace<T>{head});
                       }
                       for (int64_t h = 0; h < p.num_kv_heads; ++h) {
                         T* head = key + h * p.key_stride_head;
                         rotate(head, HeadInPlace<T>{head});
                       }
                     });
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
