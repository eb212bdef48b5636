// Decode attention: the rows of sequences with few query tokens, 8 or 16 packed rows a tile.
//
// Grid: fixed, one block a multiprocessor; which keys of which tiles it takes, and which of those
// its warps, is planned in decode_plan.cuh. Half of a block's warps load (decode_load.cuh), each
// into the ring of one of the others, which multiplies with an online softmax of its own; no block
// barrier. Tiles that lie in one warp's range are finished by it. One that is cut over warps comes
// together in the warp that has the first part: the others left theirs in shared memory long
// before, since a range can begin inside a tile only with its first part. Those cut over blocks are
// merged by the last block to arrive, from the workspace (partial_states.cuh). Always in the order
// of the keys: results repeat bit for bit.
//
// Must move: K and V once per KV head and tile, 2 * length * G * D * size bytes a sequence.
#pragma once

#include "cuda/attention/decode_load.cuh"
#include "cuda/attention/decode_merge.cuh"

namespace pagedkv::cuda {

template <class Traits>
struct DecodeShared {
  PlanScratch<Traits> plan;
  DecodePart parts[Traits::kWarps][Ring<Traits>::kParts];
  TableWindow tables[Traits::kWarps];
  uint64_t barriers[Traits::kWarps][2 * Traits::kStages];
  // The part of a tile that began in an earlier warp.
  uint64_t left[Traits::kWarps];  // barriers, an arrival a lane: it is there, or there is none
  int left_end[Traits::kWarps];   // its unit_end
  // What all warps finish in the end, 0: a tile that began in an earlier block, or a piece; 1: a
  // tile that goes on in a later block.
  bool used[2];
  DecodePart open[2];
  FragmentState* states[2];
  LineStart piece_start;  // see next_piece
  unsigned piece_at;
  WarpRange piece_range;
  int piece;
};

// Where a warp leaves the part of a tile that began in an earlier one; the first warp, which has
// none: what all will finish.
template <class Traits>
__device__ FragmentState* left_state(char* rings, int warp) {
  return reinterpret_cast<FragmentState*>(rings + Traits::kStatesBegin +
                                          warp * Traits::kStateBytes);
}

// Among the warps that multiply.
template <class Traits>
__device__ void sync_multipliers() {
  sync_threads(1, Traits::kThreads);
}

// A part whose keys are multiplied: left to the warp that has the tile's first part in the block,
// or, if that is this one, finished with the parts that the next warps of num_warps have left.
template <class Traits, class T>
__device__ void finish_part(const DecodePlan<Traits>& plan, const DecodePart& part, int num_warps,
                            int phase, OutSums<Traits>& out, DecodeSoftmax<Traits>& softmax,
                            char* rings, DecodeShared<Traits>& shared, int warp, int lane) {
  const PagedAttentionParams& params = plan.params();
  softmax.finish();
  if (warp > 0 && part.unit_begin > 0) {
    store_state(left_state<Traits>(rings, warp), out, softmax, lane);
    if (lane == 0) shared.left_end[warp] = part.unit_end;
    arrive(shared_address(&shared.left[warp]));
    return;
  }
  const bool pieces = params.num_splits > 0;
  int reached = part.unit_end;
#pragma unroll 1
  for (int next = warp + 1; next < num_warps && (reached < part.num_units || pieces); ++next) {
    wait_barrier(shared_address(&shared.left[next]), phase);
    add_state(out, softmax, left_state<Traits>(rings, next), lane);
    reached = shared.left_end[next];
  }
  if (part.unit_begin == 0 && reached == part.num_units && params.num_splits <= 1) {
    write_tile<Traits, T>(plan, part, out, softmax, lane);
    return;
  }
  // A tile that goes on is the last of the warp's range: nothing more is loaded into its ring.
  const bool goes_on = !pieces && part.unit_begin == 0;
  FragmentState* state =
      goes_on
          ? reinterpret_cast<FragmentState*>(rings + warp * (Traits::kStages * Traits::kStageBytes))
          : left_state<Traits>(rings, 0);
  __syncwarp();
  store_state(state, out, softmax, lane);
  if (lane == 0) {
    shared.open[goes_on] = part;
    shared.states[goes_on] = state;
    shared.used[goes_on] = true;
  }
}

// A warp's range, if it has one, all multiplied; `phase`: the parity of the block's ranges so far.
// What is not needed for every unit is read from shared memory: registers are short.
template <class Traits, class T, class C>
__device__ void multiply_range(const DecodePlan<Traits>& plan, bool has_range, int num_warps,
                               int phase, Ring<Traits>& ring, char* rings,
                               DecodeShared<Traits>& shared, int warp, int lane) {
  char* ring_values = rings + warp * (Traits::kStages * Traits::kStageBytes) + Traits::kTensorBytes;
  bool leaves = false;
#pragma unroll 1
  for (bool more = has_range; more;) {
    wait_barrier(ring.full(), ring.parity);  // the part has come with its first unit
    const DecodePart& part = ring.part();
    ring.advance_part();
    DecodeQuery<Traits, T> query;
    query.load(ring.query(), part.num_rows, static_cast<int>(plan.params().cache.head_dim), lane);
    DecodeRows<Traits> rows;
    rows.load(plan, part, lane);
    DecodeSoftmax<Traits> softmax;
    softmax.reset();
    OutSums<Traits> out;
    out.reset();
    int first = part.base_key + part.unit_begin * Traits::kUnitKeys;
    const int end = part.base_key + part.unit_end * Traits::kUnitKeys;
#pragma unroll 1
    while (first < end) {
      const auto unit = unit_address<Traits>(ring.unit(), lane);  // before the wait
      wait_barrier(ring.full(), ring.parity);
      if (rows.masks(first)) {
        zero_hidden_values<Traits>(ring_values + ring.stage * Traits::kStageBytes,
                                   part.first_key - first, part.sequence.seq_len - first, lane);
      }
      UnitFragments<Traits> keys;
      UnitFragments<Traits> values;
      load_keys(keys, unit.keys);
      UnitScores<Traits> scores;
      multiply_keys<Traits, C>(scores, query, keys);
      load_values(values, unit.values);
      __syncwarp();
      if (lane == 0) arrive(ring.empty());  // the unit is in registers
      ring.advance();
      softmax.weigh(scores, out, plan, part, rows, first, lane);
      multiply_values<Traits, C>(out, scores, values);
      first += Traits::kUnitKeys;
    }
    leaves |= warp > 0 && part.unit_begin > 0;
    more = !part.is_last;
    finish_part<Traits, T>(plan, part, num_warps, phase, out, softmax, rings, shared, warp, lane);
  }
  if (!leaves) arrive(shared_address(&shared.left[warp]));
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

// Finishes the block's piece, or its parts of tiles that other blocks share: written to the
// workspace, and merged over the blocks by the warps that come last. By the warps that multiply,
// behind a barrier; each takes its share of the fragments.
template <class Traits, class T>
__device__ void finish_block(const DecodePlan<Traits>& plan, const DecodeShared<Traits>& shared,
                             const LineCut& cut, int warp, int lane) {
  using States = RangeStates<Traits>;
  const PagedAttentionParams& params = plan.params();
#pragma unroll 1
  for (int fragment = warp; fragment < States::kFragments; fragment += Traits::kWarps) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (!shared.used[i]) continue;
      const FragmentState& from = shared.states[i][fragment];
      if (params.num_splits > 1) {
        write_piece(plan, shared.open[i], shared.piece, fragment,
                    {from.sums[lane], from.totals[lane % 4]}, lane);
        continue;
      }
      FragmentState* state = States::block_state(params, 2 * blockIdx.x + i, fragment);
      state->sums[lane] = from.sums[lane];
      if (lane < 4) state->totals[lane] = from.totals[lane];
    }
    if (params.num_splits > 1) continue;
    // A lane counts the warp in at either tile.
    __syncwarp();
    LineCut::Sharers sharers{};
    bool last = false;
    if (lane < 2 && shared.used[lane]) {
      const DecodePart& part = shared.open[lane];
      sharers = cut.sharers_of(part.tile_begin, static_cast<unsigned>(part.num_units));
      uint64_t* counter = States::counter(params, cut.sharer(sharers, 0), fragment);
      last = arrive_at_counter(counter) == static_cast<int>(sharers.num) - 1;
      if (last) reset_counter(counter);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (__shfl_sync(0xffffffffu, static_cast<int>(last), i) == 0) continue;
      const LineCut::Sharers blocks{__shfl_sync(0xffffffffu, sharers.first, i),
                                    __shfl_sync(0xffffffffu, sharers.num, i)};
      write_merged<Traits, T>(plan, shared.open[i], fragment,
                              merge_shared<Traits>(params, cut, blocks, fragment, lane), lane);
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
                    held(shared_address(shared.barriers[warp])), shared.parts[warp],
                    &shared.tables[warp]};
  if (multiplies && lane == 0) {
    ring.init();
    init_barrier(shared_address(&shared.left[warp]), 32);
    if (warp == 0) shared.used[0] = shared.used[1] = false;
  }
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
    int phase = 0;
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
        const unsigned num_warps =
            min(units ? owned : shared.piece_range.count, static_cast<unsigned>(Traits::kWarps));
        multiply_range<Traits, T, C>(plan, count > 0, static_cast<int>(num_warps), phase, ring,
                                     rings, shared, warp, lane);
        phase ^= 1;
        sync_multipliers<Traits>();
        finish_block<Traits, T>(plan, shared, range.cut, warp, lane);
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
        UnitLoader<Traits, T, C>(plan, ring, lane).run({plan, shared.plan, mine});
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
