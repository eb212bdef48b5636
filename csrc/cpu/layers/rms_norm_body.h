// RMS norm, plain and with the residual added in the same pass, and its scale alone. Each row is
// read twice, the second time from cache. Bytes: 2 per element and stream for 16-bit types (in,
// out; fused: 4 streams).
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// Sum of squares of a row.
template <class T>
inline float sum_of_squares(const T* row, int64_t n) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};  // four chains hide the latency of the adder
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    for (int k = 0; k < 4; ++k) {
      const Vec x = load(row + i + k * kWidth);
      sums[k] = fma(x, x, sums[k]);
    }
  }
  for (; i + kWidth <= n; i += kWidth) {
    const Vec x = load(row + i);
    sums[0] = fma(x, x, sums[0]);
  }
  if (i < n) {
    const Vec x = load_first(row + i, static_cast<int>(n - i));
    sums[1] = fma(x, x, sums[1]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = row * scale * weight; out may be row.
template <class T>
inline void scale_row(T* out, const T* row, const T* weight, float scale, int64_t n) {
  const Vec factor = broadcast(scale);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store(out + i, load(row + i) * factor * load(weight + i));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(out + i, load_first(row + i, rest) * factor * load_first(weight + i, rest), rest);
  }
}

inline float inverse_rms(float squares, int64_t n, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + epsilon);
}

// What row `token` is multiplied by; 1, which changes no bit, without rows.
template <class T>
inline float row_scale(const RowScales& scales, int64_t token) {
  if (scales.rows == nullptr) return 1.0f;
  const T* row = static_cast<const T*>(scales.rows) + token * scales.stride_token;
  return inverse_rms(sum_of_squares(row, scales.hidden_size), scales.hidden_size, scales.epsilon);
}

inline void rms_norm(const RmsNormParams& p, const ThreadPool& pool) {
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    const T* weight = static_cast<const T*>(p.weight);
    parallel_for(pool, 0, p.num_tokens, grain_rows(p.hidden_size), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* row = static_cast<const T*>(p.input) + t * p.input_stride_token;
        T* out = static_cast<T*>(p.out) + t * p.out_stride_token;
        const float squares = sum_of_squares(row, p.hidden_size);
        scale_row(out, row, weight, inverse_rms(squares, p.hidden_size, p.epsilon), p.hidden_size);
      }
    });
  });
}

// residual <- residual + input, and the sum of squares of what was stored, rounded to T.
template <class T>
inline float add_and_square(T* residual, const T* input, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store(residual + i, load(residual + i) + load(input + i));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(residual + i, load_first(residual + i, rest) + load_first(input + i, rest), rest);
  }
  return sum_of_squares(residual, n);
}

inline void fused_add_rms_norm(const FusedAddRmsNormParams& p, const ThreadPool& pool) {
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    const T* weight = static_cast<const T*>(p.weight);
    parallel_for(pool, 0, p.num_tokens, grain_rows(p.hidden_size), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        T* input = static_cast<T*>(p.input) + t * p.input_stride_token;
        T* residual = static_cast<T*>(p.residual) + t * p.residual_stride_token;
        const float squares = add_and_square(residual, input, p.hidden_size);
        scale_row(input, residual, weight, inverse_rms(squares, p.hidden_size, p.epsilon),
                  p.hidden_size);
      }
    });
  });
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
