// The product of many rows with a weight matrix, stored, added or with the gate of gate and up
// weights behind it: out = silu(x Wg^T) * (x Wu^T), without the matrix [T, 2 F] in memory.
//
// Grid: clusters of kBlocks blocks, as many as the GPU takes at once but not more than tiles, each
// of which walks tiles. A tile of a block is kTileRows rows of x times kWeightRows of the weights;
// with a gate half of them are Wg's and half Wu's, so that gate and up of an element of out are
// sums of one thread. The blocks of a cluster have neighbouring rows and the same columns: each
// copies a part of the weights into all of them. Must multiply 2 T K N.
//
// One warp copies slabs of kSlab of K into a ring; two warpgroups multiply, kTileRows / 2 rows
// each. Their sums are rounded and held, and what is done with them is done beside the next tile's
// products.
//
// A stage of the ring is full when its bytes have come, and empty when each multiplying warp of
// each block of the cluster has read its own: copies go into all of them.
#pragma once

#include "cuda/device/mma.cuh"
#include "cuda/linear/cluster_barrier.cuh"
#include "cuda/linear/tile_instructions.cuh"
#include "pagedkv/kernels/linear_params.h"

namespace pagedkv::cuda {

struct TiledTraits {
  static constexpr int kTileRows = 128;
  static constexpr int kWeightRows = 256;
  static constexpr int kSlab = 64;  // elements of K in 128 bytes
  static constexpr int kSlabRowBytes = kSlab * 2;
  static constexpr int kWarpgroups = 2;
  static constexpr int kWarps = kWarpgroups * 4;  // that multiply
  static constexpr int kThreads = (kWarps + 4) * 32;
  // Of the warpgroup that copies, and of those that multiply: the registers are all given out.
  static constexpr int kCopyRegisters = 24;
  static constexpr int kProductRegisters = 240;
  static constexpr int kWarpRows = 16;
  static constexpr int kStages = 4;
  static constexpr int kInputBytes = kTileRows * kSlabRowBytes;
  static constexpr int kStageBytes = kInputBytes + kWeightRows * kSlabRowBytes;
  static constexpr int kBoxBytes = kWarpRows * kSlabRowBytes;  // of out, kSlab columns
  static constexpr int kBoxes = 2;                             // of a warp, in use at a time
  static constexpr int kResultBytes = kBoxes * kBoxBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kWarps * kResultBytes + 1024;
};

// Sums are put away in so many parts, beside as many steps of the next tile.
constexpr int kHeldParts = 8;
constexpr int kMinSteps = 1 + kHeldParts;

struct TiledSetup {
  CUtensorMap input;   // (k, row), boxes of kSlab x kTileRows
  CUtensorMap weight;  // (k, row, gate or up), boxes of kSlab x part_rows(kBlocks) x 1; or all rows
  CUtensorMap out;     // (column, row), boxes of kSlab x kWarpRows
  int row_tiles;       // of clusters: kBlocks * kTileRows rows
  int column_tiles;
  int group_rows;  // tiles above each other that are done before the next column: x stays in L2
  int steps;       // slabs of K, at least kMinSteps
};

// Rows of the weights that are copied at a time: by a block of its cluster, or by the only one.
constexpr int part_rows(int blocks) {
  return TiledTraits::kWeightRows / (blocks == 1 ? 2 : blocks);
}

constexpr int tile_columns(LinearEpilogue epilogue) {
  return TiledTraits::kWeightRows / (epilogue == LinearEpilogue::kSiluAndMul ? 2 : 1);
}

struct TilePlace {
  int row;  // of clusters
  int column;
};

// Groups of rows of tiles one after the other, in each all columns, there and back.
__device__ inline TilePlace tile_at(const TiledSetup& setup, int index) {
  const int of_group = setup.group_rows * setup.column_tiles;
  const int group = index / of_group, inside = index - group * of_group;
  const int first = group * setup.group_rows;
  const int rows = min(setup.group_rows, setup.row_tiles - first);
  const int column = inside / rows;
  return {.row = first + inside - column * rows,
          .column = group % 2 == 0 ? column : setup.column_tiles - 1 - column};
}

struct RingStage {
  int stage = 0;
  int parity = 0;

