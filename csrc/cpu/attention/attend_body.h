// One task from its rows to their outputs or states: the steps of the online softmax over its keys.
// Included by attention_body.h only.
#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {

inline int64_t num_rows(const AttentionTask& task) {
  return (task.token_end - task.token_begin) * (task.head_end - task.head_begin);
}

// f(row, token, head) in the order of the rows.
template <class F>
inline void for_each_row(const AttentionTask& task, const F& f) {
  int64_t row = 0;
  for (int64_t token = task.token_begin; token < task.token_end; ++token) {
    for (int64_t head = task.head_begin; head < task.head_end; ++head) f(row++, token, head);
  }
}

// Position, visible keys of this task and slope of each row, and the empty softmax.
inline void start_rows(const PagedAttentionParams& p, const AttentionTask& task,
                       const AttentionScratch& s) {
  int64_t seq = task.first_seq;
  for_each_row(task, [&](int64_t row, int64_t token, int64_t head) {
    while (p.query_start_loc[seq + 1] <= token) ++seq;
    const int64_t seq_len = p.seq_lens[seq];
    const int64_t position = seq_len - p.query_start_loc[seq + 1] + token;
    const VisibleKeys seen = visible_keys(p.causal, p.window, seq_len, position);
    s.position[row] = position;
    s.visible_begin[row] = seen.begin > task.key_begin ? seen.begin : task.key_begin;
    s.visible_end[row] = seen.end < task.key_end ? seen.end : task.key_end;
    s.slope[row] =
        p.alibi_slopes == nullptr ? 0.0f : p.alibi_slopes[head * p.alibi_slopes_stride] * kLog2E;
    s.maximum[row] = kMinusInfinity;
    s.sum[row] = 0.0f;
  });
  const int64_t rows = round_up(num_rows(task), kPanelRowStep);
  for (int64_t row = num_rows(task); row < rows; ++row) {  // padding sees nothing
    s.visible_begin[row] = 0;
    s.visible_end[row] = 0;
    s.rescale[row] = 0.0f;
  }
  const int64_t stride = round_up(p.cache.head_dim, 32);
  std::memset(s.output, 0, static_cast<size_t>(rows * stride) * sizeof(float));
}

// Query rows as cells, zero up to a whole vector; padding rows are zero.
template <class Product, class Query>
inline void load_queries(const PagedAttentionParams& p, const AttentionTask& task,
                         const AttentionScratch& s) {
  constexpr int kStep = kWidth * Product::kCell;
  const int64_t head_dim = p.cache.head_dim;
  for_each_row(task, [&](int64_t row, int64_t token, int64_t head) {
    const Query* from = static_cast<const Query*>(p.query) + token * p.query_stride_token +
                        head * p.query_stride_head;
    float* to = s.query + row * kRowStride;
    int64_t d = 0;
    for (; d + kStep <= head_dim; d += kStep, to += kWidth) {
      store(to, Product::load_cells(from + d));
    }
    if (d < head_dim) {
      store(to, Product::load_first_cells(from + d, static_cast<int>(head_dim - d)));
    }
  });
  const int64_t rows = round_up(num_rows(task), kPanelRowStep);
  for (int64_t row = num_rows(task); row < rows; ++row) {
    std::memset(s.query + row * kRowStride, 0, kRowStride * sizeof(float));
  }
}

// f(key, row of the key, row of its value, count) for runs of keys that follow one another in a
// block, over keys [begin, end) of the task's sequence.
template <class Stored, class F>
inline void for_each_run(const PagedAttentionParams& p, const AttentionTask& task, int64_t begin,
                         int64_t end, const F& f) {
  const ConstKvCache& cache = p.cache;
  const int32_t* table = p.block_tables + task.table_seq * p.block_tables_stride;
  const Stored* keys = static_cast<const Stored*>(cache.key) + task.kv_head * cache.key_stride_head;
  const Stored* values =
      static_cast<const Stored*>(cache.value) + task.kv_head * cache.value_stride_head;
  int64_t block = begin / cache.block_size;
  int64_t offset = begin % cache.block_size;
  for (int64_t j = begin; j < end; ++block, offset = 0) {
    const int64_t id = table[block];
    const int64_t rest = cache.block_size - offset;
    const int64_t count = rest < end - j ? rest : end - j;
    f(j, keys + id * cache.key_stride_block + offset * cache.key_stride_token,
      values + id * cache.value_stride_block + offset * cache.value_stride_token, count);
    j += count;
  }
}

template <class Stored>
inline void point_to_run(const void** rows, const Stored* first, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) rows[i] = first + i * stride;
}

