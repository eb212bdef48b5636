// How the line of units is cut into ranges, one a warp, and the ranges are dealt out to the blocks:
// worked out on the device from the lengths, by every block for itself; and the walk through the
// parts of a range.
#pragma once

#include "cuda/attention/decode_plan.cuh"

namespace pagedkv::cuda {

// Where warp w's share of `count` units begins; its end is where the next one's begins.
template <class Traits>
__device__ unsigned share_begin(unsigned count, int warp) {
  const auto w = static_cast<unsigned>(warp);
  return count / Traits::kWarps * w + min(w, count % Traits::kWarps);
}

// The cut of the line of units into ranges, and of the ranges over the blocks. Blocks get whole
// groups of ranges, floor(b * groups / W) being block b's first one.
struct LineCut {
  unsigned total;      // units
  unsigned share;      // units of a range, if the tiles are not equal
  unsigned tile;       // units of every tile; 0: they are not equal
  unsigned per_tile;   // ranges that a tile is cut into, ...
  unsigned per_range;  // ... or tiles of a range: one of the two is 1
  unsigned group;      // ranges of a group
  unsigned groups;

  // Where a range begins on the line.
  __device__ unsigned begin_of(unsigned range) const {
    unsigned at = range * share;
    if (per_tile > 1) {
      const unsigned number = range / per_tile;
      at = number * tile + (range - number * per_tile) * tile / per_tile;
    } else if (tile != 0) {
      at = range * per_range * tile;
    }
    return min(at, total);
  }
  // The ranges that share a tile: [first, last].
  __device__ void ranges_of(unsigned tile_begin, unsigned num_units, unsigned& first,
                            unsigned& last) const {
    if (tile != 0) {
      first = tile_begin / tile * per_tile;
      last = first + per_tile - 1;
    } else {
      first = tile_begin / share;
      last = (tile_begin + num_units - 1) / share;
    }
  }
  // The block that has a group. The quotient is small: exact in fp32 up to rounding by 1.
  __device__ unsigned block_of(unsigned number) const {
    const unsigned dividend = (number + 1) * gridDim.x - 1;
    auto quotient =
        static_cast<unsigned>(__fdividef(static_cast<float>(dividend), static_cast<float>(groups)));
    if (quotient * groups > dividend) --quotient;
    if ((quotient + 1) * groups <= dividend) ++quotient;
    return quotient;
  }
  // The blocks that share a tile are those of sharer 0 .. num - 1, in order: blocks without groups
  // lie between them if there are fewer groups than blocks.
  struct Sharers {
    unsigned first;  // group or block
    unsigned num;
  };
  __device__ Sharers sharers_of(unsigned tile_begin, unsigned num_units) const {
    unsigned first;
    unsigned last;
    ranges_of(tile_begin, num_units, first, last);
    first /= group;
    last /= group;
    if (groups > gridDim.x) {
      first = block_of(first);
      last = block_of(last);
    }
    return {first, last - first + 1};
  }
  __device__ unsigned sharer(const Sharers& sharers, unsigned i) const {
    return groups > gridDim.x ? sharers.first + i : block_of(sharers.first + i);
  }
};

// What a block owns: [begin, end) of the line's ranges or pieces.
struct BlockRange {
  LineCut cut;
  unsigned begin;
  unsigned end;
  bool has_empty_seq;  // the batch has a decoded sequence without keys
};

// The batch's line, in shared memory: thread t of plan_block served the run of neighbouring
// sequences from t * run on, which begin at begins[t] on the line.
template <class Traits>
struct PlanScratch {
  unsigned sums[32];     // of the warps' lines, ...
  unsigned tiles[32];    // numbers of tiles ...
  unsigned longest[32];  // and units of their longest tile
  unsigned begins[Traits::kAllThreads];
  Sequence sequences[Traits::kAllThreads];  // the run's first
};

template <class Traits>
__device__ int sequences_a_thread(const DecodePlan<Traits>& plan) {
  return (static_cast<int>(plan.params().num_seqs) + Traits::kAllThreads - 1) / Traits::kAllThreads;
}

// `longest` and `tiles`: of the whole line.
template <class Traits>
__device__ LineCut cut_line(const DecodeSetup& setup, unsigned total, unsigned tiles,
                            unsigned longest) {
  constexpr unsigned kWarps = Traits::kWarps;
  LineCut cut{};
  cut.total = total;
  cut.share = max(1u, setup.ranges.quotient(total + setup.ranges.divisor - 1));
  cut.group = 1;
  cut.groups = (total + cut.share - 1) / cut.share;
  if (total != tiles * longest || total == 0) return cut;
  // Equal tiles. Up to 1/4 more for a range is less than merging costs.
  const bool several = cut.share > longest;
  unsigned parts = several ? (cut.share + longest - 1) / longest : longest / cut.share;
  if (several) {
    if (parts * longest * 4 > cut.share * 5) return cut;
    cut.per_tile = 1;
    cut.per_range = parts;
    cut.groups = (tiles + parts - 1) / parts;
  } else {
    if (parts > kWarps) parts = parts / kWarps * kWarps;
    if (longest * 4 > cut.share * parts * 5) return cut;
    cut.per_tile = parts;
    cut.per_range = 1;
    // All blocks should have something to do, but share tiles with few others.
    unsigned group = min(parts, kWarps);
    unsigned groups = tiles * (parts > kWarps ? parts / kWarps : 1);
    while (group % 2 == 0 && groups * 2 <= gridDim.x && group * longest > 4 * parts) {
      group /= 2;
      groups *= 2;
    }
    const unsigned most = setup.blocks.quotient(groups + gridDim.x - 1);  // of a block
    cut.group = most * group <= kWarps ? group : 1;
    cut.groups = most * group <= kWarps ? groups : tiles * parts;
  }
  cut.tile = longest;
  return cut;
}

// Every thread of the block calls this. Each adds up the lines of its run; a scan over the threads
// gives the line's length.
template <class Traits>
__device__ BlockRange plan_block(const DecodePlan<Traits>& plan, PlanScratch<Traits>& scratch) {
  const int num_seqs = static_cast<int>(plan.params().num_seqs);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int run = sequences_a_thread(plan);
  unsigned length = 0;
  unsigned tiles = 0;
  unsigned longest = 0;
  bool empty = false;
  int seq = thread * run;
#pragma unroll 1
  for (int i = 0; i < run && seq < num_seqs; ++i, ++seq) {
    const SequenceLine line = plan.line_of(seq);
    if (i == 0) scratch.sequences[thread] = line.sequence;
    length += plan.length_of(line);
    empty |= line.num_tiles > 0 && line.num_units == 0;
    if (line.num_units > 0) tiles += static_cast<unsigned>(line.num_tiles);
    if (line.num_tiles > 0) longest = max(longest, static_cast<unsigned>(line.num_units));
  }
  // Inclusive scan within warps, then over the warps' sums.
  unsigned before = length;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  tiles = __reduce_add_sync(0xffffffffu, tiles);
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (lane == 31) {
    scratch.sums[warp] = before;
    scratch.tiles[warp] = tiles;
    scratch.longest[warp] = longest;
  }
  BlockRange range{};
  range.has_empty_seq = __syncthreads_or(static_cast<int>(empty)) != 0;
  const bool valid = lane < 2 * Traits::kWarps;
  const unsigned sum = valid ? scratch.sums[lane] : 0;
  before += __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0);
  scratch.begins[thread] = before - length;  // exclusive
  const unsigned total = __reduce_add_sync(0xffffffffu, sum);
  if (plan.params().num_splits == 0) {
    range.cut = cut_line<Traits>(plan.setup(), total,
                                 __reduce_add_sync(0xffffffffu, valid ? scratch.tiles[lane] : 0),
                                 __reduce_max_sync(0xffffffffu, valid ? scratch.longest[lane] : 0));
  } else {
    range.cut.group = 1;
    range.cut.groups = total;
  }
  const auto first_group = [&](unsigned block) {
    return min(plan.setup().blocks.quotient(block * range.cut.groups), range.cut.groups);
  };
  range.begin = first_group(blockIdx.x) * range.cut.group;
  range.end = first_group(blockIdx.x + 1) * range.cut.group;
  __syncthreads();
  return range;
}

