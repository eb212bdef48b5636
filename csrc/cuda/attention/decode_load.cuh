// The stream of units from the blocks into a warp's ring of stages, by a warp of its own that does
// nothing else: walks the parts of the range and starts one unit's copies after the other, as
// stages become free. The barriers of a stage: full, when its unit has arrived; empty, when it has
// been used.
//
// On sm_90 one lane starts boxes of the tensor maps (up to kUnitKeys rows of one block). Before,
// the lanes copy 16 bytes each with cp.async. Both write the same layout (decode_traits.cuh).
//
// Requires block_size % 8 == 0: 8 keys aligned to 8 then lie inside one block.
#pragma once

#include "cuda/attention/decode_cut.cuh"
#include "cuda/attention/decode_traits.cuh"
#include "cuda/device/held.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/read_once.cuh"
#include "cuda/device/wgmma.cuh"

namespace pagedkv::cuda {

// 32 entries of a block table, one a lane, on their way while the keys before them are loaded. Not
// in registers: the next branch would wait for them, and while the memory is busy any read takes
// microseconds.
struct TableWindow {
  int32_t ids[32];
  uint64_t arrived;  // barrier, an arrival a lane
};

__device__ inline void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// True in one lane of a warp that is whole, and the compiler knows that it is one: for a lane by
// its number a tensor copy becomes a loop over lanes that may differ.
__device__ inline bool elect_lane() {
  uint32_t elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;}\n"
      : "=r"(elected));
  return elected != 0;
}
#endif

// A ring's place in shared memory, and how far one of its two users has come.
template <class Traits>
struct Ring {
  // Two more than can begin in the stages: one is being finished, one waits for a stage.
  static constexpr int kParts = Traits::kStages + 2;
  uint32_t stages;    // kStages units
  uint32_t queries;   // kStages times kRows rows of queries
  uint32_t barriers;  // full [kStages], then empty [kStages]
  DecodePart* parts;  // [kParts], in turn
  TableWindow* table;
  int stage = 0;
  int parity = 0;
  int part_number = 0;
  int table_parity = 0;

  __device__ uint32_t unit() const { return stages + stage * Traits::kStageBytes; }
  __device__ uint32_t query() const { return queries + stage * Traits::kQueryBytes; }
  __device__ uint32_t full() const { return barriers + stage * 8; }
  __device__ uint32_t empty() const { return barriers + (Traits::kStages + stage) * 8; }
  __device__ void advance() {
    if (++stage < Traits::kStages) return;
    stage = 0;
    parity ^= 1;
  }
  __device__ DecodePart& part() const { return parts[part_number]; }
  __device__ void advance_part() { part_number = part_number + 1 < kParts ? part_number + 1 : 0; }
  // Arrivals at a full barrier: the announcement of the bytes, or every lane's copies.
  static __device__ constexpr int arrivals() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return 1;
#else
    return 32;
#endif
  }
  // By one lane, once, before a barrier of the block. In turn: initialised by a lane each,
  // racecheck takes the lanes that have none for writers of whatever their address register holds.
  __device__ void init() const {
#pragma unroll
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      init_barrier(barriers + stage * 8, arrivals());
      init_barrier(barriers + (Traits::kStages + stage) * 8, 1);
    }
    init_barrier(shared_address(&table->arrived), 32);
  }
};

// Values of keys outside the sequence or left of its window may be anything, NaN too: zeros
// instead.
template <class Traits>
__device__ void zero_hidden_values(char* values, int before, int until, int lane) {
  if (before <= 0 && until >= Traits::kUnitKeys) return;
  constexpr int kChunks = Traits::kColumns * 8;
#pragma unroll 1
  for (int i = lane; i < Traits::kUnitKeys * kChunks; i += 32) {
    const int row = i / kChunks;
    if (row >= before && row < until) continue;
    *reinterpret_cast<uint4*>(values + Traits::chunk_offset(row, i % kChunks)) = uint4{};
  }
  publish_shared_writes();  // before later copies into the same stage
  __syncwarp();
}

// Small tables to the L2, while the lengths are read. The threads of the grid share them.
__device__ inline void prefetch_tables(const PagedAttentionParams& params) {
  constexpr int64_t kMostEntries = 65536;
  constexpr int64_t kLine = 32;
  const int64_t entries =
      (params.num_seqs - 1) * params.block_tables_stride + params.max_num_blocks;
  const int64_t mine = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLine;
  if (entries > kMostEntries || mine >= entries) return;
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(params.block_tables + mine));
}

