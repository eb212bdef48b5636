// Which tiles of which shared prefixes a block of the prefix phase takes, planned on the device
// from the groups, by every block for itself: the grid is fixed, the host reads nothing.
//
// A tile is kRows packed rows of one (group, KV head): row i * heads + h is the group's query token
// i, counted from the first token of its first sequence. Its keys [0, prefix_len) are cut in steps
// of kStepKeys. Tiles lie on one line, group by group, each num_steps long, and every worker owns a
// piece of the line of the same length, kMinSteps at least; a worker's ends may cut tiles.
//
// As a TilePart, a tile is one of a sequence that has the group's tokens as queries and the prefix
// as keys: sequence.seq_len is prefix_len, part.seq the group's first sequence, whose table serves.
#pragma once

#include "cuda/attention/prefix_groups.cuh"
#include "cuda/attention/tile_part.cuh"

namespace pagedkv::cuda {

// The line of one group.
struct PrefixLine {
  int64_t begin;
  int64_t num_tiles;
  int num_steps;
  int num_rows;     // packed, over one KV head
  int query_start;  // first token
  int first_seq;
  int prefix_len;

  __device__ int64_t end() const { return begin + num_tiles * num_steps; }
};

template <int kRows, int kStepKeys>
__device__ PrefixLine prefix_line(const PagedAttentionParams& params, int64_t index,
                                  int64_t begin) {
  PrefixLine line{};
  line.begin = begin;
  const PrefixGroup group = load_prefix_group(params, index);
  if (group.prefix_len == 0) return line;
  const int heads = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  line.first_seq = group.first_seq;
  line.prefix_len = group.prefix_len;
  line.query_start = params.query_start_loc[group.first_seq];
  line.num_rows =
      (params.query_start_loc[group.first_seq + group.num_seqs] - line.query_start) * heads;
  line.num_steps = (group.prefix_len + kStepKeys - 1) / kStepKeys;
  line.num_tiles = (line.num_rows + kRows - 1) / kRows * params.cache.num_kv_heads;
  return line;
}

// Walks a worker's parts in order. part.piece: -1 for a whole tile, else 0 if the tile began in an
// earlier worker, 1 if it begins here and goes on.
template <int kRows, int kStepKeys>
class PrefixCursor {
 public:
  __device__ PrefixCursor(const PagedAttentionParams& params, int64_t begin, int64_t end,
                          int64_t group, int64_t group_begin)
      : params_(&params), at_(begin), end_(end), group_(group) {
    if (at_ < end_) line_ = prefix_line<kRows, kStepKeys>(params, group, group_begin);
  }

  // False at the end of the range.
  __device__ bool next(TilePart& part) {
    if (at_ >= end_) return false;
    while (at_ >= line_.end()) {
      line_ = prefix_line<kRows, kStepKeys>(*params_, ++group_, line_.end());
    }
    const int64_t offset = at_ - line_.begin;
    const int64_t tile = offset / line_.num_steps;
    const int step_begin = static_cast<int>(offset - tile * line_.num_steps);
    const int step_end =
        static_cast<int>(min(static_cast<int64_t>(line_.num_steps), step_begin + end_ - at_));
    const int kv_heads = static_cast<int>(params_->cache.num_kv_heads);
    const int row_tile = static_cast<int>(tile / kv_heads);
    part = TilePart{};
    part.seq = line_.first_seq;
    part.sequence = {line_.query_start,
                     line_.num_rows / static_cast<int>(params_->num_heads / kv_heads),
                     line_.prefix_len};
    part.kv_head = static_cast<int>(tile - static_cast<int64_t>(row_tile) * kv_heads);
    part.first_row = row_tile * kRows;
    part.num_rows = min(kRows, line_.num_rows - part.first_row);
    part.base_key = step_begin * kStepKeys;
    part.num_steps = step_end - step_begin;
    part.piece = step_begin > 0 ? 0 : step_end < line_.num_steps ? 1 : -1;
    at_ += part.num_steps;
    return true;
  }

 private:
  const PagedAttentionParams* params_;
  int64_t at_;
  int64_t end_;
  int64_t group_;
  PrefixLine line_{};
};

constexpr int kMinPrefixSteps = 2;

// All threads of the block call this; scratch is int64 [kThreads / 32 + 2] in shared memory. In
// block 0, record(group, begin, tile length, range length) is called for every group.
template <int kThreads, int kRows, int kStepKeys, class Record>
__device__ PrefixCursor<kRows, kStepKeys> plan_prefix(const PagedAttentionParams& params,
                                                      int64_t* scratch, const Record& record) {
  const int64_t num_groups = params.num_prefix_groups;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t run = (num_groups + kThreads - 1) / kThreads;
  const int64_t first = min(thread * run, num_groups);
  const int64_t last = min(first + run, num_groups);
  int64_t length = 0;
  for (int64_t g = first; g < last; ++g) {
    length = prefix_line<kRows, kStepKeys>(params, g, length).end();
  }
  int64_t before = length;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, before, offset);
    if (thread % 32 >= offset) before += other;
  }
  if (thread % 32 == 31) scratch[thread / 32] = before;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread / 32) before += scratch[warp];
    total += scratch[warp];
  }
  before -= length;  // exclusive

  const int64_t range =
      max((total + gridDim.x - 1) / gridDim.x, static_cast<int64_t>(kMinPrefixSteps));
  const int64_t begin = min(range * blockIdx.x, total);
  const int64_t end = min(begin + range, total);
  const bool mine = begin < end && before <= begin && begin < before + length;
  if (mine || blockIdx.x == 0) {
    int64_t at = before;
    for (int64_t g = first; g < last; ++g) {
      const PrefixLine line = prefix_line<kRows, kStepKeys>(params, g, at);
      if (blockIdx.x == 0) record(g, at, line.num_steps, static_cast<int>(range));
      if (mine && at <= begin && begin < line.end()) {
        scratch[kThreads / 32] = g;
        scratch[kThreads / 32 + 1] = at;
      }
      at = line.end();
    }
  }
  __syncthreads();
  const bool has_work = begin < end;
  return PrefixCursor<kRows, kStepKeys>(params, begin, end, has_work ? scratch[kThreads / 32] : 0,
                                        has_work ? scratch[kThreads / 32 + 1] : 0);
}

}  // namespace pagedkv::cuda
