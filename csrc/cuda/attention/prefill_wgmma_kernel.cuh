// Prefill attention on Hopper: wgmma, tensor copies, three roles. 16-bit caches, head_dim <= 128.
//
// Grid: one block a multiprocessor; a block takes every gridDim.x-th tile of 128 packed rows of one
// (sequence, KV head), later rows first. Warpgroups 1 and 2 each multiply 64 rows; warp 0 of
// warpgroup 0 feeds them tiles of 128 keys, warp 1 of 128 values, one box of a block's rows an
// instruction; warps 2 and 3 gather the next tile's queries. All hand over by mbarriers, so the
// copies run ahead across tiles. A warpgroup's softmax overlaps with its product of the tile
// before. FLOPs: 4 * rows * keys * head_dim.
#pragma once

#include "cuda/attention/prefill_cursor.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tile_query.cuh"
#include "cuda/attention/write_rows.cuh"
#include "cuda/device/wgmma.cuh"

namespace pagedkv::cuda {

template <int kHeadDim>
struct WgmmaTraits {
  static constexpr int kDim = kHeadDim;  // head_dim, padded
  static constexpr int kSlabs = kDim / 64;
  static constexpr int kRows = 128;
  static constexpr int kKeys = 128;
  static constexpr int kThreads = 384;
  static constexpr int kStages = 2;
  static constexpr int kSlabBytes = 128 * 128;  // 128 rows or keys of 64 elements
  static constexpr int kTileBytes = kSlabs * kSlabBytes;
  static constexpr int kQueryLoaders = 64;
  // Shared memory: queries [2], keys [kStages], values [kStages].
  static constexpr int kSharedBytes = (2 + 2 * kStages) * kTileBytes + 1024;  // to align by 1024
};

// Pairs of barriers: full is announced by whoever fills, empty by the eight multiplying warps.
template <int kStages>
struct PipelineBarriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

template <class Traits>
struct PrefillBarriers {
  PipelineBarriers<2> queries;
  PipelineBarriers<Traits::kStages> keys;
  PipelineBarriers<Traits::kStages> values;
};

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

// One warp: all tiles of keys, or all of values, from the last to the first. Keys and values have a
// warp each, so that neither waits for the other's stage: keys are released earlier.
template <class Traits>
__device__ void feed_tiles(const PagedAttentionParams& params, const CUtensorMap* map,
                           PrefillCursor<Traits::kRows, Traits::kKeys> cursor,
                           PipelineBarriers<Traits::kStages>& ring, uint32_t tiles, int box_rows,
                           int lane) {
  RingPosition<Traits::kStages> at;
  const auto block_size = static_cast<unsigned>(params.cache.block_size);
  // A lane has one box of every tile: at most 16 pieces of 8 rows, kSlabs slabs each.
  const int row = lane / Traits::kSlabs * box_rows;
  const int slab = lane % Traits::kSlabs;
  const uint32_t inside = slab * Traits::kSlabBytes + row * 128;
  const bool has_box = row < Traits::kKeys;
  TilePart part;
  while (cursor.next(part)) {
    const int32_t* table = params.block_tables + part.seq * params.block_tables_stride;
    const int last = part.sequence.seq_len - 1;
    // Past the end the last block is read again: its keys are masked, its values zeroed.
    const auto block_of = [&](int first) {
      return table[static_cast<unsigned>(max(0, min(first + row, last))) / block_size];
    };
    int first = part.base_key + (part.num_steps - 1) * Traits::kKeys;
    int block = part.num_steps > 0 ? block_of(first) : 0;
    for (int step = part.num_steps - 1; step >= 0; --step) {
      const int offset = first + row <= last
                             ? static_cast<int>(static_cast<unsigned>(first + row) % block_size)
                             : 0;
      const int next_block = block_of(first - Traits::kKeys);  // read ahead: it takes long
      const uint32_t tile = tiles + at.stage * Traits::kTileBytes;
      const uint32_t full = shared_address(&ring.full[at.stage]);
      wait_barrier(shared_address(&ring.empty[at.stage]), at.round ^ 1);
      if (lane == 0) arrive_expecting(full, Traits::kTileBytes);
      __syncwarp();
      if (has_box) copy_box(tile + inside, map, slab * 64, offset, part.kv_head, block, full);
      __syncwarp();
      at.advance();
      first -= Traits::kKeys;
      block = next_block;
    }
  }
}

// Warps 2 and 3: the tiles' query rows, gathered into the swizzled layout; rows past the end are 0.
template <class Traits, class T>
__device__ void feed_queries(const PagedAttentionParams& params,
                             PrefillCursor<Traits::kRows, Traits::kKeys> cursor,
                             PrefillBarriers<Traits>& barriers, uint32_t queries, int thread) {
  RingPosition<2> at;
  const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
  const int head_chunks = static_cast<int>(params.cache.head_dim) / 8;
  constexpr int kChunks = Traits::kDim / 8;
  TilePart part;
  while (cursor.next(part)) {
    if (part.num_steps == 0) continue;
    wait_barrier(shared_address(&barriers.queries.empty[at.stage]), at.round ^ 1);
    const uint32_t tile = queries + at.stage * Traits::kTileBytes;
#pragma unroll 1
    for (int item = thread; item < Traits::kRows * kChunks; item += Traits::kQueryLoaders) {
      const int row = item / kChunks;
      const int chunk = item % kChunks;
      const int packed = part.first_row + min(row, part.num_rows - 1);
      const int64_t token = part.sequence.query_start + packed / group;
      const int64_t head = static_cast<int64_t>(part.kv_head) * group + packed % group;
      const T* from = static_cast<const T*>(params.query) + token * params.query_stride_token +
                      head * params.query_stride_head + chunk * 8;
      copy_async_16(tile + chunk / 8 * Traits::kSlabBytes + row * 128 + ((chunk ^ row) & 7) * 16,
                    from, row < part.num_rows && chunk < head_chunks);
    }
    commit_copies();
    wait_copies<0>();
    publish_shared_writes();
    arrive(shared_address(&barriers.queries.full[at.stage]));
    at.advance();
  }
}

// Values outside [first_key, seq_len) may be anything, NaN too, and 0 * NaN is NaN: zeros instead,
// in the tiles that have such rows. Each multiplying warpgroup does it for itself (writing zeros
// over the other's zeros), so that neither waits for the other.
template <class Traits>
__device__ void zero_hidden_values(const TilePart& part, int first, char* tile, int thread) {
  for (int item = thread % 128; item < Traits::kKeys * Traits::kSlabs * 8; item += 128) {
    const int row = item / 8 % Traits::kKeys;
    const int key = first + row;
    if (key >= part.first_key && key < part.sequence.seq_len) continue;
    const int slab = item / (8 * Traits::kKeys);
    *reinterpret_cast<uint4*>(tile + slab * Traits::kSlabBytes + row * 128 + item % 8 * 16) =
        make_uint4(0, 0, 0, 0);
  }
  publish_shared_writes();
  sync_threads(1 + thread / 128, 128);
}

// One of the two multiplying warpgroups.
template <class Traits, class T>
class PrefillMultiplier {
 public:
  __device__ PrefillMultiplier(const PagedAttentionParams& params,
                               PrefillBarriers<Traits>& barriers, uint32_t queries, uint32_t keys,
                               uint32_t values, char* value_tiles, int thread)
      : params_(params),
        barriers_(barriers),
        queries_(queries),
        keys_(keys),
        values_(values),
        value_tiles_(value_tiles),
        thread_(thread),
        group_(static_cast<int>(params.num_heads / params.cache.num_kv_heads)) {}

