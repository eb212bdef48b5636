// Rows whose keys were cut: their states, in a fixed order, into outputs. Included by
// attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

// f(state) for a row's states, the prefix's first. `row` counts from the merge's first row.
template <class F>
inline void for_each_state(const MergeTask& merge, const float* states, int64_t row,
                           int64_t num_rows, int64_t stride, const F& f) {
  if (merge.prefix_state >= 0) f(states + (merge.prefix_state + row) * stride);
  for (int64_t i = 0; i < merge.num_pieces; ++i) {
    f(states + (merge.piece_state + i * num_rows + row) * stride);
  }
}

// output = sum of 2^(maximum_i - maximum) output_i, and the same for sum. A state without keys adds
// nothing.
template <class Out>
inline void merge_rows(const PagedAttentionParams& p, const MergeTask& merge, const float* states) {
  const int64_t head_dim = p.cache.head_dim;
  const int64_t stride = state_floats(head_dim);
  const int64_t rows = (merge.token_end - merge.token_begin) * p.num_heads;
  for (int64_t row = 0; row < rows; ++row) {
    float maximum = kMinusInfinity;
    for_each_state(merge, states, row, rows, stride, [&](const float* state) {
      maximum = state[head_dim] > maximum ? state[head_dim] : maximum;
    });
    alignas(64) float output[kRowStride] = {};
    float sum = 0.0f;
    for_each_state(merge, states, row, rows, stride, [&](const float* state) {
      if (state[head_dim + 1] == 0.0f) return;
      const float weight = __builtin_exp2f(state[head_dim] - maximum);
      sum += weight * state[head_dim + 1];
      int64_t d = 0;
      for (; d + kWidth <= head_dim; d += kWidth) {
        store(output + d, fma(broadcast(weight), load(state + d), load(output + d)));
      }
      if (d < head_dim) {
        const Vec rest = load_first(state + d, static_cast<int>(head_dim - d));
        store(output + d, fma(broadcast(weight), rest, load(output + d)));
      }
    });
    finish_row<Out>(p, merge.token_begin + row / p.num_heads, row % p.num_heads, output, maximum,
                    sum);
  }
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
