// The cut of top-k or top-p, exactly and without sorting: the largest key that enough of the row
// reaches. Enough is a number of logits (top-k) or their mass (top-p).
//
// A cut lies in [low, high): enough reaches low, too little reaches high. If what lies there fits
// in the list, it is read once; otherwise the row is read again at kSplits keys between them, until
// it does. In the list, up to kPickThreads logits are compared with one another, more are split.
#pragma once

#include "cuda/sampling/pick_state.cuh"

namespace pagedkv::cuda {

// Where a cut can be, and what reaches its end.
struct CutRange {
  int low;
  int high;
  Mass mass_above;  // of keys from high on
  int count_above;
  int turns = 0;  // of narrowing it
};

// What is enough, by number or by mass.
struct Enough {
  bool by_mass;
  Mass mass;
  int count;

  __device__ bool holds(Mass some_mass, int some_count) const {
    return by_mass ? some_mass >= mass : some_count >= count;
  }
};

__device__ inline unsigned width_of(const CutRange& range) {
  return static_cast<unsigned>(range.high) - static_cast<unsigned>(range.low);
}

// The i-th of kSplits keys between the range's ends, above low. First they divide its values, as
// keys around 0 are many for few logits; then its keys, so that few turns suffice whatever the
// values.
template <class Row>
__device__ int split_key(const Row& row, const CutRange& range, int i) {
  constexpr int kTurnsByValue = 2;
  const float first = row.value(range.low);
  const float distance = row.value(range.high - 1) - first;
  if (range.turns < kTurnsByValue && isfinite(distance)) {
    const float part = static_cast<float>(i + 1) / (kSplits + 1);
    return min(max(row.key(first + distance * part), range.low + 1), range.high);
  }
  const unsigned width = width_of(range);
  const unsigned step = width > kSplits
                            ? static_cast<unsigned>(uint64_t{width} * (i + 1) / (kSplits + 1))
                            : min(static_cast<unsigned>(i + 1), width);
  return static_cast<int>(static_cast<unsigned>(range.low) + step);
}

// After block_totals(): the piece of the range where the cut is.
template <class Row>
__device__ CutRange narrowed(const Row& row, const CutRange& range, const Enough& enough) {
  const PickShared& shared = row.shared;
  CutRange found = range;
  ++found.turns;
  for (int i = 0; i < kSplits; ++i) {
    const int key = split_key(row, range, i);
    if (key >= range.high) break;
    if (enough.holds(shared.masses[i], shared.counts[i])) {
      found.low = key;
    } else {
      found.high = key;
      found.mass_above = shared.masses[i];
      found.count_above = shared.counts[i];
      break;
    }
  }
  return found;
}

// The keys of a range into the list; how many there are. Sums up what is above the range, and with
// it, in mass and count.
template <class Row>
__device__ int list_range(const Row& row, CutRange& range, Mass& mass, int& count) {
  PickShared& shared = row.shared;
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Mass mass_above = 0;
  Mass mass_inside = 0;
  int count_above = 0;
  row.for_each_chunk(range.low, [&](int, const float (&x)[kLaneLogits]) {
    int own = 0;
    float sum_above = 0.0f;
    float sum_inside = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) {
      const int key = row.key(x[i]);
      if (key < range.low) continue;
      const float weight = row.weight(x[i]);
      if (key < range.high) {
        ++own;
        sum_inside += weight;
      } else {
        ++count_above;
        sum_above += weight;
      }
    }
    mass_above += mass_of(sum_above);
    mass_inside += mass_of(sum_inside);
    int end = own;  // places of the warp's lanes, one after the other
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, offset);
      if (lane >= offset) end += before;
    }
    int begin = 0;
    if (lane == 31 && end > 0) begin = atomicAdd(&shared.num_listed, end);
    int place = __shfl_sync(kAllLanes, begin, 31) + end - own;
    if (own == 0) return;
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) {
      const int key = row.key(x[i]);
      if (key < range.low || key >= range.high) continue;
      if (place < kListed) shared.list[place] = key;
      ++place;
    }
  });
  range.mass_above = block_total(mass_above, shared);
  range.count_above = static_cast<int>(block_total(static_cast<Mass>(count_above), shared));
  mass = range.mass_above + block_total(mass_inside, shared);
  count = range.count_above + shared.num_listed;
  return shared.num_listed;
}