  __device__ void run(PrefillCursor<Traits::kRows, Traits::kKeys> cursor) {
    TilePart part;
    if (warpgroup() == 1) arrive_threads(turn_of(0), 256);  // the first turn is warpgroup 0's
    while (cursor.next(part)) tile(part);
  }

 private:
  static constexpr int kScoreTiles = Traits::kKeys / 8;
  static constexpr int kOutTiles = Traits::kDim / 8;

  __device__ int lane() const { return thread_ % 32; }
  __device__ int warpgroup() const { return thread_ / 128; }

  // The warpgroups take turns to start products, so that one's softmax falls into the other's.
  __device__ static int turn_of(int warpgroup) { return 3 + warpgroup; }

  // scores = Q K^T, committed but in flight.
  __device__ void start_scores(float (&scores)[kScoreTiles][4]) {
    wait_barrier(shared_address(&barriers_.keys.full[key_at_.stage]), key_at_.round);
    const uint32_t query =
        queries_ + query_at_.stage * Traits::kTileBytes + thread_ / 128 * 64 * 128;
    const uint32_t key = keys_ + key_at_.stage * Traits::kTileBytes;
    pin(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < Traits::kDim / 16; ++k) {
      const uint32_t offset = k / 4 * Traits::kSlabBytes + k % 4 * 32;
      multiply_rows_n128<T>(scores, tile_descriptor(query + offset, 16),
                            tile_descriptor(key + offset, 16), k > 0);
    }
    commit_products();
  }