  __device__ void advance() {
    if (++stage == TiledTraits::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Addresses in shared memory.
struct TiledRing {
  uint32_t stages;
  uint32_t full;
  uint32_t empty;
  uint32_t results;

  __device__ uint32_t input(int stage) const { return stages + stage * TiledTraits::kStageBytes; }
  __device__ uint32_t weights(int stage) const { return input(stage) + TiledTraits::kInputBytes; }
};

template <LinearEpilogue kEpilogue, int kBlocks>
__device__ void copy_tiles(const TiledSetup& setup, const TiledRing& ring, int cluster,
                           int clusters, int rank) {
  using Traits = TiledTraits;
  constexpr int kPart = part_rows(kBlocks);
  constexpr int kHalfParts = tile_columns(kEpilogue) / kPart;  // of the gate; or of all
  RingStage place;
  const int tiles = setup.row_tiles * setup.column_tiles;
  for (int index = cluster; index < tiles; index += clusters) {
    const TilePlace tile = tile_at(setup, index);
    const int row = (tile.row * kBlocks + rank) * Traits::kTileRows;
    const int column = tile.column * tile_columns(kEpilogue);
    for (int step = 0; step < setup.steps; ++step) {
      const uint32_t full = ring.full + place.stage * 8;
      wait_barrier(ring.empty + place.stage * 8, place.parity ^ 1);
      arrive_expecting(full, Traits::kStageBytes);
      const int k = step * Traits::kSlab;
      copy_box(ring.input(place.stage), &setup.input, k, row, full);
      const auto copy_part = [&](int part) {
        const uint32_t to = ring.weights(place.stage) + part * kPart * Traits::kSlabRowBytes;
        const int weight_row = column + part % kHalfParts * kPart;
        if constexpr (kBlocks == 1) {
          copy_box(to, &setup.weight, k, weight_row, part / kHalfParts, full);
        } else {
          copy_box_to((1 << kBlocks) - 1, to, &setup.weight, k, weight_row, part / kHalfParts,
                      full);
        }
      };
      copy_part(rank);
      if constexpr (kBlocks == 1) copy_part(1);
      place.advance();
    }
  }
}

// silu(gate) * up of two neighbouring columns.
template <class T>
__device__ uint32_t gated_pair(uint32_t gates, uint32_t ups) {
  const auto unpack = [](uint32_t pair) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    } else {
      return __half22float2(reinterpret_cast<const __half2&>(pair));
    }
  };
  const float2 gate = unpack(gates), up = unpack(ups);
  const auto silu = [](float x) { return x * inverse_fast(1.0f + exp2_fast(x * -1.442695041f)); };
  return pack<T>(silu(gate.x) * up.x, silu(gate.y) * up.y);
}

// What a warp has multiplied, rounded: it goes to out beside the products of the next tile, a part
// at a time.
template <class T, LinearEpilogue kEpilogue>
class HeldSums {
 public:
  __device__ HeldSums(const TiledSetup& setup, uint32_t results, int lane)
      : setup_(setup), results_(results), lane_(lane) {}

  // The sums of the tile whose rows of this warp begin here.
  __device__ void take(const float (&c)[32][4], int row, int column) {
    row_ = row;
    column_ = column;
    write_out<32>([&](int n) {
      held_[n][0] = pack<T>(c[n][0], c[n][1]);
      held_[n][1] = pack<T>(c[n][2], c[n][3]);
    });
  }

  // Into shared memory, swizzled as boxes are; with the last part of a box, from there to out.
  template <int kPart>
  __device__ void put() const {
    constexpr int kColumns = tile_columns(kEpilogue) / kHeldParts;
    constexpr int kBox = kPart * kColumns / TiledTraits::kSlab;
    constexpr int kFirst = kPart * kColumns % TiledTraits::kSlab;  // of its columns
    const uint32_t box = results_ + kBox % TiledTraits::kBoxes * TiledTraits::kBoxBytes;
    if constexpr (kFirst == 0) {
      if (lane_ == 0) wait_stores_read<TiledTraits::kBoxes - 1>();
      __syncwarp();
    }
    write_out<kColumns / 16>([&](int i) {
      const int n = (kPart * kColumns + i * 16) / 8;
      // Lane 8 i + j has row j of matrix i: rows 8 (i % 2) .., columns 8 (i / 2) ..
      const uint32_t d[4] = {element_pair(n, 0), element_pair(n, 1), element_pair(n + 1, 0),
                             element_pair(n + 1, 1)};
      const int row = lane_ % 16, chunk = (kFirst + i * 16) / 8 + lane_ / 16;
      stmatrix_x4(box + row * TiledTraits::kSlabRowBytes + ((chunk ^ row % 8) << 4), d);
    });
    if constexpr (kFirst + kColumns == TiledTraits::kSlab) {
      publish_shared_writes();
      __syncwarp();
      if (lane_ == 0) {
        const int column = column_ + kBox * TiledTraits::kSlab;
        if constexpr (kEpilogue == LinearEpilogue::kAdd) {
          add_box(&setup_.out, column, row_, box);
        } else {
          store_box(&setup_.out, column, row_, box);
        }
        commit_stores();
      }
    }
  }

 private:
  __device__ uint32_t element_pair(int n, int half) const {
    if constexpr (kEpilogue == LinearEpilogue::kSiluAndMul) {
      return gated_pair<T>(held_[n][half], held_[n + tile_columns(kEpilogue) / 8][half]);
    } else {
      return held_[n][half];
    }
  }

