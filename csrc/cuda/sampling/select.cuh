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

// The i-th of kSplits keys between the range's ends; high itself where it is too narrow.
__device__ inline int split_key(const CutRange& range, int i) {
  const unsigned width = width_of(range);
  const unsigned step = width > kSplits
                            ? static_cast<unsigned>(uint64_t{width} * (i + 1) / (kSplits + 1))
                            : min(static_cast<unsigned>(i + 1), width);
  return static_cast<int>(static_cast<unsigned>(range.low) + step);
}

// After block_totals(): the piece of the range where the cut is.
__device__ inline CutRange narrowed(const CutRange& range, const Enough& enough,
                                    const PickShared& shared) {
  CutRange found = range;
  for (int i = 0; i < kSplits; ++i) {
    const int key = split_key(range, i);
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

// The keys of a range into the list; how many there are.
template <class Row>
__device__ int list_range(const Row& row, const CutRange& range) {
  PickShared& shared = row.shared;
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  row.for_each_chunk(range.low, [&](int, const float (&x)[kLaneLogits]) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) {
      const int key = row.key(x[i]);
      count += key >= range.low && key < range.high;
    }
    int end = count;  // places of the warp's lanes, one after the other
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, offset);
      if (lane >= offset) end += before;
    }
    int begin = 0;
    if (lane == 31 && end > 0) begin = atomicAdd(&shared.num_listed, end);
    int place = __shfl_sync(kAllLanes, begin, 31) + end - count;
    if (count == 0) return;
#pragma unroll
    for (int i = 0; i < kLaneLogits; ++i) {
      const int key = row.key(x[i]);
      if (key < range.low || key >= range.high) continue;
      if (place < kListed) shared.list[place] = key;
      ++place;
    }
  });
  __syncthreads();
  return shared.num_listed;
}

template <class Row>
__device__ void split_row(const Row& row, const CutRange& range) {
  Mass masses[kSplits] = {};
  int counts[kSplits] = {};
  row.for_each_chunk(range.low, [&](int, const float (&x)[kLaneLogits]) {
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      const int from = split_key(range, split);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneLogits; ++i) {
        if (row.key(x[i]) < from) continue;
        sum += row.weight(x[i]);
        ++counts[split];
      }
      masses[split] += mass_of(sum);
    }
  });
  block_totals(masses, counts, row.shared);
}

template <class Row>
__device__ void split_list(const Row& row, const CutRange& range, int num_listed) {
  Mass masses[kSplits];
  int counts[kSplits];
#pragma unroll
  for (int split = 0; split < kSplits; ++split) {
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
      if (key < split_key(range, split)) continue;
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

// The largest key of range that enough reaches; range.low if none does, as sums are rounded.
template <class Row>
__device__ int select_cut(const Row& row, CutRange range, const Enough& enough) {
  int num_listed = kListed + 1;
  while (width_of(range) != 1) {
    num_listed = list_range(row, range);
    if (num_listed <= kListed) break;
    split_row(row, range);
    range = narrowed(range, enough, row.shared);
  }
  if (width_of(range) == 1) return range.low;
  if (num_listed <= kPickThreads) return compare_listed(row, range, enough, num_listed);
  while (width_of(range) != 1) {
    split_list(row, range, num_listed);
    range = narrowed(range, enough, row.shared);
  }
  return range.low;
}

}  // namespace pagedkv::cuda