  // out += P V, committed but in flight.
  __device__ void start_out(float (&out)[kOutTiles][4], uint32_t (&weights)[kScoreTiles / 2][4],
                            const TilePart& part, int first) {
    wait_barrier(shared_address(&barriers_.values.full[value_at_.stage]), value_at_.round);
    if (first < part.first_key || first + Traits::kKeys > part.sequence.seq_len) {
      zero_hidden_values<Traits>(part, first, value_tiles_ + value_at_.stage * Traits::kTileBytes,
                                 thread_);
    }
    const uint32_t value = values_ + value_at_.stage * Traits::kTileBytes;
    pin(out);
    begin_products();
#pragma unroll
    for (int j = 0; j < Traits::kKeys / 16; ++j) {
      accumulate_columns<T>(out, weights[j],
                            tile_descriptor(value + j * 16 * 128, Traits::kSlabBytes));
    }
    commit_products();
  }

  __device__ void release(uint64_t& empty) {
    if (lane() == 0) arrive(shared_address(&empty));
  }

  __device__ void release_keys() {
    release(barriers_.keys.empty[key_at_.stage]);
    key_at_.advance();
  }

  __device__ void release_values() {
    release(barriers_.values.empty[value_at_.stage]);
    value_at_.advance();
  }

  __device__ static void pack_scores(uint32_t (&weights)[kScoreTiles / 2][4],
                                     const float (&scores)[kScoreTiles][4]) {
#pragma unroll
    for (int j = 0; j < kScoreTiles / 2; ++j) {
      weights[j][0] = pack<T>(scores[2 * j][0], scores[2 * j][1]);
      weights[j][1] = pack<T>(scores[2 * j][2], scores[2 * j][3]);
      weights[j][2] = pack<T>(scores[2 * j + 1][0], scores[2 * j + 1][1]);
      weights[j][3] = pack<T>(scores[2 * j + 1][2], scores[2 * j + 1][3]);
    }
  }

  __device__ void tile(const TilePart& part) {
    // This warp's 16 rows; if the tile ends before them they repeat its last row and are not
    // written.
    TilePart mine = part;
    const int skipped = thread_ / 32 * kTileRows;
    const bool active = skipped < part.num_rows;
    mine.first_row += active ? skipped : 0;
    mine.num_rows = active ? min(kTileRows, part.num_rows - skipped) : 1;
    const TileRows rows = tile_rows(params_, mine, group_, lane());
    const LogitScale scale = logit_scale(params_, part.kv_head);
    const bool has_alibi = params_.alibi_slopes != nullptr;
    OnlineSoftmax softmax;
    float out[kOutTiles][4] = {};
    if (part.num_steps > 0) {
      float scores[kScoreTiles][4];
      uint32_t weights[kScoreTiles / 2][4];
      float rescale[2];
      int first = part.base_key + (part.num_steps - 1) * Traits::kKeys;
      wait_barrier(shared_address(&barriers_.queries.full[query_at_.stage]), query_at_.round);
      start_scores(scores);
      wait_products<0>();
      pin(scores);
      release_keys();
      softmax.weigh(scores, scale, rows, has_alibi, first, lane() % 4, rescale);
      pack_scores(weights, scores);
      for (int step = part.num_steps - 2; step >= 0; --step) {
        sync_threads(turn_of(warpgroup()), 256);
        start_scores(scores);
        start_out(out, weights, part, first);
        arrive_threads(turn_of(1 - warpgroup()), 256);
        first -= Traits::kKeys;
        wait_products<1>();
        pin(scores);
        release_keys();
        const bool moved =
            softmax.weigh(scores, scale, rows, has_alibi, first, lane() % 4, rescale);
        wait_products<0>();
        pin(out);
        release_values();
        pack_scores(weights, scores);
        if (moved) {
#pragma unroll
          for (auto& sums : out) {
            sums[0] *= rescale[0];
            sums[1] *= rescale[0];
            sums[2] *= rescale[1];
            sums[3] *= rescale[1];
          }
        }
      }
      release(barriers_.queries.empty[query_at_.stage]);
      query_at_.advance();
      start_out(out, weights, part, first);
      wait_products<0>();
      pin(out);
      release_values();
    }
    if (active) write_rows<WgmmaOut, T>(params_, mine, group_, softmax, out, lane());
  }

