// How a cluster of blocks takes its part of a weight matrix, and how each block's part of that
// streams into its ring, fed by one warp.
//
// A group is 8 rows of the weights, which are 8 columns of y, for kSiluAndMul 8 rows of the gate
// and then the 8 that belong to them; a slab is 64 elements of rows, 128 bytes each, swizzled in
// shared memory as wgmma.cuh says. A cluster walks its groups pass_groups at a time (a pass); each
// of its blocks takes a part of the rows' length, a step at a time. A stage of the ring holds a
// step of the pass's groups, [group, slab of the step, 8 rows or 16], and of the input's rows.
#pragma once

#include "cuda/device/read_once.cuh"
#include "cuda/linear/cluster_barrier.cuh"
#include "cuda/linear/weight_stream.cuh"
#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

struct ClusterTraits {
  static constexpr int kWarpgroups = 2;  // that multiply, the tiles of a pass by turns
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kAllThreads = kThreads + 32;  // and the warp that feeds
  // Threads that there would be registers for: the next kernel's blocks find some too.
  static constexpr int kRegisterThreads = 384;
  static constexpr int kTileRows = 64;                               // of a product instruction
  static constexpr int kTiles = 2;                                   // of a warpgroup, at most
  static constexpr int kMaxRows = kWarpgroups * kTiles * kTileRows;  // of a pass
  static constexpr int kSlab = 64;
  static constexpr int kSlabRowBytes = kSlab * 2;
  static constexpr int kPartSlabs = 2;  // a part is a multiple of so many, whatever a step is
  static constexpr int kMaxStages = 12;
};

// A step is two slabs, as one is 3 % slower, but where many rows of the input leave no room for
// enough stages.
template <int kRows>
struct ClusterStep {
  static constexpr int kSlabs = kRows > 64 ? 1 : 2;
  static constexpr int kRowBytes = kSlabs * ClusterTraits::kSlabRowBytes;  // of a row in a stage
};

// A tensor map is far away when it is first used.
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// What the host works out for a launch.
struct ClusterSetup {
  CUtensorMap weight;  // (element of a slab, row of 8, slab, half, group), boxes of a stage
  CUtensorMap input;   // (element of a slab, token, slab)
  int groups;          // of the whole matrix
  int group_rows;      // 8, or 16 for kSiluAndMul
  int pass_groups;
  int passes;   // of a cluster, at most; one, if it has several blocks
  int blocks;   // of a cluster
  int slabs;    // of a row, shared by the blocks
  int stages;   // of the ring
  int results;  // offset of a block's own results in shared memory
  bool wide;    // four columns of out may be stored at once
  bool whole;   // eight

  __host__ __device__ int pass_rows() const { return pass_groups * group_rows; }
  __host__ __device__ bool gated() const { return group_rows == 16; }
};

// The work of one block.
struct ClusterPart {
  int first_group;  // of the cluster
  int passes;
  int first_slab;
  int steps;

  __device__ ClusterPart(const ClusterSetup& setup, int rank, int step_slabs)
      : first_group(static_cast<int>(blockIdx.x) / setup.blocks * setup.pass_groups * setup.passes),
        passes(min(setup.passes,
                   (setup.groups - first_group + setup.pass_groups - 1) / setup.pass_groups)),
        first_slab(part_begin(setup, rank)),
        steps((part_begin(setup, rank + 1) - first_slab + step_slabs - 1) / step_slabs) {}

 private:
  __device__ static int part_begin(const ClusterSetup& setup, int rank) {
    constexpr int kSlabs = ClusterTraits::kPartSlabs;
    return min(setup.slabs, (setup.slabs + kSlabs - 1) / kSlabs * rank / setup.blocks * kSlabs);
  }
};

// Shared addresses: stages, and their barriers (full: the copies are there; empty: the warps that
// multiply have read them).
template <int kRows>
struct ClusterRing {
  uint32_t stages;
  uint32_t full;
  uint32_t empty;
  int pass_rows;

  __host__ __device__ static int stage_bytes(int pass_rows) {
    return (pass_rows + kRows) * ClusterStep<kRows>::kRowBytes;
  }
  __device__ uint32_t weights(int stage) const { return stages + stage * stage_bytes(pass_rows); }
  __device__ uint32_t input(int stage) const {
    return weights(stage) + pass_rows * ClusterStep<kRows>::kRowBytes;
  }
  __device__ void init(int num_stages) const {
#pragma unroll 1
    for (int stage = 0; stage < num_stages; ++stage) {
      init_barrier(full + stage * 8, 1);
      init_barrier(empty + stage * 8, ClusterTraits::kThreads / 32);
    }
    publish_shared_writes();
  }
};

// The feeding thread's work.
template <int kRows>
class ClusterFeed {
 public:
  using Step = ClusterStep<kRows>;

  __device__ ClusterFeed(const ClusterSetup& setup, const ClusterPart& part,
                         const ClusterRing<kRows>& ring)
      : setup_(setup), part_(part), ring_(ring) {}

  // Weights are asked for before the wait for the kernel before this one, as many as there is room
  // for; then the input, which that kernel may have written.
  __device__ void run() const {
    const int all = part_.passes * part_.steps;
    const int early = min(setup_.stages, all);
    Place weights, input;
#pragma unroll 1
    for (int i = 0; i < early; ++i) copy_weights(weights);
    prefetch_map(&setup_.input);
    wait_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < early; ++i) copy_input(input);
#pragma unroll 1
    for (int i = early; i < all; ++i) {
      wait_barrier(ring_.empty + weights.ring.stage * 8, weights.ring.parity ^ 1);
      copy_weights(weights);
      copy_input(input);
    }
  }

 private:
  struct Place {
    RingPlace ring;
    int pass = 0;
    int step = 0;  // of the part
  };

  __device__ void advance(Place& place) const {
    place.ring.advance(setup_.stages);
    if (++place.step < part_.steps) return;
    place.step = 0;
    ++place.pass;
  }

  __device__ void copy_weights(Place& place) const {
    const uint32_t full = ring_.full + place.ring.stage * 8;
    arrive_expecting(full, ClusterRing<kRows>::stage_bytes(setup_.pass_rows()));
    copy_box_once(ring_.weights(place.ring.stage), &setup_.weight, 0, 0,
                  part_.first_slab + place.step * Step::kSlabs, 0,
                  part_.first_group + place.pass * setup_.pass_groups, full);
    advance(place);
  }

  __device__ void copy_input(Place& place) const {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2,%3,%4}], [%5];\n" ::"r"(ring_.input(place.ring.stage)),
        "l"(&setup_.input), "r"(0), "r"(0), "r"(part_.first_slab + place.step * Step::kSlabs),
        "r"(ring_.full + place.ring.stage * 8)
        : "memory");
    advance(place);
  }

  const ClusterSetup& setup_;
  const ClusterPart& part_;
  const ClusterRing<kRows>& ring_;
};

}  // namespace pagedkv::cuda
