// The wgmma kernel's work over shared prefixes: tiles of the rows of a group and some of the keys
// of its prefix, added to the rows that decode has left. Members as in prefill_work.cuh.
#pragma once

#include "cuda/attention/prefix_plan.cuh"
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
  using Scratch = PrefixPlanScratch<kThreads>;

  template <int kThreads, int kRows, int kStepKeys>
  __device__ static PrefixTiles<kRows, kStepKeys> plan(const PagedAttentionParams& params,
                                                       Scratch<kThreads>& scratch) {
    static_assert(kRows == kPrefixTileRows);
    allow_next_kernel();
    return {params, plan_prefix<kThreads, kRows, kStepKeys>(params, scratch)};
  }

  __device__ static TileRows rows(const PagedAttentionParams& params, const TilePart& mine,
                                  int group, int lane) {
    return prefix_tile_rows(params, mine, group, lane);
  }

  template <class Traits, class T>
  __device__ __forceinline__ static void write(const PagedAttentionParams& params,
                                               const TilePart& part, int group, int first,
                                               int /*num_rows*/, OnlineSoftmax& softmax,
                                               float (&out)[Traits::kDim / 8][4],
                                               uint32_t /*shared_rows*/, int lane) {
    finish_prefix_rows<PlainColumns<Traits::kDim>, T>(
        params, part, (first - part.first_row) / kTileRows, group, softmax, out, lane);
  }

  // In every thread: who comes next in the stream waits for this kernel only, not for decode.
  __device__ static void end() { wait_previous_kernel(); }

 private:
  // What finish_prefix_rows needs to know of the fragments.
  template <int kHeadDim>
  struct PlainColumns {
    static constexpr int kDim = kHeadDim;
    static constexpr bool kFloat8 = false;
  };
};

}  // namespace pagedkv::cuda