template <class Row>
__device__ void split_row(const Row& row, const CutRange& range) {
  Mass masses[kSplits] = {};
  int counts[kSplits] = {};
  int splits[kSplits];
#pragma unroll
  for (int split = 0; split < kSplits; ++split) splits[split] = split_key(row, range, split);
  row.for_each_chunk(range.low, [&](int, const float (&x)[kLaneLogits]) {
    float sums[kSplits] = {};
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) {
      const int key = row.key(x[i]);
      if (key < range.low) continue;
      const float weight = row.weight(x[i]);
#pragma unroll
      for (int split = 0; split < kSplits; ++split) {
        if (key < splits[split]) continue;
        sums[split] += weight;
        ++counts[split];
      }
    }
#pragma unroll
    for (int split = 0; split < kSplits; ++split) masses[split] += mass_of(sums[split]);
  });
  block_totals(masses, counts, row.shared);
}

template <class Row>
__device__ void split_list(const Row& row, const CutRange& range, int num_listed) {
  Mass masses[kSplits];
  int counts[kSplits];
  int splits[kSplits];
#pragma unroll
  for (int split = 0; split < kSplits; ++split) {
    splits[split] = split_key(row, range, split);
    // What is in the list ends where the range it was made for did.
    masses[split] = threadIdx.x == 0 ? range.mass_above : 0;
    counts[split] = threadIdx.x == 0 ? range.count_above : 0;
  }
  for (int at = static_cast<int>(threadIdx.x); at < num_listed; at += kPickThreads) {
    const int key = row.shared.list[at];
    if (key < range.low || key >= range.high) continue;
    const Mass mass = mass_of(row.weight(row.value(key)));
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      if (key < splits[split]) continue;
      masses[split] += mass;
      ++counts[split];
    }
  }
  block_totals(masses, counts, row.shared);
}

// The cut, if the list has at most as many logits as there are threads.
template <class Row>
__device__ int compare_listed(const Row& row, const CutRange& range, const Enough& enough,
                              int num_listed) {
  PickShared& shared = row.shared;
  const bool has_own = static_cast<int>(threadIdx.x) < num_listed;
  const int own = has_own ? shared.list[threadIdx.x] : range.low;
  if (enough.by_mass && has_own) {
    shared.listed_masses[threadIdx.x] = mass_of(row.weight(row.value(own)));
  }
  __syncthreads();
  int best = range.low;
  // Warps without a logit of their own have nothing to compare.
  if (static_cast<int>(threadIdx.x) / 32 * 32 < num_listed) {
    Mass mass = range.mass_above;
    int count = range.count_above;
    if (enough.by_mass) {
      for (int at = 0; at < num_listed; ++at) {
        mass += shared.list[at] >= own ? shared.listed_masses[at] : 0;
      }
    } else {
      for (int at = 0; at < num_listed; ++at) count += shared.list[at] >= own;
    }
    if (has_own && enough.holds(mass, count)) best = own;
  }
  return block_max(best, shared);
}

// The k-th largest of the chunks' largest: at least k logits reach it. The lowest key if there are
// fewer chunks.
template <class Row>
__device__ int kth_largest_chunk(const Row& row, int64_t k) {
  int best = row.key(-INFINITY);
  if (k > row.num_chunks) return best;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < row.num_chunks; chunk += kPickThreads) {
    const int own = row.chunk_keys[chunk];
    int count = 0;
    for (int at = 0; at < row.num_chunks; ++at) count += row.chunk_keys[at] >= own;
    if (count >= k) best = max(best, own);
  }
  return block_max(best, row.shared);
}

// The largest key of `all` that enough reaches; all.low if none does, as sums are rounded. `range`
// is a part of it where the cut may be: a guess, if it is not all of it.
template <class Row>
__device__ int select_cut(const Row& row, const CutRange& all, CutRange range,
                          const Enough& enough) {
  bool is_guess = range.low != all.low || range.high != all.high;
  int num_listed = 0;
  while (is_guess || width_of(range) != 1) {
    Mass mass = 0;
    int count = 0;
    num_listed = list_range(row, range, mass, count);
    const bool too_low = is_guess && enough.holds(range.mass_above, range.count_above);
    const bool too_high = is_guess && range.low != all.low && !enough.holds(mass, count);
    is_guess = false;
    if (too_low) {
      range = {.low = range.high, .high = all.high, .mass_above = 0, .count_above = 0};
    } else if (too_high) {
      range = {.low = all.low, .high = range.low, .mass_above = mass, .count_above = count};
    } else {
      if (num_listed <= kListed) break;
      split_row(row, range);
      range = narrowed(row, range, enough);
    }
  }
  if (width_of(range) == 1) return range.low;
  if (num_listed <= kPickThreads) return compare_listed(row, range, enough, num_listed);
  while (width_of(range) != 1) {
    split_list(row, range, num_listed);
    range = narrowed(row, range, enough);
  }
  return range.low;
}

