// A warp's stream of units from the blocks behind shared prefixes into shared memory: walks the
// warp's parts ahead of the products and issues one asynchronous copy group per unit, with the
// block ids read one unit ahead.
//
// Requires block_size % kSpanKeys == 0: a span of keys then lies inside one block, and one table
// entry and one address serve all its rows.
#pragma once

#include "cuda/attention/prefix_own_plan.cuh"
#include "cuda/attention/prefix_states.cuh"
#include "cuda/device/mma.cuh"

namespace pagedkv::cuda {

constexpr int kOwnSpanKeys = 8;
constexpr int kOwnPartsAhead = 8;  // more than any ring has stages: a part has at least one unit

template <class Traits, class C>
class OwnLoader {
 public:
  // parts: TilePart [kOwnPartsAhead] in shared memory, this warp's own.
  __device__ OwnLoader(const PagedAttentionParams& params, const OwnRange& range, TilePart* parts,
                       int lane)
      : params_(params), cursor_(params, range), parts_(parts), lane_(lane) {
    next_part();
    read_table();
  }

  // Copies the next unit to this stage of the warp and commits the group; an empty group once the
  // range is exhausted, so that groups can be counted.
  __device__ void issue(uint32_t stage) {
    if (live_) {
      copy_unit(stage);
      if (++step_ == part().step_end) next_part();
      read_table();
    }
    commit_copies();
  }

  // Parts with steps met so far: the products' part k is parts[k % kOwnPartsAhead], k <
  // num_parts(). By the time a part's last unit is in use, the next part is known.
  __device__ int num_parts() const { return num_parts_; }

 private:
  static constexpr int kSpans = Traits::kUnitKeys / kOwnSpanKeys;

  __device__ const TilePart& part() const { return parts_[(num_parts_ - 1) % kOwnPartsAhead]; }

  __device__ void next_part() {
    TilePart next;
    do {
      live_ = cursor_.next(next);
      if (live_ && next.num_steps == 0) write_empty(next);
    } while (live_ && next.num_steps == 0);
    if (!live_) return;
    step_ = next.step_begin;
    if (lane_ == 0) parts_[num_parts_ % kOwnPartsAhead] = next;
    __syncwarp();
    ++num_parts_;
  }

  // The states of rows without own keys.
  __device__ void write_empty(const TilePart& part) {
    const int group = static_cast<int>(params_.num_heads / params_.cache.num_kv_heads);
    if (lane_ >= part.num_rows) return;
    const int packed = part.first_row + lane_;
    const int64_t token = part.sequence.query_start + packed / group;
    const PrefixStates states = prefix_states(params_);
    states.totals[states.own + token * params_.num_heads + part.kv_head * group + packed % group] =
        make_float2(-INFINITY, 0.0f);
  }

  __device__ int first_key_of_unit() const { return part().base_key + step_ * Traits::kUnitKeys; }

  // The spans' table entries. Spans past the end take the last valid entry: nothing behind it in
  // the table is an id.
  __device__ void read_table() {
    if (!live_) return;
    const int block_size = static_cast<int>(params_.cache.block_size);
    const int32_t* table = params_.block_tables + part().seq * params_.block_tables_stride;
    const int last = part().sequence.seq_len - 1;
    int logical = 0;
    int offset = 0;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const int key = first_key_of_unit() + span * kOwnSpanKeys;
      if (span == 0) {
        const auto at = static_cast<unsigned>(min(key, last / kOwnSpanKeys * kOwnSpanKeys));
        logical = static_cast<int>(at / static_cast<unsigned>(block_size));
        offset = static_cast<int>(at) - logical * block_size;
      } else if (key <= last) {
        offset += kOwnSpanKeys;
        if (offset == block_size) {
          offset = 0;
          ++logical;
        }
      }
      blocks_[span] = table[logical];
      offsets_[span] = offset;
    }
  }

  __device__ void copy_unit(uint32_t stage) {
    const ConstKvCache& cache = params_.cache;
    const char* keys[kSpans];
    const char* values[kSpans];
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const int64_t block = blocks_[span];
      keys[span] = reinterpret_cast<const char*>(
          static_cast<const C*>(cache.key) + block * cache.key_stride_block +
          part().kv_head * cache.key_stride_head + offsets_[span] * cache.key_stride_token);
      values[span] = reinterpret_cast<const char*>(
          static_cast<const C*>(cache.value) + block * cache.value_stride_block +
          part().kv_head * cache.value_stride_head + offsets_[span] * cache.value_stride_token);
    }
    const int64_t key_row = cache.key_stride_token * static_cast<int64_t>(sizeof(C));
    const int64_t value_row = cache.value_stride_token * static_cast<int64_t>(sizeof(C));
    // Rows outside the sequence or left of its window may hold anything, NaN too: zeros instead.
    const int before = part().first_key - first_key_of_unit();
    const int until = part().sequence.seq_len - first_key_of_unit();
    if constexpr (32 % Traits::kRowChunks == 0) {
      // A lane copies the same chunk of every kRowsAtOnce-th row: one pointer, moved on.
      constexpr int kRowsAtOnce = 32 / Traits::kRowChunks;
      const int lane_row = lane_ / Traits::kRowChunks;
      const int chunk = lane_ % Traits::kRowChunks;
      const bool chunk_valid =
          chunk * 16 < static_cast<int>(cache.head_dim) * static_cast<int>(sizeof(C));
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
        const char* key = keys[span] + lane_row * key_row + chunk * 16;
        const char* value = values[span] + lane_row * value_row + chunk * 16;
#pragma unroll
        for (int i = 0; i < kOwnSpanKeys; i += kRowsAtOnce) {
          const int row = span * kOwnSpanKeys + i + lane_row;
          const bool valid = chunk_valid && row >= before && row < until;
          copy_async_16(stage + Traits::key_offset(row, chunk), key, valid);
          copy_async_16(stage + Traits::value_offset(row, chunk), value, valid);
          key += kRowsAtOnce * key_row;
          value += kRowsAtOnce * value_row;
        }
      }
    } else {
      constexpr int kCopies = Traits::kUnitKeys * Traits::kRowChunks / 32;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int index = i * 32 + lane_;
        const int row = index / Traits::kRowChunks;
        const int chunk = index % Traits::kRowChunks;
        const bool valid = row >= before && row < until &&
                           chunk * 16 < static_cast<int>(cache.head_dim * sizeof(C));
        const char* key = keys[0];
        const char* value = values[0];
#pragma unroll
        for (int span = 1; span < kSpans; ++span) {
          key = row >= span * kOwnSpanKeys ? keys[span] : key;
          value = row >= span * kOwnSpanKeys ? values[span] : value;
        }
        copy_async_16(stage + Traits::key_offset(row, chunk),
                      key + row % kOwnSpanKeys * key_row + chunk * 16, valid);
        copy_async_16(stage + Traits::value_offset(row, chunk),
                      value + row % kOwnSpanKeys * value_row + chunk * 16, valid);
      }
    }
  }

  const PagedAttentionParams& params_;
  OwnCursor<Traits::kUnitKeys> cursor_;
  TilePart* parts_;
  int num_parts_ = 0;
  int step_ = 0;
  int lane_;
  bool live_ = false;
  int blocks_[kSpans] = {};
  int offsets_[kSpans] = {};
};

}  // namespace pagedkv::cuda