// Where the keys and values of a tile's columns [begin, end) lie:
//   [begin, end)               the rows in the cache
//   around it, whole panels    a row of zeros: no slot that belongs to nobody (or to somebody else)
//                              is read
//   kPrefetchKeys after that   what is read next, for prefetching alone: this tile's values after
//                              its keys, the next tile's keys after its values
template <class Stored>
inline void find_rows(const PagedAttentionParams& p, const AttentionTask& task,
                      const AttentionScratch& s, int64_t tile, int64_t begin, int64_t end) {
  const int64_t first = round_down(begin, kPanelWidth);
  const int64_t last = round_up(end, kPanelWidth);
  const auto point_to_zeros = [&](int64_t from, int64_t to) {
    point_to_run(s.key_rows + from, s.zeros, 0, to - from);
    point_to_run(s.value_rows + from, s.zeros, 0, to - from);
  };
  point_to_zeros(first, begin);
  point_to_zeros(end, last + kPrefetchKeys);
  for_each_run<Stored>(
      p, task, tile + begin, tile + end,
      [&](int64_t j, const Stored* key, const Stored* value, int64_t count) {
        point_to_run(s.key_rows + (j - tile), key, p.cache.key_stride_token, count);
        point_to_run(s.value_rows + (j - tile), value, p.cache.value_stride_token, count);
      });
  const int64_t ahead = kPrefetchKeys < end - begin ? kPrefetchKeys : end - begin;
  for (int64_t i = 0; i < ahead; ++i) s.key_rows[last + i] = s.value_rows[begin + i];
  const int64_t next = tile + end;
  const int64_t most = next + kPrefetchKeys;
  for_each_run<Stored>(p, task, next, most < task.key_end ? most : task.key_end,
                       [&](int64_t j, const Stored* key, const Stored*, int64_t count) {
                         point_to_run(s.value_rows + last + (j - next), key,
                                      p.cache.key_stride_token, count);
                       });
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// One row's columns within a tile's [begin, end).
inline Columns row_columns(const AttentionScratch& s, int64_t row, int64_t tile, int64_t begin,
                           int64_t end) {
  const int64_t first = clamp(s.visible_begin[row] - tile, begin, end);
  return {first, clamp(s.visible_end[row] - tile, first, end)};
}

// The columns that rows [row, row_end) see.
inline Columns joint_columns(const AttentionScratch& s, int64_t row, int64_t row_end, int64_t tile,
                             int64_t begin, int64_t end) {
  Columns joint{end, begin};
  for (; row < row_end; ++row) {
    const Columns one = row_columns(s, row, tile, begin, end);
    if (one.begin >= one.end) continue;
    joint.begin = one.begin < joint.begin ? one.begin : joint.begin;
    joint.end = one.end > joint.end ? one.end : joint.end;
  }
  return joint;
}

// The softmax step of rows [row, row_end), whose product with the values runs over `joint`.
template <class Product>
inline void weigh_rows(const AttentionScratch& s, int64_t row, int64_t row_end,
                       const Columns& joint, int64_t tile, int64_t begin, int64_t end,
                       const LogitRule& rule) {
  const int64_t first = round_down(joint.begin, kWidth);
  const int64_t last = round_up(joint.end, kWidth);
  for (; row < row_end; ++row) {
    const Columns own = row_columns(s, row, tile, begin, end);
    s.rescale[row] =
        weigh_row<Product>(s.scores + row * kRowStride, own.begin, own.end, first, last, rule,
                           s.slope[row], tile - s.position[row], s.maximum + row, s.sum + row);
  }
}

template <class Product, class Stored>
inline void stream_step(const AttentionTask& task, const AttentionScratch& s, int64_t tile,
                        int64_t begin, int64_t end, int64_t head_dim, const LogitRule& rule) {
  const int64_t rows = num_rows(task);
  const Columns joint = joint_columns(s, 0, rows, tile, begin, end);
  if (joint.begin >= joint.end) return;
  stream_tile_scores<Product, Stored>(s, rows, joint.begin, joint.end, head_dim);
  weigh_rows<Product>(s, 0, rows, joint, tile, begin, end, rule);
  stream_tile_values<Product, Stored>(s, rows, joint.begin, joint.end, head_dim);
}

template <class Product, class Stored>
inline void tile_step(const AttentionTask& task, const AttentionScratch& s, int64_t tile,
                      int64_t begin, int64_t end, int64_t head_dim, const LogitRule& rule) {
  const int64_t rows = round_up(num_rows(task), kPanelRowStep);
  const int64_t all_columns = tile_keys(head_dim);
  const int64_t first = round_down(begin, kPanelWidth);
  const int64_t last = round_up(end, kPanelWidth);
  Columns seen[kMaxTileRows / kPanelRows + 1];
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    const int64_t row_end = row + kPanelRows < rows ? row + kPanelRows : rows;
    seen[row / kPanelRows] = joint_columns(s, row, row_end, tile, begin, end);
  }
  pack_keys<Product, Stored>(s.key_rows, first, last, head_dim, s.packed_keys);
  tile_scores<Product>(s, seen, rows, begin, end, head_dim);
  pack_values<Stored>(Product{}, s.value_rows, first, last, all_columns, head_dim, s.packed_values);
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    const int64_t row_end = row + kPanelRows < rows ? row + kPanelRows : rows;
    const Columns joint = seen[row / kPanelRows];
    if (joint.begin >= joint.end) continue;
    weigh_rows<Product>(s, row, row_end, joint, tile, begin, end, rule);
  }
  tile_values<Product>(s, seen, rows, all_columns, head_dim);
}

