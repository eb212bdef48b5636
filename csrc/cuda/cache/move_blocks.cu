// The kernel that moves blocks. A thread owns the same few positions (a position: one access of the
// block's bytes, over all layers) of every pair that its block of threads has. Pairs that depend on
// each other all go to one block of threads, in order; independent ones spread over grid.y.
//
// Must move 2 * num_pairs * (bytes of a block over all layers). The pairs travel as a kernel
// argument, so the call copies nothing to the device and may be captured in a graph.
// Instantiations: {16, 4, 1}-byte accesses x {few, many} pairs = 6.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_set>

#include "cuda/cache/move_blocks.h"
#include "cuda/device/launch.h"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAccesses = 4;  // in flight per thread
constexpr int kFewPairs = 96;

template <int kCapacity>
struct PairList {
  int32_t ids[kCapacity][2];  // (source, destination)
  int count;
};

struct MoveParams {
  const char* source;
  char* destination;
  BlockGeometry geometry;
  int64_t run_accesses;
  int64_t num_accesses;  // of one pair
};

struct Offsets {
  int64_t source;
  int64_t destination;
};

// position = run * run_accesses + access, run = ((layer * 2 + kv) * heads + head) * tokens + token.
template <class Access>
__device__ Offsets offsets_of(const MoveParams& params, int64_t position) {
  const BlockGeometry& geometry = params.geometry;
  int64_t rest = position / params.run_accesses;
  const int64_t access = position - rest * params.run_accesses;
  Offsets made{access * static_cast<int64_t>(sizeof(Access)),
               access * static_cast<int64_t>(sizeof(Access))};
#pragma unroll
  for (int i = 0; i < kBlockDims; ++i) {
    const int64_t size = geometry.sizes[i];
    if (size == 1) continue;
    const int64_t index = rest % size;
    rest /= size;
    made.source += index * geometry.source_strides[i];
    made.destination += index * geometry.destination_strides[i];
  }
  return made;
}

template <class Access, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    move_blocks_kernel(const __grid_constant__ MoveParams params,
                       const __grid_constant__ PairList<kCapacity> pairs) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kAccesses;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kAccesses + threadIdx.x;
       first < params.num_accesses; first += step) {
    Offsets offsets[kAccesses];
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int64_t position = first + i * kThreads;
      if (position < params.num_accesses) offsets[i] = offsets_of<Access>(params, position);
    }
    for (int pair = blockIdx.y; pair < pairs.count; pair += gridDim.y) {
      const char* source = params.source + pairs.ids[pair][0] * params.geometry.source_block_stride;
      char* destination =
          params.destination + pairs.ids[pair][1] * params.geometry.destination_block_stride;
      Access data[kAccesses];
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        if (first + i * kThreads < params.num_accesses) {
          data[i] = *reinterpret_cast<const Access*>(source + offsets[i].source);
        }
      }
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        if (first + i * kThreads < params.num_accesses) {
          *reinterpret_cast<Access*>(destination + offsets[i].destination) = data[i];
        }
      }
    }
  }
}

int32_t checked_id(int64_t id) {
  if (id > INT32_MAX) {
    throw std::runtime_error("pagedkv: block id " + std::to_string(id) +
                             " in a copy, at most 2147483647 is possible");
  }
  return static_cast<int32_t>(id);
}

template <class Access, int kCapacity>
void launch_piece(const BlockMove& move, int64_t first_pair, int64_t count, bool dependent,
                  cudaStream_t stream) {
  PairList<kCapacity> pairs{};
  pairs.count = static_cast<int>(count);
  for (int64_t i = 0; i < count; ++i) {
    pairs.ids[i][0] = checked_id(move.pairs[2 * (first_pair + i)]);
    pairs.ids[i][1] = checked_id(move.pairs[2 * (first_pair + i) + 1]);
  }
  MoveParams params{static_cast<const char*>(move.source), static_cast<char*>(move.destination),
                    move.geometry, move.geometry.run_bytes / static_cast<int64_t>(sizeof(Access)),
                    0};
  params.num_accesses = params.run_accesses * move.geometry.num_runs();
  if (params.num_accesses == 0) return;
  int64_t blocks = ceil_div(params.num_accesses, kThreads * kAccesses);
  int64_t lanes = dependent ? 1 : count;
  if (move.max_blocks > 0) {
    blocks = std::min(blocks, move.max_blocks);
    lanes = std::min(lanes, std::max<int64_t>(1, move.max_blocks / blocks));
  }
  const dim3 grid(grid_size(blocks), static_cast<unsigned>(lanes));
  move_blocks_kernel<Access, kCapacity><<<grid, kThreads, 0, stream>>>(params, pairs);
  check_launch("move_blocks");
}

template <class Access>
void launch_pairs(const BlockMove& move, cudaStream_t stream) {
  const bool dependent = pairs_depend(move.pairs, move.num_pairs, move.same_pool);
  for (int64_t first = 0; first < move.num_pairs; first += kMaxPairsPerLaunch) {
    const int64_t count = std::min(kMaxPairsPerLaunch, move.num_pairs - first);
    if (count <= kFewPairs) {
      launch_piece<Access, kFewPairs>(move, first, count, dependent, stream);
    } else {
      launch_piece<Access, kMaxPairsPerLaunch>(move, first, count, dependent, stream);
    }
  }
}

}  // namespace

bool pairs_depend(const int64_t* pairs, int64_t num_pairs, bool same_pool) {
  std::unordered_set<int64_t> written;
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (!written.insert(pairs[2 * i + 1]).second) return true;
  }
  if (!same_pool) return false;
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (pairs[2 * i] != pairs[2 * i + 1] && written.count(pairs[2 * i]) != 0) return true;
  }
  return false;
}

void launch_move_blocks(const BlockMove& move, cudaStream_t stream) {
  if (move.num_pairs == 0) return;
  const BlockGeometry& g = move.geometry;
  const auto all_aligned_to = [&](int64_t bytes) {
    return aligned_to(
        bytes, {move.source, move.destination},
        {g.run_bytes, g.source_block_stride, g.destination_block_stride, g.source_strides[0],
         g.source_strides[1], g.source_strides[2], g.source_strides[3], g.destination_strides[0],
         g.destination_strides[1], g.destination_strides[2], g.destination_strides[3]});
  };
  if (all_aligned_to(16)) {
    launch_pairs<uint4>(move, stream);
  } else if (all_aligned_to(4)) {
    launch_pairs<unsigned>(move, stream);
  } else {
    launch_pairs<unsigned char>(move, stream);
  }
}

}  // namespace pagedkv::cuda