  const TiledSetup& setup_;
  uint32_t results_;
  int lane_;
  int row_ = 0;
  int column_ = 0;
  uint32_t held_[32][2];  // columns 8 n .. of the weights' rows: a pair of row lane / 4, and 8 on
};

// body(std::integral_constant<int, i>), i from 0 on.
template <int kTimes, class Body>
__device__ __forceinline__ void write_out_constants(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kTimes>{});
}

template <class T, LinearEpilogue kEpilogue, int kBlocks>
__device__ void multiply_tiles(const TiledSetup& setup, const TiledRing& ring, int cluster,
                               int clusters, int rank) {
  using Traits = TiledTraits;
  using Held = HeldSums<T, kEpilogue>;
  // The same in all lanes, as the compiler then knows: descriptors are made once a warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows_before = warp / 4 * (Traits::kInputBytes / Traits::kWarpgroups);
  // Lane i tells block i.
  const uint32_t empty = kBlocks == 1 ? ring.empty : cluster_address(ring.empty, lane % kBlocks);
  const auto give_back = [&](int stage) {
    if (lane < kBlocks) {
      if constexpr (kBlocks == 1) {
        arrive(empty + stage * 8);
      } else {
        arrive_at_cluster(empty + stage * 8);
      }
    }
  };
  RingStage place;
  float c[32][4];
  const auto multiply = [&](bool add) {
    wait_barrier(ring.full + place.stage * 8, place.parity);
    const TileDescriptor a(ring.input(place.stage) + rows_before, 16);
    const TileDescriptor b(ring.weights(place.stage), 16);
    begin_products();
    write_out<Traits::kSlab / 16>(
        [&](int k) { multiply_rows<T>(c, a.at(k * 32), b.at(k * 32), add || k > 0); });
    commit_products();
  };
  int read = 0;
  // The step before is done; the last one goes on beside the next.
  const auto finish_one_before = [&] {
    wait_products<1>();
    give_back(read);
    read = place.stage;
    place.advance();
  };
  Held held(setup, ring.results + warp * Traits::kResultBytes, lane);
  const int tiles = setup.row_tiles * setup.column_tiles;
  for (int index = cluster; index < tiles; index += clusters) {
    const TilePlace tile = tile_at(setup, index);
    const bool holds = index != cluster;
    multiply(false);
    read = place.stage;
    place.advance();
    write_out_constants<kHeldParts>([&]<int kPart>(std::integral_constant<int, kPart>) {
      if (holds) held.template put<kPart>();
      multiply(true);
      finish_one_before();
    });
#pragma unroll 1
    for (int step = kMinSteps; step < setup.steps; ++step) {
      multiply(true);
      finish_one_before();
    }
    wait_products<0>();
    pin(c);
    give_back(read);
    held.take(c, (tile.row * kBlocks + rank) * Traits::kTileRows + warp * Traits::kWarpRows,
              tile.column * tile_columns(kEpilogue));
  }
  write_out_constants<kHeldParts>(
      [&]<int kPart>(std::integral_constant<int, kPart>) { held.template put<kPart>(); });
  if (lane == 0) wait_stores();
}

template <class T, LinearEpilogue kEpilogue, int kBlocks>
__global__ void __launch_bounds__(TiledTraits::kThreads, 1)
    tiled_linear_kernel(const __grid_constant__ TiledSetup setup) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = TiledTraits;
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t barriers[2 * Traits::kStages];
  const uint32_t stages = (shared_address(dynamic) + 1023) & ~1023u;
  const TiledRing ring{.stages = stages,
                       .full = shared_address(barriers),
                       .empty = shared_address(barriers + Traits::kStages),
                       .results = stages + Traits::kStages * Traits::kStageBytes};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      init_barrier(ring.full + stage * 8, 1);
      init_barrier(ring.empty + stage * 8, Traits::kWarps * kBlocks);
    }
    publish_barriers();
    publish_shared_writes();
  }
  __syncthreads();
  if constexpr (kBlocks > 1) sync_cluster();
  const int rank = kBlocks > 1 ? cluster_rank() : 0;
  const int cluster = static_cast<int>(blockIdx.x) / kBlocks;
  const int clusters = static_cast<int>(gridDim.x) / kBlocks;
  if (threadIdx.x < Traits::kWarps * 32) {
    take_registers<Traits::kProductRegisters>();
    multiply_tiles<T, kEpilogue, kBlocks>(setup, ring, cluster, clusters, rank);
  } else {
    give_registers<Traits::kCopyRegisters>();
    if (threadIdx.x == Traits::kWarps * 32) {
      copy_tiles<kEpilogue, kBlocks>(setup, ring, cluster, clusters, rank);
    }
  }
  // No block ends while others may still tell it that they have read.
  if constexpr (kBlocks > 1) {
    __syncwarp();
    sync_cluster();
  }
#endif
}

}  // namespace pagedkv::cuda