// The sequence in whose line `position` lies (before the line's end). By a warp.
template <class Traits>
__device__ LineStart find_start(const DecodePlan<Traits>& plan, const PlanScratch<Traits>& scratch,
                                unsigned position, int lane) {
  constexpr int kStride = Traits::kAllThreads / 32;
  const auto last_before = [&](int first, int stride, int count) {
    const bool before = lane < count && scratch.begins[first + lane * stride] <= position;
    return first + stride * (31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, before))));
  };
  const int thread = last_before(last_before(0, kStride, 32), 1, kStride);
  const int run = sequences_a_thread(plan);
  LineStart start;
  start.seq = thread * run;
  start.seq_begin = scratch.begins[thread];
  start.line = plan.line_of(start.seq, scratch.sequences[thread]);
  if (run > 1) {
#pragma unroll 1
    while (position >= start.seq_begin + plan.length_of(start.line)) {
      start.seq_begin += plan.length_of(start.line);
      start.line = plan.line_of(++start.seq);
    }
  }
  return start;
}

// Walks the parts of a warp's range in order. All lanes hold the same state. The lengths of the
// next sequence are read ahead: while the memory is busy, any read takes microseconds. Those of all
// lie in shared memory unless the sequences are more than the threads.
template <class Traits>
class PartCursor {
 public:
  using Plan = DecodePlan<Traits>;

  __device__ PartCursor(const Plan& plan, const PlanScratch<Traits>& scratch,
                        const WarpRange& range)
      : plan_(plan), scratch_(scratch), at_(range.at), left_(range.count), start_(range.start) {
    read_ahead();
  }

  // False at the end of the range.
  __device__ bool next(DecodePart& part) {
    if (left_ == 0) return false;
    while (at_ >= start_.line.length()) {
      at_ -= start_.line.length();
      start_.seq_begin += start_.line.length();
      ++start_.seq;
      start_.line = plan_.line_of(start_.seq, ahead_);
      read_ahead();
    }
    part = plan_.part_at(start_, at_, left_);
    const auto taken = static_cast<unsigned>(part.unit_end - part.unit_begin);
    at_ += taken;
    left_ -= taken;
    return true;
  }

 private:
  __device__ void read_ahead() {
    const int next = min(start_.seq + 1, static_cast<int>(plan_.params().num_seqs) - 1);
    const bool all = sequences_a_thread(plan_) == 1;
    ahead_ = all ? scratch_.sequences[next] : load_sequence(plan_.params(), next);
  }

  const Plan& plan_;
  const PlanScratch<Traits>& scratch_;
  unsigned at_;
  unsigned left_;
  LineStart start_;
  Sequence ahead_;
};

}  // namespace pagedkv::cuda
