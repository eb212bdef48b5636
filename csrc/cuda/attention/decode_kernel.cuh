// Decode attention: the rows of sequences with few query tokens, 8 or 16 packed rows a tile.
//
// Grid: fixed, one block a multiprocessor; which keys of which tiles it takes, and which of those
// its warps, is planned in decode_plan.cuh. Half of a block's warps load (decode_load.cuh), each
// into the ring of one of the others, which multiplies with an online softmax of its own; no block
// barrier. Tiles that lie in one warp's range are finished by it; those cut over warps are merged
// at the end of the block's range, through shared memory; those cut over blocks by the last block
// to arrive, from the workspace (partial_states.cuh). Always in the order of the keys: results
// repeat bit for bit.
//
// Must move: K and V once per KV head and tile, 2 * length * G * D * size bytes a sequence.
#pragma once

#include "cuda/attention/decode_load.cuh"
#include "cuda/attention/decode_merge.cuh"

namespace pagedkv::cuda {

// The parts with which a warp's range ends, and begins, unless they are whole tiles: states in
// shared memory that the block merges. Two slots a warp: 2 w: a tile that began before its range,
// where the warp goes on to other tiles (state in a place of its own); 2 w + 1: the last part of
// its range (state in its ring).
template <class Traits>
struct DecodeShared {
  static constexpr int kSlots = 2 * Traits::kWarps;
  PlanScratch<Traits> plan;
  DecodePart slots[kSlots];
  bool used[kSlots];
  DecodePart parts[Traits::kWarps][Traits::kStages];
  uint64_t barriers[Traits::kWarps][2 * Traits::kStages];
  LineStart piece_start;  // see next_piece
  unsigned piece_at;
  WarpRange piece_range;
  int piece;
};

template <class Traits>
__device__ FragmentState* slot_state(char* rings, int slot) {
  char* at = slot % 2 == 0 ? rings + Traits::kStatesBegin + slot / 2 * Traits::kStateBytes
                           : rings + slot / 2 * (Traits::kStages * Traits::kStageBytes);
  return reinterpret_cast<FragmentState*>(at);
}

// Among the warps that multiply.
template <class Traits>
__device__ void sync_multipliers() {
  sync_threads(1, Traits::kThreads);
}

// A warp's range of num_units units, all multiplied: whole tiles written, slots filled for the
// others.
template <class Traits, class T, class C>
__device__ void multiply_range(const DecodePlan<Traits>& plan, unsigned num_units,
                               Ring<Traits>& ring, char* rings, DecodeShared<Traits>& shared,
                               int warp, int lane) {
  const PagedAttentionParams& params = plan.params();
  char* stages = rings + warp * (Traits::kStages * Traits::kStageBytes);
  if (lane < 2) shared.used[2 * warp + lane] = false;
#pragma unroll 1
  while (num_units > 0) {
    wait_barrier(ring.full(), ring.parity);
    const DecodePart part = ring.parts[ring.stage];
    DecodeQuery<Traits, T> query;
    query.load(ring.query(), part.num_rows, static_cast<int>(params.cache.head_dim), lane);
    DecodeRows<Traits> rows;
    rows.load(plan, part, lane);
    DecodeSoftmax<Traits> softmax;
    softmax.reset();
    OutSums<Traits> out;
    out.reset();
    const int first_key = part.first_key;
    const int seq_len = part.sequence.seq_len;
    int first = part.base_key + part.unit_begin * Traits::kUnitKeys;
    const int end = part.base_key + part.unit_end * Traits::kUnitKeys;
#pragma unroll 1
    while (true) {
      if (first < first_key || first + Traits::kUnitKeys > seq_len) {
        zero_hidden_values<Traits>(stages + ring.stage * Traits::kStageBytes + Traits::kTensorBytes,
                                   first_key - first, seq_len - first, lane);
      }
      UnitFragments<Traits> keys;
      UnitFragments<Traits> values;
      load_keys(keys, ring.unit(), lane);
      UnitScores<Traits> scores;
      multiply_keys<Traits, C>(scores, query, keys);
      load_values(values, ring.unit(), lane);
      __syncwarp();
      if (lane == 0) arrive(ring.empty());  // the unit is in registers
      ring.advance();
      softmax.weigh(scores, out, plan, part, rows, first, lane);
      multiply_values<Traits, C>(out, scores, values);
      first += Traits::kUnitKeys;
      if (first >= end) break;
      wait_barrier(ring.full(), ring.parity);
    }
    num_units -= static_cast<unsigned>(part.unit_end - part.unit_begin);
    softmax.finish();
    if (part.unit_end - part.unit_begin == part.num_units && params.num_splits <= 1) {
      write_tile<Traits, T>(plan, part, out, softmax, lane);
      continue;
    }
    // After the last part nothing more is loaded.
    const int slot = 2 * warp + (num_units == 0 ? 1 : 0);
    __syncwarp();
    store_state(slot_state<Traits>(rings, slot), out, softmax, lane);
    if (lane == 0) {
      shared.slots[slot] = part;
      shared.used[slot] = true;
    }
  }
}

// Counts a warp in at a fragment of a tile that several blocks share; whether it comes last. Its
// own part is written.
template <class Traits>
__device__ bool arrive_last(const PagedAttentionParams& params, unsigned first_block,
                            unsigned num_blocks, int fragment, int lane) {
  __syncwarp();
  bool last = false;
  if (lane == 0) {
    uint64_t* counter = RangeStates<Traits>::counter(params, first_block, fragment);
    last = arrive_at_counter(counter) == static_cast<int>(num_blocks) - 1;
    if (last) reset_counter(counter);
  }
  __syncwarp();
  return __shfl_sync(0xffffffffu, static_cast<int>(last), 0) != 0;
}

// Fragment `fragment` of all blocks' parts of a tile.
template <class Traits>
__device__ MergedFragment merge_shared(const PagedAttentionParams& params, const LineCut& cut,
                                       const LineCut::Sharers& sharers, int fragment, int lane) {
  // Each lane finds one of the blocks.
  MergeState merge;
#pragma unroll 1
  for (unsigned first = 0; first < sharers.num; first += 32) {
    const unsigned num = min(32u, sharers.num - first);
    const unsigned mine = first + min(static_cast<unsigned>(lane), num - 1);
    const unsigned index = 2 * cut.sharer(sharers, mine) + (mine == 0 ? 1 : 0);
    add_parts<8>(merge, static_cast<int>(num), lane, [&](int i) {
      return RangeStates<Traits>::block_state(params, __shfl_sync(0xffffffffu, index, i), fragment);
    });
  }
  return merge.merged();
}

// Merges the warps' parts of tiles that were cut within the block: whole tiles are written, others
// left in the workspace, and merged over the blocks by the warps that come last. By the warps that
// multiply, behind a barrier; each takes its share of the fragments.
template <class Traits, class T>
__device__ void merge_block(const DecodePlan<Traits>& plan, const DecodeShared<Traits>& shared,
                            const LineCut& cut, char* rings, int warp, int lane) {
  using States = RangeStates<Traits>;
  const PagedAttentionParams& params = plan.params();
  const bool used = lane < DecodeShared<Traits>::kSlots && shared.used[lane];
  const unsigned tile = used ? shared.slots[lane].tile_begin : 0;
  unsigned remaining = __ballot_sync(0xffffffffu, used);
#pragma unroll 1
  while (remaining != 0) {  // a tile a round
    const int first = __ffs(static_cast<int>(remaining)) - 1;
    const unsigned begin = __shfl_sync(0xffffffffu, tile, first);
    const unsigned members = __ballot_sync(0xffffffffu, used && tile == begin);
    remaining &= ~members;
    const int last = 31 - __clz(static_cast<int>(members));
    const DecodePart& part = shared.slots[first];
    const bool shares = params.num_splits == 0 &&
                        (part.unit_begin != 0 || shared.slots[last].unit_end != part.num_units);
#pragma unroll 1
    for (int fragment = warp; fragment < States::kFragments; fragment += Traits::kWarps) {
      // A tile's parts are last parts of neighbouring warps, but the last may be a first part.
      MergeState merge;
      add_parts<4>(merge, __popc(members), lane, [&](int i) {
        return slot_state<Traits>(rings, min(first + 2 * i, last)) + fragment;
      });
      MergedFragment merged = merge.merged();
      if (params.num_splits > 1) {
        write_piece(plan, part, shared.piece, fragment, merged, lane);
        continue;
      }
      if (shares) {
        FragmentState* state =
            States::block_state(params, 2 * blockIdx.x + (part.unit_begin == 0 ? 1 : 0), fragment);
        state->sums[lane] = merged.sums;
        if (lane < 4) state->totals[lane] = merged.totals;
        const auto sharers = cut.sharers_of(part.tile_begin, static_cast<unsigned>(part.num_units));
        if (!arrive_last<Traits>(params, cut.sharer(sharers, 0), sharers.num, fragment, lane)) {
          continue;
        }
        merged = merge_shared<Traits>(params, cut, sharers, fragment, lane);
      }
      write_merged<Traits, T>(plan, part, fragment, merged, lane);
    }
  }
}

// Rows of sequences without keys: 0 and -inf. The blocks share the sequences.
template <class Traits>
__device__ void write_empty_rows(const DecodePlan<Traits>& plan) {
  const PagedAttentionParams& params = plan.params();
  const int pairs = static_cast<int>(params.cache.head_dim / 2);
#pragma unroll 1
  for (int seq = static_cast<int>(blockIdx.x); seq < params.num_seqs; seq += gridDim.x) {
    const SequenceLine line = plan.line_of(seq);
    if (line.num_tiles == 0 || line.num_units > 0) continue;
    const int heads = static_cast<int>(params.num_heads);
    const int rows = line.sequence.query_len * heads;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows * pairs; i += Traits::kAllThreads) {
      const int64_t token = line.sequence.query_start + i / pairs / heads;
      const int64_t head = i / pairs % heads;
      // 16 bits of zeros are 0 in every activation type.
      static_cast<uint32_t*>(
          params.out)[(token * params.out_stride_token + head * params.out_stride_head) / 2 +
                      i % pairs] = 0;
      if (params.lse != nullptr && i % pairs == 0) {
        params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = -INFINITY;
      }
    }
  }
}

