// How a wide product is cut into blocks, and how the weights and the input of each stream into its
// ring.
#pragma once

#include "cuda/device/mma.cuh"
#include "cuda/device/read_once.cuh"
#include "cuda/linear/weight_stream.cuh"
#include "cuda/linear/wide_products.cuh"

namespace pagedkv::cuda {

struct WideTraits {
  static constexpr int kSlab = 64;  // elements of a row in a stage
  static constexpr int kRowBytes = kSlab * 2;
  static constexpr int kTileRows = 64;              // of a product instruction
  static constexpr int kColumns = 112;              // of out, of a block
  static constexpr int kWeightRows = 2 * kColumns;  // gates, then the others
  static constexpr int kTiles = kColumns / 8;
  static constexpr int kSharedBytes = 225 * 1024;  // one block a multiprocessor
};

// kWarpgroups that multiply kChains times 64 rows each.
template <int kWarpgroups_, int kChains_>
struct WideShape : WideTraits {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kChains = kChains_;
  static constexpr int kRows = kWarpgroups * kChains * kTileRows;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kWarps = kWarpgroups * 4;
  // Sums of two chains leave a warpgroup that feeds no registers: a multiplying thread does.
  static constexpr bool kFeedsItself = kChains > 1;
  static constexpr int kAllThreads = kThreads + (kFeedsItself ? 0 : 128);
  // A multiplying thread's, and a feeding one's. An instruction must fit the registers before they
  // are shared out so: beside three warpgroups one of half the columns does.
  static constexpr int kRegisters = 160;
  static constexpr int kFeedRegisters = 32;
  static constexpr int kProducts = kFeedsItself ? 1 : 2;
  static constexpr int kProductTiles = 2 * kTiles / kProducts;
  static constexpr int kInputBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kInputBytes + kWeightRows * kRowBytes;
  static constexpr int kStages = kSharedBytes / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
};

// What the host works out for a launch.
struct WideSetup {
  CUtensorMap weight;  // (element, row of a half, half), boxes of a block's rows of both halves
  CUtensorMap input;   // (element, token), boxes of all rows
  int steps;           // of kSlab elements
};

// Shared addresses: stages, and their barriers (full: the copies are there; empty: the warps that
// multiply have read them).
struct WideRing {
  uint32_t stages;
  uint32_t full;
  uint32_t empty;
};

// The feeding thread's work: weights from before the wait for the kernel before this one.
template <class Shape>
class WideFeed {
 public:
  __device__ WideFeed(const WideSetup& setup, const WideRing& ring) : setup_(setup), ring_(ring) {}

  __device__ void run() const {
    begin();
    RingPlace place;
#pragma unroll 1
    for (int step = Shape::kStages; step < setup_.steps; ++step) {
      copy(step, place);
      place.advance(Shape::kStages);
    }
  }

  // What there is room for at first.
  __device__ void begin() const {
    const int early = min(Shape::kStages, setup_.steps);
#pragma unroll 1
    for (int step = 0; step < early; ++step) copy_weights(step, step);
    wait_previous_kernel();
#pragma unroll 1
    for (int step = 0; step < early; ++step) copy_input(step, step);
  }

  // The step that follows the last one in this place, once that is not needed any more.
  __device__ void copy(int step, const RingPlace& place) const {
    wait_barrier(ring_.empty + place.stage * 8, place.parity);
    copy_weights(step, place.stage);
    copy_input(step, place.stage);
  }

 private:
  __device__ void copy_weights(int step, int stage) const {
    const uint32_t full = ring_.full + stage * 8;
    arrive_expecting(full, Shape::kStageBytes);
    copy_box_once(ring_.stages + stage * Shape::kStageBytes + Shape::kInputBytes, &setup_.weight,
                  step * Shape::kSlab, static_cast<int>(blockIdx.x) * Shape::kColumns, 0, full);
  }

  __device__ void copy_input(int step, int stage) const {
    copy_box(ring_.stages + stage * Shape::kStageBytes, &setup_.input, step * Shape::kSlab, 0,
             ring_.full + stage * 8);
  }

  const WideSetup& setup_;
  const WideRing& ring_;
};

}  // namespace pagedkv::cuda
