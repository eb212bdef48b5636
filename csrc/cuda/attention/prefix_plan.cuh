// Which tiles of which shared prefixes a block of the prefix phase takes, planned on the device
// from the groups, by every block for itself: the grid is fixed, the host reads nothing.
//
// A tile is kRows packed rows of one (group, KV head): row i * heads + h is the group's query token
// i, counted from the first token of its first sequence. Its keys [0, prefix_len) are cut in steps
// of kStepKeys. Tiles lie on one line, group by group, each num_steps long, and every worker (block
// of the grid) owns a range of the line; the ranges' ends may cut tiles. A tile's pieces lie in
// neighbouring workers, in order. Lines have fewer than 2^32 steps: more would take a minute.
//
// As a TilePart, a tile is one of a sequence that has the group's tokens as queries and the prefix
// as keys: sequence.seq_len is prefix_len, part.seq the group's first sequence, whose table serves.
#pragma once

#include "cuda/attention/prefix_groups.cuh"
#include "cuda/attention/tile_part.cuh"

namespace pagedkv::cuda {

// The line of one group.
struct PrefixLine {
  unsigned begin;
  unsigned num_tiles;
  int num_steps;
  int num_rows;     // packed, over one KV head
  int query_start;  // first token
  int first_seq;
  int prefix_len;

  __device__ unsigned end() const { return begin + num_tiles * static_cast<unsigned>(num_steps); }
};

template <int kRows, int kStepKeys>
__device__ PrefixLine prefix_line(const PagedAttentionParams& params, int64_t index,
                                  unsigned begin) {
  PrefixLine line{};
  line.begin = begin;
  const PrefixGroup group = load_prefix_group(params, index);
  if (group.prefix_len == 0) return line;
  const auto kv_heads = static_cast<unsigned>(params.cache.num_kv_heads);
  const unsigned heads = static_cast<unsigned>(params.num_heads) / kv_heads;
  line.first_seq = group.first_seq;
  line.prefix_len = group.prefix_len;
  line.query_start = params.query_start_loc[group.first_seq];
  line.num_rows = (params.query_start_loc[group.first_seq + group.num_seqs] - line.query_start) *
                  static_cast<int>(heads);
  line.num_steps = (group.prefix_len + kStepKeys - 1) / kStepKeys;
  line.num_tiles = static_cast<unsigned>((line.num_rows + kRows - 1) / kRows) * kv_heads;
  return line;
}

constexpr unsigned kMinPrefixSteps = 2;

// Steps of a worker's range. Where decode has some of the multiprocessors only, the first workers
// start beside it, on the others, and the other workers when it ends: the early ones have all, or
// all have the same.
//
// total: steps of the line, num_steps: of a tile, ahead: of an early worker before the others could
// start.
__device__ inline unsigned prefix_range(const PagedAttentionParams& params, unsigned total,
                                        unsigned num_steps, unsigned ahead) {
  if (params.decode_multiprocessors > 0) {
    const unsigned early =
        max(1u, gridDim.x - static_cast<unsigned>(params.decode_multiprocessors));
    // Whole tiles, if that is about as good: they leave no pieces.
    const unsigned share = max((total + early - 1) / early, kMinPrefixSteps);
    const unsigned whole = (share + num_steps - 1) / num_steps * num_steps;
    const unsigned range = whole * 4 <= share * 5 ? whole : share;
    // No more than a tile, at whose end they wait for decode, and done soon after it.
    if (range <= num_steps && range * 4 <= ahead * 7) return range;
  }
  return max((total + gridDim.x - 1) / gridDim.x, kMinPrefixSteps);
}

// What the threads of a block tell each other of its plan.
template <int kThreads>
struct PrefixPlanScratch {
  unsigned steps[kThreads / 32];  // of the warps' lines
  unsigned keys[kThreads / 32];   // that decode reads
  int group;                      // in which the block's range begins, ...
  PrefixLine line;                // and its line
  unsigned tile_steps;            // of the first group
};

// A part as one of the pieces of its tile, in TilePart::piece.
struct PrefixPiece {
  int number;
  int count;

  __device__ int packed() const { return number << 16 | count; }
  __device__ static PrefixPiece of(const TilePart& part) {
    return {part.piece >> 16, part.piece & 0xffff};
  }
};

// Walks a worker's parts in order.
template <int kRows, int kStepKeys>
class PrefixCursor {
 public:
  // Worker blockIdx.x's; range: of every worker, total: of the line.
  __device__ PrefixCursor(const PagedAttentionParams& params, unsigned range, unsigned total,
                          int group, const PrefixLine& line)
      : params_(&params),
        range_(range),
        at_(min(blockIdx.x * range, total)),
        end_(min((blockIdx.x + 1) * range, total)),
        group_(group),
        line_(line) {}

