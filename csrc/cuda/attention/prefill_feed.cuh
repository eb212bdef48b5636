// The feeding warps of the wgmma prefill kernel: keys (and the choice of tiles), values, queries.
#pragma once

#include "cuda/attention/prefill_tiles.cuh"
#include "cuda/attention/prefill_traits.cuh"
#include "cuda/attention/sequence.cuh"
#include "cuda/device/mma.cuh"

namespace pagedkv::cuda {

// One warp's copies of keys, or of values: a lane has one box of every step, at most 16 pieces of 8
// rows, kSlabs slabs each. Keys and values have a warp each, so that neither waits for the other's
// stage: keys are released earlier.
template <class Traits, int kStages>
class BoxFeeder {
 public:
  __device__ BoxFeeder(const PagedAttentionParams& params, const CUtensorMap* map,
                       PipelineBarriers<kStages>& ring, uint32_t tiles, int box_rows, int lane)
      : params_(params),
        map_(map),
        ring_(ring),
        tiles_(tiles),
        row_(lane / Traits::kSlabs * box_rows),
        slab_(lane % Traits::kSlabs),
        lane_(lane) {}

  // Steps [from, to) of the tile, the last one first.
  __device__ void feed(const TilePart& part, int from, int to) {
    if (from >= to) return;
    const auto block_size = static_cast<unsigned>(params_.cache.block_size);
    const int32_t* table = params_.block_tables + part.seq * params_.block_tables_stride;
    const int last = part.sequence.seq_len - 1;
    // Past the end the last block is read again: its keys are masked, its values zeroed.
    const auto block_of = [&](int first) {
      return table[static_cast<unsigned>(max(0, min(first + row_, last))) / block_size];
    };
    int first = part.base_key + (to - 1) * Traits::kKeys;
    int block = block_of(first);
    for (int step = to - 1; step >= from; --step) {
      const int offset = first + row_ <= last
                             ? static_cast<int>(static_cast<unsigned>(first + row_) % block_size)
                             : 0;
      const int next_block = block_of(first - Traits::kKeys);  // read ahead: it takes long
      const uint32_t full = shared_address(&ring_.full[at_.stage]);
      wait_barrier(shared_address(&ring_.empty[at_.stage]), at_.round ^ 1);
      if (lane_ == 0) arrive_expecting(full, Traits::kTileBytes);
      __syncwarp();
      if (row_ < Traits::kKeys) {
        const uint32_t to_row =
            tiles_ + at_.stage * Traits::kTileBytes + slab_ * Traits::kSlabBytes + row_ * 128;
        copy_box(to_row, map_, slab_ * 64, offset, part.kv_head, block, full);
      }
      __syncwarp();
      at_.advance();
      first -= Traits::kKeys;
      block = next_block;
    }
  }

