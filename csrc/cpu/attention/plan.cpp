// The planner. See plan.h.
#include "cpu/attention/plan.h"

#include <algorithm>

namespace pagedkv::cpu {
namespace {

// num_splits 0: rows few enough to be worth it have their keys cut into pieces of at least
// kAutoPieceKeys and at most kMaxAutoPieces of them, whatever else is in the batch.
constexpr int64_t kAutoPieceKeys = 1024;
constexpr int64_t kMaxAutoPieces = 16;
// Piece boundaries are multiples of it.
constexpr int64_t kPieceStep = 16;
// Tasks per thread below which tiles are made smaller.
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kMinTileRows = 48;

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

struct TokenRange {
  int64_t begin;
  int64_t end;
};

class Planner {
 public:
  explicit Planner(const PagedAttentionParams& params)
      : params_(params),
        group_(params.num_heads / params.cache.num_kv_heads),
        prefix_len_(static_cast<size_t>(params.num_seqs), 0),
        prefix_state_(static_cast<size_t>(params.num_seqs), -1) {}

  AttentionPlan plan(int64_t num_threads) {
    choose_tile_rows(num_threads);
    for (int64_t g = 0; g < params_.num_prefix_groups; ++g) add_prefix(g);
    for (int64_t s = 0; s < params_.num_seqs; ++s) add_sequence(s);
    // Threads take tasks in this order; the long ones must not come last.
    std::stable_sort(
        plan_.tasks.begin(), plan_.tasks.end(),
        [](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
    return std::move(plan_);
  }

 private:
  static int64_t num_rows(const AttentionTask& task) {
    return (task.token_end - task.token_begin) * (task.head_end - task.head_begin);
  }
  static int64_t cost(const AttentionTask& task) {
    return (num_rows(task) + 4) * (task.key_end - task.key_begin);
  }

  TokenRange tokens_of(int64_t seq) const {
    return {params_.query_start_loc[seq], params_.query_start_loc[seq + 1]};
  }

  // Query heads of one KV head that a task takes, and its tokens. Tiles of a range are even.
  int64_t heads_per_task() const { return std::min(group_, tile_rows_); }
  int64_t tokens_per_task(int64_t num_tokens) const {
    const int64_t most = std::max<int64_t>(1, tile_rows_ / heads_per_task());
    return ceil_div(num_tokens, ceil_div(num_tokens, most));
  }

  // Tiles of a multiple of 4 threads keep everyone busy; smaller ones pack keys more often.
  void choose_tile_rows(int64_t num_threads) {
    for (tile_rows_ = kMaxTileRows; tile_rows_ > kMinTileRows; tile_rows_ /= 2) {
      int64_t num_tasks = 0;
      for (int64_t s = 0; s < params_.num_seqs; ++s) {
        const TokenRange tokens = tokens_of(s);
        if (tokens.begin == tokens.end) continue;
        num_tasks +=
            params_.cache.num_kv_heads * ceil_div(group_, heads_per_task()) *
            ceil_div(tokens.end - tokens.begin, tokens_per_task(tokens.end - tokens.begin));
      }
      if (num_tasks >= kTasksPerThread * num_threads) return;
    }
  }

  // The keys that some row of these tokens of a sequence sees.
  VisibleKeys keys_of(int64_t seq, TokenRange tokens) const {
    const int64_t seq_len = params_.seq_lens[seq];
    const int64_t first_position = seq_len - params_.query_start_loc[seq + 1];
    const auto of = [&](int64_t token) {
      return visible_keys(params_.causal, params_.window, seq_len, first_position + token);
    };
    return {of(tokens.begin).begin, of(tokens.end - 1).end};
  }

  // One task for each KV head (and each part of a very large group of query heads).
  void add_tasks(AttentionTask task) {
    task.streaming = stream_rows_ <= kMaxStreamRows;
    plan_.packs |= !task.streaming;
    for (int64_t kv_head = 0; kv_head < params_.cache.num_kv_heads; ++kv_head) {
      for (int64_t h = 0; h < group_; h += heads_per_task()) {
        task.kv_head = kv_head;
        task.head_begin = kv_head * group_ + h;
        task.head_end = kv_head * group_ + std::min(group_, h + heads_per_task());
        plan_.max_rows = std::max(plan_.max_rows, num_rows(task));
        plan_.tasks.push_back(task);
      }
    }
  }

  // The group's rows, all of them, over the keys of its prefix.
  void add_prefix(int64_t group) {
    const int64_t first = params_.prefix_groups[3 * group];
    const int64_t num_seqs = params_.prefix_groups[3 * group + 1];
    const int64_t prefix_len = params_.prefix_groups[3 * group + 2] * params_.cache.block_size;
    if (num_seqs < 2 || prefix_len == 0) return;  // nothing is shared
    const TokenRange all{tokens_of(first).begin, tokens_of(first + num_seqs - 1).end};
    if (all.begin == all.end) return;
    const int64_t base = plan_.num_states;
    plan_.num_states += (all.end - all.begin) * params_.num_heads;
    stream_rows_ = (all.end - all.begin) * group_;
    for (int64_t s = first; s < first + num_seqs; ++s) {
      prefix_len_[static_cast<size_t>(s)] = prefix_len;
      prefix_state_[static_cast<size_t>(s)] =
          base + (tokens_of(s).begin - all.begin) * params_.num_heads;
    }
    const int64_t step = tokens_per_task(all.end - all.begin);
    int64_t seq = first;
    for (int64_t begin = all.begin; begin < all.end; begin += step) {
      const TokenRange tokens{begin, std::min(all.end, begin + step)};
      while (tokens_of(seq).end <= tokens.begin) ++seq;
      VisibleKeys keys{prefix_len, 0};
      for (int64_t s = seq; s < first + num_seqs && tokens_of(s).begin < tokens.end; ++s) {
        const TokenRange part{std::max(tokens.begin, tokens_of(s).begin),
                              std::min(tokens.end, tokens_of(s).end)};
        if (part.begin >= part.end) continue;
        const VisibleKeys seen = keys_of(s, part);
        keys.begin = std::min(keys.begin, seen.begin);
        keys.end = std::max(keys.end, std::min(prefix_len, seen.end));
      }
      add_tasks({.token_begin = tokens.begin,
                 .token_end = tokens.end,
                 .first_seq = seq,
                 .table_seq = first,
                 .key_begin = keys.begin,
                 .key_end = std::max(keys.begin, keys.end),
                 .first_state = base + (tokens.begin - all.begin) * params_.num_heads});
    }
  }

  // Keys of one piece; pieces begin at its multiples, counted from the sequence's first token.
  int64_t piece_len(int64_t seq_len, int64_t query_len) const {
    if (params_.num_splits > 0) {
      return round_up(std::max<int64_t>(1, ceil_div(seq_len, params_.num_splits)),
                      params_.num_splits == 1 ? 1 : kPieceStep);
    }
    if (query_len * group_ > kMaxSplitTileRows) return std::max<int64_t>(1, seq_len);
    return std::max(kAutoPieceKeys, round_up(ceil_div(seq_len, kMaxAutoPieces), kTileKeys));
  }

  void add_sequence(int64_t seq) {
    const TokenRange all = tokens_of(seq);
    if (all.begin == all.end) return;
    stream_rows_ = (all.end - all.begin) * group_;
    const int64_t piece = piece_len(params_.seq_lens[seq], all.end - all.begin);
    const int64_t step = tokens_per_task(all.end - all.begin);
    for (int64_t begin = all.begin; begin < all.end; begin += step) {
      add_tile(seq, {begin, std::min(all.end, begin + step)}, piece);
    }
  }

  void add_tile(int64_t seq, TokenRange tokens, int64_t piece) {
    const VisibleKeys seen = keys_of(seq, tokens);
    const int64_t begin = std::max(seen.begin, prefix_len_[static_cast<size_t>(seq)]);
    const int64_t end = std::max(begin, seen.end);
    const int64_t num_pieces = begin < end ? (end - 1) / piece - begin / piece + 1 : 0;
    AttentionTask task{.token_begin = tokens.begin,
                       .token_end = tokens.end,
                       .first_seq = seq,
                       .table_seq = seq,
                       .key_begin = begin,
                       .key_end = end,
                       .first_state = -1};
    int64_t prefix_state = prefix_state_[static_cast<size_t>(seq)];
    if (num_pieces <= 1 && prefix_state < 0) return add_tasks(task);
    if (prefix_state >= 0) {
      prefix_state += (tokens.begin - tokens_of(seq).begin) * params_.num_heads;
    }
    plan_.merges.push_back({.token_begin = tokens.begin,
                            .token_end = tokens.end,
                            .prefix_state = prefix_state,
                            .piece_state = plan_.num_states,
                            .num_pieces = num_pieces});
    while (task.key_begin < end) {
      task.key_end = std::min(end, round_down(task.key_begin, piece) + piece);
      task.first_state = plan_.num_states;
      plan_.num_states += (tokens.end - tokens.begin) * params_.num_heads;
      add_tasks(task);
      task.key_begin = task.key_end;
    }
  }

  const PagedAttentionParams& params_;
  const int64_t group_;                // query heads of a KV head
  int64_t tile_rows_ = kMaxTileRows;   // most rows of a task
  int64_t stream_rows_ = 0;            // rows of what is being cut, over one KV head
  std::vector<int64_t> prefix_len_;    // [num_seqs], tokens that a prefix task covers
  std::vector<int64_t> prefix_state_;  // [num_seqs], of the first token; -1: none
  AttentionPlan plan_{};
};

}  // namespace

AttentionPlan plan_attention(const PagedAttentionParams& params, int64_t num_threads) {
  return Planner(params).plan(num_threads);
}

}  // namespace pagedkv::cpu