  // False at the end of the range.
  __device__ bool next(TilePart& part) {
    if (at_ >= end_) return false;
    while (at_ >= line_.end()) {
      line_ = prefix_line<kRows, kStepKeys>(*params_, ++group_, line_.end());
    }
    const auto num_steps = static_cast<unsigned>(line_.num_steps);
    const unsigned tile = (at_ - line_.begin) / num_steps;
    const unsigned tile_begin = line_.begin + tile * num_steps;
    const unsigned tile_end = tile_begin + num_steps;
    const auto kv_heads = static_cast<unsigned>(params_->cache.num_kv_heads);
    const unsigned row_tile = tile / kv_heads;
    part = TilePart{};
    part.seq = line_.first_seq;
    part.sequence = {
        line_.query_start,
        line_.num_rows / static_cast<int>(static_cast<unsigned>(params_->num_heads) / kv_heads),
        line_.prefix_len};
    part.kv_head = static_cast<int>(tile - row_tile * kv_heads);
    part.first_row = static_cast<int>(row_tile) * kRows;
    part.num_rows = min(kRows, line_.num_rows - part.first_row);
    part.base_key = static_cast<int>(at_ - tile_begin) * kStepKeys;
    part.num_steps = static_cast<int>(min(tile_end, end_) - at_);
    const unsigned first = tile_begin / range_;  // worker
    const PrefixPiece piece{static_cast<int>(blockIdx.x - first),
                            static_cast<int>((tile_end - 1) / range_ - first) + 1};
    part.piece = piece.packed();
    at_ += static_cast<unsigned>(part.num_steps);
    return true;
  }

 private:
  const PagedAttentionParams* params_;
  unsigned range_;
  unsigned at_;
  unsigned end_;
  int group_;
  PrefixLine line_;
};

// Keys of a thread's share of the decoded sequences, their prefixes included.
template <int kThreads>
__device__ unsigned count_keys(const PagedAttentionParams& params) {
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  unsigned keys = 0;
  for (int64_t seq = threadIdx.x; seq < params.num_seqs; seq += kThreads) {
    const Sequence sequence = load_sequence(params, seq);
    if (sequence.query_len * group <= kMaxDecodeRows) {
      keys += static_cast<unsigned>(sequence.seq_len);
    }
  }
  return keys;
}

// How many steps an early worker is ahead of one that starts when decode has read `keys`. Measured
// on an H200, beside each other: decode reads 3.3 TB/s and a step takes 2 us, so the keys and
// values of a KV head and 128 elements, 2 bytes each, take the time of 1 / 13,200 step; to start
// takes that of 6.
__device__ inline unsigned steps_ahead(const PagedAttentionParams& params, unsigned keys) {
  constexpr float kBytesAStep = 2.0f * 13200;
  constexpr float kStart = 6.0f;
  const float bytes = is_float8(params.cache.type) ? 1.0f : 2.0f;
  const float read = static_cast<float>(keys) * static_cast<float>(params.cache.num_kv_heads);
  return static_cast<unsigned>(kStart + read * bytes / kBytesAStep);
}

// All threads of the block call this.
template <int kThreads, int kRows, int kStepKeys>
__device__ PrefixCursor<kRows, kStepKeys> plan_prefix(const PagedAttentionParams& params,
                                                      PrefixPlanScratch<kThreads>& scratch) {
  const auto num_groups = static_cast<int>(params.num_prefix_groups);
  const int thread = static_cast<int>(threadIdx.x);
  const int run = (num_groups + kThreads - 1) / kThreads;
  const int first = min(thread * run, num_groups);
  const int last = min(first + run, num_groups);
  const int heads = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  unsigned keys = count_keys<kThreads>(params);
  PrefixLine line{};  // of the run's first group, as if the line began there
  unsigned length = 0;
  for (int g = first; g < last; ++g) {
    const PrefixLine one = prefix_line<kRows, kStepKeys>(params, g, length);
    if (g == first) line = one;
    length = one.end();
    keys -= static_cast<unsigned>(one.num_rows / heads * one.prefix_len);  // not decode's
  }
  unsigned before = length;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
    if (thread % 32 >= offset) before += other;
  }
  keys = __reduce_add_sync(0xffffffffu, keys);
  if (thread % 32 == 31) {
    scratch.steps[thread / 32] = before;
    scratch.keys[thread / 32] = keys;
  }
  if (thread == 0) scratch.tile_steps = static_cast<unsigned>(max(1, line.num_steps));
  __syncthreads();
  unsigned total = 0;
  keys = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread / 32) before += scratch.steps[warp];
    total += scratch.steps[warp];
    keys += scratch.keys[warp];
  }
  before -= length;  // exclusive
  const unsigned range = prefix_range(params, total, scratch.tile_steps, steps_ahead(params, keys));
  const unsigned begin = blockIdx.x * range;
  if (before <= begin && begin < before + length) {
    line.begin = before;
    int group = first;
    while (begin >= line.end()) {
      line = prefix_line<kRows, kStepKeys>(params, ++group, line.end());
    }
    scratch.group = group;
    scratch.line = line;
  }
  __syncthreads();
  return PrefixCursor<kRows, kStepKeys>(params, range, total, scratch.group, scratch.line);
}

}  // namespace pagedkv::cuda