 private:
  const PagedAttentionParams& params_;
  const CUtensorMap* map_;
  PipelineBarriers<kStages>& ring_;
  uint32_t tiles_;
  int row_;
  int slab_;
  int lane_;
  RingPosition<kStages> at_;
};

// Warp 0. The next tile is told kAhead steps before the last one's end: early enough for its
// queries to arrive, late enough for the counter to know who will be free. counter null: every
// gridDim.x-th tile. Tiles that see no key are finished here: whoever multiplies asks for the next
// tile before it releases the last one, and would wait for ever if the ring were full of them.
template <class Traits, class T, class Work, class Tiles>
__device__ void feed_keys(const PagedAttentionParams& params,
                          BoxFeeder<Traits, Traits::kKeyStages> feeder, Tiles tiles, TileRing& ring,
                          unsigned* counter, int lane) {
  constexpr int kAhead = 8;
  RingPosition<kTileSlots> at;
  const auto take = [&] { return lane == 0 ? atomicAdd(counter, 1u) : 0u; };
  // Not blockIdx.x when there is a counter: a block may start late, on what decode leaves free.
  int64_t number = counter == nullptr ? blockIdx.x : __shfl_sync(0xffffffffu, take(), 0);
  const auto find = [&](TilePart& part) {
    if constexpr (Work::kHasEmptyTiles) {
      while (tiles.locate(number, part)) {
        if (part.num_steps > 0) return true;
        const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
        Work::template write_empty<T>(params, part, group, part.first_row, part.num_rows, lane);
        number = counter == nullptr ? number + gridDim.x : __shfl_sync(0xffffffffu, take(), 0);
      }
      return false;
    } else {
      return tiles.locate(number, part);
    }
  };
  const auto tell_next = [&](TilePart& part) {
    const bool more = find(part);
    if (more) {
      tiles.find_whole_steps(part);
    } else {
      part.num_steps = -1;
    }
    wait_barrier(shared_address(&ring.barriers.empty[at.stage]), at.round ^ 1);
    if (lane == 0) {
      ring.tiles[at.stage] = part;
      arrive(shared_address(&ring.barriers.full[at.stage]));
    }
    at.advance();
    return more;
  };
  TilePart part;
  bool more = tell_next(part);
  while (more) {
    unsigned next = counter == nullptr ? 0 : take();
    const int late = min(kAhead, part.num_steps);
    feeder.feed(part, late, part.num_steps);
    next = __shfl_sync(0xffffffffu, next, 0);
    number = counter == nullptr ? number + gridDim.x : static_cast<int64_t>(next);
    TilePart following;
    more = tell_next(following);
    feeder.feed(part, 0, late);
    part = following;
  }
}

// Warp 1.
template <class Traits>
__device__ void feed_values(BoxFeeder<Traits, Traits::kValueStages> feeder, TileRing& ring,
                            int lane) {
  TileReader reader(ring);
  while (const TilePart* part = reader.next()) {
    feeder.feed(*part, 0, part->num_steps);
    reader.release(part, lane);
  }
}

// Warps 2 and 3: the tiles' query rows, gathered into the swizzled layout; rows past the end are 0.
template <class Traits, class T>
__device__ void feed_queries(const PagedAttentionParams& params, TileRing& ring,
                             PipelineBarriers<Traits::kQueryStages>& barriers, uint32_t queries,
                             int thread) {
  TileReader reader(ring);
  RingPosition<Traits::kQueryStages> at;
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  const int head_chunks = static_cast<int>(params.cache.head_dim) / 8;
  constexpr int kChunks = Traits::kDim / 8;
  constexpr int kRowsAtOnce = 32 / kChunks;
  const int lane = thread % 32;
  const int first_row = thread / 32 * 64;  // of this warp's
  const int chunk = lane % kChunks;
  while (const TilePart* part = reader.next()) {
    wait_barrier(shared_address(&barriers.empty[at.stage]), at.round ^ 1);
    // A lane finds the places of two of the warp's rows and tells them the lanes that copy.
    constexpr int kWarpRows = Traits::kRows / (Traits::kQueryLoaders / 32);
    static_assert(kWarpRows == 64);
    int64_t places[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed = part->first_row + min(first_row + lane + 32 * i, part->num_rows - 1);
      const int64_t token = part->sequence.query_start + packed / group;
      const int64_t head = static_cast<int64_t>(part->kv_head) * group + packed % group;
      places[i] = token * params.query_stride_token + head * params.query_stride_head;
    }
    const int valid_rows = part->num_rows - first_row;
    const uint32_t to = queries + at.stage * Traits::kQueryBytes +
                        chunk / 8 * Traits::kQuerySlabBytes + first_row * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll 4
      for (int pass = 0; pass < 32; pass += kRowsAtOnce) {
        const int row = pass + lane / kChunks;
        const T* from = static_cast<const T*>(params.query) +
                        __shfl_sync(0xffffffffu, places[i], row) + chunk * 8;
        copy_async_16(to + (32 * i + row) * 128 + ((chunk ^ row) & 7) * 16, from,
                      32 * i + row < valid_rows && chunk < head_chunks);
      }
    }
    commit_copies();
    wait_copies<0>();
    publish_shared_writes();
    arrive(shared_address(&barriers.full[at.stage]));
    at.advance();
    reader.release(part, lane);
  }
}

}  // namespace pagedkv::cuda
