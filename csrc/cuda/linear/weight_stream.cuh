// The stream of a block's weights from memory into its ring, fed by one warp.
//
// A tile is 8 rows of the weight matrix, which are 8 columns of the result; a slab is 64 elements
// of its rows, 128 bytes each, swizzled in shared memory as wgmma.cuh says. A block walks its tiles
// kTiles at a time (a pass), and a pass kWarps slabs at a time (a step, which has a stage of the
// ring): warp w multiplies slabs w, w + kWarps, ... of the pass's tiles.
#pragma once

#include "cuda/device/mma.cuh"
#include "cuda/device/read_once.cuh"
#include "cuda/device/wgmma.cuh"
#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

struct StreamTraits {
  static constexpr int kWarps = 8;  // that multiply
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kAllThreads = kThreads + 32;  // and the warp that feeds
  // Threads that there would be registers for: 128 each, so that an attention block finds some too.
  static constexpr int kRegisterThreads = 512;
  static constexpr int kRows = 8;  // of the input, at most
  static constexpr int kTiles = 4;
  static constexpr int kTileRows = 8;
  static constexpr int kSlab = 64;
  static constexpr int kSlabBytes = kTileRows * kSlab * 2;
  static constexpr int kTileBytes = kWarps * kSlabBytes;  // of a step
  static constexpr int kStageBytes = kTiles * kTileBytes;
  static constexpr int kColumns = kTiles * kTileRows;  // of y, in a pass
  static constexpr int kSumsPitch = kColumns + 8;      // without bank conflicts
  static constexpr int kMaxStages = 6;
  static constexpr int kParts = 8;  // of a row, when it is normed
};

// What the host works out for a launch.
struct StreamSetup {
  CUtensorMap weight;  // (element of a slab, row, slab), in boxes of a tile's step
  int units;           // of 8 columns of out: one tile, or two for kSiluAndMul
  int slabs;           // of a row of the weights
  int steps;           // of a pass
  int stages;          // of the ring
  int chunk;           // steps of a pass for which the input is in shared memory at a time
  int chunks;          // of a pass; if there are several, two are there, by turns
  int input_pitch;     // bytes between rows of the input there

  __host__ __device__ bool whole() const { return chunks == 1; }
};

// The block's tiles, pass by pass.
struct StreamPasses {
  int begin;  // units
  int end;
  int tiles_of_unit;
  int units;  // of the whole matrix

  __device__ StreamPasses(const StreamSetup& setup, bool gated)
      : begin(static_cast<int>(static_cast<int64_t>(setup.units) * blockIdx.x / gridDim.x)),
        end(static_cast<int>(static_cast<int64_t>(setup.units) * (blockIdx.x + 1) / gridDim.x)),
        tiles_of_unit(gated ? 2 : 1),
        units(setup.units) {}
  __device__ int units_of_pass() const { return StreamTraits::kTiles / tiles_of_unit; }
  __device__ int count() const { return (end - begin + units_of_pass() - 1) / units_of_pass(); }
  __device__ int first_unit(int pass) const { return begin + pass * units_of_pass(); }
  __device__ int num_units(int pass) const { return min(units_of_pass(), end - first_unit(pass)); }
  __device__ int num_tiles(int pass) const { return num_units(pass) * tiles_of_unit; }
  // The gate's tile of a unit stands before the other one, which is in the lower half.
  __device__ int first_row(int pass, int tile) const {
    const int unit = first_unit(pass) + tile / tiles_of_unit;
    return (unit + tile % tiles_of_unit * units) * StreamTraits::kTileRows;
  }
};

// Position in the ring, and which turn it is.
struct RingPlace {
  int stage = 0;
  int parity = 0;

  __device__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// The ring's shared addresses. A stage is full when all its boxes are there, empty when all warps
// that multiply have read theirs.
struct WeightRing {
  uint32_t stages;
  uint32_t full;   // barriers, one a stage
  uint32_t empty;  // the same

  __device__ void init(int num_stages) const {
#pragma unroll 1
    for (int stage = 0; stage < num_stages; ++stage) {
      init_barrier(full + stage * 8, 1);
      init_barrier(empty + stage * 8, StreamTraits::kWarps);
    }
    publish_shared_writes();
  }
};

// Boxes of a pass and a step, a lane each tile's. One instruction for all slabs of a tile: a warp
// issues few in a microsecond. Slabs behind the end of a row read as 0.
class StreamBox {
 public:
  __device__ StreamBox(const StreamSetup& setup, const StreamPasses& passes, int tile)
      : setup_(setup), passes_(passes), tile_(tile) {}

  __device__ bool exists(int pass) const { return tile_ < passes_.num_tiles(pass); }
  __device__ void copy(int pass, int step, uint32_t stage, uint32_t barrier) const {
    copy_box_once(stage + tile_ * StreamTraits::kTileBytes, &setup_.weight, 0,
                  passes_.first_row(pass, tile_), step * StreamTraits::kWarps, barrier);
  }

 private:
  const StreamSetup& setup_;
  const StreamPasses& passes_;
  int tile_;
};

// The feeding warp's work: all steps of all passes, as the ring empties.
__device__ inline void feed_ring(const StreamSetup& setup, const StreamPasses& passes,
                                 const WeightRing& ring, int lane) {
  const StreamBox box(setup, passes, lane);
  RingPlace place;
  int number = 0;  // of steps so far
#pragma unroll 1
  for (int pass = 0; pass < passes.count(); ++pass) {
    const int bytes = passes.num_tiles(pass) * StreamTraits::kTileBytes;
#pragma unroll 1
    for (int step = 0; step < setup.steps; ++step, ++number) {
      if (number >= setup.stages) wait_barrier(ring.empty + place.stage * 8, place.parity ^ 1);
      const uint32_t full = ring.full + place.stage * 8;
      if (lane == 0) arrive_expecting(full, bytes);
      __syncwarp();
      if (box.exists(pass)) {
        box.copy(pass, step, ring.stages + place.stage * StreamTraits::kStageBytes, full);
      }
      place.advance(setup.stages);
    }
  }
}

}  // namespace pagedkv::cuda
