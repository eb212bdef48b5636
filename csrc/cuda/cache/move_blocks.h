// Moves whole blocks of all layers between two pools that the device can address: one launch for
// up to kMaxPairsPerLaunch pairs. copy_blocks and swap_blocks are built on it.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cache/block_geometry.h"

namespace pagedkv::cuda {

constexpr int64_t kMaxPairsPerLaunch = 3072;

struct BlockMove {
  const void* source;
  void* destination;
  const int64_t* pairs;  // int64 [num_pairs, 2] (source, destination), CPU; read before returning
  int64_t num_pairs;
  BlockGeometry geometry;
  bool same_pool;      // a pair may then read what another one writes
  int64_t max_blocks;  // of the grid; 0: as many as the work has
};

// Whether the result depends on the order of the pairs: two write one block, or one reads what
// another writes.
bool pairs_depend(const int64_t* pairs, int64_t num_pairs, bool same_pool);

// Pairs that depend on each other are moved one after another, in order.
void launch_move_blocks(const BlockMove& move, cudaStream_t stream);

}  // namespace pagedkv::cuda
