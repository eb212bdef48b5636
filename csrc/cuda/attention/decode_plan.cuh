// Which keys of which tiles a warp of the decode kernel takes. Planned on the device from the
// lengths, by every block for itself: the grid is fixed, the host reads nothing.
//
// A tile is up to kRows packed rows of one (sequence, KV head). Its keys are cut in units of
// kUnitKeys. num_splits 0: the units of all tiles lie on one line, sequence by sequence, tile by
// tile, KV heads fastest, and are cut into ranges of about equal length, one a warp, neighbouring
// ranges in one block (decode_cut.cuh). Equal tiles are cut alike, so that no range ends inside
// another one's tile: merging costs more than a few idle warps, as the memory is the limit. Unequal
// ones are cut wherever a range ends.
// num_splits n: the line consists of pieces, n to a tile; a block owns whole pieces and cuts each
// over its warps.
// Empty sequences have no line; write_empty_rows() serves them. Of sequences that share a prefix
// (prefix_groups.cuh) only the keys behind it are decoded; the prefix kernel adds the others.
#pragma once

#include "cuda/attention/decode_setup.h"
#include "cuda/attention/prefix_groups.cuh"

namespace pagedkv::cuda {

// A contiguous range of units of one tile.
struct DecodePart {
  int seq;
  Sequence sequence;
  int kv_head;
  int first_row;  // of the packed rows, a multiple of kRows
  int num_rows;   // 1 .. kRows
  int first_key;  // visible to any row of the sequence
  int base_key;   // at most first_key, a multiple of 8; unit i begins at base_key + i * kUnitKeys
  int num_units;  // of the tile
  int unit_begin;
  int unit_end;
  unsigned tile_begin;  // on the line
  bool is_last;         // of the warp's range
};

// The line of one sequence.
struct SequenceLine {
  Sequence sequence;
  int num_tiles;
  int num_units;  // of each tile
  int first_key;
  int base_key;

  __device__ unsigned length() const { return static_cast<unsigned>(num_tiles * num_units); }
};

// Where a range of the line begins.
struct LineStart {
  int seq;
  unsigned seq_begin;  // on the line
  SequenceLine line;
};

template <class Traits>
class DecodePlan {
 public:
  __device__ DecodePlan(const PagedAttentionParams& params, const DecodeSetup& setup)
      : params_(params), setup_(setup) {}

  // Without tiles if the sequence is not decoded; without units if it is empty.
  __device__ SequenceLine line_of(int seq, const Sequence& sequence) const {
    SequenceLine line{};
    line.sequence = sequence;
    const int rows = sequence.query_len * group();
    if (rows <= 0 || rows > kMaxDecodeRows) return line;
    line.num_tiles = kv_heads() * ((rows + Traits::kRows - 1) / Traits::kRows);
    // A prefix ends where a block does, and so a box.
    const int prefix = params_.num_prefix_groups > 0 ? shared_prefix(params_, seq, sequence) : 0;
    const int seen = setup_.window > 0 ? sequence.position(0) - setup_.window + 1 : 0;
    line.first_key = max(prefix, seen);
    line.base_key = seen > prefix ? seen / Traits::kUnitKeys * Traits::kUnitKeys : prefix;
    line.num_units =
        max(0, sequence.seq_len - line.base_key + Traits::kUnitKeys - 1) / Traits::kUnitKeys;
    return line;
  }
  __device__ SequenceLine line_of(int seq) const {
    return line_of(seq, load_sequence(params_, seq));
  }

  // Length of a sequence on the line that is cut into ranges.
  __device__ unsigned length_of(const SequenceLine& line) const {
    if (params_.num_splits == 0 || line.num_units == 0) return line.length();
    return static_cast<unsigned>(line.num_tiles) * static_cast<unsigned>(params_.num_splits);
  }

  // The part of `line` that begins at `at` units behind its start and has at most `most` units.
  __device__ DecodePart part_at(const LineStart& start, unsigned at, unsigned most) const {
    const SequenceLine& line = start.line;
    const auto num_units = static_cast<unsigned>(line.num_units);
    const unsigned tile = at / num_units;
    const unsigned unit = at - tile * num_units;
    const int row_tile = setup_.kv_heads.quotient(static_cast<int>(tile));
    DecodePart part;
    part.seq = start.seq;
    part.sequence = line.sequence;
    part.kv_head = static_cast<int>(tile) - row_tile * kv_heads();
    part.first_row = row_tile * Traits::kRows;
    part.num_rows = min(Traits::kRows, line.sequence.query_len * group() - part.first_row);
    part.first_key = line.first_key;
    part.base_key = line.base_key;
    part.num_units = line.num_units;
    part.unit_begin = static_cast<int>(unit);
    part.unit_end = static_cast<int>(unit + min(most, num_units - unit));
    part.tile_begin = start.seq_begin + tile * num_units;
    part.is_last = most <= num_units - unit;
    return part;
  }

  // Where packed row `row` of a tile is: query token of the sequence, and query head.
  struct Place {
    int token;
    int head;
  };
  __device__ Place place_of(const DecodePart& part, int row) const {
    const int packed = part.first_row + row;
    const int token = setup_.group.quotient(packed);
    return {token, part.kv_head * group() + packed - token * group()};
  }

  __device__ int group() const { return static_cast<int>(setup_.group.divisor); }
  __device__ int kv_heads() const { return static_cast<int>(setup_.kv_heads.divisor); }
  __device__ const PagedAttentionParams& params() const { return params_; }
  __device__ const DecodeSetup& setup() const { return setup_; }

 private:
  const PagedAttentionParams& params_;
  const DecodeSetup& setup_;
};

// A warp's range: `count` units from `at` units behind the start of the sequence's line.
struct WarpRange {
  LineStart start;
  unsigned at;
  unsigned count;
};

}  // namespace pagedkv::cuda
