// The product of a few rows with a weight matrix, with the norm before it and what becomes of it
// behind it. An item is kWidth columns of the result; it reads its weights once a row. Sums go
// through a row's elements in order, so a row's result does not depend on the other rows.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// sum + products of n elements, by lane.
template <class T>
inline Vec add_products(Vec sum, const T* x, const T* weight, int64_t n) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};  // four chains hide the latency of the adder
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    for (int k = 0; k < 4; ++k) {
      sums[k] = fma(load(x + i + k * kWidth), load(weight + i + k * kWidth), sums[k]);
    }
  }
  for (; i + kWidth <= n; i += kWidth) sums[0] = fma(load(x + i), load(weight + i), sums[0]);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    sums[1] = fma(load_first(x + i, rest), load_first(weight + i, rest), sums[1]);
  }
  return sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = x weight^T + bias for `count` columns from `first` on, at most kWidth, rounded to T.
template <class T>
inline void multiply_columns(const StreamedLinearParams& p, const T* row, float factor,
                             int64_t first, int count, float* y) {
  constexpr int64_t kChunk = 1024;
  const T* weight = static_cast<const T*>(p.weight) + first * p.weight_stride_row;
  const T* norm = static_cast<const T*>(p.norm_weight);
  const T* bias = static_cast<const T*>(p.bias);
  T normed[kChunk];
  Vec sums[kWidth];
  for (int c = 0; c < kWidth; ++c) sums[c] = zero();
  for (int64_t k = 0; k < p.in_features; k += kChunk) {
    const int64_t rest = p.in_features - k;
    const int64_t n = rest < kChunk ? rest : kChunk;
    const T* x = row + k;
    if (norm != nullptr) {
      scale_row(normed, x, norm + k, factor, n);
      x = normed;
    }
    for (int c = 0; c < count; ++c) {
      sums[c] = add_products(sums[c], x, weight + c * p.weight_stride_row + k, n);
    }
  }
  for (int c = 0; c < count; ++c) {
    T rounded;
    from_float(reduce_add(sums[c]) + (bias != nullptr ? to_float(bias[first + c]) : 0.0f),
               &rounded);
    y[c] = to_float(rounded);
  }
}

template <class T>
inline void store_columns(T* out, Vec y, int count) {
  if (count == kWidth) return store(out, y);
  store_first(out, y, count);
}

inline void streamed_linear(const StreamedLinearParams& p, const ThreadPool& pool) {
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    const bool gated = p.epilogue == LinearEpilogue::kSiluAndMul;
    const int64_t columns = gated ? p.out_features / 2 : p.out_features;
    const int64_t items = (columns + kWidth - 1) / kWidth;
    const int64_t grain = grain_rows(p.in_features * kWidth);
    parallel_for(pool, 0, items, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = 0; t < p.num_tokens; ++t) {
        const T* row = static_cast<const T*>(p.input) + t * p.input_stride_token;
        float factor = 1.0f;
        if (p.norm_weight != nullptr) {
          factor = inverse_rms(sum_of_squares(row, p.in_features), p.in_features, p.epsilon);
        }
        for (int64_t item = begin; item < end; ++item) {
          const int64_t first = item * kWidth;
          const int64_t rest = columns - first;
          const int count = static_cast<int>(rest < kWidth ? rest : kWidth);
          T* out = static_cast<T*>(p.out) + t * p.out_stride_token + first;
          float y[kWidth] = {};
          multiply_columns(p, row, factor, first, count, y);
          if (gated) {
            float up[kWidth] = {};
            multiply_columns(p, row, factor, columns + first, count, up);
            store_columns(out, Silu::apply(load(y)) * load(up), count);
          } else if (p.epilogue == LinearEpilogue::kAdd) {
            const Vec old = count == kWidth ? load(out) : load_first(out, count);
            store_columns(out, old + load(y), count);
          } else {
            store_columns(out, load(y), count);
          }
        }
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
