// How the kernel of small batches cuts keys: into pieces, for a block each, of about equal length.
// Planned on the device from the lengths, by every warp for itself, a lane a sequence.
//
// There are about as many pieces of each KV head as the grid has blocks for it, its slots; slot s
// takes pieces s, s + slots, ... of the batch's sequence after sequence. A sequence has one piece
// at least, its parts differ by one unit at most.
#pragma once

#include "cuda/attention/decode_plan.cuh"
#include "cuda/attention/decode_traits.cuh"

namespace pagedkv::cuda {

constexpr int kSmallSeqs = 32;    // a lane each
constexpr int kSmallPieces = 32;  // of a sequence, when they are merged: a lane each
constexpr unsigned kLeastPieceUnits = 8;

// Unlike DecodeTraits: one warp both loads and multiplies, two blocks share a multiprocessor.
template <class T, class C, int kHeadDim>
struct SmallTraits : DecodeTraits<T, C, kHeadDim, 1, true> {
  using Base = DecodeTraits<T, C, kHeadDim, 1, true>;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = 64 * 1024 / kWarps / Base::kStageBytes;
  static constexpr int kRingBytes = kStages * Base::kStageBytes;
  // More than the rings: a third block would fit, and where there are three others have one.
  static constexpr int kSharedBytes = 96 * 1024;
  static_assert(kWarps * kRingBytes <= kSharedBytes);
  // A warp's part of a tile, in its ring at the end: rows of fp32, without bank conflicts.
  static constexpr int kPartPitch = Base::kDim + 4;
  static constexpr int kPartFloats = kRingBytes / 4;
  static_assert(kPartPitch * Base::kRows <= kPartFloats);
};

// A block's piece: units [part.unit_begin, part.unit_end) of the tile.
struct SmallPiece {
  DecodePart part;
  int first;   // number of the tile's first piece among its KV head's
  int number;  // of this one in the tile
  int count;   // of the tile
};

template <class Traits>
class SmallPlan {
 public:
  __device__ SmallPlan(const DecodePlan<Traits>& plan, int lane) : plan_(plan) {
    const auto num_seqs = static_cast<unsigned>(plan.params().num_seqs);
    if (static_cast<unsigned>(lane) < num_seqs) line_ = plan.line_of(lane);
    const bool decoded = line_.num_tiles > 0;
    const auto units = static_cast<unsigned>(decoded ? line_.num_units : 0);
    const unsigned total = __reduce_add_sync(0xffffffffu, units);
    const unsigned longest = __reduce_max_sync(0xffffffffu, units);
    const unsigned slots = plan.setup().slots;
    // Units of a piece, at most. Few sequences have no more pieces than there are slots; many, if
    // they are about equal, are left whole: what is not cut is not merged.
    unsigned share = longest;
    if (2 * num_seqs <= slots) {
      const unsigned cuts = slots - num_seqs + 1;
      share = (total + cuts - 1) / cuts;
    } else if (4 * longest * num_seqs > 5 * total) {
      share = (total + slots - 1) / slots;
    }
    share = max(share, max(kLeastPieceUnits, (longest + kSmallPieces - 1) / kSmallPieces));
    pieces_ = decoded ? static_cast<int>(max(1u, (units + share - 1) / share)) : 0;
    int end = pieces_;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end, offset);
      if (lane >= offset) end += other;
    }
    begin_ = end - pieces_;
    total_ = __shfl_sync(0xffffffffu, end, 31);
    slot_ = static_cast<int>(plan.setup().kv_heads.quotient(blockIdx.x));
    kv_head_ = static_cast<int>(blockIdx.x) - slot_ * plan.kv_heads();
  }

  // The block's pieces are first(), first() + slots, ... below total().
  __device__ int first() const { return slot_; }
  __device__ int total() const { return total_; }

  __device__ SmallPiece piece(int number) const {
    const int seq = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, begin_ <= number)));
    const auto of_seq = [&](int x) { return __shfl_sync(0xffffffffu, x, seq); };
    SmallPiece piece;
    piece.first = of_seq(begin_);
    piece.number = number - piece.first;
    piece.count = of_seq(pieces_);
    DecodePart& part = piece.part;
    part.seq = seq;
    part.sequence = {of_seq(line_.sequence.query_start), of_seq(line_.sequence.query_len),
                     of_seq(line_.sequence.seq_len)};
    part.kv_head = kv_head_;
    part.first_row = 0;
    part.num_rows = part.sequence.query_len * plan_.group();
    part.first_key = of_seq(line_.first_key);
    part.base_key = of_seq(line_.base_key);
    part.num_units = of_seq(line_.num_units);
    const auto all = static_cast<unsigned>(part.num_units);
    const unsigned least = all / static_cast<unsigned>(piece.count);
    const int more = static_cast<int>(all - least * static_cast<unsigned>(piece.count));
    part.unit_begin = piece.number * static_cast<int>(least) + min(piece.number, more);
    part.unit_end = part.unit_begin + static_cast<int>(least) + (piece.number < more ? 1 : 0);
    part.tile_begin = 0;
    return piece;
  }

 private:
  const DecodePlan<Traits>& plan_;
  SequenceLine line_{};
  int pieces_;
  int begin_;
  int total_;
  int slot_;
  int kv_head_;
};

}  // namespace pagedkv::cuda
