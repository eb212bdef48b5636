// Gated activations: out = act(input[:, :F]) * input[:, F:]. Work is cut into pieces of a row, so
// that one long row is shared by threads too. Three streams, and the row of the scale for each
// piece.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

struct Silu {
  static Vec apply(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }
};
// x Phi(x), Phi the standard normal distribution function.
struct Gelu {
  static Vec apply(Vec x) { return x * normal_cdf(x); }
};
// x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static Vec apply(Vec x) {
    const Vec inner = fma(x * x * x, broadcast(0.044715f), x);
    return x / (broadcast(1.0f) + exp(broadcast(-1.59576912f) * inner));
  }
};

template <class Act, class T>
inline void activate(T* out, const T* gate, const T* up, int64_t n, float scale) {
  const Vec factor = broadcast(scale);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store(out + i, Act::apply(load(gate + i) * factor) * (load(up + i) * factor));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(
        out + i,
        Act::apply(load_first(gate + i, rest) * factor) * (load_first(up + i, rest) * factor),
        rest);
  }
}

template <class Act>
inline void run_activation(const ActivationParams& p, const ThreadPool& pool) {
  constexpr int64_t kPiece = 2048;
  const int64_t pieces = (p.intermediate_size + kPiece - 1) / kPiece;
  dispatch_activation_type(p.type, [&](auto element) {
    using T = decltype(element);
    // Item i is piece i % pieces of row i / pieces.
    const int64_t grain = grain_rows(p.intermediate_size < kPiece ? p.intermediate_size : kPiece);
    parallel_for(pool, 0, p.num_tokens * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t t = item / pieces;
        const int64_t first = item % pieces * kPiece;
        const int64_t rest = p.intermediate_size - first;
        const T* gate = static_cast<const T*>(p.input) + t * p.input_stride_token + first;
        T* out = static_cast<T*>(p.out) + t * p.out_stride_token + first;
        activate<Act>(out, gate, gate + p.intermediate_size, rest < kPiece ? rest : kPiece,
                      row_scale<T>(p.scales, t));
      }
    });
  });
}

inline void activation(const ActivationParams& p, const ThreadPool& pool) {
  switch (p.activation) {
    case Activation::kSilu:
      return run_activation<Silu>(p, pool);
    case Activation::kGelu:
      return run_activation<Gelu>(p, pool);
    case Activation::kGeluTanh:
      return run_activation<GeluTanh>(p, pool);
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
