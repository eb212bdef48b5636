// The stream of one warp's units of a piece into its ring, in the kernel of small batches; and what
// is fetched ahead of it.
#pragma once

#include "cuda/attention/decode_load.cuh"
#include "cuda/attention/decode_small_plan.cuh"
#include "cuda/device/read_once.cuh"

namespace pagedkv::cuda {

// Every kWarps-th unit of a piece. A lane has the block of a box (box_rows keys of a unit), of 32
// boxes and the next 32.
template <class Traits>
class SmallLoader {
 public:
  __device__ SmallLoader(const DecodePlan<Traits>& plan, const DecodePart& part, int warp, int lane)
      : setup_(plan.setup()),
        table_(plan.params().block_tables + part.seq * plan.params().block_tables_stride),
        block_size_(static_cast<int>(plan.params().cache.block_size)),
        first_(part.base_key + (part.unit_begin + warp) * Traits::kUnitKeys),
        seq_len_(part.sequence.seq_len),
        kv_head_(part.kv_head),
        lane_(lane),
        unit_boxes_(31 - __clz(Traits::kUnitKeys / setup_.box_rows)) {
    read(0);
    take();
  }

  // Copies the warp's unit `number`; units are copied in order.
  __device__ void copy(int number, uint32_t stage, uint32_t barrier) {
    const int box = number << unit_boxes_;
    if (number > 0 && box % 32 == 0) take();
    const int key = first_ + number * (Traits::kWarps * Traits::kUnitKeys);
    const int box_rows = setup_.box_rows;
    const int mine = lane_ - box % 32;
    if (mine == 0) {  // boxes that begin behind the sequence's end are left out
      const int keys = min(Traits::kUnitKeys, seq_len_ - key);
      arrive_expecting(barrier, ((keys + box_rows - 1) & -box_rows) *
                                    (2 * Traits::kColumns * Traits::kColumnBytes));
    }
    __syncwarp();
    const int row = mine * box_rows;
    if (mine < 0 || row >= Traits::kUnitKeys || key + row >= seq_len_) return;
#pragma unroll 1
    for (int column = 0; column < Traits::kColumns; column += setup_.box_columns) {
      const uint32_t place =
          stage + row * Traits::kColumnBytes + column * (Traits::kUnitKeys * Traits::kColumnBytes);
      const int element = column * Traits::kColumnElements;
      copy_box_once(place, &setup_.key, element, offset_, 0, kv_head_, block_, barrier);
      copy_box_once(place + Traits::kTensorBytes, &setup_.value, element, offset_, 0, kv_head_,
                    block_, barrier);
    }
  }

 private:
  // The blocks of the boxes from number `box` on; past the end the last one's.
  __device__ void read(int box) {
    const int mine = box + lane_;
    const int in_unit = mine & ((1 << unit_boxes_) - 1);
    const int key = min(first_ + (mine >> unit_boxes_) * (Traits::kWarps * Traits::kUnitKeys) +
                            in_unit * setup_.box_rows,
                        seq_len_ - 1);
    const int entry = setup_.block_spans.quotient(key / 8);
    next_block_ = table_[entry];
    next_offset_ = key - entry * block_size_;
    next_box_ = box + 32;
  }
  __device__ void take() {
    block_ = next_block_;
    offset_ = next_offset_;
    read(next_box_);
  }

  const DecodeSetup& setup_;
  const int32_t* table_;
  int block_size_;
  int first_;  // key of the warp's first unit
  int seq_len_;
  int kv_head_;
  int lane_;
  int unit_boxes_;  // boxes of a unit, log2
  int block_ = 0;   // of this lane's box ...
  int offset_ = 0;  // ... and where in it the box begins
  int next_block_ = 0;
  int next_offset_ = 0;
  int next_box_ = 0;
};

// The tensor maps to where the copies look for them.
__device__ inline void prefetch_maps(const DecodeSetup& setup) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&setup.key) : "memory");
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&setup.value) : "memory");
}

// Tables, lengths and queries to the L2, while what comes before this kernel still runs: the L2 is
// where all writes meet, so nothing old is read later.
__device__ inline void prefetch_operands(const PagedAttentionParams& params) {
  const auto fetch = [](const void* at) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at)); };
  prefetch_tables(params);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread == 0) fetch(params.seq_lens);
  if (thread == 1) fetch(params.query_start_loc);
  if (thread == 2) fetch(params.query_start_loc + params.num_seqs);
  constexpr int kLinesOfRow = 2;  // 128 bytes each
  const int64_t row = thread / kLinesOfRow;
  const int64_t at = thread % kLinesOfRow * 128;
  if (row >= params.num_tokens * params.num_heads || at >= 2 * params.cache.head_dim) return;
  const int64_t token = row / params.num_heads;
  const int64_t head = row - token * params.num_heads;
  fetch(static_cast<const char*>(params.query) +
        2 * (token * params.query_stride_token + head * params.query_stride_head) + at);
}

}  // namespace pagedkv::cuda
