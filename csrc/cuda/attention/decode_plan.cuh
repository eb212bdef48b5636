// Which keys of which tiles a worker (a block of threads) of the decode kernel takes. Planned on
// the device from the lengths, by every worker for itself: the grid is fixed, the host reads
// nothing.
//
// A tile is 16 packed rows of one (sequence, KV head). Its keys are cut in steps of kStepKeys.
// Tiles lie on one line, sequence by sequence; each worker owns a contiguous piece of the line:
//   num_splits 0: a tile is 1 + num_steps long (1 stands for its fixed cost), and all workers get
//   the
//     same length, so a worker's range may begin and end inside a tile;
//   num_splits n: a tile is n long, one for each of its n pieces, and pieces are never cut.
// An empty sequence is a tile without steps: its rows are written as 0. Sequences that share a
// prefix are not on the line: prefix_own_kernel.cuh has them.
#pragma once

#include "cuda/attention/prefix_groups.cuh"

namespace pagedkv::cuda {

constexpr int kTileRows = 16;

// One tile, or a part of it: steps [step_begin, step_end) of num_steps.
struct TilePart {
  int seq;
  Sequence sequence;
  int kv_head;
  int first_row;  // of the packed rows, a multiple of kTileRows
  int num_rows;   // 1 .. kTileRows
  int first_key;  // visible to any row of the sequence
  int base_key;   // first_key rounded down to a step's grain; step i begins at base_key + i * keys
  int num_steps;
  int step_begin;
  int step_end;
  int piece;         // of num_splits; 0 if num_splits is 0
  int64_t tile_end;  // on the line
};

// The line of one sequence.
struct SequenceLine {
  int64_t begin;
  int num_tiles;
  int tile_length;
  int num_steps;
  int first_key;
  int base_key;
  Sequence sequence;

  __device__ int64_t end() const { return begin + static_cast<int64_t>(num_tiles) * tile_length; }
};

template <int kStepKeys, int kGrain>
class DecodePlan {
 public:
  __device__ DecodePlan(const PagedAttentionParams& params) : params_(params) {
    group_ = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  }

  __device__ SequenceLine line_of(int64_t seq, int64_t begin) const {
    SequenceLine line{};
    line.begin = begin;
    line.sequence = load_sequence(params_, seq);
    const int rows = line.sequence.query_len * group_;
    if (rows <= 0 || rows > kMaxDecodeRows || shared_prefix(params_, seq, line.sequence) > 0) {
      return line;
    }
    line.num_tiles =
        static_cast<int>(params_.cache.num_kv_heads) * ((rows + kTileRows - 1) / kTileRows);
    const KeyRange keys = visible_keys(params_, line.sequence.seq_len, line.sequence.position(0));
    line.first_key = keys.first;
    line.base_key = keys.first / kGrain * kGrain;
    line.num_steps = max(0, (line.sequence.seq_len - line.base_key + kStepKeys - 1) / kStepKeys);
    line.tile_length =
        params_.num_splits == 0 ? 1 + line.num_steps : static_cast<int>(params_.num_splits);
    return line;
  }

  // The part of a tile that begins at `at` on this line, of a worker whose range ends at `end`.
  // Sets how far it reaches.
  __device__ TilePart part_at(int seq, const SequenceLine& line, int64_t at, int64_t end,
                              int64_t& reach) const {
    const int offset = static_cast<int>(at - line.begin);
    const int tile = offset / line.tile_length;
    const int inside = offset - tile * line.tile_length;
    const int kv_heads = static_cast<int>(params_.cache.num_kv_heads);
    TilePart part{};
    part.seq = seq;
    part.sequence = line.sequence;
    part.kv_head = tile % kv_heads;
    part.first_row = tile / kv_heads * kTileRows;
    part.num_rows = min(kTileRows, line.sequence.query_len * group_ - part.first_row);
    part.first_key = line.first_key;
    part.base_key = line.base_key;
    part.num_steps = line.num_steps;
    part.tile_end = line.begin + static_cast<int64_t>(tile + 1) * line.tile_length;
    if (params_.num_splits == 0) {
      const int64_t left = end - at;
      const int until =
          left < line.tile_length - inside ? inside + static_cast<int>(left) : line.tile_length;
      part.step_begin = max(0, inside - 1);
      part.step_end = until - 1;
      reach = at + until - inside;
    } else {
      const int steps = (line.num_steps + line.tile_length - 1) / line.tile_length;
      part.piece = inside;
      part.step_begin = min(inside * steps, line.num_steps);
      part.step_end = min(part.step_begin + steps, line.num_steps);
      reach = at + 1;
    }
    return part;
  }

