// Which keys of which tiles a warp takes behind the shared prefixes, planned on the device from the
// lengths and groups, by every block for itself: the grid is fixed, the host reads nothing.
//
// A tile is 16 packed rows of one (sequence that shares a prefix, KV head). Its keys, those behind
// the prefix, are cut in steps of kStepKeys. Tiles lie on one line, sequence by sequence, each
// 1 + num_steps long (1 stands for its fixed cost), and every warp of the grid owns a piece of the
// line of the same length; its ends may cut tiles. A tile without keys is 1 long.
#pragma once

#include "cuda/attention/prefix_groups.cuh"
#include "cuda/attention/tile_part.cuh"

namespace pagedkv::cuda {

// The line of one sequence.
struct OwnLine {
  int64_t begin;
  int num_tiles;
  int num_steps;
  int first_key;  // visible to any row of the sequence, behind the prefix
  int base_key;   // first_key rounded down to a multiple of 8
  Sequence sequence;

  __device__ int tile_length() const { return 1 + num_steps; }
  __device__ int64_t end() const { return begin + static_cast<int64_t>(num_tiles) * tile_length(); }
};

template <int kStepKeys>
__device__ OwnLine own_line(const PagedAttentionParams& params, int64_t seq, int64_t begin) {
  OwnLine line{};
  line.begin = begin;
  line.sequence = load_sequence(params, seq);
  const int heads = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  const int rows = line.sequence.query_len * heads;
  const int prefix = rows > 0 ? shared_prefix(params, seq, line.sequence) : 0;
  if (prefix == 0) return line;
  line.num_tiles =
      static_cast<int>(params.cache.num_kv_heads) * ((rows + kTileRows - 1) / kTileRows);
  const int seq_len = line.sequence.seq_len;
  line.first_key = max(visible_keys(params, seq_len, line.sequence.position(0)).first, prefix);
  line.base_key = line.first_key / 8 * 8;
  line.num_steps = max(0, (seq_len - line.base_key + kStepKeys - 1) / kStepKeys);
  return line;
}

// A warp's piece of the line.
struct OwnRange {
  int64_t begin;
  int64_t end;
  int64_t seq;  // that `begin` lies in
  int64_t seq_begin;
};

// Walks a warp's parts in order. part.piece: -1 for a whole tile, else 0 if the tile began in an
// earlier worker, 1 if it begins here and goes on.
template <int kStepKeys>
class OwnCursor {
 public:
  __device__ OwnCursor(const PagedAttentionParams& params, const OwnRange& range)
      : params_(&params), at_(range.begin), end_(range.end), seq_(range.seq) {
    if (at_ < end_) line_ = own_line<kStepKeys>(params, seq_, range.seq_begin);
  }

  // False at the end of the range.
  __device__ bool next(TilePart& part) {
    while (at_ < end_) {
      while (at_ >= line_.end()) line_ = own_line<kStepKeys>(*params_, ++seq_, line_.end());
      const int kv_heads = static_cast<int>(params_->cache.num_kv_heads);
      const int heads = static_cast<int>(params_->num_heads) / kv_heads;
      const int offset = static_cast<int>(at_ - line_.begin);
      const int tile = offset / line_.tile_length();
      const int inside = offset - tile * line_.tile_length();
      const int until =
          static_cast<int>(min(static_cast<int64_t>(line_.tile_length()), inside + end_ - at_));
      part = TilePart{};
      part.seq = static_cast<int>(seq_);
      part.sequence = line_.sequence;
      part.kv_head = tile % kv_heads;
      part.first_row = tile / kv_heads * kTileRows;
      part.num_rows = min(kTileRows, line_.sequence.query_len * heads - part.first_row);
      part.first_key = line_.first_key;
      part.base_key = line_.base_key;
      part.num_steps = line_.num_steps;
      part.step_begin = max(0, inside - 1);
      part.step_end = until - 1;
      part.piece = part.step_begin > 0 ? 0 : part.step_end < part.num_steps ? 1 : -1;
      at_ += until - inside;
      // A cut inside a tile's fixed cost leaves this side nothing.
      if (part.num_steps == 0 || part.step_begin < part.step_end) return true;
    }
    return false;
  }

 private:
  const PagedAttentionParams* params_;
  int64_t at_;
  int64_t end_;
  int64_t seq_;
  OwnLine line_{};
};

// All threads of the block call this; scratch is int64 [3 * kWarps] in shared memory. Returns
// this warp's range. In block 0, record(first token, begin, tile length, range length) is called
// for every sequence that shares a prefix.
template <int kWarps, int kStepKeys, class Record>
__device__ OwnRange plan_own(const PagedAttentionParams& params, int64_t* scratch,
                             const Record& record) {
  constexpr int kThreads = 32 * kWarps;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t run = (params.num_seqs + kThreads - 1) / kThreads;
  const int64_t first = min(thread * run, params.num_seqs);
  const int64_t last = min(first + run, params.num_seqs);
  int64_t length = 0;
  for (int64_t seq = first; seq < last; ++seq) {
    length = own_line<kStepKeys>(params, seq, length).end();
  }
  int64_t before = length;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, before, offset);
    if (thread % 32 >= offset) before += other;
  }
  if (thread % 32 == 31) scratch[2 * kWarps + thread / 32] = before;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < thread / 32) before += scratch[2 * kWarps + warp];
    total += scratch[2 * kWarps + warp];
  }
  before -= length;  // exclusive

  const int64_t workers = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t range = (total + workers - 1) / workers;
  const int64_t block_begin = range * blockIdx.x * kWarps;
  const bool mine =
      length > 0 && before < block_begin + range * kWarps && block_begin < before + length;
  if (mine || blockIdx.x == 0) {
    int64_t at = before;
    for (int64_t seq = first; seq < last; ++seq) {
      const OwnLine line = own_line<kStepKeys>(params, seq, at);
      if (blockIdx.x == 0 && line.num_tiles > 0) {
        record(line.sequence.query_start, at, line.tile_length(), static_cast<int>(range));
      }
      for (int warp = 0; warp < kWarps; ++warp) {
        const int64_t begin = block_begin + range * warp;
        if (at <= begin && begin < line.end()) {
          scratch[2 * warp] = seq;
          scratch[2 * warp + 1] = at;
        }
      }
      at = line.end();
    }
  }
  __syncthreads();
  const int warp = thread / 32;
  OwnRange result{};
  result.begin = min(block_begin + range * warp, total);
  result.end = min(result.begin + range, total);
  if (result.begin < result.end) {
    result.seq = scratch[2 * warp];
    result.seq_begin = scratch[2 * warp + 1];
  }
  return result;
}

}  // namespace pagedkv::cuda
