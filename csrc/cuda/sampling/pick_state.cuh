// What a block knows of the row whose token it picks, and its sums over the block. Masses are
// weights as integers, in units of 2^-40: their sums do not depend on an order.
#pragma once

#include "cuda/device/overlapped_launch.cuh"
#include "cuda/sampling/chunk.cuh"
#include "pagedkv/kernels/cuda_launchers.h"

namespace pagedkv::cuda {

constexpr int kPickThreads = 512;
constexpr int kPickWarps = kPickThreads / 32;
constexpr int kListed = 12288;  // logits that can be looked at again without reading the row
constexpr int kSplits = 7;      // keys that a narrowing looks at between two bounds

using Mass = unsigned long long;

__device__ inline Mass mass_of(float weight) { return __float2ull_rn(weight * 0x1p40f); }

struct PickShared {
  int list[kListed];  // keys of a range, in any order
  Mass listed_masses[kPickThreads];
  int num_active;  // chunks to read
  int num_listed;  // in that range; those beyond kListed are not in the list
  int warp_keys[kPickWarps];
  Mass warp_masses[kPickWarps][kSplits];
  int warp_counts[kPickWarps][kSplits];
  Mass masses[kSplits];
  int counts[kSplits];
};

// The sum in all lanes.
__device__ inline Mass warp_total(Mass x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// Sums of the lanes up to this one.
__device__ inline Mass warp_running_total(Mass x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass before = __shfl_up_sync(kAllLanes, x, offset);
    if (lane >= offset) x += before;
  }
  return x;
}

// Over the block, the same in all threads. Each begins with a barrier: what they write is free.
__device__ inline int block_max(int x, PickShared& shared) {
  x = __reduce_max_sync(kAllLanes, x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warp_keys[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared.warp_keys[0];
  for (int warp = 1; warp < kPickWarps; ++warp) x = max(x, shared.warp_keys[warp]);
  return x;
}

__device__ inline Mass block_total(Mass x, PickShared& shared) {
  x = warp_total(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warp_masses[threadIdx.x / 32][0] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < kPickWarps; ++warp) x += shared.warp_masses[warp][0];
  return x;
}

// Of kSplits sums at once, into shared.masses and shared.counts.
__device__ inline void block_totals(const Mass (&masses)[kSplits], const int (&counts)[kSplits],
                                    PickShared& shared) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSplits; ++i) {
    const Mass mass = warp_total(masses[i]);
    const int count = __reduce_add_sync(kAllLanes, counts[i]);
    if (threadIdx.x % 32 == 0) {
      shared.warp_masses[threadIdx.x / 32][i] = mass;
      shared.warp_counts[threadIdx.x / 32][i] = count;
    }
  }
  __syncthreads();
  if (threadIdx.x < kSplits) {
    Mass mass = 0;
    int count = 0;
    for (int warp = 0; warp < kPickWarps; ++warp) {
      mass += shared.warp_masses[warp][threadIdx.x];
      count += shared.warp_counts[warp][threadIdx.x];
    }
    shared.masses[threadIdx.x] = mass;
    shared.counts[threadIdx.x] = count;
  }
  __syncthreads();
}

// What the first kernel has found of a row: (largest, sum) of each chunk.
__device__ inline const float2* chunk_stats(const LogitRows& rows, int64_t row) {
  return static_cast<const float2*>(rows.workspace) + row * rows.num_chunks;
}

// A block's shared memory.
struct PickMemory {
  PickShared& shared;
  Mass* chunk_masses;  // [num_chunks]
  int* chunk_keys;     // [num_chunks]
  int* active_chunks;  // [num_chunks]
  int num_chunks;

  __device__ PickMemory(unsigned char* memory, const LogitRows& rows)
      : shared(*reinterpret_cast<PickShared*>(memory)),
        chunk_masses(reinterpret_cast<Mass*>(memory + sizeof(PickShared))),
        chunk_keys(reinterpret_cast<int*>(chunk_masses + rows.num_chunks)),
        active_chunks(chunk_keys + rows.num_chunks),
        num_chunks(static_cast<int>(rows.num_chunks)) {}

