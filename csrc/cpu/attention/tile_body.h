// Many rows against a tile of keys (a prefill): keys and values are packed once per tile, then two
// register-blocked products run over them, row panel by row panel; what a row panel does not see
// (causal, window) is left out of both. Bound by multiply-adds. Included by attention_body.h only.
//
// packed_keys   [column panel][dimension cell][kPanelWidth]: kWidth keys are transposed at a time
// packed_values [dimension panel][key cell][kPanelWidth or what is left of head_dim]
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

inline constexpr int kPanelWidth = kPanelVecs * kWidth;

// Columns of a tile that some row of a row panel sees; none if begin >= end.
struct Columns {
  int64_t begin;
  int64_t end;
};

// Keys of columns [begin, end), multiples of kWidth.
template <class Product, class Stored>
inline void pack_keys(const void* const* rows, int64_t begin, int64_t end, int64_t head_dim,
                      float* packed) {
  constexpr int kStep = kWidth * Product::kCell;
  const int64_t cells = (head_dim + Product::kCell - 1) / Product::kCell;
  for (int64_t c = begin; c < end; c += kWidth) {
    float* to = packed + c / kPanelWidth * kPanelWidth * cells + c % kPanelWidth;
    for (int64_t d = 0; d < head_dim; d += kStep) {
      Vec x[kWidth];
      const int64_t rest = head_dim - d;
      if (rest >= kStep) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          x[i] = Product::load_cells(static_cast<const Stored*>(rows[c + i]) + d);
        }
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) store(to + i * kPanelWidth, x[i]);
      } else {
        for (int i = 0; i < kWidth; ++i) {
          x[i] = Product::load_first_cells(static_cast<const Stored*>(rows[c + i]) + d,
                                           static_cast<int>(rest));
        }
        transpose(x);
        for (int i = 0; i < cells - d / Product::kCell; ++i) store(to + i * kPanelWidth, x[i]);
      }
      to += kWidth * kPanelWidth;
    }
  }
}

// Vectors of the dimension panel at d.
inline int64_t panel_vecs(int64_t head_dim, int64_t d) {
  const int64_t vecs = (head_dim - d + kWidth - 1) / kWidth;
  return vecs < kPanelVecs ? vecs : kPanelVecs;
}

// Values of columns [begin, end), multiples of kCell. all_columns: of a whole tile.
template <class Stored>
inline void pack_values(Fp32Product, const void* const* rows, int64_t begin, int64_t end,
                        int64_t all_columns, int64_t head_dim, float* packed) {
  for (int64_t d = 0; d < head_dim; d += kPanelWidth) {
    const int64_t vecs = panel_vecs(head_dim, d);
    for (int64_t c = begin; c < end; ++c) {
      const Stored* from = static_cast<const Stored*>(rows[c]);
      float* to = packed + d * all_columns + c * vecs * kWidth;
      for (int64_t i = d; i < d + vecs * kWidth; i += kWidth, to += kWidth) {
        const int64_t rest = head_dim - i;
        store(to, rest >= kWidth ? load(from + i) : load_first(from + i, static_cast<int>(rest)));
      }
    }
  }
}

#if defined(PAGEDKV_SIMD_AVX512_BF16)
template <class Stored>
inline void pack_values(Bf16Product, const void* const* rows, int64_t begin, int64_t end,
                        int64_t all_columns, int64_t head_dim, float* packed) {
  static_assert(kPanelWidth == 2 * kWidth);
  for (int64_t d = 0; d < head_dim; d += kPanelWidth) {
    const int64_t vecs = panel_vecs(head_dim, d);
    const int64_t rest = head_dim - d;
    for (int64_t c = begin; c < end; c += 2) {
      const Stored* even = static_cast<const Stored*>(rows[c]) + d;
      const Stored* odd = static_cast<const Stored*>(rows[c + 1]) + d;
      float* to = packed + d * (all_columns / 2) + c / 2 * vecs * kWidth;
      const bool whole = rest >= kPanelWidth;
      const int n = static_cast<int>(rest);
      const Vec a = whole ? Bf16Product::load_cells(even) : Bf16Product::load_first_cells(even, n);
      const Vec b = whole ? Bf16Product::load_cells(odd) : Bf16Product::load_first_cells(odd, n);
      store(to, Bf16Product::pair_low(a, b));
      if (vecs > 1) store(to + kWidth, Bf16Product::pair_high(a, b));
    }
  }
}
#endif

// f(Count: rows of the panel that begins at row), rows being padded to kPanelRowStep.
template <int kRows = kPanelRows, class F>
inline void with_panel_rows(int64_t rows_left, const F& f) {
  if constexpr (kRows > kPanelRowStep) {
    if (rows_left < kRows) return with_panel_rows<kRows - kPanelRowStep>(rows_left, f);
  }
  f(Count<kRows>{});
}

// scores of one row panel and one column panel.
template <class Product, int kRows>
inline void panel_scores(const float* query, const float* packed, int64_t cells, float* scores) {
  Vec acc[kRows][kPanelVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVecs; ++v) acc[r][v] = zero();
  }
  multiply_panel<Product>(query, packed, cells, acc);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVecs; ++v) store(scores + r * kRowStride + v * kWidth, acc[r][v]);
  }
}

// output = output * rescale + weights * values for one row panel and one dimension panel.
template <class Product, int kRows, int kVecs>
inline void panel_values(const float* weights, const float* packed, int64_t cells,
                         const float* rescale, float* output, int64_t output_stride) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = broadcast(rescale[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = load(output + r * output_stride + v * kWidth) * factor;
    }
  }
  multiply_panel<Product>(weights, packed, cells, acc);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(output + r * output_stride + v * kWidth, acc[r][v]);
  }
}

// Scores of all row panels for the packed columns [begin, end). A column panel stays in the first
// cache while every row panel passes over it.
template <class Product>
inline void tile_scores(const AttentionScratch& s, const Columns* seen, int64_t rows, int64_t begin,
                        int64_t end, int64_t head_dim) {
  const int64_t cells = (head_dim + Product::kCell - 1) / Product::kCell;
  for (int64_t c = round_down(begin, kPanelWidth); c < end; c += kPanelWidth) {
    for (int64_t row = 0; row < rows; row += kPanelRows) {
      const Columns columns = seen[row / kPanelRows];
      if (columns.begin >= c + kPanelWidth || columns.end <= c) continue;
      with_panel_rows(rows - row, [&](auto count) {
        panel_scores<Product, count.value>(s.query + row * kRowStride, s.packed_keys + c * cells,
                                           cells, s.scores + row * kRowStride + c);
      });
    }
  }
}

template <class Product>
inline void tile_values(const AttentionScratch& s, const Columns* seen, int64_t rows,
                        int64_t all_columns, int64_t head_dim) {
  const int64_t stride = round_up(head_dim, 32);
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    const Columns columns = seen[row / kPanelRows];
    if (columns.begin >= columns.end) continue;
    const int64_t first = columns.begin / Product::kCell;
    const int64_t cells = (columns.end + Product::kCell - 1) / Product::kCell - first;
    with_panel_rows(rows - row, [&](auto count) {
      for (int64_t d = 0; d < head_dim; d += kPanelWidth) {
        const int64_t vecs = panel_vecs(head_dim, d);
        with_count<kPanelVecs>(vecs, [&](auto width) {
          panel_values<Product, count.value, width.value>(
              s.scores + row * kRowStride + first,
              s.packed_values + d * (all_columns / Product::kCell) + first * vecs * kWidth, cells,
              s.rescale + row, s.output + row * stride + d, stride);
        });
      }
    });
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