  __device__ int group() const { return group_; }
  __device__ const PagedAttentionParams& params() const { return params_; }

 private:
  const PagedAttentionParams& params_;
  int group_;
};

// A worker's piece of the line.
struct WorkerRange {
  int64_t begin;
  int64_t end;
  int64_t length;  // of every worker's range (the last ones may be shorter or empty)
  int seq;         // that `begin` lies in
  int64_t seq_begin;
};

// Walks the parts of a worker's range in order. The loads run ahead of the products, so a worker
// has two cursors. All threads of the block hold the same state.
template <class Plan>
class PartCursor {
 public:
  __device__ PartCursor(const Plan& plan, const WorkerRange& range)
      : plan_(plan), at_(range.begin), end_(range.end), seq_(range.seq) {
    if (at_ < end_) line_ = plan_.line_of(seq_, range.seq_begin);
  }

  // False at the end of the range.
  __device__ bool next(TilePart& part) {
    while (at_ < end_) {
      while (at_ >= line_.end()) {
        ++seq_;
        line_ = plan_.line_of(seq_, line_.end());
      }
      part = plan_.part_at(seq_, line_, at_, end_, at_);
      // A cut inside a tile's fixed cost leaves this side nothing.
      if (plan_.params().num_splits != 0 || part.num_steps == 0 ||
          part.step_begin < part.step_end) {
        return true;
      }
    }
    return false;
  }

 private:
  const Plan& plan_;
  int64_t at_;
  int64_t end_;
  int seq_;
  SequenceLine line_{};
};

// Every thread of the block calls this; scratch is int64 [kThreads + 4] in shared memory.
// Each thread adds up the lines of a run of neighbouring sequences; a scan over the threads gives
// the line's length and finds the sequence in which this worker's range begins.
template <int kThreads, class Plan>
__device__ WorkerRange plan_worker(const Plan& plan, int64_t* scratch) {
  const int64_t num_seqs = plan.params().num_seqs;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t run = (num_seqs + kThreads - 1) / kThreads;
  const int64_t first = min(thread * run, num_seqs);
  const int64_t last = min(first + run, num_seqs);
  int64_t length = 0;
  for (int64_t seq = first; seq < last; ++seq) length = plan.line_of(seq, length).end();
  // Inclusive scan within warps, then over the warps' sums.
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

  WorkerRange range{};
  range.length = (total + gridDim.x - 1) / gridDim.x;
  range.begin = min(range.length * blockIdx.x, total);
  range.end = min(range.begin + range.length, total);
  if (range.begin < range.end && before <= range.begin && range.begin < before + length) {
    int64_t seq = first;
    int64_t at = before;
    for (; seq < last; ++seq) {
      const int64_t end = plan.line_of(seq, at).end();
      if (range.begin < end) break;
      at = end;
    }
    scratch[kThreads] = seq;
    scratch[kThreads + 1] = at;
  }
  __syncthreads();
  if (range.begin < range.end) {
    range.seq = static_cast<int>(scratch[kThreads]);
    range.seq_begin = scratch[kThreads + 1];
  }
  return range;
}

}  // namespace pagedkv::cuda