  // Fills chunk_keys, without their spare bits. Returns the largest key, with all bits.
  __device__ int load_keys(const float2* stats, int spare) const {
    int largest = INT_MIN;
    for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kPickThreads) {
      const int key = key_of(stats[chunk].x);
      chunk_keys[chunk] = key >> spare;
      largest = max(largest, key);
    }
    return block_max(largest, shared);
  }
};

// Launches a kernel of a block a row, with that memory.
template <class Params>
void launch_by_rows(const char* op, void (*kernel)(Params), const LogitRows& rows,
                    StreamHandle stream, const Params& params) {
  const auto bytes_of = [](int64_t num_chunks) {
    return static_cast<int>(sizeof(PickShared) + num_chunks * (sizeof(Mass) + 2 * sizeof(int)));
  };
  const int bytes = bytes_of(rows.num_chunks);
  // The limit is the kernel's, not the launch's: what one thread needs, another must not lower.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  bytes_of(num_logit_chunks(kMaxVocabSize))),
             op);
  launch_overlapped(op, kernel, grid_size(rows.num_rows), kPickThreads, bytes,
                    static_cast<cudaStream_t>(stream), params);
}

// The row, its chunks and what is common to all of its filters. Keys are without the bits that say
// nothing: `spare` of them.
template <class T>
struct PickRow {
  LogitRow<T> logits;
  int num_chunks;
  int spare;
  float scale;    // of weight_of
  float largest;  // of the row
  int largest_key;
  const int* chunk_keys;  // [num_chunks], each chunk's largest; shared memory
  Mass* chunk_masses;     // [num_chunks], of what each chunk still has; shared memory
  int* active_chunks;     // [num_chunks], of for_each_chunk; shared memory
  PickShared& shared;

  __device__ int key(float x) const { return key_of(x) >> spare; }
  __device__ float value(int key) const {
    return value_of(key * (1 << spare) + (key < 0 ? (1 << spare) - 1 : 0));
  }
  __device__ float weight(float x) const { return weight_of(x, largest, scale); }

  // body(chunk, x) by warps, for each chunk that has a key of at least `key`, in any order. A warp
  // reads its next chunk while it works on one.
  template <class Body>
  __device__ void for_each_chunk(int key, const Body& body) const {
    __syncthreads();
    if (threadIdx.x == 0) shared.num_active = 0;
    __syncthreads();
    for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kPickThreads) {
      if (chunk_keys[chunk] >= key) active_chunks[atomicAdd(&shared.num_active, 1)] = chunk;
    }
    __syncthreads();
    const int num_active = shared.num_active;
    int at = static_cast<int>(threadIdx.x) / 32;
    if (at >= num_active) return;
    int next = active_chunks[at];
    auto stored = logits.load(next);
    for (; at < num_active; at += kPickWarps) {
      const int chunk = next;
      float x[kLaneLogits];
      logits.widen_stored(chunk, stored, x);
      if (at + kPickWarps < num_active) {
        next = active_chunks[at + kPickWarps];
        stored = logits.load(next);
      }
      body(chunk, x);
    }
  }

  // Fills chunk_masses with those of all logits. Returns their sum.
  __device__ Mass load_masses(const float2* stats) const {
    Mass total = 0;
    for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kPickThreads) {
      const float2 found = stats[chunk];
      // A chunk of nothing but -inf has no mass.
      chunk_masses[chunk] = found.y > 0.0f ? mass_of(found.y * weight(found.x)) : 0;
      total += chunk_masses[chunk];
    }
    return block_total(total, shared);
  }

  // Makes chunk_masses those of keys of at least `cut`. Returns their sum.
  __device__ Mass keep(int cut) const {
    for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kPickThreads) {
      if (chunk_keys[chunk] < cut) chunk_masses[chunk] = 0;
    }
    for_each_chunk(cut, [&](int chunk, const float (&x)[kLaneLogits]) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneLogits; ++i) sum += key(x[i]) >= cut ? weight(x[i]) : 0.0f;
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) chunk_masses[chunk] = mass_of(sum);
    });
    __syncthreads();
    Mass total = 0;
    for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kPickThreads) {
      total += chunk_masses[chunk];
    }
    return block_total(total, shared);
  }
};

}  // namespace pagedkv::cuda