template <class Traits, class T, class C>
class UnitLoader {
 public:
  __device__ UnitLoader(const DecodePlan<Traits>& plan, Ring<Traits>& ring, int lane)
      : plan_(plan), ring_(ring), lane_(lane) {}

  // All units of a range. By a warp.
  __device__ void run(PartCursor<Traits> cursor) {
    next_part(cursor);
#pragma unroll 1
    while (live_) {
      const DecodePart part = part_ahead_;
      begin(part);
#pragma unroll 1
      for (int unit = part.unit_begin; unit < part.unit_end; ++unit) {
        const bool first = unit == part.unit_begin;
        if (first) {
          if (lane_ == 0) ring_.part() = part;
          __syncwarp();
          ring_.advance_part();
        }
        copy_unit(first ? part.num_rows : 0);
        if (first) copy_query(part);
        finish_unit();
        ring_.advance();
        key_ += Traits::kUnitKeys;
        // Behind the copies, and long before they are needed: the entries after this window.
        if (fetches_) continue;
        if (window_ + 32 <= last_entry_) {
          fetch(table_, window_ + 32, last_entry_);
        } else {
          next_part(cursor);
        }
      }
    }
  }

 private:
  static constexpr int kSpan = 8;  // keys that surely share a block

  __device__ int entry_of(int key) const { return plan_.setup().block_spans.quotient(key / kSpan); }
  __device__ const int32_t* table_of(const DecodePart& part) const {
    return plan_.params().block_tables + part.seq * plan_.params().block_tables_stride;
  }

  // Entries from `first` on into the window; past the last one that one again.
  __device__ void fetch(const int32_t* table, int first, int last) {
    copy_async_4(shared_address(ring_.table->ids + lane_), table + min(first + lane_, last));
    arrive_with_copies(shared_address(&ring_.table->arrived));
    fetches_ = true;
  }
  // Each lane takes what it has copied.
  __device__ void take() {
    wait_barrier(shared_address(&ring_.table->arrived), ring_.table_parity);
    ring_.table_parity ^= 1;
    ids_ = ring_.table->ids[lane_];
    fetches_ = false;
  }

  __device__ void next_part(PartCursor<Traits>& cursor) {
    live_ = cursor.next(part_ahead_);
    fetches_ = true;
    if (!live_) return;
    const DecodePart& part = part_ahead_;
    fetch(table_of(part), entry_of(part.base_key + part.unit_begin * Traits::kUnitKeys),
          last_entry_of(part));
  }
  __device__ int last_entry_of(const DecodePart& part) const {
    const int end = part.base_key + part.unit_end * Traits::kUnitKeys;
    return entry_of(min(end, part.sequence.seq_len) - 1);
  }

  __device__ void begin(const DecodePart& part) {
    seq_len_ = part.sequence.seq_len;
    first_key_ = part.first_key;
    kv_head_ = part.kv_head;
    key_ = part.base_key + part.unit_begin * Traits::kUnitKeys;
    table_ = table_of(part);
    last_entry_ = last_entry_of(part);
    window_ = entry_of(key_);
    offset_ = key_ - window_ * block_size();
    entry_ = 0;
    take();
  }

  __device__ int block_size() const { return static_cast<int>(plan_.params().cache.block_size); }