// A piece that got no keys: empty states.
template <class Traits>
__device__ void write_empty_piece(const DecodePlan<Traits>& plan, const DecodePart& part,
                                  int piece) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= part.num_rows) return;
  const PagedAttentionParams& params = plan.params();
  const auto place = plan.place_of(part, row);
  const int64_t number =
      piece_state(params, part.sequence.query_start + place.token, place.head, piece);
  piece_states(params).totals[number] = make_float2(-INFINITY, 0.0f);
}

// The next of the pieces that a block owns, one after the other (num_splits n): its units to
// shared.piece_range, its number in its tile to shared.piece. By one thread.
template <class Traits>
__device__ void next_piece(const DecodePlan<Traits>& plan, DecodeShared<Traits>& shared) {
  LineStart& start = shared.piece_start;
  while (shared.piece_at >= plan.length_of(start.line)) {
    shared.piece_at -= plan.length_of(start.line);
    start.line = plan.line_of(++start.seq);
  }
  const auto num_splits = static_cast<unsigned>(plan.params().num_splits);
  const unsigned tile = shared.piece_at / num_splits;
  const unsigned piece = shared.piece_at - tile * num_splits;
  ++shared.piece_at;
  const auto num_units = static_cast<unsigned>(start.line.num_units);
  const unsigned share = (num_units + num_splits - 1) / num_splits;
  const unsigned begin = min(piece * share, num_units);
  shared.piece = static_cast<int>(piece);
  shared.piece_range.start = {start.seq, 0, start.line};
  shared.piece_range.count = min(share, num_units - begin);
  // An empty piece is none of the next tile.
  shared.piece_range.at = tile * num_units + (shared.piece_range.count > 0 ? begin : 0);
}

