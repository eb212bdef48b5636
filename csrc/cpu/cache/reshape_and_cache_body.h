// New keys and values into their slots: a copy, or a quantising one into a float8 cache
// (real / scale, to nearest even, saturated). Reads and writes T * 2 * G * D elements.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// One head's row of n elements.
template <class T, class Stored>
inline void write_row(Stored* out, const T* row, float scale, int64_t n) {
  const Vec divisor = broadcast(scale);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(row + i) / divisor);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(out + i, load_first(row + i, rest) / divisor, rest);
  }
}
// The same type: bits move as they are.
template <class T>
inline void write_row(T* out, const T* row, float, int64_t n) {
  std::memcpy(out, row, static_cast<size_t>(n) * sizeof(T));
}

// Where the rows of one side, keys or values, come from and go to.
template <class T, class Stored>
struct CacheWrite {
  const T* rows;  // [T, G, D]
  int64_t stride_token;
  int64_t stride_head;
  Stored* cache;  // [N, G, B, D]
  int64_t cache_stride_block;
  int64_t cache_stride_head;
  int64_t cache_stride_token;
  const float* scale;  // or null
  int64_t scale_stride;

  const T* row(int64_t t, int64_t head) const {
    return rows + t * stride_token + head * stride_head;
  }
  Stored* slot(int64_t block, int64_t offset, int64_t head) const {
    return cache + block * cache_stride_block + offset * cache_stride_token +
           head * cache_stride_head;
  }
  float scale_of(int64_t head) const {
    return scale == nullptr ? 1.0f : scale[head * scale_stride];
  }

  void write_token(int64_t t, int64_t block, int64_t offset, int64_t num_kv_heads,
                   int64_t head_dim) const {
    for (int64_t g = 0; g < num_kv_heads; ++g) {
      write_row(slot(block, offset, g), row(t, g), scale_of(g), head_dim);
    }
  }
};

template <class T, class Stored>
inline CacheWrite<T, Stored> key_write(const ReshapeAndCacheParams& p) {
  const KvCache& cache = p.cache;
  return {static_cast<const T*>(p.key),    p.key_stride_token,     p.key_stride_head,
          static_cast<Stored*>(cache.key), cache.key_stride_block, cache.key_stride_head,
          cache.key_stride_token,          cache.k_scale,          cache.k_scale_stride};
}

template <class T, class Stored>
inline CacheWrite<T, Stored> value_write(const ReshapeAndCacheParams& p) {
  const KvCache& cache = p.cache;
  return {static_cast<const T*>(p.value),
          p.value_stride_token,
          p.value_stride_head,
          static_cast<Stored*>(cache.value),
          cache.value_stride_block,
          cache.value_stride_head,
          cache.value_stride_token,
          cache.v_scale,
          cache.v_scale_stride};
}

inline void reshape_and_cache(const ReshapeAndCacheParams& p, const ThreadPool& pool) {
  dispatch_cache_types(p.type, p.cache.type, [&](auto element, auto stored) {
    using T = decltype(element);
    using Stored = decltype(stored);
    const KvCache& cache = p.cache;
    const CacheWrite<T, Stored> keys = key_write<T, Stored>(p);
    const CacheWrite<T, Stored> values = value_write<T, Stored>(p);
    const int64_t grain = grain_rows(2 * cache.num_kv_heads * cache.head_dim);
    parallel_for(pool, 0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t slot = p.slot_mapping[t];
        if (slot < 0) continue;
        const int64_t block = slot / cache.block_size;
        const int64_t offset = slot % cache.block_size;
        keys.write_token(t, block, offset, cache.num_kv_heads, cache.head_dim);
        values.write_token(t, block, offset, cache.num_kv_heads, cache.head_dim);
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