  // The block of the next `rows` keys, which it holds from offset_ on; moves on behind them. The
  // warp holds 32 entries of the table, from window_ on; those past the part's last repeat it.
  __device__ int block_of_rows() const { return __shfl_sync(0xffffffffu, ids_, entry_); }
  __device__ void skip_rows(int rows) {
    offset_ += rows;
    if (offset_ < block_size()) return;
    offset_ = 0;
    if (++entry_ < 32 || window_ + 32 > last_entry_) return;
    entry_ = 0;
    window_ += 32;
    take();
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Once the stage is free. Boxes that begin behind the sequence's end are left out. query_rows
  // will be copied too. A box before the window may have any block id: one outside the cache is
  // filled with zeros.
  __device__ void copy_unit(int query_rows) {
    const DecodeSetup& setup = plan_.setup();
    const uint32_t barrier = ring_.full();
    const uint32_t to = ring_.unit();
    const int box_rows = setup.box_rows;
    const int keys = min(Traits::kUnitKeys, seq_len_ - key_);
    const int rows = (keys + box_rows - 1) & -box_rows;
    const int bytes =
        rows * (2 * Traits::kColumns * Traits::kColumnBytes) + query_rows * query_bytes();
    int block = block_of_rows();
    wait_barrier(ring_.empty(), ring_.parity ^ 1);  // the first round finds the stages free
    if (elect_lane()) arrive_expecting(barrier, bytes);
#pragma unroll 1
    for (int row = 0; row < keys; row += box_rows) {
      if (row > 0) block = block_of_rows();
      if (elect_lane()) {
#pragma unroll 1
        for (int column = 0; column < Traits::kColumns; column += setup.box_columns) {
          const uint32_t place =
              to + row * Traits::kColumnBytes + column * (Traits::kUnitKeys * Traits::kColumnBytes);
          const int element = column * Traits::kColumnElements;
          copy_box_once(place, &setup.key, element, offset_, 0, kv_head_, block, barrier);
          copy_box_once(place + Traits::kTensorBytes, &setup.value, element, offset_, 0, kv_head_,
                        block, barrier);
        }
      }
      skip_rows(box_rows);
    }
  }

  __device__ void copy_query(const DecodePart& part) {
    if (lane_ >= part.num_rows) return;
    copy_bytes(ring_.query() + lane_ * Traits::kQueryPitch, query_row(part, lane_), query_bytes(),
               ring_.full());
  }

  __device__ void finish_unit() {}
#else
  __device__ void copy_unit(int) {
    const ConstKvCache& cache = plan_.params().cache;
    wait_barrier(ring_.empty(), ring_.parity ^ 1);
    const int valid_chunks = static_cast<int>(cache.head_dim) * static_cast<int>(sizeof(C)) / 16;
    constexpr int kChunks = Traits::kColumns * 8;  // 16 bytes of a row
#pragma unroll 1
    for (int span = 0; span < Traits::kUnitKeys; span += kSpan) {
      const int64_t block = block_of_rows();
      const C* key = static_cast<const C*>(cache.key) + block * cache.key_stride_block +
                     kv_head_ * cache.key_stride_head + offset_ * cache.key_stride_token;
      const C* value = static_cast<const C*>(cache.value) + block * cache.value_stride_block +
                       kv_head_ * cache.value_stride_head + offset_ * cache.value_stride_token;
#pragma unroll
      for (int i = lane_; i < kSpan * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const int at = key_ + span + row;  // before the window the block id may be anything
        const bool valid = chunk < valid_chunks && at >= first_key_ && at < seq_len_;
        const uint32_t place = ring_.unit() + Traits::chunk_offset(span + row, chunk);
        constexpr int kElements = 16 / static_cast<int>(sizeof(C));
        copy_async_16(place, key + row * cache.key_stride_token + chunk * kElements, valid);
        copy_async_16(place + Traits::kTensorBytes,
                      value + row * cache.value_stride_token + chunk * kElements, valid);
      }
      skip_rows(kSpan);
    }
  }

  __device__ void copy_query(const DecodePart& part) {
#pragma unroll 1
    for (int row = 0; row < part.num_rows; ++row) {
      const int at = lane_ * 16;
      if (at >= query_bytes()) continue;
      copy_async_16(ring_.query() + row * Traits::kQueryPitch + at,
                    reinterpret_cast<const char*>(query_row(part, row)) + at, true);
    }
  }

  __device__ void finish_unit() { arrive_with_copies(ring_.full()); }
#endif

  __device__ int query_bytes() const { return static_cast<int>(plan_.params().cache.head_dim) * 2; }
  __device__ const T* query_row(const DecodePart& part, int row) const {
    const PagedAttentionParams& params = plan_.params();
    const auto place = plan_.place_of(part, row);
    return static_cast<const T*>(params.query) +
           (part.sequence.query_start + place.token) * params.query_stride_token +
           place.head * params.query_stride_head;
  }

  const DecodePlan<Traits>& plan_;
  Ring<Traits>& ring_;
  int lane_;
  // The part that is being loaded.
  const int32_t* table_ = nullptr;
  int seq_len_ = 0;
  int first_key_ = 0;
  int kv_head_ = 0;
  int last_entry_ = 0;
  int key_ = 0;     // the next unit's first
  int offset_ = 0;  // of it in its block
  int entry_ = 0;   // its block's table entry, from window_ on
  int window_ = 0;
  int ids_ = 0;  // entry window_ + lane
  // The part after it, if there is one.
  DecodePart part_ahead_;
  bool live_ = false;
  bool fetches_ = false;  // the entries behind the window are on their way, or not needed
};

}  // namespace pagedkv::cuda
