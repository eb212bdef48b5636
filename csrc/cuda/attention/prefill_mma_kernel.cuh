// Prefill attention with mma.sync: sequences of more rows than the decode kernel takes, for every
// type and head size; on Hopper the wgmma kernel takes over what it can.
//
// Grid: one block for 128 packed rows of one (sequence, KV head), as many as the batch can have;
// those with nothing to do leave. Later rows, which see more keys, go first. A block's 8 warps hold
// 16 rows each and share tiles of 64 keys (32 of long heads), the next one in flight (cp.async).
// FLOPs: 4 * rows * keys * head_dim. Reads K and V once per 128 rows, mostly from the L2.
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/prefill_plan.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tile_query.cuh"
#include "cuda/attention/write_rows.cuh"

namespace pagedkv::cuda {

template <class T, class C, int kHeadDim>
struct PrefillTraits : UnitTraits<T, C, kHeadDim, (kHeadDim > 128 ? 32 : 64)> {
  using Unit = UnitTraits<T, C, kHeadDim, (kHeadDim > 128 ? 32 : 64)>;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps * kTileRows;
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = kStages * Unit::kStageBytes;
};

// Whether the wgmma kernel takes these operands wherever this code runs: code for 9.0a runs on
// devices of 9.0 alone, where has_prefill_wgmma() holds for them. A kernel of them has no body.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kCompiledForWgmma = true;
#else
constexpr bool kCompiledForWgmma = false;
#endif
template <class T, class C, int kDim>
constexpr bool kLeftToWgmma = kCompiledForWgmma && std::is_same_v<T, C> && kDim <= 128;

// The block's copies of tiles of keys and values. A thread copies the same rows of every tile and
// reads their table entries one tile ahead.
template <class Traits, class C>
class TileLoader {
 public:
  __device__ TileLoader(const PagedAttentionParams& params, const TilePart& part)
      : params_(params),
        table_(params.block_tables + part.seq * params.block_tables_stride),
        part_(part),
        first_(part.base_key) {
    // Padding of many query tokens has no key, and no entry in the table to read.
    if (part.num_steps > 0) read_table();
  }

  // Copies the next tile and commits the group.
  __device__ void issue(uint32_t stage) {
    const ConstKvCache& cache = params_.cache;
    const auto* keys = static_cast<const C*>(cache.key) + part_.kv_head * cache.key_stride_head;
    const auto* values =
        static_cast<const C*>(cache.value) + part_.kv_head * cache.value_stride_head;
    const int valid_chunks = static_cast<int>(cache.head_dim) * static_cast<int>(sizeof(C)) / 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = row_of(i);
      const int chunk = chunk_of(i);
      if (row >= Traits::kUnitKeys) continue;
      const int key = first_ + row;
      const bool valid =
          chunk < valid_chunks && key < part_.sequence.seq_len && key >= part_.first_key;
      const int64_t block = blocks_[i];
      constexpr int kChunkElements = 16 / static_cast<int>(sizeof(C));
      copy_async_16(stage + Traits::key_offset(row, chunk),
                    keys + block * cache.key_stride_block + offsets_[i] * cache.key_stride_token +
                        chunk * kChunkElements,
                    valid);
      copy_async_16(stage + Traits::value_offset(row, chunk),
                    values + block * cache.value_stride_block +
                        offsets_[i] * cache.value_stride_token + chunk * kChunkElements,
                    valid);
    }
    commit_copies();
    first_ += Traits::kUnitKeys;
    read_table();
  }

 private:
  static constexpr int kChunks = Traits::kUnitKeys * Traits::kRowChunks;
  static constexpr int kCopies = (kChunks + Traits::kThreads - 1) / Traits::kThreads;

  __device__ static int row_of(int i) {
    return (i * Traits::kThreads + static_cast<int>(threadIdx.x)) / Traits::kRowChunks;
  }
  __device__ static int chunk_of(int i) {
    return (i * Traits::kThreads + static_cast<int>(threadIdx.x)) % Traits::kRowChunks;
  }

