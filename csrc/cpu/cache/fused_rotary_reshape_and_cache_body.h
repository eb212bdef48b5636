// Rotary embedding of the queries in place, and of the keys on their way into the cache with the
// values: rotary_embedding and reshape_and_cache in one pass. Reads (H + 2 G) * D elements a token
// and writes as many, where the two ops read and write G * D more.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Where the rotated vectors of a key go: into its slot. They are rounded to T first, as they would
// be between the two ops.
template <class T, class Stored>
struct CacheRow {
  Stored* out;
  float scale;

  void put(int64_t i, Vec x) const {
    T rounded[kWidth];
    store(rounded, x);
    store(out + i, load(rounded) / broadcast(scale));
  }
  void put_first(int64_t i, Vec x, int n) const {
    T rounded[kWidth];
    store(rounded, x);
    store_first(out + i, load(rounded) / broadcast(scale), n);
  }
};
template <class T>
struct CacheRow<T, T> {
  T* out;
  float scale;  // 1

  void put(int64_t i, Vec x) const { store(out + i, x); }
  void put_first(int64_t i, Vec x, int n) const { store_first(out + i, x, n); }
};

inline void fused_rotary_reshape_and_cache(const FusedRotaryReshapeAndCacheParams& p,
                                           const ThreadPool& pool) {
  dispatch_cache_types(p.write.type, p.write.cache.type, [&](auto element, auto stored) {
    using T = decltype(element);
    using Stored = decltype(stored);
    const KvCache& cache = p.write.cache;
    const CacheWrite<T, Stored> keys = key_write<T, Stored>(p.write);
    const CacheWrite<T, Stored> values = value_write<T, Stored>(p.write);
    const int64_t grain = grain_rows((p.num_heads + 2 * cache.num_kv_heads) * cache.head_dim);
    parallel_for(pool, 0, p.write.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t slot = p.write.slot_mapping[t];
        const bool written = slot >= 0;
        const int64_t block = slot / cache.block_size;
        const int64_t offset = slot % cache.block_size;
        T* query = static_cast<T*>(p.query) + t * p.query_stride_token;
        rotate_token(p.cos_sin_cache + p.positions[t] * p.cos_sin_stride, p.rotary_dim, p.is_neox,
                     [&](const auto& rotate) {
                       for (int64_t h = 0; h < p.num_heads; ++h) {
                         T* head = query + h * p.query_stride_head;
                         rotate(head, HeadInPlace<T>{head});
                       }
                       for (int64_t g = 0; written && g < cache.num_kv_heads; ++g) {
                         rotate(keys.row(t, g),
                                CacheRow<T, Stored>{keys.slot(block, offset, g), keys.scale_of(g)});
                       }
                     });
        if (!written) continue;
        for (int64_t g = 0; g < cache.num_kv_heads; ++g) {
          write_row(keys.slot(block, offset, g) + p.rotary_dim, keys.row(t, g) + p.rotary_dim,
                    keys.scale_of(g), cache.head_dim - p.rotary_dim);
        }
        values.write_token(t, block, offset, cache.num_kv_heads, cache.head_dim);
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
