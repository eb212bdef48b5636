// The tiles of a persistent prefill block, in the order of prefill_plan.cuh: every gridDim.x-th
// one, from the batch's last tile to its first. Each role of a block walks its own copy.
#pragma once

#include "cuda/attention/prefill_plan.cuh"

namespace pagedkv::cuda {

template <int kRows, int kStepKeys>
class PrefillCursor {
 public:
  // num_tiles: row tiles of the batch, before they are multiplied by the KV heads.
  __device__ PrefillCursor(const PagedAttentionParams& params, int64_t num_tiles)
      : params_(&params),
        next_(blockIdx.x),
        num_tiles_(num_tiles),
        seq_begin_(num_tiles),
        seq_(params.num_seqs) {}

  // False when there is none left.
  __device__ bool next(TilePart& part) {
    const int64_t kv_heads = params_->cache.num_kv_heads;
    const int64_t number = num_tiles_ - 1 - next_ / kv_heads;
    if (number < 0) return false;
    const int group = static_cast<int>(params_->num_heads / kv_heads);
    while (number < seq_begin_) {
      --seq_;
      sequence_ = load_sequence(*params_, seq_);
      seq_begin_ -= prefill_tiles<kRows>(sequence_, group);
    }
    part.seq = static_cast<int>(seq_);
    part.sequence = sequence_;
    part.kv_head = static_cast<int>(next_ % kv_heads);
    fill_prefill_part<kRows, kStepKeys>(*params_, static_cast<int>(number - seq_begin_), group,
                                        part);
    next_ += gridDim.x;
    return true;
  }

 private:
  const PagedAttentionParams* params_;
  int64_t next_;
  int64_t num_tiles_;
  int64_t seq_begin_;  // number of sequence seq_'s first tile
  int64_t seq_;
  Sequence sequence_{};
};

// All threads of the block call this; scratch is int64 [kThreads / 32] in shared memory.
template <int kThreads, int kRows, int kStepKeys>
__device__ PrefillCursor<kRows, kStepKeys> plan_prefill(const PagedAttentionParams& params,
                                                        int64_t* scratch) {
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  int tiles = 0;
  for (int64_t seq = threadIdx.x; seq < params.num_seqs; seq += kThreads) {
    tiles += prefill_tiles<kRows>(load_sequence(params, seq), group);
  }
  const int of_warp = __reduce_add_sync(0xffffffffu, tiles);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = of_warp;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) total += scratch[warp];
  return PrefillCursor<kRows, kStepKeys>(params, total);
}

}  // namespace pagedkv::cuda
