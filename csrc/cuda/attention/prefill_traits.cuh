// The layout of the wgmma prefill kernel: who does what, and what lies where in shared memory.
#pragma once

#include "cuda/attention/prefill_tiles.cuh"

namespace pagedkv::cuda {

template <int kHeadDim>
struct WgmmaTraits {
  static constexpr int kDim = kHeadDim;  // head_dim, padded
  static constexpr int kSlabs = kDim / 64;
  static constexpr int kWarpgroups = 2;  // that multiply
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kKeys = 128;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kKeyStages = 3;  // released later than values, needed earlier
  static constexpr int kValueStages = 2;
  static constexpr int kQueryStages = 2;
  static constexpr int kSlabBytes = kKeys * 128;  // keys of 64 elements
  static constexpr int kTileBytes = kSlabs * kSlabBytes;
  static constexpr int kQuerySlabBytes = kRows * 128;
  static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;
  static constexpr int kQueryLoaders = 64;
  // Shared memory: queries, keys, values; 1024 to align.
  static constexpr int kSharedBytes =
      kQueryStages * kQueryBytes + (kKeyStages + kValueStages) * kTileBytes + 1024;
};

template <class Traits>
struct PrefillBarriers {
  PipelineBarriers<Traits::kQueryStages> queries;
  PipelineBarriers<Traits::kKeyStages> keys;
  PipelineBarriers<Traits::kValueStages> values;
};

}  // namespace pagedkv::cuda