// head_dim floats to an output row.
template <class Out>
inline void store_row(Out* to, const float* from, Vec factor, int64_t head_dim) {
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(to + d, load(from + d) * factor);
  if (d < head_dim) {
    store_first(to + d, load(from + d) * factor, static_cast<int>(head_dim - d));
  }
}

// output / sum * v_scale and the log of the sum of e^logit; zeros and -inf for a row without keys.
template <class Out>
inline void finish_row(const PagedAttentionParams& p, int64_t token, int64_t head,
                       const float* output, float maximum, float sum) {
  Out* to = static_cast<Out*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const int64_t kv_head = head / (p.num_heads / p.cache.num_kv_heads);
  const float v_scale =
      p.cache.v_scale == nullptr ? 1.0f : p.cache.v_scale[kv_head * p.cache.v_scale_stride];
  store_row(to, output, broadcast(sum == 0.0f ? 0.0f : v_scale / sum), p.cache.head_dim);
  if (p.lse == nullptr) return;
  p.lse[token * p.lse_stride_token + head * p.lse_stride_head] =
      sum == 0.0f ? kMinusInfinity : maximum * kLn2 + __builtin_logf(sum);
}

template <class Out>
inline void finish_rows(const PagedAttentionParams& p, const AttentionTask& task,
                        const AttentionScratch& s, float* states) {
  const int64_t head_dim = p.cache.head_dim;
  const int64_t stride = round_up(head_dim, 32);
  for_each_row(task, [&](int64_t row, int64_t token, int64_t head) {
    const float* output = s.output + row * stride;
    if (task.first_state < 0) {
      finish_row<Out>(p, token, head, output, s.maximum[row], s.sum[row]);
      return;
    }
    const int64_t index = task.first_state + (token - task.token_begin) * p.num_heads + head;
    float* state = states + index * state_floats(head_dim);
    store_row(state, output, broadcast(1.0f), head_dim);
    state[head_dim] = s.maximum[row];
    state[head_dim + 1] = s.sum[row];
  });
}

inline LogitRule logit_rule(const PagedAttentionParams& p, const AttentionTask& task) {
  const float k_scale =
      p.cache.k_scale == nullptr ? 1.0f : p.cache.k_scale[task.kv_head * p.cache.k_scale_stride];
  const float scale = p.scale * k_scale * (p.soft_cap > 0.0f ? 1.0f : kLog2E);
  return {.scale = scale,
          .soft_cap = p.soft_cap,
          .is_plain = scale > 0.0f && p.soft_cap == 0.0f && p.alibi_slopes == nullptr};
}

// TileProduct for packed tiles, StreamProduct for keys read in place.
template <class TileProduct, class StreamProduct, class Stored, class Query>
inline void attend_with(const PagedAttentionParams& p, const AttentionTask& task,
                        const AttentionScratch& s, float* states) {
  const int64_t head_dim = p.cache.head_dim;
  const int64_t step = tile_keys(head_dim);
  const LogitRule rule = logit_rule(p, task);
  start_rows(p, task, s);
  if (task.streaming) load_queries<StreamProduct, Query>(p, task, s);
  if (!task.streaming) load_queries<TileProduct, Query>(p, task, s);
  for (int64_t tile = round_down(task.key_begin, step); tile < task.key_end; tile += step) {
    const int64_t begin = clamp(task.key_begin - tile, 0, step);
    const int64_t end = clamp(task.key_end - tile, 0, step);
    find_rows<Stored>(p, task, s, tile, begin, end);
    if (task.streaming) {
      stream_step<StreamProduct, Stored>(task, s, tile, begin, end, head_dim, rule);
    } else {
      tile_step<TileProduct, Stored>(task, s, tile, begin, end, head_dim, rule);
    }
  }
  finish_rows<Query>(p, task, s, states);
}

}  // namespace pagedkv::cpu::PAGEDKV_ISA
