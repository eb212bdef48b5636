// Few rows against many keys (a decode): keys and values are read where they lie in their blocks,
// once per kStreamRows rows, and not copied. Bound by memory: for each key 2 * head_dim elements
// are read for 4 * rows * head_dim FLOPs. Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Keys whose products are summed together.
inline constexpr int kStreamKeys = 4;

// Into the second-level cache: the first one's few misses in flight are what a core that streams
// runs out of.
inline void prefetch_row(const void* row, int64_t bytes) {
  const char* p = static_cast<const char*>(row);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// scores[r][c] = query[r] . key[c] for columns [begin, end), multiples of kStreamKeys.
template <class Product, class Stored, int kRows>
inline void stream_scores(const float* query, const void* const* keys, int64_t begin, int64_t end,
                          int64_t head_dim, float* scores) {
  constexpr int kStep = kWidth * Product::kCell;
  const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(Stored));
  for (int64_t c = begin; c < end; c += kStreamKeys) {
    const Stored* key[kStreamKeys];
    Vec acc[kRows][kStreamKeys];
#pragma GCC unroll 4
    for (int j = 0; j < kStreamKeys; ++j) {
      key[j] = static_cast<const Stored*>(keys[c + j]);
      prefetch_row(keys[c + j + kPrefetchKeys], row_bytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][j] = zero();
    }
    const float* q = query;
    int64_t d = 0;
    for (; d + kStep <= head_dim; d += kStep, q += kWidth) {
      Vec x[kStreamKeys];
#pragma GCC unroll 4
      for (int j = 0; j < kStreamKeys; ++j) x[j] = held(Product::load_cells(key[j] + d));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec y = load(q + r * kRowStride);
#pragma GCC unroll 4
        for (int j = 0; j < kStreamKeys; ++j) acc[r][j] = Product::multiply_add(x[j], y, acc[r][j]);
      }
    }
    if (d < head_dim) {
      const int rest = static_cast<int>(head_dim - d);
      Vec x[kStreamKeys];
#pragma GCC unroll 4
      for (int j = 0; j < kStreamKeys; ++j) {
        x[j] = held(Product::load_first_cells(key[j] + d, rest));
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec y = load(q + r * kRowStride);
#pragma GCC unroll 4
        for (int j = 0; j < kStreamKeys; ++j) acc[r][j] = Product::multiply_add(x[j], y, acc[r][j]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      store_sums(scores + r * kRowStride + c, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
  }
}

// x[v] = the values' cells of the key cell at `rows`, dimensions v * kWidth and on; from the
// rest-th dimension on, if rest > 0, nothing is read and the cells are 0.
template <class Stored, int kVecs>
inline void load_values(Fp32Product, const void* const* rows, int64_t d, int rest,
                        Vec (&x)[kVecs]) {
  const Stored* row = static_cast<const Stored*>(rows[0]) + d;
  if (rest > 0) {
    x[0] = load_first(row, rest);
    return;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) x[v] = held(load(row + v * kWidth));
}

#if defined(PAGEDKV_SIMD_AVX512_BF16)
template <class Stored, int kVecs>
inline void load_values(Bf16Product, const void* const* rows, int64_t d, int rest,
                        Vec (&x)[kVecs]) {
  const Stored* even = static_cast<const Stored*>(rows[0]) + d;
  const Stored* odd = static_cast<const Stored*>(rows[1]) + d;
#pragma GCC unroll 2
  for (int v = 0; v < kVecs; v += 2) {
    const Vec a = rest > 0 ? Bf16Product::load_first_cells(even, rest)
                           : Bf16Product::load_cells(even + v * kWidth);
    const Vec b = rest > 0 ? Bf16Product::load_first_cells(odd, rest)
                           : Bf16Product::load_cells(odd + v * kWidth);
    x[v] = Bf16Product::pair_low(a, b);
    x[v + 1] = Bf16Product::pair_high(a, b);
  }
}
#endif

// output[r][d ..] = output[r][d ..] * rescale[r] + sum over columns of weights[r][c] * value[c][d
// ..] for kVecs * kWidth dimensions (rest > 0: the last `rest`); begin and end are key cells'
// bounds.
template <class Product, class Stored, int kRows, int kVecs>
inline void stream_values(const float* weights, const void* const* values, int64_t begin,
                          int64_t end, int64_t d, int rest, const float* rescale, float* output,
                          int64_t output_stride) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = broadcast(rescale[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = load(output + r * output_stride + d + v * kWidth) * factor;
    }
  }
  for (int64_t c = begin; c < end; c += Product::kCell) {
    Vec x[kVecs];
    load_values<Stored>(Product{}, values + c, d, rest, x);
#pragma GCC unroll 2
    for (int j = 0; j < Product::kCell; ++j) {
      const Stored* ahead = static_cast<const Stored*>(values[c + j + kPrefetchKeys]) + d;
      prefetch_row(ahead, static_cast<int64_t>(sizeof(Stored)) * kVecs * kWidth);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(weights[r * kRowStride + c / Product::kCell]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[r][v] = Product::multiply_add(weight, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(output + r * output_stride + d + v * kWidth, acc[r][v]);
  }
}

// The step for all rows and the keys of columns [begin, end) of a tile.
template <class Product, class Stored>
inline void stream_tile_scores(const AttentionScratch& s, int64_t rows, int64_t begin, int64_t end,
                               int64_t head_dim) {
  for (int64_t row = 0; row < rows; row += kStreamRows) {
    with_count<kStreamRows>(rows - row, [&](auto count) {
      stream_scores<Product, Stored, count.value>(
          s.query + row * kRowStride, s.key_rows, round_down(begin, kStreamKeys),
          round_up(end, kStreamKeys), head_dim, s.scores + row * kRowStride);
    });
  }
}

template <class Product, class Stored>
inline void stream_tile_values(const AttentionScratch& s, int64_t rows, int64_t begin, int64_t end,
                               int64_t head_dim) {
  constexpr int kStep = kWidth * Product::kCell;
  constexpr int kManyVecs = 4;
  const int64_t stride = round_up(head_dim, 32);
  const int64_t first = round_down(begin, Product::kCell);
  const int64_t last = round_up(end, Product::kCell);
  for (int64_t row = 0; row < rows; row += kStreamRows) {
    with_count<kStreamRows>(rows - row, [&](auto count) {
      const auto run = [&](auto vecs, int64_t d, int rest) {
        stream_values<Product, Stored, count.value, vecs.value>(
            s.scores + row * kRowStride, s.value_rows, first, last, d, rest, s.rescale + row,
            s.output + row * stride, stride);
      };
      int64_t d = 0;
      for (; d + kManyVecs * kWidth <= head_dim; d += kManyVecs * kWidth) {
        run(Count<kManyVecs>{}, d, 0);
      }
      for (; d + kStep <= head_dim; d += kStep) {
        run(Count<Product::kCell>{}, d, 0);
      }
      if (d < head_dim) {
        run(Count<Product::kCell>{}, d, static_cast<int>(head_dim - d));
      }
    });
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