  struct WgmmaOut {  // what write_rows needs to know of a layout
    static constexpr int kDim = Traits::kDim;
    static constexpr bool kFloat8 = false;
  };

  const PagedAttentionParams& params_;
  PrefillBarriers<Traits>& barriers_;
  uint32_t queries_;
  uint32_t keys_;
  uint32_t values_;
  char* value_tiles_;
  int thread_;
  int group_;
  RingPosition<2> query_at_;
  RingPosition<Traits::kStages> key_at_;
  RingPosition<Traits::kStages> value_at_;
};

template <class T, int kDim>
__global__ void __launch_bounds__(WgmmaTraits<kDim>::kThreads, 1)
    prefill_wgmma_kernel(const __grid_constant__ PagedAttentionParams params,
                         const __grid_constant__ CUtensorMap key_map,
                         const __grid_constant__ CUtensorMap value_map, int box_rows) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = WgmmaTraits<kDim>;
  extern __shared__ char unaligned[];
  __shared__ PrefillBarriers<Traits> barriers;
  __shared__ int64_t scratch[Traits::kThreads / 32];
  char* tiles = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const uint32_t queries = shared_address(tiles);
  const uint32_t keys = queries + 2 * Traits::kTileBytes;
  const uint32_t values = keys + Traits::kStages * Traits::kTileBytes;
  if (threadIdx.x == 0) {
    constexpr int kMultiplyingWarps = 8;
    for (int i = 0; i < 2; ++i) {
      init_barrier(shared_address(&barriers.queries.full[i]), Traits::kQueryLoaders);
      init_barrier(shared_address(&barriers.queries.empty[i]), kMultiplyingWarps);
    }
    for (auto* ring : {&barriers.keys, &barriers.values}) {
      for (int i = 0; i < Traits::kStages; ++i) {
        init_barrier(shared_address(&ring->full[i]), 1);
        init_barrier(shared_address(&ring->empty[i]), kMultiplyingWarps);
      }
    }
    publish_shared_writes();
  }
  // Has a barrier of the block inside, behind which the mbarriers can be used.
  const PrefillCursor<Traits::kRows, Traits::kKeys> cursor =
      plan_prefill<Traits::kThreads, Traits::kRows, Traits::kKeys>(params, scratch);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == 0) {
    give_registers<40>();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x < 32) {
      feed_tiles<Traits>(params, &key_map, cursor, barriers.keys, keys, box_rows, lane);
    } else if (threadIdx.x < 64) {
      feed_tiles<Traits>(params, &value_map, cursor, barriers.values, values, box_rows, lane);
    } else {
      feed_queries<Traits, T>(params, cursor, barriers, queries,
                              static_cast<int>(threadIdx.x) - 64);
    }
  } else {
    take_registers<232>();
    PrefillMultiplier<Traits, T> multiplier(params, barriers, queries, keys, values,
                                            tiles + (2 + Traits::kStages) * Traits::kTileBytes,
                                            static_cast<int>(threadIdx.x) - 128);
    multiplier.run(cursor);
  }
#else
  __trap();  // built for another architecture: launch_prefill_attention does not come here
#endif
}

}  // namespace pagedkv::cuda