  // Keys past the end read the last valid entry: nothing behind it in the table is an id.
  __device__ void read_table() {
    const auto block_size = static_cast<unsigned>(params_.cache.block_size);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int key = min(first_ + row_of(i), part_.sequence.seq_len - 1);
      const unsigned logical = static_cast<unsigned>(key) / block_size;
      offsets_[i] = static_cast<int>(static_cast<unsigned>(key) - logical * block_size);
      blocks_[i] = table_[logical];
    }
  }

  const PagedAttentionParams& params_;
  const int32_t* table_;
  const TilePart& part_;
  int first_;
  int blocks_[kCopies];
  int offsets_[kCopies];
};

// All keys of a part, each warp with 16 of the block's rows: rows_of(its part) says what they see,
// write(its part, softmax, sums) takes the result. By all threads; the stages are free.
template <class Traits, class T, class C, class RowsOf, class Write>
__device__ void multiply_part(const PagedAttentionParams& params, const TilePart& part, char* ring,
                              int group, const RowsOf& rows_of, const Write& write) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t stages = shared_address(ring);
  TileLoader<Traits, C> loader(params, part);
  if (part.num_steps > 0) loader.issue(stages);

  // This warp's 16 of the block's rows; none if the sequence ends before them.
  TilePart mine = part;
  mine.first_row += warp * kTileRows;
  mine.num_rows = min(kTileRows, part.num_rows - warp * kTileRows);
  const bool active = mine.num_rows > 0;
  mine.num_rows = max(mine.num_rows, 1);
  mine.first_row = active ? mine.first_row : part.first_row;
  TileQuery<Traits, T> query;
  query.load(params, mine, group, lane);
  const TileRows rows = rows_of(mine);
  const LogitScale scale = logit_scale(params, part.kv_head);
  OnlineSoftmax softmax;
  float out[Traits::kDim / 8][4] = {};
  for (int step = 0; step < part.num_steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // the tile is there, and nobody reads the one before it any more
    if (step + 1 < part.num_steps) {
      loader.issue(stages + (step + 1) % Traits::kStages * Traits::kStageBytes);
    }
    if (!active) continue;
    const uint32_t unit = stages + step % Traits::kStages * Traits::kStageBytes;
    float scores[Traits::kUnitKeys / 8][4];
    multiply_keys<Traits, C>(scores, query, unit, lane);
    float rescale[2];
    if (softmax.weigh(scores, scale, rows, params.alibi_slopes != nullptr,
                      part.base_key + step * Traits::kUnitKeys, lane % 4, rescale)) {
#pragma unroll
      for (auto& sums : out) {
        sums[0] *= rescale[0];
        sums[1] *= rescale[0];
        sums[2] *= rescale[1];
        sums[3] *= rescale[1];
      }
    }
    uint32_t weights[Traits::kUnitKeys / 16][4];
    pack_weights<Traits>(weights, scores);
    multiply_values<Traits, C>(out, weights, unit, lane);
  }
  if (active) write(mine, softmax, out);
}

template <class T, class C, int kDim>
__global__ void __launch_bounds__(PrefillTraits<T, C, kDim>::kThreads, 1)
    prefill_mma_kernel(const __grid_constant__ PagedAttentionParams params) {
  if constexpr (kLeftToWgmma<T, C, kDim>) {
    __trap();
  } else {
    using Traits = PrefillTraits<T, C, kDim>;
    extern __shared__ __align__(128) char ring[];
    __shared__ int64_t scratch[Traits::kThreads / 32 + 4];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
    TilePart part{};
    if (!plan_prefill_tile<Traits::kThreads, Traits::kRows, Traits::kUnitKeys>(params, scratch,
                                                                               part)) {
      return;
    }
    multiply_part<Traits, T, C>(
        params, part, ring, group,
        [&](const TilePart& mine) { return tile_rows(params, mine, group, lane); },
        [&](const TilePart& mine, OnlineSoftmax& softmax, const float (&out)[Traits::kDim / 8][4]) {
          write_rows<Traits, T>(params, mine, group, softmax, out, lane);
        });
  }
}

}  // namespace pagedkv::cuda
