// The wgmma kernel's work in prefill: tiles of the sequences longer than decode takes, whose rows
// of out and lse are finished.
#pragma once

#include "cuda/attention/prefill_tiles.cuh"
#include "cuda/attention/prefill_write.cuh"
#include "cuda/attention/tile_query.cuh"

namespace pagedkv::cuda {

struct PrefillWork {
  static constexpr bool kHasEmptyTiles = true;  // tiles of rows that see no key

  // Shared memory that plan() needs.
  template <int kThreads>
  using Scratch = int64_t[kThreads / 32];

  // The tiles by number, from all threads of the block; has a barrier of the block inside.
  template <int kThreads, int kRows, int kStepKeys>
  __device__ static PrefillTiles<kRows, kStepKeys> plan(const PagedAttentionParams& params,
                                                        Scratch<kThreads>& scratch) {
    return plan_prefill<kThreads, kRows, kStepKeys>(params, scratch);
  }

  // What the rows of `mine`, a warp's rows of a tile, see.
  __device__ static TileRows rows(const PagedAttentionParams& params, const TilePart& mine,
                                  int group, int lane) {
    return tile_rows(params, mine, group, lane);
  }

  template <class Traits, class T>
  __device__ __forceinline__ static void write(const PagedAttentionParams& params,
                                               const TilePart& part, int group, int first,
                                               int num_rows, OnlineSoftmax& softmax,
                                               const float (&out)[Traits::kDim / 8][4],
                                               uint32_t shared_rows, int lane) {
    write_warp_rows<Traits, T>(params, part, group, first, num_rows, softmax, out, shared_rows,
                               lane);
  }

  template <class T>
  __device__ static void write_empty(const PagedAttentionParams& params, const TilePart& part,
                                     int group, int first, int num_rows, int lane) {
    write_empty_rows<T>(params, part, group, first, num_rows, lane);
  }

  // Last in the kernel, in every thread. Decode may run beside this kernel; who comes next in the
  // stream waits for this one only.
  __device__ static void end() { wait_previous_kernel(); }
};

}  // namespace pagedkv::cuda
