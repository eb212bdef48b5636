// The multiplying warpgroups of the wgmma prefill kernel.
//
// A warpgroup's steps run on over tiles: while the weights of one step multiply the values, the
// scores of the next step are made and weighed, also when that step is the next tile's first. So a
// tile's end costs the tensor cores nothing but the writing of its rows, which falls into the other
// warpgroup's products: the warpgroups take turns to start theirs.
#pragma once

#include "cuda/attention/prefill_softmax.cuh"
#include "cuda/attention/prefill_traits.cuh"
#include "cuda/attention/prefill_write.cuh"
#include "cuda/attention/tile_query.cuh"

namespace pagedkv::cuda {

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

// Work: what the tiles are (prefill_work.cuh).
template <class Traits, class T, class Work>
class PrefillMultiplier {
 public:
  __device__ PrefillMultiplier(const PagedAttentionParams& params, TileRing& ring,
                               PrefillBarriers<Traits>& barriers, uint32_t queries, uint32_t keys,
                               uint32_t values, char* value_tiles, int thread)
      : params_(params),
        reader_(ring),
        barriers_(barriers),
        queries_(queries),
        keys_(keys),
        values_(values),
        value_tiles_(value_tiles),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffffu, thread / 128, 0)),  // uniform, for the compiler too
        group_(static_cast<int>(params.num_heads / params.cache.num_kv_heads)),
        bare_(params.soft_cap <= 0.0f && params.alibi_slopes == nullptr) {}

  __device__ __forceinline__ void run() {
    if (warpgroup() == 1) arrive_threads(turn_of(0), 256);  // the first turn is 0's
    OnlineSoftmax softmax;
    float out[kOutTiles][4] = {};
    float scores[kScoreTiles][4];
    uint32_t weights[kScoreTiles / 2][4];
    float rescale[2];
    const TilePart* part = reader_.next();
    if (part == nullptr) return;
    begin_tile(*part);
    start_scores(scores);
    wait_products<0>();
    pin(scores);
    release_keys();
    weigh(softmax, scores, rescale);
    pack_scores(weights, scores);
    while (true) {
      while (step_ > 0) {
        while (fast_low_ < step_ && step_ < fast_high_) {
          advance<true>(*part, softmax, out, scores, weights);
        }
        if (step_ > 0) advance<false>(*part, softmax, out, scores, weights);
      }
      // The tile's last product with values, and the next one's first scores.
      const TilePart* next = reader_.next();
      const int first = first_;
      const int query_stage = query_at_.stage;
      query_at_.advance();
      if (next == nullptr) {
        take_turn();
        start_out<false>(out, weights, *part, first);
        pass_turn();
        wait_products<0>();
        pin(out);
        write(*part, softmax, out, query_stage);
        return;
      }
      begin_tile(*next);
      take_turn();
      start_scores(scores);
      start_out<false>(out, weights, *part, first);
      pass_turn();
      wait_products<1>();
      pin(scores);
      release_keys();
      OnlineSoftmax next_softmax;
      weigh(next_softmax, scores, rescale);
      pin(scores);
      wait_products<0>();
      pin(out);
      release_values();
      pack_scores(weights, scores);
      write(*part, softmax, out, query_stage);
      reader_.release(part, lane());
      release(barriers_.queries.empty[query_stage]);
      part = next;
      softmax = next_softmax;
      write_out<4 * kOutTiles>([&](int i) { out[i / 4][i % 4] = 0.0f; });
    }
  }

 private:
  static constexpr int kScoreTiles = Traits::kKeys / 8;
  static constexpr int kOutTiles = Traits::kDim / 8;

  __device__ int lane() const { return thread_ % 32; }
  __device__ int warpgroup() const { return warpgroup_; }

  __device__ static int turn_of(int warpgroup) { return 4 + warpgroup; }
  __device__ void take_turn() { sync_threads(turn_of(warpgroup()), 256); }
  __device__ void pass_turn() {
    arrive_threads(turn_of((warpgroup() + 1) % Traits::kWarpgroups), 256);
  }

  // This warp's 16 rows; if the tile ends before them they repeat its last row and are not written.
  __device__ int skipped() const { return thread_ / 32 * kTileRows; }
  __device__ TilePart mine(const TilePart& part) const {
    TilePart made = part;
    made.first_row += skipped() < part.num_rows ? skipped() : 0;
    made.num_rows = skipped() < part.num_rows ? min(kTileRows, part.num_rows - skipped()) : 1;
    return made;
  }

  __device__ __forceinline__ void write(const TilePart& part, OnlineSoftmax& softmax,
                                        float (&out)[kOutTiles][4], int query_stage) {
    if (skipped() >= part.num_rows) return;
    Work::template write<Traits, T>(params_, part, group_, part.first_row + skipped(),
                                    min(kTileRows, part.num_rows - skipped()), softmax, out,
                                    queries_ + query_stage * Traits::kQueryBytes + skipped() * 128,
                                    lane());
  }

  // Steps are numbered from 0, taken from the last to the first.
  __device__ __forceinline__ void begin_tile(const TilePart& part) {
    step_ = part.num_steps - 1;
    first_ = part.base_key + step_ * Traits::kKeys;
    rows_ = Work::rows(params_, mine(part), group_, lane());
    scale_ = logit_scale(params_, part.kv_head);
    fast_low_ = part.step_begin;
    fast_high_ = bare_ && scale_.factor > 0.0f ? part.step_end : 0;
    wait_barrier(shared_address(&barriers_.queries.full[query_at_.stage]), query_at_.round);
  }

  // scores = Q K^T, committed but in flight.
  __device__ __forceinline__ void start_scores(float (&scores)[kScoreTiles][4]) {
    wait_barrier(shared_address(&barriers_.keys.full[key_at_.stage]), key_at_.round);
    const TileDescriptor query(
        queries_ + query_at_.stage * Traits::kQueryBytes + warpgroup() * 64 * 128, 16);
    const TileDescriptor key(keys_ + key_at_.stage * Traits::kTileBytes, 16);
    pin(scores);
    begin_products();
    write_out<Traits::kDim / 16>([&](int k) {
      multiply_rows<T>(scores, query.at(k / 4 * Traits::kQuerySlabBytes + k % 4 * 32),
                       key.at(k / 4 * Traits::kSlabBytes + k % 4 * 32), k > 0);
    });
    commit_products();
  }

  // The same scores by this warp alone: not all warps of the warpgroup may need them.
  __device__ __forceinline__ void score_again(float (&scores)[kScoreTiles][4]) {
    write_out<4 * kScoreTiles>([&](int i) { scores[i / 4][i % 4] = 0.0f; });
    const uint32_t query =
        queries_ + query_at_.stage * Traits::kQueryBytes + (skipped() + lane() % 16) * 128;
    const uint32_t key = keys_ + key_at_.stage * Traits::kTileBytes + lane() % 8 * 128;
#pragma unroll 1
    for (int k = 0; k < Traits::kDim / 16; ++k) {
      const auto chunk = [&](int half) { return ((2 * k + half) ^ lane()) % 8 * 16; };
      uint32_t a[4];
      ldmatrix_x4(a, query + k / 4 * Traits::kQuerySlabBytes + chunk(lane() / 16));
      write_out<kScoreTiles / 2>([&](int pair) {
        uint32_t b[4];
        ldmatrix_x4(b, key + k / 4 * Traits::kSlabBytes + (2 * pair + lane() / 16) * 8 * 128 +
                           chunk(lane() / 8 % 2));
        mma_m16n8k16<T>(scores[2 * pair], a, b[0], b[1]);
        mma_m16n8k16<T>(scores[2 * pair + 1], a, b[2], b[3]);
      });
    }
  }

  // out += P V of the step whose first key is `first`, committed but in flight.
  template <bool kVisible>
  __device__ __forceinline__ void start_out(float (&out)[kOutTiles][4],
                                            uint32_t (&weights)[kScoreTiles / 2][4],
                                            const TilePart& part, int first) {
    wait_barrier(shared_address(&barriers_.values.full[value_at_.stage]), value_at_.round);
    if constexpr (!kVisible) {
      if (first < part.first_key || first + Traits::kKeys > part.sequence.seq_len) {
        zero_hidden_values<Traits>(part, first, value_tiles_ + value_at_.stage * Traits::kTileBytes,
                                   thread_);
      }
    }
    const TileDescriptor value(values_ + value_at_.stage * Traits::kTileBytes, Traits::kSlabBytes);
    pin(out);
    begin_products();
    write_out<Traits::kKeys / 16>(
        [&](int j) { accumulate_columns<T>(out, weights[j], value.at(j * 16 * 128)); });
    commit_products();
  }

  __device__ __forceinline__ bool weigh(OnlineSoftmax& softmax, float (&scores)[kScoreTiles][4],
                                        float (&rescale)[2]) {
    return weigh_any(softmax, scores, scale_, rows_, params_.alibi_slopes != nullptr, first_,
                     lane() % 4, rescale);
  }

  // From the weights of step_ to those of the step before it.
  template <bool kFast>
  __device__ __forceinline__ void advance(const TilePart& part, OnlineSoftmax& softmax,
                                          float (&out)[kOutTiles][4],
                                          float (&scores)[kScoreTiles][4],
                                          uint32_t (&weights)[kScoreTiles / 2][4]) {
    take_turn();
    start_scores(scores);
    start_out<kFast>(out, weights, part, first_);
    pass_turn();
    --step_;
    first_ -= Traits::kKeys;
    wait_products<1>();
    pin(scores);
    float rescale[2];
    bool moved = false;
    if constexpr (kFast) {
      // The branch also keeps the compiler from waiting for the products before the exponentials.
      if (!weigh_boldly<T>(softmax, scores, scale_.factor)) {
        score_again(scores);
        moved = weigh_visible(softmax, scores, scale_.factor, rescale);
      }
      release_keys();
      wait_products<0>();
      pin(out);
    } else {
      release_keys();
      moved = weigh(softmax, scores, rescale);
      pin(scores);
      wait_products<0>();
      pin(out);
    }
    release_values();
    pack_scores(weights, scores);
    if (moved) write_out<4 * kOutTiles>([&](int i) { out[i / 4][i % 4] *= rescale[i % 4 / 2]; });
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

  const PagedAttentionParams& params_;
  TileReader reader_;
  PrefillBarriers<Traits>& barriers_;
  uint32_t queries_;
  uint32_t keys_;
  uint32_t values_;
  char* value_tiles_;
  int thread_;
  int warpgroup_;
  int group_;
  bool bare_;
  int step_;
  int first_;  // key of step_
  int fast_low_;
  int fast_high_;
  TileRows rows_;
  LogitScale scale_;
  RingPosition<Traits::kQueryStages> query_at_;
  RingPosition<Traits::kKeyStages> key_at_;
  RingPosition<Traits::kValueStages> value_at_;
};

}  // namespace pagedkv::cuda