template <class T, class C, int kDim, int kRowTiles>
__global__ void __launch_bounds__(
    DecodeTraits<T, C, kDim, kRowTiles, kCompiledForHopper>::kAllThreads, 1)
    decode_attention_kernel(const __grid_constant__ PagedAttentionParams params,
                            const __grid_constant__ DecodeSetup setup) {
  using Traits = DecodeTraits<T, C, kDim, kRowTiles, kCompiledForHopper>;
  extern __shared__ __align__(1024) char rings[];
  __shared__ DecodeShared<Traits> shared;
  const bool multiplies = threadIdx.x < Traits::kThreads;
  const int warp = static_cast<int>(threadIdx.x) / 32 % Traits::kWarps;  // of its kind
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<Traits> ring{held(shared_address(rings) + warp * (Traits::kStages * Traits::kStageBytes)),
                    held(shared_address(rings) + Traits::kRingBytes +
                         warp * (Traits::kStages * Traits::kQueryBytes)),
                    held(shared_address(shared.barriers[warp])), shared.parts[warp]};
  if (multiplies && lane == 0) ring.init();
  publish_shared_writes();
  wait_previous_kernel();
  // Not before: kernels behind this one may start beside it and read what was written before it.
  allow_next_kernel();
  const DecodePlan<Traits> plan(params, setup);
  prefetch_tables(params);
  const BlockRange range = plan_block(plan, shared.plan);
  const unsigned owned = range.end - range.begin;
  if (owned > 0) {
    const bool units = params.num_splits == 0;
    if (!units && threadIdx.x < 32) {
      const LineStart start = find_start(plan, shared.plan, range.begin, lane);
      if (lane == 0) {
        shared.piece_start = start;
        shared.piece_at = range.begin - start.seq_begin;
      }
    }
#pragma unroll 1
    for (unsigned item = 0; item < (units ? 1 : owned); ++item) {
      if (!units) {
        if (threadIdx.x == 0) next_piece(plan, shared);
        __syncthreads();
        if (shared.piece_range.count == 0) {
          write_empty_piece(plan, plan.part_at(shared.piece_range.start, shared.piece_range.at, 0),
                            shared.piece);
          __syncthreads();
          continue;
        }
      }
      // The warp's units, from `from` on the line or in the piece.
      unsigned from = 0;
      unsigned count = 0;
      if (units) {
        // Lane 0 finds the begin, the others the end.
        const unsigned number = range.begin + static_cast<unsigned>(warp);
        const unsigned bound = range.cut.begin_of(min(number + (lane == 0 ? 0 : 1), range.end));
        from = __shfl_sync(0xffffffffu, bound, 0);
        count = __shfl_sync(0xffffffffu, bound, 1) - from;
      } else {
        from = share_begin<Traits>(shared.piece_range.count, warp);
        count = share_begin<Traits>(shared.piece_range.count, warp + 1) - from;
      }
      if (multiplies) {
        multiply_range<Traits, T, C>(plan, count, ring, rings, shared, warp, lane);
        sync_multipliers<Traits>();
        merge_block<Traits, T>(plan, shared, range.cut, rings, warp, lane);
      } else if (count > 0) {
        WarpRange mine{};
        mine.count = count;
        if (units) {
          mine.start = find_start(plan, shared.plan, from, lane);
          mine.at = from - mine.start.seq_begin;
        } else {
          mine.start = shared.piece_range.start;
          mine.at = shared.piece_range.at + from;
        }
        UnitLoader<Traits, T, C>(plan, ring, lane).run(mine);
      }
      if (!units) {  // the next piece's copies may take the rings
        publish_shared_writes();
        __syncthreads();
      }
    }
  }
  if (range.has_empty_seq) write_empty_rows(plan);
}

}  // namespace pagedkv::cuda
