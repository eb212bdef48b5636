// Paged keys and values back into contiguous rows, as real values (stored * scale). The reverse of
// reshape_and_cache, walked by block table. Reads and writes T * 2 * G * D elements.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

template <class T, class Stored>
inline void read_row(T* out, const Stored* row, float scale, int64_t n) {
  const Vec factor = broadcast(scale);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(row + i) * factor);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(out + i, load_first(row + i, rest) * factor, rest);
  }
}
template <class T>
inline void read_row(T* out, const T* row, float, int64_t n) {
  std::memcpy(out, row, static_cast<size_t>(n) * sizeof(T));
}

// One side, keys or values, of one token.
template <class T, class Stored>
struct CacheRead {
  T* rows;  // [T, G, D]
  int64_t stride_token;
  int64_t stride_head;
  const Stored* cache;  // [N, G, B, D]
  int64_t cache_stride_block;
  int64_t cache_stride_head;
  int64_t cache_stride_token;
  const float* scale;  // or null
  int64_t scale_stride;

  void read_token(int64_t t, int64_t block, int64_t offset, int64_t num_kv_heads,
                  int64_t head_dim) const {
    T* token = rows + t * stride_token;
    const Stored* slot = cache + block * cache_stride_block + offset * cache_stride_token;
    for (int64_t g = 0; g < num_kv_heads; ++g) {
      read_row(token + g * stride_head, slot + g * cache_stride_head,
               scale == nullptr ? 1.0f : scale[g * scale_stride], head_dim);
    }
  }
};

// The last sequence that starts at or before row t; empty sequences before it are passed over.
inline int64_t sequence_of_row(const int32_t* start_loc, int64_t num_seqs, int64_t t) {
  int64_t low = 0;
  int64_t high = num_seqs;  // start_loc[low] <= t < start_loc[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (start_loc[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

inline void gather_blocks(const GatherBlocksParams& p, const ThreadPool& pool) {
  dispatch_cache_types(p.type, p.cache.type, [&](auto element, auto stored) {
    using T = decltype(element);
    using Stored = decltype(stored);
    const ConstKvCache& cache = p.cache;
    const CacheRead<T, Stored> keys{static_cast<T*>(p.key), p.key_stride_token,
                                    p.key_stride_head,      static_cast<const Stored*>(cache.key),
                                    cache.key_stride_block, cache.key_stride_head,
                                    cache.key_stride_token, cache.k_scale,
                                    cache.k_scale_stride};
    const CacheRead<T, Stored> values{
        static_cast<T*>(p.value), p.value_stride_token,
        p.value_stride_head,      static_cast<const Stored*>(cache.value),
        cache.value_stride_block, cache.value_stride_head,
        cache.value_stride_token, cache.v_scale,
        cache.v_scale_stride};
    const int64_t num_rows = p.seq_start_loc[p.num_seqs];
    const int64_t grain = grain_rows(2 * cache.num_kv_heads * cache.head_dim);
    parallel_for(pool, 0, num_rows, grain, [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      int64_t s = sequence_of_row(p.seq_start_loc, p.num_seqs, begin);
      for (int64_t t = begin; t < end; ++t) {
        while (t >= p.seq_start_loc[s + 1]) ++s;
        const int64_t j = t - p.seq_start_loc[s];
        const int64_t block = p.block_tables[s * p.block_tables_stride + j / cache.block_size];
        const int64_t offset = j % cache.block_size;
        keys.read_token(t, block, offset, cache.num_kv_heads, cache.head_dim);
        values.read_token(t, block, offset, cache.num_kv_heads, cache.head_dim);
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
