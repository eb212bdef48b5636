// The tiles of a persistent prefill block and how its roles hear of them: the warp that feeds keys
// takes the next number, locates its tile and puts it into a ring in shared memory that the other
// roles read. Numbers run as in prefill_plan.cuh, long work first; the first is the block's own,
// later ones come from a counter, so that no block is left with more work than the others. Which
// block computes a tile does not change the result.
#pragma once

#include "cuda/attention/prefill_plan.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/wgmma.cuh"

namespace pagedkv::cuda {

// Position in a ring: stage and the parity of its current round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  int round = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1;
    }
  }
};

// Pairs of barriers: full is announced by whoever fills, empty by whoever has read.
template <int kStages>
struct PipelineBarriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

constexpr int kTileSlots = 4;

struct TileRing {
  TilePart tiles[kTileSlots];  // num_steps -1: there are no more
  PipelineBarriers<kTileSlots> barriers;
};

// A warp's walk through the ring.
class TileReader {
 public:
  __device__ explicit TileReader(TileRing& ring) : ring_(ring) {}

  // Null if there are no more. Valid until it is released; released in the same order.
  __device__ const TilePart* next() {
    wait_barrier(shared_address(&ring_.barriers.full[at_.stage]), at_.round);
    const TilePart* tile = &ring_.tiles[at_.stage];
    at_.advance();
    return tile->num_steps < 0 ? nullptr : tile;
  }

  // By all lanes, which have read it.
  __device__ void release(const TilePart* tile, int lane) {
    __syncwarp();
    if (lane == 0) arrive(shared_address(&ring_.barriers.empty[tile - ring_.tiles]));
  }

 private:
  TileRing& ring_;
  RingPosition<kTileSlots> at_;
};

// The tiles of all sequences longer than decode takes, by number. Numbers must not decrease.
template <int kRows, int kStepKeys>
class PrefillTiles {
 public:
  // num_tiles: row tiles of the batch, before they are multiplied by the KV heads.
  __device__ PrefillTiles(const PagedAttentionParams& params, int64_t num_tiles)
      : params_(&params), num_tiles_(num_tiles), seq_begin_(num_tiles), seq_(params.num_seqs) {}

  // False if there are fewer.
  __device__ bool locate(int64_t number, TilePart& part) {
    const int64_t kv_heads = params_->cache.num_kv_heads;
    const int64_t row_tile = num_tiles_ - 1 - number / kv_heads;
    if (row_tile < 0) return false;
    const int group = static_cast<int>(params_->num_heads / kv_heads);
    while (row_tile < seq_begin_) {
      --seq_;
      sequence_ = load_sequence(*params_, seq_);
      seq_begin_ -= prefill_tiles<kRows>(sequence_, group);
    }
    part.seq = static_cast<int>(seq_);
    part.sequence = sequence_;
    part.kv_head = static_cast<int>(number % kv_heads);
    fill_prefill_part<kRows, kStepKeys>(*params_, static_cast<int>(row_tile - seq_begin_), group,
                                        part);
    return true;
  }

  // For steps s of a part with step_begin < s < step_end: step s has no value to hide, and all keys
  // of step s - 1, the next one, are seen by all rows.
  __device__ void find_whole_steps(TilePart& part) const {
    const int group = static_cast<int>(params_->num_heads / params_->cache.num_kv_heads);
    const Sequence& sequence = part.sequence;
    const int first = sequence.position(part.first_row / group);
    const int last = sequence.position((part.first_row + part.num_rows - 1) / group);
    const int all_first = visible_keys(*params_, sequence.seq_len, last).first;
    const int all_end = visible_keys(*params_, sequence.seq_len, first).end;
    part.step_begin = (all_first - part.base_key + kStepKeys - 1) / kStepKeys;
    part.step_end = min((all_end - part.base_key) / kStepKeys + 1,
                        (sequence.seq_len - part.base_key) / kStepKeys);
  }

 private:
  const PagedAttentionParams* params_;
  int64_t num_tiles_;
  int64_t seq_begin_;  // number of sequence seq_'s first tile
  int64_t seq_;
  Sequence sequence_{};
};

// All threads of the block call this; scratch is int64 [kThreads / 32] in shared memory. Has a
// barrier of the block inside.
template <int kThreads, int kRows, int kStepKeys>
__device__ PrefillTiles<kRows, kStepKeys> plan_prefill(const PagedAttentionParams& params,
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
  return PrefillTiles<kRows, kStepKeys>(params, total);
}

}  // namespace pagedkv::cuda
