// The wgmma kernel's work over shared prefixes: tiles of the rows of a group and some of the keys
// of its prefix, of which partial states are left. Members as in prefill_work.cuh.
#pragma once

#include "cuda/attention/prefix_rows.cuh"

namespace pagedkv::cuda {

template <int kRows, int kStepKeys>
class PrefixTiles {
 public:
  __device__ PrefixTiles(const PagedAttentionParams& params,
                         const PrefixCursor<kRows, kStepKeys>& cursor)
      : has_window_(params.window > 0), cursor_(cursor) {}

  // The block's tiles in order, whatever the number.
  __device__ bool locate(int64_t /*number*/, TilePart& part) { return cursor_.next(part); }

  // As in PrefillTiles: all rows see the whole prefix, unless there is a window.
  __device__ void find_whole_steps(TilePart& part) const {
    part.step_begin = has_window_ ? part.num_steps : 0;
    part.step_end = (part.sequence.seq_len - part.base_key) / kStepKeys;
  }

 private:
  bool has_window_;
  PrefixCursor<kRows, kStepKeys> cursor_;
};

struct PrefixWork {
  static constexpr bool kHasEmptyTiles = false;

  template <int kThreads>
  static constexpr int kScratch = kThreads / 32 + 2;

  template <int kThreads, int kRows, int kStepKeys>
  __device__ static PrefixTiles<kRows, kStepKeys> plan(const PagedAttentionParams& params,
                                                       int64_t* scratch) {
    static_assert(kRows == kPrefixTileRows);
    allow_next_kernel();
    return {params,
            plan_prefix<kThreads, kRows, kStepKeys>(
                params, scratch, [&](int64_t g, int64_t begin, int tile_length, int range_length) {
                  prefix_states(params).records[g] = PrefixRecord{begin, tile_length, range_length};
                })};
  }

  __device__ static TileRows rows(const PagedAttentionParams& params, const TilePart& mine,
                                  int group, int lane) {
    return prefix_tile_rows(params, mine, group, lane);
  }

  template <class Traits, class T>
  __device__ __forceinline__ static void write(const PagedAttentionParams& params,
                                               const TilePart& part, int group, int first,
                                               int num_rows, OnlineSoftmax& softmax,
                                               const float (&out)[Traits::kDim / 8][4],
                                               uint32_t /*shared_rows*/, int lane) {
    TilePart mine = part;
    mine.first_row = first;
    mine.num_rows = num_rows;
    write_prefix_states<PlainColumns<Traits::kDim>>(params, part, mine, group, softmax, out, lane);
  }

  // Decode: the merge waits for this kernel only.
  __device__ static void end() { wait_previous_kernel(); }

 private:
  // What the writing of states needs to know of the fragments.
  template <int kHeadDim>
  struct PlainColumns {
    static constexpr int kDim = kHeadDim;
    static constexpr bool kFloat8 = false;
  };
};

}  // namespace pagedkv::cuda