// The key of the row's k-th largest logit.
template <class Row>
__device__ int kth_largest(const Row& row, int64_t k) {
  const CutRange range{.low = kth_largest_chunk(row, k),
                       .high = row.largest_key + 1,
                       .mass_above = 0,
                       .count_above = 0};
  return select_cut(row, range, range,
                    Enough{.by_mass = false, .mass = 0, .count = static_cast<int>(k)});
}

// The largest of the chunks' largest keys that they alone reach with enough mass; low if all of
// them together do not.
template <class Row>
__device__ int mass_reached_by_chunks(const Row& row, int low, Mass wanted) {
  Mass* masses = reinterpret_cast<Mass*>(row.shared.list);
  __syncthreads();
  for (int chunk = static_cast<int>(threadIdx.x); chunk < row.num_chunks; chunk += kPickThreads) {
    masses[chunk] = mass_of(row.weight(row.value(row.chunk_keys[chunk])));
  }
  __syncthreads();
  int best = low;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < row.num_chunks; chunk += kPickThreads) {
    const int own = row.chunk_keys[chunk];
    Mass mass = 0;
    for (int at = 0; at < row.num_chunks; ++at) {
      mass += row.chunk_keys[at] >= own ? masses[at] : 0;
    }
    if (mass >= wanted) best = max(best, own);
  }
  return block_max(best, row.shared);
}

// Where the cut of top-p in a row of many candidates probably is, by what a part of its chunks has
// below each key: those logits are many and alike, where those above may be few. `left_out`: mass
// of what is below the cut. A guess: the row itself decides.
template <class Row>
__device__ CutRange guess_range(const Row& row, const CutRange& range, Mass left_out) {
  constexpr int kTurns = 2;  // of narrowing: to a part in 64
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = static_cast<int>(static_cast<int64_t>(warp) * row.num_chunks / kPickWarps);
  float x[kLaneLogits];
  row.logits.read(chunk, x);
  Mass own = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLaneLogits; ++i) {
    const int key = row.key(x[i]);
    row.shared.list[(warp * kLaneLogits + i) * 32 + lane] = key;
    if (key >= range.low) own += mass_of(row.weight(x[i]));
  }
  const Mass sampled = block_total(own, row.shared);
  const Mass below = left_out / row.num_chunks * kPickWarps;
  const Enough enough{.by_mass = true, .mass = sampled > below ? sampled - below : 1, .count = 0};
  CutRange guess = range;
  for (int turn = 0; turn < kTurns && width_of(guess) > 1; ++turn) {
    split_list(row, guess, kPickWarps * kChunk);
    guess = narrowed(row, guess, enough);
  }
  // Its neighbours too, as far as there are any.
  const unsigned width = width_of(guess);
  const unsigned room_below = static_cast<unsigned>(guess.low) - static_cast<unsigned>(range.low);
  const unsigned room_above = static_cast<unsigned>(range.high) - static_cast<unsigned>(guess.high);
  guess.low -= static_cast<int>(min(width, room_below));
  guess.high += static_cast<int>(min(width, room_above));
  guess.turns = 0;
  return guess;
}

// The smallest key that top-p leaves of a mass of `total` from range.low on; see select_cut. Where
// these are not few, the range is made smaller first.
template <class Row>
__device__ int nucleus_cut(const Row& row, CutRange range, Mass total, double top_p, bool are_few) {
  const auto wanted = static_cast<Mass>(ceil(top_p * static_cast<double>(total)));
  const Enough enough{.by_mass = true, .mass = wanted, .count = 0};
  if (are_few) return select_cut(row, range, range, enough);
  const int reached = mass_reached_by_chunks(row, range.low, wanted);
  if (reached > range.low || row.num_chunks < 2 * kPickWarps) {
    range.low = reached;
    return select_cut(row, range, range, enough);
  }
  return select_cut(row, range, guess_range(row, range, total - min(total, wanted)), enough);
}

}  // namespace pagedkv::cuda
